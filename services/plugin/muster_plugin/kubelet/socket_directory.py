"""Adapter: the kubelet's socket directories: whose sockets they hold, and which are stale."""

import contextlib
import os
import socket
import stat
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

from muster_plugin.config import settings

KUBELET_SOCKET: Final = "kubelet.sock"


def problem(directory: Path) -> str | None:
    """Return why no socket can be served here, or None."""
    if not directory.exists():
        return f"{directory}: no such directory; is this the node's kubelet directory, mounted?"
    if not directory.is_dir():
        return f"{directory}: not a directory"
    if not os.access(directory, os.W_OK | os.X_OK):
        return f"{directory}: not writable by user {os.geteuid()}"
    return None


def identity(path: Path) -> str:
    """Return what identifies the socket at a path; empty if there is none.

    The inode is not enough: one kubelet restart in three reuses its number (kubelet 1.36.2).
    """
    try:
        status = path.stat()
    except OSError:
        return ""
    return f"{status.st_ino}.{status.st_ctime_ns}" if stat.S_ISSOCK(status.st_mode) else ""


def inode(path: Path) -> tuple[int, int] | None:
    """Return device and inode of the file at a path; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def served_sockets(directories: Iterable[Path], slugs: Collection[str]) -> list[str]:
    """Return the sockets of the resources with these slugs that a process serves."""
    return [
        str(path)
        for path in _ours(directories)
        if settings.slug_of(path.name) in slugs and not _is_dead(path)
    ]


def remove_stale(directories: Iterable[Path]) -> list[str]:
    """Remove the sockets that earlier muster plugins left behind; return their names.

    A process id in the name would prove nothing: every pod counts from 1. A socket that refuses a
    connection is dead.
    """
    removed = []
    for path in _ours(directories):
        if _is_dead(path):
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path.name)
    return removed


def try_to_bind(path: Path) -> None:
    """Bind a socket at a path and remove it again. Raises OSError with the reason."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
        try:
            bound.bind(str(path))
        except OSError as error:
            raise OSError(f"{path}: {error.strerror or error}") from None
    path.unlink(missing_ok=True)


def _ours(directories: Iterable[Path]) -> list[Path]:
    paths = (path for folder in directories if folder.is_dir() for path in folder.iterdir())
    return sorted(path for path in paths if settings.slug_of(path.name))


def _is_dead(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
