"""Adapter: accesses sockets, the checkpoint and the learned data in the kubelet's directories.

No link is followed, and only regular files are read, because a plugin may put anything there.
"""

import contextlib
import itertools
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from muster_plugin.config import settings
from muster_plugin.kubelet import kubelet_socket, plugin_sockets
from muster_plugin.watch import checkpoint, expectation, observation, prober

ENTRIES_MAX: Final = 20_000
_NAME_BYTES_MAX: Final = 107
_MEMORY_FOLDER: Final = Path(settings.SOCKET_DIRECTORY) / plugin_sockets.LOCK_DIRECTORY
_MEMORY: Final = "watched.json"
_NEW_MEMORY: Final = "watched.new"
_MEMORY_BYTES_MAX: Final = 1024 * 1024
_OURS: Final = "muster-"
"""The prefix of sockets of muster's device plugin and FUSE broker."""


def scan(root: Path) -> observation.Scanned:
    """Scan the kubelet's directories for sockets. Raises OSError."""
    files: list[observation.SocketFile] = []
    ours = set()
    kubelet_age_s, kubelet_identity = None, ""
    for directory in observation.Directory:
        for entry in _sockets(root / directory):
            name = entry.name
            status = entry.stat(follow_symlinks=False)
            if name == kubelet_socket.NAME:
                kubelet_age_s = max(0.0, time.time() - status.st_ctime)
                kubelet_identity = prober.identity_of(status)
            elif slug := settings.slug_of(name):
                ours.add(slug)
            elif not name.startswith(_OURS):
                files.append(
                    observation.SocketFile(
                        directory=directory,
                        name=name,
                        identity=prober.identity_of(status),
                        created_at=status.st_ctime_ns,
                    )
                )
    files.sort(key=lambda file: -file.created_at)
    return observation.Scanned(
        sockets=tuple(files),
        kubelet_age_s=kubelet_age_s,
        kubelet_identity=kubelet_identity,
        ours=frozenset(ours),
    )


def _sockets(directory: Path) -> Iterator[os.DirEntry[str]]:
    if directory.name == settings.REGISTRY_DIRECTORY and not directory.is_dir():
        return
    with os.scandir(directory) as entries:
        for entry in itertools.islice(entries, ENTRIES_MAX):
            with contextlib.suppress(FileNotFoundError):
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISSOCK(mode) and _has_usable_name(entry):
                    yield entry


def _has_usable_name(entry: os.DirEntry[str]) -> bool:
    return entry.name.isprintable() and len(os.fsencode(entry.name)) <= _NAME_BYTES_MAX


def read_checkpoint(root: Path) -> checkpoint.Checkpoint | None:
    """Return the kubelet's checkpoint; None if it is missing. Raises OSError or ValueError."""
    for directory in kubelet_socket.directories(root):
        text = _read(directory / kubelet_socket.CHECKPOINT, checkpoint.BYTES_MAX)
        if text is not None:
            return checkpoint.decode(text)
    return None


def read_memory(root: Path) -> expectation.Memory:
    """Return the learned data; empty data if none is saved. Raises OSError or ValueError."""
    try:
        with _folder(root) as folder:
            text = _read(Path(_MEMORY), _MEMORY_BYTES_MAX, folder=folder)
    except FileNotFoundError:
        text = None
    return expectation.Memory() if text is None else expectation.decode(text)


def write_memory(root: Path, text: bytes) -> None:
    """Save the learned data. Raises OSError."""
    (root / _MEMORY_FOLDER).mkdir(exist_ok=True)
    with _folder(root) as folder:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_NEW_MEMORY, dir_fd=folder)
        # a plugin can create links here, and this process can write where plugins cannot
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(_NEW_MEMORY, flags, 0o644, dir_fd=folder), "wb") as opened:
            opened.write(text)
        os.replace(_NEW_MEMORY, _MEMORY, src_dir_fd=folder, dst_dir_fd=folder)


@contextlib.contextmanager
def _folder(root: Path) -> Iterator[int]:
    """Open the folder with the learned data. Raises OSError, for example if it is a link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(root / _MEMORY_FOLDER, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read(path: Path, bytes_max: int, *, folder: int | None = None) -> bytes | None:
    """Return a regular file's content; None if it is missing. Raises OSError or ValueError."""
    try:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, dir_fd=folder)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as opened:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a regular file")
        if status.st_size > bytes_max:
            raise ValueError(f"{status.st_size} bytes are more than {bytes_max}")
        return opened.read(bytes_max)
