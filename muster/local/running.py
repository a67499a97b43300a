"""Adapter for files: records what each `muster up` of this user runs, and removes left-over files.

The record is `processes.json` in the directory of the stack. It is replaced atomically after each
change. The process that runs the stack locks a file beside it. The kernel releases the lock when
that process ends in any way, so a directory whose lock is free is left over from a killed run.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

PREFIX: Final = "muster-"
RECORD: Final = "processes.json"
_LOCK: Final = "lock"
_HELD: Final = "held"
_FAULTS: Final = "faults"
_BYTES_MAX: Final = 1024 * 1024


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """A program of a stack; `pid` is None while it does not run.

    `problem` is why it does not run, such as `ended with -9; restarting in 1 s`. `http` is its
    address, empty for NATS.
    """

    name: str
    pid: int | None
    http: str = ""
    log: str = ""
    restarts: int = 0
    problem: str = ""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated node: its number of GPUs, and whether its plugin offers `/dev/fuse`."""

    name: str
    gpus: int
    fuse: bool


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """A stack that is running. `owner` is the pid of the process that runs it.

    `receivers` is the directory with further receivers of its notifier.
    """

    directory: str
    owner: int
    nats_url: str
    nodes: tuple[Node, ...]
    programs: tuple[Program, ...]
    receivers: str = ""

    def program(self, name: str) -> Program | None:
        """Return a program by its name; None if it is not in the stack."""
        return next((program for program in self.programs if program.name == name), None)


def claim() -> tuple[Path, int]:
    """Create and lock the directory of a stack; return its path and the lock's file descriptor.

    The lock is released when the descriptor is closed.
    """
    # the name is short, because a socket's path may have at most 107 bytes
    directory = Path(tempfile.mkdtemp(prefix=PREFIX))
    for name in (_HELD, _FAULTS):
        (directory / name).mkdir()
    # the file gets its name once it is locked: nobody sees it unlocked while this process runs
    unnamed = directory / f".{_LOCK}"
    descriptor = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    unnamed.rename(directory / _LOCK)
    return directory, descriptor


def write(record: Running) -> None:
    """Replace the record of a stack; nothing happens if its directory has been removed."""
    partial = Path(record.directory, f".{RECORD}")
    with contextlib.suppress(FileNotFoundError):
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
        partial.replace(partial.with_name(RECORD))


def directories() -> list[Path]:
    """Return the directories of this user's stacks that are running."""
    running = []
    for directory in _directories():
        with contextlib.suppress(OSError):
            if not _is_left_over(directory):
                running.append(directory)
    return running


def here() -> list[Running]:
    """Return the stacks of this user that are running, the newest first."""
    records = []
    for directory in directories():
        with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            with (directory / RECORD).open("rb") as file:
                record = msgspec.json.decode(file.read(_BYTES_MAX), type=Running)
            # the lock is written once, when the stack starts
            records.append(((directory / _LOCK).stat().st_mtime, record))
    return [record for _, record in sorted(records, key=lambda pair: pair[0], reverse=True)]


def remove_left_over() -> list[Path]:
    """Remove the directories of this user's killed stacks; return them."""
    removed = []
    for directory in _directories():
        with contextlib.suppress(OSError):
            if _is_left_over(directory):
                shutil.rmtree(directory)
                removed.append(directory)
    return removed


def hold(record: Running, program: str) -> None:
    """Prevent a program from being started again after it has ended."""
    Path(record.directory, _HELD, program).touch()


def release(record: Running, program: str) -> None:
    """Undo `hold`."""
    Path(record.directory, _HELD, program).unlink(missing_ok=True)


def is_held(directory: Path, program: str) -> bool:
    """Return whether a program must not be started again now."""
    return (directory / _HELD / program).exists()


def add_fault(record: Running, name: str) -> None:
    """Record that a fault was caused on purpose."""
    Path(record.directory, _FAULTS, name).touch()


def remove_fault(record: Running, name: str) -> None:
    """Undo `add_fault`."""
    Path(record.directory, _FAULTS, name).unlink(missing_ok=True)


def faults(record: Running) -> list[str]:
    """Return the faults that were caused on purpose and not undone."""
    return sorted(path.name for path in Path(record.directory, _FAULTS).iterdir())


def _directories() -> Iterator[Path]:
    """Yield this user's directories that a stack has created and locked."""
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):
            entry, lock = path.lstat(), (path / _LOCK).lstat()
            is_ours = {entry.st_uid, lock.st_uid} == {os.getuid()}
            if is_ours and stat.S_ISDIR(entry.st_mode) and stat.S_ISREG(lock.st_mode):
                yield path


def _is_left_over(directory: Path) -> bool:
    """Return whether no process holds the directory's lock."""
    with (directory / _LOCK).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
