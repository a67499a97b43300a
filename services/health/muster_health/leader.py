"""Door to the leader lock: one of several processes holds it, and knows for how long it may act.

The lock is a key that expires unless it is renewed, and can be renewed only by who wrote it last.
Time is counted from before the request that renewed it, so that we end before the server gives the
lock to another; a process that was stopped meanwhile finds out when it next asks `revision`.
"""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Final, Protocol, Self

import prometheus_client

from muster import logs, streams
from muster_health import signals

TRY_S: Final = 0.25
"""How soon who wants the lock asks for it again; of a take-over this is what comes on top."""

_RELEASE_S: Final = 0.5
_ASLEEP_TOO: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""The monotonic clock that goes on while the machine is suspended, where there is one."""

_LEADS: Final = prometheus_client.Gauge(
    "muster_health_leads", "1 while this process may tell what it concludes."
)
_CHANGES: Final = prometheus_client.Counter(
    "muster_health_leadership_total", "Leadership, by what became of it.", ["change"]
)


class Claim(Protocol):
    """`Bus.claim` for one key: write if nobody wrote since `revision`; return what is there now."""

    def __call__(
        self, value: bytes, *, ttl_s: int, revision: int, timeout_s: float
    ) -> Awaitable[streams.Claimed]:
        """Raise TimeoutError where no answer came."""


class Release(Protocol):
    """`Bus.release` for one key."""

    def __call__(self, *, revision: int, timeout_s: float) -> Awaitable[None]:
        """Remove what was written at `revision`, if it is still there."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lock:
    """The key, as the bus lets us use it."""

    claim: Claim
    release: Release


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How long a claim lasts, how often it is renewed, how much before its end we end."""

    ttl_s: int
    renew_s: float
    margin_s: float


def boottime() -> float:
    """Return monotonic seconds that count the time a machine was suspended as well."""
    return time.clock_gettime(_ASLEEP_TOO)


class Leader:
    """One process that leads or waits to; an async context manager.

    `name` must be this process's and nobody else's: it is how a claim whose answer was lost is
    known to be ours.
    """

    def __init__(
        self,
        lock: Lock,
        *,
        name: str,
        terms: Terms,
        clock: Callable[[], float] = boottime,
    ) -> None:
        self.holder = ""
        """The name of who held the lock when we last asked; empty for nobody."""
        self._lock = lock
        self._name = name.encode()
        self._terms = terms
        self._clock = clock
        self._entry = 0
        """What the key's revision must be for our next claim to succeed."""
        self._token: int | None = None
        self._until = clock()
        self._told = signals.Leadership(revision=None)
        self._changed = asyncio.Condition()
        self._away = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Start asking for the lock."""
        self._task = asyncio.create_task(self._hold())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Stop leading, and leave the lock to the next at once."""
        assert self._task is not None, "left without being entered"
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self.revision() is not None:
            self._token = None
            await self._lock.release(revision=self._entry, timeout_s=_RELEASE_S)
        await self._tell()

    def revision(self) -> int | None:
        """Return as which revision we may act right now; None if we may not.

        Ask before each act: leadership ends by time passing, and a process that slept does not
        know it yet.
        """
        return self._token if self._clock() < self._until else None

    def still(self, revision: int) -> bool:
        """Tell whether we may act right now, and have led as this revision without a break."""
        return self.revision() == revision

    async def follow(self) -> AsyncIterator[signals.Leadership]:
        """Give the present leadership, then every change; a later leader's revision is greater."""
        seen: signals.Leadership | None = None
        while True:
            async with self._changed:
                while self._told == seen:
                    await self._changed.wait()
                seen = self._told
            yield seen

    async def _hold(self) -> None:
        while True:
            leads = await self._try()
            await self._tell()
            await asyncio.sleep(self._terms.renew_s if leads else TRY_S)

    async def _try(self) -> bool:
        """Claim or renew once; return whether that is settled for a while."""
        asked_at = self._clock()
        still_ours = self.revision() is not None
        left_s = self._until - asked_at if still_ours else self._terms.renew_s
        try:
            found = await self._lock.claim(
                self._name,
                ttl_s=self._terms.ttl_s,
                revision=self._entry,
                timeout_s=min(self._terms.renew_s, left_s),
            )
        except TimeoutError as error:
            self._log_away(str(error) or "no answer")
            return False
        self._away = False
        self.holder = found.value.decode("utf-8", "replace")
        if found.value != self._name:
            # somebody else's, or nobody's: then the next try can have it
            self._entry = 0
            self._until = asked_at
            return False
        self._entry = found.revision
        if found.written:
            self._token = self.revision() or found.revision
            self._until = asked_at + self._terms.ttl_s - self._terms.margin_s
        # else an earlier claim had come through, nobody knows when: renew it now
        return found.written

    async def _tell(self) -> None:
        now = signals.Leadership(revision=self.revision())
        if now == self._told:
            return
        was, self._told = self._told, now
        async with self._changed:
            self._changed.notify_all()
        _LEADS.set(now.revision is not None)
        if was.revision is not None:
            _CHANGES.labels("lost").inc()
            logs.logger().warning("leadership_lost", revision=was.revision, holder=self.holder)
        if now.revision is not None:
            _CHANGES.labels("won").inc()
            logs.logger().info("leadership_won", revision=now.revision)

    def _log_away(self, why: str) -> None:
        if not self._away:
            self._away = True
            logs.logger().warning("leader_lock_away", error=why)
