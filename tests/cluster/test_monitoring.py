"""The component monitoring: the Prometheus operator's own definitions take its objects."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from scripts.cluster import layout
from tests.worlds import real_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

KINDS: Final = ("podmonitors", "prometheusrules")


def _definitions() -> list[Path]:
    go = shutil.which("go")
    if go is None:
        pytest.skip("Go is missing, which gets the definitions of the Prometheus operator")
    module = layout.TOOLS / "monitoring"
    done = subprocess.run(
        [go, "mod", "download", "-json"], cwd=module, capture_output=True, text=True, check=True
    )
    folder = Path(json.loads(done.stdout)["Dir"]) / "example/prometheus-operator-crd"
    return [folder / f"monitoring.coreos.com_{kind}.yaml" for kind in KINDS]


@pytest.fixture
def monitored(cluster: real_cluster.Cluster) -> Iterator[real_cluster.Cluster]:
    names = [f"{kind}.monitoring.coreos.com" for kind in KINDS]
    try:
        for file in _definitions():
            cluster.good("create", "-f", str(file))
        cluster.good("wait", "crd", *names, "--for=condition=Established")
        yield cluster
    finally:
        cluster.good("delete", "crd", *names, "--ignore-not-found")


def test_every_object_is_taken(monitored: real_cluster.Cluster, tmp_path: Path) -> None:
    monitored.prepare(tmp_path, more={"components": ["../muster/k8s/components/monitoring"]})
    lines = monitored.shell("kubectl apply -k my-muster", tmp_path).splitlines()
    # of Pod Security, about the plugin
    lines = [line for line in lines if not line.startswith("Warning: would violate PodSecurity")]
    assert [line for line in lines if not line.endswith(" created")] == []
    taken = {line.split()[0] for line in lines}
    objects = {
        "podmonitor.monitoring.coreos.com/muster",
        "prometheusrule.monitoring.coreos.com/muster",
        "configmap/muster-dashboard",
    }
    assert objects <= taken
    assert monitored.shell("kubectl diff -k my-muster", tmp_path) == ""
    rules = monitored.get("prometheusrule", "muster", "-n", "muster")["spec"]["groups"]
    assert sum(len(group["rules"]) for group in rules) > 0
