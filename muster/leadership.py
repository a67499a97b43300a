"""Adapter: the interface of leader election, by a NATS lock or a Kubernetes Lease, and its clock.

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
    """The leader, empty if unknown; and our term, None if we do not lead."""

    leader: str
    term: int | None


OnChange = Callable[[Leadership, Leadership], None]
"""Called with every change: what was, and what is."""


class Election(Protocol):
    """One candidate: an async context manager that starts its candidacy, and resigns at exit."""

    @property
    def current(self) -> Leadership:
        """The last reported state; only `term` says whether we may still act."""

    async def __aenter__(self) -> Self:
        """Start the candidacy, without waiting."""

    async def __aexit__(self, *_: object) -> None:
        """Resign, so that the next leader can take over at once."""

    def term(self) -> int | None:
        """Return the term in which we may act right now; None if we may not."""

    def is_term(self, term: int) -> bool:
        """Return whether we may act right now, and have led in this term without a break."""

    def problem(self) -> str | None:
        """Return why the leader has been unknown for too long; otherwise None."""

    def terms(self) -> AsyncIterator[int | None]:
        """Yield our present term, None if we do not lead, then every change."""

    async def failed(self) -> None:
        """Wait for ever; raise the error if the candidacy ends unexpectedly."""


def now() -> float:
    """Return monotonic seconds, including the time in which the machine was suspended.

    A term is measured by this clock: a process that was suspended during its term must not act.
    """
    return time.clock_gettime(_CLOCK)
