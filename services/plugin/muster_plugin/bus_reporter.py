"""Adapter: the bus, Kubernetes' probes and Prometheus: what the node does is told there.

All of it is imported and connected when everything is registered. The bus may stay away for ever.
"""

import asyncio
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import msgspec

import muster
from muster import lean, vocabulary
from muster.service import logs
from muster_plugin import node as node_door
from muster_plugin import preflight
from muster_plugin.config import settings
from muster_plugin.kubelet import resource_status, self_probe
from muster_plugin.publishing import heartbeats

if TYPE_CHECKING:
    from muster.nats import bus

_GOODBYE_S: Final = 0.5
_MISSED_BEATS_MAX: Final = 3
_HTTP: Final = ("http.server", "ssl", "urllib.request", "wsgiref", "wsgiref.simple_server")
"""What prometheus-client serves and pushes with; our probes do the serving."""


class Reporter:
    """Tells the bus, Kubernetes' probes and Prometheus what the node does."""

    def __init__(self, chosen: settings.Settings, node: node_door.Node) -> None:
        self._settings = chosen
        self._node = node
        self._who = heartbeats.Identity(
            node=node.name,
            plugin=node.plugin,
            instance="unconnected",
            boot=preflight.boot(),
            version=muster.__version__,
            config_hash=chosen.hash_at(node.name),
            interval_s=chosen.heartbeat.interval_s,
            started_at=time.monotonic(),
        )
        self._beat_at = self._who.started_at
        self._lag_s = 0.0
        self._sequence = 0
        self._is_draining = False

    def follow(self, config_hash: str) -> None:
        """Say from now on that this configuration is in force."""
        self._who = msgspec.structs.replace(self._who, config_hash=config_hash)

    async def report(self) -> None:
        """Connect to everything slow, and speak until cancelled.

        A goodbye is said only if it is over on purpose: a crash must look like one.
        """
        await self._node.lives.settle()
        lean.load("nats.aio.client", without=["_hashlib", "aiohttp", "importlib.metadata"])
        lean.load("prometheus_client", hollow=_HTTP)
        from muster import codec  # noqa: PLC0415  # 60 ms, after the registration
        from muster.nats import bus  # noqa: PLC0415  # 60 ms, after the registration
        from muster.service import probes  # noqa: PLC0415  # 60 ms, after the registration
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
                if self._node.over.is_set():
                    await self._goodbye(connected)

    async def _beat(self, connected: "bus.Bus") -> None:
        """Beat on the interval, and at once when a problem appears or goes."""
        clock = asyncio.get_running_loop().time
        interval_s = self._settings.heartbeat.interval_s
        due = clock() + heartbeats.first_beat_s(self._node.name, interval_s)
        while True:
            try:
                async with asyncio.timeout_at(due):
                    await self._node.problem_turned.wait()
                self._node.problem_turned.clear()
            except TimeoutError:
                # after a late beat the next is due at once, and punctual: that is no recovery
                self._lag_s = max(clock() - due, min(self._lag_s, interval_s) / 2)
                due = max(due + interval_s, clock())
            self._beat_at = clock()
            self._sequence += 1
            await connected.send_heartbeat(self._heartbeat(connected))

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
                    config_hash=self._who.config_hash,
                    resources=self._node.inventory.resources,
                )
            )
            self._node.teller.publish_to(connected.enqueue)
            self._tell_all(connected)

    async def _snapshots(self, connected: "bus.Bus") -> None:
        while True:
            await asyncio.sleep(self._settings.snapshot_period_s)
            if connected.link.is_connected:
                self._tell_all(connected)

    def _tell_all(self, connected: "bus.Bus") -> None:
        from muster import codec  # noqa: PLC0415  # loaded with the bus

        at = datetime.now(UTC)
        connected.enqueue(self._node.snapshot(at, bytes_max=codec.EVENT_BYTES_MAX))

    async def _goodbye(self, connected: "bus.Bus") -> None:
        self._is_draining = True
        connected.enqueue(
            vocabulary.PluginStopping(
                node=self._node.name,
                plugin=self._node.plugin,
                at=datetime.now(UTC),
                reason=self._node.stop_reason,
            )
        )
        if connected.link.is_connected and not await connected.flush(_GOODBYE_S):
            logs.logger().warning("goodbye_unheard")

    def _heartbeat(self, connected: "bus.Bus") -> vocabulary.Heartbeat:
        from muster import codec  # noqa: PLC0415  # loaded with the bus

        vitals = heartbeats.Vitals(
            seq=self._sequence,
            phase=self._phase,
            kubelet=self._node.lives.kubelet_socket,
            checked_at=self._node.checked_at,
            lag_s=self._lag_s,
            reconnects=max(0, connected.link.epoch - 1),
            problems=self._node.teller.standing,
        )
        now = time.monotonic()
        return heartbeats.heartbeat(
            self._who,
            vitals,
            self._node.states(),
            now=now,
            wall=time.time(),
            bytes_max=codec.HEARTBEAT_BYTES_MAX,
        )

    @property
    def _phase(self) -> vocabulary.Phase:
        if self._is_draining:
            return vocabulary.Phase.DRAINING
        has_served = self._node.lives.have_served
        return vocabulary.Phase.SERVING if has_served else vocabulary.Phase.STARTING

    def _not_ready(self) -> str | None:
        return resource_status.readiness(
            self._node.states(), now=time.monotonic(), probe_s=self_probe.PERIOD_S
        )

    def _stuck(self) -> str | None:
        age_s = self._beat_age_s()
        if age_s > _MISSED_BEATS_MAX * self._settings.heartbeat.interval_s:
            return f"the event loop is stuck: the last beat was {age_s:.1f} s ago"
        return self._node.stuck(time.monotonic())

    def _beat_age_s(self) -> float:
        return time.monotonic() - self._beat_at
