"""Adapter: identifies the processes that serve sockets, and reports if they are halted or ended.

The kernel reports the PID of a connection's peer (SO_PEERCRED) in this process's PID namespace: 0
unless the pod has `hostPID`. Since Linux 6.5 it also returns a pidfd of the peer (SO_PEERPIDFD),
which becomes readable when the process ends, in any namespace. Since 6.9 the pidfd's inode
identifies the process.
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
    """Watches the processes behind sockets; calls `on_end` when a process has ended."""

    def __init__(
        self, on_end: Callable[[observation.ProcessEnded], None], *, proc: Path = Path("/proc")
    ) -> None:
        self._on_end = on_end
        self._proc = proc
        self._pidfds: dict[tuple[str, str], int] = {}
        self._pids: dict[str, int] = {}
        self._has_unique_inodes = _has_unique_inodes()

    def peer(self, connection: socket.socket, path: str) -> observation.Process:
        """Return the process that serves the socket at `path`, and watch it if possible."""
        size = struct.calcsize("3i")
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        pid, _, _ = struct.unpack("3i", credentials)
        pidfd = _peer_pidfd(connection, pid)
        identity = f"process {pid}" if pid > 0 else ""
        if pidfd is not None and self._has_unique_inodes:
            identity = str(os.fstat(pidfd).st_ino)
        is_watched = pidfd is not None and self._watch(path, identity, pidfd)
        is_visible = pid > 0 and (self._proc / str(pid)).exists()
        self._pids.pop(path, None)
        if not is_visible:
            return observation.Process(identity=identity, is_watched=is_watched)
        if len(self._pids) >= _WATCHED_MAX:
            del self._pids[next(iter(self._pids))]
        self._pids[path] = pid
        name = self._read(pid, "comm").strip()
        pod = _POD.search(self._read(pid, "cgroup"))
        return observation.Process(
            identity=identity,
            pid=pid,
            name="".join(char for char in name if char.isprintable()),
            pod=pod[1].replace("_", "-") if pod else "",
            is_watched=is_watched,
        )

    def halted(self) -> dict[str, str]:
        """Return the sockets whose processes cannot run, and why."""
        halted = {}
        for path, pid in self._pids.items():
            state = self._state(pid, "stat")
            # a process continues in its other threads after its main thread has ended
            if state in _HALTED and not (state == _ZOMBIE and len(self._threads(pid)) > 1):
                halted[path] = _HALTED[state]
        return halted

    def is_waiting(self, path: str) -> bool:
        """Return whether a thread of the process behind a socket is in an uninterruptible wait.

        Any process that reads from a disk is briefly in this state, so the state alone is no
        failure.
        """
        pid = self._pids.get(path)
        if pid is None:
            return False
        threads = self._threads(pid)
        return any(self._state(pid, f"task/{thread}/stat") == _WAITS for thread in threads)

    def close(self) -> None:
        """Stop watching all processes."""
        for key in [*self._pidfds]:
            self._forget(key)

    def _watch(self, path: str, identity: str, pidfd: int) -> bool:
        key = path, identity
        if key in self._pidfds:
            os.close(pidfd)
            return True
        if len(self._pidfds) >= _WATCHED_MAX:
            self._forget(next(iter(self._pidfds)))
        try:
            asyncio.get_running_loop().add_reader(pidfd, self._report_end, key)
        except OSError:
            os.close(pidfd)
            return False
        self._pidfds[key] = pidfd
        return True

    def _report_end(self, key: tuple[str, str]) -> None:
        self._forget(key)
        self._pids.pop(key[0], None)
        self._on_end(observation.ProcessEnded(*key))

    def _forget(self, key: tuple[str, str]) -> None:
        pidfd = self._pidfds.pop(key)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)

    def _threads(self, pid: int) -> list[str]:
        with contextlib.suppress(OSError), os.scandir(self._proc / str(pid) / "task") as threads:
            return [each.name for each in itertools.islice(threads, _THREADS_MAX)]
        return []

    def _state(self, pid: int, file: str) -> str:
        # the name in brackets may contain anything
        return self._read(pid, file).rpartition(") ")[2][:1]

    def _read(self, pid: int, file: str) -> str:
        with contextlib.suppress(OSError), (self._proc / str(pid) / file).open("rb") as opened:
            return opened.read(_BYTES_MAX).decode(errors="replace")
        return ""


def _peer_pidfd(connection: socket.socket, pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    if pid > 0:
        with contextlib.suppress(OSError):
            return os.pidfd_open(pid)
    return None


def _has_unique_inodes() -> bool:
    """Return whether each process's pidfd has a separate inode."""
    with contextlib.suppress(OSError):
        process, other = os.pidfd_open(os.getpid()), os.eventfd(0)
        try:
            return os.fstat(process).st_dev != os.fstat(other).st_dev
        finally:
            os.close(process)
            os.close(other)
    return False
