"""What the labeler does, the admission policy lets it do; and nothing else."""

import copy
import datetime as dt
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from muster import vocabulary
from muster.vocabulary import Verdict
from muster_labeler import model
from muster_labeler.naming import node_labels, sources
from muster_labeler.service import decision_publisher
from tests.worlds import admission_policy
from tests.worlds import labeler_cluster as clusters
from tests.worlds.labeler_cluster import KEY, Cluster, node

DO = {"doks.digitalocean.com/gpu-model": "h100"}
NOW = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
APPLY = "application/apply-patch+yaml"


@pytest.fixture
def here(tmp_path: pathlib.Path) -> Iterator[Cluster]:
    with clusters.cluster(tmp_path) as cluster:
        yield cluster


def judge(here: Cluster, verdict: Verdict) -> None:
    metadata = here.node("a")["metadata"]
    wanted = decision_publisher.condition_of({"device-plugin": verdict})
    body = decision_publisher.condition_patch("a", metadata["uid"], wanted, at=NOW)
    path = f"/api/v1/nodes/a/status?fieldManager={model.FIELD_MANAGER}"
    here.send("PATCH", path, body, APPLY)


def test_what_the_labeler_does_is_allowed(here: Cluster) -> None:
    here.put(node("a", labels=DO))
    sights = [here.node("a")]
    here.run("label-gpus", "--apply", "--yes")
    sights.append(here.node("a"))
    here.apply("a", {KEY: "h100", "muster.dev/accelerator": "h100", "nvidia.com/gpu.count": "8"})
    sights.append(here.node("a"))
    here.run("unlabel-gpus", "--yes")
    sights.append(here.node("a"))
    assert [admission_policy.denied(*pair) for pair in itertools.pairwise(sights)] == [[]] * 3


def test_every_label_of_every_set_is_allowed() -> None:
    mig = vocabulary.MigDevice(uuid="MIG-0", profile="1g.5gb", gi=1, ci=0, memory_mib=4864)
    gpu = vocabulary.Gpu(uuid="GPU-0", product="NVIDIA A100-SXM4-40GB", memory_mib=40960)
    parted = msgspec.structs.replace(gpu, uuid="GPU-1", mig_enabled=True, mig=(mig,), vgpu=False)
    node_ = vocabulary.GpuNode(
        gpus=(gpu, parted),
        driver_version="550.54.14",
        cuda_version="12.4",
        mig_strategy="mixed",
        machine="m",
    )
    kinds = {sources.Product("NVIDIA A100-SXM4-40GB", 40960): 2}
    wanted = node_labels.wanted_labels(list(node_labels.LabelSet), "a100", kinds=kinds, gpus=node_)
    assert {"nvidia.com/mps.capable", "nvidia.com/mig-1g.5gb.count", KEY} <= wanted.keys()
    bare: dict[str, Any] = {"metadata": {"name": "a"}, "spec": {}, "status": {}}
    full = {**bare, "metadata": {"name": "a", "labels": wanted}}
    assert (admission_policy.denied(bare, full), admission_policy.denied(full, bare)) == ([], [])


def test_the_condition_is_allowed_as_it_comes_and_as_it_changes(here: Cluster) -> None:
    here.put(node("a"))
    sights = [here.node("a")]
    for verdict in (Verdict.HEALTHY, Verdict.PLUGIN_DOWN):
        judge(here, verdict)
        sights.append(here.node("a"))
    states = [[(c["type"], c["status"]) for c in sight["status"]["conditions"]] for sight in sights]
    assert states == [
        [("Ready", "True")],
        [("Ready", "True"), (model.CONDITION, "True")],
        [("Ready", "True"), (model.CONDITION, "False")],
    ]
    pairs = itertools.pairwise(sights)
    assert [admission_policy.denied(*pair, subresource="status") for pair in pairs] == [[]] * 2


