"""Adapter: the event loop: what takes a round trip is done in lanes, beside the detector.

What concerns one node is done in order, one after the other; nodes do not wait for one another.
What concerns all of them is done after all that came before it: a position in the stream of events
must not be remembered before what followed from them.
"""

import asyncio
import zlib
from collections.abc import Awaitable, Callable
from typing import Final

Act = Callable[[], Awaitable[None]]

_LANES: Final = 16
_WAITING_MAX: Final = 2_000
"""In all; then whoever has more to do waits."""


class Lanes:
    """Does acts; `run` must run."""

    def __init__(self) -> None:
        self._lanes: list[asyncio.Queue[Act]] = [asyncio.Queue() for _ in range(_LANES + 1)]
        self._room = asyncio.Semaphore(_WAITING_MAX)
        self._put = [0] * (_LANES + 1)
        self._done = [0] * (_LANES + 1)
        self._changed = asyncio.Condition()
        self._clock = asyncio.get_running_loop().time
        self._begun: list[float | None] = [None] * (_LANES + 1)

    def stuck_s(self) -> float:
        """Return for how long the oldest act has been under way."""
        now = self._clock()
        return max((now - at for at in self._begun if at is not None), default=0.0)

    async def put(self, node: str, act: Act) -> None:
        """Have it done after all that was put in for this node."""
        lane = 1 + zlib.crc32(node.encode()) % _LANES
        await self._add(lane, act)

    async def put_last(self, act: Act) -> None:
        """Have it done after all that was put in for anybody."""
        before = list(self._put)

        async def waiting() -> None:
            async with self._changed:
                await self._changed.wait_for(
                    lambda: all(
                        done >= put for done, put in zip(self._done[1:], before[1:], strict=True)
                    )
                )
            self._begun[0] = self._clock()
            await act()

        await self._add(0, waiting)

    async def run(self) -> None:
        """Do what is put in, for ever."""
        async with asyncio.TaskGroup() as tasks:
            for lane in range(len(self._lanes)):
                tasks.create_task(self._go(lane))

    async def _add(self, lane: int, act: Act) -> None:
        await self._room.acquire()
        self._put[lane] += 1
        self._lanes[lane].put_nowait(act)

    async def _go(self, lane: int) -> None:
        while True:
            act = await self._lanes[lane].get()
            # the first lane waits for the others, and is not stuck itself
            self._begun[lane] = self._clock() if lane else None
            await act()
            self._begun[lane] = None
            self._room.release()
            async with self._changed:
                self._done[lane] += 1
                self._changed.notify_all()
