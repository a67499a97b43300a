"""Adapter: leader election as services see it, by a NATS lock or a Kubernetes Lease, and its clock.

Only one of several replicas may act. The right to act is a *term*: a number that grows with every
change of leader (fencing token). It can end merely because time passes, so it is checked before
each act instead of once.
"""

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final, Protocol, Self

_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""The monotonic clock that goes on while the machine is suspended, where there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leadership:
    """Who leads, empty if nobody knows; and our term, None if we do not lead."""

    leader: str
    term: int | None


OnChange = Callable[[Leadership, Leadership], None]
"""Called with every change: what was, and what is."""


class Election(Protocol):
    """One candidate. An async context manager: entering it begins to run, leaving it resigns."""

    @property
    def current(self) -> Leadership:
        """The last state that was reported; whether we may still act, only `term` says."""

    async def __aenter__(self) -> Self:
        """Begin to run for leader; never waits."""

    async def __aexit__(self, *_: object) -> None:
        """Resign, so that the next leader can take over at once."""

    def term(self) -> int | None:
        """Return the term in which we may act right now; None if we may not."""

    def is_term(self, term: int) -> bool:
        """Return whether we may act right now, and have led in this term without a break."""

    def problem(self) -> str | None:
        """Return why nobody knows who leads, once that lasts too long; otherwise None."""

    def terms(self) -> AsyncIterator[int | None]:
        """Yield our present term, None if we do not lead, then every change."""

    async def failed(self) -> None:
        """Never return; raise what ended the candidacy by mistake, if anything does."""


def now() -> float:
    """Return monotonic seconds, including the time in which the machine was suspended.

    A term is measured by this clock: a process that was suspended during its term must not act.
    """
    return time.clock_gettime(_CLOCK)
