"""A hostile node, whose plugins keep coming and going, delays no verdict about other nodes."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Self

import orjson

from muster import codec, vocabulary
from muster.local import nats
from muster.nats import bus
from muster.vocabulary import AlertKind, AlertState, Verdict
from tests.worlds import fleet_parts

RESTART_S = 2.0
LIMIT_S = 8.0
"""Of an alert: usually 2 s, more on a busy machine, and without limits on a storm 15 s or more."""
SETTINGS = {
    "detection": {"restart_s": RESTART_S, "patience_s": 0},
    # an earlier default; the present one is lower
    "bounds": {"plugins_per_node": 16},
}
HOSTILE, VICTIM = "hostile", "victim"


class Voice:
    """A sender of heartbeats of several plugins over one connection."""

    def __init__(self, connected: bus.Bus, names: Sequence[tuple[str, str]]) -> None:
        self._bus = connected
        self._names = names
        self._seq = 0

    async def send(self, interval_s: float) -> None:
        self._seq += 1
        for node, plugin in self._names:
            await self._bus.send_heartbeat(heartbeat(node, plugin, self._seq, interval_s))

    async def send_always(self, interval_s: float) -> None:
        while True:
            await self.send(interval_s)
            await asyncio.sleep(interval_s)


def heartbeat(node: str, plugin: str, seq: int, interval_s: float) -> vocabulary.Heartbeat:
    resource = vocabulary.ResourceBeat(name="x/y", streams=1, probe_ok=True, probe_age_s=0.0)
    return vocabulary.Heartbeat(
        node=node,
        plugin=plugin,
        instance="i",
        seq=seq,
        interval_s=interval_s,
        resources=(resource,),
    )


async def take_turns(connected: bus.Bus, groups: Sequence[Sequence[tuple[str, str]]]) -> None:
    """Let the groups be silent in turn, for 1.8 s each."""
    voices = [Voice(connected, group) for group in groups]
    for voice in voices:
        await voice.send(0.5)
    turn = 0
    while True:
        for _ in range(4):
            await voices[turn].send(0.5)
            await asyncio.sleep(0.45)
        turn = 1 - turn


async def reconnect(port: int, node: str, plugin: str, *, wait_s: float) -> None:
    """Close the plugin's connection again and again, and reconnect 1.5 s later."""
    seq = 0
    options = {"verbose": False, "pedantic": False, "name": f"{plugin} {node}"}
    subject = f"muster.heartbeat.{vocabulary.node_token(node)}.{plugin}"
    await asyncio.sleep(wait_s)
    while True:
        seq += 1
        payload = codec.encode_heartbeat(heartbeat(node, plugin, seq, 5.0))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.closing(writer):
            writer.write(b"CONNECT %b\r\nPING\r\n" % orjson.dumps(options))
            await reader.readuntil(b"PONG\r\n")
            await asyncio.sleep(0.1)
            writer.write(b"PUB %b %d\r\n%b\r\nPING\r\n" % (subject.encode(), len(payload), payload))
            await reader.readuntil(b"PONG\r\n")
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.5)


@contextlib.asynccontextmanager
async def running(*loops: asyncio.Task[None]) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for task in loops:
            task.cancel()
        for result in await asyncio.gather(*loops, return_exceptions=True):
            assert isinstance(result, asyncio.CancelledError), result


class World:
    """A NATS server, health, honest nodes of which one is the victim, and a hostile node."""

    def __init__(self, directory: Path, honest: int) -> None:
        self.directory = directory
        self.nodes = [f"n{number:03}" for number in range(honest)]
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(asyncio.timeout(60))
        self.server = await self._stack.enter_async_context(nats.NatsServer(self.directory / "n"))
        file = self.directory / "health.json"
        file.write_bytes(orjson.dumps({"bus": {"url": self.server.url}, **SETTINGS}))
        log = self.directory / "health.log"
        self.health = fleet_parts.Service("muster_health", ("--config", str(file)), log)
        await self.health.start()
        self._stack.push_async_callback(self.health.end, signal.SIGKILL)
        self.published = await self._stack.enter_async_context(
            fleet_parts.following_by_node(self.server.url)
        )
        crowd = Voice(await self.connect("crowd"), [(node, "p") for node in self.nodes])
        await self._stack.enter_async_context(running(asyncio.create_task(crowd.send_always(5.0))))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def connect(self, name: str) -> bus.Bus:
        connected = bus.Bus(self.server.url, producer="plugins/p", name=name)
        return await self._stack.enter_async_context(connected)

    def alerts(self) -> list[AlertKind]:
        return [alert.kind for alert in self.published.firing(VICTIM)]

    async def alert_s(self, wait_s: float, timeout_s: float) -> float:
        """Run the victim for `wait_s` and end it; return the seconds until its alert."""
        async with bus.Bus(self.server.url, producer="plugins/p", name=f"p {VICTIM}") as victim:
            await victim.link.client()
            sending = Voice(victim, [(VICTIM, "p")])
            async with running(asyncio.create_task(sending.send_always(0.2))):
                await asyncio.sleep(wait_s)
                assert self.published.verdict(VICTIM) is Verdict.HEALTHY
        began = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.published.until(lambda: self.alerts() == [AlertKind.PLUGIN_DOWN])
        return time.monotonic() - began


def test_names_of_one_node_that_are_silent_in_turn_hold_nobody_up(tmp_path: Path) -> None:
    async def story() -> None:
        async with World(tmp_path, honest=20) as world:
            names = [(HOSTILE, f"x{number}") for number in range(15)]
            attack = take_turns(await world.connect("attack"), (names[:7], names[7:]))
            async with running(asyncio.create_task(attack)):
                seconds = await world.alert_s(2.5, 20.0)
                assert seconds < LIMIT_S
            assert AlertKind.STORM not in {
                alert.kind for _, alert in world.published.alerts(vocabulary.FLEET)
            }

    asyncio.run(story())


def test_names_of_one_node_that_reconnect_hold_nobody_up(tmp_path: Path) -> None:
    async def story() -> None:
        async with World(tmp_path, honest=199) as world, contextlib.AsyncExitStack() as stack:
            for number in range(9):
                loop = reconnect(world.server.port, HOSTILE, f"x{number}", wait_s=number * 0.19)
                await stack.enter_async_context(running(asyncio.create_task(loop)))
            seconds = await world.alert_s(2.5, 20.0)
            assert seconds < LIMIT_S
            assert AlertState.FIRING not in {
                alert.state for _, alert in world.published.alerts(vocabulary.FLEET)
            }

    asyncio.run(story())
