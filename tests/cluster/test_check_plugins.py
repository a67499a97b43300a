"""`muster check plugins` on objects that a real API server accepted and completed."""

import json
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.worlds.real_cluster import BUSYBOX, Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

LOST: Final = "muster-test-lost"
HEALTHY: Final = "muster-test-healthy"
GPU: Final = "nvidia.com/gpu"
DRIVER: Final = "gpu.nvidia.com"
OLD: Final = "2026-01-01T00:00:00Z"


@pytest.fixture(scope="module")
def checked(cluster: Cluster) -> Iterator[Cluster]:
    """Yield the cluster with two nodes, each with a plugin's pod; one pool name is on both."""
    names = (LOST, HEALTHY)
    try:
        for name in names:
            cluster.good("create", "-f", "-", "--field-manager=kubelet", given=node(cluster, name))
            cluster.good("create", "-f", "-", given=pod(name))
            ready = {"type": "Ready", "status": "True", "lastTransitionTime": OLD}
            status = json.dumps({"status": {"phase": "Running", "conditions": [ready]}})
            cluster.good("patch", "pod", name, "--subresource=status", "--type=merge", "-p", status)
            cluster.good("create", "-f", "-", given=resource_slice(name))
        cluster.good("create", "-f", "-", given=device_class())
        yield cluster
    finally:
        cluster.good("delete", "pod", *names, "--grace-period=0", "--force", "--ignore-not-found")
        cluster.good("delete", "resourceslice", *names, "--ignore-not-found")
        cluster.good("delete", "deviceclass", "muster-test", "--ignore-not-found")
        cluster.good("delete", "node", *names, "--ignore-not-found")


def node(cluster: Cluster, name: str) -> dict[str, Any]:
    """Return a copy of the node with 8 GPUs, Ready for long; on `LOST`, none is allocatable."""
    status = cluster.get("node", cluster.node)["status"] | {"addresses": [], "images": []}
    for counts, amount in (("capacity", "8"), ("allocatable", "0" if name == LOST else "8")):
        usual = {key: value for key, value in status[counts].items() if "/" not in key}
        status[counts] = {**usual, GPU: amount}
    status["conditions"] = [{**each, "lastTransitionTime": OLD} for each in status["conditions"]]
    metadata = {"name": name, "labels": {"kubernetes.io/os": "linux"}}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status}


def pod(name: str) -> dict[str, Any]:
    """Return a pod on a node, with the label by which NVIDIA's plugin is recognized."""
    labels = {"name": "nvidia-device-plugin-ds"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": labels},
        "spec": {"nodeName": name, "containers": [{"name": "c", "image": BUSYBOX}]},
    }


def resource_slice(name: str) -> dict[str, Any]:
    """Return a ResourceSlice whose pool has the same name on all nodes."""
    pool = {"name": "gpus", "generation": 1, "resourceSliceCount": 2}
    spec = {"driver": DRIVER, "nodeName": name, "pool": pool, "devices": [{"name": "gpu-0"}]}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": spec,
    }


def device_class() -> dict[str, Any]:
    """Return a DeviceClass for the plugin's extended resource."""
    selector = {"cel": {"expression": f'device.driver == "{DRIVER}"'}}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": "muster-test"},
        "spec": {"selectors": [selector], "extendedResourceName": GPU},
    }


def test_a_lost_plugin_and_a_double_offer_are_reported(checked: Cluster) -> None:
    report = json.loads(checked.muster("check", "plugins", "--json", expect=1))
    ours = (LOST, HEALTHY, DRIVER)
    said = [(each["id"], each["object"]) for each in report["findings"] if each["object"] in ours]
    # DRA006 is an error if the API server keeps extendedResourceName, otherwise a warning
    assert sorted(said) == [("DRA006", HEALTHY), ("DRA007", DRIVER), ("PLUG001", LOST)]
    assert report["checked"]["plugins"] >= 2  # ours, and perhaps the cluster's
    (lost,) = [each for each in report["findings"] if each["object"] == LOST]
    assert lost["evidence"][0] == f"{GPU}: 0 of 8 allocatable"


def test_all_includes_it(checked: Cluster) -> None:
    report = json.loads(checked.muster("check", "--json", expect=1))
    assert ("PLUG001", LOST) in [(each["id"], each["object"]) for each in report["findings"]]
