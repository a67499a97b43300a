"""Adapter: reports the node's state to the bus, to Kubernetes' probes and to Prometheus.

This module is imported after the registration, see `lean`. The bus may stay unreachable for ever.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

import muster
from muster import codec, vocabulary
from muster.nats import bus
from muster.service import logs, probes
from muster_plugin import metrics
from muster_plugin import node as node_door
from muster_plugin.config import settings
from muster_plugin.kubelet import client, registration_model

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_STOP_FLUSH_S: Final = 0.5
_HEARTBEATS_MISSED_MAX: Final = 3


class BusReporter:
    """Reports the node's state to the bus, to Kubernetes' probes and to Prometheus."""

    def __init__(self, chosen: settings.Settings, node: node_door.Node) -> None:
        self._settings = chosen
        self._node = node
        self._identity = Identity(
            node=node.name,
            plugin=node.plugin,
            instance="unconnected",
            boot=_boot(),
            version=muster.__version__,
            interval_s=chosen.heartbeat.interval_s,
            started_at=node.started_at,
        )
        self._heartbeat_at = self._identity.started_at
        self._lag_s = 0.0
        self._sequence = 0
        self._is_draining = False

    async def run(self) -> None:
        """Connect, and report until cancelled.

        `plugin.stopping` is published only at an intended end: a crash must look like one.
        """
        metrics.register(self._node, self._heartbeat_age_s)
        http, identity = self._settings.http, self._identity
        async with (
            bus.Bus(
                self._settings.bus.url,
                producer=f"plugins/{identity.plugin}",
                name=f"{identity.plugin} {identity.node}",
                boot=identity.boot,
            ) as connected,
            probes.serve(
                http.host, http.port, ready=self._not_ready, healthy=self._stuck
            ) as address,
        ):
            self._identity = msgspec.structs.replace(identity, instance=connected.instance)
            logs.logger().info("listening", http=address)
            await connected.reply(
                vocabulary.rpc_subject(identity.node, identity.plugin, "probe"),
                lambda: codec.encode_heartbeat(self._heartbeat(connected)),
            )
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._send_heartbeats(connected))
                    tasks.create_task(self._resync(connected))
                    tasks.create_task(self._publish_snapshots(connected))
            finally:
                if self._node.stopping.is_set():
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
                # after a late heartbeat the next is due at once: being punctual is no recovery
                self._lag_s = max(clock() - due, min(self._lag_s, interval_s) / 2)
                due = max(due + interval_s, clock())
            self._heartbeat_at = clock()
            self._sequence += 1
            await connected.send_heartbeat(self._heartbeat(connected))

    async def _resync(self, connected: bus.Bus) -> None:
        """Publish everything again after each (re)connect: changes alone would drift."""
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
        at = datetime.now(UTC)
        connected.enqueue(self._node.snapshot(at, bytes_max=codec.EVENT_BYTES_MAX))

    async def _publish_stopping(self, connected: bus.Bus) -> None:
        self._is_draining = True
        connected.enqueue(
            vocabulary.PluginStopping(
                node=self._node.name,
                plugin=self._node.plugin,
                at=datetime.now(UTC),
                reason=self._node.stop_reason,
            )
        )
        if connected.link.is_connected and not await connected.flush(_STOP_FLUSH_S):
            logs.logger().warning("stop_announcement_not_delivered")

    def _heartbeat(self, connected: bus.Bus) -> vocabulary.Heartbeat:
        process = ProcessStatus(
            seq=self._sequence,
            phase=self._phase,
            kubelet=self._node.resource_plugins.kubelet_socket,
            checked_at=self._node.checked_at,
            lag_s=self._lag_s,
            reconnects=max(0, connected.link.epoch - 1),
            problems=self._node.event_log.current_problems,
            config_hash=self._node.config_hash,
        )
        now = time.monotonic()
        return heartbeat(
            self._identity,
            process,
            self._node.statuses(),
            now=now,
            wall=time.time(),
            bytes_max=codec.HEARTBEAT_BYTES_MAX,
        )

    @property
    def _phase(self) -> vocabulary.Phase:
        if self._is_draining:
            return vocabulary.Phase.DRAINING
        has_served = self._node.resource_plugins.all_registered
        return vocabulary.Phase.SERVING if has_served else vocabulary.Phase.STARTING

    def _not_ready(self) -> str | None:
        return registration_model.readiness(
            self._node.statuses(), now=time.monotonic(), probe_s=client.PROBE_PERIOD_S
        )

    def _stuck(self) -> str | None:
        age_s = self._heartbeat_age_s()
        if age_s > _HEARTBEATS_MISSED_MAX * self._settings.heartbeat.interval_s:
            return f"the event loop is stuck: the last heartbeat was {age_s:.1f} s ago"
        return self._node.stuck(time.monotonic())

    def _heartbeat_age_s(self) -> float:
        return time.monotonic() - self._heartbeat_at


_DIGITS: Final = 2
_NEVER: Final = -1.0
_TEXTS_MAX: Final = (300, 100, 30, 10)
"""Lengths that texts are cut to, until the heartbeat fits; the events have the whole texts."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of the process, which does not change while it runs."""

    node: str
    plugin: str
    instance: str
    boot: str
    version: str
    interval_s: float
    started_at: float


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of the process at the time of a heartbeat; `kubelet` identifies its kubelet.sock."""

    seq: int
    phase: vocabulary.Phase
    kubelet: str
    checked_at: Mapping[str, float]
    lag_s: float
    reconnects: int
    config_hash: str
    problems: tuple[str, ...] = ()


def heartbeat(
    identity: Identity,
    process: ProcessStatus,
    resources: Iterable[registration_model.ResourceStatus],
    *,
    now: float,
    wall: float,
    bytes_max: int,
) -> vocabulary.Heartbeat:
    """Return a heartbeat; `now` is monotonic like all other times, `wall` is the time of day.

    Its texts are cut until it has at most `bytes_max` bytes, because consumers reject larger ones:
    the numbers show whether all is well, and the events have the full reasons.
    """
    statuses = [*resources]
    for text_max in _TEXTS_MAX:
        message = _heartbeat(identity, process, statuses, now=now, wall=wall, text_max=text_max)
        if len(msgspec.json.encode(message)) <= bytes_max:
            break
    return message


def first_heartbeat_s(node: str, interval_s: float) -> float:
    """Return the delay of a node's first heartbeat, which spreads a fleet over the interval."""
    share = int.from_bytes(hashlib.sha256(node.encode()).digest()[:4]) / 2**32
    return share * interval_s


