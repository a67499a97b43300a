"""Pure: How the time of day and monotonic seconds go together, and which group is due next."""

import heapq
from collections.abc import Callable
from datetime import datetime, timedelta

from muster_notifier import group as groups


class WallClock:
    """Knows the time of day at every moment, from when it was last read."""

    def __init__(self, at: datetime, now: float) -> None:
        """Take the time of day, `at`, at `now`, in monotonic seconds."""
        self._at, self._now = at, now

    def read(self, at: datetime, now: float) -> None:
        """Take what a clock on the wall says."""
        self._at, self._now = at, now

    def at(self, now: float) -> datetime:
        """Return the time of day at `now`."""
        return self._at + timedelta(seconds=now - self._now)

    def monotonic(self, at: datetime, now: float) -> float:
        """Return when a time of day was or will be, seen from `now`."""
        return now - (self.at(now) - at).total_seconds()


class Timers:
    """When each group is flushed; `find` returns the group of a key, or None."""

    def __init__(self, find: Callable[[groups.Key], groups.Group | None]) -> None:
        self._find = find
        self._heap: list[tuple[float, groups.Key]] = []

    def set(self, group: groups.Group, at: float) -> None:
        """Flush a group then, and not when it was to be flushed before."""
        if group.flush_at != at:
            group.flush_at = at
            heapq.heappush(self._heap, (at, group.key))

    def next(self) -> float | None:
        """Return when the next group is flushed; what is out of date is forgotten."""
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
