"""Adapter: system calls for mounts and namespaces that Python 3.11 lacks, through ctypes.

The numbers are the same on x86-64 and arm64 (Linux 6.18, include/uapi: asm-generic/unistd.h,
linux/mount.h, linux/fcntl.h, linux/prctl.h, linux/stat.h). A call that fails raises OSError.
"""

import contextlib
import ctypes
import errno
import os
import struct
from typing import Final, NamedTuple

CLONE_NEWNS: Final = 0x0002_0000
CLONE_NEWUSER: Final = 0x1000_0000
MNT_DETACH: Final = 2
UMOUNT_NOFOLLOW: Final = 8
MS_RDONLY: Final = 1
MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_REMOUNT: Final = 32
MS_BIND: Final = 4096
MOUNT_ATTR_NOSUID: Final = 2
MOUNT_ATTR_NODEV: Final = 4
_AT_RECURSIVE: Final = 0x8000
_AT_FDCWD: Final = -100
_AT_EACCESS: Final = 0x200
_AT_NO_AUTOMOUNT: Final = 0x800
_AT_STATX_DONT_SYNC: Final = 0x4000
_AT_SYMLINK_NOFOLLOW: Final = 0x100
_AT_EMPTY_PATH: Final = 0x1000
_FSCONFIG_SET_FLAG: Final = 0
_FSCONFIG_SET_STRING: Final = 1
_FSCONFIG_CMD_CREATE: Final = 6
_FSCONFIG_CMD_CREATE_EXCL: Final = 8
_FSOPEN_CLOEXEC: Final = 1
_FSMOUNT_CLOEXEC: Final = 1
_MOVE_MOUNT_EMPTY_PATHS: Final = 0x44
_MS_PRIVATE: Final = 1 << 18
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4

_LINUX_CAPABILITY_VERSION_3: Final = 0x2008_0522
_STATX_SIZE: Final = 256
_MESSAGES_MAX: Final = 8

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def setns(namespaces: int, kinds: int) -> None:
    """Enter namespaces of a pidfd's process; CLONE_NEWNS also adopts its root directory."""
    _checked(_libc.setns(namespaces, kinds))


def unshare(kinds: int) -> None:
    """Stop sharing resources with other processes; the CLONE_* flags in `kinds` select which."""
    _checked(_libc.unshare(kinds))


def forbid_tracing() -> None:
    """Prevent other processes from tracing this process and reading its memory and descriptors."""
    _checked(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))


def end_with_parent(signal: int) -> None:
    """Make the kernel send this process a signal when its parent ends."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, signal, 0, 0, 0))


def check_access(descriptor: int, mode: int) -> None:
    """Raise OSError unless the effective user has this access to an O_PATH descriptor's file."""
    _call(439, descriptor, b"", mode, _AT_EACCESS | _AT_EMPTY_PATH)


class Status(NamedTuple):
    """The identity of a mount: the minor number of its device, and its id."""

    minor: int
    mount_id: int


def status(directory: int, name: str = "") -> Status:
    """Return the mount to which a descriptor, or a name in its directory, refers.

    No request is sent to the file system, because a FUSE daemon might not answer.
    """
    buffer = ctypes.create_string_buffer(_STATX_SIZE)
    flags = _AT_EMPTY_PATH | _AT_NO_AUTOMOUNT | _AT_STATX_DONT_SYNC | _AT_SYMLINK_NOFOLLOW
    _checked(_libc.statx(directory, name.encode(errors="surrogateescape"), flags, 0, buffer))
    # dev_minor and mnt_id in struct statx, which the kernel always fills in
    minor, mount_id = struct.unpack_from("=IQ", buffer, 140)
    return Status(minor, mount_id)


def drop_capabilities() -> None:
    """Drop the effective capabilities until `restore_capabilities` is called."""
    _set_effective((0, 0))


def restore_capabilities() -> None:
    """Make all permitted capabilities effective."""
    _set_effective(None)


