"""Adapter: the event loop: lets writers take turns, no faster than a rate allows.

The rate holds where writes arrive, not only where they are sent: a write that is under way may
arrive at any moment until it is answered, so it counts from when it is sent until a second after
its answer. That is why this is no token bucket.
"""

import asyncio
import collections
import contextlib
from collections.abc import AsyncGenerator, Callable


class WritePace:
    """The turns of everybody who writes to one cluster: `async with pace.turn()`, one request each.

    `may_write` is evaluated when a turn has come: a writer that has waited long cannot know.
    """

    def __init__(self, per_s: float) -> None:
        self._rate = WriteRate(per_s)
        self._line = asyncio.Lock()
        self._answered = asyncio.Event()
        self._clock = asyncio.get_running_loop().time
        self.may_write: Callable[[], bool] = _always

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncGenerator[None, None]:
        """Wait for a turn, first come, first served; leave it when the answer is there."""
        async with self._line:
            while (wait_s := self._rate.wait_s(self._clock())) != 0:
                self._answered.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._answered.wait()
            self._rate.start(self._clock())
        try:
            yield
        finally:
            self._rate.finish(self._clock())
            self._answered.set()


class WriteRate:
    """Writes at least `1 / per_s` apart, without bursts after a pause, `per_s` a second at most."""

    def __init__(self, per_s: float) -> None:
        assert per_s > 0, f"{per_s} writes a second are none"
        self._gap_s = 1.0 / per_s
        self._window_s, self._writes_max = max(1.0, self._gap_s), max(1, int(per_s))
        self._next_at = float("-inf")
        self._under_way = 0
        self._counted_until: collections.deque[float] = collections.deque()
        """Until when each answered write counts."""

    def wait_s(self, now: float) -> float | None:
        """Return the time until the next write may start; None if one must be answered first."""
        while self._counted_until and self._counted_until[0] <= now:
            self._counted_until.popleft()
        if self._under_way + len(self._counted_until) < self._writes_max:
            return max(0.0, self._next_at - now)
        if not self._counted_until:
            return None
        return max(self._counted_until[0], self._next_at) - now

    def start(self, now: float) -> None:
        """Count a write that is sent now; the next one comes at least a gap later."""
        assert self.wait_s(now) == 0, "a write was started too early"
        self._under_way += 1
        self._next_at = now + self._gap_s

    def finish(self, now: float) -> None:
        """Note that a write was answered, or that nobody waits for its answer any more."""
        assert self._under_way, "only a write that is under way can be answered"
        self._under_way -= 1
        self._counted_until.append(now + self._window_s)


class WriteLimit:
    """How often each node may be written in a period: no endless fight over a label."""

    def __init__(self, writes_max: int, period_s: float) -> None:
        self._writes_max = writes_max
        self._period_s = period_s
        self._written: dict[str, tuple[float, int]] = {}
        """When the period began, and how many writes were in it."""

    def may_write(self, node: str, now: float) -> bool:
        """Return whether a node may be written once more."""
        since, count = self._written.get(node, (now, 0))
        return now - since >= self._period_s or count < self._writes_max

    def note_write(self, node: str, now: float) -> None:
        """Count a write."""
        since, count = self._written.get(node, (now, 0))
        is_over = now - since >= self._period_s
        self._written[node] = (now, 1) if is_over else (since, count + 1)

    def forget(self, now: float) -> None:
        """Drop the nodes whose period is over."""
        over = [node for node, (since, _) in self._written.items() if now - since >= self._period_s]
        for node in over:
            del self._written[node]


def _always() -> bool:
    return True
