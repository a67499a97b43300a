"""The monitoring component queries only metrics that real processes export."""

import asyncio
import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

import muster
from muster import vocabulary
from muster.cli import keyfiles
from muster.local.kubernetes import requests
from muster_health.fleet import verdict_series
from scripts import dashboard
from tests.worlds import manifests, plugin_process

AT = datetime(2026, 11, 23, tzinfo=UTC)
COMPONENT = manifests.ROOT / "k8s/components/monitoring"
LEARNED = {
    # exception of nats-py
    "muster_bus_errors_total",
    # stream
    "muster_bus_stream_refusals_total",
    # kind of object; verb and status
    "muster_kubernetes_lists_total",
    "muster_kubernetes_requests_total",
    # XID
    "muster_plugin_xids_total",
    # channel and relay: those of the settings are 0 from the start
    "muster_health_out_of_band_alarms_total",
    "muster_notifier_recipients_refused_total",
}
"""Counters with a label whose values are not known in advance; the comments name the labels."""
SCRAPED = {"pod", "node", "le", "job", "cluster"}
"""Labels that come from Prometheus, not from muster."""
RULES = [
    rule
    for group in yaml.safe_load((COMPONENT / "rules.yaml").read_text())["spec"]["groups"]
    for rule in group["rules"]
]


def metrics_of(expression: str) -> set[str]:
    return set(re.findall(r"\bmuster_[a-z_]+", expression))


@contextlib.asynccontextmanager
async def central(name: str, kubeconfig: Path) -> AsyncIterator[plugin_process.Plugin]:
    """Run a central service where neither NATS nor Kubernetes answers."""
    prefix = f"MUSTER_{name.upper()}__"
    given = {f"{prefix}BUS__URL": "nats://127.0.0.1:1"}
    section = {"health": "CLUSTER", "labeler": "KUBERNETES"}.get(name)
    if section:
        given[f"{prefix}{section}__KUBECONFIG"] = str(kubeconfig)
    if name == "gate":
        keys = kubeconfig.with_name("keys")
        keyfiles.make(keys, at=1_800_000_000)
        given |= {f"{prefix}SIGNING": f"{keys}/gate.json"}
        given |= {f"{prefix}KEYS__FILE": "/none", f"{prefix}TOKENS__ISSUER": "none"}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"muster_{name}"), stdout=pipe, stderr=pipe, env=os.environ | given
    )
    try:
        yield plugin_process.Plugin(process)
    finally:
        process.terminate()
        await process.communicate()


@contextlib.asynccontextmanager
async def of_fuse(
    name: str, *, module: str | None = None, **settings: str
) -> AsyncIterator[plugin_process.Plugin]:
    """Run a process of `muster_fuse` that needs neither NATS nor an answer of Kubernetes."""
    given = {f"MUSTER_FUSE_{name.upper()}__{key.upper()}": text for key, text in settings.items()}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"muster_fuse.{module or name}"),
        stdout=pipe,
        stderr=pipe,
        env=os.environ | given,
    )
    try:
        yield plugin_process.Plugin(process)
    finally:
        process.terminate()
        await process.communicate()


async def exported() -> list[str]:
    """Return the metrics of every process just after its start."""
    root = Path(tempfile.mkdtemp(prefix="mu-"))
    for folder in ("device-plugins", "plugins_registry", "pod-resources"):
        (root / folder).mkdir()
    kubeconfig = root / "kubeconfig"
    kubeconfig.write_text(json.dumps(requests.kubeconfig("http://127.0.0.1:1", "t")))
    config = plugin_process.written(
        root / "p.json", plugin_process.resource("example.com/null", "/dev/null")
    )
    try:
        async with contextlib.AsyncExitStack() as stack:
            wanted = [plugin_process.plugin(root, config)]
            wanted += [central(name, kubeconfig) for name in (*manifests.CENTRAL, "gate")]
            wanted.append(of_fuse("nri", socket=f"{root}/nri.sock"))
            wanted.append(of_fuse("dra", registry=f"{root}/plugins_registry", cdi=f"{root}/cdi"))
            webhook = {"kubernetes__kubeconfig": str(kubeconfig)}
            wanted.append(of_fuse("webhook", module="admission", **webhook))
            processes = [await stack.enter_async_context(entering) for entering in wanted]
            return await asyncio.gather(*(_scraped(process) for process in processes))
    finally:
        shutil.rmtree(root)


