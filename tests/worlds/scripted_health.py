"""Door to a scripted run of health: plugins fail and mend, whatever becomes of who watches them.

Each plugin goes through the same script again and again, and takes the next step when the last one
was told. So what has to be told is known, however often health is killed or stopped meanwhile:
exactly the script, in order. The plugins are simulated here, on connections of their own; NATS and
health are real.
"""

import asyncio
import contextlib
import enum
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec
import orjson

from muster import codec, vocabulary
from muster.local import nats
from muster.nats import bus, connection, consumers, streams
from muster.vocabulary import AlertKind, AlertState, Health
from tests.worlds import fleet_parts

_BEAT_S: Final = 0.2
_PLUGIN: Final = "device-plugin"
_RESOURCE: Final = "muster.example/thing"
_SETTINGS: Final[Mapping[str, Mapping[str, object]]] = {
    "detection": {
        "interval_s": _BEAT_S,
        "suspicion_beats": 10,
        "restart_s": 0.2,
        "review_s": 1.0,
        "recover_s": 1.0,
        "hold_s": 0.1,
        "hold_max_s": 0.1,
        "flap_falls": 100,
        "patience_s": 0,
        "reconnect_s": 1.0,
        "storm_min": 1_000_000,
    },
    "bounds": {"alerts_per_minute": 100_000, "alerts_per_node_minute": 10_000, "update_s": 0.1},
}

Told = tuple[AlertKind, AlertState]


