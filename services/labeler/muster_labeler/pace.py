"""Door to the event loop: lets those who write take turns, no faster than a budget allows."""

import asyncio

from muster_labeler import budget


class Pace:
    """The turns of all who write to one cluster.

    A turn counts from when it is taken: writers that woke late together do not go together.
    """

    def __init__(self, per_s: float) -> None:
        self._budget = budget.Budget(per_s)
        self._line = asyncio.Lock()
        self._clock = asyncio.get_running_loop().time

    async def turn(self) -> None:
        """Wait for a turn, first come, first served."""
        async with self._line:
            await asyncio.sleep(self._budget.wait_s(self._clock()))
            # a timer may be a hair early
            self._budget.take(max(self._clock(), self._budget.next_at))