async def _scraped(process: plugin_process.Plugin) -> str:
    await process.said("listening")
    status, text = await process.asked("/metrics")
    assert status == 200
    return text


def _read(text: str, series: dict[str, set[str]]) -> None:
    """Add the series in a text of metrics to `series`, each with the names of its labels."""
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        ends = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
        for end in ends.get(kind, ("",)):
            series.setdefault(name + end, set())
    for name, labels in re.findall(r"^(muster_\w+)\{(.*)\} ", text, re.MULTILINE):
        series[name] |= set(re.findall(r'(\w+)="', labels))


@pytest.fixture(scope="module")
def texts() -> Sequence[str]:
    async def limited() -> list[str]:
        async with asyncio.timeout(100):
            return await exported()

    return asyncio.run(limited())


@pytest.fixture(scope="module")
def series(texts: Sequence[str]) -> Mapping[str, set[str]]:
    read: dict[str, set[str]] = {}
    for text in texts:
        _read(text, read)
    # series that only a leader exports
    _read(verdict_series.text([verdict_series.Reached("n", "p", None, AT)]), read)
    return read


def test_every_process_says_its_version(texts: Sequence[str]) -> None:
    python, version = platform.python_version(), muster.__version__
    said = f'muster_build_info{{python="{python}",version="{version}"}} 1.0'
    assert [text for text in texts if said not in text] == []


def test_counters_are_zero_from_the_start_unless_their_labels_are_learned(
    texts: Sequence[str],
) -> None:
    absent = set()
    for text in texts:
        for name in re.findall(r"^# TYPE (muster_\w+) counter$", text, re.MULTILINE):
            if not re.search(rf"^{name}[{{ ]", text, re.MULTILINE):
                absent.add(name)
        assert "_created" not in text
    assert absent <= LEARNED


def test_rules_and_panels_ask_for_what_is_exported(series: Mapping[str, set[str]]) -> None:
    asked = [rule["expr"] for rule in RULES] + dashboard.expressions()
    unknown = {name for query in asked for name in metrics_of(query)} - series.keys()
    assert unknown == set()
    for expression in asked:
        labels = {
            label
            for inside in re.findall(r"by \(([^)]*)\)", expression)
            for label in inside.replace(" ", "").split(",")
        } | set(re.findall(r"[{,](\w+)[=!]", expression))
        seen = set().union(*(series[name] for name in metrics_of(expression)))
        assert not seen or labels <= seen | SCRAPED, expression


def test_pages_name_metrics_that_are_exported(series: Mapping[str, set[str]]) -> None:
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in series} | series.keys()
    pages = [*(manifests.ROOT / "docs").rglob("*.md"), manifests.ROOT / "README.md"]
    named = {
        name
        for page in pages
        for name in re.findall(r"`(muster_[a-z_]+)(?:\{[^`]*\})?`", page.read_text("utf-8"))
    }
    packages = {path.name for path in (manifests.ROOT / "services").glob("*/muster_*")}
    buckets = {"muster_state", "muster_ledger", "muster_leader", "muster_silences"}
    assert named - packages - buckets <= families


def test_every_rule_says_what_it_means_and_its_runbook_is_there() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
        assert rule["annotations"]["summary"].endswith(".")
        assert rule["annotations"]["description"].endswith(".")
        page = rule["annotations"]["runbook_url"].removeprefix(muster.RUNBOOKS_URL)
        assert (manifests.ROOT / "docs/runbooks" / page).with_suffix(".md").is_file()


