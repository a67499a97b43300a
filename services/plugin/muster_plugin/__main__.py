"""Door to the process: the plugin from its settings to its goodbye.

What makes devices usable comes first: sockets, then Register. What makes them visible, the bus and
the probes, is imported and connected when that is done. The bus may stay away for ever.
"""

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

import muster
from muster import entry, logs, runtime, vocabulary
from muster_plugin import beats, config, directory, lean, signals
from muster_plugin import node as node_door

if TYPE_CHECKING:
    from muster import bus

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_GOODBYE_S: Final = 0.5
_MISSED_BEATS_MAX: Final = 3
_HTTP: Final = ("http.server", "urllib.request", "wsgiref", "wsgiref.simple_server")
"""What prometheus-client serves and pushes with; our probes do the serving."""


def main() -> int:
    """Run the plugin; return the exit code."""
    return entry.main("plugin", config.Settings, serve)


async def serve(settings: config.Settings) -> None:
    """Serve the node's devices until SIGTERM. Raises CannotStart."""
    sockets = Path(settings.kubelet.directory) / config.SOCKET_DIRECTORY
    name = _node_name(settings.node)
    _check(settings, sockets)
    logs.configure("plugin", level=settings.log.level, node=name)
    for stale in directory.remove_stale(sockets):
        logs.logger().info("stale_socket_removed", socket=stale)
    inboxes: dict[str, asyncio.Queue[runtime.Delivery[signals.Signal]]] = {
        resource: asyncio.Queue(runtime.INBOX_MAX) for resource in settings.resource_names
    }

    def tell(resource: str) -> Callable[[signals.Signal], None]:
        return lambda signal: inboxes[resource].put_nowait(runtime.Delivery(signal))

    node = node_door.Node(settings, name, sockets, tell=tell)
    try:
        await runtime.run(
            *(
                runtime.drive(life, inboxes[life.resource], life.act)
                for life in node.lives.values()
            ),
            *(life.fail_if_broken() for life in node.lives.values()),
            node.watch_sockets(),
            *(node.watch(kind, source) for kind, source in node.sources.items()),
            *(life.probe_for_ever() for life in node.lives.values()),
            Reporter(settings, node).report(),
        )
    finally:
        await node.close()


