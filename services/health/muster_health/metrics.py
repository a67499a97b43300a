"""Adapter: Prometheus: what the health service counts, and what it holds at the moment."""

import collections
from collections.abc import Iterable
from typing import Final, assert_never

import prometheus_client
from prometheus_client import metrics_core, registry

from muster import vocabulary
from muster_health.fleet import detector
from muster_health.model import signals

_DELAYS_S: Final = (0.1, 0.5, 1, 2, 3, 5, 10, 15, 20, 30, 60)

BEATS: Final = prometheus_client.Counter(
    "muster_health_beats_total", "Heartbeats, by what became of them.", ["outcome"]
)
EVENTS_STALE: Final = prometheus_client.Counter(
    "muster_health_events_stale_total", "Events that came after newer ones of their plugin."
)
PROBES: Final = prometheus_client.Counter(
    "muster_health_probes_total", "Probes of suspected plugins, by result.", ["result"]
)
SUSPICIONS: Final = prometheus_client.Counter(
    "muster_health_suspicions_total", "Suspicions, by what became of them.", ["outcome"]
)
STALLS: Final = prometheus_client.Counter(
    "muster_health_stalls_total", "Times that our own clockwork was late, so that waits began anew."
)
BLIND_S: Final = prometheus_client.Counter(
    "muster_health_blind_seconds_total", "For how long our own link was gone, or not there yet."
)
NOTES: Final = prometheus_client.Counter(
    "muster_health_notes_total", "What kept the detector from judging or telling.", ["note"]
)
DELAY: Final = prometheus_client.Histogram(
    "muster_health_detection_delay_seconds",
    "From the last sign of life, or the first of trouble, to the verdict.",
    buckets=_DELAYS_S,
)


def count(noted: signals.Noted) -> None:
    """Count what the detector noted."""
    match noted.note:
        case signals.Note.SUSPECTED | signals.Note.REFUTED | signals.Note.CONFIRMED:
            SUSPICIONS.labels(noted.note.value).inc()
        case signals.Note.CONVICTED:
            DELAY.observe(noted.seconds)
        case signals.Note.BEAT_STALE:
            BEATS.labels("stale").inc()
        case signals.Note.EVENT_STALE:
            EVENTS_STALE.inc()
        case signals.Note.STALLED:
            STALLS.inc()
        case signals.Note.BLIND:
            BLIND_S.inc(noted.seconds)
        case signals.Note.REBASED | signals.Note.REFUSED | signals.Note.HELD | signals.Note.FROZEN:
            NOTES.labels(noted.note.value).inc()
        case _:
            assert_never(noted.note)


class Holdings(registry.Collector):
    """Verdicts and open alerts, looked up when they are asked for."""

    def __init__(self, source: detector.Detector) -> None:
        self._source = source

    def collect(self) -> Iterable[metrics_core.Metric]:
        """Count what the detector holds."""
        verdicts = collections.Counter(dict.fromkeys(vocabulary.Verdict, 0))
        alerts = collections.Counter(dict.fromkeys(vocabulary.AlertKind, 0))
        for plugin in self._source.plugins():
            if plugin.current_verdict is not None:
                verdicts[plugin.current_verdict] += 1
            alerts.update(plugin.open_kinds())
        by_verdict = metrics_core.GaugeMetricFamily(
            "muster_health_verdicts", "Plugins, by verdict.", labels=["verdict"]
        )
        for verdict, plugins in verdicts.items():
            by_verdict.add_metric([verdict.value], plugins)
        by_kind = metrics_core.GaugeMetricFamily(
            "muster_health_open_alerts", "Open alerts, by kind.", labels=["kind"]
        )
        for kind, firing in alerts.items():
            by_kind.add_metric([kind.value], firing)
        return [by_verdict, by_kind]
