"""Pure: rate limit for first good verdicts after a start, which nobody is waiting for.

To publish one takes a round trip to NATS, and another to store it. A hundred thousand at once would
keep the detector from its heartbeats until it took every plugin for silent.
"""

from typing import Final

_TURN_S: Final = 0.1
_EACH_TURN: Final = 50


class StartupRateLimit:
    """Plugins whose first good verdict is published now, and those that wait, in order."""

    def __init__(self) -> None:
        self._waiting: dict[str, None] = {}
        self._left = 0
        self._until = 0.0

    @property
    def due(self) -> float | None:
        """Return when the next plugins may be published, if any wait."""
        return self._until if self._waiting else None

    def must_wait(self, key: str, now: float) -> bool:
        """Return whether this plugin's first verdict must wait before it is published."""
        if self._waiting or not self._has_one(now):
            self._waiting[key] = None
            return True
        self._left -= 1
        return False

    def turn(self, now: float) -> list[str]:
        """Return the plugins that may be published now."""
        self._has_one(now)
        keys = [key for key, _ in zip(self._waiting, range(self._left), strict=False)]
        self._left -= len(keys)
        for key in keys:
            del self._waiting[key]
        return keys

    def _has_one(self, now: float) -> bool:
        if now >= self._until:
            self._until, self._left = now + _TURN_S, _EACH_TURN
        return self._left > 0
