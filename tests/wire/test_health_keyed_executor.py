"""Actions run in order for one node, concurrently for many; one for all nodes runs last."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from muster_health.bus import outputs


class Actions:
    """Actions that block until they are released, by name."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self._changed = asyncio.Condition()
        self._released: set[str] = set()

    async def run(self, name: str) -> None:
        async with self._changed:
            self.started.append(name)
            self._changed.notify_all()
            await self._changed.wait_for(lambda: name in self._released)

    async def release(self, *names: str) -> None:
        async with self._changed:
            self._released |= set(names)
            self._changed.notify_all()

    async def until_started(self, *names: str) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: sorted(self.started) == sorted(names))


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[tuple[outputs.KeyedExecutor, Actions]]:
    executor = outputs.KeyedExecutor()
    task = asyncio.create_task(executor.run())
    async with asyncio.timeout(30):
        yield executor, Actions()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_actions_for_one_node_run_in_order_and_delay_no_other_node() -> None:
    async def story() -> None:
        async with running() as (executor, actions):
            for node, name in (("a", "a1"), ("a", "a2"), ("b", "b1")):
                await executor.submit(node, lambda name=name: actions.run(name))  # type: ignore[misc]
            await actions.until_started("a1", "b1")
            await actions.release("a1")
            await actions.until_started("a1", "b1", "a2")

    asyncio.run(story())


def test_an_action_for_all_nodes_runs_after_everything_before_it_and_delays_nothing() -> None:
    async def story() -> None:
        async with running() as (executor, actions):
            await executor.submit("a", lambda: actions.run("a1"))
            await executor.submit("b", lambda: actions.run("b1"))
            await executor.submit_after_all(lambda: actions.run("all"))
            await executor.submit("c", lambda: actions.run("c1"))
            await actions.until_started("a1", "b1", "c1")
            await actions.release("a1")
            await actions.until_started("a1", "b1", "c1")
            await actions.release("b1")
            await actions.until_started("a1", "b1", "c1", "all")

    asyncio.run(story())
