"""Adapter: reports the node's state to the bus, to Kubernetes' probes and to Prometheus.

This module is imported after the registration (see `lean`). The bus may never become reachable.
"""

import asyncio
import contextlib
import hashlib
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

import muster
from muster import codec, vocabulary
from muster.nats import bus
from muster.service import logs, probes
from muster_plugin import metrics
from muster_plugin import node as node_wiring
from muster_plugin.config import settings
from muster_plugin.kubelet import client, registration_model

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_STOP_FLUSH_S: Final = 0.5
_HEARTBEATS_MISSED_MAX: Final = 3
_TEXTS_MAX: Final = (300, 100, 30, 10)
"""Texts are cut to these lengths, one after the other, until the heartbeat fits."""


class BusReporter:
    """Reports the node's state to the bus, to Kubernetes' probes and to Prometheus."""

    def __init__(self, chosen: settings.Settings, node: node_wiring.Node) -> None:
        self._settings = chosen
        self._node = node
        self._boot = _boot()
        self._heartbeat_at = node.started_at
        self._lag_s = 0.0
        self._sequence = 0
        self._is_draining = False

    async def run(self) -> None:
        """Connect, and report until cancelled.

        `plugin.stopping` is published only when the plugin is stopped on purpose, not after a
        crash.
        """
        metrics.register(self._node, self._heartbeat_age_s)
        http, node = self._settings.http, self._node
        async with probes.serve(
            http.host, http.port, ready=self._not_ready, healthy=self._stuck
        ) as address:
            logs.logger().info("listening", http=address)
            while True:
                await self._report()
                node.left_bus.set()
                await node.taken_back.wait()
                node.left_bus.clear()

    async def _report(self) -> None:
        """Connect and report until the resources are handed over to a successor."""
        node = self._node
        self._is_draining = False
        # after a handover that failed, the last heartbeat may be long ago
        self._heartbeat_at = time.monotonic()
        async with bus.Bus(
            self._settings.bus.url,
            producer=f"plugins/{node.plugin}",
            name=f"{node.plugin} {node.name}",
            boot=self._boot,
        ) as connected:
            await connected.reply(
                vocabulary.rpc_subject(node.name, node.plugin, "probe"),
                lambda: codec.encode_heartbeat(self._heartbeat(connected)),
            )
            try:
                async with asyncio.TaskGroup() as tasks:
                    reporting = [
                        tasks.create_task(self._send_heartbeats(connected)),
                        tasks.create_task(self._resync(connected)),
                        tasks.create_task(self._publish_snapshots(connected)),
                    ]
                    await node.handed_over.wait()
                    for task in reporting:
                        task.cancel()
            finally:
                # from now on the successor reports
                node.event_log.publish_to(lambda _: None)
                if node.stopping.is_set() or node.handed_over.is_set():
                    await self._publish_stopping(connected)

    async def _send_heartbeats(self, connected: bus.Bus) -> None:
        """Send heartbeats on the interval, and at once when a problem begins or ends."""
        clock = asyncio.get_running_loop().time
        interval_s = self._settings.heartbeat.interval_s
        due = clock() + first_heartbeat_s(self._node.name, interval_s)
        while True:
            try:
                async with asyncio.timeout_at(due):
                    await self._node.heartbeat_due.wait()
                self._node.heartbeat_due.clear()
            except TimeoutError:
                # if a heartbeat was late, the next being punctual would not prove a recovery: it is
                # due at once
                self._lag_s = max(clock() - due, min(self._lag_s, interval_s) / 2)
                due = max(due + interval_s, clock())
            self._heartbeat_at = clock()
            self._sequence += 1
            await connected.send_heartbeat(self._heartbeat(connected))

    async def _resync(self, connected: bus.Bus) -> None:
        """Publish everything again after each (re)connect; changes alone are not reliable."""
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
                    config_hash=self._node.config_hash,
                    resources=self._node.inventory.resources,
                )
            )
            self._node.event_log.publish_to(connected.enqueue)
            self._publish_snapshot(connected)

    async def _publish_snapshots(self, connected: bus.Bus) -> None:
        while True:
            await asyncio.sleep(self._settings.snapshot_period_s)
            if connected.link.is_connected:
                self._publish_snapshot(connected)

    def _publish_snapshot(self, connected: bus.Bus) -> None:
        connected.enqueue(self._node.snapshot(datetime.now(UTC)))

    async def _publish_stopping(self, connected: bus.Bus) -> None:
        self._is_draining = True
        connected.enqueue(
            vocabulary.PluginStopping(
                node=self._node.name,
                plugin=self._node.plugin,
                at=datetime.now(UTC),
                reason=(
                    vocabulary.StopReason.UPGRADE
                    if self._node.handed_over.is_set()
                    else self._node.stop_reason
                ),
            )
        )
        if connected.link.is_connected and not await connected.flush(_STOP_FLUSH_S):
            logs.logger().warning("stop_announcement_not_delivered")

    def _heartbeat(self, connected: bus.Bus) -> vocabulary.Heartbeat:
        node, now = self._node, time.monotonic()
        heartbeat = vocabulary.Heartbeat(
            node=node.name,
            plugin=node.plugin,
            instance=connected.instance,
            boot=self._boot,
            version=muster.__version__,
            config_hash=node.config_hash,
            seq=self._sequence,
            interval_s=self._settings.heartbeat.interval_s,
            uptime_s=registration_model.age_s(node.started_at, now),
            wall=round(time.time(), registration_model.DIGITS),
            phase=self._phase,
            kubelet_socket=node.resource_plugins.kubelet_socket,
            resources=tuple(node.statuses()),
            checkers={k: registration_model.age_s(at, now) for k, at in node.checked_at.items()},
            loop_lag_ms=round(self._lag_s * 1000, registration_model.DIGITS),
            reconnects=max(0, connected.link.epoch - 1),
            problems=node.event_log.current_problems,
        )
        return fit_heartbeat(heartbeat, codec.HEARTBEAT_BYTES_MAX)

    @property
    def _phase(self) -> vocabulary.Phase:
        if self._is_draining:
            return vocabulary.Phase.DRAINING
        has_served = self._node.resource_plugins.all_registered
        return vocabulary.Phase.SERVING if has_served else vocabulary.Phase.STARTING

    def _not_ready(self) -> str | None:
        if self._node.handed_over.is_set():
            return "handed over to another pod of this plugin"
        return registration_model.readiness(self._node.statuses(), probe_s=client.PROBE_PERIOD_S)

    def _stuck(self) -> str | None:
        age_s = 0.0 if self._node.handed_over.is_set() else self._heartbeat_age_s()
        if age_s > _HEARTBEATS_MISSED_MAX * self._settings.heartbeat.interval_s:
            return f"the event loop is stuck: the last heartbeat was {age_s:.1f} s ago"
        return self._node.stuck(time.monotonic())

    def _heartbeat_age_s(self) -> float:
        return time.monotonic() - self._heartbeat_at


