"""The admission policy allows what the labeler does, and nothing else."""

import asyncio
import collections
import copy
import datetime as dt
import itertools
import pathlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import pytest

from muster import vocabulary
from muster.kubernetes import api as kubernetes_api
from muster.kubernetes import lease
from muster.vocabulary import Verdict
from muster_labeler import model
from muster_labeler.kubernetes import cluster_api, projection
from muster_labeler.naming import node_labels, sources
from muster_labeler.service import decision_publisher, decisions
from tests.worlds import admission_policy, manifests
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
OUR_CONDITION = {"type": model.CONDITION, "status": "True", "reason": "x", "message": "x"}


def ours(fields: object) -> list[dict[str, Any]]:
    """Return the managed fields of the node with some of the labeler's own."""
    entry = {"manager": model.FIELD_MANAGER, "operation": "Update", "fieldsV1": fields}
    return [KUBECTL, entry]


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
SIZES = (
    "the labeler may only write one condition DevicePluginHealthy, with a message of at most 1024 "
    "characters and a reason of at most 128"
)
FIELDS = "the labeler may not manage fields that it does not write"
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
        ("status.conditions", [READY, {**OUR_CONDITION, "message": "x" * 1025}], SIZES),
        ("status.conditions", [READY, {**OUR_CONDITION, "reason": "x" * 129}], SIZES),
        ("status.conditions", [READY, OUR_CONDITION, OUR_CONDITION], SIZES),
        ("metadata.managedFields", ours({"f:spec": {}}), FIELDS),
        ("metadata.managedFields", ours({"f:metadata": {"f:finalizers": {}}}), FIELDS),
        (
            "metadata.managedFields",
            ours({"f:metadata": {"f:labels": {f"f:{number}": {} for number in range(513)}}}),
            FIELDS,
        ),
        (
            "metadata.managedFields",
            ours({"f:metadata": {"f:labels": {f"f:{'x' * 127}": {}}}}),
            FIELDS,
        ),
        (
            "metadata.managedFields",
            ours({"f:status": {"f:conditions": {"k": {"f:type": {"f:x": {}}}}}}),
            FIELDS,
        ),
        ("metadata.managedFields", [KUBECTL, *ours({})[1:] * 5], FIELDS),
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


@pytest.mark.parametrize("verdict", list(Verdict))
def test_the_longest_condition_is_allowed(verdict: Verdict) -> None:
    plugins = vocabulary.PLUGINS_MAX + vocabulary.WATCHED_MAX
    wanted = decision_publisher.condition_of({f"{n}{'é' * 253}": verdict for n in range(plugins)})
    assert len(wanted.message) == decision_publisher.MESSAGE_MAX
    new = copy.deepcopy(OLD)
    new["status"]["conditions"].append(msgspec.to_builtins(wanted))
    assert admission_policy.denied(OLD, new, subresource="status") == []


CONFIG_MAPS = "/api/v1/namespaces/muster/configmaps"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/muster/leases"
EVENTS = "/api/v1/namespaces/default/events"


async def write_most(kubeconfig: str, look: Callable[[], Awaitable[None]]) -> None:
    """Write every object that the labeler writes, except nodes, with the longest content."""
    async with await kubernetes_api.find(kubeconfig=kubeconfig, context=None) as api:
        records = decision_publisher.ClusterRecords(
            api, cluster_api.WritePace(1000), namespace="muster", timeout_s=10
        )
        kinds = {sources.Product("x" * 300, number): 8 for number in range(32)}
        names = [f"{number:05}{'x' * 248}" for number in range(3000)]
        assert await records.write_inventory(dict.fromkeys(names, kinds), frozenset(names))
        await look()
        assert await records.write_inventory({"a": kinds}, frozenset())
        named = model.Node(name="x" * 253, uid="x" * 36)
        for action in decisions.Action:
            labels = {f"k{number}": "v" * 63 for number in range(30)}
            await records.write_event(named, decisions.Decision(action, labels, "\0" * 4096))
        election = lease.Lease(
            api, namespace="muster", name="muster-labeler", duration_s=15, on_change=lambda *_: None
        )
        async with election:
            async for term in election.terms():
                if term is not None:
                    break
            await look()
        await look()


