"""Pure: the watchdog over health: if its ticks stop, plugins are not monitored.

| state    | input                               | next      | output    |
|----------|-------------------------------------|-----------|-----------|
| waiting  | tick                                | ticking   |           |
| waiting  | `patience_s` after the bus came     | silent    | Silent    |
| ticking  | tick                                | ticking   |           |
| ticking  | 2.5 intervals without a tick        | silent    | Silent    |
| silent   | tick                                | ticking   | Recovered |
| any      | connection lost                     | unchanged, and no deadline runs |
| any      | connection restored                 | unchanged, and the deadline begins anew |
| any      | we were late ourselves              | unchanged, and the deadline begins anew |

A tick of an earlier term than the newest is ignored. Once the newest leader has been silent for a
whole deadline an earlier term counts again: a lock bucket that was lost counts from 1. So does the
first tick after the connection was restored: NATS may have lost its store.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from muster import vocabulary

_INTERVALS: Final = 2.5
_LATE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class BusLost:
    """Our own connection is down, so missing ticks prove nothing."""


@dataclass(frozen=True, slots=True)
class BusRestored:
    """Our own connection is up (again)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Silent:
    """No tick for `seconds`; `holder` was the last leader, empty if none has ticked."""

    seconds: float
    holder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """Health ticks again, after `seconds` of silence."""

    seconds: float
    holder: str


Input = vocabulary.WatchdogTicked | BusLost | BusRestored
Output = Silent | Recovered


class Watchdog:
    """The watchdog. `patience_s` is how long health may take to appear after our start."""

    def __init__(self, *, patience_s: float) -> None:
        self.term = 0
        """The newest leader's term."""
        self.is_silent = False
        self._wait_s = patience_s
        self._holder = ""
        self._is_certain = False
        self._ticked_at: float | None = None
        self._began_at: float | None = None
        self._deadline: float | None = None

    def receive(self, event: Input, now: float) -> Sequence[Output]:
        """Process a tick or a change of our connection."""
        match event:
            case BusLost():
                self._deadline = None
                return ()
            case BusRestored():
                self._is_certain = False
                if self._began_at is None:
                    self._began_at = now
                self._wait(now)
                return ()
            case vocabulary.WatchdogTicked():
                return self._tick(event, now)

    def tick(self, now: float) -> Sequence[Output]:
        """Report silence when the wait is over; if we were late ourselves, wait again."""
        if self._deadline is None or now < self._deadline:
            return ()
        if now > self._deadline + _LATE_S:
            self._wait(now)
            return ()
        self._deadline = None
        if self.is_silent:
            return ()
        self.is_silent = True
        return (Silent(seconds=self._silence_s(now), holder=self._holder),)

    def next_deadline(self) -> float | None:
        """Return when the silence will have lasted too long."""
        return self._deadline

    def is_stale(self, term: int) -> bool:
        """Return whether a tick comes from a former leader."""
        return term < self.term and not self.is_silent and self._is_certain

    def _tick(self, event: vocabulary.WatchdogTicked, now: float) -> Sequence[Output]:
        if self.is_stale(event.leader):
            return ()
        silence_s = self._silence_s(now)
        self._is_certain = True
        self.term, self._holder, self._ticked_at = event.leader, event.holder, now
        self._wait_s = _INTERVALS * event.interval_s
        self._wait(now)
        if not self.is_silent:
            return ()
        self.is_silent = False
        return (Recovered(seconds=silence_s, holder=self._holder),)

    def _wait(self, now: float) -> None:
        self._deadline = now + self._wait_s

    def _silence_s(self, now: float) -> float:
        since = self._ticked_at if self._ticked_at is not None else self._began_at
        return 0.0 if since is None else now - since
