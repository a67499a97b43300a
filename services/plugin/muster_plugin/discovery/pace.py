"""Pure: How long to rest so that what is done again and again takes a bounded share of the time."""

from typing import Final

_BURST_S: Final = 0.5
"""So much at once is free: what is done now and then never waits."""
_REST_MAX_S: Final = 5.0


class Pace:
    """The account of one kind of work that may cost `share` of the time, 1 for all of it."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._owed_s = 0.0
        self._at = 0.0

    def rest_s(self, cost_s: float, now: float) -> float:
        """Return how long to rest now, after work that cost so much."""
        paid_s = (now - self._at) * self._share
        self._owed_s = max(0.0, self._owed_s - paid_s) + cost_s
        self._at = now
        if self._share >= 1:
            return 0.0
        return min(_REST_MAX_S, max(0.0, self._owed_s - _BURST_S) / self._share)
