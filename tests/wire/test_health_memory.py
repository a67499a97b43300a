"""What is to be remembered holds nobody up for long; what cannot be told is said past the bus."""

import asyncio
import contextlib
import tempfile
from pathlib import Path

import nats
import pytest
from nats.js import api

from muster.local import nats as local
from muster.nats import buckets, bus, jetstream, streams
from muster_health.bus import keyed_executor, state_store, watchdog
from muster_health.model import signals

BUCKET = f"KV_{streams.STATE.name}"


def test_a_full_bucket_holds_nobody_up_and_gets_what_it_is_owed_when_it_has_room() -> None:
    async def story(directory: Path) -> None:
        async with local.NatsServer(directory) as server:
            client = await nats.connect(server.url)
            context = client.jetstream()
            await context.create_key_value(bucket=streams.STATE.name, max_bytes=400, history=1)
            async with bus.Bus(server.url, producer="tests", name="test", owner=True) as on:
                kept = state_store.Memory(
                    lambda key, value, still: buckets.remember(
                        on.link, streams.STATE, key, value, is_leader=still
                    ),
                    last="_fleet.health",
                    patience_s=0.2,
                    again_s=0.05,
                )
                running = asyncio.create_task(kept.run())
                await kept.keep("a.p", b"first", lambda: True)
                assert kept.problem == ""
                for value in (b"x" * 500, b"y" * 600):
                    await kept.keep("b.p", value, lambda: True)
                await kept.keep("_fleet.health", b"position", lambda: True)
                assert "the state of 2 plugins" in kept.problem
                assert await buckets.recall(on.link, streams.STATE) == {"a.p": b"first"}
                config = (await context.stream_info(BUCKET)).config
                await context.update_stream(config.evolve(max_bytes=100_000))
                while kept.problem:
                    await asyncio.sleep(0.02)
                assert await buckets.recall(on.link, streams.STATE) == {
                    "a.p": b"first",
                    "b.p": b"y" * 600,
                    "_fleet.health": b"position",
                }
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
            await client.close()

    with tempfile.TemporaryDirectory(prefix="mu-") as directory:
        asyncio.run(asyncio.wait_for(story(Path(directory)), 100))


def test_what_a_former_leader_owes_is_dropped() -> None:
    async def story() -> None:
        leads = True
        asked: list[str] = []

        async def write(key: str, _: bytes, still: state_store.Still) -> bool:
            asked.append(key)
            while still():
                await asyncio.sleep(0.01)
            return False

        kept = state_store.Memory(write, last="z", patience_s=0.05, again_s=0.01)
        running = asyncio.create_task(kept.run())
        await kept.keep("a", b"1", lambda: leads)
        await kept.keep("b", b"1", lambda: leads)
        assert kept.problem
        leads = False
        while kept.problem:
            await asyncio.sleep(0.01)
        assert asked[0] == "a"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(asyncio.wait_for(story(), 30))


def test_what_nats_does_not_take_is_said_past_it_and_once() -> None:
    async def story() -> None:
        made = keyed_executor.Lanes()
        said: list[signals.Alarm] = []
        free, came = asyncio.Event(), asyncio.Condition()

        async def tell(alarm: signals.Alarm) -> None:
            async with came:
                said.append(alarm)
                came.notify_all()

        minding = watchdog.mind(
            made.stuck_s, tell, is_blind=lambda: False, bound_s=0.1, look_s=0.02
        )
        tasks = [asyncio.create_task(made.run()), asyncio.create_task(minding)]
        await made.put("a", _hold(free))
        await made.put_last(_hold(free))
        async with came:
            await came.wait_for(lambda: len(said) == 1)
        assert made.stuck_s() > 0.1
        free.set()
        async with came:
            await came.wait_for(lambda: len(said) == 2)
        assert [alarm.firing for alarm in said] == [True, False]
        assert "NATS does not take" in said[0].summary
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks)

    asyncio.run(asyncio.wait_for(story(), 30))


def _hold(free: asyncio.Event) -> keyed_executor.Act:
    async def act() -> None:
        await free.wait()

    return act


def test_what_was_given_and_never_came_ends_a_recall_instead_of_being_waited_for() -> None:
    async def story(directory: Path) -> None:
        async with local.NatsServer(directory) as server:
            client = await nats.connect(server.url)
            context = client.jetstream()
            await context.add_stream(name="S", subjects=["s"], storage=api.StorageType.MEMORY)
            for _ in range(300):
                await context.publish("s", b"x")
            config = api.ConsumerConfig(ack_policy=api.AckPolicy.NONE, mem_storage=True)

            async def recall() -> None:
                async for _ in jetstream.pull(client, "S", config, until_empty=True):
                    await context.purge_stream("S")

            with pytest.raises(jetstream.ConsumerLost, match="did not arrive"):
                await recall()
            await client.close()

    with tempfile.TemporaryDirectory(prefix="mu-") as directory:
        asyncio.run(asyncio.wait_for(story(Path(directory)), 100))
