"""What Helm itself says of the chart, and of values that it must not take."""

import contextlib
from typing import Any, Final

import pytest

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


def test_settings_that_are_given_are_the_settings_that_are_deployed() -> None:
    given = {"settings": {"labeler": {"mode": "apply"}}, "image": {"tag": "1.2.3"}}
    with contextlib.closing(helm.Chart.load(str(CHART))) as chart:
        files = chart.render(given, name="muster", namespace="muster")
    text = "".join(files.values())
    assert "mode: apply" in text
    assert "mode: suggest" not in text
    assert 'image: "muster:1.2.3"' in text
