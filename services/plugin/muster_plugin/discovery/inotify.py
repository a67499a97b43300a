"""Adapter: inotify: says when to look at directories again.

It says nothing about what happened: whoever asks looks for himself, at what is there now. So a
lost or doubled notice does no harm, and a look on a period covers what inotify cannot see (another
mount, an overflow, no instances left: fs.inotify.max_user_instances). That needs two calls of the
C library, and none of the parsing for which a package would cost 10 ms and a mebibyte. They are
called beside the loop: to watch a directory is to look at it, which may hang.
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

from muster.service import logs
from muster_plugin import blocking

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
"""Files come and go. Writing is left out: somebody writes to /dev/null all the time."""
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
    """Yield when it is time to look: at once, after every change, and at least every `period_s`.

    Changes rarely come alone; those within `settle_s` of the first are one look. However many come,
    the looks take `share` of the time at most. Whoever sets `changed` asks for a look.

    `directories` is asked again after every look. What was not watched yet is looked at once more
    when it is: nobody told of what changed before. While something cannot be watched, the period is
    a second. Close it with `aclosing`.
    """
    changed = changed or asyncio.Event()
    clock, paced = asyncio.get_running_loop().time, CpuBudget(share)
    library = ctypes.CDLL(None, use_errno=True)
    arming: blocking.Look[tuple[int, ...]] = blocking.Look(())
    looked_at: tuple[int, ...] | None = None
    rest_until = clock()
    with _watching(library, changed) as descriptor:
        while True:
            paths = sorted(directories())
            watched = await arming.again(
                functools.partial(_arm, library, descriptor, paths, mask), timeout_s=_ARM_TIMEOUT_S
            )
            if watched == looked_at:
                is_heard = min(watched, default=0) >= 0 and not arming.hangs
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(
                        period_s if is_heard else min(period_s, _WITHOUT_INOTIFY_S)
                    ):
                        await changed.wait()
                        await asyncio.sleep(max(settle_s, rest_until - clock()))
            looked_at = watched
            changed.clear()
            # not by the clock: on a busy machine that says what others cost
            began = time.process_time()
            yield
            rest_until = clock() + paced.rest_s(time.process_time() - began, clock())


@contextlib.contextmanager
def _watching(library: ctypes.CDLL, changed: asyncio.Event) -> Iterator[int]:
    """Give an inotify instance that sets `changed`; -1 if none is to be had."""
    descriptor: int = library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:
        error = os.strerror(ctypes.get_errno())
        logs.logger().warning("inotify_unavailable", error=error, period_s=_WITHOUT_INOTIFY_S)
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
    """Watch directories; return each one's watch, below 0 if it cannot be.

    Watching one again gives the same watch (inotify(7): one watch an inode).
    """
    return tuple(
        library.inotify_add_watch(descriptor, os.fsencode(path), mask) for path in directories
    )


_BURST_S: Final = 0.5
"""So much at once is free: what is done now and then never waits."""
_REST_MAX_S: Final = 5.0


class CpuBudget:
    """The account of one kind of work that may cost `share` of the time, 1 for all of it."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._owed_s = 0.0
        self._at = 0.0

    def rest_s(self, cost_s: float, now: float) -> float:
        """Return how long to rest now, after work that cost so much."""
        paid_s = (now - self._at) * self._share
        self._owed_s = max(0.0, self._owed_s - paid_s) + cost_s
        self._at = now
        if self._share >= 1:
            return 0.0
        return min(_REST_MAX_S, max(0.0, self._owed_s - _BURST_S) / self._share)
