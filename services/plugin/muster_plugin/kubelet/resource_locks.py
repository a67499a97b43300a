"""Adapter: lock files: of all plugins of ours on a node, one serves a resource.

They lie in a directory of our own below that of the kubelet's sockets: there everybody finds them
who could serve, and a kubelet that starts removes files but no directories. A lock goes with its
process, however that ends.
"""

import contextlib
import fcntl
import os
import socket
from pathlib import Path
from typing import Final

from muster.service import logs
from muster_plugin.config import settings
from muster_plugin.kubelet import socket_directory

DIRECTORY: Final = "muster"
_SUFFIX: Final = ".lock"
_TRIES_MAX: Final = 10
_OWNER_BYTES_MAX: Final = 100


class Claims:
    """The resources that this process may serve; `sockets` is the kubelet's directory for them."""

    def __init__(self, sockets: Path) -> None:
        self._folder = sockets / DIRECTORY
        self._held: dict[str, int] = {}
        self._told = ""

    def claim(self, resource: str) -> str:
        """Make a resource ours; return who else serves it, empty if nobody. May be repeated.

        Where no file can be locked, everything is ours: then sockets alone show another plugin.
        """
        path = self._path(settings.slug(resource))
        held = self._held.get(resource)
        if held is not None and _is_at(held, path):
            return ""
        self.give_back(resource)
        try:
            self._folder.mkdir(exist_ok=True)
            descriptor = _locked(path)
        except BlockingIOError:
            return _owner(path)
        except OSError as error:
            if str(error) != self._told:
                self._told = str(error)
                logs.logger().warning("not_locked", resource=resource, error=str(error))
            return ""
        os.write(descriptor, f"{socket.gethostname()}, process {os.getpid()}".encode())
        self._held[resource] = descriptor
        return ""

    def give_back(self, resource: str) -> None:
        """Let others serve a resource."""
        descriptor = self._held.pop(resource, None)
        if descriptor is not None:
            _remove(self._path(settings.slug(resource)), descriptor)

    def close(self) -> None:
        """Let others serve everything."""
        for resource in [*self._held]:
            self.give_back(resource)

    def holds(self, resource: str) -> bool:
        """Say whether a resource is ours, as far as we know."""
        return resource in self._held

    def is_free(self, slug: str) -> bool:
        """Say whether nobody, we included, serves the resource with this slug."""
        path = self._path(slug)
        if not path.exists():
            return True
        try:
            _remove(path, _locked(path))
        except OSError:
            return False
        return True

    def remove_stale(self) -> None:
        """Remove the lock files of processes that are no more."""
        if self._folder.is_dir():
            for path in self._folder.glob(f"*{_SUFFIX}"):
                self.is_free(path.name.removesuffix(_SUFFIX))

    def _path(self, slug: str) -> Path:
        return self._folder / f"{slug}{_SUFFIX}"


def _locked(path: Path) -> int:
    """Return a descriptor that holds the lock of the file at this path. Raises OSError."""
    for _ in range(_TRIES_MAX):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # whoever had it removes the file with the lock held: then it is another file now
            if _is_at(descriptor, path):
                os.ftruncate(descriptor, 0)
                return descriptor
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise BlockingIOError(f"{path}: removed again and again")


def _remove(path: Path, descriptor: int) -> None:
    """Remove a lock file that we have locked, and nobody else's."""
    with contextlib.suppress(OSError):
        if _is_at(descriptor, path):
            path.unlink()
    os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    found = os.fstat(descriptor)
    return (found.st_dev, found.st_ino) == socket_directory.inode(path)


def _owner(path: Path) -> str:
    try:
        with path.open("rb") as opened:
            said = opened.read(_OWNER_BYTES_MAX).decode(errors="replace")
    except OSError:
        said = ""
    return said if said.isprintable() and said else "unknown"
