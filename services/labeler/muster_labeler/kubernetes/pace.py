"""Adapter: the event loop: lets those who write take turns, no faster than a budget allows."""

import asyncio
import collections
import contextlib
from collections.abc import AsyncGenerator, Callable


class Pace:
    """The turns of all who write to one cluster: `async with pace.turn()`, a request in each."""

    def __init__(self, per_s: float) -> None:
        self._budget = Budget(per_s)
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


class Budget:
    """Turns in time, one for each write, at least `1 / per_s` apart; no bursts after a pause."""

    def __init__(self, per_s: float) -> None:
        assert per_s > 0, f"{per_s} writes a second are none"
        self._gap_s = 1.0 / per_s
        self._window_s, self._most = max(1.0, self._gap_s), max(1, int(per_s))
        self._next_at = float("-inf")
        self._under_way = 0
        self._counted: collections.deque[float] = collections.deque()
        """Until when each write that was answered counts."""

    def wait_s(self, now: float) -> float | None:
        """Return how long it is until the next turn; None if it is once a write was answered."""
        while self._counted and self._counted[0] <= now:
            self._counted.popleft()
        if self._under_way + len(self._counted) < self._most:
            return max(0.0, self._next_at - now)
        return max(self._counted[0], self._next_at) - now if self._counted else None

    def take(self, now: float) -> None:
        """Take the turn: the next one comes a gap after it was really taken."""
        assert self.wait_s(now) == 0, "a turn was taken before its time"
        self._under_way += 1
        self._next_at = now + self._gap_s

    def answered(self, now: float) -> None:
        """Take that a write was answered, or that nobody waits for it any more."""
        assert self._under_way, "what was answered was under way"
        self._under_way -= 1
        self._counted.append(now + self._window_s)


class Restraint:
    """How often one node may be written: who else changes its label is not fought without end."""

    def __init__(self, most: int, within_s: float) -> None:
        self._most = most
        self._within_s = within_s
        self._written: dict[str, tuple[float, int]] = {}
        """Since when, and how often."""

    def may(self, node: str, now: float) -> bool:
        """Tell whether a node may be written once more."""
        since, count = self._written.get(node, (now, 0))
        return now - since >= self._within_s or count < self._most

    def wrote(self, node: str, now: float) -> None:
        """Take that it was written."""
        since, count = self._written.get(node, (now, 0))
        is_over = now - since >= self._within_s
        self._written[node] = (now, 1) if is_over else (since, count + 1)

    def forget(self, now: float) -> None:
        """Let go what was written so long ago that it does not count."""
        old = [node for node, (since, _) in self._written.items() if now - since >= self._within_s]
        for node in old:
            del self._written[node]