class Reporter:
    """Tells the bus, Kubernetes' probes and Prometheus what the node does."""

    def __init__(self, settings: config.Settings, node: node_door.Node) -> None:
        self._settings = settings
        self._node = node
        self._who = beats.Identity(
            node=node.name,
            plugin=node.plugin,
            instance="unconnected",
            boot=_boot(),
            version=muster.__version__,
            config_hash=settings.hash,
            interval_s=settings.heartbeat.interval_s,
            started_at=time.monotonic(),
        )
        self._beat_at = self._who.started_at
        self._lag_s = 0.0
        self._sequence = 0
        self._is_draining = False

    async def report(self) -> None:
        """Connect to everything slow, and speak until cancelled; then say goodbye."""
        await self._node.settle()
        lean.load("nats.aio.client", without=["aiohttp", "importlib.metadata"])
        lean.load("prometheus_client", hollow=_HTTP)
        from muster import bus, codec, probes  # noqa: PLC0415  # 60 ms, after the registration
        from muster_plugin import metrics  # noqa: PLC0415  # the same

        metrics.register(self._node, self._beat_age_s)
        http, who = self._settings.http, self._who
        async with (
            bus.Bus(
                self._settings.bus.url,
                producer=f"plugins/{who.plugin}",
                name=f"{who.plugin} {who.node}",
                boot=who.boot,
            ) as connected,
            probes.serve(
                http.host, http.port, ready=self._not_ready, healthy=self._stuck
            ) as address,
        ):
            self._who = msgspec.structs.replace(who, instance=connected.instance)
            logs.logger().info("listening", http=address)
            await connected.answer(
                vocabulary.rpc_subject(who.node, who.plugin, "probe"),
                lambda: codec.encode_heartbeat(self._heartbeat(connected)),
            )
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._beat(connected))
                    tasks.create_task(self._resync(connected))
                    tasks.create_task(self._snapshots(connected))
            finally:
                await self._goodbye(connected)

    async def _beat(self, connected: "bus.Bus") -> None:
        """Beat on the interval, and at once when a problem appears or goes."""
        clock = asyncio.get_running_loop().time
        interval_s = self._settings.heartbeat.interval_s
        due = clock() + beats.first_beat_s(self._node.name, interval_s)
        while True:
            try:
                async with asyncio.timeout_at(due):
                    await self._node.problem_turned.wait()
                self._node.problem_turned.clear()
            except TimeoutError:
                self._lag_s = clock() - due
                due = max(due + interval_s, clock())
            self._beat_at = clock()
            self._sequence += 1
            await connected.beat(self._heartbeat(connected))

    async def _resync(self, connected: "bus.Bus") -> None:
        """After every (re)connect, tell the whole story again; changes alone would drift."""
        async for is_connected in connected.link.changes():
            if not is_connected:
                continue
            connected.enqueue(
                vocabulary.PluginStarted(
                    node=self._node.name,
                    plugin=self._node.plugin,
                    at=datetime.now(UTC),
                    version=muster.__version__,
                    instance=connected.instance,
                    config_hash=self._settings.hash,
                    resources=self._settings.resource_names,
                )
            )
            self._node.publish_to(connected.enqueue)
            connected.enqueue(self._node.inventory.snapshot(datetime.now(UTC)))

    async def _snapshots(self, connected: "bus.Bus") -> None:
        while True:
            await asyncio.sleep(self._settings.snapshot_period_s)
            if connected.link.is_connected:
                connected.enqueue(self._node.inventory.snapshot(datetime.now(UTC)))

    async def _goodbye(self, connected: "bus.Bus") -> None:
        self._is_draining = True
        connected.enqueue(
            vocabulary.PluginStopping(
                node=self._node.name,
                plugin=self._node.plugin,
                at=datetime.now(UTC),
                reason=vocabulary.StopReason.SIGNAL,
            )
        )
        if connected.link.is_connected and not await connected.flush(_GOODBYE_S):
            logs.logger().warning("goodbye_unheard")

    def _heartbeat(self, connected: "bus.Bus") -> vocabulary.Heartbeat:
        vitals = beats.Vitals(
            seq=self._sequence,
            phase=self._phase,
            kubelet=self._node.kubelet,
            checked_at=self._node.checked_at,
            lag_s=self._lag_s,
            reconnects=max(0, connected.link.epoch - 1),
        )
        now = time.monotonic()
        return beats.heartbeat(self._who, vitals, self._node.states(), now=now, wall=time.time())

    @property
    def _phase(self) -> vocabulary.Phase:
        if self._is_draining:
            return vocabulary.Phase.DRAINING
        has_served = self._node.has_served
        return vocabulary.Phase.SERVING if has_served else vocabulary.Phase.STARTING

    def _not_ready(self) -> str | None:
        return beats.readiness(self._node.states())

    def _stuck(self) -> str | None:
        age_s = self._beat_age_s()
        if age_s <= _MISSED_BEATS_MAX * self._settings.heartbeat.interval_s:
            return None
        return f"the event loop is stuck: the last beat was {age_s:.1f} s ago"

    def _beat_age_s(self) -> float:
        return time.monotonic() - self._beat_at


def _node_name(told: str) -> str:
    source = "settings" if told else "NODE_NAME"
    name = told or os.environ.get("NODE_NAME", "")
    if not name:
        source, name = "the host's name", socket.gethostname().lower()
    try:
        return msgspec.convert(name, vocabulary.NodeName)
    except msgspec.ValidationError:
        raise entry.CannotStart(
            f"node: {name!r} (from {source}) is not a Kubernetes node name; "
            "give `node` in the settings or NODE_NAME in the environment"
        ) from None


def _check(settings: config.Settings, sockets: Path) -> None:
    """Find out now what would end us after the registration. Raises CannotStart."""
    problem = directory.problem(sockets)
    if problem:
        raise entry.CannotStart(f"kubelet.directory: {problem}")
    script = settings.simulated_gpus and settings.simulated_gpus.faults
    if script and not Path(script).parent.is_dir():
        raise entry.CannotStart(f"simulated_gpus.faults: {Path(script).parent}: no such directory")
    http = settings.http
    family = socket.AF_INET6 if ":" in http.host else socket.AF_INET
    try:
        socket.create_server((http.host, http.port), family=family).close()
    except OSError as error:
        told = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise entry.CannotStart(f"http: {http.host}:{http.port}: {told}") from None


def _boot() -> str:
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_text("ascii").strip()
    return ""


if __name__ == "__main__":
    sys.exit(main())