def fit_heartbeat(heartbeat: vocabulary.Heartbeat, bytes_max: int) -> vocabulary.Heartbeat:
    """Cut the texts of a heartbeat until it has at most `bytes_max` bytes.

    Consumers reject larger heartbeats. The numbers still show whether all is well, and the events
    contain the full texts.
    """
    for text_max in _TEXTS_MAX:
        shorter = msgspec.structs.replace(
            heartbeat,
            problems=tuple(problem[:text_max] for problem in heartbeat.problems),
            resources=tuple(_shorten(resource, text_max) for resource in heartbeat.resources),
        )
        if len(msgspec.json.encode(shorter)) <= bytes_max:
            break
    return shorter


def first_heartbeat_s(node: str, interval_s: float) -> float:
    """Return the delay of a node's first heartbeat; it spreads the fleet over the interval."""
    share = int.from_bytes(hashlib.sha256(node.encode()).digest()[:4]) / 2**32
    return share * interval_s


def _shorten(resource: vocabulary.ResourceBeat, text_max: int) -> vocabulary.ResourceBeat:
    return msgspec.structs.replace(
        resource,
        problem=resource.problem[:text_max],
        short=resource.short[:text_max],
        mismatch=resource.mismatch[:text_max],
    )


def _boot() -> str:
    """Return the machine's boot id; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_text("ascii").strip()
    return ""
