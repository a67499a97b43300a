"""Adapter: the event loop: runs slow actions in order, without delaying the detector.

Actions for one node run one after the other, in order; nodes do not wait for each other. An action
that concerns all nodes runs after everything that was submitted before it: a position in the stream
of events must not be saved before its consequences are published.
"""

import asyncio
import zlib
from collections.abc import Awaitable, Callable
from typing import Final

Action = Callable[[], Awaitable[None]]

_QUEUES: Final = 16
_PENDING_MAX: Final = 2_000
"""The maximum number of actions in all queues together; beyond that `submit` waits."""


class KeyedExecutor:
    """Executes submitted actions while `run` runs; queue 0 is for actions about all nodes."""

    def __init__(self) -> None:
        self._queues: list[asyncio.Queue[Action]] = [asyncio.Queue() for _ in range(_QUEUES + 1)]
        self._free = asyncio.Semaphore(_PENDING_MAX)
        self._submitted = [0] * (_QUEUES + 1)
        self._done = [0] * (_QUEUES + 1)
        self._changed = asyncio.Condition()
        self._clock = asyncio.get_running_loop().time
        self._started_at: list[float | None] = [None] * (_QUEUES + 1)

    def stuck_s(self) -> float:
        """Return for how long the oldest action has been running."""
        now = self._clock()
        return max((now - at for at in self._started_at if at is not None), default=0.0)

    async def submit(self, node: str, action: Action) -> None:
        """Run an action after all that were submitted earlier for the same node."""
        queue = 1 + zlib.crc32(node.encode()) % _QUEUES
        await self._submit(queue, action)

    async def submit_after_all(self, action: Action) -> None:
        """Run an action after all that were submitted earlier for any node."""
        before = list(self._submitted)

        def is_everything_done() -> bool:
            return all(
                done >= submitted
                for done, submitted in zip(self._done[1:], before[1:], strict=True)
            )

        async def when_all_is_done() -> None:
            async with self._changed:
                await self._changed.wait_for(is_everything_done)
            self._started_at[0] = self._clock()
            await action()

        await self._submit(0, when_all_is_done)

    async def run(self) -> None:
        """Run actions forever."""
        async with asyncio.TaskGroup() as tasks:
            for queue in range(len(self._queues)):
                tasks.create_task(self._work(queue))

    async def _submit(self, queue: int, action: Action) -> None:
        await self._free.acquire()
        self._submitted[queue] += 1
        self._queues[queue].put_nowait(action)

    async def _work(self, queue: int) -> None:
        while True:
            action = await self._queues[queue].get()
            # queue 0 first waits for the others, which does not mean that it is stuck
            self._started_at[queue] = self._clock() if queue else None
            await action()
            self._started_at[queue] = None
            self._free.release()
            async with self._changed:
                self._done[queue] += 1
                self._changed.notify_all()