def test_everything_else_that_the_labeler_writes_is_allowed(here: Cluster) -> None:
    here.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "muster"}})
    sights: list[dict[str, Any]] = []

    async def look() -> None:
        listed = [
            (await asyncio.to_thread(here.send, "GET", path))
            for path in (CONFIG_MAPS, LEASES, EVENTS)
        ]
        sights.append(
            {
                each["metadata"]["name"]: {"kind": items["kind"].removesuffix("List"), **each}
                for items in listed
                for each in items["items"]
            }
        )

    asyncio.run(write_most(here.kubeconfig, look))
    (longest,) = sights[0].values()
    length = len(longest["data"][projection.INVENTORY_KEY])
    assert 0.8 * projection.INVENTORY_BYTES_MAX < length <= projection.INVENTORY_BYTES_MAX
    kinds = collections.Counter(each["kind"] for each in sights[-1].values())
    assert kinds == {"ConfigMap": 1, "Event": 4, "Lease": 1}
    messages = {e["message"] for e in sights[-1].values() if e["kind"] == "Event"}
    assert {len(message) for message in messages} == {decision_publisher.MESSAGE_MAX}
    changes = [({}, sights[0]), *itertools.pairwise(sights)]
    denials = [
        admission_policy.denied_object(new, old=before.get(name))
        for before, after in changes
        for name, new in after.items()
    ]
    assert denials == [[]] * len(denials)


CONFIG_MAP: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "muster-inventory", "namespace": "muster"},
    "data": {"inventory.json": "{}"},
}
LEASE: dict[str, Any] = {
    "apiVersion": "coordination.k8s.io/v1",
    "kind": "Lease",
    "metadata": {"name": "muster-labeler", "namespace": "muster"},
    "spec": {"holderIdentity": "x", "leaseDurationSeconds": 15},
}
EVENT: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Event",
    "metadata": {"name": "muster-labeler.x", "namespace": "default"},
    "involvedObject": {"kind": "Node", "name": "a"},
    "reason": "x",
    "message": "x",
}
NAMES = "the labeler may only write the ConfigMap muster-inventory, its own Lease, and Events"
METADATA = "the labeler may not write labels, annotations, finalizers or owners of its objects"
INVENTORY = (
    "the ConfigMap muster-inventory may only have the key inventory.json, with at most 900000 "
    "characters"
)
HOLDER = "the labeler's Lease may only have a holder of at most 256 characters, and its times"
SHORT = (
    "an Event of the labeler may only have a message of at most 1024 characters, and short fields"
)


def with_metadata(whole: dict[str, Any], **more: object) -> dict[str, Any]:
    """Return an object with more metadata."""
    return {**whole, "metadata": {**whole["metadata"], **more}}


