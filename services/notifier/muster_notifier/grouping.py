"""Pure. The notifier's machine: alerts become groups, and groups become notifications.

Each receiver has its own groups, as if it were alone. A group is flushed `group_wait_s` after its
first alert and then every `group_interval_s` while it lives; each flush leaves out what is muted
and asks `decision` what the receiver must hear. A notification is made at the moment it can be
sent, so that it says what is true then: what came while an older one was on its way, or while the
receiver was busy, is told together afterwards. At most one notification of a group is on its way,
so that a resolve never overtakes its trigger, and few of one receiver (`turns`); what waits for a
receiver that is away no longer counts, and is replaced when it is no longer true.

The end of what a receiver was told is told, whatever is silenced by then. A notification that
failed changes nothing: the next flush decides again, as in Alertmanager. Timers survive a restart,
because they follow from when alerts came and when each receiver was last told.
"""

import heapq
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from muster import codec, vocabulary
from muster_notifier import decision, filing, labels, ledger, muting, routes, signals, turns
from muster_notifier import group as groups
from muster_notifier import notification as notifications


class Grouping:
    """Takes alerts and outcomes, gives notifications; see the module."""

    def __init__(
        self,
        receivers: Mapping[str, bool],
        *,
        root: routes.Route,
        owners: routes.Route | None = None,
        acknowledging: Collection[str] = (),
        muted_by: muting.Muting,
        at: datetime,
        now: float,
    ) -> None:
        """`receivers` maps each name to whether it hears of resolved alerts; `at` is `now`.

        `owners` says how what goes to owners of workloads is grouped; its receivers are those that
        they may name. `acknowledging` are those that also hear that somebody has silenced it all.
        """
        self._receivers = dict(receivers)
        self._acknowledging = frozenset(acknowledging)
        self._files = filing.Files(root, owners)
        self._turns = turns.Turns(receivers)
        self._muting = muted_by
        self._wall = at, now
        self._groups: dict[groups.Key, groups.Group] = {}
        self._timers: list[tuple[float, groups.Key]] = []
        self._recalled: dict[groups.Key, decision.Told] = {}

    def restore(
        self,
        entries: Iterable[ledger.Entry],
        pending: Iterable[notifications.Notification],
        alerts: Iterable[codec.CloudEvent | signals.Owned],
        *,
        now: float,
    ) -> None:
        """Take up where an earlier process stopped: the ledger, the outbox, the alerts of today.

        An entry with nothing firing is as none at all (`decision`, rows 1 to 3).
        """
        for entry in entries:
            if entry.firing and entry.receiver in self._receivers:
                self._recalled[entry.receiver, entry.group] = decision.Told(
                    firing=frozenset(entry.firing),
                    resolved=frozenset(entry.resolved),
                    at=self._monotonic(entry.at, now),
                    id=entry.id,
                    is_acknowledged=entry.reason is vocabulary.NotificationReason.ACKNOWLEDGED,
                )
        for notification in pending:
            self._expect(notification, now)
        for alert in alerts:
            self._take(alert, now, is_new=False)

    def receive(self, event: signals.Input, now: float) -> Sequence[notifications.Notification]:
        """Take an alert, what mutes alerts, or what became of a notification."""
        match event:
            case signals.Owned() | codec.CloudEvent(data=vocabulary.AlertChanged()):
                self._take(event, now, is_new=True)
            case codec.CloudEvent(data=vocabulary.VerdictChanged() as verdict):
                self._muting.hear_verdict(verdict)
            case codec.CloudEvent():
                raise AssertionError(f"{event.type} is no alert")
            case muting.SilenceChanged():
                self._muting.hear_silence(event)
            case signals.ClockRead(at):
                self._wall = at, now
            case signals.Delivered(notification):
                return self._on_delivered(notification, now)
            case signals.Postponed(notification):
                return self._on_postponed(notification, now)
            case signals.Failed(notification):
                return self._on_ended(notification, now)
        return ()

    def tick(self, now: float) -> Sequence[notifications.Notification]:
        """Flush every group that is due."""
        out: list[notifications.Notification] = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            _, key = heapq.heappop(self._timers)
            group = self._groups[key]
            self._flush_at(group, now + group.route.timing.group_interval_s)
            out += self._wait(group, now)
            out += self._tell_waiting(key[0], now)
        return out

    def next_deadline(self) -> float | None:
        """Return when the next group is flushed."""
        while self._timers:
            at, key = self._timers[0]
            group = self._groups.get(key)
            if group is not None and group.flush_at == at:
                return at
            heapq.heappop(self._timers)
        return None

    def oldest_waiting_s(self, receiver: str, now: float) -> float:
        """Return for how long the receiver has kept its oldest notification waiting."""
        since = self._turns.since(receiver)
        since += [
            self._monotonic(group.on_its_way.at, now)
            for (name, _), group in self._groups.items()
            if name == receiver and group.on_its_way is not None
        ]
        return max((now - at for at in since), default=0.0)

    def view(self, now: float) -> list[groups.View]:
        """Return every group as it stands."""
        return [group.view(now) for group in self._groups.values()]

    def _take(self, heard: codec.CloudEvent | signals.Owned, now: float, *, is_new: bool) -> None:
        """Let an alert into its groups, and out of those it has left."""
        filed = self._files.take(heard)
        if filed is None:
            return
        event = heard.event if isinstance(heard, signals.Owned) else heard
        assert isinstance(event.data, vocabulary.AlertChanged), "only alerts are filed"
        self._muting.hear_alert(event.data, labels.of(event.data))
        came_at = now if is_new else min(now, self._monotonic(event.time, now))
        for one in filed:
            self._put(one, now=now, came_at=came_at, is_new=is_new)

    def _put(self, filed: filing.Filed, *, now: float, came_at: float, is_new: bool) -> None:
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
            group = self._begin(key, route, labels.chosen(filed.labels, route.group_by), told)
            self._flush_at(group, max(now, due))
        elif not is_new:
            self._flush_at(group, max(now, min(group.flush_at, due)))
        group.alerts[alert.fingerprint] = alert
        if timing.resolve_wait_s is not None and group.told is not None and not group.firing():
            self._flush_at(group, min(group.flush_at, now + timing.resolve_wait_s))

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
        decided_at = self._monotonic(notification.at, now)
        self._flush_at(group, max(now, _flush_after(decided_at, now, route.timing)))

    def _begin(
        self,
        key: groups.Key,
        route: routes.Route,
        chosen: Mapping[str, str],
        told: decision.Told | None,
    ) -> groups.Group:
        self._recalled.pop(key, None)
        group = groups.Group(key=key, route=route, labels=chosen, flush_at=math.inf, told=told)
        self._groups[key] = group
        return group

    def _on_delivered(
        self, notification: notifications.Notification, now: float
    ) -> Sequence[notifications.Notification]:
        group = self._groups.get((notification.receiver, notification.group))
        if group is None:
            return ()  # of a route that is no longer configured
        group.told = None
        if notification.firing_ids:
            group.told = decision.Told(
                firing=frozenset(notification.firing_ids),
                resolved=frozenset(notification.resolved_ids),
                at=self._monotonic(notification.at, now),
                id=notification.id,
                is_acknowledged=notification.reason is vocabulary.NotificationReason.ACKNOWLEDGED,
            )
        for name, began in zip(notification.resolved_ids, notification.episodes, strict=True):
            alert = group.alerts.get(name)
            is_over = alert is not None and alert.state is vocabulary.AlertState.RESOLVED
            if alert is not None and is_over and alert.starts_at == began:
                del group.alerts[name]
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
        new = self._decide(group, now)
        told = old.firing_ids, old.resolved_ids
        if new is None or (new.firing_ids, new.resolved_ids) == told:
            return []
        group.on_its_way = new
        return [new]

    def _tell_waiting(self, receiver: str, now: float) -> list[notifications.Notification]:
        out: list[notifications.Notification] = []
        while (key := self._turns.next(receiver)) is not None:
            group = self._groups.get(key)
            notification = self._decide(group, now) if group is not None else None
            if group is None:
                continue
            if notification is None:
                self._forget_if_empty(group)
                continue
            group.on_its_way = notification
            self._turns.begin(receiver)
            out.append(notification)
        return out

    def _decide(self, group: groups.Group, now: float) -> notifications.Notification | None:
        receiver, name = group.key
        at = self._at(now)
        muted = self._muting.mutes_route(group.route, at)
        if muted is not None:
            group.muted = dict.fromkeys(group.alerts, muted)
            group.forget_resolved(told_too=False)
            return None
        firing, resolved = self._audible(group, at)
        reason = decision.reason_to_notify(
            group.told,
            firing={alert.fingerprint for alert in firing},
            resolved={alert.fingerprint for alert in resolved},
            send_resolved=self._receivers[receiver],
            repeat_interval_s=group.route.timing.repeat_interval_s,
            now=now,
        )
        if not (firing or resolved) and self._is_acknowledged(group):
            reason = vocabulary.NotificationReason.ACKNOWLEDGED
            firing = [alert for alert in group.firing() if group.has_told(alert.fingerprint)]
        if reason is None or not (firing or resolved):
            group.forget_resolved(told_too=group.on_its_way is None)
            return None
        return notifications.notify(
            after=group.told.id if group.told else "",
            receiver=receiver,
            group=name,
            labels=group.labels,
            reason=reason,
            firing=firing,
            resolved=resolved,
            send_resolved=self._receivers[receiver],
            at=at,
        )

    def _audible(
        self, group: groups.Group, at: datetime
    ) -> tuple[list[vocabulary.AlertChanged], list[vocabulary.AlertChanged]]:
        """Return what fires and what is over, without what is muted; that is noted."""
        group.muted = {}
        firing: list[vocabulary.AlertChanged] = []
        resolved: list[vocabulary.AlertChanged] = []
        for alert in list(group.alerts.values()):
            fires = alert.state is vocabulary.AlertState.FIRING
            muted = self._muting.mutes(labels.of(alert), at)
            if muted is None or (not fires and group.has_told(alert.fingerprint)):
                (firing if fires else resolved).append(alert)
            elif fires:
                group.muted[alert.fingerprint] = muted
            else:
                del group.alerts[alert.fingerprint]
        return firing, resolved

    def _is_acknowledged(self, group: groups.Group) -> bool:
        return group.key[0] in self._acknowledging and decision.is_acknowledged_now(
            group.told,
            silenced={name for name, by in group.muted.items() if by.cause in muting.BY_PEOPLE},
        )

    def _forget_if_empty(self, group: groups.Group) -> None:
        if group.alerts or group.on_its_way is not None or group.key not in self._groups:
            return
        del self._groups[group.key]
        if group.told is not None:
            self._recalled[group.key] = group.told

    def _flush_at(self, group: groups.Group, at: float) -> None:
        if group.flush_at != at:
            group.flush_at = at
            heapq.heappush(self._timers, (at, group.key))

    def _at(self, now: float) -> datetime:
        at, then = self._wall
        return at + timedelta(seconds=now - then)

    def _monotonic(self, at: datetime, now: float) -> float:
        return now - (self._at(now) - at).total_seconds()


def _flush_after(told_at: float, came_at: float, timing: routes.Timing) -> float:
    """Return the first flush after `came_at` of a group that was flushed at `told_at`."""
    interval_s = timing.group_interval_s
    return told_at + interval_s * max(1, math.ceil((came_at - told_at) / interval_s))


def _is_same(one: notifications.Notification | None, other: notifications.Notification) -> bool:
    return one is not None and one.id == other.id
