"""Adapter for mounts: creates the file system of a pod's volume, and attaches it for the kubelet.

Each pod has its own tmpfs with the helper, the pod's socket and `dev-fuse`, the stub for /dev/fuse.
The file system itself is read-only, not only its mounts: container runtimes clear a mount's
read-only flag if a pod does not request it (opencontainers/runc#3967, since 1.2;
containers/crun#2247), and root in a container could then replace the helper and the socket.

The stub is a FIFO, because it must open for reading and writing, which is impossible for a regular
file on a read-only file system. A program that tries to mount with the stub gets EPERM, and then
calls the helper.

No path leads through a pod's directories: all paths belong to the kubelet or to us. A mount point
that may hang is never accessed, not even by stat.
"""

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

from muster_fuse.kernel import syscalls

SOCKET: Final = "broker.sock"
HELPER: Final = "fusermount3"
STUB: Final = "dev-fuse"
_ALWAYS: Final = syscalls.MS_NOSUID | syscalls.MS_NODEV
_OPTIONS: Final = "size=1m,nr_inodes=16,mode=0755"
_LAYERS_MAX: Final = 64
"""The maximum number of mounts removed from one directory."""
_MOUNTINFO: Final = Path("/proc/thread-self/mountinfo")
_ESCAPED: Final = re.compile(rb"\\([0-7]{3})")


def make(directory: Path, helper: Path) -> None:
    """Mount a pod's file system at a directory, unless it is already mounted. Raises OSError."""
    if mounted_at(directory):
        if has(directory / STUB, stat.S_ISFIFO):
            return
        # the broker was killed before the file system was complete, or the pod has changed it
        remove(directory)
    directory.mkdir(parents=True, exist_ok=True)
    _mount("muster-fuse", directory, "tmpfs", _ALWAYS, _OPTIONS)
    try:
        (directory / HELPER).write_bytes(helper.read_bytes())
        (directory / HELPER).chmod(0o755)
        os.mkfifo(directory / STUB)
        (directory / STUB).chmod(0o666)
        set_read_only(directory, read_only=True)
    except BaseException:
        remove(directory)
        raise


def has(path: Path, is_kind: Callable[[int], bool]) -> bool:
    """Return whether a path in a pod's file system exists and is a file of this kind.

    A symbolic link that root in the pod may have made is not followed. Raises OSError.
    """
    try:
        return is_kind(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def set_read_only(directory: Path, *, read_only: bool) -> None:
    """Make a pod's file system read-only, or writable for a new socket. Raises OSError.

    While it is writable, root in the pod may also write to it, so its content cannot be trusted.
    """
    flags = syscalls.MS_REMOUNT | _ALWAYS | (syscalls.MS_RDONLY if read_only else 0)
    _mount("none", directory, "", flags)


def attach(directory: Path, target: Path) -> None:
    """Mount a pod's file system at the kubelet's directory, replacing any other mount there.

    Raises OSError.
    """
    wanted, present = mounted_at(directory), mounted_at(target)
    if wanted and present == wanted[-1:]:
        return
    remove(target)
    target.mkdir(mode=0o750, parents=True, exist_ok=True)
    _mount(str(directory), target, "", syscalls.MS_BIND)


def remove(directory: Path) -> None:
    """Remove a directory and all mounts on it, even hung or busy mounts.

    Does nothing if the directory does not exist. Raises OSError.
    """
    for _ in range(_LAYERS_MAX):
        try:
            syscalls.umount(str(directory), syscalls.MNT_DETACH | syscalls.UMOUNT_NOFOLLOW)
        except OSError as error:
            if error.errno == errno.ENOENT:
                return
            if error.errno != errno.EINVAL:
                raise OSError(error.errno, error.strerror, str(directory)) from None
            break
    # a directory that is not empty stays; the kubelet reports it
    with contextlib.suppress(FileNotFoundError):
        directory.rmdir()


def mounted_at(directory: Path) -> list[bytes]:
    """Return the device numbers of the file systems at a directory, the visible one last."""
    path = bytes(directory)
    devices = []
    # proc(5): id, parent, device, root, mount point, ...
    for line in _MOUNTINFO.read_bytes().splitlines():
        fields = line.split(b" ", 5)
        if _ESCAPED.sub(lambda match: bytes([int(match[1], 8)]), fields[4]) == path:
            devices.append(fields[2])
    return devices


def _mount(source: str, target: Path, kind: str, flags: int, options: str = "") -> None:
    try:
        syscalls.mount(source, str(target), kind, flags, options)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from None
