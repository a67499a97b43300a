"""Pure. The notifier's machine: alerts become groups, and groups become notifications.

Each receiver has its own groups, as if it were alone. A group is flushed `group_wait_s` after its
first alert and then every `group_interval_s` while it lives; each flush asks `decision` what the
receiver must hear. A notification is made at the moment it can be sent, so that it says what is
true then: what came while an older one was on its way, or while the receiver was busy, is told
together afterwards. At most one notification of a group is on its way, so that a resolve never
overtakes its trigger, and at most `IN_FLIGHT_MAX` of one receiver.

A notification that failed changes nothing: the next flush decides again, as in Alertmanager.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from muster import codec, vocabulary
from muster_notifier import decision, ledger
from muster_notifier import group as groups
from muster_notifier import notification as notifications

IN_FLIGHT_MAX: Final = 4
"""Notifications of different groups on their way to one receiver: one that is refused for its
content must not hold up the others, and a receiver that comes back must not be stormed."""

_NEWEST_MAX: Final = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Alertmanager's three times."""

    group_wait_s: float
    group_interval_s: float
    repeat_interval_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """A ledger entry and how old it is."""

    entry: ledger.Entry
    age_s: float


@dataclass(frozen=True, slots=True)
class Delivered:
    """The receiver took it, and the ledger says so."""

    notification: notifications.Notification


@dataclass(frozen=True, slots=True)
class Failed:
    """The receiver refused it, or was away for too long."""

    notification: notifications.Notification


Input = codec.CloudEvent | Delivered | Failed


