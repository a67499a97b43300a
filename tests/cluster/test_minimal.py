"""docs/install.md followed word for word: the minimal overlay works."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.worlds import manifests, real_cluster
from tests.worlds.real_cluster import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

FUSE = "smarter-devices/fuse"


@pytest.fixture(scope="module")
def before(cluster: real_cluster.Cluster) -> dict[str, Any]:
    return cluster.snapshot()


@pytest.fixture(scope="module")
def printed(
    cluster: real_cluster.Cluster, before: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    assert before["objects"]
    folder = tmp_path_factory.mktemp("minimal")
    (folder / "muster").symlink_to(manifests.ROOT)
    blocks = real_cluster.documented("install.md", "## In a cluster")
    script = "\n".join(blocks[:3])
    assert "apply -k my-muster" in script
    yield cluster.shell(real_cluster.with_our_image(script), folder)
    cluster.rest()


def test_the_last_command_shows_the_devices(cluster: real_cluster.Cluster, printed: str) -> None:
    assert printed.splitlines()[-1].split() == [cluster.node, "20"]


def test_every_service_becomes_ready(cluster: real_cluster.Cluster, printed: str) -> None:
    assert printed
    for workload in ("statefulset/muster-nats", "deployment/muster-health",
                     "deployment/muster-labeler", "deployment/muster-notifier"):  # fmt: skip
        cluster.good("-n", "muster", "rollout", "status", workload, "--timeout=120s")


def test_a_pod_that_asks_for_the_device_has_it(cluster: real_cluster.Cluster, printed: str) -> None:
    assert printed
    limits = {"resources": {"limits": {FUSE: "1"}}}
    container = {
        "name": "main",
        "image": real_cluster.BUSYBOX,
        "command": ["ls", "/dev/fuse"],
        **limits,
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "uses-fuse", "namespace": "default"},
        "spec": {"restartPolicy": "Never", "containers": [container]},
    }
    cluster.good("create", "-f", "-", given=pod)
    until(
        lambda: cluster.get("pod", "uses-fuse")["status"]["phase"] in {"Succeeded", "Failed"},
        "the pod ends",
    )
    assert cluster.good("logs", "uses-fuse") == "/dev/fuse\n"
    cluster.good("delete", "pod", "uses-fuse")
