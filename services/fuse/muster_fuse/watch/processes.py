"""Adapter for /proc: finds processes that serve FUSE connections, or were killed but cannot end.

Since Linux 6.16, the kernel shows the connection of an open /dev/fuse. On older kernels, every
process of a pod with an open /dev/fuse counts as serving all mounts of its pod.

A pod may have millions of descriptors, threads and mounts. Only a limited number of each is read; a
pod that exceeds the limit hides only the state of its own mounts.
"""

import contextlib
import itertools
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from muster_fuse.request import caller

_PROC: Final = Path("/proc")
_TEXT_BYTES_MAX: Final = 65_536
_DEVICE: Final = "fuse"
"""The device's file name; its path depends on the mount namespace in which it was opened."""
_CONNECTION: Final = re.compile(r"^fuse_connection:\s*([0-9]+)$", re.MULTILINE | re.ASCII)
_ENTRIES_MAX: Final = 4096
"""The maximum number of descriptors or threads read per process."""
_POD_ENTRIES_MAX: Final = 65_536
"""The maximum number of entries read per pod, or per process outside of pods."""
_DEVICES_MAX: Final = 2048
"""The maximum number of descriptors per pod that are examined because of their file's name."""
_MOUNTINFO_BYTES_MAX: Final = 1 << 25
"""The maximum size of a pod's mount tables; each mount namespace is read once."""
_SIGKILL: Final = 1 << 8
_PENDING: Final = ("SigPnd:", "ShdPnd:")
_UTIME: Final = 11
_STARTED: Final = 19
"""The index of the start time in /proc/<pid>/stat.

Like `_UTIME`, it counts the fields after the name, which ends with the last parenthesis.
"""


class Holder(NamedTuple):
    """A process with an open /dev/fuse, and its connection if the kernel shows it.

    `pod_uid` is None if the process is in none of the requested pods.
    """

    pid: int
    started: str
    descriptor: str
    connection: int | None
    pod_uid: str | None


def worked_ticks(holder: Holder) -> int | None:
    """Return the processor time of a holder, in ticks; None if it ended or closed the device."""
    process = _PROC / str(holder.pid)
    try:
        fields = _stat(process)
        connection = _held(process, holder.descriptor)
    except (OSError, ValueError):
        return None
    if (fields[_STARTED], connection) != (holder.started, holder.connection):
        return None
    return int(fields[_UTIME]) + int(fields[_UTIME + 1])


def holders(pods: Collection[str], *, everywhere: bool) -> Iterator[Holder]:
    """Yield the processes of these pods, or of the whole node, that have /dev/fuse open.

    A process is yielded once for each connection.
    """
    entries = _Entries()
    for process in _processes():
        with contextlib.suppress(OSError, ValueError):
            uid = _pod_uid(process)
            if not everywhere and uid not in pods:
                continue
            held = {
                connection: descriptor for descriptor, connection in entries.devices(process, uid)
            }
            for connection, descriptor in held.items():
                yield Holder(
                    pid=int(process.name),
                    started=_stat(process)[_STARTED],
                    descriptor=descriptor,
                    connection=connection,
                    pod_uid=uid if uid in pods else None,
                )


def killed(pods: Collection[str]) -> set[str]:
    """Return the uids of the pods that have a process that was killed but has not ended."""
    stuck = set()
    entries = _Entries()
    for process in _processes() if pods else ():
        with contextlib.suppress(OSError, ValueError):
            uid = _pod_uid(process)
            if uid in pods and any(map(_is_killed, entries.paths(process / "task", uid))):
                stuck.add(uid or "")
    return stuck


@dataclass(slots=True)
class Seen:
    """The FUSE file systems that the processes of a pod see mounted, by connection."""

    mounted: dict[int, caller.MountLine] = field(default_factory=dict)
    served: set[int] = field(default_factory=set)
    """The connections that a process of the pod serves, if the kernel shows them."""
    tables: dict[int, int] = field(default_factory=dict)
    """How many bytes of its mount tables were read, by mount namespace."""


