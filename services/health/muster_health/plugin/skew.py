"""Pure: Whether a node's clock is apart from ours: a check of its own, and never a verdict.

Every age is by our clock alone, so a skewed clock deceives nobody; but its logs will. Only beats
that are read when they are made count. Where most clocks are apart from ours, ours is wrong.
"""

import math
from typing import Final

_BEATS_MIN: Final = 3
_WELL_SHARE: Final = 0.5


class Skew:
    """The clock of one node against ours, `since` when; it takes three beats to believe either."""

    __slots__ = ("_beats", "is_skewed", "seconds", "since")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.is_skewed = False
        self.since = 0.0
        self._beats = 0

    def restore(self) -> None:
        """Take that a former process told that it is apart, and has seen no end of it."""
        self.is_skewed, self.since = True, -math.inf

    def hear(self, wall: float, ours: float, bound_s: float, *, now: float) -> bool:
        """Take when a beat says that it was made; return whether that changed what we believe."""
        if not wall:
            return False
        self.seconds = ours - wall
        bound = bound_s * (_WELL_SHARE if self.is_skewed else 1.0)
        if (abs(self.seconds) > bound) is self.is_skewed:
            self._beats = 0
            return False
        self._beats += 1
        if self._beats < _BEATS_MIN:
            return False
        self.is_skewed, self._beats, self.since = not self.is_skewed, 0, now
        return True

    def words(self) -> str:
        """Say it."""
        side = "behind" if self.seconds > 0 else "ahead of"
        return f"its clock is {abs(self.seconds):.1f} s {side} ours"
