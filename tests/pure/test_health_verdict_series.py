"""The metric with the verdict on each plugin, as Prometheus reads it."""

from datetime import UTC, datetime, timedelta

import pytest
from prometheus_client import parser

from muster.vocabulary import Verdict
from muster_health import metrics
from muster_health.fleet import detector, verdict_series
from muster_health.model import config
from tests.worlds import detector_fleet

AT = datetime(2026, 11, 23, tzinfo=UTC)
TYPE = b"# TYPE muster_health_plugin_verdict gauge"
Samples = dict[tuple[str, ...], float]


def read(text: str) -> dict[str, Samples]:
    return {
        family.name: {
            tuple(value for _, value in sorted(sample.labels.items())): sample.value
            for sample in family.samples
        }
        for family in parser.text_string_to_metric_families(text)
    }


def test_the_current_verdict_is_one_and_every_other_is_zero() -> None:
    text = verdict_series.text(
        [
            verdict_series.Reached("a", "p", Verdict.STUCK, AT),
            verdict_series.Reached("b", "q", Verdict.HEALTHY, AT + timedelta(seconds=1.5)),
        ]
    )
    states: Samples = {
        (node, plugin, verdict.value): float(verdict is current)
        for node, plugin, current in (("a", "p", Verdict.STUCK), ("b", "q", Verdict.HEALTHY))
        for verdict in Verdict
    }
    changed: Samples = {("a", "p"): AT.timestamp(), ("b", "q"): AT.timestamp() + 1.5}
    assert read(text) == {
        "muster_health_plugin_verdict": states,
        "muster_health_plugin_verdict_changed_timestamp_seconds": changed,
    }


def test_a_plugin_without_a_verdict_is_in_no_state() -> None:
    text = verdict_series.text([verdict_series.Reached("a", "p", None, None)])
    assert read(text) == {
        "muster_health_plugin_verdict": {("a", "p", verdict.value): 0.0 for verdict in Verdict},
        "muster_health_plugin_verdict_changed_timestamp_seconds": {},
    }


def test_only_the_leader_exports_each_node_if_the_settings_say_so_and_they_are_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def exports(leader: int | None, *, per_node: bool) -> bool:
        watched = detector.Detector(
            detector_fleet.SETTINGS,
            runbook_url="runbooks/",
            at_zero=AT,
            bounds=config.Bounds(),
            restarts=config.Remediation(),
            has_cluster=False,
            leader=leader,
        )
        return TYPE in metrics.exported(watched, per_node=per_node)[1]

    assert exports(7, per_node=True)
    assert not exports(7, per_node=False)
    assert not exports(None, per_node=True)
    monkeypatch.setattr(metrics, "PLUGINS_MAX", -1)
    assert not exports(7, per_node=True)


def test_an_empty_fleet_has_both_metrics_and_no_series() -> None:
    assert [*read(verdict_series.text([])).values()] == [{}, {}]
