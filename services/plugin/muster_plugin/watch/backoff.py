"""Pure: limits how often to probe a plugin whose process ends whenever a client connects.

A process that ends within a second of a connection may have ended because of it. After two such
ends in a row, the next process is probed only every five minutes. Each further end doubles that
time, up to an hour. A process that ends without a recent connection shows that connections are not
the cause, so the count starts again.
"""

import math
from typing import Final

from muster import pacing

_CAUSE_S: Final = 1.0
_ENDS_MIN: Final = 2
_PAUSE: Final = pacing.Backoff(first_s=300.0, max_s=3600.0)


class ProbeBackoff:
    """Counts the ends of a plugin's processes that followed a connection."""

    def __init__(self) -> None:
        self._ends = 0
        self._connected_at = -math.inf

    @property
    def pause_s(self) -> float:
        """The shortest time between two connections; 0 if there is no reason to wait."""
        return _PAUSE.delay_s(max(0, self._ends - _ENDS_MIN + 1))

    @property
    def text(self) -> str:
        """The text to add to a failure's description; empty if connections are not suspected."""
        if self._ends < _ENDS_MIN:
            return ""
        return f"; its process has ended {self._ends} times in a row just after a connection"

    def connected(self, now: float) -> None:
        """Record a connection that reached the process."""
        self._connected_at = now

    def ended(self, now: float) -> None:
        """Record that the process has ended."""
        self._ends = self._ends + 1 if now - self._connected_at <= _CAUSE_S else 0
        self._connected_at = -math.inf
