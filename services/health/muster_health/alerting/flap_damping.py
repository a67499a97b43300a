"""Pure: flap damping: the more often something failed lately, the later it counts as recovered.

| failure within the window | must stay healthy for            | and is reported as |
|---------------------------|----------------------------------|--------------------|
| 1st                       | 3 good heartbeats, or 15 s       | what it is         |
| 2nd                       | 30 s                             | what it is         |
| nth, from the 3rd on      | 30 s doubled n - 2 times, 15 min | FLAPPING           |

The count starts again when nothing failed for a whole window. Plugins are damped so, and alerts.
"""

from typing import Final

from muster import pacing
from muster_health.model import config

_COUNTED_MAX: Final = 64


class FlapDamping:
    """The recent failures of one plugin, or of one of its alerts."""

    __slots__ = ("_last", "_settings", "_times", "level")

    def __init__(self, settings: config.Detection) -> None:
        self.level = 0
        self._settings = settings
        self._last: float | None = None
        self._times: tuple[float, ...] = ()

    def failed(self, now: float) -> None:
        """Count a failure."""
        window_s = self._settings.flap_window_s
        if self._last is not None and now - self._last > window_s + self.hold_s:
            self.level = 0
        self._last = now
        self.level = min(self.level + 1, _COUNTED_MAX)
        recent = (at for at in self._times if now - at <= window_s)
        self._times = (*recent, now)[-_COUNTED_MAX:]

    def restore(self, level: int, now: float) -> None:
        """Restore the failures that a former process counted, as if they had just happened."""
        self.level = level
        self._last = now if level else None
        self._times = (now,) * min(level, self._settings.flap_falls - 1)

    @property
    def hold_s(self) -> float:
        """Return for how long the plugin must stay healthy, beyond the usual time."""
        settings = self._settings
        holds = pacing.Backoff(first_s=settings.hold_s, max_s=settings.hold_max_s)
        return holds.delay_s(self.level - 1)

    def failures(self, now: float) -> int:
        """Return the number of failures within the window."""
        return sum(1 for at in self._times if now - at <= self._settings.flap_window_s)

    def is_flapping(self, now: float) -> bool:
        """Return whether there were so many failures that only FLAPPING is reported."""
        return self.failures(now) >= self._settings.flap_falls
