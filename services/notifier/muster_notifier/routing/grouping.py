"""Pure: decides when each group of alerts is flushed, and turns groups into notifications.

Each receiver has its own groups. A group is flushed `group_wait_s` after its first alert and then
every `group_interval_s` while it exists. Each flush leaves out muted alerts, and `decision` decides
whether to notify. A notification is built only when it can be sent, so that it is up to date:
changes that arrive while another one is in flight, or the receiver is busy, go into the next one.

A group has at most one notification in flight, so a resolution never overtakes the notification of
the firing alert. Only a few notifications to a receiver are in flight (`groups.InflightLimits`);
one that is being retried does not count towards this limit, and is replaced when it is outdated.

A receiver that was notified of an alert is also notified of its end, even if the alert is silenced
by then. A failed notification changes nothing: the next flush decides again, as in Alertmanager.
But a notification that the receiver refuses repeatedly is held back, each time for longer (at most
`groups.HELD_MAX_S`), unless it contains something new or a dead letter of its group is replayed.
Timers survive a restart, because they depend only on when alerts arrived and when each receiver was
last notified.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from muster import codec, matching, vocabulary
from muster_notifier.routing import alert_index, decision, groups, muting, notifications, routes


@dataclass(frozen=True, slots=True)
class ClockRead:
    """The current time of day was read."""

    at: datetime


@dataclass(frozen=True, slots=True)
class Delivered:
    """The receiver accepted a notification, and the ledger has recorded it."""

    notification: notifications.Notification


@dataclass(frozen=True, slots=True)
class Postponed:
    """A notification could not be sent now; it will be retried."""

    notification: notifications.Notification


@dataclass(frozen=True, slots=True)
class Failed:
    """The receiver refused a notification, or failed for too long; it is now a dead letter."""

    notification: notifications.Notification


@dataclass(frozen=True, slots=True)
class Requested:
    """A dead letter is replayed: its group must be flushed now.

    Its alerts still fire, or another notification about its group is queued.
    """

    notification: notifications.Notification


Outcome = Delivered | Postponed | Failed | Requested
Input = codec.CloudEvent | alert_index.OwnedAlert | muting.SilenceChanged | ClockRead | Outcome


class Grouping:
    """A state machine that turns alerts and the results of notifications into notifications."""

    def __init__(
        self,
        receivers: Mapping[str, bool],
        *,
        root: routes.Route,
        owners: routes.Route | None = None,
        ungrouped: Collection[str] = (),
        acknowledging: Collection[str] = (),
        muted_by: muting.Muting,
        at: datetime,
        now: float,
    ) -> None:
        """Create a machine without groups; `at` is the time of day at `now`.

        `receivers` maps each name to its `send_resolved`. `owners` is the route to the owners of
        workloads. Receivers in `ungrouped` get each alert separately; those in `acknowledging` are
        also notified when a whole group is silenced.
        """
        self._receivers = dict(receivers)
        self._builder = decision.NotificationBuilder(
            receivers, acknowledging=acknowledging, muted_by=muted_by
        )
        self._index = alert_index.AlertIndex(root, owners, ungrouped)
        self._limits = groups.InflightLimits(receivers)
        self._muting = muted_by
        self._clock = groups.WallClock(at, now)
        self._groups: dict[groups.Key, groups.Group] = {}
        self._timers = groups.Timers(self._groups.get)
        self._restored = groups.RestoredGroups()

    def restore(
        self,
        entries: Iterable[notifications.LedgerEntry],
        pending: Iterable[notifications.Notification],
        alerts: Iterable[codec.CloudEvent | alert_index.OwnedAlert],
        *,
        now: float,
    ) -> None:
        """Restore the state from the ledger, the outbox and the current alerts.

        For `decision`, a ledger entry without firing alerts is equivalent to no entry (row 1).
        """
        for entry in entries:
            key = entry.receiver, entry.group
            if not entry.firing:
                ended_at = min(now, self._clock.monotonic(entry.at, now))
                self._restored.end(key, entry.id, ended_at)
            elif entry.receiver in self._receivers:
                notified = groups.Notified(
                    firing=frozenset(entry.firing),
                    resolved=frozenset(entry.resolved),
                    # if the clock was set back, the group must not wait longer
                    at=min(now, self._clock.monotonic(entry.at, now)),
                    id=entry.id,
                    is_acknowledged=entry.reason is vocabulary.NotificationReason.ACKNOWLEDGED,
                    aspects=entry.aspects,
                )
                self._restored.restore(key, notified)
        for notification in pending:
            self._restore_in_flight(notification, now)
        for alert in alerts:
            self._on_alert(alert, now, is_new=False)

    def receive(self, event: Input, now: float) -> Sequence[notifications.Notification]:
        """Process an alert, verdict, silence, clock reading or result; return new notifications."""
        match event:
            case alert_index.OwnedAlert() | codec.CloudEvent(data=vocabulary.AlertChanged()):
                self._on_alert(event, now, is_new=True)
            case codec.CloudEvent(data=vocabulary.VerdictChanged() as verdict):
                self._muting.observe_verdict(verdict)
            case codec.CloudEvent():
                raise AssertionError(f"{event.type} is not an alert")
            case muting.SilenceChanged():
                self._muting.observe_silence(event)
            case ClockRead(at):
                self._clock.set(at, now)
            case Delivered(notification):
                return self._on_delivered(notification, now)
            case Postponed(notification):
                return self._on_postponed(notification, now)
            case Failed(notification):
                return self._on_failed(notification, now)
            case Requested(notification):
                return self._on_requested(notification, now)
        return ()

    def tick(self, now: float) -> Sequence[notifications.Notification]:
        """Flush every group that is due; return the notifications to send."""
        out: list[notifications.Notification] = []
        while (group := self._timers.pop(now)) is not None:
            self._timers.set(group, now + group.route.timing.group_interval_s)
            out += self._enqueue(group, now)
            out += self._notify_waiting(group.key[0], now)
        return out

    def next_deadline(self) -> float | None:
        """Return the time at which the next group must be flushed; None if there are no groups."""
        return self._timers.next()

    def oldest_waiting_s(self, receiver: str, now: float) -> float:
        """Return the age in seconds of a receiver's oldest undelivered notification; 0 if none."""
        since = self._limits.waiting_since(receiver)
        since += [
            self._clock.monotonic(group.in_flight.at, now)
            for (name, _), group in self._groups.items()
            if name == receiver and group.in_flight is not None
        ]
        return max((now - at for at in since), default=0.0)

    def firing(self, fingerprints: Iterable[str]) -> frozenset[str]:
        """Return the fingerprints of the firing alerts among `fingerprints`."""
        return self._index.firing(fingerprints)

    def view(self, now: float) -> list[groups.View]:
        """Return all groups as `/state` shows them."""
        return [group.view(now) for group in self._groups.values()]

    def _on_alert(
        self, received: codec.CloudEvent | alert_index.OwnedAlert, now: float, *, is_new: bool
    ) -> None:
        """Put an alert into its groups, and resolve it in groups that it has left."""
        placements = self._index.update(received)
        if placements is None:
            return
        event = received.event if isinstance(received, alert_index.OwnedAlert) else received
        assert isinstance(event.data, vocabulary.AlertChanged), "only alerts are indexed"
        self._muting.observe_alert(event.data, matching.labels_of(event.data))
        came_at = now if is_new else min(now, self._clock.monotonic(event.time, now))
        for placement in (*placements, *self._resolved_elsewhere(event.data, placements)):
            self._add(placement, now=now, came_at=came_at, is_new=is_new)

    def _resolved_elsewhere(
        self, alert: vocabulary.AlertChanged, present: Sequence[alert_index.Placement]
    ) -> list[alert_index.Placement]:
        """Return a resolved alert's placements in groups whose ledger entry lists it as firing.

        Groups in `present` are left out. A firing alert has none.
        """
        if alert.state is vocabulary.AlertState.FIRING:
            return []
        here = {placement.key for placement in present}
        placements: list[alert_index.Placement] = []
        for key in self._restored.notified_of(alert.fingerprint):
            route = self._index.route_of(key[1])
            if key not in here and route is not None:
                was = routes.parse_labels(key[1].removeprefix(f"{route.key}:"))
                placements.append(alert_index.Placement(key, route, alert, was))
        return placements

    def _add(
        self, placement: alert_index.Placement, *, now: float, came_at: float, is_new: bool
    ) -> None:
        key, route, alert = placement.key, placement.route, placement.alert
        group = self._groups.get(key)
        notified = group.notified if group else self._restored.get(key)
        was_notified = notified is not None and alert.fingerprint in notified.firing
        was_notified = was_notified or (
            group is not None and group.was_notified_of(alert.fingerprint)
        )
        is_in_group = group is not None and alert.fingerprint in group.alerts
        fires = alert.state is vocabulary.AlertState.FIRING
        if not fires and not was_notified and not is_in_group:
            return  # nobody was notified of this alert
        timing = route.timing
        if is_new or notified is None:
            due = came_at + timing.group_wait_s
        else:
            due = _flush_after(notified.at, now if fires and was_notified else came_at, timing)
        if group is None:
            group = self._create_group(key, route, placement.labels, notified)
            self._timers.set(group, max(now, due))
        elif not is_new:
            self._timers.set(group, max(now, min(group.flush_at, due)))
        group.alerts[alert.fingerprint] = alert
        if timing.resolve_wait_s is not None and group.notified is not None and not group.firing():
            early = now + timing.resolve_wait_s
            if group.ended_at is not None:
                # an alert that comes and goes must not be sent more often than other changes
                early = max(early, group.ended_at + timing.group_interval_s)
            self._timers.set(group, min(group.flush_at, early))

    def _restore_in_flight(self, notification: notifications.Notification, now: float) -> None:
        """Record that a notification is in the outbox; its result will be reported."""
        route = self._index.route_of(notification.group)
        key = notification.receiver, notification.group
        if route is None or key[0] not in self._receivers or key in self._groups:
            return
        group = self._create_group(key, route, notification.labels, self._restored.get(key))
        group.in_flight = notification
        group.is_overdue = True
        self._limits.begin(key[0])
        decided_at = min(now, self._clock.monotonic(notification.at, now))
        self._timers.set(group, max(now, _flush_after(decided_at, now, route.timing)))

    def _create_group(
        self,
        key: groups.Key,
        route: routes.Route,
        labels: Mapping[str, str],
        notified: groups.Notified | None,
    ) -> groups.Group:
        last_id, ended_at = self._restored.last_id_of(key), self._restored.ended_at(key)
        self._restored.drop(key)
        group = groups.Group(
            key=key,
            route=route,
            labels=labels,
            flush_at=math.inf,
            notified=notified,
            last_id=last_id,
            ended_at=ended_at,
        )
        self._groups[key] = group
        return group

    def _on_delivered(
        self, notification: notifications.Notification, now: float
    ) -> Sequence[notifications.Notification]:
        group = self._groups.get((notification.receiver, notification.group))
        if group is None:
            return ()  # the route is no longer configured
        group.record_delivery(notification, at=self._clock.monotonic(notification.at, now))
        return self._on_ended(notification, now)

    def _on_failed(
        self, notification: notifications.Notification, now: float
    ) -> Sequence[notifications.Notification]:
        group = self._groups.get((notification.receiver, notification.group))
        if group is not None and _is_same(group.in_flight, notification):
            group.record_failure(notification, now)
        return self._on_ended(notification, now)

    def _on_postponed(
        self, notification: notifications.Notification, now: float
    ) -> Sequence[notifications.Notification]:
        group = self._groups.get((notification.receiver, notification.group))
        if group is None or not _is_same(group.in_flight, notification):
            return ()
        if not group.is_postponed:
            group.is_postponed = True
            self._limits.postpone(notification.receiver)
        out = self._replace(group, now) if group.is_overdue else []
        return [*out, *self._notify_waiting(notification.receiver, now)]

    def _on_requested(
        self, notification: notifications.Notification, now: float
    ) -> Sequence[notifications.Notification]:
        group = self._groups.get((notification.receiver, notification.group))
        if group is None:
            return ()  # the route is no longer configured
        group.held_until = now
        out = self._enqueue(group, now)
        return [*out, *self._notify_waiting(notification.receiver, now)]

    def _on_ended(
        self, notification: notifications.Notification, now: float
    ) -> Sequence[notifications.Notification]:
        group = self._groups.get((notification.receiver, notification.group))
        if group is None or not _is_same(group.in_flight, notification):
            return ()  # another notification has replaced it
        group.in_flight = None
        self._limits.end(notification.receiver, was_postponed=group.is_postponed)
        group.is_postponed = False
        out: list[notifications.Notification] = []
        if group.is_overdue:
            group.is_overdue = False
            out += self._enqueue(group, now)
        self._forget_if_empty(group)
        return [*out, *self._notify_waiting(notification.receiver, now)]

    def _enqueue(self, group: groups.Group, now: float) -> list[notifications.Notification]:
        """Queue a flushed group, or mark it as overdue if a notification about it is in flight.

        If that notification is being retried, return its replacement, if any.
        """
        if group.in_flight is None:
            self._limits.enqueue(group.key, now)
            return []
        group.is_overdue = True
        return self._replace(group, now) if group.is_postponed else []

    def _replace(self, group: groups.Group, now: float) -> list[notifications.Notification]:
        """Replace a group's notification if it is outdated; return the new one, if any."""
        old = group.in_flight
        assert old is not None, "only a notification in flight is replaced"
        new = self._builder.build(group, at=self._clock.at(now), now=now)
        old_ids = old.firing_ids, old.resolved_ids
        if new is None or (new.firing_ids, new.resolved_ids) == old_ids:
            return []
        group.in_flight = new
        return [new]

    def _notify_waiting(self, receiver: str, now: float) -> list[notifications.Notification]:
        out: list[notifications.Notification] = []
        while (key := self._limits.next(receiver)) is not None:
            group = self._groups.get(key)
            if group is None:
                continue
            notification = self._builder.build(group, at=self._clock.at(now), now=now)
            if notification is None or group.is_held(notification, now):
                self._forget_if_empty(group)
                continue
            group.in_flight = notification
            self._limits.begin(receiver)
            out.append(notification)
        return out

    def _forget_if_empty(self, group: groups.Group) -> None:
        if group.alerts or group.in_flight is not None or group.key not in self._groups:
            return
        del self._groups[group.key]
        if group.notified is not None:
            self._restored.put(group.key, group.notified)
        elif group.last_id:
            self._restored.end(group.key, group.last_id, group.ended_at)


def _flush_after(flushed_at: float, came_at: float, timing: routes.Timing) -> float:
    """Return the time of the next flush after `came_at`; the last one was at `flushed_at`."""
    interval_s = timing.group_interval_s
    return flushed_at + interval_s * max(1, math.ceil((came_at - flushed_at) / interval_s))


def _is_same(
    notification: notifications.Notification | None, other: notifications.Notification
) -> bool:
    return notification is not None and notification.id == other.id
