"""docs/upgrade.md, Uninstall, word for word: the cluster is as it was before, its nodes too."""

from collections.abc import Iterator
from typing import Any, Final

import pytest

from muster_labeler import model
from muster_labeler.naming import accelerators
from tests.worlds import real_cluster
from tests.worlds.real_cluster import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SETTINGS: Final = {
    "plugin": {
        "resources": [
            {
                "name": "smarter-devices/fuse",
                "groups": [{"devices": [{"path": "/dev/fuse"}], "count": 20}],
            }
        ],
        "simulated_gpus": {"count": 2, "product": "NVIDIA L4", "memory_mib": 23_034},
    },
    "labeler": {"mode": "apply", "condition": True, "simulated": True},
}
"""A labeler that writes all it can on the node: labels, annotation and condition."""


@pytest.fixture(scope="module")
def before(cluster: real_cluster.Cluster) -> dict[str, Any]:
    return cluster.snapshot()


@pytest.fixture(scope="module")
def labelled(
    cluster: real_cluster.Cluster, before: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[real_cluster.Cluster]:
    assert before["objects"]
    cluster.install(tmp_path_factory.mktemp("uninstall"), SETTINGS)

    def is_marked() -> bool:
        node = cluster.get("node", cluster.node)
        conditions = [condition["type"] for condition in node["status"]["conditions"]]
        return (
            node["metadata"]["labels"].get(accelerators.SKYPILOT) == "l4"
            and model.PROVENANCE in node["metadata"]["annotations"]
            and model.CONDITION in conditions
        )

    until(is_marked, "the labeler has written label, annotation and condition", within_s=90)
    yield cluster
    cluster.rest()
    # a node that had GPUs, be they simulated, would disturb other tests
    cluster.renew_node()


def test_the_documented_commands_leave_the_cluster_as_it_was(
    labelled: real_cluster.Cluster, before: dict[str, Any], tmp_path: Any
) -> None:
    show, remove = real_cluster.block("upgrade.md", "muster uninstall").splitlines()
    with_muster = labelled.snapshot()
    shown = labelled.shell(show, tmp_path)
    assert shown.splitlines()[:2] == [
        "namespace muster, with everything in it",
        "labels, annotations and conditions of muster on 1 node",
    ]
    assert labelled.snapshot() == with_muster
    printed = labelled.shell(remove, tmp_path)
    assert labelled.snapshot() == before
    assert "remains: volume volume-" in printed
    assert labelled.shell(remove, tmp_path) == "muster is not installed\n"
