"""Pure: the Grafana dashboard: its queries of Prometheus, as a table of panels."""

import dataclasses
import json
from typing import Final

Tree = dict[str, object]

_SOURCE: Final = {"type": "prometheus", "uid": "${source}"}
_WIDE: Final = 24
_TALL: Final = 7


@dataclasses.dataclass(frozen=True, slots=True)
class Panel:
    """One panel: `series` is each expression with its legend."""

    title: str
    series: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 12


PANELS: Final = (
    Panel(
        "Health services that are leader",
        (("sum(muster_health_is_leader)", ""),),
        kind="stat",
        width=4,
    ),
    Panel(
        "Healthy plugins",
        (('max(muster_health_verdicts{verdict="HEALTHY"})', ""),),
        kind="stat",
        width=4,
    ),
    Panel(
        "Open alerts",
        (("sum(max by (kind) (muster_health_open_alerts))", ""),),
        kind="stat",
        width=4,
    ),
    Panel(
        "Healthy devices",
        (('sum(muster_plugin_devices{health="Healthy"})', ""),),
        kind="stat",
        width=4,
    ),
    Panel(
        "Lost connections to NATS",
        (("count(muster_bus_connected < 1) or vector(0)", ""),),
        kind="stat",
        width=4,
    ),
    Panel("Dead letters", (("max(muster_notifier_dead_letters)", ""),), kind="stat", width=4),
    Panel(
        "Unhealthy plugins, by verdict",
        (
            (
                'max by (verdict) (muster_health_verdicts{verdict!="HEALTHY"}) > 0',
                "{{verdict}}",
            ),
        ),
    ),
    Panel("Open alerts, by kind", (("max by (kind) (muster_health_open_alerts) > 0", "{{kind}}"),)),
    Panel(
        "Devices, by resource and health",
        (("sum by (resource, health) (muster_plugin_devices)", "{{resource}} {{health}}"),),
    ),
    Panel(
        "Registrations with kubelets, by reason",
        (
            (
                "sum by (reason) (increase(muster_plugin_registrations_total[5m]))",
                "{{reason}}",
            ),
        ),
    ),
    Panel(
        "Detection delay: last sign of life to verdict",
        tuple(
            (
                (
                    f"histogram_quantile({share}, sum by (le) "
                    "(rate(muster_health_detection_delay_seconds_bucket[15m])))"
                ),
                name,
            )
            for share, name in (("0.5", "median"), ("0.99", "99th percentile"))
        ),
        unit="s",
    ),
    Panel(
        "Heartbeats a second, and probes",
        (
            (
                "sum by (outcome) (rate(muster_health_heartbeats_total[5m]))",
                "heartbeats {{outcome}}",
            ),
            ("sum by (result) (rate(muster_health_probes_total[5m]))", "probes {{result}}"),
        ),
        unit="ops",
    ),
    Panel(
        "Mean duration of Allocate",
        (
            (
                (
                    "sum by (resource) (rate(muster_plugin_allocation_seconds_sum[15m])) / "
                    "sum by (resource) (rate(muster_plugin_allocation_seconds_count[15m]))"
                ),
                "{{resource}}",
            ),
        ),
        unit="s",
    ),
    Panel(
        "Allocations refused in 15 minutes",
        (
            (
                "sum by (resource) (increase(muster_plugin_allocations_refused_total[15m]))",
                "{{resource}}",
            ),
        ),
    ),
    Panel(
        "Notifications, by receiver and outcome",
        (
            (
                "sum by (receiver, outcome) (increase(muster_notifier_notifications_total[15m]))",
                "{{receiver}} {{outcome}}",
            ),
            ("muster_notifier_queued_notifications", "{{receiver}} waiting"),
        ),
    ),
    Panel(
        "Messages to NATS a second, by outcome",
        (
            ("sum by (outcome) (rate(muster_bus_published_total[5m]))", "published, {{outcome}}"),
            ("sum by (kind) (rate(muster_bus_errors_total[5m]))", "error, {{kind}}"),
        ),
        unit="ops",
    ),
    Panel(
        "Answers of the gates in 15 minutes",
        (("sum by (outcome) (increase(muster_gate_answers_total[15m]))", "{{outcome}}"),),
    ),
    Panel(
        "Nodes that sent too much in 15 minutes, and are refused now",
        (
            ("max(increase(muster_gate_nodes_limited_total[15m]))", "refused for a while"),
            ("max(muster_gate_nodes_refused)", "refused now"),
            ("sum(increase(muster_gate_disconnected_total[15m]))", "connections closed"),
        ),
    ),
    Panel(
        "Decisions of the labeler, and waiting nodes",
        (
            ("sum by (action) (increase(muster_labeler_decisions_total[15m]))", "{{action}}"),
            ("max(muster_labeler_waiting_nodes)", "waiting"),
        ),
    ),
)


def expressions() -> list[str]:
    """Return every query of Prometheus."""
    return [expression for panel in PANELS for expression, _ in panel.series]


def text() -> str:
    """Return the dashboard in Grafana's format."""
    return json.dumps(_dashboard(), indent=1) + "\n"


def _dashboard() -> Tree:
    shown, x, y = [], 0, 0
    for number, panel in enumerate(PANELS, start=1):
        tall = 4 if panel.kind == "stat" else _TALL
        shown.append(_panel(panel, number, {"x": x, "y": y, "w": panel.width, "h": tall}))
        x += panel.width
        if x >= _WIDE:
            x, y = 0, y + tall
    source = {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return {
        "uid": "muster",
        "title": "muster",
        "tags": ["muster", "kubernetes"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [source]},
        "panels": shown,
    }


def _panel(panel: Panel, number: int, where: dict[str, int]) -> Tree:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "datasource": _SOURCE,
        "gridPos": where,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(panel.series)
        ],
    }
