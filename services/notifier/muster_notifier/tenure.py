"""Door to the lock by which one notifier acts, and others wait to take its place.

Two at once would each hear half of the alerts, and forget the other half. The lock is a key that
expires unless it is renewed. Whoever was stopped, or is cut off, finds out before it acts: time
counts from before the request that renewed the lock, and ends before the server gives it to others.
"""

import asyncio
import dataclasses
import os
import socket
import time
from collections.abc import Awaitable
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self

import msgspec
import prometheus_client

from muster import logs, streams

TRY_S: Final = 0.25
"""How soon who wants the lock asks for it again."""

_RELEASE_S: Final = 0.5
_ASLEEP_TOO: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

_ACTS = prometheus_client.Gauge("muster_notifier_acts", "1 while this notifier may tell people.")


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """The key as the bus lets us use it, how long a claim lasts and how often it is renewed."""

    claim: Claim
    release: Release
    ttl_s: int
    renew_s: float


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A process, named so that its next life knows that it is gone."""

    instance: str
    host: str
    space: str
    pid: int

    def is_gone(self) -> bool:
        """Tell whether it ran where we run, and runs no more."""
        here = this("")
        if (self.host, self.space) != (here.host, here.space):
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return self.pid == here.pid


def this(instance: str) -> Holder:
    """Return this process."""
    try:
        space = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        space = ""
    return Holder(instance=instance, host=socket.gethostname(), space=space, pid=os.getpid())


class Tenure:
    """The time in which we may act; an async context manager. See the module."""

    def __init__(self, lock: Lock, *, instance: str) -> None:
        self.holder = ""
        """Who acts instead of us, as far as we know."""
        self._lock = lock
        self._mine = msgspec.json.encode(this(instance))
        self._revision = 0
        self._until = _now()
        self._acts = asyncio.Event()
        self._acted = False
        self._lost = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Begin to ask for the lock."""
        self._keeping = asyncio.create_task(self._keep())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Act no more, and leave the lock to the next at once."""
        assert self._keeping is not None, "left without being entered"
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)
        if self.is_ours:
            self._until = _now()
            await self._lock.release(revision=self._revision, timeout_s=_RELEASE_S)

    @property
    def is_ours(self) -> bool:
        """Whether we may act right now."""
        return _now() < self._until

    async def held(self) -> None:
        """Return when we may act: at once, if we may now."""
        while not self.is_ours:
            self._acts.clear()
            await self._acts.wait()

    async def lost(self) -> None:
        """Return when somebody else acts, who did not before."""
        await self._lost.wait()

    async def _keep(self) -> None:
        """Wait for the lock, then renew it for ever."""
        while True:
            try:
                wait_s = await self._try()
            except TimeoutError:
                wait_s = TRY_S
            _ACTS.set(self.is_ours)
            await asyncio.sleep(wait_s)

    async def _try(self) -> float:
        """Claim or renew once; return when to do so again. Raises TimeoutError."""
        asked_at = _now()
        lock = self._lock
        found = await lock.claim(
            self._mine, ttl_s=lock.ttl_s, revision=self._revision, timeout_s=lock.renew_s
        )
        if found.value == self._mine:
            self._revision = found.revision
            if not found.written:
                return 0.0  # an earlier claim came through, nobody knows when: renew it now
            self._until = asked_at + lock.ttl_s - lock.renew_s / 2
            if not self._acted:
                self._acted = True
                logs.logger().info("acting", revision=self._revision)
            self._acts.set()
            return lock.renew_s
        if not found.value:
            self._revision = 0
            return 0.0
        if _is_gone(found.value):
            self._revision = found.revision
            return 0.0
        self._hear_of(found.value.decode("utf-8", "replace")[:500])
        return TRY_S

    def _hear_of(self, holder: str) -> None:
        self._revision, self._until = 0, _now()
        if self._acted:
            logs.logger().error("another_notifier_acts", holder=holder)
            self._lost.set()
        elif holder != self.holder:
            logs.logger().warning("waiting_for_lock", holder=holder)
        self.holder = holder


def _is_gone(value: bytes) -> bool:
    try:
        return msgspec.json.decode(value, type=Holder).is_gone()
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False


def _now() -> float:
    """Return monotonic seconds that count the time a machine was suspended as well."""
    return time.clock_gettime(_ASLEEP_TOO)
