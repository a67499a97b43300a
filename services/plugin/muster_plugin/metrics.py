"""Adapter: Prometheus: the plugin's figures, read when they are asked for.

Nothing is counted twice: the figures stand where they arise, and prometheus-client, which costs
20 ms, is imported only when all is registered.
"""

import time
from collections.abc import Callable, Iterator

import prometheus_client
from prometheus_client import core, registry

from muster import vocabulary
from muster_plugin import node as node_door


def register(node: node_door.Node, beat_age_s: Callable[[], float]) -> None:
    """Show the figures of a node on this process's /metrics."""
    prometheus_client.REGISTRY.register(Collector(node, beat_age_s))


class Collector(registry.Collector):
    """Turns the state of every life into metrics."""

    def __init__(self, node: node_door.Node, beat_age_s: Callable[[], float]) -> None:
        self._node = node
        self._lives = node.lives
        self._devices = node.inventory
        self._beat_age_s = beat_age_s

    def collect(self) -> Iterator[core.Metric]:
        """Read the figures."""
        yield self._registrations()
        yield from self._streams()
        yield from self._allocations()
        healths = core.GaugeMetricFamily(
            "muster_plugin_devices", "Advertised devices.", labels=["resource", "health"]
        )
        for life in self._lives.values():
            count = self._devices.count(life.resource)
            for health in vocabulary.Health:
                healths.add_metric([life.resource, health], count[health])
        yield healths
        yield from self._gpus()
        yield core.GaugeMetricFamily(
            "muster_plugin_beat_age_seconds", "Since the last beat.", value=self._beat_age_s()
        )

        yield from self._troubles(time.monotonic())

    def _gpus(self) -> Iterator[core.Metric]:
        conditions = core.GaugeMetricFamily(
            "muster_plugin_device_conditions",
            "Healthy devices of which there is something to be known.",
            labels=["resource", "condition"],
        )
        for life in self._lives.values():
            counts = self._devices.conditions(life.resource)
            for condition in vocabulary.Condition:
                conditions.add_metric([life.resource, condition], counts[condition])
        yield conditions
        findings = core.GaugeMetricFamily(
            "muster_plugin_gpu_findings",
            "What holds against GPUs and parts of them, by what it does.",
            labels=["effect", "code"],
        )
        for (effect, code), count in sorted(self._devices.findings().items()):
            findings.add_metric([effect, code], count)
        yield findings
        xids = core.CounterMetricFamily(
            "muster_plugin_xids", "XIDs that the driver reported, ignored ones too.", labels=["xid"]
        )
        for xid, count in sorted(self._node.xids.items()):
            xids.add_metric([str(xid)], count)
        yield xids

    def _troubles(self, now: float) -> Iterator[core.Metric]:
        ages = core.GaugeMetricFamily(
            "muster_plugin_checker_age_seconds",
            "Since each kind of looking was last done.",
            labels=["checker"],
        )
        for checker, at in self._node.checked_at.items():
            ages.add_metric([checker], now - at)
        yield ages
        teller = self._node.teller
        yield core.GaugeMetricFamily(
            "muster_plugin_problems", "What is not as it was meant.", value=len(teller.standing)
        )
        yield core.CounterMetricFamily(
            "muster_plugin_configurations_refused",
            "Changed configurations that could not be used.",
            value=teller.refusals,
        )
        yield core.GaugeMetricFamily(
            "muster_plugin_configuration_refused_seconds",
            "Since the configuration file cannot be used; 0 if it can.",
            value=now - teller.refused_at if teller.refused_at is not None else 0.0,
        )

    def _registrations(self) -> core.Metric:
        metric = core.CounterMetricFamily(
            "muster_plugin_registrations",
            "Times the kubelet listed the resource, by why it was registered.",
            labels=["resource", "reason"],
        )
        for life in self._lives.values():
            for reason, times in life.registrations.items():
                metric.add_metric([life.resource, reason], times)
        return metric

    def _streams(self) -> Iterator[core.Metric]:
        streams = core.GaugeMetricFamily(
            "muster_plugin_streams", "Open ListAndWatch streams.", labels=["resource"]
        )
        sends = core.CounterMetricFamily(
            "muster_plugin_sends", "Device lists the kubelet took.", labels=["resource"]
        )
        for life in self._lives.values():
            streams.add_metric([life.resource], life.machine.streams)
            sends.add_metric([life.resource], life.figures.sends)
        yield streams
        yield sends

    def _allocations(self) -> Iterator[core.Metric]:
        seconds = core.SummaryMetricFamily(
            "muster_plugin_allocation_seconds", "Answering Allocate.", labels=["resource"]
        )
        refused = core.CounterMetricFamily(
            "muster_plugin_allocations_refused", "Allocate calls refused.", labels=["resource"]
        )
        for life in self._lives.values():
            figures = life.figures
            seconds.add_metric([life.resource], figures.allocations, figures.allocation_seconds)
            refused.add_metric([life.resource], figures.refused_allocations)
        yield seconds
        yield refused
