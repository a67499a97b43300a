"""Pure. Whether a node's clock is apart from ours: a check of its own, and never a verdict.

Every age is by our clock alone, so a skewed clock deceives nobody; but its logs will.
"""

from typing import Final

_BEATS_MIN: Final = 3
_WELL_SHARE: Final = 0.5


class Skew:
    """The clock of one node against ours. It takes three beats to believe either."""

    __slots__ = ("_beats", "is_skewed", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.is_skewed = False
        self._beats = 0

    def hear(self, wall: float, ours: float, bound_s: float) -> bool:
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
        self.is_skewed, self._beats = not self.is_skewed, 0
        return True

    def words(self) -> str:
        """Say it."""
        side = "behind" if self.seconds > 0 else "ahead of"
        return f"its clock is {abs(self.seconds):.1f} s {side} ours"
