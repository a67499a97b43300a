"""Pure: queues deadlines by time; postponing a deadline, as each heartbeat does, takes O(1)."""

import heapq
from collections.abc import Callable
from typing import Final

_SLOT_S: Final = 0.1
_FAR_S: Final = 1e12
"""The time of the last slot, which also contains all later deadlines."""


class TimerQueue:
    """The next deadline of each key.

    A postponed deadline stays queued at its old time; at that time, its key is checked and queued
    again. A heartbeat therefore costs a dictionary look-up instead of a queue operation. Deadlines
    are grouped into time slots and sorted only within a slot. Most are postponed before their slot
    begins, and are moved together with it, so the whole fleet is never sorted.
    """

    def __init__(self) -> None:
        self._slots: dict[int, list[tuple[float, str]]] = {}
        self._order: list[int] = []
        self._queued: dict[str, float] = {}

    def set(self, key: str, when: float | None) -> None:
        """Wake `key` at `when`, or at its earlier deadline, if any; None changes nothing."""
        if when is None:
            return
        queued = self._queued.get(key)
        if queued is None or when < queued:
            self._queued[key] = when
            self._push((when, key))

    def earliest(self) -> float | None:
        """Return when the next key may be due; None if the queue is empty."""
        while self._order:
            slot = self._slots[self._order[0]]
            while slot:
                when, key = slot[0]
                if self._queued.get(key) == when:
                    return when
                heapq.heappop(slot)
            del self._slots[heapq.heappop(self._order)]
        return None

    def due(self, now: float, *, most: int) -> list[str]:
        """Remove and return the keys that are due; the caller sets their next deadlines, if any.

        At most `most` keys are returned, the earliest first; the others remain due, so that other
        work is not delayed.
        """
        keys: list[str] = []
        while len(keys) < most and (when := self.earliest()) is not None and when <= now:
            _, key = heapq.heappop(self._slots[self._order[0]])
            del self._queued[key]
            keys.append(key)
        return keys

    def follow(self, until: float, look: Callable[[str], float | None]) -> None:
        """Queue postponed keys again, from all slots that end before `until`.

        This avoids waking the detector for each of them.
        """
        kept: list[tuple[float, str]] = []
        while self._order and (self._order[0] + 1) * _SLOT_S <= until:
            for entry in self._slots.pop(heapq.heappop(self._order)):
                when, key = entry
                if self._queued.get(key) != when:
                    continue
                actual = look(key)
                if actual is not None and actual > when:
                    self._queued[key] = actual
                    self._push((actual, key))
                else:
                    kept.append(entry)
        for entry in kept:
            self._push(entry)

    def clear(self) -> None:
        """Remove all deadlines."""
        self._slots.clear()
        self._order.clear()
        self._queued.clear()

    def _push(self, entry: tuple[float, str]) -> None:
        number = int(min(entry[0], _FAR_S) / _SLOT_S)
        slot = self._slots.get(number)
        if slot is None:
            self._slots[number] = [entry]
            heapq.heappush(self._order, number)
        else:
            heapq.heappush(slot, entry)
