"""Adapter: a lock in NATS: one of several processes holds it, and knows for how long it may act.

The lock is a key that expires unless it is renewed, and can be renewed only by who wrote it last.
Time is counted from before the request that renewed it, so that we end before the server gives the
lock to another; a process that was stopped meanwhile finds out when it next asks `revision`.

Who empties or removes the bucket takes the lock from its holder, who learns of it when it next
renews: until then the next one may act too, as a greater revision.
"""

import asyncio
import dataclasses
import os
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from muster.nats import buckets, connection, streams
from muster.service import logs

TRY_S: Final = 0.25
"""How soon who wants the lock asks for it again; of a take-over this is what comes on top."""

_RELEASE_S: Final = 0.5
_HOLDER_CHARS_MAX: Final = 500
_ASLEEP_TOO: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""The monotonic clock that goes on while the machine is suspended, where there is one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """The key that is the lock."""

    link: connection.Connection
    bucket: streams.Bucket
    name: str

    async def claim(
        self, value: bytes, *, ttl_s: int, revision: int, timeout_s: float
    ) -> streams.Claimed:
        """Write if nobody wrote since `revision`; see `buckets.claim`."""
        return await buckets.claim(
            self.link,
            self.bucket,
            self.name,
            value,
            ttl_s=ttl_s,
            revision=revision,
            timeout_s=timeout_s,
        )

    async def release(self, *, revision: int, timeout_s: float) -> None:
        """Remove what was written at `revision`; see `buckets.release`."""
        await buckets.release(
            self.link, self.bucket, self.name, revision=revision, timeout_s=timeout_s
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How long a claim lasts, how often it is renewed, how much before its end we end."""

    ttl_s: int
    renew_s: float
    margin_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How it stands: who holds the lock, if that is known; as which revision we do, if we do."""

    holder: str
    revision: int | None


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
        self._name = str(us)
        self._us = msgspec.json.encode(us)
        self._terms = terms
        self._told = told
        self._entry = 0
        """What the key's revision must be for our next claim to succeed."""
        self._token: int | None = None
        self._until = _now()
        self._other = ""
        self._changed = asyncio.Condition()
        self._answered_at = _now()
        self._away = ""
        """Why there is no answer to what we last asked, if there is none."""
        self._is_asking = False
        """Whether we asked for what we have no answer to: it may have come through."""
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
        if self.revision() is not None and self._is_asking:
            # what came through of that is newer than what we know of
            last = asyncio.wait_for(self._try(), _RELEASE_S)
            await asyncio.gather(last, return_exceptions=True)
        if self.revision() is not None:
            self._token = None
            await self._key.release(revision=self._entry, timeout_s=_RELEASE_S)
        await self._tell()

    async def failed(self) -> None:
        """Raise what ended our asking, once something does: then nobody would renew the lock."""
        assert self._task is not None, "asked before being entered"
        await asyncio.wait([self._task])
        self._task.result()

    def problem(self) -> str | None:
        """Return why nobody knows who holds the lock, if that lasts longer than a claim."""
        away_s = _now() - self._answered_at
        if away_s <= self._terms.ttl_s:
            return None
        return f"the lock has not answered for {away_s:.0f} s: {self._away or 'not asked'}"

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
        self._is_asking = True
        try:
            found = await self._key.claim(
                self._us,
                ttl_s=terms.ttl_s,
                revision=self._entry,
                timeout_s=min(terms.renew_s, left_s),
            )
        except TimeoutError as error:
            self._note_away(str(error) or "no answer")
            return TRY_S
        self._is_asking = False
        self._answered_at, self._away = _now(), ""
        self._other = "" if found.value == self._us else _said(found.value)
        if found.value == self._us:
            return self._had(found, asked_at)
        self._until = asked_at
        known = decode_holder(found.value)
        is_free = not found.value or (known is not None and known.is_gone())
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
        revision = self.revision()
        name = self._other if revision is None else self._name
        was, now = self.standing, Standing(holder=name, revision=revision)
        if now == was:
            return
        self.standing = now
        async with self._changed:
            self._changed.notify_all()
        self._told(was, now)

    def _note_away(self, why: str) -> None:
        if not self._away:
            logs.logger().warning("lock_away", error=why)
        self._away = why


def _said(value: bytes) -> str:
    """Return who wrote a value, for people."""
    return str(decode_holder(value) or value.decode("utf-8", "replace"))[:_HOLDER_CHARS_MAX]


def _now() -> float:
    """Return monotonic seconds that count the time a machine was suspended as well."""
    return time.clock_gettime(_ASLEEP_TOO)


_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_SPACE: Final = Path("/proc/self/ns/pid")
_LIFE: Final = uuid.uuid4().hex


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A process, so named that its next life knows that it is gone.

    `name` is of this life and no other: so a claim whose answer was lost is known to be ours.
    `space` is where `pid` means something; empty if nobody knows. `life` tells this process from a
    later one that has its number.
    """

    name: str
    host: str
    space: str
    pid: int
    life: str = ""

    def __str__(self) -> str:
        """Say who it is, for people."""
        return f"{self.name} ({self.host}, process {self.pid})"

    def is_gone(self) -> bool:
        """Tell whether it ran where we run, and runs no more; False if nobody knows."""
        here = this_process("")
        if not self.space or (self.host, self.space) != (here.host, here.space) or self.pid <= 0:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):
            return False
        # a life before this one had our number
        return self.pid == here.pid and self.life != here.life


def this_process(name: str) -> Holder:
    """Return this process."""
    try:
        # every machine's first namespace of processes has the same number
        space = f"{_BOOT.read_text().strip()} {_SPACE.readlink()}"
    except OSError:
        space = ""
    return Holder(name=name, host=socket.gethostname(), space=space, pid=os.getpid(), life=_LIFE)


def decode_holder(value: bytes) -> Holder | None:
    """Return the process that a claim names, or None if it names none."""
    try:
        return msgspec.json.decode(value, type=Holder)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
