"""Adapter for a node with GPUs: runs the plugin, a kubelet stand-in, NATS and the fake NVML."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec
import orjson

from muster import vocabulary
from muster.local import kubelet as stand_in
from muster.local import nats
from muster.nats import bus, consumers, streams
from tests.worlds.nvml import fake, scenes

GPU: Final = "nvidia.com/gpu"
NAME: Final = "n1.example"
BEAT_S: Final = 0.2
UUIDS: Final = tuple(device.uuid for device in scenes.h100x8().gpus)
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

Kind = TypeVar("Kind", bound=vocabulary.Event)
Item = TypeVar("Item")


class Heard(Generic[Item]):
    """A list of received items, on which tasks can wait for more."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._came = asyncio.Event()

    def add(self, item: Item) -> None:
        self.items.append(item)
        self._came.set()

    async def first(self, is_it: Callable[[Item], bool], *, after: int = 0) -> Item:
        """Wait for a matching item, not among the first `after` ones; return it."""
        while True:
            for item in self.items[after:]:
                if is_it(item):
                    return item
            after = len(self.items)
            self._came.clear()
            await self._came.wait()


class Plugin:
    """The plugin as a process, with its log."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log: Heard[dict[str, Any]] = Heard()

    async def read(self) -> None:
        """Read the log to its end."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            # pytest shows it if the test fails
            sys.stdout.write(line.decode())
            self.log.add(orjson.loads(line))

    async def logged(self, event: str, *, after: int = 0) -> dict[str, Any]:
        """Wait for an event in the log; return its line."""
        return await self.log.first(lambda line: line["event"] == event, after=after)

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End the process by a signal; return its exit code."""
        self.process.send_signal(number)
        return await self.process.wait()


class Node:
    """A node with fake GPUs and a kubelet, and the events and heartbeats received from it."""

    def __init__(self, directory: Path, kubelet: stand_in.Kubelet, url: str) -> None:
        self.directory = directory
        self.kubelet = kubelet
        self.gpus = fake.Fake(directory / "nvml")
        self.events: Heard[vocabulary.Event] = Heard()
        self.beats: Heard[vocabulary.Heartbeat] = Heard()
        self._url = url

    def configure(self, gpus: dict[str, Any] | None = None, **more: object) -> Path:
        """Write the plugin's settings, by default with polls every 0.1 s and two for a recovery."""
        health = {"poll_s": 0.1, "good": 2, "cooldown_s": 0} | (gpus or {}).get("health", {})
        settings = {
            "node": NAME,
            "bus": {"url": self._url},
            "kubelet": {"directory": str(self.directory)},
            "heartbeat": {"interval_s": BEAT_S},
            "gpus": {"library": str(fake.built()), **(gpus or {}), "health": health},
        }
        file = self.directory / "plugin.json"
        fresh = file.with_suffix(".new")
        fresh.write_bytes(orjson.dumps(settings | more))
        return fresh.replace(file)

    @contextlib.asynccontextmanager
    async def plugin(self, config: Path, *arguments: str, **env: str) -> AsyncIterator[Plugin]:
        """Run the plugin; yield it; fail if it misused NVML or wrote to standard error."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "muster_plugin", "--config", str(config), *arguments),
            stdout=pipe,
            stderr=pipe,
            env=os.environ | self.gpus.environment() | env,
        )
        assert process.stderr is not None
        plugin = Plugin(process)
        reading = asyncio.ensure_future(plugin.read())
        complaints = asyncio.ensure_future(process.stderr.read())
        try:
            yield plugin
            if process.returncode is None:
                assert await plugin.end() == 0
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            await reading
        assert await complaints == b""
        assert self.gpus.misuses() == {}

    async def offers(self, resource: str, **healths: int) -> dict[str, str]:
        """Wait until the kubelet's list has these counts of devices by health; return the list."""

        def counted(devices: dict[str, str]) -> dict[str, int]:
            return {word: [*devices.values()].count(word) for word in {*devices.values()}}

        wanted = {word.capitalize(): count for word, count in healths.items() if count}
        state = await self.kubelet.until(
            lambda state: (
                resource in state.resources and counted(state.resources[resource].devices) == wanted
            )
        )
        return state.resources[resource].devices

    async def unhealthy(self, resource: str, *ids: str) -> None:
        """Wait until exactly these devices in the kubelet's list are Unhealthy."""
        await self.kubelet.until(
            lambda state: resource in state.resources and self.bad(resource) == {*ids}
        )

    def bad(self, resource: str) -> set[str]:
        """Return the ids of the Unhealthy devices in the kubelet's list."""
        devices = self.kubelet.state().resources[resource].devices
        return {name for name, health in devices.items() if health == "Unhealthy"}

    async def event(self, kind: type[Kind], *, after: int = 0, **fields: object) -> Kind:
        """Wait for an event of this kind with these fields; return it."""

        def is_it(event: vocabulary.Event) -> bool:
            return isinstance(event, kind) and all(
                getattr(event, name) == value for name, value in fields.items()
            )

        result = await self.events.first(is_it, after=after)
        assert isinstance(result, kind)
        return result

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Return every received event of a kind."""
        return [event for event in self.events.items if isinstance(event, kind)]

    async def beat(self, is_it: Callable[[vocabulary.Heartbeat], bool]) -> vocabulary.Heartbeat:
        """Wait for a matching heartbeat that is received after this call; return it."""
        return await self.beats.first(is_it, after=len(self.beats.items))


@contextlib.asynccontextmanager
async def node(scene: scenes.Scene | None = None) -> AsyncIterator[Node]:
    """Run a node, and yield it; without a scene no driver is loaded."""
    root = Path(tempfile.mkdtemp(prefix="mu-"))
    try:
        async with (
            nats.NatsServer(root / "nats") as server,
            bus.Bus(server.url, producer="tests/node", name="node", owner=True) as listener,
            stand_in.Kubelet(directory=root, node=NAME) as kubelet,
        ):
            await listener.link.client()
            made = Node(root, kubelet, server.url)
            if scene is not None:
                made.gpus.write(scene)
            following = asyncio.ensure_future(_follow(listener, made.events))
            await listener.heartbeats(_adding(made.beats))
            try:
                yield made
            finally:
                following.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await following
    finally:
        shutil.rmtree(root)


def run(story: Callable[[], Awaitable[None]], *, limit_s: float = 100) -> None:
    """Run `story` in a new event loop, for at most `limit_s` seconds."""

    async def limited() -> None:
        async with asyncio.timeout(limit_s):
            await story()

    asyncio.run(limited())


def timeless(event: Kind) -> Kind:
    """Return an event with its time replaced by the epoch."""
    return msgspec.structs.replace(event, at=EPOCH)


async def _follow(listener: bus.Bus, heard: Heard[vocabulary.Event]) -> None:
    since = datetime.now(UTC)

    async def follow(stream: streams.Stream) -> None:
        async for event in consumers.follow(
            listener.link, stream, filters=stream.subjects, since=since
        ):
            heard.add(event.data)

    async with asyncio.TaskGroup() as tasks:
        for stream in (streams.EVENTS, streams.INVENTORY):
            tasks.create_task(follow(stream))


def _adding(
    beats: Heard[vocabulary.Heartbeat],
) -> Callable[[vocabulary.Heartbeat], Awaitable[None]]:
    async def receive(beat: vocabulary.Heartbeat) -> None:
        beats.add(beat)

    return receive
