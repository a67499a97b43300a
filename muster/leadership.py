"""Adapter: leader election by a NATS lock or a Kubernetes Lease, with its log and metric.

Only one of several replicas may act. The right to act is a *term*: a number that increases with
every change of leader (fencing token). A term can expire at any time, so it is checked before every
action, not only once.
"""

import abc
import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final, Self

import prometheus_client

from muster.service import logs

_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""A monotonic clock that continues while the machine is suspended, if there is one."""
_SINCE: Final = prometheus_client.Gauge(
    "muster_leader_since_timestamp_seconds",
    "When this process became the leader; 0 while it does not lead.",
    registry=None,  # only processes that can lead export this metric
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leadership:
    """The leader's name (empty if unknown), and this process's term (None if it does not lead)."""

    leader: str
    term: int | None


OnChange = Callable[[Leadership, Leadership], None]
"""Called on every change, with the previous and the current state."""


class Election(abc.ABC):
    """One candidate; an async context manager that starts its candidacy, and resigns at exit.

    A subclass claims and renews the lock or Lease. It sets `_term` and the term's expiry, the name
    of another leader, and whether the lock or Lease is unreadable (`_is_away`).
    """

    def __init__(self, name: str, on_change: OnChange) -> None:
        self.current = Leadership(leader="", term=None)
        """The last reported state; only `term()` shows whether this process may still act."""
        self.name = name
        """The name by which other processes identify this process while it leads."""
        self._on_change = on_change
        self._term: int | None = None
        self._until = float("-inf")
        self._other_leader = ""
        self._is_away = False
        self._reported = self.current, self._is_away
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Start the candidacy, without waiting."""
        with contextlib.suppress(ValueError):  # the metric is already registered
            prometheus_client.REGISTRY.register(_SINCE)
        self._task = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Resign, so that the next leader can take over immediately."""
        assert self._task is not None, "exited without being entered"
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self.term() is not None:
            await self._resign()
        await self._report()

    def term(self) -> int | None:
        """Return the term in which this process may act right now; None if it may not.

        Call this before every action: a term expires, which a suspended process cannot notice. A
        later leader has a higher term.
        """
        return self._term if now() < self._until else None

    def is_term(self, term: int) -> bool:
        """Return whether this process may act now, and has led continuously since `term` began."""
        return self.term() == term

    @abc.abstractmethod
    def problem(self) -> str | None:
        """Return why the leader has been unknown for too long; otherwise None."""

    async def terms(self) -> AsyncIterator[int | None]:
        """Yield this process's term (None if it does not lead), now and after every change."""
        while True:
            term = self.current.term
            yield term
            async with self._changed:
                while self.current.term == term:
                    await self._changed.wait()

    async def failed(self) -> None:
        """Wait until the task that renews the term fails, and raise its error."""
        assert self._task is not None, "awaited before being entered"
        await asyncio.wait([self._task])
        self._task.result()

    @abc.abstractmethod
    async def _keep(self) -> None:
        """Claim and renew the leadership and report every change, forever."""

    @abc.abstractmethod
    async def _resign(self) -> None:
        """Give up this process's leadership."""

    async def _report(self) -> None:
        """Log and report the changes since the last call."""
        was, term = self.current, self.term()
        leader = self._other_leader if term is None else self.name
        self.current = Leadership(leader=leader, term=term)
        reported, self._reported = self._reported, (self.current, self._is_away)
        if reported == self._reported:
            return
        if was.term not in {None, term}:
            logs.logger().warning("leadership_lost", term=was.term, leader=leader)
        if term not in {None, was.term}:
            logs.logger().info("leadership_won", term=term)
        if term != was.term:
            _SINCE.set(0.0 if term is None else time.time())
        async with self._changed:
            self._changed.notify_all()
        self._on_change(was, self.current)


def now() -> float:
    """Return monotonic seconds, including the time for which the machine was suspended.

    A term is measured by this clock: a process that was suspended during its term must not act.
    """
    return time.clock_gettime(_CLOCK)
