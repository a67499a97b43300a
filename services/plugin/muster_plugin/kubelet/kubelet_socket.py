"""Adapter: identifies the kubelet's socket, and tells when to check it and the plugins' sockets.

Another socket at the same path means that the kubelet has restarted. A starting kubelet removes all
sockets of plugins, so the directories of these sockets are watched too.
"""

import contextlib
import os
import stat
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from typing import Final

from muster_plugin.config import settings
from muster_plugin.discovery import inotify

NAME: Final = "kubelet.sock"
CHECKPOINT: Final = "kubelet_internal_checkpoint"
_CHECK_PERIOD_S: Final = 5.0


def check_times(kubelet: Path) -> AsyncGenerator[None, None]:
    """Yield whenever the sockets must be checked: after every change, and periodically.

    Close the generator with `aclosing`.
    """
    folders = directories(kubelet)
    return inotify.scan_times(
        lambda: [folder for folder in folders if folder.is_dir()], period_s=_CHECK_PERIOD_S
    )


def directories(kubelet: Path) -> list[Path]:
    """Return the directories of the kubelet in which plugins serve their sockets."""
    return [kubelet / name for name in (settings.SOCKET_DIRECTORY, settings.REGISTRY_DIRECTORY)]


def directory_problem(directory: Path, *, serves: bool) -> str | None:
    """Return why such a directory is unusable, or None; with `serves` it must be writable."""
    if not directory.exists():
        return f"{directory}: no such directory; is the node's kubelet directory mounted?"
    if not directory.is_dir():
        return f"{directory}: not a directory"
    if not os.access(directory, os.R_OK | os.X_OK):
        return f"{directory}: not readable by user {os.geteuid()}"
    if serves and not os.access(directory, os.W_OK):
        return f"{directory}: not writable by user {os.geteuid()}"
    return None


def identity(path: Path) -> str:
    """Return a string that identifies the socket at a path; empty if there is none.

    The inode is not enough: in one out of three restarts the kubelet's socket gets the same number
    (1.36.2).
    """
    try:
        status = path.stat()
    except OSError:
        return ""
    return f"{status.st_ino}.{status.st_ctime_ns}" if stat.S_ISSOCK(status.st_mode) else ""


def checkpointed_at(folders: Iterable[Path]) -> int | None:
    """Return when the kubelet last wrote its checkpoint, which it does after every device list.

    The time is in nanoseconds; None if there is no checkpoint.
    """
    for folder in folders:
        with contextlib.suppress(OSError):
            return (folder / CHECKPOINT).stat().st_mtime_ns
    return None
