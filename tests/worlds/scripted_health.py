"""A scripted run of health: simulated plugins fail and recover, even while health is killed.

Each plugin repeats the same script, and takes the next step when the alert for the previous one was
published. Therefore the expected alerts are known, however often health is killed or stopped:
exactly those of the script, in order. Each plugin has its own connection; NATS and health are real.
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

_INTERVAL_S: Final = 0.2
_PLUGIN: Final = "device-plugin"
_RESOURCE: Final = "muster.example/thing"
_SETTINGS: Final[Mapping[str, Mapping[str, object]]] = {
    "detection": {
        "interval_s": _INTERVAL_S,
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

AlertStep = tuple[AlertKind, AlertState]


class Step(enum.Enum):
    """The steps of the script; the value of each is the alert that it causes."""

    BREAK_DEVICE = (AlertKind.DEVICE_UNHEALTHY, AlertState.FIRING)
    REPAIR_DEVICE = (AlertKind.DEVICE_UNHEALTHY, AlertState.RESOLVED)
    STOP = (AlertKind.PLUGIN_DOWN, AlertState.FIRING)
    START = (AlertKind.PLUGIN_DOWN, AlertState.RESOLVED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The published alerts, compared with the script.

    `lost` alerts were not published, `unexpected` ones are not in the script. `in_order` is whether
    each plugin's alerts equal its script, in order; `leaders_in_order` is whether no leader
    published an alert after its successor had published one.
    """

    alerts: int
    lost: int
    unexpected: int
    in_order: bool
    leaders_in_order: bool


class Plugin:
    """A simulated plugin, with its own connection to the bus."""

    def __init__(self, url: str, node: str) -> None:
        self.node = node
        self._url = url
        self._seq = 0
        self._health = Health.HEALTHY
        self._running = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Connect as a new instance, and start to send heartbeats."""
        async with contextlib.AsyncExitStack() as stack:
            name = f"{_PLUGIN} {self.node}"
            connected = bus.Bus(self._url, producer=f"plugins/{_PLUGIN}", name=name)
            self._bus = await stack.enter_async_context(connected)
            await self._bus.link.client()
            subject = vocabulary.rpc_subject(self.node, _PLUGIN, "probe")
            await self._bus.link.subscribe(subject, self._answer)
            sending = asyncio.create_task(self._send_heartbeats())
            stack.push_async_callback(_end, sending)
            self._running = stack.pop_all()

    async def stop(self) -> None:
        """Disconnect without an announcement."""
        await self._running.aclose()

    async def perform(self, step: Step) -> None:
        """Take one step of the script."""
        match step:
            case Step.BREAK_DEVICE:
                await self._report(Health.UNHEALTHY)
            case Step.REPAIR_DEVICE:
                await self._report(Health.HEALTHY)
            case Step.STOP:
                await self.stop()
            case Step.START:
                await self.start()

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
            interval_s=_INTERVAL_S,
            resources=(
                vocabulary.ResourceBeat(name=_RESOURCE, streams=1, probe_ok=True, probe_age_s=0.0),
            ),
        )

    async def _answer(self, message: connection.Message) -> None:
        await message.respond(codec.encode_heartbeat(self._heartbeat()))

    async def _send_heartbeats(self) -> None:
        while True:
            await self._bus.send_heartbeat(self._heartbeat())
            await asyncio.sleep(_INTERVAL_S)


@dataclass
class AlertLog:
    """All alerts, in the order of their stream."""

    alerts: list[vocabulary.AlertChanged] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def follow(self, connected: bus.Bus) -> None:
        """Collect alerts until cancelled."""
        since = datetime(2000, 1, 1, tzinfo=UTC)
        async for event in consumers.follow(
            connected.link, streams.ALERTS, filters=["muster.alert.>"], since=since
        ):
            if isinstance(event.data, vocabulary.AlertChanged):
                async with self.changed:
                    self.alerts.append(event.data)
                    self.changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the alerts fulfil a condition."""
        async with self.changed:
            await self.changed.wait_for(condition)

    def of(self, node: str) -> list[AlertStep]:
        """Return what was published about one node."""
        return [(alert.kind, alert.state) for alert in self.alerts if alert.node == node]


class HealthService(fleet_parts.Service):
    """A process of the health service."""

    async def is_leader(self) -> bool:
        """Return whether it is the leader."""
        try:
            body = await self.get("/state")
        except OSError:
            return False
        return bool(body) and msgspec.json.decode(body)["service"]["leads"] is not None