def test_prometheus_takes_the_rules_and_they_fire_when_they_should(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool, which Debian's package prometheus has")
    spec = yaml.safe_load((COMPONENT / "rules.yaml").read_text())["spec"]
    (tmp_path / "rules.json").write_text(json.dumps(spec))
    panels = [
        {"record": f"panel:{number}", "expr": expression}
        for number, expression in enumerate(dashboard.expressions())
        if not expression.startswith("label_values")
    ]
    groups = {"groups": [{"name": "panels", "rules": panels}]}
    (tmp_path / "panels.json").write_text(json.dumps(groups))
    (tmp_path / "story.json").write_text(json.dumps(story()))
    for words in (("check", "rules", "rules.json", "panels.json"), ("test", "rules", "story.json")):
        done = subprocess.run(
            [promtool, *words], cwd=tmp_path, check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


def story() -> dict[str, Any]:
    """Return promtool's test: series over time, and the alerts that must or must not fire."""
    seen = {
        'muster_health_is_leader{pod="a"}': "1x40",
        'muster_health_is_leader{pod="b"}': "0x10 1x30",
        'muster_health_disconnected_seconds_total{pod="a"}': "5x20 5+10x20",
        # promtool's clock begins at 0
        'muster_plugin_last_heartbeat_timestamp_seconds{pod="p",node="n"}': "0x40",
        'muster_notifier_is_leader{pod="n"}': "0x8 1x20 0x12",
        'muster_notifier_is_leader{pod="m"}': "1x8 0x32",
        'muster_bus_stream_refusals_total{stream="S",pod="a"}': "0x4 6+6x36",
        'muster_health_verdicts{verdict="HEALTHY",pod="a"}': "30x10 12x30",
        'muster_health_verdicts{verdict="PLUGIN_DOWN",pod="a"}': "0x10 18x30",
        'muster_health_heartbeats_total{outcome="accepted",pod="a"}': "0+60x10 600x30",
        'muster_health_probes_total{result="inconclusive",pod="a"}': "0x10 0+2x30",
        'muster_health_probes_total{result="answered",pod="a"}': "0x10 0+1x30",
        'muster_health_notes_total{note="waits_restarted",pod="a"}': "0x10 0+1x30",
        'muster_gate_answers_total{outcome="expired",pod="g"}': "0+1x40",
        'muster_gate_answers_total{outcome="admitted",pod="g"}': "0+9x40",
        'muster_gate_keys_fetched_timestamp_seconds{pod="g"}': "0+30x10 _x30",
        # a process without TLS has no certificate that could expire
        'muster_bus_certificate_ends_timestamp_seconds{pod="a"}': "0x500",
        'muster_bus_certificate_ends_timestamp_seconds{pod="b"}': "2600000x500",
    }
    of_two_gates_one_hears = {
        'muster_gate_keys_fetched_timestamp_seconds{pod="g"}': "0+30x200",
        'muster_gate_keys_fetched_timestamp_seconds{pod="h"}': "0x200",
        'muster_gate_answers_total{outcome="expired",pod="g"}': "0+1x200",
    }
    at_all_times = [
        fires("5m", "MusterHealthSilent", {}),
        fires("10m", "MusterNotifierGone", {}),
    ]
    later = [
        fires("4m", "MusterHealthSilent"),
        fires("12m", "MusterNotifierGone"),
        fires("20m", "MusterNotifierGone", {}),
        fires("4m", "MusterHealthTwoLeaders"),
        fires("10m", "MusterHealthTwoLeaders", {}),
        fires("10m", "MusterHealthDisconnects"),
        fires("20m", "MusterHealthDisconnects", {"pod": "a"}, pod="a"),
        fires("10m", "MusterPluginStuck", {"pod": "p", "node": "n"}, node="n"),
        fires("15m", "MusterGateRefuses", {"outcome": "expired"}, value="30", outcome="expired"),
        fires("19m", "MusterGateAdmitsNobody"),
        fires("1m", "MusterBusStreamUnread"),
        fires("10m", "MusterBusStreamUnread", {"pod": "a", "stream": "S"}, pod="a", stream="S"),
        fires("4m", "MusterHeartbeatsMissing"),
        fires("19m", "MusterHeartbeatsMissing", {"pod": "a"}, pod="a"),
        fires("8m", "MusterManyPluginsUnwell"),
        fires("15m", "MusterManyPluginsUnwell", {}, value="18"),
        fires("8m", "MusterProbesInconclusive"),
        fires("19m", "MusterProbesInconclusive", {"pod": "a"}, pod="a"),
        fires("8m", "MusterVerdictsDelayed"),
        fires("19m", "MusterVerdictsDelayed", {"pod": "a", "note": "waits_restarted"}, pod="a"),
        fires("4m", "MusterGateGone"),
        fires("19m", "MusterGateGone", {}),
        fires("120m", "MusterBusCertificateEnds"),
        fires("210m", "MusterBusCertificateEnds", {}, value="29d 22h 43m 20s"),
    ]
    of_gates = [
        fires("19m", "MusterGateAdmitsNobody", {}),
        fires("70m", "MusterGateKeysOld", {"pod": "h"}, pod="h", value="1h 10m 0s"),
    ]
    worlds: tuple[tuple[dict[str, str], list[dict[str, Any]]], ...] = (
        ({}, at_all_times),
        (seen, later),
        (of_two_gates_one_hears, of_gates),
    )
    return {
        "rule_files": ["rules.json"],
        "evaluation_interval": "30s",
        "tests": [
            {
                "interval": "30s",
                "input_series": [
                    {"series": name, "values": values} for name, values in world.items()
                ],
                "alert_rule_test": alerts,
            }
            for world, alerts in worlds
        ],
    }


def fires(
    at: str, alert: str, labels: dict[str, str] | None = None, **words: str
) -> dict[str, Any]:
    """Return promtool's expectation that an alert fires with these labels, or not if None."""
    (rule,) = (rule for rule in RULES if rule["alert"] == alert)
    annotations = {}
    for key, text in rule["annotations"].items() if labels is not None else ():
        filled = re.sub(r"{{ \$value[^}]*}}", words.get("value", ""), text)
        annotations[key] = re.sub(r"{{ \$labels\.(\w+) }}", lambda m: words[m[1]], filled)
    expected = [
        {"exp_labels": {**rule["labels"], **(labels or {})}, "exp_annotations": annotations}
    ]
    return {
        "eval_time": at,
        "alertname": alert,
        "exp_alerts": expected if labels is not None else [],
    }


def test_every_query_of_the_dashboard_obeys_the_filter_by_cluster() -> None:
    queries = [each for each in dashboard.expressions() if "muster_build_info" not in each]
    selected = [re.findall(r"\bmuster_\w+[{](.*?)[}]", query) for query in queries]
    assert [len(metrics_of(query)) > 0 for query in queries] == [True] * len(queries)
    for query, selectors in zip(queries, selected, strict=True):
        assert len(selectors) == len(re.findall(r"\bmuster_\w+", query)), query
        assert all('cluster=~"$cluster"' in selector for selector in selectors), query


def test_every_link_of_the_dashboard_leads_to_a_runbook() -> None:
    urls = re.findall(rf'"{re.escape(muster.RUNBOOKS_URL)}([^"]*)"', dashboard.text())
    kinds = [kind.value for kind in vocabulary.AlertKind]
    names = {name.replace("${__value.text}", kind) for name in urls for kind in kinds}
    folder = manifests.ROOT / "docs/runbooks"
    assert {
        name for name in names if name and not (folder / name).with_suffix(".md").is_file()
    } == set()
    assert "${__value.text}.html" in urls


def test_no_panel_of_the_dashboard_covers_another() -> None:
    shown = orjson.loads((COMPONENT / "muster.json").read_bytes())
    cells: list[tuple[int, int]] = []
    for panel in shown["panels"]:
        at = panel["gridPos"]
        cells += [
            (at["x"] + right, at["y"] + down) for right in range(at["w"]) for down in range(at["h"])
        ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in shown["panels"]}) == len(shown["panels"])


def test_the_component_adds_its_three_objects_and_takes_nothing_away(tmp_path: Path) -> None:
    def named(objects: list[dict[str, Any]]) -> set[tuple[str, str]]:
        return {(item["kind"], item["metadata"]["name"]) for item in objects}

    rendered = manifests.with_component("minimal", "monitoring", where=tmp_path)
    assert named(rendered) - named(list(manifests.objects("minimal"))) == {
        ("PodMonitor", "muster"),
        ("PrometheusRule", "muster"),
        ("ConfigMap", "muster-dashboard"),
    }
    assert len(rendered) == len(manifests.objects("minimal")) + 3


def test_prometheus_may_reach_what_it_is_told_to_scrape(tmp_path: Path) -> None:
    monitor = yaml.safe_load((COMPONENT / "podmonitor.yaml").read_text())["spec"]
    (expression,) = monitor["selector"]["matchExpressions"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    policy = manifests.only("production", "NetworkPolicy", "muster-metrics")["spec"]
    (rule,) = policy["ingress"]
    parts = ("fuse-nri", "fuse-dra", "console")
    deployed = manifests.with_component("production", *parts, where=tmp_path)
    workloads = [o for o in deployed if "template" in o.get("spec", {})]
    scraped = {}
    for workload in workloads:
        pod = workload["spec"]["template"]
        for port in pod["spec"]["containers"][0]["ports"]:
            if port["name"] == endpoint["port"]:
                scraped[pod["metadata"]["labels"][expression["key"]]] = port["containerPort"]
    assert scraped == dict.fromkeys(expression["values"], rule["ports"][0]["port"])
