"""Adapter: Prometheus metrics of the plugin, collected from the node's state at each scrape.

prometheus-client, which costs 20 ms, is imported only after the registration.
"""

import time
from collections.abc import Callable, Iterator

import prometheus_client
from prometheus_client import core, registry

from muster import vocabulary
from muster_plugin import node as node_door


def register(node: node_door.Node, heartbeat_age_s: Callable[[], float]) -> None:
    """Serve the metrics of a node on this process's /metrics."""
    prometheus_client.REGISTRY.register(Collector(node, heartbeat_age_s))


class Collector(registry.Collector):
    """Turns the state of a node into metrics."""

    def __init__(self, node: node_door.Node, heartbeat_age_s: Callable[[], float]) -> None:
        self._node = node
        self._plugins = node.resource_plugins
        self._devices = node.inventory
        self._heartbeat_age_s = heartbeat_age_s

    def collect(self) -> Iterator[core.Metric]:
        """Collect all metrics."""
        yield self._registrations()
        yield from self._streams()
        yield from self._allocations()
        healths = core.GaugeMetricFamily(
            "muster_plugin_devices", "Advertised devices.", labels=["resource", "health"]
        )
        for plugin in self._plugins.values():
            count = self._devices.count(plugin.resource)
            for health in vocabulary.Health:
                healths.add_metric([plugin.resource, health], count[health])
        yield healths
        yield from self._gpus()
        yield core.GaugeMetricFamily(
            "muster_plugin_heartbeat_age_seconds",
            "Since the last heartbeat.",
            value=self._heartbeat_age_s(),
        )

        yield from self._problems(time.monotonic())

    def _gpus(self) -> Iterator[core.Metric]:
        conditions = core.GaugeMetricFamily(
            "muster_plugin_device_conditions",
            "Healthy devices that are degraded or unmonitored.",
            labels=["resource", "condition"],
        )
        for plugin in self._plugins.values():
            counts = self._devices.conditions(plugin.resource)
            for condition in vocabulary.Condition:
                conditions.add_metric([plugin.resource, condition], counts[condition])
        yield conditions
        faults = core.GaugeMetricFamily(
            "muster_plugin_gpu_active_faults",
            "Active faults of GPUs and their parts, by effect.",
            labels=["effect", "code"],
        )
        for (effect, code), count in sorted(self._devices.fault_counts().items()):
            faults.add_metric([effect, code], count)
        yield faults
        xids = core.CounterMetricFamily(
            "muster_plugin_xids",
            "XIDs that the driver reported, ignored ones included.",
            labels=["xid"],
        )
        for xid, count in sorted(self._node.xids.items()):
            xids.add_metric([str(xid)], count)
        yield xids

    def _problems(self, now: float) -> Iterator[core.Metric]:
        ages = core.GaugeMetricFamily(
            "muster_plugin_checker_age_seconds",
            "Since each kind of check was last done.",
            labels=["checker"],
        )
        for checker, at in self._node.checked_at.items():
            ages.add_metric([checker], now - at)
        yield ages
        log = self._node.event_log
        yield core.GaugeMetricFamily(
            "muster_plugin_problems",
            "Current problems with devices and configuration.",
            value=len(log.current_problems),
        )
        yield core.CounterMetricFamily(
            "muster_plugin_configurations_refused",
            "Changed configurations that could not be used.",
            value=log.configurations_refused,
        )
        yield core.GaugeMetricFamily(
            "muster_plugin_configuration_refused_seconds",
            "For how long the configuration file has been unusable; 0 if it is usable.",
            value=now - log.configuration_refused_at
            if log.configuration_refused_at is not None
            else 0.0,
        )

    def _registrations(self) -> core.Metric:
        metric = core.CounterMetricFamily(
            "muster_plugin_registrations",
            "Times the kubelet listed the resource, by the reason for the registration.",
            labels=["resource", "reason"],
        )
        for plugin in self._plugins.values():
            for reason, times in plugin.registrations.items():
                metric.add_metric([plugin.resource, reason], times)
        return metric

    def _streams(self) -> Iterator[core.Metric]:
        streams = core.GaugeMetricFamily(
            "muster_plugin_streams", "Open ListAndWatch streams.", labels=["resource"]
        )
        sends = core.CounterMetricFamily(
            "muster_plugin_device_lists_sent",
            "Device lists sent to the kubelet.",
            labels=["resource"],
        )
        for plugin in self._plugins.values():
            streams.add_metric([plugin.resource], plugin.machine.streams)
            sends.add_metric([plugin.resource], plugin.counters.sends)
        yield streams
        yield sends

    def _allocations(self) -> Iterator[core.Metric]:
        seconds = core.SummaryMetricFamily(
            "muster_plugin_allocation_seconds", "Answering Allocate.", labels=["resource"]
        )
        refused = core.CounterMetricFamily(
            "muster_plugin_allocations_refused", "Allocate calls refused.", labels=["resource"]
        )
        for plugin in self._plugins.values():
            figures = plugin.counters
            seconds.add_metric([plugin.resource], figures.allocations, figures.allocation_seconds)
            refused.add_metric([plugin.resource], figures.refused_allocations)
        yield seconds
        yield refused
