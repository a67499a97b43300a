"""Door to a lock in NATS: one of several processes holds it, and knows for how long it may act.

The lock is a key that expires unless it is renewed, and can be renewed only by who wrote it last.
Time is counted from before the request that renewed it, so that we end before the server gives the
lock to another; a process that was stopped meanwhile finds out when it next asks `revision`.
"""

import asyncio
import dataclasses
import functools
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self

import msgspec

from muster import buckets, connection, logs, streams

TRY_S: Final = 0.25
"""How soon who wants the lock asks for it again; of a take-over this is what comes on top."""

_RELEASE_S: Final = 0.5
_HOLDER_CHARS_MAX: Final = 500
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_SPACE: Final = Path("/proc/self/ns/pid")
_ASLEEP_TOO: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""The monotonic clock that goes on while the machine is suspended, where there is one."""


class Claim(Protocol):
    """`buckets.claim` of one key."""

    def __call__(
        self, value: bytes, *, ttl_s: int, revision: int, timeout_s: float
    ) -> Awaitable[streams.Claimed]:
        """Write if nobody wrote since `revision`; return what is there. May raise TimeoutError."""


class Release(Protocol):
    """`buckets.release` of one key."""

    def __call__(self, *, revision: int, timeout_s: float) -> Awaitable[None]:
        """Remove what was written at `revision`, if it is still there."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """The key that is the lock, as the bus lets us use it."""

    claim: Claim
    release: Release


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How long a claim lasts, how often it is renewed, how much before its end we end."""

    ttl_s: int
    renew_s: float
    margin_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How it stands: who holds the lock, if anybody; and as which revision we do, if we do."""

    holder: str
    revision: int | None


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A process, so named that its next life knows that it is gone.

    `name` is of this life and no other: so a claim whose answer was lost is known to be ours.
    `space` is where `pid` means something; empty if nobody knows.
    """

    name: str
    host: str
    space: str
    pid: int

    def __str__(self) -> str:
        """Say who it is, for people."""
        return f"{self.name} ({self.host}, process {self.pid})"

    def is_gone(self) -> bool:
        """Tell whether it ran where we run, and runs no more."""
        here = this("")
        if not self.space or (self.host, self.space) != (here.host, here.space):
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        # a life before this one had our number
        return self.pid == here.pid


def this(name: str) -> Holder:
    """Return this process."""
    try:
        # every machine's first namespace of processes has the same number
        space = f"{_BOOT.read_text().strip()} {_SPACE.readlink()}"
    except OSError:
        space = ""
    return Holder(name=name, host=socket.gethostname(), space=space, pid=os.getpid())


def key(link: connection.Connection, bucket: streams.Bucket, name: str) -> Key:
    """Return a key of a bucket."""
    return Key(
        claim=functools.partial(buckets.claim, link, bucket, name),
        release=functools.partial(buckets.release, link, bucket, name),
    )


class Lock:
    """One process that holds the lock or waits for it; an async context manager.

    `told` is called with each change of how it stands: what was, and what is.
    """

    def __init__(
        self,
        on: Key,
        *,
        us: Holder,
        terms: Terms,
        told: Callable[[Standing, Standing], None],
    ) -> None:
        self.standing = Standing(holder="", revision=None)
        """As last told; whether we may still act, only `revision` says."""
        self._key = on
        self._us = msgspec.json.encode(us)
        self._terms = terms
        self._told = told
        self._entry = 0
        """What the key's revision must be for our next claim to succeed."""
        self._token: int | None = None
        self._until = _now()
        self._holder = ""
        self._changed = asyncio.Condition()
        self._is_away = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Begin to ask for the lock."""
        self._task = asyncio.create_task(self._keep())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Hold it no more, and leave it to the next at once."""
        assert self._task is not None, "left without being entered"
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self.revision() is not None:
            self._token = None
            await self._key.release(revision=self._entry, timeout_s=_RELEASE_S)
        await self._tell()

    def revision(self) -> int | None:
        """Return as which revision we may act right now; None if we may not.

        Ask before each act: our time ends by passing, and a process that slept does not know it
        yet. Who holds the lock later has a greater revision.
        """
        return self._token if _now() < self._until else None

    def still(self, revision: int) -> bool:
        """Tell whether we may act right now, and held the lock as this revision without a break."""
        return self.revision() == revision

    async def follow(self) -> AsyncIterator[int | None]:
        """Give as which revision we hold it, None if we do not, then every change."""
        while True:
            seen = self.standing.revision
            yield seen
            async with self._changed:
                while self.standing.revision == seen:
                    await self._changed.wait()

    async def _keep(self) -> None:
        while True:
            wait_s = await self._try()
            await self._tell()
            await asyncio.sleep(wait_s)

    async def _try(self) -> float:
        """Claim or renew once; return when to do so again."""
        asked_at = _now()
        terms = self._terms
        left_s = terms.renew_s if self.revision() is None else self._until - asked_at
        try:
            found = await self._key.claim(
                self._us,
                ttl_s=terms.ttl_s,
                revision=self._entry,
                timeout_s=min(terms.renew_s, left_s),
            )
        except TimeoutError as error:
            self._log_away(str(error) or "no answer")
            return TRY_S
        self._is_away = False
        self._holder = _said(found.value)
        if found.value == self._us:
            return self._had(found, asked_at)
        self._until = asked_at
        is_free = not found.value or _is_gone(found.value)
        was, self._entry = self._entry, found.revision if is_free else 0
        return 0.0 if is_free and was != self._entry else TRY_S

    def _had(self, found: streams.Claimed, asked_at: float) -> float:
        self._entry = found.revision
        if not found.written:
            # an earlier claim came through, nobody knows when: renew it now
            return 0.0
        self._token = self.revision() or found.revision
        self._until = asked_at + self._terms.ttl_s - self._terms.margin_s
        return self._terms.renew_s

    async def _tell(self) -> None:
        was, now = self.standing, Standing(holder=self._holder, revision=self.revision())
        if now == was:
            return
        self.standing = now
        async with self._changed:
            self._changed.notify_all()
        self._told(was, now)

    def _log_away(self, why: str) -> None:
        if not self._is_away:
            self._is_away = True
            logs.logger().warning("lock_away", error=why)


def _holder(value: bytes) -> Holder | None:
    try:
        return msgspec.json.decode(value, type=Holder)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _is_gone(value: bytes) -> bool:
    found = _holder(value)
    return found is not None and found.is_gone()


def _said(value: bytes) -> str:
    """Return who wrote a value, for people."""
    return str(_holder(value) or value.decode("utf-8", "replace"))[:_HOLDER_CHARS_MAX]


def _now() -> float:
    """Return monotonic seconds that count the time a machine was suspended as well."""
    return time.clock_gettime(_ASLEEP_TOO)
