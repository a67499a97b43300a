"""Pure: the state of groups of alerts, when each is flushed, and limits for notifications."""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

import msgspec

from muster import vocabulary
from muster_notifier.routing import muting, notifications, routes

Key = tuple[str, str]
"""The name of a receiver and the name of a group."""
_RESOLVED_MAX: Final = 20_000
IN_FLIGHT_MAX: Final = 8
"""The maximum number of notifications in flight to one receiver.

A receiver that recovers must not be flooded. The notification about a waiting group is built only
when it can be sent.
"""
OUTSTANDING_MAX: Final = 256
"""The maximum number of a receiver's notifications in the outbox; retried ones are included."""
HELD_MAX_S: Final = 900.0
"""The maximum time for which a refused notification is held back, in seconds."""
_REFUSALS_MAX: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Notified:
    """A receiver's last notification about a group; `at` is monotonic seconds.

    `firing` and `resolved` are fingerprints of alerts. `aspects` are the aspects of the firing
    alerts that this or an earlier notification contained. `is_acknowledged` means that this
    notification reported that the whole group was silenced.
    """

    firing: frozenset[str]
    resolved: frozenset[str]
    at: float
    id: str
    is_acknowledged: bool = False
    aspects: notifications.Aspects = field(default_factory=dict)


class View(msgspec.Struct, frozen=True, kw_only=True):
    """One group as `/state` shows it; alerts are identified by their fingerprints."""

    receiver: str
    group: str
    firing: tuple[str, ...]
    resolved: tuple[str, ...]
    notified_firing: tuple[str, ...] = msgspec.field(name="told_firing")
    muted: dict[str, str]
    in_flight: vocabulary.NotificationReason | None = msgspec.field(name="on_its_way")
    next_flush_s: float


