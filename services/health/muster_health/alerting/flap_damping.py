"""Pure: flap damping: delays the recovery of a plugin or alert that has failed repeatedly.

| failure within the window | must stay healthy for            | state    |
|---------------------------|----------------------------------|----------|
| 1st                       | 3 good heartbeats, or 15 s       |          |
| 2nd                       | 30 s                             |          |
| nth, from the 3rd on      | 30 s * 2^(n - 2), at most 15 min | flapping |

The count restarts if the time since the last failure exceeds one window plus the healthy time in
the table.
"""

from typing import Final

import msgspec

from muster import pacing
from muster_health.model import config

_COUNTED_MAX: Final = 64


class FlapDamping(msgspec.Struct, eq=False, gc=False):
    """Counts failures, and computes how long the recovery is delayed."""

    settings: config.Detection
    level: int = 0
    _last: float | None = None
    _times: tuple[float, ...] = ()

    def failed(self, now: float) -> None:
        """Count a failure."""
        window_s = self.settings.flap_window_s
        if self._last is not None and now - self._last > window_s + self.hold_s:
            self.level = 0
        self._last = now
        self.level = min(self.level + 1, _COUNTED_MAX)
        recent = (at for at in self._times if now - at <= window_s)
        self._times = (*recent, now)[-_COUNTED_MAX:]

    def restore(self, level: int, now: float) -> None:
        """Restore the failures that a previous process counted, as if they had just happened."""
        self.level = level
        self._last = now if level else None
        self._times = (now,) * min(level, self.settings.flap_falls - 1)

    @property
    def hold_s(self) -> float:
        """Return the minimum healthy time before recovery; 0 after a single failure."""
        settings = self.settings
        holds = pacing.Backoff(first_s=settings.hold_s, max_s=settings.hold_max_s)
        return holds.delay_s(self.level - 1)

    def failures(self, now: float) -> int:
        """Return the number of failures within the window."""
        return sum(1 for at in self._times if now - at <= self.settings.flap_window_s)

    def is_flapping(self, now: float) -> bool:
        """Return whether there were enough failures within the window to report flapping."""
        return self.failures(now) >= self.settings.flap_falls
