"""Adapter: the kubelet's socket directory: whose sockets lie in it, which are left over."""

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
    """Say why sockets cannot be served here, or None."""
    if not directory.exists():
        return f"{directory}: no such directory; is this the node's kubelet directory, mounted?"
    if not directory.is_dir():
        return f"{directory}: not a directory"
    if not os.access(directory, os.W_OK | os.X_OK):
        return f"{directory}: not writable by user {os.geteuid()}"
    return None


def identity(path: Path) -> str:
    """Tell one socket from another; empty if there is none.

    The inode alone would not do: one kubelet restart in three reuses its number (kubelet 1.36.2).
    """
    try:
        found = path.stat()
    except OSError:
        return ""
    return f"{found.st_ino}.{found.st_ctime_ns}" if stat.S_ISSOCK(found.st_mode) else ""


def inode(path: Path) -> tuple[int, int] | None:
    """Tell a file from another at the same path; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def served(directories: Iterable[Path], slugs: Collection[str]) -> list[str]:
    """Return the sockets of the resources with these slugs that somebody serves."""
    return [
        str(path)
        for path in _ours(directories)
        if settings.slug_of(path.name) in slugs and not _is_dead(path)
    ]


def remove_stale(directories: Iterable[Path]) -> list[str]:
    """Remove the sockets of earlier processes of ours that nobody serves; return their names.

    A process id in the name proves nothing: pods count processes each for itself. A socket that
    refuses a connection is dead.
    """
    removed = []
    for path in _ours(directories):
        if _is_dead(path):
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path.name)
    return removed


def try_to_bind(path: Path) -> None:
    """Make a socket at a path and remove it again. Raises OSError, which says why that fails."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        try:
            made.bind(str(path))
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
