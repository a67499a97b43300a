"""`muster unlabel-gpus --objects` removes our condition from a node, and nothing of the kubelet's.

When server-side apply removes the fields of a manager, it may also remove fields beside them that
have no owner. A kubelet owns only those fields of a node's status that it has changed since it
registered the node.
"""

import datetime as dt
import json
from collections.abc import Iterator
from typing import Any, Final

import pytest

from muster import vocabulary
from muster_labeler import model
from muster_labeler.service import decision_publisher
from tests.worlds.real_cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

COPY: Final = "muster-test-registered"


@pytest.fixture(params=["node", "registered"])
def node(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[str]:
    """Yield the name of the kubelet's node, or of a copy as before its first status update."""
    if request.param == "node":
        yield cluster.node
        return
    made = cluster.get("node", cluster.node)
    kept = ("kubernetes.io/os", "kubernetes.io/arch")
    labels = {key: made["metadata"]["labels"][key] for key in kept}
    copy = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": COPY, "labels": labels}}
    status = {**made["status"], "addresses": [], "images": []}
    cluster.good("create", "-f", "-", "--field-manager=kubelet", given={**copy, "status": status})
    yield COPY
    cluster.good("delete", "node", COPY)


def kubelets(cluster: Cluster, node: str) -> dict[str, Any]:
    """Return a node's capacity and its conditions, without ours and without heartbeat times."""
    status = cluster.get("node", node)["status"]
    conditions = [
        {key: value for key, value in condition.items() if key != "lastHeartbeatTime"}
        for condition in status["conditions"]
        if condition["type"] != model.CONDITION
    ]
    return {"capacity": status["capacity"], "conditions": conditions}


def test_our_condition_goes_and_every_other_stays(cluster: Cluster, node: str) -> None:
    before = kubelets(cluster, node)
    wanted = decision_publisher.condition_of({"device-plugin": vocabulary.Verdict.HEALTHY})
    uid = cluster.get("node", node)["metadata"]["uid"]
    ours = decision_publisher.condition_patch(node, uid, wanted, at=dt.datetime.now(dt.UTC))
    apply = ("apply", "--server-side", "--subresource=status", "-f", "-")
    cluster.good(*apply, f"--field-manager={model.FIELD_MANAGER}", given=ours)
    assert types(cluster, node) == [c["type"] for c in before["conditions"]] + [model.CONDITION]
    cluster.muster("unlabel-gpus", "--objects", "--yes")
    assert kubelets(cluster, node) == before
    assert types(cluster, node) == [c["type"] for c in before["conditions"]]


def types(cluster: Cluster, node: str) -> list[str]:
    """Return the types of a node's conditions."""
    listed = json.loads(cluster.good("get", "node", node, "-o", "json"))
    return [condition["type"] for condition in listed["status"].get("conditions", [])]
