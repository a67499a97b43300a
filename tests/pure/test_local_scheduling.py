"""The stand-in's scheduler: pods get nodes with free devices, or a condition with the reason."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.local.kubernetes import objects, resources, scheduling, tables, trees, writes

AT = "2026-11-23T20:00:00Z"
GPU = "nvidia.com/gpu"


def node(name: str, gpus: int, **spec: trees.Json) -> trees.Tree:
    """Return a node with GPUs."""
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "spec": spec,
        "status": {"allocatable": {GPU: str(gpus), "cpu": "2"}},
    }


def pod(name: str, gpus: trees.Json, **spec: trees.Json) -> trees.Tree:
    """Return a pod that requests GPUs."""
    container: trees.Tree = {"name": "main", "resources": {"limits": {GPU: gpus}}}
    return {"metadata": {"name": name}, "spec": {"containers": [container], **spec}}


def stored(*items: tuple[resources.Resource, trees.Tree]) -> objects.Store:
    """Return a store with these objects, including their status."""
    store = objects.Store(at=AT)
    for number, (resource, item) in enumerate(items):
        namespace = "default" if resource.namespaced else ""
        place = resources.Place(resource=resource, namespace=namespace)
        write = writes.Write(place=place, manager="t", at=AT, uid=f"uid-{number}", suffix="")
        name = trees.string_at(store.create(item, write), "metadata", "name")
        if "status" in item:
            status = resources.Place(resource=resource, name=name, subresource="status")
            to_status = writes.Write(place=status, manager="t", at=AT, uid="", suffix="")
            store.patch({"status": item["status"]}, writes.PatchFormat.MERGE, to_status)
    return store


def scheduled(store: objects.Store) -> dict[str, str]:
    """Schedule all pods; return the node of each, or why it has none."""
    scheduling.schedule(store, at=AT, ids=map(str, itertools.count()))
    outcome = {}
    for item in store.all(resources.PODS):
        conditions = trees.value_at(item, "status", "conditions")
        assert isinstance(conditions, list)
        assert isinstance(conditions[0], dict)
        name = trees.string_at(item, "spec", "nodeName")
        message = trees.string_at(conditions[0], "message")
        outcome[trees.string_at(item, "metadata", "name")] = name or message
    return outcome


def test_a_pod_gets_the_node_with_the_most_free_devices() -> None:
    nodes = [(resources.NODES, node(name, gpus)) for name, gpus in (("a", 2), ("b", 4), ("c", 4))]
    pods = [(resources.PODS, pod(f"p{number}", 3)) for number in range(3)]
    assert scheduled(stored(*nodes, *pods)) == {
        "p0": "b",
        "p1": "c",
        "p2": f"0/3 nodes are available: 3 Insufficient {GPU}.",
    }


def test_a_pod_that_waits_is_bound_once_a_device_is_free_and_is_said_to_wait_once() -> None:
    store = stored(
        (resources.NODES, node("a", 1)),
        (resources.PODS, pod("p", 1)),
        (resources.PODS, pod("q", 1)),
    )
    assert scheduled(store)["q"] == f"0/1 nodes are available: 1 Insufficient {GPU}."
    version = store.version
    assert scheduled(store)["p"] == "a"
    assert store.version == version, "the same decision is written once"
    first = resources.Place(resource=resources.PODS, namespace="default", name="p")
    store.delete(first, None, dry_run=False)
    assert scheduled(store) == {"q": "a"}
    events = [trees.string_at(event, "message") for event in store.all(resources.EVENTS)]
    assert events == [
        "Successfully assigned default/p to a",
        f"0/1 nodes are available: 1 Insufficient {GPU}.",
        "Successfully assigned default/q to a",
    ]


@pytest.mark.parametrize(
    ("spec", "toleration", "reason"),
    [
        ({"unschedulable": True}, None, "node(s) were unschedulable"),
        (
            {"taints": [{"key": "gpu", "value": "bad", "effect": "NoSchedule"}]},
            None,
            "node(s) had untolerated taint {gpu: bad}",
        ),
        (
            {"taints": [{"key": "gpu", "value": "bad", "effect": "NoSchedule"}]},
            {"key": "gpu", "operator": "Exists"},
            "",
        ),
        ({"taints": [{"key": "gpu", "effect": "PreferNoSchedule"}]}, None, ""),
    ],
)
def test_a_cordoned_or_tainted_node_is_left_out(
    spec: trees.Tree, toleration: trees.Tree | None, reason: str
) -> None:
    tolerations: trees.Json = [toleration] if toleration else []
    store = stored(
        (resources.NODES, node("a", 1, **spec)),
        (resources.PODS, pod("p", 1, tolerations=tolerations)),
    )
    expected = f"0/1 nodes are available: 1 {reason}." if reason else "a"
    assert scheduled(store) == {"p": expected}


def test_a_pod_goes_to_the_node_that_it_selects() -> None:
    nodes = [(resources.NODES, node(name, 1)) for name in ("a", "b")]
    select: trees.Tree = {"kubernetes.io/hostname": "b"}
    pods = [(resources.PODS, pod(name, 1, nodeSelector=select)) for name in ("p", "q")]
    assert scheduled(stored(*nodes, *pods)) == {
        "p": "b",
        "q": (
            "0/2 nodes are available: 1 Insufficient nvidia.com/gpu, "
            "1 node(s) didn't match Pod's node affinity/selector."
        ),
    }


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("many", "nvidia.com/gpu: 'many' is not a whole number"),
        (True, "nvidia.com/gpu: True is not a whole number"),
        (-1, "nvidia.com/gpu: -1 is not a whole number"),
    ],
)
def test_a_request_that_is_no_number_leaves_the_pod_pending(
    value: trees.Json, message: str
) -> None:
    store = stored((resources.NODES, node("a", 1)), (resources.PODS, pod("p", value)))
    assert scheduled(store) == {"p": message}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(st.lists(st.integers(0, 4), max_size=4), st.lists(st.integers(0, 3), max_size=8))
def test_no_node_ever_gives_more_devices_than_it_has(sizes: list[int], wanted: list[int]) -> None:
    nodes = [(resources.NODES, node(f"n{index}", size)) for index, size in enumerate(sizes)]
    pods = [(resources.PODS, pod(f"p{index}", gpus)) for index, gpus in enumerate(wanted)]
    placed = scheduled(stored(*nodes, *pods))
    for index, size in enumerate(sizes):
        of_node = [number for number in range(len(wanted)) if placed[f"p{number}"] == f"n{index}"]
        assert sum(wanted[number] for number in of_node) <= size


@given(JSON, JSON, JSON)
def test_no_shape_of_a_pod_or_a_node_raises(
    spec: trees.Json, more: trees.Json, of: trees.Json
) -> None:
    shaped: trees.Tree = {"metadata": {"name": "p"}, "spec": {"containers": [spec, of]}}
    shaped = trees.with_value(shaped, more, "spec", "tolerations")
    odd = trees.with_value(node("a", 1), of, "spec", "taints")
    store = stored((resources.NODES, odd), (resources.PODS, shaped))
    scheduling.schedule(store, at=AT, ids=map(str, itertools.count()))
    for resource in (resources.NODES, resources.PODS, resources.EVENTS):
        for item in store.all(resource):
            assert tables.table(resource, {**item, "metadata": {}}, now=AT)["kind"] == "Table"


def test_a_pod_and_a_node_are_shown_with_their_states_and_ages() -> None:
    running: trees.Tree = {
        **pod("p", 1, nodeName="a"),
        "status": {"phase": "Running", "containerStatuses": [{"ready": True, "restartCount": 2}]},
    }
    running = trees.with_value(running, "2026-11-23T19:00:00Z", "metadata", "creationTimestamp")
    ready = trees.with_value(
        node("a", 1, unschedulable=True),
        [{"type": "Ready", "status": "True"}],
        "status",
        "conditions",
    )
    cells = [
        trees.value_at(row, "cells")
        for resource, item in ((resources.PODS, running), (resources.NODES, ready))
        for row in rows(tables.table(resource, {"items": [item], "metadata": {}}, now=AT))
    ]
    assert cells == [
        ["p", "1/1", "Running", "2", "60m", "<none>", "a"],
        ["a", "Ready,SchedulingDisabled", "<none>", "<unknown>", ""],
    ]


def rows(table: trees.Tree) -> list[trees.Tree]:
    """Return the rows of a table."""
    listed = table["rows"]
    assert isinstance(listed, list)
    return [row for row in listed if isinstance(row, dict)]
