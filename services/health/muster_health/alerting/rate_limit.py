"""Pure: So many at once and so many a minute: a token bucket."""

from typing import Final

_MINUTE_S: Final = 60.0
_ENOUGH: Final = 1.0 - 1e-9


class Bucket:
    """Holds `per_minute` tokens at most and gets as many in a minute."""

    __slots__ = ("_at", "_per_minute", "_tokens")

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._tokens = float(per_minute)
        self._at = now

    def has(self, now: float) -> bool:
        """Tell whether there is one to take."""
        self._fill(now)
        return self._tokens >= _ENOUGH

    def take(self) -> None:
        """Take one that is there."""
        self._tokens -= 1.0

    def next_at(self) -> float:
        """Return when there is one to take."""
        missing = max(0.0, 1.0 - self._tokens)
        return self._at + missing * _MINUTE_S / self._per_minute

    def _fill(self, now: float) -> None:
        gained = max(0.0, now - self._at) * self._per_minute / _MINUTE_S
        self._tokens = min(float(self._per_minute), self._tokens + gained)
        self._at = max(self._at, now)
