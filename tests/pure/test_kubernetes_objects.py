"""What muster reads from Kubernetes: objects, quantities, label selectors, node affinity."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.kubernetes import objects, scheduling

Kind = TypeVar("Kind")

ZONE = "topology.kubernetes.io/zone"
KINDS = [
    objects.Node,
    objects.Pod,
    objects.Workload,
    objects.ConfigMap,
    objects.Event,
    objects.Lease,
    scheduling.ResourceSlice,
]


def decoded(kind: type[Kind], tree: object) -> Kind:
    return msgspec.json.decode(json.dumps(tree), type=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_may_be_absent_or_unknown(kind: type[object]) -> None:
    assert decoded(kind, {"kind": "X", "unknown": {"a": [1]}}) == kind()


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_but_the_metadata_may_be_null(kind: type[msgspec.Struct]) -> None:
    names = [field.encode_name for field in msgspec.structs.fields(kind)]
    optional = {name: None for name in names if name not in {"metadata", "reason", "message"}}
    assert decoded(kind, optional) == kind()


def test_what_is_absent_is_empty() -> None:
    node, pod, lease, workload = objects.Node(), objects.Pod(), objects.Lease(), objects.Workload()
    assert (node.labels, node.annotations, node.taints, node.conditions) == ({}, {}, (), ())
    assert (node.capacity, node.allocatable, node.metadata.created_at) == ({}, {}, None)
    assert (pod.node_name, pod.phase, pod.conditions, pod.container_statuses) == ("", "", (), ())
    assert (lease.holder, lease.renewed_at) == ("", None)
    assert workload.pod_spec == objects.PodSpec()


def test_a_node_is_read_as_the_api_writes_it() -> None:
    tree = {
        "metadata": {
            "name": "a",
            "uid": "u",
            "resourceVersion": "7",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "deletionTimestamp": "2026-01-02T00:00:00Z",
            "labels": {ZONE: "z"},
        },
        "spec": {
            "providerID": "aws:///z/i-1",
            "unschedulable": True,
            "taints": [{"key": "gpu", "effect": "NoSchedule"}],
        },
        "status": {
            "capacity": {"nvidia.com/gpu": "8", "odd": 7},
            "allocatable": {"nvidia.com/gpu": "7"},
            "conditions": [{"type": "Ready", "status": "Unknown"}],
            "nodeInfo": {"containerRuntimeVersion": "containerd://2.0.1"},
        },
    }
    node = decoded(objects.Node, tree)
    assert node.metadata.created_at == datetime(2026, 1, 1, tzinfo=UTC)
    assert node.metadata.is_being_deleted
    assert node.spec is not None
    assert (node.spec.provider_id, node.spec.unschedulable) == ("aws:///z/i-1", True)
    assert node.taints == (objects.Taint(key="gpu", effect="NoSchedule"),)
    assert node.capacity == {"nvidia.com/gpu": "8", "odd": 7}
    assert node.allocatable == {"nvidia.com/gpu": "7"}
    assert node.status is not None
    assert node.status.node_info == objects.NodeInfo("containerd://2.0.1")
    ready = objects.condition(node.conditions, "Ready")
    assert ready == objects.Condition(type="Ready", status="Unknown")
    assert not objects.is_true(node.conditions, "Ready")
    assert objects.condition(node.conditions, "DiskPressure") is None


def test_a_condition_is_true_only_if_it_says_so() -> None:
    conditions = [objects.Condition("Ready", "True"), objects.Condition("Other", "False")]
    names = ("Ready", "Other", "Absent")
    assert [objects.is_true(conditions, name) for name in names] == [True, False, False]


@pytest.mark.parametrize(
    "text",
    [
        *(None, "", "yesterday", "9999-99-99T99:99:99Z", "2026-01-01"),
        *("0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59"),
    ],
)
def test_an_odd_time_is_none_and_costs_no_object(text: str | None) -> None:
    node = decoded(objects.Node, {"metadata": {"name": "a", "creationTimestamp": text}})
    assert (node.metadata.name, node.metadata.created_at) == ("a", None)


def test_a_time_has_a_zone_and_may_have_nanoseconds() -> None:
    assert objects.parse_time("2026-01-01T00:00:00.123456789Z") == datetime(
        2026, 1, 1, 0, 0, 0, 123456, tzinfo=UTC
    )
    assert objects.parse_time("2026-01-01T00:00:00") is None


def test_a_lease_was_renewed_when_the_api_server_noted_it_not_when_its_holder_says() -> None:
    owners = [
        {"time": "2026-01-02T00:00:00Z", "fieldsV1": {"f:metadata": {}}},
        {"time": "2026-01-01T00:00:00Z", "fieldsV1": {"f:spec": {"f:renewTime": {}}}},
    ]
    spec = {"renewTime": "1999-01-01T00:00:00.000000Z", "holderIdentity": "us"}
    lease = decoded(objects.Lease, {"metadata": {"managedFields": owners}, "spec": spec})
    assert (lease.holder, lease.renewed_at) == ("us", datetime(2026, 1, 1, tzinfo=UTC))
    lease = decoded(objects.Lease, {"spec": spec})
    assert lease.renewed_at == datetime(1999, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        (8, 8),
        ("5k", 5000),
        ("1500", 1500),
        ("1e3", 1000),
        ("1E3", 1000),
        ("1E", 10**18),
        ("1Ki", 1024),
        ("2G", 2 * 10**9),
        ("24Gi", 24 * 2**30),
        ("500m", 0),
        ("2500m", 2),
        ("-3", -3),
        (".5", 0),
        ("", None),
        ("x", None),
        ("1 k", None),
        ("1ki", None),
        ("9" * 30, None),
    ],
)
def test_a_quantity_is_read_in_every_way_kubernetes_writes_it(
    text: str | int, value: int | None
) -> None:
    assert scheduling.whole_quantity(text) == value
    assert scheduling.quantity_count(text) == max(0, value or 0)


@given(st.text(max_size=40) | st.from_regex(r"[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+|[a-zA-Z]*)"))
def test_what_is_no_quantity_is_none_and_no_error(text: str) -> None:
    value = scheduling.whole_quantity(text)
    assert value is None or isinstance(value, int)
    assert scheduling.quantity_count(text) >= 0


def requires(key: str, operator: str, *values: str) -> dict[str, object]:
    return {"key": key, "operator": operator, "values": values}


REQUIREMENTS = [
    (requires("gpu", "In", "a", "b"), {"gpu": "b"}, True),
    (requires("gpu", "In", "a", "b"), {}, False),
    (requires("gpu", "NotIn", "a"), {}, True),
    (requires("gpu", "NotIn", "a"), {"gpu": "a"}, False),
    (requires("gpu", "Exists"), {"gpu": ""}, True),
    (requires("gpu", "DoesNotExist"), {"gpu": ""}, False),
    (requires("gpu", "DoesNotExist"), {}, True),
    (requires("n", "Gt", "3"), {"n": "4"}, True),
    (requires("n", "Gt", "3"), {"n": "3"}, False),
    (requires("n", "Lt", "3"), {"n": "2"}, True),
    (requires("n", "Gt", "3"), {"n": "x"}, False),
    (requires("n", "Gt", "3"), {}, False),
    (requires("n", "Gt"), {"n": "4"}, False),
    (requires("n", "Near", "3"), {"n": "3"}, False),
]


@pytest.mark.parametrize(("requirement", "labels", "is_met"), REQUIREMENTS)
def test_a_requirement_holds_in_a_label_selector_as_in_a_node_affinity(
    requirement: Mapping[str, object], labels: Mapping[str, str], *, is_met: bool
) -> None:
    selector = decoded(objects.LabelSelector, {"matchExpressions": [requirement]})
    assert scheduling.matches(selector, labels) == is_met
    spec = affinity({"matchExpressions": [requirement]})
    assert scheduling.selects_node(spec, name="n", labels=labels) == is_met


def affinity(*terms: object) -> objects.PodSpec:
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return decoded(objects.PodSpec, {"affinity": {"nodeAffinity": required}})


A, B = requires("a", "Exists"), requires("b", "Exists")


@pytest.mark.parametrize(
    ("spec", "labels", "is_selected"),
    [
        (objects.PodSpec(), {}, True),
        (objects.PodSpec(node_selector={"gpu": "yes"}), {"gpu": "yes"}, True),
        (objects.PodSpec(node_selector={"gpu": "yes"}), {"gpu": "no"}, False),
        (affinity({"matchExpressions": [A]}, {"matchExpressions": [B]}), {"b": "1"}, True),
        (affinity({"matchExpressions": [A, B]}), {"b": "1"}, False),
        (affinity(), {}, False),
        (affinity({}), {}, False),
        (affinity({"matchFields": [requires("metadata.name", "In", "n")]}), {}, True),
        (affinity({"matchFields": [requires("metadata.name", "In", "other")]}), {}, False),
    ],
)
def test_a_pod_may_run_on_the_nodes_that_the_scheduler_would_choose(
    spec: objects.PodSpec, labels: Mapping[str, str], *, is_selected: bool
) -> None:
    assert scheduling.selects_node(spec, name="n", labels=labels) == is_selected


def test_the_labels_on_which_that_depends_are_those_that_are_named() -> None:
    spec = decoded(
        objects.PodSpec,
        {
            "nodeSelector": {"gpu": "yes"},
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [{"matchExpressions": [A, B]}, {}]
                    }
                }
            },
        },
    )
    assert scheduling.node_label_keys(spec) == {"gpu", "a", "b"}
    assert scheduling.node_label_keys(objects.PodSpec()) == frozenset()


def test_a_selector_is_written_as_a_query_has_it() -> None:
    tree = {
        "matchLabels": {"b": "2", "a": "1"},
        "matchExpressions": [
            requires("c", "In", "x", "y"),
            requires("d", "DoesNotExist"),
            requires("e", "Exists"),
            requires("f", "NotIn", "z"),
        ],
    }
    selector = decoded(objects.LabelSelector, tree)
    assert scheduling.selector_query(selector) == "a=1,b=2,c in (x,y),!d,e,f notin (z)"
    assert scheduling.selector_query(objects.LabelSelector()) == ""
    assert scheduling.matches(objects.LabelSelector(), {"any": "label"})
