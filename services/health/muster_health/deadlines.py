"""Pure. When whom to look at next; moving a deadline back, as every beat does, costs nothing."""

import heapq
from collections.abc import Callable


class Deadlines:
    """The earliest deadline of each key.

    A deadline that moved back stays queued at its old time: its key is then looked at once for
    nothing, and set again. So a beat costs a dictionary look-up instead of a queue operation.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._queued: dict[str, float] = {}

    def set(self, key: str, when: float | None) -> None:
        """Look at `key` at `when` or before; None is never."""
        if when is None:
            return
        queued = self._queued.get(key)
        if queued is None or when < queued:
            self._queued[key] = when
            heapq.heappush(self._heap, (when, key))

    def earliest(self) -> float | None:
        """Return when somebody is to be looked at next."""
        while self._heap:
            when, key = self._heap[0]
            if self._queued.get(key) == when:
                return when
            heapq.heappop(self._heap)
        return None

    def due(self, now: float, *, most: int) -> list[str]:
        """Return the keys to look at now; each is then set again or forgotten.

        Of more than `most` the earliest go first, and the rest stay due: others want a turn too.
        """
        keys: list[str] = []
        while len(keys) < most and (when := self.earliest()) is not None and when <= now:
            _, key = heapq.heappop(self._heap)
            del self._queued[key]
            keys.append(key)
        return keys

    def follow(self, until: float, look: Callable[[str], float | None]) -> None:
        """Queue those anew that moved back since, out of all that stand before `until`.

        So whoever is awake anyway saves itself from being woken for each of them.
        """
        kept: list[tuple[float, str]] = []
        while (when := self.earliest()) is not None and when <= until:
            _, key = heapq.heappop(self._heap)
            actual = look(key)
            if actual is not None and actual > when:
                del self._queued[key]
                self.set(key, actual)
            else:
                kept.append((when, key))
        for entry in kept:
            heapq.heappush(self._heap, entry)

    def clear(self) -> None:
        """Forget all."""
        self._heap.clear()
        self._queued.clear()