READY = {"type": "Ready", "status": "True"}
KUBECTL = {
    "manager": "kubectl",
    "operation": "Update",
    "fieldsV1": {"f:metadata": {"f:labels": {"f:team": {}}}},
}
OLD: dict[str, Any] = {
    "metadata": {
        "name": "a",
        "managedFields": [KUBECTL],
        "labels": {"team": "x", KEY: "l4"},
        "annotations": {"note": "y"},
    },
    "spec": {"providerID": "aws:///z/i"},
    "status": {
        "capacity": {"nvidia.com/gpu": "8"},
        "conditions": [READY],
        "nodeInfo": {"kernelVersion": "6.1"},
    },
}
LABELS = "the labeler may only change accelerator labels"
ANNOTATIONS = "the labeler may only change the annotation muster.dev/label-provenance"
OWNERS = "the labeler may not change what others own"
CONDITIONS = "the labeler may only write the condition DevicePluginHealthy"
STATUS = "the labeler may not change a node's status except its own condition"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("metadata.labels", {"team": "z", KEY: "l4"}, LABELS),
        ("metadata.labels", {KEY: "l4"}, LABELS),
        ("metadata.labels", None, LABELS),
        ("metadata.labels", {"team": "x", "cloud.google.com/gke-accelerator": "l4"}, LABELS),
        ("metadata.labels", {"team": "x", KEY: "l4", "nvidia.com/gpu": "8"}, LABELS),
        ("metadata.labels", {"team": "x", KEY: "l4", "nvidia.com/gpu-driver": "8"}, LABELS),
        ("metadata.labels", {"team": "x", KEY: "L4"}, LABELS),
        ("metadata.labels", {"team": "x", KEY: "l4", "muster.dev/other": "x"}, LABELS),
        ("metadata.labels", {"team": "x", "nvidia.com/gpu.deploy.driver": "false"}, LABELS),
        ("metadata.labels", {"team": "x", "nvidia.com/mig.config": "all-disabled"}, LABELS),
        ("metadata.labels", {"team": "x", "nvidia.com/gpu.workload.config": "vm-vgpu"}, LABELS),
        ("metadata.labels", {"team": "x", "nvidia.com/mig-1g.5gb.count": "x"}, LABELS),
        ("metadata.annotations", {"note": "y", "muster.dev/fuse": "true"}, ANNOTATIONS),
        ("metadata.annotations", {"note": "y", model.PROVENANCE: "x" * 4097}, ANNOTATIONS),
        ("metadata.managedFields", None, OWNERS),
        ("metadata.managedFields", [], OWNERS),
        ("metadata.managedFields", [{"manager": "kubectl", "operation": "Update"}], OWNERS),
        (
            "metadata.managedFields",
            [KUBECTL, {"manager": "before-first-apply", "operation": "Update"}],
            OWNERS,
        ),
        ("metadata.annotations", {}, ANNOTATIONS),
        ("metadata.annotations", {"note": "y", "more": "z"}, ANNOTATIONS),
        (
            "metadata.finalizers",
            ["x"],
            "the labeler may not change a node's finalizers or owners",
        ),
        ("spec", {"unschedulable": True}, "the labeler may not change a node's spec"),
        (
            "spec.taints",
            [{"key": "x", "effect": "NoSchedule"}],
            "the labeler may not change a node's spec",
        ),
        ("status.capacity", {"nvidia.com/gpu": "16"}, STATUS),
        ("status.allocatable", {"nvidia.com/gpu": "16"}, STATUS),
        ("status.nodeInfo", None, STATUS),
        ("status.conditions", [{"type": "Ready", "status": "False"}], CONDITIONS),
        (
            "status.conditions",
            [READY, {"type": model.CONDITION, "status": "x"}],
            CONDITIONS,
        ),
        ("status.conditions", [], CONDITIONS),
        ("status.conditions", None, CONDITIONS),
    ],
)
@pytest.mark.parametrize("subresource", ["", "status"])
def test_every_other_change_of_a_node_is_refused(
    path: str, value: object, message: str, subresource: str
) -> None:
    new = copy.deepcopy(OLD)
    *above, last = path.split(".")
    tree = new
    for name in above:
        tree = tree[name]
    if value is None:
        del tree[last]
    else:
        tree[last] = value
    assert admission_policy.denied(OLD, new, subresource=subresource) == [message]
    assert admission_policy.denied(OLD, new, subresource=subresource, user="somebody else") == []


@pytest.mark.parametrize("manager", ["kubectl", None])
def test_nobody_is_named_in_whose_place_the_labeler_would_write(manager: str | None) -> None:
    new = copy.deepcopy(OLD)
    new["metadata"]["labels"][KEY] = "t4"
    assert admission_policy.denied(OLD, new) == []
    assert admission_policy.denied(OLD, new, manager=manager) == [
        "the labeler may only write as the field manager muster-labeler"
    ]


def test_a_node_without_owners_may_get_some() -> None:
    new = copy.deepcopy(OLD)
    new["metadata"]["managedFields"] = [
        {**KUBECTL, "manager": "before-first-apply"},
        {**KUBECTL, "manager": model.FIELD_MANAGER, "operation": "Apply"},
    ]
    old = copy.deepcopy(OLD)
    del old["metadata"]["managedFields"]
    assert admission_policy.denied(old, new) == []


@pytest.mark.parametrize(
    ("operation", "old", "new", "subresource"),
    [
        ("CREATE", None, OLD, ""),
        ("DELETE", OLD, None, ""),
        ("UPDATE", OLD, OLD, "proxy"),
    ],
)
def test_nodes_are_neither_made_nor_removed_nor_reached(
    operation: str, old: dict[str, Any], new: dict[str, Any], subresource: str
) -> None:
    denials = admission_policy.denied(old, new, operation=operation, subresource=subresource)
    assert denials == ["the labeler may only patch nodes"]
