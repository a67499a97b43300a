"""Adapter: reports the node's state to the bus, to Kubernetes' probes and to Prometheus.

This module is imported after the registration (see `lean`).
"""

import time
from collections.abc import Callable
from datetime import datetime

import muster
from muster import vocabulary
from muster.nats import heartbeat_sender
from muster.service import logs, probes
from muster_plugin import metrics
from muster_plugin import node as node_wiring
from muster_plugin.config import settings
from muster_plugin.kubelet import registration_signals


class BusReporter:
    """Reports the node's state to the bus, to Kubernetes' probes and to Prometheus."""

    def __init__(self, chosen: settings.Settings, node: node_wiring.Node) -> None:
        self.name = node.name
        self.plugin = node.plugin
        self.heartbeat_due = node.heartbeat_due
        self._http = chosen.http
        self._node = node
        self._reporter = heartbeat_sender.Reporter(
            self,
            url=chosen.bus.url,
            interval_s=chosen.heartbeat.interval_s,
            snapshot_period_s=chosen.snapshot_period_s,
            started_at=node.started_at,
        )

    async def run(self) -> None:
        """Report until cancelled; leave the bus while a successor serves the resources."""
        metrics.register(self._node, lambda: self._reporter.heartbeat_at)
        node = self._node
        async with probes.serve(
            self._http.host, self._http.port, ready=self._not_ready, healthy=self._stuck
        ) as address:
            logs.logger().info("listening", http=address)
            while True:
                await self._reporter.report(until=node.handed_over)
                node.left_bus.set()
                await node.taken_back.wait()
                node.left_bus.clear()

    # Reported values

    @property
    def config_hash(self) -> str:
        """The hash of the current configuration."""
        return self._node.config_hash

    @property
    def resources(self) -> tuple[str, ...]:
        """The names of the advertised resources."""
        return self._node.inventory.resources

    def heartbeat(self, sender: heartbeat_sender.Sender) -> vocabulary.Heartbeat:
        """Return the node's current status."""
        node, now = self._node, time.monotonic()
        return vocabulary.Heartbeat(
            node=node.name,
            plugin=node.plugin,
            instance=sender.instance,
            boot=sender.boot,
            version=muster.__version__,
            config_hash=node.config_hash,
            seq=sender.seq,
            interval_s=sender.interval_s,
            uptime_s=registration_signals.age_s(node.started_at, now),
            wall=round(time.time(), registration_signals.DIGITS),
            phase=self._phase(sender),
            kubelet_socket=node.resource_plugins.kubelet_socket,
            resources=tuple(node.statuses()),
            checkers={k: registration_signals.age_s(at, now) for k, at in node.checked_at.items()},
            loop_lag_ms=sender.loop_lag_ms,
            reconnects=sender.reconnects,
            problems=node.event_log.current_problems,
        )

    def snapshot(self, at: datetime) -> vocabulary.InventoryReported:
        """Return the whole inventory."""
        return self._node.snapshot(at)

    def publish_to(self, publish: Callable[[vocabulary.Event], None]) -> None:
        """Publish the buffered events and all later events with `publish`."""
        self._node.event_log.publish_to(publish)

    def stop_reason(self) -> vocabulary.StopReason | None:
        """Return why the plugin stops on purpose; None if it does not."""
        if self._node.handed_over.is_set():
            return vocabulary.StopReason.UPGRADE
        return self._node.stop_reason if self._node.stopping.is_set() else None

    def _phase(self, sender: heartbeat_sender.Sender) -> vocabulary.Phase:
        if sender.is_draining:
            return vocabulary.Phase.DRAINING
        has_served = self._node.resource_plugins.all_registered
        return vocabulary.Phase.SERVING if has_served else vocabulary.Phase.STARTING

    def _not_ready(self) -> str | None:
        if self._node.handed_over.is_set():
            return "handed over to another pod of this plugin"
        return registration_signals.readiness(
            self._node.statuses(), probe_s=registration_signals.PROBE_PERIOD_S
        )

    def _stuck(self) -> str | None:
        stuck = None if self._node.handed_over.is_set() else self._reporter.stuck()
        return stuck or self._node.stuck(time.monotonic())
