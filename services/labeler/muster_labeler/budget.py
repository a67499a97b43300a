"""Pure. How fast may be written: evenly, never more in any second than was allowed."""


class Budget:
    """Slots in time, one for each write, `per_s` of them a second; no bursts after a pause."""

    def __init__(self, per_s: float) -> None:
        assert per_s > 0, f"{per_s} writes a second are none"
        self._gap_s = 1.0 / per_s
        self._next = float("-inf")

    def take(self, now: float) -> float:
        """Take the next slot; return how long to wait for it."""
        slot = max(now, self._next)
        self._next = slot + self._gap_s
        return slot - now
