"""`muster check` on objects that a real cluster made: it reports no false faults."""

import functools
import json
import shlex
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.worlds.real_cluster import BUSYBOX, Cluster, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

NODE: Final = "muster-test-check"
LEFT: Final = "left.example.com/fuse"
USED: Final = "used.example.com/fuse"
ABSENT: Final = "absent.example.com/fuse"
RESOURCES: Final = {LEFT: "0", "nvidia.com/gpu": "0", USED: "1"}


@pytest.fixture(scope="module")
def checked(cluster: Cluster) -> Iterator[Cluster]:
    """Yield the cluster with a copy of its node, resources left by plugins, and three pods."""
    made = cluster.get("node", cluster.node)
    status = {**made["status"], "addresses": [], "images": []}
    for counts in ("capacity", "allocatable"):
        usual = {key: value for key, value in status[counts].items() if "/" not in key}
        status[counts] = {**usual, **RESOURCES}
    metadata = {"name": NODE, "labels": {"kubernetes.io/os": "linux", "muster-test": "check"}}
    copy = {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status}
    cluster.good("create", "-f", "-", "--field-manager=kubelet", given=copy)
    try:
        for name, resource in (("first", USED), ("second", USED), ("third", ABSENT)):
            cluster.good("create", "-f", "-", given=pod(name, resource))
            # the first must have the only device before the second asks
            until(functools.partial(decided, cluster, name), f"the scheduler has seen {name}")
        yield cluster
    finally:
        names = [f"muster-test-{name}" for name in ("first", "second", "third")]
        cluster.good("delete", "pod", *names, "--grace-period=0", "--force", "--ignore-not-found")
        cluster.good("delete", "node", NODE)


def pod(name: str, resource: str) -> dict[str, Any]:
    """Return a pod that requests a device and tolerates a node without a kubelet."""
    container = {"name": "c", "image": BUSYBOX, "resources": {"limits": {resource: "1"}}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"muster-test-{name}", "namespace": "default"},
        "spec": {
            "containers": [container],
            "nodeSelector": {"muster-test": "check"},
            "tolerations": [{"operator": "Exists"}],
        },
    }


def decided(cluster: Cluster, name: str) -> bool:
    """Return whether the scheduler has assigned a pod to a node, or reported why it cannot."""
    conditions = cluster.get("pod", f"muster-test-{name}")["status"].get("conditions", [])
    return any(condition["type"] == "PodScheduled" for condition in conditions)


def findings(cluster: Cluster, topic: str, *, expect: int = 0) -> list[dict[str, Any]]:
    report = json.loads(cluster.muster("check", topic, "--json", expect=expect))
    return [entry for entry in report["findings"] if "muster-test-" in entry["object"]]


def test_a_resource_that_a_plugin_left_behind_is_no_fault(checked: Cluster) -> None:
    (left,) = [entry for entry in findings(checked, "fuse") if entry["object"] == NODE]
    message = (
        f"{LEFT} is left over from a plugin that is gone: no node offers it, and no pod requests it"
    )
    assert (left["id"], left["severity"], left["message"]) == ("FUSE008", "info", message)
    assert shlex.split(left["fix"]["command"])[5:8] == ["patch", "node", NODE]


def test_a_gpu_resource_that_a_plugin_left_behind_makes_no_gpu_node(checked: Cluster) -> None:
    report = json.loads(checked.muster("check", "gpu", "--json"))
    assert (report["checked"]["gpuNodes"], report["findings"]) == (0, [])


def test_a_pod_that_waits_for_a_resource_in_use_is_no_fault_of_an_autoscaler(
    checked: Cluster,
) -> None:
    listed = findings(checked, "autoscaler", expect=1)
    message = f"pending on {ABSENT}: no node offers it, and autoscalers may not support it"
    said = [(entry["id"], entry["object"], entry["message"]) for entry in listed]
    assert said == [("AS001", "default/muster-test-third", message)]


def test_the_command_that_forgets_a_resource_does(checked: Cluster) -> None:
    (left,) = [entry for entry in findings(checked, "fuse") if entry["object"] == NODE]
    checked.good(*shlex.split(left["fix"]["command"])[1:])
    assert [entry for entry in findings(checked, "fuse") if entry["object"] == NODE] == []
    assert LEFT not in checked.get("node", NODE)["status"]["capacity"]
