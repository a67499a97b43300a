"""Pure: builds the Grafana dashboard from a table of panels with their Prometheus queries."""

import dataclasses
import json
import re
from typing import Final

import muster

Tree = dict[str, object]

_SOURCE: Final = {"type": "prometheus", "uid": "${source}"}
_WIDE: Final = 24
_TALL: Final = {"stat": 4, "table": 9, "alertlist": 9}
_METRIC: Final = re.compile(r"\b(muster_\w+)(?:\{([^}]*)\})?")
_REFERENCES: Final = "ABCDEF"
_OF_RESOURCE: Final = ("devices", "device_", "registrations", "allocation", "streams")


@dataclasses.dataclass(frozen=True, slots=True)
class Panel:
    """One panel; `series` maps each expression to its legend, or to its column in a table."""

    title: str
    series: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 12
    links: tuple[tuple[str, str], ...] = ()
    """The columns of a table whose values are links, each with its target page."""


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
        "Devices of each node",
        tuple(
            (f"sum by (node, resource) ({metric})", title)
            for title, metric in (
                ("Advertised", "muster_plugin_devices"),
                ("Healthy", 'muster_plugin_devices{health="Healthy"}'),
                ("Allocatable", "muster_plugin_devices_allocatable"),
                ("In use", "muster_plugin_devices_allocated"),
            )
        ),
        kind="table",
    ),
    Panel(
        "Plugins that are not HEALTHY, and since when",
        (
            (
                (
                    "1000 * muster_health_plugin_verdict_changed_timestamp_seconds"
                    " * on (cluster, node, plugin) group_right ()"
                    ' (muster_health_plugin_verdict{verdict!="HEALTHY"} == 1)'
                ),
                "Since",
            ),
        ),
        unit="dateTimeFromNow",
        kind="table",
        links=(("verdict", f"{muster.RUNBOOKS_URL}plugins_unwell.html"),),
    ),
    Panel(
        "Open alerts of muster",
        (("max by (kind) (muster_health_open_alerts) > 0", "Open"),),
        kind="table",
        links=(("kind", f"{muster.RUNBOOKS_URL}${{__value.text}}.html"),),
    ),
    Panel("Alerts of Prometheus about muster itself", (), kind="alertlist"),
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
    """Return every Prometheus query of the dashboard, including those of the filters."""
    return [
        *(_filtered(expression) for panel in PANELS for expression, _ in panel.series),
        *_FILTERS.values(),
    ]


def text() -> str:
    """Return the dashboard as Grafana's JSON."""
    return json.dumps(_dashboard(), indent=1) + "\n"


_FILTERS: Final = {
    "cluster": "label_values(muster_build_info, cluster)",
    "node": 'label_values(muster_plugin_devices{cluster=~"$cluster"}, node)',
    "resource": 'label_values(muster_plugin_devices{cluster=~"$cluster",node=~"$node"}, resource)',
}
"""The queries for the values of each filter, by label."""


def _filtered(expression: str) -> str:
    """Return a query restricted by the filters; a series without the label always matches."""

    def selected(match: re.Match[str]) -> str:
        name, given = match[1], match[2]
        labels = ["cluster"]
        if name.startswith(("muster_plugin_", "muster_health_plugin_")):
            labels.append("node")
            after = name.removeprefix("muster_plugin_")
            labels += ["resource"] * after.startswith(_OF_RESOURCE)
        wanted = [given] * bool(given) + [f'{label}=~"${label}"' for label in labels]
        return f"{name}{{{','.join(wanted)}}}"

    return _METRIC.sub(selected, expression)


def _dashboard() -> Tree:
    shown, x, y = [], 0, 0
    for number, panel in enumerate(PANELS, start=1):
        tall = _TALL.get(panel.kind, 7)
        shown.append(_panel(panel, number, {"x": x, "y": y, "w": panel.width, "h": tall}))
        x += panel.width
        if x >= _WIDE:
            x, y = 0, y + tall
    source = {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    runbooks = {"title": "Runbooks", "type": "link", "icon": "doc", "url": muster.RUNBOOKS_URL}
    return {
        "uid": "muster",
        "title": "muster",
        "tags": ["muster", "kubernetes"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "links": [{**runbooks, "targetBlank": True}],
        "templating": {"list": [source, *map(_variable, _FILTERS)]},
        "panels": shown,
    }


def _variable(label: str) -> Tree:
    return {
        "name": label,
        "label": label.capitalize(),
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": _FILTERS[label], "refId": label},
        "definition": _FILTERS[label],
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        # also matches series without the label
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _panel(panel: Panel, number: int, where: dict[str, int]) -> Tree:
    common: Tree = {"id": number, "type": panel.kind, "title": panel.title, "gridPos": where}
    if panel.kind == "alertlist":
        states = {"firing": True, "pending": True, "noData": False, "normal": False, "error": True}
        shown = {"alertName": "Muster", "stateFilter": states, "maxItems": 50, "sortOrder": 3}
        return {**common, "options": {**shown, "viewMode": "list"}}
    defaults: Tree = {"unit": panel.unit}
    made = {
        **common,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": [*map(_link, panel.links)]},
        "targets": [
            {
                "refId": reference,
                "expr": _filtered(expression),
                **_form(panel.kind, legend),
            }
            for reference, (expression, legend) in zip(_REFERENCES, panel.series, strict=False)
        ],
    }
    if panel.kind != "table":
        return made
    # with a single query, Grafana names the column differently
    queries = [f" #{letter}" for letter in _REFERENCES] if len(panel.series) > 1 else [""]
    columns = {
        f"Value{query}": title for query, (_, title) in zip(queries, panel.series, strict=False)
    }
    hidden = dict.fromkeys(("Time", "__name__", "instance", "job", "pod"), True)
    arranged = {"excludeByName": hidden, "renameByName": columns}
    return {
        **made,
        "transformations": [
            {"id": "merge", "options": {}},
            {"id": "organize", "options": arranged},
        ],
    }


def _form(kind: str, legend: str) -> Tree:
    if kind == "table":
        return {"format": "table", "instant": True}
    return {"legendFormat": legend}


def _link(link: tuple[str, str]) -> Tree:
    column, url = link
    target = {"title": "Runbook", "url": url, "targetBlank": True}
    return {
        "matcher": {"id": "byName", "options": column},
        "properties": [{"id": "links", "value": [target]}],
    }
