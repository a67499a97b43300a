"""Adapter for /proc: finds the processes and attached mounts that keep a mount in use.

No request is sent to a FUSE daemon, because it might not answer. Two kinds of users are not found:
processes that have moved to another mount namespace with files of the mount open, and threads whose
first thread has ended. If only these use a mount, it is removed as by a lazy unmount. Only small
modules of the standard library are imported, and text files are read as bytes, because decoding
would import a codec.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

from muster_fuse.kernel import syscalls

_PROC = "/proc"


class _Mount(NamedTuple):
    id: int
    parent_id: int
    point: bytes


class MountUsers:
    """Finds the users of a mount in the mount namespace of the process with this pidfd.

    Its methods raise OSError.
    """

    def __init__(self, pidfd: int, mount: syscalls.Status) -> None:
        self._process = f"{_PROC}/{_process_id(pidfd)}"
        self._namespace = _mount_namespace(self._process)
        self._mount = mount

    def is_covered(self) -> bool:
        """Return whether another mount is attached to the root of the mount."""
        own = [mount.point for mount in self._mounts() if mount.id == self._mount.mount_id]
        return any(mount.point in own for mount in self._attached())

    def has_mounts(self) -> bool:
        """Return whether another mount is attached to the mount, at its root or below."""
        return any(True for _ in self._attached())

    def has_processes(self) -> bool:
        """Return whether a process has a working directory, an open file or mapped memory on it."""
        return any(self._uses(f"{_PROC}/{name}") for name in _names(_PROC) if name.isdecimal())

    def _attached(self) -> Iterator[_Mount]:
        return (mount for mount in self._mounts() if mount.parent_id == self._mount.mount_id)

    def _mounts(self) -> Iterator[_Mount]:
        # proc(5): id, id of the mount that it is attached to, device, root, mount point, ...
        for line in _lines(f"{self._process}/mountinfo"):
            mount_id, parent_id, _, _, point, _ = line.split(b" ", 5)
            yield _Mount(int(mount_id), int(parent_id), point)

    def _uses(self, process: str) -> bool:
        # a process may end at any moment
        with contextlib.suppress(OSError):
            return _mount_namespace(process) == self._namespace and (
                any(self._is_led_to(f"{process}/{link}") for link in ("cwd", "root"))
                or any(self._is_open(path) for path in _paths(f"{process}/fdinfo"))
                or self._is_mapped(f"{process}/maps")
            )
        return False

    def _is_led_to(self, link: str) -> bool:
        there = os.open(link, os.O_PATH | os.O_CLOEXEC)
        try:
            return syscalls.status(there).mount_id == self._mount.mount_id
        finally:
            os.close(there)

    def _is_open(self, fdinfo: str) -> bool:
        # a process may close a descriptor at any moment
        with contextlib.suppress(OSError):
            return b"mnt_id:\t%d\n" % self._mount.mount_id in _lines(fdinfo)
        return False

    def _is_mapped(self, maps: str) -> bool:
        # proc(5): addresses, permissions, offset, device, ...
        devices = (line.split(b" ", 4)[3] for line in _lines(maps))
        return b"00:%02x" % self._mount.minor in devices


def _process_id(pidfd: int) -> int:
    lines = _lines(f"{_PROC}/self/fdinfo/{pidfd}")
    return next(int(line[4:]) for line in lines if line.startswith(b"Pid:"))


def _mount_namespace(process: str) -> int:
    return os.stat(f"{process}/ns/mnt").st_ino  # noqa: PTH116  # no module more than needed


def _lines(path: str) -> Iterator[bytes]:
    with open(path, "rb") as lines:  # noqa: PTH123  # no module more than needed
        yield from lines


def _names(directory: str) -> list[str]:
    return os.listdir(directory)  # noqa: PTH208  # no module more than needed


def _paths(directory: str) -> Iterator[str]:
    return (f"{directory}/{name}" for name in _names(directory))