class Run:
    """A scripted run; `expected` are the alerts that should be published so far, by node."""

    def __init__(self, directory: Path, url: str, log: AlertLog, *, nodes: int) -> None:
        self.expected: dict[str, list[AlertStep]] = {}
        self._directory = directory
        self._url = url
        self._log = log
        self._plugins = [Plugin(url, f"node-{number}") for number in range(nodes)]
        self._last = Plugin(url, "node-last")
        self._over = asyncio.Event()
        self._playing: list[asyncio.Task[None]] = []

    def health(self, name: str, *, ttl_s: int = 1) -> HealthService:
        """Return a health service that is not started yet."""
        leading = {"ttl_s": ttl_s, "renew_s": 0.25 * ttl_s, "margin_s": 0.25 * ttl_s}
        settings = {"bus": {"url": self._url}, "leading": leading, **_SETTINGS}
        file = self._directory / f"{name}.json"
        file.write_bytes(orjson.dumps(settings))
        log = self._directory / f"{name}.log"
        return HealthService("muster_health", ("--config", str(file)), log)

    async def begin(self) -> None:
        """Start the plugins, and begin the script."""
        await asyncio.gather(*(plugin.start() for plugin in self._plugins))
        self._playing = [asyncio.create_task(self._play(plugin)) for plugin in self._plugins]

    async def wait_for_alerts(self, count: int) -> None:
        """Wait until `count` more alerts have been published."""
        total = len(self._log.alerts) + count
        await self._log.until(lambda: len(self._log.alerts) >= total)

    async def end(self, *, timeout_s: float) -> Result:
        """Let every plugin finish its script, and return the result."""
        self._over.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*self._playing)
                # a repeated alert would be published before those of a script that begins now
                await self._last.start()
                await self._play_once(self._last, [])
        return self._result()

    async def close(self) -> None:
        """Stop the scripts and the plugins."""
        for task in self._playing:
            task.cancel()
        await asyncio.gather(*self._playing, return_exceptions=True)
        await asyncio.gather(*(plugin.stop() for plugin in (*self._plugins, self._last)))

    async def _play(self, plugin: Plugin) -> None:
        expected = self.expected.setdefault(plugin.node, [])
        while not self._over.is_set():
            await self._play_once(plugin, expected)

    async def _play_once(self, plugin: Plugin, expected: list[AlertStep]) -> None:
        for step in Step:
            expected.append(step.value)
            await plugin.perform(step)
            await self._log.until(lambda: len(self._log.of(plugin.node)) >= len(expected))

    def _result(self) -> Result:
        published = {node: self._log.of(node) for node in self.expected}
        missing = [Counter(self.expected[node]) - Counter(published[node]) for node in published]
        unexpected = [Counter(published[node]) - Counter(self.expected[node]) for node in published]
        terms = [alert.leader for alert in self._log.alerts]
        return Result(
            alerts=sum(map(len, published.values())),
            lost=sum(map(Counter.total, missing)),
            unexpected=sum(map(Counter.total, unexpected)),
            in_order=published == self.expected,
            leaders_in_order=terms == sorted(terms),
        )


@contextlib.asynccontextmanager
async def run(directory: Path, *, nodes: int) -> AsyncIterator[Run]:
    """Run NATS and collect alerts; the caller starts plugins and health services."""
    async with (
        nats.NatsServer(directory / "nats") as server,
        bus.Bus(server.url, producer="bench/scripted", name="alert log", owner=True) as connected,
    ):
        log = AlertLog()
        following = asyncio.create_task(log.follow(connected))
        script = Run(directory, server.url, log, nodes=nodes)
        try:
            yield script
        finally:
            await script.close()
            await _end(following)


async def run_with_crashes(
    directory: Path, *, points_s: Sequence[float], nodes: int, timeout_s: float
) -> Result:
    """Kill health at each of these times after its start, and start it again.

    Every second time is divided by 20 and counts from the first alert after the start: around an
    alert, health saves, publishes and deletes, so most faults are expected there.
    """
    async with run(directory, nodes=nodes) as script:
        health = script.health("health")
        await script.begin()
        try:
            for number, point_s in enumerate(points_s):
                await health.launch()
                if number % 2:
                    await script.wait_for_alerts(1)
                await asyncio.sleep(point_s / 20 if number % 2 else point_s)
                await health.end(signal.SIGKILL)
            await health.launch()
            return await script.end(timeout_s=timeout_s)
        finally:
            await health.end(signal.SIGKILL)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