def seen_by(pods: Collection[str]) -> dict[str, Seen]:
    """Return the file systems that the processes of each of these pods see and serve."""
    all_seen = {uid: Seen() for uid in pods}
    entries = _Entries()
    for process in _processes():
        with contextlib.suppress(OSError, ValueError):
            uid = _pod_uid(process)
            if uid is None or uid not in all_seen:
                continue
            seen = all_seen[uid]
            namespace = (process / "ns" / "mnt").stat().st_ino
            left = _MOUNTINFO_BYTES_MAX - sum(seen.tables.values())
            if namespace not in seen.tables and left > 0:
                seen.tables[namespace] = 0
                for line in _mountinfo(process, left):
                    seen.tables[namespace] += len(line)
                    seen.mounted.update(_fuse_mount(line))
            for _, connection in entries.devices(process, uid):
                if connection is not None:
                    seen.served.add(connection)
    return all_seen


class _Entries:
    """Lists the entries of processes' directories, up to a limit for each pod."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()
        self._examined: Counter[str] = Counter()

    def of(self, directory: Path, pod_uid: str | None) -> Iterator[str]:
        """Yield the first entries of a directory. Raises OSError."""
        counted = pod_uid or str(directory)
        left = _POD_ENTRIES_MAX - self._seen[counted]
        with os.scandir(directory) as entries:
            for entry in itertools.islice(entries, min(left, _ENTRIES_MAX)):
                self._seen[counted] += 1
                yield entry.name

    def devices(self, process: Path, pod_uid: str | None) -> Iterator[tuple[str, int | None]]:
        """Yield the descriptors of /dev/fuse, each with its connection or None. Raises OSError.

        Nearly all descriptors are other files; their links show this without another read.
        """
        counted = pod_uid or str(process)
        for descriptor in self.of(process / "fd", pod_uid):
            with contextlib.suppress(OSError, ValueError):
                link = os.readlink(f"{process}/fd/{descriptor}")  # noqa: PTH115  # many
                if link.endswith(_DEVICE) and self._examined[counted] < _DEVICES_MAX:
                    self._examined[counted] += 1
                    yield descriptor, _held(process, descriptor)

    def paths(self, directory: Path, pod_uid: str | None) -> Iterator[Path]:
        """Yield the first entries of a directory as paths. Raises OSError."""
        return (directory / name for name in self.of(directory, pod_uid))


def _mountinfo(process: Path, bytes_max: int) -> Iterator[bytes]:
    with (process / "mountinfo").open("rb") as file:
        for line in file:
            bytes_max -= len(line)
            if bytes_max < 0:
                return
            yield line


def _fuse_mount(line: bytes) -> dict[int, caller.MountLine]:
    if b" - fuse" in line:
        mount = caller.read_line(line.decode(errors="surrogateescape"))
        if mount.is_fuse:
            return {int(mount.device.partition(":")[2]): mount}
    return {}


def _processes() -> list[Path]:
    return [path for path in _PROC.iterdir() if path.name.isdecimal()]


def _held(process: Path, descriptor: str) -> int | None:
    """Return the connection that a descriptor serves; None if the kernel does not show it.

    Raises ValueError if the descriptor is not /dev/fuse. No path is followed: a pod's file may be
    on a file system that hangs.
    """
    if (process / "fd" / descriptor).readlink().name != _DEVICE:
        raise ValueError("not the device")
    match = _CONNECTION.search(_text(process / "fdinfo" / descriptor))
    return int(match[1]) if match else None


def _is_killed(thread: Path) -> bool:
    """Return whether a thread has a pending SIGKILL."""
    return any(
        line.startswith(_PENDING) and int(line.split()[1], 16) & _SIGKILL
        for line in _text(thread / "status").split("\n")
    )


def _stat(process: Path) -> list[str]:
    return _text(process / "stat").rpartition(")")[2].split()


def _pod_uid(process: Path) -> str | None:
    return caller.pod_uid(_text(process / "cgroup"))


def _text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_TEXT_BYTES_MAX).decode(errors="surrogateescape")
