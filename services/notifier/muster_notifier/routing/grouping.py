"""Pure: the grouping machine: alerts become groups, and groups become notifications.

Each receiver has its own groups, independent of the others. A group is flushed `group_wait_s` after
its first alert and then every `group_interval_s` while it lives; each flush leaves out what is
muted and lets `decision` decide. A notification is made at the moment it can be sent, so that it is
true then: changes that came while an older one was in flight, or while the receiver was busy, go
into the next. At most one notification of a group is in flight, so that a resolve never overtakes
its trigger, and few of one receiver (`scheduling.InflightLimits`); what waits for a receiver that
does not answer no longer counts, and is replaced when it is no longer true.

A receiver that was notified of an alert is notified of its end, whatever is silenced by then. A
notification that failed changes nothing: the next flush decides again, as in Alertmanager. Timers
survive a restart, because they follow from when alerts came and when each receiver was last
notified.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime

from muster import codec, vocabulary
from muster_notifier.routing import (
    alert_index,
    decision,
    groups,
    inputs,
    ledger,
    muting,
    notifications,
    routes,
    scheduling,
)


class Grouping:
    """Takes alerts and outcomes, gives notifications; see the module."""

    def __init__(
        self,
        receivers: Mapping[str, bool],
        *,
        root: routes.Route,
        owners: routes.Route | None = None,
        apart: Collection[str] = (),
        acknowledging: Collection[str] = (),
        muted_by: muting.Muting,
        at: datetime,
        now: float,
    ) -> None:
        """`receivers` maps each name to whether it hears of resolved alerts; `at` is `now`.

        `owners` says how what goes to owners of workloads is grouped; its receivers are those that
        they may name. Those in `apart` take each alert by itself, those in `acknowledging` also
        hear that somebody has silenced it all.
        """
        self._receivers = dict(receivers)
        self._telling = decision.NotificationBuilder(
            receivers, acknowledging=acknowledging, muted_by=muted_by
        )
        self._files = alert_index.AlertIndex(root, owners, apart)
        self._turns = scheduling.InflightLimits(receivers)
        self._muting = muted_by
        self._clock = scheduling.WallClock(at, now)
        self._groups: dict[groups.Key, groups.Group] = {}
        self._timers = scheduling.Timers(self._groups.get)
        self._recalled = groups.RestoredGroups()

    def restore(
        self,
        entries: Iterable[ledger.Entry],
        pending: Iterable[notifications.Notification],
        alerts: Iterable[codec.CloudEvent | inputs.Owned],
        *,
        now: float,
    ) -> None:
        """Take up where an earlier process stopped: the ledger, the outbox, the alerts of today.

        For an entry with nothing firing `decision` says the same as for none (rows 1 to 3).
        """
        for entry in entries:
            key = entry.receiver, entry.group
            if not entry.firing:
                self._recalled.end(key, entry.id)
            elif entry.receiver in self._receivers:
                told = groups.Told(
                    firing=frozenset(entry.firing),
                    resolved=frozenset(entry.resolved),
                    # a clock that was set back must not make a group wait
                    at=min(now, self._clock.monotonic(entry.at, now)),
                    id=entry.id,
                    is_acknowledged=entry.reason is vocabulary.NotificationReason.ACKNOWLEDGED,
                )
                self._recalled.restore(key, told)
        for notification in pending:
            self._expect(notification, now)
        for alert in alerts:
            self._take(alert, now, is_new=False)

    def receive(self, event: inputs.Input, now: float) -> Sequence[notifications.Notification]:
        """Take an alert, what mutes alerts, or what became of a notification."""
        match event:
            case inputs.Owned() | codec.CloudEvent(data=vocabulary.AlertChanged()):
                self._take(event, now, is_new=True)
            case codec.CloudEvent(data=vocabulary.VerdictChanged() as verdict):
                self._muting.hear_verdict(verdict)
            case codec.CloudEvent():
                raise AssertionError(f"{event.type} is no alert")
            case muting.SilenceChanged():
                self._muting.hear_silence(event)
            case inputs.ClockRead(at):
                self._clock.read(at, now)
            case inputs.Delivered(notification):
                return self._on_delivered(notification, now)
            case inputs.Postponed(notification):
                return self._on_postponed(notification, now)
            case inputs.Failed(notification):
                return self._on_ended(notification, now)
        return ()

    def tick(self, now: float) -> Sequence[notifications.Notification]:
        """Flush every group that is due."""
        out: list[notifications.Notification] = []
        while (group := self._timers.pop(now)) is not None:
            self._timers.set(group, now + group.route.timing.group_interval_s)
            out += self._wait(group, now)
            out += self._tell_waiting(group.key[0], now)
        return out

    def next_deadline(self) -> float | None:
        """Return when the next group is flushed."""
        return self._timers.next()

    def oldest_waiting_s(self, receiver: str, now: float) -> float:
        """Return for how long the receiver has kept its oldest notification waiting."""
        since = self._turns.since(receiver)
        since += [
            self._clock.monotonic(group.on_its_way.at, now)
            for (name, _), group in self._groups.items()
            if name == receiver and group.on_its_way is not None
        ]
        return max((now - at for at in since), default=0.0)

    def firing(self, fingerprints: Iterable[str]) -> frozenset[str]:
        """Return those alerts that fire, of these."""
        return self._files.firing(fingerprints)

    def view(self, now: float) -> list[groups.View]:
        """Return every group as it stands."""
        return [group.view(now) for group in self._groups.values()]

    def _take(self, heard: codec.CloudEvent | inputs.Owned, now: float, *, is_new: bool) -> None:
        """Let an alert into its groups, and out of those it has left."""
        filed = self._files.take(heard)
        if filed is None:
            return
        event = heard.event if isinstance(heard, inputs.Owned) else heard
        assert isinstance(event.data, vocabulary.AlertChanged), "only alerts are filed"
        self._muting.hear_alert(event.data, routes.labels_of(event.data))
        came_at = now if is_new else min(now, self._clock.monotonic(event.time, now))
        for one in (*filed, *self._ended_elsewhere(event.data, filed)):
            self._put(one, now=now, came_at=came_at, is_new=is_new)

    def _ended_elsewhere(
        self, alert: vocabulary.AlertChanged, filed: Sequence[alert_index.Filed]
    ) -> list[alert_index.Filed]:
        """Return where an alert that is over was told of before we began, and would not go now."""
        if alert.state is vocabulary.AlertState.FIRING:
            return []
        here = {one.key for one in filed}
        found: list[alert_index.Filed] = []
        for key in self._recalled.heard_of(alert.fingerprint):
            route = self._files.route_of(key[1])
            if key not in here and route is not None:
                was = routes.parse_labels(key[1].removeprefix(f"{route.key}:"))
                found.append(alert_index.Filed(key, route, alert, was))
        return found

    def _put(self, filed: alert_index.Filed, *, now: float, came_at: float, is_new: bool) -> None:
        key, route, alert = filed.key, filed.route, filed.alert
        group = self._groups.get(key)
        told = group.told if group else self._recalled.get(key)
        heard = told is not None and alert.fingerprint in told.firing
        heard = heard or (group is not None and group.has_told(alert.fingerprint))
        seen = group is not None and alert.fingerprint in group.alerts
        fires = alert.state is vocabulary.AlertState.FIRING
        if not fires and not heard and not seen:
            return  # the end of what nobody has heard of is no news
        timing = route.timing
        if is_new or told is None:
            due = came_at + timing.group_wait_s
        else:
            due = _flush_after(told.at, now if fires and heard else came_at, timing)
        if group is None:
            group = self._begin(key, route, filed.labels, told)
            self._timers.set(group, max(now, due))
        elif not is_new:
            self._timers.set(group, max(now, min(group.flush_at, due)))
        group.alerts[alert.fingerprint] = alert
        if timing.resolve_wait_s is not None and group.told is not None and not group.firing():
            self._timers.set(group, min(group.flush_at, now + timing.resolve_wait_s))

    def _expect(self, notification: notifications.Notification, now: float) -> None:
        """Know that a notification is in the outbox, and that somebody will say what became."""
        route = self._files.route_of(notification.group)
        key = notification.receiver, notification.group
        if route is None or key[0] not in self._receivers or key in self._groups:
            return
        group = self._begin(key, route, notification.labels, self._recalled.get(key))
        group.on_its_way = notification
        group.is_overdue = True
        self._turns.begin(key[0])
        decided_at = min(now, self._clock.monotonic(notification.at, now))
        self._timers.set(group, max(now, _flush_after(decided_at, now, route.timing)))

    def _begin(
        self,
        key: groups.Key,
        route: routes.Route,
        chosen: Mapping[str, str],
        told: groups.Told | None,
    ) -> groups.Group:
        heard = self._recalled.last_heard(key)
        self._recalled.drop(key)
        group = groups.Group(
            key=key, route=route, labels=chosen, flush_at=math.inf, told=told, heard=heard
        )
        self._groups[key] = group
        return group

    def _on_delivered(
        self, notification: notifications.Notification, now: float
    ) -> Sequence[notifications.Notification]:
        group = self._groups.get((notification.receiver, notification.group))
        if group is None:
            return ()  # of a route that is no longer configured
        group.take_delivered(notification, at=self._clock.monotonic(notification.at, now))
        return self._on_ended(notification, now)

    def _on_postponed(
        self, notification: notifications.Notification, now: float
    ) -> Sequence[notifications.Notification]:
        group = self._groups.get((notification.receiver, notification.group))
        if group is None or not _is_same(group.on_its_way, notification):
            return ()
        if not group.is_postponed:
            group.is_postponed = True
            self._turns.postpone(notification.receiver)
        out = self._replace(group, now) if group.is_overdue else []
        return [*out, *self._tell_waiting(notification.receiver, now)]

    def _on_ended(
        self, notification: notifications.Notification, now: float
    ) -> Sequence[notifications.Notification]:
        group = self._groups.get((notification.receiver, notification.group))
        if group is None or not _is_same(group.on_its_way, notification):
            return ()  # another has taken its place
        group.on_its_way = None
        self._turns.end(notification.receiver, was_postponed=group.is_postponed)
        group.is_postponed = False
        out: list[notifications.Notification] = []
        if group.is_overdue:
            group.is_overdue = False
            out += self._wait(group, now)
        self._forget_if_empty(group)
        return [*out, *self._tell_waiting(notification.receiver, now)]

    def _wait(self, group: groups.Group, now: float) -> list[notifications.Notification]:
        """Queue a flushed group; while its last notification is on its way, behind that one."""
        if group.on_its_way is None:
            self._turns.wait(group.key, now)
            return []
        group.is_overdue = True
        return self._replace(group, now) if group.is_postponed else []

    def _replace(self, group: groups.Group, now: float) -> list[notifications.Notification]:
        """Return what is true by now instead of what is tried in vain, if that is no longer."""
        old = group.on_its_way
        assert old is not None, "only what waits is replaced"
        new = self._telling.of(group, at=self._clock.at(now), now=now)
        told = old.firing_ids, old.resolved_ids
        if new is None or (new.firing_ids, new.resolved_ids) == told:
            return []
        group.on_its_way = new
        return [new]

    def _tell_waiting(self, receiver: str, now: float) -> list[notifications.Notification]:
        out: list[notifications.Notification] = []
        while (key := self._turns.next(receiver)) is not None:
            group = self._groups.get(key)
            if group is None:
                continue
            notification = self._telling.of(group, at=self._clock.at(now), now=now)
            if notification is None:
                self._forget_if_empty(group)
                continue
            group.on_its_way = notification
            self._turns.begin(receiver)
            out.append(notification)
        return out

    def _forget_if_empty(self, group: groups.Group) -> None:
        if group.alerts or group.on_its_way is not None or group.key not in self._groups:
            return
        del self._groups[group.key]
        if group.told is not None:
            self._recalled.put(group.key, group.told)
        elif group.heard:
            self._recalled.end(group.key, group.heard)


def _flush_after(told_at: float, came_at: float, timing: routes.Timing) -> float:
    """Return the first flush after `came_at` of a group that was flushed at `told_at`."""
    interval_s = timing.group_interval_s
    return told_at + interval_s * max(1, math.ceil((came_at - told_at) / interval_s))


def _is_same(one: notifications.Notification | None, other: notifications.Notification) -> bool:
    return one is not None and one.id == other.id
