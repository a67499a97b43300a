"""Adapter: the operating system: which process holds a lock, and whether it still runs."""

import os
import socket
import uuid
from pathlib import Path
from typing import Final

import msgspec

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
        here = this("")
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


def this(name: str) -> Holder:
    """Return this process."""
    try:
        # every machine's first namespace of processes has the same number
        space = f"{_BOOT.read_text().strip()} {_SPACE.readlink()}"
    except OSError:
        space = ""
    return Holder(name=name, host=socket.gethostname(), space=space, pid=os.getpid(), life=_LIFE)


def decode(value: bytes) -> Holder | None:
    """Return the process that a claim names, or None if it names none."""
    try:
        return msgspec.json.decode(value, type=Holder)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
