"""Adapter: exports health's counters, current verdicts and alerts to Prometheus."""

import collections
from collections.abc import Iterable
from typing import Final, assert_never

import prometheus_client
from prometheus_client import metrics_core, registry

from muster import leadership, vocabulary
from muster.service import metrics
from muster_health.fleet import detector, verdict_series
from muster_health.model import limits, signals

_DELAYS_S: Final = (0.1, 0.5, 1, 2, 3, 5, 10, 15, 20, 30, 60)
PLUGINS_MAX: Final = 20_000
"""With more plugins than this, no series per plugin are exported: a scrape would exceed 34 MB."""
LEFT_OUT: Final = prometheus_client.Gauge(
    "muster_health_plugins_without_series",
    f"Plugins whose verdicts are not exported, because there are more than {PLUGINS_MAX}.",
)

_HEARTBEATS: Final = metrics.counter(
    "muster_health_heartbeats_total",
    "Heartbeats received: accepted, or stale if not newer than one that had arrived.",
    "outcome",
    ("accepted", "stale"),
)
EVENTS_STALE: Final = prometheus_client.Counter(
    "muster_health_events_stale_total",
    "Events ignored because they, or newer events of the same plugin, had already arrived.",
)
PROBES: Final = metrics.counter(
    "muster_health_probes_total",
    "Probes of suspected and lost plugins, by result.",
    "result",
    ("answered", "no_answer", "not_subscribed", "inconclusive"),
)
SUSPICIONS: Final = metrics.counter(
    "muster_health_suspicions_total",
    "Suspicions raised, refuted and confirmed.",
    "outcome",
    (signals.Note.SUSPECTED, signals.Note.REFUTED, signals.Note.CONFIRMED),
)
STALLS: Final = prometheus_client.Counter(
    "muster_health_stalls_total",
    "How often health itself was suspended or ran late, so that all waits were extended.",
)
DISCONNECTED_S: Final = prometheus_client.Counter(
    "muster_health_disconnected_seconds_total",
    "Seconds without a connection to NATS, including those before the first connection.",
)
NOTES: Final = metrics.counter(
    "muster_health_notes_total",
    "Reasons why a verdict or an alert was delayed or dropped.",
    "note",
    (
        *(signals.Note.WAITS_RESTARTED, signals.Note.RATE_LIMITED, signals.Note.SUSPENDED),
        signals.Note.REFUSED,
    ),
)
EVENTS_SKIPPED: Final = prometheus_client.Counter(
    "muster_health_events_skipped_total",
    "Events not read because their node published too many; the newest ones are read later.",
)
REFUSED: Final = metrics.counter(
    "muster_health_refused_total",
    "Data not stored because of a limit, or because its node is not in the cluster.",
    "reason",
    limits.Refusal,
)
DELAY: Final = prometheus_client.Histogram(
    "muster_health_detection_delay_seconds",
    "Seconds from the last heartbeat, or the first reported problem, to the verdict.",
    buckets=_DELAYS_S,
)

_IS_LEADER: Final = prometheus_client.Gauge(
    "muster_health_is_leader",
    "1 while this process is the leader and publishes verdicts and alerts.",
)
_LEADERSHIP: Final = metrics.counter(
    "muster_health_leadership_changes_total", "Leadership won and lost.", "change", ("won", "lost")
)


class Heartbeats:
    """Counts heartbeats, each with one outcome, when the detector has processed their batch."""

    def __init__(self) -> None:
        self._stale = 0

    def note_stale(self) -> None:
        """Record that one heartbeat of the batch is stale."""
        self._stale += 1

    def count(self, batch: int) -> None:
        """Count a batch of this size."""
        _HEARTBEATS.labels("stale").inc(self._stale)
        _HEARTBEATS.labels("accepted").inc(batch - self._stale)
        self._stale = 0


HEARTBEATS: Final = Heartbeats()


def count_leadership(was: leadership.Leadership, now: leadership.Leadership) -> None:
    """Count each time this process becomes or ceases to be the leader, and export whether it is."""
    if now.term == was.term:
        return
    _IS_LEADER.set(now.term is not None)
    if was.term is not None:
        _LEADERSHIP.labels("lost").inc()
    if now.term is not None:
        _LEADERSHIP.labels("won").inc()


def count(noted: signals.Noted) -> None:
    """Count an occurrence that the detector noted."""
    match noted.note:
        case signals.Note.SUSPECTED | signals.Note.REFUTED | signals.Note.CONFIRMED:
            SUSPICIONS.labels(noted.note.value).inc()
        case signals.Note.VERDICT_REACHED:
            DELAY.observe(noted.seconds)
        case signals.Note.HEARTBEAT_STALE:
            HEARTBEATS.note_stale()
        case signals.Note.EVENT_STALE:
            EVENTS_STALE.inc()
        case signals.Note.STALLED:
            STALLS.inc()
        case signals.Note.DISCONNECTED:
            DISCONNECTED_S.inc(noted.seconds)
        case signals.Note.REFUSED:
            NOTES.labels(noted.note.value).inc()
            REFUSED.labels(noted.refusal or "").inc()
        case signals.Note.WAITS_RESTARTED | signals.Note.RATE_LIMITED | signals.Note.SUSPENDED:
            NOTES.labels(noted.note.value).inc()
        case _:
            assert_never(noted.note)


class CurrentState(registry.Collector):
    """Current verdicts and open alerts, read whenever Prometheus scrapes them."""

    def __init__(self, source: detector.Detector) -> None:
        self._source = source

    def collect(self) -> Iterable[metrics_core.Metric]:
        """Return the numbers of verdicts, open alerts, mass failures and suspected plugins."""
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
        mass_failures, suspects = self._source.suspicions()
        return [
            by_verdict,
            by_kind,
            metrics_core.GaugeMetricFamily(
                "muster_health_mass_failures",
                "Current mass failures: many plugins are suspected at the same time.",
                value=mass_failures,
            ),
            metrics_core.GaugeMetricFamily(
                "muster_health_suspected_plugins",
                "Plugins that are currently suspected and have no verdict yet.",
                value=suspects,
            ),
        ]


def exported(source: detector.Detector, *, per_node: bool) -> tuple[str, bytes]:
    """Return the content type and the text of all metrics.

    Series per plugin are exported only by the leader, to avoid duplicates, only if `per_node` is
    set, and only for up to `PLUGINS_MAX` plugins.
    """
    plugins = sum(1 for _ in source.plugins())
    is_large = plugins > PLUGINS_MAX
    LEFT_OUT.set(plugins if per_node and is_large else 0)
    kind, text = metrics.exported(prometheus_client.REGISTRY)
    if per_node and not is_large and source.leader is not None:
        text += verdict_series.text(source.reached()).encode()
    return kind, text
