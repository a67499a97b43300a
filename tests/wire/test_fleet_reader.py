"""The reader of a fleet's state, on a real NATS server and a real health service."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import orjson
import pytest

from muster import codec, matching, vocabulary
from muster.fleet import health_client, model, reader
from muster.local import nats
from muster.nats import bus, storage, streams
from muster.vocabulary import Health

GPU = "nvidia.com/gpu"
PLUGIN = "device-plugin"
NODES = ("node.b", "node-a", "node-c")


@dataclass
class World:
    """A reader of a fleet's state, and the events that it has passed on."""

    health: str
    process: asyncio.subprocess.Process
    link: bus.Bus
    fleet: model.FleetModel
    reading: reader.FleetReader
    events: list[codec.CloudEvent] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds after some change."""
        while not holds():
            self.changed.clear()
            await self.changed.wait()


@contextlib.asynccontextmanager
async def world(directory: Path) -> AsyncIterator[World]:
    """Run NATS, health, heartbeats of each node, and a reader."""
    settings = directory / "health.yaml"
    async with (
        asyncio.timeout(100),
        nats.NatsServer(directory / "nats") as server,
        bus.Bus(server.url, producer=f"plugins/{PLUGIN}", name="test", owner=True) as link,
    ):
        settings.write_text(f'bus: {{url: "{server.url}"}}\ndetection: {{interval_s: 60}}\n')
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "muster_health", "--config", str(settings)),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        health = str(orjson.loads(await process.stdout.readline())["http"])
        draining = asyncio.create_task(process.stdout.read())
        fleet, changed = model.FleetModel(), asyncio.Event()
        events: list[codec.CloudEvent] = []
        listeners = reader.Listeners(changed.set, events.append)
        reading = reader.FleetReader(
            # nothing listens on the first port
            fleet,
            health=("http://127.0.0.1:1", health),
            link=link.link,
            listeners=listeners,
        )
        tasks = [asyncio.create_task(reading.run()), asyncio.create_task(beat(link))]
        try:
            yield World(health, process, link, fleet, reading, events, changed)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            await process.wait()
            await draining


async def beat(link: bus.Bus) -> None:
    """Send heartbeats of all nodes every half second."""
    resources = (
        vocabulary.ResourceBeat(
            name=GPU, streams=1, probe_ok=True, probe_age_s=0.0, devices=1, healthy=1
        ),
    )
    seq = 0
    while True:
        seq += 1
        for node in NODES:
            heartbeat = vocabulary.Heartbeat(
                node=node,
                plugin=PLUGIN,
                instance=link.instance,
                seq=seq,
                interval_s=60.0,
                resources=resources,
            )
            await link.send_heartbeat(heartbeat)
        await asyncio.sleep(0.5)


def inventory(node: str, health: Health) -> vocabulary.InventoryReported:
    device = vocabulary.Device(id="g0", resource=GPU, health=health, reason="XID 79")
    return vocabulary.InventoryReported(
        node=node, at=datetime.now(UTC), plugin=PLUGIN, devices=(device,)
    )


def test_the_model_follows_health_and_its_silences_and_says_when_it_is_old(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with world(tmp_path) as here:
            fleet = here.fleet
            await here.until(lambda: set(fleet.nodes) == set(NODES) and fleet.is_complete)
            await here.link.publish(inventory("node.b", Health.UNHEALTHY))
            await here.until(lambda: fleet.nodes["node.b"].alerts == 1)
            bad = fleet.nodes["node.b"]
            assert bad.reason == fleet.alerts[0].summary
            assert fleet.nodes["node-a"].alerts == 0
            # events are passed on, and the whole node can be read
            await here.until(lambda: any(e.type == "alert.changed" for e in here.events))
            whole = await here.reading.node("node.b")
            assert [plugin.node for plugin in whole.plugins] == ["node.b"]
            assert whole.plugins[0].unhealthy[0].device == "g0"
            past = await here.reading.past_events(
                node="node.b", age=timedelta(hours=1), events_max=100
            )
            assert "alert.changed" in {event.type for event in past}

            silence = matching.Silence(
                id="s1",
                matchers=("node=node.b",),
                starts_at=datetime.now(UTC),
                ends_at=datetime.now(UTC) + timedelta(hours=1),
                author="ann",
                comment="known",
            )
            encoded = matching.encode_silence(silence)
            await storage.put(here.link.link, streams.SILENCES, "s1", encoded)
            await here.until(lambda: fleet.nodes["node.b"].silenced == 1)
            assert fleet.nodes["node.b"].level is model.Level.NOTICE

            here.process.send_signal(signal.SIGKILL)
            await here.until(
                lambda: "has not answered" in fleet.problem(asyncio.get_event_loop().time())
            )
            assert "Connection refused" in fleet.problem(asyncio.get_event_loop().time())
            assert set(fleet.nodes) == set(NODES)
            with pytest.raises(ConnectionError, match="Connection refused"):
                await here.reading.node("node.b")

    asyncio.run(story())


def test_health_answers_for_one_node_or_for_a_page_in_order_of_name(tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path) as here:
            await here.until(lambda: set(here.fleet.nodes) == set(NODES))

            async def nodes(query: str) -> tuple[list[str], str]:
                state = await asyncio.to_thread(health_client.read_state, here.health, query)
                return sorted(plugin.node for plugin in state.plugins), state.next

            assert await nodes("") == (["node-a", "node-c", "node.b"], "")
            assert await nodes("nodes=2") == (["node-a", "node-c"], "node-c")
            assert await nodes("nodes=2&after=node-c") == (["node.b"], "")
            assert await nodes("nodes=2&after=zzz") == ([], "")
            assert await nodes("node=node.b") == (["node.b"], "")
            assert await nodes("node=nobody") == ([], "")
            for bad in ("nodes=0", "nodes=1001", "nodes=x", "after=a", "node=a&nodes=3", "x=1"):
                with pytest.raises(ConnectionError, match="HTTP 400"):
                    await nodes(bad)

    asyncio.run(story())