@dataclass(slots=True, kw_only=True)
class Group:
    """The alerts of a group, its notification in flight, and its last delivered notification.

    A resolved alert stays until the receiver has been notified of it, or need not be notified.
    `is_overdue` means that a flush was due while a notification was in flight. `is_postponed` means
    that the notification in flight is being retried. `muted` lists the alerts that the last flush
    left out, each with the reason.
    """

    key: Key
    route: routes.Route
    labels: Mapping[str, str]
    flush_at: float
    notified: Notified | None
    last_id: str
    """The id of the last delivered notification, even without firing alerts; empty if unknown."""
    ended_at: float | None = None
    """When the last notification without firing alerts was created; None if unknown."""
    alerts: dict[str, vocabulary.AlertChanged] = field(default_factory=dict)
    in_flight: notifications.Notification | None = None
    is_overdue: bool = False
    is_postponed: bool = False
    muted: dict[str, muting.Muted] = field(default_factory=dict)
    refusals: int = 0
    """How many notifications have failed since one was last delivered, up to `_REFUSALS_MAX`."""
    held_until: float = -math.inf
    """Until this time, a notification is sent only if it has parts that the refused one lacked."""
    _refused: set[str] = field(default_factory=set)

    def firing(self) -> list[vocabulary.AlertChanged]:
        """Return the firing alerts."""
        return self._in_state(vocabulary.AlertState.FIRING)

    def resolved(self) -> list[vocabulary.AlertChanged]:
        """Return the resolved alerts."""
        return self._in_state(vocabulary.AlertState.RESOLVED)

    def was_notified_of(self, fingerprint: str) -> bool:
        """Return whether the notification last delivered or in flight lists an alert as firing."""
        if self.in_flight is not None and fingerprint in self.in_flight.firing_ids:
            return True
        return self.notified is not None and fingerprint in self.notified.firing

    def record_delivery(self, notification: notifications.Notification, *, at: float) -> None:
        """Record a delivered notification; drop its resolved alerts that have not fired again."""
        self.notified = None
        self.refusals, self.held_until, self._refused = 0, -math.inf, set()
        self.last_id = notification.id
        if not notification.firing_ids:
            self.ended_at = at
        else:
            self.notified = Notified(
                firing=frozenset(notification.firing_ids),
                resolved=frozenset(notification.resolved_ids),
                at=at,
                id=notification.id,
                is_acknowledged=notification.reason is vocabulary.NotificationReason.ACKNOWLEDGED,
                aspects=notification.aspects,
            )
        for name, began in zip(notification.resolved_ids, notification.episodes, strict=True):
            alert = self.alerts.get(name)
            is_resolved = alert is not None and alert.state is vocabulary.AlertState.RESOLVED
            if alert is not None and is_resolved and alert.starts_at == began:
                del self.alerts[name]

    def record_failure(self, notification: notifications.Notification, now: float) -> None:
        """Record that a notification failed; hold it back, each time about four times longer.

        The first failure holds nothing back, because the state may change until the next flush.
        """
        self.refusals = min(self.refusals + 1, _REFUSALS_MAX)
        intervals = 4 ** (self.refusals - 1) - 1
        self.held_until = now + min(HELD_MAX_S, intervals * self.route.timing.group_interval_s)
        self._refused = self._news(notification)

    def is_held(self, notification: notifications.Notification, now: float) -> bool:
        """Return whether a notification is held back, because the refused one had all its parts."""
        return now < self.held_until and self._news(notification) <= self._refused

    def _news(self, notification: notifications.Notification) -> set[str]:
        """Return the parts of a notification as texts.

        These are the firing alerts, their start times and aspects, and the resolved alerts that the
        last delivered notification lists as firing.
        """
        known = self.notified.firing if self.notified else frozenset()
        news = {f"firing {name}" for name in notification.firing_ids}
        news |= {f"since {a.fingerprint} {a.starts_at.isoformat()}" for a in notification.firing}
        news |= {
            f"aspect {name} {aspect}" for name, of in notification.aspects.items() for aspect in of
        }
        return news | {f"resolved {name}" for name in notification.resolved_ids if name in known}

    def forget_resolved(self, *, also_notified: bool) -> None:
        """Drop the resolved alerts of which the receiver need not be notified.

        With `also_notified`, also drop those that a notification listed as firing.
        """
        for alert in self.resolved():
            if also_notified or not self.was_notified_of(alert.fingerprint):
                del self.alerts[alert.fingerprint]

    def view(self, now: float) -> View:
        """Return the group as `/state` shows it."""
        return View(
            receiver=self.key[0],
            group=self.key[1],
            firing=tuple(sorted(alert.fingerprint for alert in self.firing())),
            resolved=tuple(sorted(alert.fingerprint for alert in self.resolved())),
            notified_firing=tuple(sorted(self.notified.firing)) if self.notified else (),
            muted={name: f"{by.cause}: {by.by}" for name, by in sorted(self.muted.items())},
            in_flight=self.in_flight.reason if self.in_flight else None,
            next_flush_s=round(self.flush_at - now, 3),
        )

    def _in_state(self, state: vocabulary.AlertState) -> list[vocabulary.AlertChanged]:
        return [alert for alert in self.alerts.values() if alert.state is state]


class RestoredGroups:
    """The last notifications about groups that have no alerts at present.

    These are groups from before this process started, and groups that have become empty again.
    """

    def __init__(self) -> None:
        self._notified: dict[Key, Notified] = {}
        self._by_alert: dict[str, set[Key]] = {}
        self._resolved: dict[Key, tuple[str, float | None]] = {}

    def restore(self, key: Key, notified: Notified) -> None:
        """Add a group that has firing alerts according to the ledger."""
        self._notified[key] = notified
        for name in notified.firing:
            self._by_alert.setdefault(name, set()).add(key)

    def put(self, key: Key, notified: Notified) -> None:
        """Add a group that has become empty again."""
        self._notified[key] = notified

    def end(self, key: Key, last_id: str, ended_at: float | None) -> None:
        """Record id and time of the last notification about a group whose alerts are all resolved.

        The id of the group's next notification is derived from this id.
        """
        self._resolved.pop(key, None)
        self._resolved[key] = last_id, ended_at
        if len(self._resolved) > _RESOLVED_MAX:
            del self._resolved[next(iter(self._resolved))]

    def last_id_of(self, key: Key) -> str:
        """Return the id of the last notification about a group; empty if there is none."""
        notified = self._notified.get(key)
        return notified.id if notified else self._resolved.get(key, ("", None))[0]

    def ended_at(self, key: Key) -> float | None:
        """Return when the last notification without firing alerts was created; None if unknown."""
        return self._resolved.get(key, ("", None))[1]

    def get(self, key: Key) -> Notified | None:
        """Return the last notification about a group if it lists firing alerts; otherwise None."""
        return self._notified.get(key)

    def drop(self, key: Key) -> None:
        """Drop a group that has alerts again; its `Group` then stores the last notification."""
        self._notified.pop(key, None)
        self._resolved.pop(key, None)

    def notified_of(self, fingerprint: str) -> list[Key]:
        """Return the groups in which an alert was firing according to the ledger at the start."""
        return sorted(self._by_alert.get(fingerprint, ()))


