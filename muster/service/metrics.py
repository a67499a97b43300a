"""Adapter for Prometheus: the metrics that every process exports, and their text format.

Counters whose labels are known exist from the start, at 0: otherwise PromQL's `increase` misses
their first increment. Counters have no `_created` series, which would double their number.
"""

import math
import platform
import time
from collections.abc import Iterable, Iterator

import prometheus_client
from prometheus_client import core, registry

import muster
from muster.service import logs

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


def counter(name: str, text: str, label: str, values: Iterable[str]) -> prometheus_client.Counter:
    """Return a counter with one label, whose series for these values are 0 from the start."""
    made = prometheus_client.Counter(name, text, [label])
    for value in values:
        made.labels(value)
    return made


def timestamp(monotonic: float | None) -> float:
    """Convert a monotonic time to Unix seconds, as timestamps are exported; 0 means never."""
    if monotonic is None or monotonic == -math.inf:
        return 0.0
    # rounded to tenths, so that an unchanged time does not vary between scrapes
    return round(time.time() - time.monotonic() + monotonic, 1)


def exported(from_registry: registry.CollectorRegistry) -> tuple[str, bytes]:
    """Return all metrics of a registry, as their media type and text."""
    return prometheus_client.CONTENT_TYPE_LATEST, prometheus_client.generate_latest(from_registry)


class _Process(registry.Collector):
    """Exports the version, and for `logs`, which must not import Prometheus, the lost log lines."""

    def collect(self) -> Iterator[core.Metric]:
        """Yield the metrics that every process exports."""
        build = core.GaugeMetricFamily(
            "muster_build_info", "1, with the version of muster.", labels=["version", "python"]
        )
        build.add_metric([muster.__version__, platform.python_version()], 1)
        yield build
        yield core.CounterMetricFamily(
            "muster_log_lines_lost",
            "Log lines that could not be written to stdout.",
            value=logs.lines_lost(),
        )


prometheus_client.REGISTRY.register(_Process())