def long_fields(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Return managed fields in which a manager claims these fields."""
    return [{"manager": "x", "operation": "Update", "fieldsV1": fields}]


WHOLE = (CONFIG_MAP, LEASE, EVENT)


@pytest.mark.parametrize(
    ("whole", "changed", "message"),
    [
        (CONFIG_MAP, {"data": {"ca.crt": "x"}}, INVENTORY),
        (CONFIG_MAP, {"data": {"inventory.json": "x" * 900_001}}, INVENTORY),
        (CONFIG_MAP, {"binaryData": {"inventory.json": "eA=="}}, INVENTORY),
        (CONFIG_MAP, {"immutable": True}, INVENTORY),
        (LEASE, {"spec": {"holderIdentity": "x" * 257}}, HOLDER),
        (LEASE, {"spec": {"preferredHolder": "x"}}, HOLDER),
        (EVENT, {"message": "x" * 1025}, SHORT),
        (EVENT, {"reason": "x" * 129}, SHORT),
        (EVENT, {"type": "x" * 129}, SHORT),
        (EVENT, {"reportingInstance": "x" * 129}, SHORT),
        (EVENT, {"involvedObject": {"fieldPath": "x" * 254}}, SHORT),
        (EVENT, {"source": {"component": "x" * 254}}, SHORT),
        (EVENT, {"related": {"name": "x"}}, SHORT),
        (EVENT, {"action": "x"}, SHORT),
    ],
)
def test_other_content_of_objects_is_refused(
    whole: dict[str, Any], changed: dict[str, Any], message: str
) -> None:
    new = {**whole, **changed}
    assert admission_policy.denied_object(whole) == []
    assert admission_policy.denied_object(new) == [message]
    assert admission_policy.denied_object(new, old=whole) == [message]
    assert admission_policy.denied_object(new, user="somebody else") == []


@pytest.mark.parametrize("whole", WHOLE)
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("labels", {"a": "b"}, METADATA),
        ("annotations", {"a": "b"}, METADATA),
        ("finalizers", ["a/b"], METADATA),
        ("ownerReferences", [{"name": "x"}], METADATA),
        ("managedFields", long_fields({f"f:{'x' * 31}": {}}), FIELDS),
        ("managedFields", long_fields({"f:a": {f"f:{'x' * 31}": {}}}), FIELDS),
        ("managedFields", long_fields({"f:a": {"f:b": {"f:c": {}}}}), FIELDS),
        ("managedFields", long_fields({f"f:{number}": {} for number in range(17)}), FIELDS),
        ("managedFields", long_fields({"f:a": {f"f:{n}": {} for n in range(9)}}), FIELDS),
    ],
)
def test_other_metadata_of_objects_is_refused_but_stays_where_it_is(
    whole: dict[str, Any], name: str, value: object, message: str
) -> None:
    new = with_metadata(whole, **{name: value})
    assert admission_policy.denied_object(new) == [message]
    assert admission_policy.denied_object(new, old=whole) == [message]
    assert admission_policy.denied_object(new, old=new) == []


def test_an_object_has_only_so_many_managers() -> None:
    for count, denials in ((16, []), (17, [FIELDS])):
        new = with_metadata(LEASE, managedFields=long_fields({}) * count)
        assert admission_policy.denied_object(new) == denials


@pytest.mark.parametrize(
    ("whole", "name"),
    [
        (CONFIG_MAP, "muster-nats-ca"),
        (CONFIG_MAP, "muster-accounts"),
        (CONFIG_MAP, "muster-labeler"),
        (LEASE, "muster-health"),
        (LEASE, "muster-inventory"),
        (LEASE, "labeler"),
    ],
)
def test_objects_of_other_names_are_refused(whole: dict[str, Any], name: str) -> None:
    new = with_metadata(whole, name=name)
    assert admission_policy.denied_object(new) == [NAMES]
    assert admission_policy.denied_object(new, user="somebody else") == []


def test_the_inventory_may_get_field_managers_if_it_had_none() -> None:
    (entry,) = long_fields({"f:metadata": {"f:labels": {"f:a": {}}}})
    managed = [{**entry, "manager": "before-first-apply"}]
    new = with_metadata(CONFIG_MAP, managedFields=managed)
    assert admission_policy.denied_object(new, old=CONFIG_MAP) == []
    old = with_metadata(CONFIG_MAP, managedFields=long_fields({}))
    assert admission_policy.denied_object(new, old=old) == [FIELDS]


def test_the_lease_has_the_name_that_the_chart_gives_it() -> None:
    rendered = manifests.of_chart({"fullnameOverride": "gpus"}, namespace="here")
    by_name = {(each["kind"], each["metadata"]["name"]): each for each in rendered}
    policy = by_name["ValidatingAdmissionPolicy", "gpus-labeler-objects"]
    pod = by_name["Deployment", "gpus-labeler"]["spec"]["template"]["spec"]
    env = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    user = f"system:serviceaccount:here:{pod['serviceAccountName']}"
    named = with_metadata(LEASE, name=env["MUSTER_LABELER__LEASE__NAME"])
    denials = [
        admission_policy.denied_object(each, user=user, policy=policy)
        for each in (named, CONFIG_MAP, LEASE)
    ]
    assert denials == [[], [], [NAMES]]
