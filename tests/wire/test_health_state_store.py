"""Saving state delays nothing for long; if nothing can be published, people are notified anyway."""

import asyncio
import contextlib
import tempfile
from pathlib import Path

import nats
import pytest
from nats.js import api

from muster.local import nats as local
from muster.nats import bus, jetstream, storage, streams
from muster_health.bus import outputs, self_monitoring
from muster_health.model import signals

BUCKET = f"KV_{streams.STATE.name}"


def test_a_full_bucket_delays_nothing_for_long_and_gets_the_state_when_it_has_space() -> None:
    async def story(directory: Path) -> None:
        async with local.NatsServer(directory) as server:
            client = await nats.connect(server.url)
            context = client.jetstream()
            await context.create_key_value(bucket=streams.STATE.name, max_bytes=400, history=1)
            async with bus.Bus(server.url, producer="tests", name="test", owner=True) as on:
                store = outputs.StateStore(
                    lambda key, value, is_leader: storage.put(
                        on.link, streams.STATE, key, value, is_leader=is_leader
                    ),
                    last="_fleet.health",
                    delay_max_s=0.2,
                    retry_s=0.05,
                )
                running = asyncio.create_task(store.run())
                await store.save("a.p", b"first", lambda: True)
                assert store.problem == ""
                for value in (b"x" * 500, b"y" * 600):
                    await store.save("b.p", value, lambda: True)
                await store.save("_fleet.health", b"position", lambda: True)
                assert "the state of 2 plugins" in store.problem
                assert await storage.read_all(on.link, streams.STATE) == {"a.p": b"first"}
                config = (await context.stream_info(BUCKET)).config
                await context.update_stream(config.evolve(max_bytes=100_000))
                while store.problem:
                    await asyncio.sleep(0.02)
                assert await storage.read_all(on.link, streams.STATE) == {
                    "a.p": b"first",
                    "b.p": b"y" * 600,
                    "_fleet.health": b"position",
                }
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
            await client.close()

    with tempfile.TemporaryDirectory(prefix="mu-") as directory:
        asyncio.run(asyncio.wait_for(story(Path(directory)), 100))


def test_unsaved_state_of_a_former_leader_is_dropped() -> None:
    async def story() -> None:
        leads = True
        keys: list[str] = []

        async def write(key: str, _: bytes, is_leader: outputs.IsLeader) -> bool:
            keys.append(key)
            while is_leader():
                await asyncio.sleep(0.01)
            return False

        store = outputs.StateStore(write, last="z", delay_max_s=0.05, retry_s=0.01)
        running = asyncio.create_task(store.run())
        await store.save("a", b"1", lambda: leads)
        await store.save("b", b"1", lambda: leads)
        assert store.problem
        leads = False
        while store.problem:
            await asyncio.sleep(0.01)
        assert keys[0] == "a"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(asyncio.wait_for(story(), 30))


def test_people_are_notified_once_without_the_bus_when_nats_accepts_nothing() -> None:
    async def story() -> None:
        executor = outputs.KeyedExecutor()
        alarms: list[signals.Alarm] = []
        free, changed = asyncio.Event(), asyncio.Condition()

        async def notify(alarm: signals.Alarm) -> None:
            async with changed:
                alarms.append(alarm)
                changed.notify_all()

        watching = self_monitoring.watch_publishing(
            executor.stuck_s, notify, is_disconnected=lambda: False, stuck_max_s=0.1, check_s=0.02
        )
        tasks = [asyncio.create_task(executor.run()), asyncio.create_task(watching)]
        await executor.submit("a", _hold(free))
        await executor.submit_after_all(_hold(free))
        async with changed:
            await changed.wait_for(lambda: len(alarms) == 1)
        assert executor.stuck_s() > 0.1
        free.set()
        async with changed:
            await changed.wait_for(lambda: len(alarms) == 2)
        assert [alarm.firing for alarm in alarms] == [True, False]
        assert "NATS has not accepted" in alarms[0].summary
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks)

    asyncio.run(asyncio.wait_for(story(), 30))


def _hold(free: asyncio.Event) -> outputs.Action:
    async def act() -> None:
        await free.wait()

    return act


def test_messages_that_never_arrive_end_a_recall_with_an_error() -> None:
    async def story(directory: Path) -> None:
        async with local.NatsServer(directory) as server:
            client = await nats.connect(server.url)
            context = client.jetstream()
            await context.add_stream(name="S", subjects=["s"], storage=api.StorageType.MEMORY)
            # more messages than one request asks for
            for _ in range(1_200):
                await context.publish("s", b"x")
            config = api.ConsumerConfig(
                ack_policy=api.AckPolicy.NONE, mem_storage=True, inactive_threshold=100
            )

            async def recall() -> None:
                async for _ in jetstream.pull(client, "S", config, until_empty=True):
                    await context.purge_stream("S")

            with pytest.raises(jetstream.ConsumerLost, match="did not arrive"):
                await recall()
            await client.close()

    with tempfile.TemporaryDirectory(prefix="mu-") as directory:
        asyncio.run(asyncio.wait_for(story(Path(directory)), 100))
