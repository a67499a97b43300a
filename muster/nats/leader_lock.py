"""Adapter for NATS: a lock with expiry that elects one of several processes as leader.

The lock is a key that expires unless it is renewed, and only the process that wrote it last can
renew it. The holder measures the expiry from the time before it sent the renewal, so that it stops
acting before another process can acquire the lock. A process that was suspended notices the expiry
when it next calls `term`.

If the bucket is emptied or removed, the holder loses the lock but notices only at its next renewal:
until then the next holder may also act, in a later term.
"""

import asyncio
import dataclasses
import os
import socket
import uuid
from pathlib import Path
from typing import Final

import msgspec

from muster import codec, leadership
from muster.nats import connection, storage, streams
from muster.service import logs

RETRY_S: Final = 0.25
"""How long a process without the lock waits before each attempt to acquire it; a takeover may be
late by this time.
"""

_RELEASE_S: Final = 0.5
_HOLDER_CHARS_MAX: Final = 500
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE: Final = Path("/proc/self/ns/pid")
_LIFE: Final = uuid.uuid4().hex


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A process that claims a lock, with data by which others can detect that it has ended.

    `name` is unique to this process, so that it recognizes its own claim if the answer was lost.
    `space` is the PID namespace of `pid`; empty if unknown. `life` distinguishes this process from
    a later one with the same `pid`.
    """

    name: str
    host: str
    space: str
    pid: int
    life: str = ""

    def __str__(self) -> str:
        """Return the holder as text for people."""
        return f"{self.name} ({self.host}, process {self.pid})"

    def is_gone(self) -> bool:
        """Return whether the process ran on this machine and has ended; False if unknown."""
        us = this_process("")
        if not self.space or (self.host, self.space) != (us.host, us.space) or self.pid <= 0:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):
            return False
        # an earlier process had the same process id
        return self.pid == us.pid and self.life != us.life


def this_process(name: str) -> Holder:
    """Return the holder that describes this process."""
    try:
        # the first PID namespace of every machine has the same number
        space = f"{_BOOT_ID.read_text().strip()} {_PID_NAMESPACE.readlink()}"
    except OSError:
        space = ""
    return Holder(name=name, host=socket.gethostname(), space=space, pid=os.getpid(), life=_LIFE)


def decode_holder(value: bytes) -> Holder | None:
    """Return the process that a claim names; None if the value is not a claim."""
    try:
        return msgspec.json.decode(value, type=Holder)
    except codec.UNREADABLE:
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """The key in a NATS bucket that serves as the lock."""

    link: connection.Connection
    bucket: streams.Bucket
    name: str

    async def claim(
        self, value: bytes, *, ttl_s: int, revision: int, timeout_s: float
    ) -> streams.Claimed:
        """Claim the key if it has not been written since `revision` (see `storage.claim`)."""
        return await storage.claim(
            self.link,
            self.bucket,
            self.name,
            value,
            ttl_s=ttl_s,
            revision=revision,
            timeout_s=timeout_s,
        )

    async def release(self, *, revision: int, timeout_s: float) -> None:
        """Remove the claim written at `revision` (see `storage.release`)."""
        await storage.release(
            self.link, self.bucket, self.name, revision=revision, timeout_s=timeout_s
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The lifetime of a claim, when it is renewed, and how early its holder stops acting."""

    ttl_s: int
    renew_s: float
    margin_s: float


class Lock(leadership.Election):
    """A process that holds the lock or waits for it.

    Its term is the revision at which the key was claimed.
    """

    def __init__(
        self, key: Key, *, us: Holder, timing: Timing, on_change: leadership.OnChange
    ) -> None:
        super().__init__(str(us), on_change)
        self._key = key
        self._us = msgspec.json.encode(us)
        self._timing = timing
        self._revision = 0
        """The revision that the key must have for the next claim to succeed."""
        self._answered_at = leadership.now()
        self._error = ""
        """Why the last request had no answer; empty if it was answered."""
        self._is_unanswered = False
        """Whether the last request may have succeeded without an answer."""

    def problem(self) -> str | None:
        """Return why the holder has been unknown for more than a claim's lifetime, or None."""
        unanswered_s = leadership.now() - self._answered_at
        if unanswered_s <= self._timing.ttl_s:
            return None
        reason = self._error or "not queried yet"
        return f"the lock has been unreachable for {unanswered_s:.0f} s: {reason}"

    async def _keep(self) -> None:
        while True:
            wait_s = await self._try()
            await self._report()
            await asyncio.sleep(wait_s)

    async def _resign(self) -> None:
        if self._is_unanswered:
            # a renewal that succeeded unnoticed has a newer revision than the known one
            last = asyncio.wait_for(self._try(), _RELEASE_S)
            await asyncio.gather(last, return_exceptions=True)
        if self.term() is not None:
            self._term = None
            await self._key.release(revision=self._revision, timeout_s=_RELEASE_S)

    async def _try(self) -> float:
        """Claim or renew the lock once; return the seconds until the next call."""
        asked_at = leadership.now()
        timing = self._timing
        left_s = timing.renew_s if self.term() is None else self._until - asked_at
        self._is_unanswered = True
        try:
            claimed = await self._key.claim(
                self._us,
                ttl_s=timing.ttl_s,
                revision=self._revision,
                timeout_s=min(timing.renew_s, left_s),
            )
        except TimeoutError as error:
            self._note_error(str(error) or "no answer")
            return RETRY_S
        self._is_unanswered = False
        self._answered_at, self._error = leadership.now(), ""
        self._other_leader = "" if claimed.value == self._us else _shown_holder(claimed.value)
        if claimed.value == self._us:
            return self._on_claimed(claimed, asked_at)
        self._until = asked_at
        holder = decode_holder(claimed.value)
        is_free = not claimed.value or (holder is not None and holder.is_gone())
        was, self._revision = self._revision, claimed.revision if is_free else 0
        return 0.0 if is_free and was != self._revision else RETRY_S

    def _on_claimed(self, claimed: streams.Claimed, asked_at: float) -> float:
        self._revision = claimed.revision
        if not claimed.written:
            # an earlier claim succeeded at an unknown time, so renew it now
            return 0.0
        self._term = self.term() or claimed.revision
        self._until = asked_at + self._timing.ttl_s - self._timing.margin_s
        return self._timing.renew_s

    def _note_error(self, error: str) -> None:
        if not self._error:
            logs.logger().warning("lock_unavailable", lock=self._key.name, error=error)
        self._error = error


def _shown_holder(value: bytes) -> str:
    """Return the holder that a value names, for people."""
    return str(decode_holder(value) or value.decode("utf-8", "replace"))[:_HOLDER_CHARS_MAX]
