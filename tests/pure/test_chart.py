"""What Helm itself says of the chart, and of values that it must not take."""

import contextlib
from typing import Any, Final

import pytest
import yaml

from tests.worlds import manifests

CHART: Final = manifests.ROOT / "k8s/chart/muster"

helm = pytest.importorskip("helm_python", reason="no Helm: pip install helm-python-sdk")


def test_helm_finds_nothing_wrong_with_the_chart() -> None:
    report = helm.lint(str(CHART))
    assert report["errors"] == []
    assert [message["error"] for message in report["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"image": {"repository": 1}}, "/image/repository"),
        ({"image": {"tag": ""}}, "/image/tag"),
        ({"nats": {"image": {"tag": ""}}}, "/nats/image/tag"),
        ({"settings": {"plugin": []}}, "/settings/plugin"),
        ({"settings": {"kubelet": {}}}, "/settings"),
        ({"monitoring": {"enabled": "yes"}}, "/monitoring/enabled"),
        ({"watch": {"enabled": "yes"}}, "/watch/enabled"),
        ({"watch": {"enabled": True, "expect": {"a.example/b": "8"}}}, "/watch/expect"),
        ({"watch": {"expect": {"a.example/b": 8}}}, "/watch/expect"),
        ({"watch": {"ignore": ["devices.kubevirt.io/*"]}}, "/watch/ignore"),
        ({"replicas": 3}, "additional properties 'replicas'"),
    ],
    ids=str,
)
def test_values_of_another_shape_are_refused_by_their_place(
    values: dict[str, Any], where: str
) -> None:
    with (
        contextlib.closing(helm.Chart.load(str(CHART))) as chart,
        pytest.raises(helm.HelmValuesError, match=where),
    ):
        chart.render(values, name="muster", namespace="muster")


def test_who_watches_and_serves_is_told_how() -> None:
    resource = {"name": "example.com/a", "groups": [{"devices": [{"path": "/dev/a"}]}]}
    for settings, named in (
        ({"resources": [resource]}, "has example.com/a: for both, .*settings.plugin.watch.enabled"),
        ({"gpus": {"migStrategy": "single"}}, "leave gpus, nodes and watch out"),
    ):
        given = {"watch": {"enabled": True}, "settings": {"plugin": settings}}
        with (
            contextlib.closing(helm.Chart.load(str(CHART))) as chart,
            pytest.raises(helm.HelmRenderError, match=named),
        ):
            chart.render(given, name="muster", namespace="muster")


def test_what_is_expected_and_ignored_reaches_the_agent() -> None:
    watch = {"enabled": True, "expect": {"nvidia.com/gpu": 8}, "ignore": ["devices.kubevirt.io/*"]}
    with contextlib.closing(helm.Chart.load(str(CHART))) as chart:
        files = chart.render({"watch": watch}, name="muster", namespace="muster")
    (text,) = [
        each["data"]["plugin.yaml"]
        for file in files.values()
        for each in yaml.safe_load_all(file)
        if each and "plugin.yaml" in each.get("data", {})
    ]
    assert yaml.safe_load(text) == {"apiVersion": "muster.dev/v1", "watch": watch}


def test_settings_that_are_given_are_the_settings_that_are_deployed() -> None:
    given = {"settings": {"labeler": {"mode": "apply"}}, "image": {"tag": "1.2.3"}}
    with contextlib.closing(helm.Chart.load(str(CHART))) as chart:
        files = chart.render(given, name="muster", namespace="muster")
    text = "".join(files.values())
    assert "mode: apply" in text
    assert "mode: suggest" not in text
    assert 'image: "muster:1.2.3"' in text
