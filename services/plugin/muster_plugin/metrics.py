"""Adapter: Prometheus metrics of the plugin, collected from the node's state at each scrape.

This module is imported after the registration (see `lean`).
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import prometheus_client
from prometheus_client import core, registry

from muster import vocabulary
from muster.service import metrics
from muster_plugin import node as node_wiring

_Samples: TypeAlias = Iterable[tuple[Sequence[str], float]]
"""The values of a metric, each with the values of its labels."""


def register(node: node_wiring.Node, heartbeat_at: Callable[[], float]) -> None:
    """Add the metrics of a node to this process's /metrics endpoint."""
    prometheus_client.REGISTRY.register(Collector(node, heartbeat_at))


class Collector(registry.Collector):
    """Exports the state of a node as metrics."""

    def __init__(self, node: node_wiring.Node, heartbeat_at: Callable[[], float]) -> None:
        self._node = node
        self._heartbeat_at = heartbeat_at

    def collect(self) -> Iterator[core.Metric]:
        """Collect all metrics."""
        yield from self._devices()
        yield from self._registrations()
        yield from self._allocations()
        yield from self._watched()
        yield from self._process()

    def _devices(self) -> Iterator[core.Metric]:
        inventory = self._node.inventory
        yield _gauge(
            "muster_plugin_devices",
            "Advertised devices.",
            ["resource", "health"],
            (
                ([resource, health], counts[health])
                for resource in self._node.resource_plugins
                for counts in [inventory.count(resource)]
                for health in vocabulary.Health
            ),
        )
        check = self._node.pods.check
        for name, text, count in (
            ("allocatable", "Devices that the kubelet offers to pods.", check.allocatable_count),
            ("allocated", "Devices that containers hold.", check.allocated_count),
        ):
            counted = ((each, count(each)) for each in self._node.resource_plugins)
            yield _gauge(
                f"muster_plugin_devices_{name}",
                f"{text} No series while the kubelet does not report them.",
                ["resource"],
                (([resource], devices) for resource, devices in counted if devices is not None),
            )
        yield _gauge(
            "muster_plugin_device_conditions",
            "Healthy devices that are degraded or unmonitored.",
            ["resource", "condition"],
            (
                ([resource, condition], counts[condition])
                for resource in self._node.resource_plugins
                for counts in [inventory.conditions(resource)]
                for condition in vocabulary.Condition
            ),
        )
        yield _gauge(
            "muster_plugin_gpu_active_faults",
            "Active faults of GPUs and their parts, by effect and code.",
            ["effect", "code"],
            sorted(inventory.fault_counts().items()),
        )
        yield _counter(
            "muster_plugin_xids",
            "XIDs that the driver reported, including ignored ones.",
            ["xid"],
            (([str(xid)], count) for xid, count in sorted(self._node.xids.items())),
        )

    def _registrations(self) -> Iterator[core.Metric]:
        plugins = self._node.resource_plugins
        yield _counter(
            "muster_plugin_registrations",
            "Registrations that the kubelet completed by opening ListAndWatch, by reason.",
            ["resource", "reason"],
            (
                ([resource, reason], plugin.registrations[reason])
                for resource, plugin in plugins.items()
                for reason in vocabulary.RegistrationReason
            ),
        )
        yield _gauge(
            "muster_plugin_registered_timestamp_seconds",
            "When the kubelet last accepted a registration; 0 before the first one.",
            ["resource"],
            (
                ([resource], metrics.timestamp(plugin.machine.registered_at))
                for resource, plugin in plugins.items()
            ),
        )
        yield _gauge(
            "muster_plugin_device_list_sent_timestamp_seconds",
            "When the device list was last sent to the kubelet; 0 if it was never sent.",
            ["resource"],
            (
                ([resource], metrics.timestamp(plugin.counters.sent_at))
                for resource, plugin in plugins.items()
            ),
        )
        yield _gauge(
            "muster_plugin_streams",
            "Open ListAndWatch streams.",
            ["resource"],
            (([resource], plugin.machine.streams) for resource, plugin in plugins.items()),
        )
        yield _counter(
            "muster_plugin_device_lists_sent",
            "Device lists sent to the kubelet.",
            ["resource"],
            (([resource], plugin.counters.sends) for resource, plugin in plugins.items()),
        )

    def _allocations(self) -> Iterator[core.Metric]:
        counters = {name: plugin.counters for name, plugin in self._node.resource_plugins.items()}
        seconds = core.SummaryMetricFamily(
            "muster_plugin_allocation_seconds",
            "Time to answer Allocate calls.",
            labels=["resource"],
        )
        for resource, counter in counters.items():
            seconds.add_metric([resource], counter.allocations, counter.allocation_seconds)
        yield seconds
        yield _counter(
            "muster_plugin_allocations_refused",
            "Allocate calls refused.",
            ["resource"],
            (([resource], counter.refused_allocations) for resource, counter in counters.items()),
        )

    def _watched(self) -> Iterator[core.Metric]:
        watcher = self._node.foreign_plugins.watcher
        if watcher is None:
            return
        yield _gauge(
            "muster_plugin_watched",
            "Plugins that muster does not run, by finding.",
            ["plugin", "kind", "finding"],
            (([each.name, each.kind, each.finding], 1) for each in watcher.watched),
        )
        yield _counter(
            "muster_plugin_watched_restarts",
            "How many times another process began to serve a watched socket.",
            samples=[([], watcher.restarts)],
        )
        yield _counter(
            "muster_plugin_watch_probes",
            "Probes of watched sockets, by outcome.",
            ["answer"],
            (([answer], count) for answer, count in watcher.probes.items()),
        )

    def _process(self) -> Iterator[core.Metric]:
        yield _gauge(
            "muster_plugin_last_heartbeat_timestamp_seconds",
            "When the last heartbeat was sent; before the first one, when the process started.",
            samples=[([], metrics.timestamp(self._heartbeat_at()))],
        )
        yield _gauge(
            "muster_plugin_checker_success_timestamp_seconds",
            "When each kind of check last succeeded; 0 if it never did.",
            ["checker"],
            (([checker], metrics.timestamp(at)) for checker, at in self._node.checked_at.items()),
        )
        log = self._node.event_log
        yield _gauge(
            "muster_plugin_problems",
            "Current problems with devices and configuration.",
            samples=[([], len(log.current_problems))],
        )
        yield _counter(
            "muster_plugin_configurations_refused",
            "Changed configurations that could not be used.",
            samples=[([], log.configurations_rejected)],
        )
        yield _gauge(
            "muster_plugin_configuration_refused_timestamp_seconds",
            "When the configuration file became unusable; 0 if it is usable.",
            samples=[([], metrics.timestamp(log.configuration_rejected_at))],
        )


def _metric(
    kind: type[core.GaugeMetricFamily | core.CounterMetricFamily],
    name: str,
    text: str,
    labels: Sequence[str] = (),
    samples: _Samples = (),
) -> core.Metric:
    metric = kind(name, text, labels=labels)
    for values, value in samples:
        metric.add_metric(values, value)
    return metric


_gauge = functools.partial(_metric, core.GaugeMetricFamily)
_counter = functools.partial(_metric, core.CounterMetricFamily)
