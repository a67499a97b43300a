"""What takes a round trip: in order for one node, side by side for many, last what concerns all."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from muster_health.bus import keyed_executor


class Acts:
    """Acts that wait until they are let through, by name."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._let = asyncio.Condition()
        self._free: set[str] = set()

    async def do(self, name: str) -> None:
        async with self._let:
            self.begun.append(name)
            self._let.notify_all()
            await self._let.wait_for(lambda: name in self._free)

    async def let(self, *names: str) -> None:
        async with self._let:
            self._free |= set(names)
            self._let.notify_all()

    async def until(self, *names: str) -> None:
        async with self._let:
            await self._let.wait_for(lambda: sorted(self.begun) == sorted(names))


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[tuple[keyed_executor.Lanes, Acts]]:
    made = keyed_executor.Lanes()
    task = asyncio.create_task(made.run())
    async with asyncio.timeout(30):
        yield made, Acts()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_one_node_is_told_of_in_order_and_holds_up_no_other() -> None:
    async def story() -> None:
        async with running() as (made, acts):
            for node, name in (("a", "a1"), ("a", "a2"), ("b", "b1")):
                await made.put(node, lambda name=name: acts.do(name))  # type: ignore[misc]
            await acts.until("a1", "b1")
            await acts.let("a1")
            await acts.until("a1", "b1", "a2")

    asyncio.run(story())


def test_what_concerns_all_comes_after_what_came_before_and_holds_up_nobody() -> None:
    async def story() -> None:
        async with running() as (made, acts):
            await made.put("a", lambda: acts.do("a1"))
            await made.put("b", lambda: acts.do("b1"))
            await made.put_last(lambda: acts.do("all"))
            await made.put("c", lambda: acts.do("c1"))
            await acts.until("a1", "b1", "c1")
            await acts.let("a1")
            await acts.until("a1", "b1", "c1")
            await acts.let("b1")
            await acts.until("a1", "b1", "c1", "all")

    asyncio.run(story())