class Grouping:
    """Takes alerts and outcomes, gives notifications; see the module."""

    def __init__(
        self,
        receivers: Mapping[str, bool],
        *,
        group_by: Sequence[str],
        timing: Timing,
    ) -> None:
        """`receivers` maps each name to whether it hears of resolved alerts."""
        self._receivers = dict(receivers)
        self._group_by = tuple(group_by)
        self._timing = timing
        self._groups: dict[groups.Key, groups.Group] = {}
        self._timers: list[tuple[float, groups.Key]] = []
        self._newest: OrderedDict[str, codec.CloudEvent] = OrderedDict()
        self._recalled: dict[groups.Key, decision.Told] = {}
        self._busy: Counter[str] = Counter()
        self._waiting: dict[str, dict[groups.Key, float]] = {name: {} for name in receivers}

    def restore(
        self, entries: Iterable[Recalled], alerts: Iterable[codec.CloudEvent], *, now: float
    ) -> None:
        """Take up where an earlier process stopped: what was told, and the alerts of today.

        Groups are due at once: their time to collect has passed while nobody was here. An entry
        with nothing firing is as none at all (`decision`, rows 1 to 3).
        """
        for recalled in entries:
            entry = recalled.entry
            if entry.firing and entry.receiver in self._receivers:
                self._recalled[entry.receiver, entry.group] = decision.Told(
                    firing=frozenset(entry.firing),
                    resolved=frozenset(entry.resolved),
                    at=now - max(0.0, recalled.age_s),
                    id=entry.id,
                )
        for event in alerts:
            self._take(event, flush_at=now)

    def receive(self, event: Input, now: float) -> Sequence[notifications.Notification]:
        """Take an alert, or what became of a notification."""
        match event:
            case codec.CloudEvent():
                self._take(event, flush_at=now + self._timing.group_wait_s)
                return ()
            case Delivered(notification):
                return self._on_delivered(notification, now)
            case Failed(notification):
                return self._on_ended(notification, now)

    def tick(self, now: float) -> Sequence[notifications.Notification]:
        """Flush every group that is due."""
        out: list[notifications.Notification] = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            _, key = heapq.heappop(self._timers)
            group = self._groups[key]
            group.flush_at = now + self._timing.group_interval_s
            heapq.heappush(self._timers, (group.flush_at, key))
            self._wait(group, now)
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
        since = list(self._waiting[receiver].values())
        since += [
            group.on_its_way.decided_at
            for (name, _), group in self._groups.items()
            if name == receiver and group.on_its_way is not None
        ]
        return max((now - at for at in since), default=0.0)

    def view(self, now: float) -> list[groups.View]:
        """Return every group as it stands."""
        return [group.view(now) for group in self._groups.values()]

    def _take(self, event: codec.CloudEvent, *, flush_at: float) -> None:
        """Let an alert into its groups; a group that is new is flushed at `flush_at`."""
        alert = event.data
        assert isinstance(alert, vocabulary.AlertChanged), f"{event.type} is no alert"
        known = self._newest.get(alert.fingerprint)
        if known is not None and event.precedes(known):
            return
        self._newest[alert.fingerprint] = event
        self._newest.move_to_end(alert.fingerprint)
        if len(self._newest) > _NEWEST_MAX:
            self._newest.popitem(last=False)
        labels = {name: str(getattr(alert, name)) for name in self._group_by}
        name = notifications.name_group(labels)
        for receiver in self._receivers:
            self._take_for((receiver, name), labels, alert, flush_at)

    def _take_for(
        self,
        key: groups.Key,
        labels: Mapping[str, str],
        alert: vocabulary.AlertChanged,
        flush_at: float,
    ) -> None:
        group = self._groups.get(key)
        told = group.told if group else self._recalled.get(key)
        heard = told is not None and alert.fingerprint in told.firing
        seen = group is not None and alert.fingerprint in group.alerts
        if alert.state is vocabulary.AlertState.RESOLVED and not heard and not seen:
            return  # the end of what nobody has heard of is no news
        if group is None:
            self._recalled.pop(key, None)
            group = groups.Group(key=key, labels=labels, flush_at=flush_at, told=told)
            self._groups[key] = group
            heapq.heappush(self._timers, (flush_at, key))
        group.alerts[alert.fingerprint] = alert

    def _on_delivered(
        self, notification: notifications.Notification, now: float
    ) -> Sequence[notifications.Notification]:
        group = self._groups[notification.receiver, notification.group]
        group.told = None
        if notification.firing:
            group.told = decision.Told(
                firing=frozenset(alert.fingerprint for alert in notification.firing),
                resolved=frozenset(alert.fingerprint for alert in notification.resolved),
                at=notification.decided_at,
                id=notification.id,
            )
        for alert in notification.resolved:
            if group.alerts.get(alert.fingerprint) == alert:
                del group.alerts[alert.fingerprint]
        return self._on_ended(notification, now)

    def _on_ended(
        self, notification: notifications.Notification, now: float
    ) -> Sequence[notifications.Notification]:
        group = self._groups[notification.receiver, notification.group]
        assert group.on_its_way is notification, f"{group.key}: an outcome nobody waits for"
        group.on_its_way = None
        self._busy[notification.receiver] -= 1
        if group.is_overdue:
            group.is_overdue = False
            self._wait(group, now)
        self._forget_if_empty(group)
        return self._tell_waiting(notification.receiver, now)

    def _wait(self, group: groups.Group, now: float) -> None:
        """Queue a flushed group; while its last notification is on its way, behind that one."""
        if group.on_its_way is not None:
            group.is_overdue = True
        else:
            self._waiting[group.key[0]].setdefault(group.key, now)

    def _tell_waiting(self, receiver: str, now: float) -> list[notifications.Notification]:
        out: list[notifications.Notification] = []
        waiting = self._waiting[receiver]
        while waiting and self._busy[receiver] < IN_FLIGHT_MAX:
            key = next(iter(waiting))
            del waiting[key]
            notification = self._decide(self._groups[key], now) if key in self._groups else None
            if notification is not None:
                self._busy[receiver] += 1
                out.append(notification)
        return out

    def _decide(self, group: groups.Group, now: float) -> notifications.Notification | None:
        receiver, name = group.key
        firing = group.firing()
        resolved = group.resolved()
        reason = decision.reason_to_notify(
            group.told,
            firing={alert.fingerprint for alert in firing},
            resolved={alert.fingerprint for alert in resolved},
            send_resolved=self._receivers[receiver],
            repeat_interval_s=self._timing.repeat_interval_s,
            now=now,
        )
        if reason is None:
            for alert in resolved:
                del group.alerts[alert.fingerprint]
            self._forget_if_empty(group)
            return None
        group.on_its_way = notifications.Notification(
            id=notifications.identify(
                after=group.told.id if group.told else "",
                receiver=receiver,
                group=name,
                reason=reason,
                firing=firing,
                resolved=resolved,
            ),
            receiver=receiver,
            group=name,
            labels=group.labels,
            reason=reason,
            firing=notifications.most_urgent_first(firing),
            resolved=notifications.most_urgent_first(resolved),
            send_resolved=self._receivers[receiver],
            decided_at=now,
        )
        return group.on_its_way

    def _forget_if_empty(self, group: groups.Group) -> None:
        if group.alerts or group.on_its_way is not None:
            return
        del self._groups[group.key]
        if group.told is not None:
            self._recalled[group.key] = group.told
