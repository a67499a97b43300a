"""The gate's rate limits on a real nats-server: too much closes a connection, and is refused."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import nats.errors

from muster import codec, vocabulary
from muster.cli import keyfiles
from muster.nats import connection
from muster.nats.auth import accounts
from muster_health.bus import nats_connections
from tests.worlds import bus_subjects, nats_with_gate

RATES = {"messages_per_s": 50, "burst_s": 2, "read_s": 0.1, "refuse_s": 0.7, "connections": 3}
BEAT = "muster.heartbeat.{}.device-plugin"


def run(
    where: Path, story: Callable[[nats_with_gate.World], Awaitable[None]], **settings: Any
) -> None:
    async def whole() -> None:
        async with asyncio.timeout(25), nats_with_gate.World(where, **settings) as world:
            await story(world)

    asyncio.run(whole())


async def is_refused(world: nats_with_gate.World, node: str) -> bool:
    try:
        async with world.plugin(nats_with_gate.token(node)):
            return False
    except (nats.errors.Error, TimeoutError, OSError):
        return True


async def flood(plugin: bus_subjects.Client, node: str = "node-a", count: int = 500) -> None:
    with contextlib.suppress(nats.errors.Error, OSError):
        for _ in range(count):
            await plugin.raw.publish(BEAT.format(node), b"x")
        await plugin.raw.flush()


def test_a_node_that_floods_is_refused_for_a_while_by_all_gates_and_no_other_is(
    tmp_path: Path,
) -> None:
    heard: list[vocabulary.Event] = []
    beats: list[bytes] = []

    async def hear(message: connection.Message) -> None:
        heard.append(codec.decode(message.subject, message.data).data)

    async def count(message: connection.Message) -> None:
        beats.append(message.data)

    async def story(world: nats_with_gate.World) -> None:
        async with world.admin() as admin, world.plugin(nats_with_gate.token("node-b")) as honest:
            await admin.raw.subscribe("muster.sys.*.node.limited", cb=hear)
            await admin.raw.subscribe(BEAT.format("node-b"), cb=count)
            await admin.flush()
            for reserve in (100, 35):
                async with world.plugin(nats_with_gate.token("node-a")) as plugin:
                    await flood(plugin)
                    await bus_subjects.until(lambda: plugin.raw.is_closed)
                # either gate may answer
                assert [await is_refused(world, "node-a") for _ in range(6)] == [True] * 6
                await honest.raw.publish(BEAT.format("node-b"), b"here")
                await bus_subjects.until(lambda: bool(heard))
                limited = heard[0]
                assert isinstance(limited, vocabulary.NodeLimited)
                assert (limited.node, limited.refused_s) == ("node-a", 0.7)
                # a flood may be measured before its end; the second one has a smaller reserve
                assert reserve < limited.messages <= 500
                assert limited.reason == "more than 50 messages a second"
                assert 0 < limited.seconds < 5
                async with asyncio.timeout(10):
                    while await is_refused(world, "node-a"):
                        await asyncio.sleep(0.05)
                # both gates may have published it
                heard.clear()
            await bus_subjects.until(lambda: beats == [b"here"] * 2)
            assert honest.raw.is_connected
            assert not await is_refused(world, "node-b")
        assert (await world.counted()).keys() == {"admitted", "noisy"}
        assert {line["node"] for line in world.logged("node_limited")} == {"node-a"}

    run(tmp_path, story, gates=2, rates=RATES, pace={"burst": 1000})


def test_credentials_and_many_connections_are_policed_and_nobody_is_punished_for_another(
    tmp_path: Path,
) -> None:
    async def story(world: nats_with_gate.World) -> None:
        await floods_with_credentials(world)
        async with contextlib.AsyncExitStack() as stack:
            token = nats_with_gate.token("node-c")
            five = [await stack.enter_async_context(world.plugin(token)) for _ in range(5)]
            await bus_subjects.until(lambda: sum(c.raw.is_closed for c in five) == 2)
            assert [c.raw.is_closed for c in five] == [True, True, False, False, False]

    async def floods_with_credentials(world: nats_with_gate.World) -> None:
        """A user with credentials may give its connection any name."""
        creds = keyfiles.user(world.keys, accounts.Role.NODE, name="plugin_node-a", at=1)
        async with world.plugin(nats_with_gate.token("node-b")) as other, world.admin() as admin:
            await admin.raw.subscribe(nats_connections.DISCONNECT, cb=hear)
            await admin.flush()
            for _ in range(2):
                # such connections are not refused, but closed at once as long as the penalty lasts
                name = "device-plugin node-b"
                async with world.holder(creds, user="plugin_node-b", name=name) as plugin:
                    await flood(plugin)
                    await bus_subjects.until(lambda: plugin.raw.is_closed)
            await flood(other, "node-b", 20)
            await other.flush()
            await bus_subjects.until(lambda: len(ended) == 2)
            assert ended == [nats_connections.OtherClient(name, is_connected=False)] * 2
            assert not await is_refused(world, "node-b")
        assert {line["node"] for line in world.logged("node_limited")} == {"node-a"}

    ended: list[object] = []

    async def hear(message: connection.Message) -> None:
        ended.append(nats_connections.decode(message.subject, message.data))

    run(tmp_path, story, rates=RATES | {"refuse_s": 10})


def test_a_flood_in_connections_too_short_to_be_read_counts_as_well(tmp_path: Path) -> None:
    async def story(world: nats_with_gate.World) -> None:
        for _ in range(3):
            assert not await is_refused(world, "node-a")
            async with world.plugin(nats_with_gate.token("node-a")) as plugin:
                await flood(plugin, count=40)
        async with asyncio.timeout(10):
            while not await is_refused(world, "node-a"):
                await asyncio.sleep(0.02)
        await bus_subjects.until(lambda: bool(world.logged("node_limited")))
        assert [line["messages"] for line in world.logged("node_limited")] == [120]

    run(tmp_path, story, rates={"messages_per_s": 1, "burst_s": 100, "read_s": 1000})