class Step(enum.Enum):
    """One step of the script, by the alert that it leads to."""

    BREAK = (AlertKind.DEVICE_UNHEALTHY, AlertState.FIRING)
    MEND = (AlertKind.DEVICE_UNHEALTHY, AlertState.RESOLVED)
    GO = (AlertKind.PLUGIN_DOWN, AlertState.FIRING)
    COME = (AlertKind.PLUGIN_DOWN, AlertState.RESOLVED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What was told beside what had to be: `lost` never came, `strange` came and should not have.

    `in_order` is whether each plugin's alerts came in the order of its script; `leaders` whether no
    leader told anything after the next one had.
    """

    alerts: int
    lost: int
    strange: int
    in_order: bool
    leaders_in_order: bool


class Plugin:
    """One plugin, as the bus sees it."""

    def __init__(self, url: str, node: str) -> None:
        self.node = node
        self._url = url
        self._seq = 0
        self._health = Health.HEALTHY
        self._life = contextlib.AsyncExitStack()

    async def come(self) -> None:
        """Be there, as a new process."""
        async with contextlib.AsyncExitStack() as life:
            name = f"{_PLUGIN} {self.node}"
            link = bus.Bus(self._url, producer=f"plugins/{_PLUGIN}", name=name)
            self._bus = await life.enter_async_context(link)
            await self._bus.link.client()
            subject = vocabulary.rpc_subject(self.node, _PLUGIN, "probe")
            await self._bus.link.subscribe(subject, self._answer)
            beating = asyncio.create_task(self._beat())
            life.push_async_callback(_end, beating)
            self._life = life.pop_all()

    async def go(self) -> None:
        """Be gone, without a word."""
        await self._life.aclose()

    async def take(self, step: Step) -> None:
        """Do what the script says."""
        match step:
            case Step.BREAK:
                await self._report(Health.UNHEALTHY)
            case Step.MEND:
                await self._report(Health.HEALTHY)
            case Step.GO:
                await self.go()
            case Step.COME:
                await self.come()

    async def _report(self, health: Health) -> None:
        device = vocabulary.Device(id="d0", resource=_RESOURCE, health=health, reason="a script")
        await self._bus.publish(
            vocabulary.InventoryReported(
                node=self.node, at=datetime.now(UTC), plugin=_PLUGIN, devices=(device,)
            )
        )

    def _heartbeat(self) -> vocabulary.Heartbeat:
        self._seq += 1
        return vocabulary.Heartbeat(
            node=self.node,
            plugin=_PLUGIN,
            instance=self._bus.instance,
            seq=self._seq,
            interval_s=_BEAT_S,
            resources=(
                vocabulary.ResourceBeat(name=_RESOURCE, streams=1, probe_ok=True, probe_age_s=0.0),
            ),
        )

    async def _answer(self, message: connection.Message) -> None:
        await message.respond(codec.encode_heartbeat(self._heartbeat()))

    async def _beat(self) -> None:
        while True:
            await self._bus.send_heartbeat(self._heartbeat())
            await asyncio.sleep(_BEAT_S)


@dataclass
class Ear:
    """All alerts, in the order of their stream."""

    heard: list[vocabulary.AlertChanged] = field(default_factory=list)
    came: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def listen(self, on: bus.Bus) -> None:
        """Hear for ever."""
        since = datetime(2000, 1, 1, tzinfo=UTC)
        async for event in consumers.follow(
            on.link, streams.ALERTS, filters=["muster.alert.>"], since=since
        ):
            if isinstance(event.data, vocabulary.AlertChanged):
                async with self.came:
                    self.heard.append(event.data)
                    self.came.notify_all()

    async def until(self, enough: Callable[[], bool]) -> None:
        """Return once what was heard is enough."""
        async with self.came:
            await self.came.wait_for(enough)

    def of(self, node: str) -> list[Told]:
        """Return what was told of one node."""
        return [(alert.kind, alert.state) for alert in self.heard if alert.node == node]


class Watcher(fleet_parts.Service):
    """One health service."""

    async def leads(self) -> bool:
        """Ask whether it leads."""
        try:
            body = await self.get("/state")
        except OSError:
            return False
        return bool(body) and msgspec.json.decode(body)["service"]["leads"] is not None


class Run:
    """One scripted run; `expected` is what had to be told so far, by node."""

    def __init__(self, directory: Path, url: str, ear: Ear, *, nodes: int) -> None:
        self.expected: dict[str, list[Told]] = {}
        self._directory = directory
        self._url = url
        self._ear = ear
        self._plugins = [Plugin(url, f"node-{number}") for number in range(nodes)]
        self._over = asyncio.Event()
        self._playing: list[asyncio.Task[None]] = []

    def watcher(self, name: str, *, ttl_s: int = 1) -> Watcher:
        """Return a health service, to be started."""
        leading = {"ttl_s": ttl_s, "renew_s": 0.25 * ttl_s, "margin_s": 0.25 * ttl_s}
        told = {"bus": {"url": self._url}, "leading": leading, **_SETTINGS}
        file = self._directory / f"{name}.json"
        file.write_bytes(orjson.dumps(told))
        return Watcher("muster_health", ("--config", str(file)), self._directory / f"{name}.log")

    async def begin(self) -> None:
        """Let the plugins come, and begin the script."""
        await asyncio.gather(*(plugin.come() for plugin in self._plugins))
        self._playing = [asyncio.create_task(self._play(plugin)) for plugin in self._plugins]

    async def goes_on(self, alerts: int) -> None:
        """Return when so many more alerts have been told."""
        enough = len(self._ear.heard) + alerts
        await self._ear.until(lambda: len(self._ear.heard) >= enough)

    async def end(self, *, timeout_s: float) -> Result:
        """Let every plugin come to the end of its script, and say what was told."""
        self._over.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*self._playing)
                # what is told once more would come now
                await asyncio.sleep(1.0)
        return self._result()

    async def close(self) -> None:
        """End what runs."""
        for task in self._playing:
            task.cancel()
        await asyncio.gather(*self._playing, return_exceptions=True)
        await asyncio.gather(*(plugin.go() for plugin in self._plugins))

    async def _play(self, plugin: Plugin) -> None:
        expected = self.expected.setdefault(plugin.node, [])
        while not self._over.is_set():
            for step in Step:
                expected.append(step.value)
                await plugin.take(step)
                await self._ear.until(lambda: len(self._ear.of(plugin.node)) >= len(expected))

    def _result(self) -> Result:
        told = {node: self._ear.of(node) for node in self.expected}
        missing = [Counter(self.expected[node]) - Counter(told[node]) for node in told]
        strange = [Counter(told[node]) - Counter(self.expected[node]) for node in told]
        revisions = [alert.leader for alert in self._ear.heard]
        return Result(
            alerts=len(self._ear.heard),
            lost=sum(map(Counter.total, missing)),
            strange=sum(map(Counter.total, strange)),
            in_order=told == self.expected,
            leaders_in_order=revisions == sorted(revisions),
        )


@contextlib.asynccontextmanager
async def run(directory: Path, *, nodes: int) -> AsyncIterator[Run]:
    """Run NATS and an ear; plugins and health services come when they are told to."""
    async with (
        nats.NatsServer(directory / "nats") as server,
        bus.Bus(server.url, producer="bench/scripted", name="ear", owner=True) as on,
    ):
        ear = Ear()
        listening = asyncio.create_task(ear.listen(on))
        made = Run(directory, server.url, ear, nodes=nodes)
        try:
            yield made
        finally:
            await made.close()
            await _end(listening)


async def crashed(
    directory: Path, *, points_s: Sequence[float], nodes: int, timeout_s: float
) -> Result:
    """Kill health at each of these times after its start, and start it again.

    Every other time counts from an alert that it told, and is a twentieth: between alerts it
    remembers, tells and forgets, and most of what can go wrong lies there.
    """
    async with run(directory, nodes=nodes) as script:
        watcher = script.watcher("health")
        await script.begin()
        try:
            for number, point_s in enumerate(points_s):
                await watcher.launch()
                if number % 2:
                    await script.goes_on(1)
                await asyncio.sleep(point_s / 20 if number % 2 else point_s)
                await watcher.end(signal.SIGKILL)
            await watcher.launch()
            return await script.end(timeout_s=timeout_s)
        finally:
            await watcher.end(signal.SIGKILL)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