def _heartbeat(
    identity: Identity,
    process: ProcessStatus,
    resources: Iterable[registration_model.ResourceStatus],
    *,
    now: float,
    wall: float,
    text_max: int,
) -> vocabulary.Heartbeat:
    return vocabulary.Heartbeat(
        node=identity.node,
        plugin=identity.plugin,
        instance=identity.instance,
        boot=identity.boot,
        version=identity.version,
        config_hash=process.config_hash,
        seq=process.seq,
        interval_s=identity.interval_s,
        uptime_s=_age(identity.started_at, now),
        wall=round(wall, _DIGITS),
        phase=process.phase,
        kubelet_socket=process.kubelet,
        resources=tuple(_resource(state, now, text_max) for state in resources),
        checkers={name: _age(at, now) for name, at in process.checked_at.items()},
        loop_lag_ms=round(process.lag_s * 1000, _DIGITS),
        reconnects=process.reconnects,
        problems=tuple(problem[:text_max] for problem in process.problems),
    )


def _resource(
    state: registration_model.ResourceStatus, now: float, text_max: int
) -> vocabulary.ResourceBeat:
    probe = state.probe
    return vocabulary.ResourceBeat(
        name=state.name,
        registered_age_s=_age(state.registered_at, now),
        streams=state.streams,
        last_send_age_s=_age(state.sent_at, now),
        registrations=state.registrations,
        probe_ok=probe is not None and probe.ok,
        probe_ms=round(probe.seconds * 1000, _DIGITS) if probe else 0.0,
        probe_age_s=_age(probe.at if probe else None, now),
        devices=state.devices,
        healthy=state.healthy,
        allocated=state.allocated,
        problem=state.problem[:text_max],
        short=state.shortage[:text_max],
        mismatch=state.mismatch[:text_max],
        degraded=state.conditions.get(vocabulary.Condition.DEGRADED, 0),
        kubelet_away=state.waits_for_kubelet,
        unmonitored=state.conditions.get(vocabulary.Condition.UNMONITORED, 0),
    )


def _age(at: float | None, now: float) -> float:
    return _NEVER if at is None else round(max(0.0, now - at), _DIGITS)


def _boot() -> str:
    """Return the machine's boot id; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_text("ascii").strip()
    return ""
