"""Adapter: threads that ask NVML: what is under way, and what they heard.

Nothing that was asked is forgotten before it has come back, for NVML must not be shut down beside
a call. So a task that waits for a thread is never cancelled, only no longer waited for.
"""

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable
from typing import TypeVar

from muster_plugin import blocking
from muster_plugin.gpu.nvml import events
from muster_plugin.model import gpu

Result = TypeVar("Result")


class Flights:
    """Everything that NVML is being asked."""

    def __init__(self) -> None:
        self._under_way: set[asyncio.Task[object]] = set()

    def begin(self, lane: blocking.Lane, work: Callable[[], Result]) -> asyncio.Task[Result]:
        """Begin something that may take for ever."""
        task = asyncio.ensure_future(lane.run(work, timeout_s=math.inf))
        self._under_way.add(task)
        task.add_done_callback(self._landed)
        return task

    async def all_back(self, timeout_s: float) -> bool:
        """Wait until nothing is under way any more; say whether that was in time."""
        if not self._under_way:
            return True
        _, late = await asyncio.wait(self._under_way, timeout=timeout_s)
        return not late

    def _landed(self, task: "asyncio.Task[object]") -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # who waits for it gets it; if nobody does, nobody needs it


class Inbox:
    """What the thread that waits for events heard, for the loop to take, in order.

    The same thing heard twice before it is taken is one thing, so that a storm of XIDs cannot fill
    the memory.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._came = asyncio.Event()
        self._lock = threading.Lock()
        self._waiting: dict[object, events.Heard] = {}

    def put(self, heard: events.Heard) -> None:
        """Hear something; called by the thread."""
        with self._lock:
            is_first = not self._waiting
            self._waiting[_key(heard)] = heard
        if is_first:
            # the loop may have closed meanwhile
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._came.set)

    async def take(self) -> list[events.Heard]:
        """Wait until something was heard, and return it."""
        await self._came.wait()
        self._came.clear()
        with self._lock:
            taken, self._waiting = [*self._waiting.values()], {}
        return taken


def _key(heard: events.Heard) -> object:
    match heard:
        case gpu.Xid(part=part, xid=xid):
            return part, xid
        case gpu.Poll(gpu=uuid) | events.Suspected(gpu=uuid) | events.Divided(gpu=uuid):
            return type(heard), uuid
        case _:
            return type(heard)
