"""Door to Prometheus: the plugin's figures, read when they are asked for.

Nothing is counted twice: the figures stand where they arise, and prometheus-client, which costs
20 ms, is imported only when all is registered.
"""

from collections.abc import Callable, Iterator, Mapping

import prometheus_client
from prometheus_client import core, registry

from muster import vocabulary
from muster_plugin import inventory, kubelet
from muster_plugin import node as node_door


def register(node: node_door.Node, beat_age_s: Callable[[], float]) -> None:
    """Show the figures of a node on this process's /metrics."""
    collector = Collector(node.lives, node.inventory, beat_age_s)
    prometheus_client.REGISTRY.register(collector)


class Collector(registry.Collector):
    """Turns the state of every life into metrics."""

    def __init__(
        self,
        lives: Mapping[str, kubelet.Life],
        devices: inventory.Inventory,
        beat_age_s: Callable[[], float],
    ) -> None:
        self._lives = lives
        self._devices = devices
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
        yield core.GaugeMetricFamily(
            "muster_plugin_beat_age_seconds", "Since the last beat.", value=self._beat_age_s()
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
