"""Pure. How fast may be written: evenly, never more in any second than was allowed."""


class Budget:
    """Turns in time, one for each write, at least `1 / per_s` apart; no bursts after a pause."""

    def __init__(self, per_s: float) -> None:
        assert per_s > 0, f"{per_s} writes a second are none"
        self._gap_s = 1.0 / per_s
        self.next_at = float("-inf")

    def wait_s(self, now: float) -> float:
        """Return how long it is until the next turn; 0 if it is now."""
        return max(0.0, self.next_at - now)

    def take(self, now: float) -> None:
        """Take the turn: the next one comes a gap after it was really taken."""
        assert now >= self.next_at, "a turn was taken before its time"
        self.next_at = now + self._gap_s