class WallClock:
    """The time of day at any moment, derived from the latest clock reading."""

    def __init__(self, at: datetime, now: float) -> None:
        """Create a clock; `at` is the time of day at `now`, in monotonic seconds."""
        self._at, self._now = at, now

    def set(self, at: datetime, now: float) -> None:
        """Set the clock; `at` is the time of day at `now`, in monotonic seconds."""
        self._at, self._now = at, now

    def at(self, now: float) -> datetime:
        """Return the time of day at `now`."""
        return self._at + timedelta(seconds=now - self._now)

    def monotonic(self, at: datetime, now: float) -> float:
        """Return a time of day as monotonic seconds, by the latest clock reading."""
        return now - (self.at(now) - at).total_seconds()


class Timers:
    """When to flush each group; `find` returns the group with a key, or None."""

    def __init__(self, find: Callable[[Key], Group | None]) -> None:
        self._find = find
        self._heap: list[tuple[float, Key]] = []

    def set(self, group: Group, at: float) -> None:
        """Schedule the flush of a group at a time, replacing its previous schedule."""
        if group.flush_at != at:
            group.flush_at = at
            heapq.heappush(self._heap, (at, group.key))

    def next(self) -> float | None:
        """Return the time at which the next group is flushed; None if there are no groups."""
        while self._heap:
            at, key = self._heap[0]
            group = self._find(key)
            if group is not None and group.flush_at == at:
                return at
            heapq.heappop(self._heap)
        return None

    def pop(self, now: float) -> Group | None:
        """Return the group that is due first and unschedule it; None if no group is due."""
        at = self.next()
        if at is None or at > now:
            return None
        _, key = heapq.heappop(self._heap)
        return self._find(key)


class InflightLimits:
    """Limits the notifications in flight to each receiver; further groups wait in order."""

    def __init__(self, receivers: Iterable[str]) -> None:
        self._in_flight: Counter[str] = Counter()
        self._outstanding: Counter[str] = Counter()
        self._waiting: dict[str, dict[Key, float]] = {name: {} for name in receivers}

    def enqueue(self, key: Key, now: float) -> None:
        """Queue a group unless it is queued already."""
        self._waiting[key[0]].setdefault(key, now)

    def next(self, receiver: str) -> Key | None:
        """Remove the next group that may be sent and return its key; None if there is none."""
        waiting = self._waiting[receiver]
        is_busy = (
            self._in_flight[receiver] >= IN_FLIGHT_MAX
            or self._outstanding[receiver] >= OUTSTANDING_MAX
        )
        if is_busy or not waiting:
            return None
        key = next(iter(waiting))
        del waiting[key]
        return key

    def begin(self, receiver: str) -> None:
        """Count a notification as in flight."""
        self._in_flight[receiver] += 1
        self._outstanding[receiver] += 1

    def postpone(self, receiver: str) -> None:
        """Stop counting a notification as in flight, because it is being retried."""
        self._in_flight[receiver] -= 1

    def end(self, receiver: str, *, was_postponed: bool) -> None:
        """Stop counting a notification: it was delivered or given up."""
        self._in_flight[receiver] -= not was_postponed
        self._outstanding[receiver] -= 1

    def waiting_since(self, receiver: str) -> list[float]:
        """Return the times at which a receiver's waiting groups were queued."""
        return list(self._waiting[receiver].values())
