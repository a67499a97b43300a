"""Adapter: the processes that serve sockets: who they are, whether they can run, and their end.

The kernel names the peer of a connection (SO_PEERCRED) by its number in this process's namespace: 0
unless the pod has `hostPID`. Since Linux 6.5 it gives a descriptor of the peer as well
(SO_PEERPIDFD), which tells the end of any process, whatever its namespace; since 6.9 the
descriptor's inode identifies the process.
"""

import asyncio
import contextlib
import itertools
import os
import re
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

from muster_plugin.watch import observation

_SO_PEERPIDFD: Final = 77
_WATCHED_MAX: Final = 512
_BYTES_MAX: Final = 4096
_THREADS_MAX: Final = 64
_POD: Final = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})")
_HALTED: Final = {"T": "stopped", "t": "stopped by a debugger", "Z": "a zombie"}
_ZOMBIE, _WAITS = "Z", "D"


class ProcessWatch:
    """Watches the processes behind sockets; `on_end` gets each end."""

    def __init__(
        self, on_end: Callable[[observation.ProcessEnded], None], *, proc: Path = Path("/proc")
    ) -> None:
        self._on_end = on_end
        self._proc = proc
        self._descriptors: dict[tuple[str, str], int] = {}
        self._numbers: dict[str, int] = {}
        self._has_unique_inodes = _has_unique_inodes()

    def peer(self, connection: socket.socket, path: str) -> observation.Process:
        """Return the process that serves the socket at `path`, and watch it from now on."""
        size = struct.calcsize("3i")
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        number, _, _ = struct.unpack("3i", credentials)
        descriptor = _peer_descriptor(connection, number)
        identity = f"process {number}" if number > 0 else ""
        if descriptor is not None and self._has_unique_inodes:
            identity = str(os.fstat(descriptor).st_ino)
        is_watched = descriptor is not None and self._watch(path, identity, descriptor)
        is_visible = number > 0 and (self._proc / str(number)).exists()
        self._numbers.pop(path, None)
        if not is_visible:
            return observation.Process(identity=identity, is_watched=is_watched)
        if len(self._numbers) >= _WATCHED_MAX:
            del self._numbers[next(iter(self._numbers))]
        self._numbers[path] = number
        name = self._read(number, "comm").strip()
        pod = _POD.search(self._read(number, "cgroup"))
        return observation.Process(
            identity=identity,
            number=number,
            name="".join(char for char in name if char.isprintable()),
            pod=pod[1].replace("_", "-") if pod else "",
            is_watched=is_watched,
        )

    def halted(self) -> dict[str, str]:
        """Return the sockets whose processes cannot run, and why."""
        halted = {}
        for path, number in self._numbers.items():
            state = self._state(number, "stat")
            # other threads of a process go on when the first has ended
            if state in _HALTED and not (state == _ZOMBIE and len(self._threads(number)) > 1):
                halted[path] = _HALTED[state]
        return halted

    def is_waiting(self, path: str) -> bool:
        """Return whether a thread of the process behind a socket is in an uninterruptible wait.

        Every process is for a moment, when it reads from a disk: this alone is no failure.
        """
        number = self._numbers.get(path)
        if number is None:
            return False
        threads = self._threads(number)
        return any(self._state(number, f"task/{thread}/stat") == _WAITS for thread in threads)

    def close(self) -> None:
        """Watch nothing any more."""
        for key in [*self._descriptors]:
            self._forget(key)

    def _watch(self, path: str, identity: str, descriptor: int) -> bool:
        key = path, identity
        if key in self._descriptors:
            os.close(descriptor)
            return True
        if len(self._descriptors) >= _WATCHED_MAX:
            self._forget(next(iter(self._descriptors)))
        try:
            asyncio.get_running_loop().add_reader(descriptor, self._ended, key)
        except OSError:
            os.close(descriptor)
            return False
        self._descriptors[key] = descriptor
        return True

    def _ended(self, key: tuple[str, str]) -> None:
        self._forget(key)
        self._numbers.pop(key[0], None)
        self._on_end(observation.ProcessEnded(*key))

    def _forget(self, key: tuple[str, str]) -> None:
        descriptor = self._descriptors.pop(key)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)

    def _threads(self, number: int) -> list[str]:
        with contextlib.suppress(OSError), os.scandir(self._proc / str(number) / "task") as threads:
            return [each.name for each in itertools.islice(threads, _THREADS_MAX)]
        return []

    def _state(self, number: int, file: str) -> str:
        # the name in brackets may contain anything
        return self._read(number, file).rpartition(") ")[2][:1]

    def _read(self, number: int, file: str) -> str:
        with contextlib.suppress(OSError), (self._proc / str(number) / file).open("rb") as opened:
            return opened.read(_BYTES_MAX).decode(errors="replace")
        return ""


def _peer_descriptor(connection: socket.socket, number: int) -> int | None:
    with contextlib.suppress(OSError):
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    if number > 0:
        with contextlib.suppress(OSError):
            return os.pidfd_open(number)
    return None


def _has_unique_inodes() -> bool:
    """Return whether descriptors of processes have inodes of their own."""
    with contextlib.suppress(OSError):
        process, other = os.pidfd_open(os.getpid()), os.eventfd(0)
        try:
            return os.fstat(process).st_dev != os.fstat(other).st_dev
        finally:
            os.close(process)
            os.close(other)
    return False
