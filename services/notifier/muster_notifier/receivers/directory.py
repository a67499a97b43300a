"""Adapter: reads additional receivers from a directory, which is usually a mounted Secret.

`NAME.yaml` contains the settings of the receiver NAME, without its name; each secret is another
file in the directory. A receiver that cannot be used is left out, without an effect on other
receivers.
"""

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from muster import blocking
from muster_notifier.config import files, receiver_settings, schema, setup_plan
from muster_notifier.receivers import factory

_PERIOD_S: Final = 1.0
_READ_S: Final = 5.0
_FILES_MAX: Final = 4 * schema.RECEIVERS_MAX
_FILE_BYTES_MAX: Final = 1024 * 1024
"""The maximum size of a Secret, and therefore of a file from it, in bytes."""

_Signature = tuple[tuple[str, tuple[int, int, int, int] | None], ...]


@dataclass(frozen=True, slots=True)
class Content:
    """The usable receivers; `refused` maps unusable receivers, files or directories to reasons."""

    receivers: tuple[receiver_settings.Receiver, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    is_complete: bool = True
    """Whether all files were considered; if not, there may be more receivers."""


class Directory:
    """A directory of receivers, which may be absent; an empty path means no directory."""

    def __init__(self, path: str | None) -> None:
        self._path = Path(path) if path else None
        self._reads = blocking.Serial()
        self._signature: _Signature | None = None
        self._stamp = b""

    async def read(self, settings: schema.Settings) -> Content:
        """Return the directory's current content, for a notifier with these settings."""
        if self._path is None:
            return Content()
        path = self._path
        try:
            signature = await self._reads.run(lambda: _signature(path), timeout_s=_READ_S)
            texts, content = await self._reads.run(lambda: _read(path, settings), timeout_s=_READ_S)
        except (OSError, TimeoutError) as error:
            self._signature, self._stamp = None, b""
            reason = error.strerror if isinstance(error, OSError) else None
            return Content(refused={str(path): reason or "not read in time"}, is_complete=False)
        self._signature, self._stamp = signature, _stamp(texts)
        return content

    async def changed(self) -> None:
        """Wait until the files have changed since the last call of `read`."""
        while True:
            await asyncio.sleep(_PERIOD_S)
            if await self.has_changed():
                return

    async def has_changed(self) -> bool:
        """Return whether the files have changed since the last call of `read`; False if unreadable.

        The files are read only if a name, an inode, a size or a time has changed.
        """
        if self._path is None:
            return False
        path = self._path
        try:
            signature = await self._reads.run(lambda: _signature(path), timeout_s=_READ_S)
            if signature == self._signature:
                return False
            texts = await self._reads.run(lambda: _texts(path), timeout_s=_READ_S)
        except (OSError, TimeoutError):
            return False
        if _stamp(texts) != self._stamp:
            return True
        self._signature = signature
        return False


def read(path: Path, settings: schema.Settings) -> Content:
    """Return a directory's content, for a notifier with these settings. Raises OSError."""
    return _read(path, settings)[1]


def _read(path: Path, settings: schema.Settings) -> tuple[Mapping[str, bytes], Content]:
    texts = _texts(path)
    taken = {receiver.name for receiver in settings.receivers}
    receivers: list[receiver_settings.Receiver] = []
    refused: dict[str, str] = {}
    is_complete = True
    for number, (file, text) in enumerate(texts.items()):
        if number == _FILES_MAX:
            refused[file] = f"not read: only the first {_FILES_MAX} files are read"
            is_complete = False
            break
        name = file.removesuffix(setup_plan.SUFFIX)
        if name == file:
            continue
        problem = "the settings already have a receiver of this name" if name in taken else ""
        if len(taken) >= schema.RECEIVERS_MAX:
            problem = f"there are already {schema.RECEIVERS_MAX} receivers, which is the maximum"
        if not problem:
            try:
                receiver = files.receiver(text, name=name, directory=path)
                factory.make(receiver, settings)
            except (ValueError, factory.Unusable) as error:
                problem = "; ".join(str(error).splitlines())
            else:
                taken.add(name)
                receivers.append(receiver)
        if problem:
            refused[name] = problem
    return texts, Content(tuple(receivers), refused, is_complete)


def _names(path: Path) -> list[str]:
    """Return the names of the files that are not hidden, at most one more than the limit.

    Return an empty list if the directory does not exist. Raises OSError.
    """
    try:
        names = sorted(each.name for each in path.iterdir() if not each.name.startswith("."))
    except FileNotFoundError:
        return []
    return names[: _FILES_MAX + 1]


def _signature(path: Path) -> _Signature:
    """Return a value that changes with the files, without reading them. Raises OSError.

    A kubelet that renews a Secret replaces its files: each has another inode.
    """
    return tuple((name, _stat(path / name)) for name in _names(path))


def _stat(file: Path) -> tuple[int, int, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    # unlike the others, st_ctime_ns also changes with the permissions
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _texts(path: Path) -> Mapping[str, bytes]:
    """Return the contents of a directory's files, by name. Raises OSError."""
    return {
        # a name that is not text could not be logged or published
        name.encode("ascii", "backslashreplace").decode(): _text(path / name)
        for name in _names(path)
    }


def _text(file: Path) -> bytes:
    """Return the content of a regular file; empty if it is another kind or unreadable."""
    try:
        if not file.is_file():
            return b""
        with file.open("rb") as opened:
            return opened.read(_FILE_BYTES_MAX + 1)
    except OSError:
        return b""


def _stamp(texts: Mapping[str, bytes]) -> bytes:
    stamp = hashlib.sha256()
    for name, text in texts.items():
        stamp.update(f"{name}\0{len(text)}\0".encode() + text)
    return stamp.digest()
