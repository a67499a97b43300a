"""Adapter: the event loop: lets those who write take turns, no faster than a budget allows."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

from muster_labeler import budget


class Pace:
    """The turns of all who write to one cluster: `async with pace.turn()`, a request in each."""

    def __init__(self, per_s: float) -> None:
        self._budget = budget.Budget(per_s)
        self._line = asyncio.Lock()
        self._answered = asyncio.Event()
        self._clock = asyncio.get_running_loop().time
        self.may_write: Callable[[], bool] = _always
        """Whether we may write, asked when a turn has come: who waited long may not know it yet."""

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncGenerator[None, None]:
        """Wait for a turn, first come, first served; leave it when the answer is there."""
        async with self._line:
            while (wait_s := self._budget.wait_s(self._clock())) != 0:
                self._answered.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._answered.wait()
            self._budget.take(self._clock())
        try:
            yield
        finally:
            self._budget.answered(self._clock())
            self._answered.set()


def _always() -> bool:
    return True