def fsopen(kind: bytes) -> int:
    """Return a context for configuring a file system of this kind."""
    return _call(430, kind, _FSOPEN_CLOEXEC)


def fsconfig_string(context: int, key: str, value: str) -> None:
    """Set a parameter of a file system to a value."""
    _call(431, context, _FSCONFIG_SET_STRING, key.encode(), value.encode(), 0)


def fsconfig_flag(context: int, key: str) -> None:
    """Set a file system's parameter that has no value, such as `ro`."""
    _call(431, context, _FSCONFIG_SET_FLAG, key.encode(), None, 0)


def fsconfig_create(context: int) -> None:
    """Create the file system that a context describes, or use an existing one that it names."""
    _call(431, context, _FSCONFIG_CMD_CREATE, None, None, 0)


def fsconfig_create_new(context: int) -> None:
    """Create the file system that a context describes; EBUSY if it names an existing one.

    Before Linux 6.6, the existing one is used instead.
    """
    try:
        _call(431, context, _FSCONFIG_CMD_CREATE_EXCL, None, None, 0)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        fsconfig_create(context)


def messages(context: int) -> str:
    """Return the kernel's messages about a context, on one line."""
    texts: list[str] = []
    # ENODATA: there are no more
    with contextlib.suppress(OSError):
        while len(texts) < _MESSAGES_MAX:
            # each message starts with `e `, `w ` or `i `: error, warning, information
            text = os.read(context, 1024).decode(errors="replace")
            texts.append(text[2:].strip())
    return "; ".join(texts)


def fsmount(context: int, attributes: int) -> int:
    """Return an unattached mount of the file system that was created in a context."""
    return _call(432, context, _FSMOUNT_CLOEXEC, attributes)


def open_connections() -> int:
    """Mount fusectl without attaching it to a directory; return a descriptor of its root."""
    context = fsopen(b"fusectl")
    try:
        fsconfig_create(context)
        return fsmount(context, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV)
    finally:
        os.close(context)


def make_private(mount: int) -> None:
    """Prevent mounts and unmounts below a mount from propagating to other namespaces."""
    attributes = struct.pack("QQQQ", 0, 0, _MS_PRIVATE, 0)
    _call(442, mount, b"", _AT_EMPTY_PATH | _AT_RECURSIVE, attributes, len(attributes))


def move_mount(mount: int, target: int) -> None:
    """Attach a mount to the directory or file of a descriptor."""
    _call(429, mount, b"", target, b"", _MOVE_MOUNT_EMPTY_PATHS)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Attach a file system to a path, or change the mount there, depending on `flags`."""
    texts = (text.encode(errors="surrogateescape") for text in (source, target, kind, options))
    at, onto, of_kind, with_options = texts
    _checked(_libc.mount(at, onto, of_kind, ctypes.c_ulong(flags), with_options))


def umount(path: str, flags: int) -> None:
    """Remove the mount at a path."""
    _checked(_libc.umount2(path.encode(errors="surrogateescape"), flags))


def _set_effective(words: tuple[int, int] | None) -> None:
    header = struct.pack("Ii", _LINUX_CAPABILITY_VERSION_3, 0)
    sets = ctypes.create_string_buffer(24)
    _checked(_libc.capget(header, sets))
    # effective, permitted, inheritable: twice, for 64 capabilities
    _, permitted, inherited, _, permitted_high, inherited_high = struct.unpack("6I", sets)
    low, high = words or (permitted, permitted_high)
    changed = struct.pack("6I", low, permitted, inherited, high, permitted_high, inherited_high)
    _checked(_libc.capset(header, changed))


def _call(number: int, *arguments: int | bytes | None) -> int:
    # ctypes passes integers as C ints by default, but some parameters have 64 bits
    typed = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _checked(int(_libc.syscall(ctypes.c_long(number), *typed)))


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
