"""Adapter: fusectl, the kernel's file system that lists and aborts FUSE connections.

It is accessed through an unattached mount, so that no mount table changes. All mounts of fusectl
share one file system: as long as one mount exists, all processes see the same inodes.
"""

import os
import threading
from typing import Final, NamedTuple

from muster_fuse.kernel import syscalls
from muster_fuse.watch import mounts

_NUMBER_BYTES_MAX: Final = 32


class Identity(NamedTuple):
    """The data that distinguish a connection from an earlier one with the same number."""

    inode: int
    created_ns: int


class Connections:
    """The FUSE connections of this machine.

    Each call may block on the kernel's locks, and raises OSError if the kernel has no FUSE.
    """

    def __init__(self) -> None:
        self._mount = -1
        self._opening = threading.Lock()

    def open(self) -> None:
        """Mount fusectl; its inodes do not change while it is mounted."""
        self._root()

    def close(self) -> None:
        """Close the mount; the next call mounts fusectl again."""
        if self._mount >= 0:
            os.close(self._mount)
        self._mount = -1

    def identity(self, number: int) -> Identity | None:
        """Return the identity of a connection, or None if no connection has that number."""
        try:
            status = os.stat(str(number), dir_fd=self._root())
        except FileNotFoundError:
            return None
        return Identity(status.st_ino, status.st_ctime_ns)

    def waiting(self, mount: mounts.Mount) -> int | None:
        """Return how many requests wait for a mount's daemon; None if it is unmounted."""
        directory = self._open(mount)
        if directory is None:
            return None
        try:
            file = os.open("waiting", os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
        except FileNotFoundError:
            return None
        finally:
            os.close(directory)
        try:
            # the file is empty if the mount was removed in between
            return int(os.read(file, _NUMBER_BYTES_MAX) or b"0")
        finally:
            os.close(file)

    def abort(self, mount: mounts.Mount) -> bool:
        """Abort the connection of a mount; return whether it still existed."""
        directory = self._open(mount)
        if directory is None:
            return False
        try:
            file = os.open("abort", os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
        except FileNotFoundError:
            return False
        finally:
            os.close(directory)
        try:
            os.write(file, b"1")
        finally:
            os.close(file)
        return True

    def _root(self) -> int:
        """Return the root of fusectl, which the first call mounts."""
        with self._opening:
            if self._mount < 0:
                self._mount = syscalls.open_connections()
            return self._mount

    def _open(self, mount: mounts.Mount) -> int | None:
        """Open the directory of a mount's connection; None if gone or if its number was reused."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            directory = os.open(str(mount.connection), flags, dir_fd=self._root())
        except FileNotFoundError:
            return None
        status = os.fstat(directory)
        if (status.st_ino, status.st_ctime_ns) == (mount.inode, mount.created_ns):
            return directory
        os.close(directory)
        return None
