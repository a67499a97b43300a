"""Adapter: finds owners of sockets, removes stale sockets, and locks resources.

The locks let only one muster plugin on a node serve a resource. Their files are in a subdirectory
of the kubelet's socket directory: every plugin that could serve the resource can see it, and a
starting kubelet removes files but not directories. A lock ends with its process, however the
process ends.
"""

import contextlib
import fcntl
import os
import socket
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Final

from muster.service import logs
from muster_plugin.config import settings
from muster_plugin.kubelet import kubelet_socket

LOCK_DIRECTORY: Final = "muster"
_LOCK_SUFFIX: Final = ".lock"
_LOCK_TRIES_MAX: Final = 10
_OWNER_BYTES_MAX: Final = 100


def inode(path: Path) -> tuple[int, int] | None:
    """Return the device and inode numbers of the file at a path; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def served_sockets(directories: Iterable[Path], slugs: Collection[str]) -> list[str]:
    """Return the paths of sockets on which muster serves the resources with these slugs."""
    return [
        str(path)
        for path in _ours(directories)
        if settings.slug_of(path.name) in slugs and not _is_dead(path)
    ]


def other_owner(
    resources: Iterable[str],
    folders: Sequence[Path],
    locks: "ResourceLocks",
    *,
    besides: Collection[str],
) -> str:
    """Lock the resources; describe another plugin that serves one of them; empty if none does.

    The sockets in `besides` are those of a predecessor that has handed over.

    Two plugins that start at the same time lock in the same order, so one of them acquires all
    locks.
    """
    for name in resources:
        owner = locks.acquire(name)
        if owner:
            return f"{name} ({owner})"
    # an older plugin may not use locks
    served = served_sockets(folders, {*map(settings.slug, resources)})
    return next((path for path in served if path not in besides), "")


def others(directories: Iterable[Path]) -> frozenset[str]:
    """Return the names of the sockets served by processes other than the kubelet and muster."""
    return frozenset(
        path.name
        for folder in directories
        if folder.is_dir()
        for path in folder.iterdir()
        if path.name != kubelet_socket.NAME
        and not settings.slug_of(path.name)
        and path.is_socket()
        and not _is_dead(path)
    )


def remove_stale(directories: Iterable[Path]) -> list[str]:
    """Remove the sockets that earlier muster plugins left behind; return their names.

    A socket that refuses a connection is stale. A process id in its name would prove nothing,
    because ids start at 1 in every pod.
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


class ResourceLocks:
    """The resources locked by this process; `sockets` is the kubelet's socket directory."""

    def __init__(self, sockets: Path) -> None:
        self._folder = sockets / LOCK_DIRECTORY
        self._held: dict[str, int] = {}
        self._logged_error = ""

    def acquire(self, resource: str) -> str:
        """Lock a resource; return its other owner, or an empty string. May be called repeatedly.

        If files cannot be locked, every resource counts as free; another plugin is then detected
        only by its sockets.
        """
        path = self._path(settings.slug(resource))
        held = self._held.get(resource)
        if held is not None and _is_at(held, path):
            return ""
        self.release(resource)
        try:
            self._folder.mkdir(exist_ok=True)
            descriptor = _locked(path)
        except BlockingIOError:
            return _lock_owner(path)
        except OSError as error:
            if str(error) != self._logged_error:
                self._logged_error = str(error)
                logs.logger().warning("resource_lock_failed", resource=resource, error=str(error))
            return ""
        os.write(descriptor, f"{socket.gethostname()}, process {os.getpid()}".encode())
        self._held[resource] = descriptor
        return ""

    def release(self, resource: str) -> None:
        """Unlock a resource, if this process holds its lock."""
        descriptor = self._held.pop(resource, None)
        if descriptor is not None:
            _remove_lock(self._path(settings.slug(resource)), descriptor)

    def release_all(self) -> None:
        """Unlock every resource."""
        for resource in [*self._held]:
            self.release(resource)

    def holds(self, resource: str) -> bool:
        """Return whether this process holds the lock of a resource."""
        return resource in self._held

    def is_free(self, slug: str) -> bool:
        """Return whether no process, not even this one, has locked the resource with this slug.

        A stale lock file is removed.
        """
        path = self._path(slug)
        if not path.exists():
            return True
        try:
            _remove_lock(path, _locked(path))
        except OSError:
            return False
        return True

    def remove_stale(self) -> None:
        """Remove the lock files of processes that have ended."""
        if self._folder.is_dir():
            for path in self._folder.glob(f"*{_LOCK_SUFFIX}"):
                self.is_free(path.name.removesuffix(_LOCK_SUFFIX))

    def _path(self, slug: str) -> Path:
        return self._folder / f"{slug}{_LOCK_SUFFIX}"


def _locked(path: Path) -> int:
    """Lock the file at this path; return its descriptor. Raises OSError."""
    for _ in range(_LOCK_TRIES_MAX):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # the last owner removes the file while it holds the lock; this may then be another file
            if _is_at(descriptor, path):
                os.ftruncate(descriptor, 0)
                return descriptor
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise BlockingIOError(f"{path}: keeps being removed")


def _remove_lock(path: Path, descriptor: int) -> None:
    """Unlock a file, and remove it unless another file has replaced it."""
    with contextlib.suppress(OSError):
        if _is_at(descriptor, path):
            path.unlink()
    os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    status = os.fstat(descriptor)
    return (status.st_dev, status.st_ino) == inode(path)


def _lock_owner(path: Path) -> str:
    try:
        with path.open("rb") as opened:
            owner = opened.read(_OWNER_BYTES_MAX).decode(errors="replace")
    except OSError:
        return "unknown"
    return owner if owner and owner.isprintable() else "unknown"
