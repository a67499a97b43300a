"""Adapter: uses inotify to decide when directories have to be scanned again.

Events are not parsed: any event makes the caller scan the current state. A lost or repeated event
therefore does no harm, and periodic scans find what inotify misses: a mount over the directory, an
overflow, or no free instance (fs.inotify.max_user_instances). Two calls of the C library are
enough; a package for them would cost 10 ms and 1 MiB. The calls run in a thread, because watching a
directory reads it, which may hang.
"""

import asyncio
import contextlib
import ctypes
import functools
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from muster import blocking
from muster.service import logs

# Linux, include/uapi/linux/inotify.h
_MODIFY: Final = 0x2
_CLOSE_WRITE: Final = 0x8
_MOVED_FROM: Final = 0x40
_MOVED_TO: Final = 0x80
_CREATE: Final = 0x100
_DELETE: Final = 0x200
_DELETE_SELF: Final = 0x400
_MOVE_SELF: Final = 0x800
_ONLYDIR: Final = 0x01000000

NAME_EVENTS: Final = (
    _CREATE | _DELETE | _MOVED_FROM | _MOVED_TO | _DELETE_SELF | _MOVE_SELF | _ONLYDIR
)
"""The events of files that are created, removed or renamed.

Writes are left out, because /dev/null is written continuously.
"""
CONTENT_EVENTS: Final = NAME_EVENTS | _MODIFY | _CLOSE_WRITE

_WITHOUT_INOTIFY_S: Final = 1.0
_ARM_TIMEOUT_S: Final = 1.0
_READ_BYTES: Final = 65_536


async def scan_times(
    directories: Callable[[], Iterable[Path]],
    *,
    period_s: float,
    mask: int = NAME_EVENTS,
    settle_s: float = 0.0,
    share: float = 1.0,
    changed: asyncio.Event | None = None,
) -> AsyncGenerator[None, None]:
    """Yield whenever a scan is due: immediately, after every change, and at least every `period_s`.

    Changes often come in bursts, so all changes within `settle_s` of the first cause one scan.
    Scans use at most `share` of CPU time, however many changes there are. Setting `changed`
    requests a scan.

    `directories` is called again after every scan. A directory that is watched for the first time
    causes another scan, because changes before the watch were not seen. While a directory cannot be
    watched, the period is at most one second. Close the generator with `aclosing`.
    """
    changed = changed or asyncio.Event()
    clock, budget = asyncio.get_running_loop().time, CpuBudget(share)
    library = ctypes.CDLL(None, use_errno=True)
    arming: blocking.Latest[tuple[int, ...]] = blocking.Latest(())
    scanned: tuple[int, ...] | None = None
    rest_until = clock()
    with _watching(library, changed) as descriptor:
        while True:
            paths = sorted(directories())
            watched = await arming.refresh(
                functools.partial(_arm, library, descriptor, paths, mask), timeout_s=_ARM_TIMEOUT_S
            )
            if watched == scanned:
                is_watched = min(watched, default=0) >= 0 and not arming.is_hanging
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(
                        period_s if is_watched else min(period_s, _WITHOUT_INOTIFY_S)
                    ):
                        await changed.wait()
                        await asyncio.sleep(settle_s)
            await asyncio.sleep(rest_until - clock())
            scanned = watched
            changed.clear()
            # CPU time, because wall-clock time on a busy machine includes other processes' work
            began = time.process_time()
            yield
            rest_until = clock() + budget.rest_s(time.process_time() - began, clock())


@contextlib.contextmanager
def _watching(library: ctypes.CDLL, changed: asyncio.Event) -> Iterator[int]:
    """Yield an inotify instance that sets `changed`; -1 if no instance can be created."""
    descriptor: int = library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:
        error = os.strerror(ctypes.get_errno())
        logs.logger().warning("inotify_unavailable", error=error, scan_period_s=_WITHOUT_INOTIFY_S)
        yield descriptor
        return

    def drain() -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(descriptor, _READ_BYTES)
        changed.set()

    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, drain)
    try:
        yield descriptor
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _arm(
    library: ctypes.CDLL, descriptor: int, directories: Iterable[Path], mask: int
) -> tuple[int, ...]:
    """Watch directories; return the watch descriptor of each, negative if that failed.

    Watching a directory again returns the same watch (inotify(7): one watch per inode).
    """
    return tuple(
        library.inotify_add_watch(descriptor, os.fsencode(path), mask) for path in directories
    )


_BURST_S: Final = 0.5
"""This much CPU time requires no rest, so that rare work never waits."""
_REST_MAX_S: Final = 5.0


class CpuBudget:
    """A token bucket that limits one kind of work to a `share` of CPU time; 1 means no limit.

    A rest lasts at most 5 s, so that an expensive scan does not delay all later scans.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._debt_s = 0.0
        self._at = 0.0

    def rest_s(self, cost_s: float, now: float) -> float:
        """Return how long to rest after work that took `cost_s` of CPU time."""
        repaid_s = (now - self._at) * self._share
        debt_s = max(0.0, self._debt_s - repaid_s) + cost_s
        self._debt_s = min(debt_s, _BURST_S + _REST_MAX_S * self._share)
        self._at = now
        if self._share >= 1:
            return 0.0
        return max(0.0, self._debt_s - _BURST_S) / self._share
