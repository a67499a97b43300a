"""Pure: Who falls again and again is believed later and later.

| fall within the window | must stay well for               | and is called |
|------------------------|----------------------------------|---------------|
| 1st                    | 3 good beats, or 15 s            | what it is    |
| 2nd                    | 30 s                             | what it is    |
| nth, from the 3rd on   | 30 s doubled n - 2 times, 15 min | FLAPPING      |

The count starts again when nothing fell for a whole window.
"""

from typing import Final

from muster_health.model import config

_COUNTED_MAX: Final = 64


class FlapDamping:
    """The falls of one plugin, or of one of its alerts."""

    __slots__ = ("_last", "_settings", "_times", "level")

    def __init__(self, settings: config.Detection) -> None:
        self.level = 0
        self._settings = settings
        self._last: float | None = None
        self._times: tuple[float, ...] = ()

    def fell(self, now: float) -> None:
        """Take a fall."""
        window_s = self._settings.flap_window_s
        if self._last is not None and now - self._last > window_s + self.hold_s:
            self.level = 0
        self._last = now
        self.level = min(self.level + 1, _COUNTED_MAX)
        recent = (at for at in self._times if now - at <= window_s)
        self._times = (*recent, now)[-_COUNTED_MAX:]

    def restore(self, level: int, now: float) -> None:
        """Go on where a former process stopped: its falls count as if they had been just now."""
        self.level = level
        self._last = now if level else None
        self._times = (now,) * min(level, self._settings.flap_falls - 1)

    @property
    def hold_s(self) -> float:
        """Return for how long it must stay well, beyond the usual."""
        if self.level <= 1:
            return 0.0
        doubled = self._settings.hold_s * 2.0 ** min(self.level - 2, _COUNTED_MAX)
        return min(doubled, self._settings.hold_max_s)

    def falls(self, now: float) -> int:
        """Return how often it fell within the window."""
        return sum(1 for at in self._times if now - at <= self._settings.flap_window_s)

    def is_flapping(self, now: float) -> bool:
        """Tell whether it fell too often to be called by its latest fall."""
        return self.falls(now) >= self._settings.flap_falls
