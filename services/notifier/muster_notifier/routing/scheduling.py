"""Pure: when each group is flushed, and how many notifications may be in flight to a receiver."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import Final

from muster_notifier.routing import groups

IN_FLIGHT_MAX: Final = 8
"""Notifications of different groups in flight to one receiver: a receiver that comes back must not
be flooded, and a notification that waits here is made when it is its turn."""
OUTSTANDING_MAX: Final = 256
"""Notifications of one receiver in the outbox, including those that are being retried."""


class WallClock:
    """The time of day at any moment, from the last reading of the clock."""

    def __init__(self, at: datetime, now: float) -> None:
        """`at` is the time of day at `now`, in monotonic seconds."""
        self._at, self._now = at, now

    def set(self, at: datetime, now: float) -> None:
        """Set the clock; see `__init__`."""
        self._at, self._now = at, now

    def at(self, now: float) -> datetime:
        """Return the time of day at `now`."""
        return self._at + timedelta(seconds=now - self._now)

    def monotonic(self, at: datetime, now: float) -> float:
        """Return a time of day in monotonic seconds, as the clock stands at `now`."""
        return now - (self.at(now) - at).total_seconds()


class Timers:
    """When each group is flushed; `find` returns the group of a key, or None."""

    def __init__(self, find: Callable[[groups.Key], groups.Group | None]) -> None:
        self._find = find
        self._heap: list[tuple[float, groups.Key]] = []

    def set(self, group: groups.Group, at: float) -> None:
        """Flush a group at this time instead of its former one."""
        if group.flush_at != at:
            group.flush_at = at
            heapq.heappush(self._heap, (at, group.key))

    def next(self) -> float | None:
        """Return when the next group is flushed."""
        while self._heap:
            at, key = self._heap[0]
            group = self._find(key)
            if group is not None and group.flush_at == at:
                return at
            heapq.heappop(self._heap)
        return None

    def pop(self, now: float) -> groups.Group | None:
        """Return the group that is due, if one is."""
        at = self.next()
        if at is None or at > now:
            return None
        _, key = heapq.heappop(self._heap)
        return self._find(key)


class InflightLimits:
    """The groups that wait for their receivers, in the order in which they were flushed."""

    def __init__(self, receivers: Iterable[str]) -> None:
        self._in_flight: Counter[str] = Counter()
        self._outstanding: Counter[str] = Counter()
        self._waiting: dict[str, dict[groups.Key, float]] = {name: {} for name in receivers}

    def enqueue(self, key: groups.Key, now: float) -> None:
        """Queue a group, if it is not queued already."""
        self._waiting[key[0]].setdefault(key, now)

    def next(self, receiver: str) -> groups.Key | None:
        """Return the next group and remove it from the queue; None if none may be sent now."""
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
        """Count a notification that is in flight."""
        self._in_flight[receiver] += 1
        self._outstanding[receiver] += 1

    def postpone(self, receiver: str) -> None:
        """Count a notification no longer as in flight: it is being retried."""
        self._in_flight[receiver] -= 1

    def end(self, receiver: str, *, was_postponed: bool) -> None:
        """Count a notification no longer: it is delivered or given up."""
        self._in_flight[receiver] -= not was_postponed
        self._outstanding[receiver] -= 1

    def waiting_since(self, receiver: str) -> list[float]:
        """Return since when each group of a receiver has been queued."""
        return list(self._waiting[receiver].values())
