"""What we read of Kubernetes: where a DaemonSet wants pods, who should be there, how old it is."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster_health.kubernetes import daemonset_placement, membership, objects
from muster_health.model import config, facts, signals

ZONE = "topology.kubernetes.io/zone"
GPU = "nvidia.com/gpu"


def read(shape: type[Any], tree: object) -> Any:
    return msgspec.json.decode(json.dumps(tree), type=shape)


def template(**spec: object) -> objects.TemplateSpec:
    found: objects.TemplateSpec = read(objects.TemplateSpec, spec)
    return found


def affinity(*terms: object) -> dict[str, object]:
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return {"affinity": {"nodeAffinity": required}}


def asks(key: str, operator: str, *values: str) -> dict[str, object]:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": values}]}


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("8", 8),
        ("5k", 5000),
        ("1500", 1500),
        ("1e3", 1000),
        ("1Ki", 1024),
        ("2G", 2 * 10**9),
        ("500m", 0),
        ("2500m", 2),
        ("-3", -3),
        ("", None),
        ("x", None),
        ("1 k", None),
        ("9" * 30, None),
    ],
)
def test_a_quantity_is_read_in_every_way_kubernetes_writes_it(
    written: str, found: int | None
) -> None:
    assert objects.amount(written) == found


@given(st.text(max_size=40))
def test_what_is_no_quantity_is_none(written: str) -> None:
    amount = objects.amount(written)
    assert amount is None or isinstance(amount, int)


@pytest.mark.parametrize(
    ("spec", "labels", "wanted"),
    [
        ({}, {}, True),
        ({"nodeSelector": {"gpu": "yes"}}, {"gpu": "yes"}, True),
        ({"nodeSelector": {"gpu": "yes"}}, {"gpu": "no"}, False),
        (affinity(asks("gpu", "In", "a", "b")), {"gpu": "b"}, True),
        (affinity(asks("gpu", "In", "a", "b")), {}, False),
        (affinity(asks("gpu", "NotIn", "a")), {}, True),
        (affinity(asks("gpu", "Exists")), {"gpu": ""}, True),
        (affinity(asks("gpu", "DoesNotExist")), {"gpu": ""}, False),
        (affinity(asks("n", "Gt", "3")), {"n": "4"}, True),
        (affinity(asks("n", "Lt", "3")), {"n": "4"}, False),
        (affinity(asks("n", "Gt", "3")), {"n": "x"}, False),
        (affinity(asks("n", "Near", "3")), {"n": "3"}, False),
        (affinity(asks("a", "Exists"), asks("b", "Exists")), {"b": "1"}, True),
        (affinity(), {}, False),
        (affinity({}), {}, False),
        (
            affinity(
                {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]}
            ),
            {},
            True,
        ),
    ],
)
def test_a_daemonset_wants_the_nodes_that_its_controller_would_choose(
    spec: Mapping[str, object], labels: Mapping[str, str], *, wanted: bool
) -> None:
    assert daemonset_placement.wants(template(**spec), "n", labels, ()) == wanted


@pytest.mark.parametrize(
    ("taint", "tolerations", "wanted"),
    [
        (("gpu", "yes", "NoSchedule"), [], False),
        (("gpu", "yes", "PreferNoSchedule"), [], True),
        (("gpu", "yes", "NoSchedule"), [{"operator": "Exists"}], True),
        (("gpu", "yes", "NoSchedule"), [{"key": "gpu", "value": "yes"}], True),
        (("gpu", "yes", "NoSchedule"), [{"key": "gpu", "value": "no"}], False),
        (("gpu", "yes", "NoExecute"), [{"key": "gpu", "operator": "Exists"}], True),
        (
            ("gpu", "yes", "NoExecute"),
            [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
            False,
        ),
        (("node.kubernetes.io/unschedulable", "", "NoSchedule"), [], True),
        (("node.kubernetes.io/unreachable", "", "NoExecute"), [], True),
        (("node.kubernetes.io/network-unavailable", "", "NoSchedule"), [], False),
    ],
)
def test_a_taint_keeps_a_daemonset_off_unless_it_is_tolerated(
    taint: tuple[str, str, str], tolerations: list[object], *, wanted: bool
) -> None:
    found = objects.Taint(*taint)
    assert daemonset_placement.wants(template(tolerations=tolerations), "n", {}, [found]) == wanted


def test_a_lease_is_as_old_as_the_api_server_noted_not_as_the_node_says() -> None:
    tree = {
        "metadata": {
            "resourceVersion": "7",
            "managedFields": [
                {"time": "2026-01-02T00:00:00Z", "fieldsV1": {"f:metadata": {}}},
                {"time": "2026-01-01T00:00:00Z", "fieldsV1": {"f:spec": {"f:renewTime": {}}}},
            ],
        },
        "spec": {"renewTime": "1999-01-01T00:00:00.000000Z"},
    }
    lease = read(objects.Lease, tree)
    noted = datetime(2026, 1, 1, tzinfo=UTC)
    assert lease.renewed_at == noted
    assert objects.age_s(lease.renewed_at, noted + timedelta(seconds=9)) == 9
    assert objects.age_s(lease.renewed_at, noted - timedelta(seconds=9)) == 0
    assert objects.age_s(lease.renewed_at, None) is None
    assert read(objects.Lease, {"spec": {}}).renewed_at is None


def test_a_node_says_whether_it_is_ready_whether_it_will_go_and_what_it_offers() -> None:
    node = read(
        objects.Node,
        {
            "spec": {"unschedulable": True, "taints": [{"key": "karpenter.sh/disrupted"}]},
            "status": {
                "conditions": [{"type": "Ready", "status": "Unknown"}],
                "capacity": {"cpu": "4", GPU: "5k", "x.kubernetes.io/y": "1"},
                "allocatable": {"cpu": "4", "example.com/fuse": "many"},
            },
        },
    )
    assert node.ready is False
    assert node.planned == (
        facts.Planned.UNSCHEDULABLE,
        facts.Planned.TO_BE_DELETED,
    )
    assert node.offers == {
        GPU: facts.Offer(capacity=5000, allocatable=0),
        "example.com/fuse": facts.Offer(capacity=0, allocatable=0),
    }
    assert read(objects.Node, {"status": {"capacity": None}}).ready is None


def test_a_pod_in_our_words() -> None:
    pod = read(
        objects.Pod,
        {
            "metadata": {
                "name": "p",
                "namespace": "n",
                "uid": "u",
                "labels": {objects.REVISION: "r1"},
            },
            "spec": {"nodeName": "a"},
            "status": {
                "phase": "Running",
                "conditions": [{"type": "Ready", "status": "False"}],
                "containerStatuses": [
                    {"restartCount": 2, "state": {"running": {}}},
                    {"restartCount": 3, "state": {"waiting": {"reason": "CrashLoopBackOff"}}},
                ],
            },
        },
    )
    assert pod.in_our_words("r2") == facts.Pod(
        name="n/p",
        uid="u",
        phase="Running",
        ready=False,
        restarts=5,
        waiting="CrashLoopBackOff",
        revision="r1",
        current="r2",
    )


def asking(phase: str = "Running", **spec: object) -> object:
    return {
        "metadata": {"name": "p", "namespace": "n", "labels": {"a": "b"}},
        "spec": {"containers": [{"name": "c"}], **spec},
        "status": {"phase": phase},
    }


def with_(resource: str, amount: object = "1", *, how: str = "requests") -> list[object]:
    return [{"resources": {"requests": {"cpu": "1"}}}, {"resources": {how: {resource: amount}}}]


@pytest.mark.parametrize(
    ("pod", "holds"),
    [
        (asking(containers=with_(GPU)), True),
        (asking("Pending", containers=with_(GPU, how="limits")), True),
        (asking(initContainers=with_(GPU)), True),
        (asking(containers=with_("x/y")), False),
        (asking(containers=with_(GPU, "0")), False),
        (asking(containers=with_(GPU, 0)), False),
        (asking(containers=with_(GPU, 1)), True),
        (asking("Succeeded", containers=with_(GPU)), False),
        (asking("Failed", containers=with_(GPU)), False),
        (asking(containers=[{"resources": {"limits": None}}], initContainers=None), False),
        ({}, False),
    ],
)
def test_a_pod_holds_what_any_of_its_containers_requests_until_it_has_ended(
    pod: object, *, holds: bool
) -> None:
    listed = msgspec.json.encode({"metadata": {"resourceVersion": "1"}, "items": [pod]})
    assert objects.holders_of(listed, (GPU, "a/b")) == (("n/p",) if holds else ())


def test_a_daemonset_selects_pods_as_a_query_has_it() -> None:
    tree = {
        "spec": {
            "selector": {
                "matchLabels": {"b": "2", "a": "1"},
                "matchExpressions": [
                    {"key": "c", "operator": "In", "values": ["x", "y"]},
                    {"key": "d", "operator": "DoesNotExist"},
                    {"key": "e", "operator": "Exists"},
                ],
            }
        }
    }
    assert read(objects.DaemonSet, tree).pods == "a=1,b=2,c in (x,y),!d,e"


# who should be there

SETTINGS = config.Cluster(plugins=(config.Plugin(plugin="p", daemonset="d"),))


def node(name: str, taints: list[object] | None = None, gpus: str = "1", **labels: str) -> Any:
    return read(
        objects.Node,
        {
            "metadata": {"name": name, "labels": {ZONE: "z1", "other": "x", **labels}},
            "spec": {"taints": taints},
            "status": {"capacity": {GPU: gpus}, "allocatable": {GPU: gpus}},
        },
    )


def daemonset(generation: str = "1", **spec: object) -> Any:
    annotations = {"deprecated.daemonset.template.generation": generation}
    return read(
        objects.DaemonSet,
        {"metadata": {"annotations": annotations}, "spec": {"template": {"spec": spec}}},
    )


def pod(uid: str, on: str, revision: str, generation: str) -> membership.Pod:
    labels = {objects.REVISION: revision, objects.TEMPLATE_GENERATION: generation}
    shape = read(
        objects.Pod,
        {"metadata": {"name": uid, "uid": uid, "labels": labels}, "spec": {"nodeName": on}},
    )
    return membership.pod(shape)


class Fleet:
    def __init__(self, settings: config.Cluster = SETTINGS) -> None:
        self.known = membership.Membership(settings)

    def nodes(self, now: float, *shown: objects.Node, age_s: float = 1000.0) -> None:
        kept = [self.known.node(one, now=now, age_s=age_s) for one in shown]
        self.known.replace_nodes(kept, now)

    def node(self, now: float, shown: objects.Node, age_s: float = 1000.0) -> None:
        self.known.put_node(self.known.node(shown, now=now, age_s=age_s), now)

    def expected(self, now: float) -> dict[str, float] | None:
        found = [n for n in self.known.news(now) if isinstance(n, signals.ExpectedNodes)]
        return {name: one.age_s for name, one in found[0].nodes.items()} if found else None


def test_nodes_are_expected_since_the_later_of_node_and_daemonset() -> None:
    fleet = Fleet()
    fleet.known.put_daemonset("p", daemonset(), now=10.0, age_s=300.0)
    assert fleet.known.news(10.0) == []
    fleet.nodes(10.0, node("a"), age_s=1000.0)
    fleet.node(10.0, node("b"), age_s=20.0)
    assert fleet.expected(10.0) == {"a": 300.0, "b": 20.0}
    assert fleet.known.news(20.0) == []
    fleet.known.drop_node("a")
    assert fleet.expected(30.0) == {"b": 20.0}


def test_a_changed_pod_costs_its_own_node_and_no_other() -> None:
    fleet = Fleet()
    fleet.known.put_daemonset("p", daemonset(), now=0.0, age_s=0.0)
    fleet.nodes(0.0, *(node(name) for name in "abc"))
    told = [one for one in fleet.known.news(0.0) if isinstance(one, signals.ExpectedNodes)]
    fleet.known.put_pod("p", pod("u1", "a", "r1", "1"))
    told += [one for one in fleet.known.news(9.0) if isinstance(one, signals.ExpectedNodes)]
    before, now = (dict(one.nodes) for one in told)
    assert now["a"].revision == "r1"
    assert all(now[name] is before[name] for name in "bc")
    # what turns out to be as it was is no news
    fleet.known.put_pod("p", pod("u2", "a", "r1", "1"))
    fleet.known.drop_pod("p", pod("u1", "a", "r1", "1"))
    assert fleet.known.news(10.0) == []
    assert fleet.known.pods_on("p", "a") == ("u2",)


def test_a_node_that_comes_to_be_wanted_is_expected_from_then_on() -> None:
    fleet = Fleet()
    fleet.known.put_daemonset("p", daemonset(nodeSelector={"gpu": "y"}), now=0.0, age_s=900.0)
    fleet.nodes(0.0, node("a"), node("b", gpu="y"))
    assert fleet.expected(0.0) == {"b": 900.0}
    fleet.node(50.0, node("a", gpu="y"))
    assert fleet.expected(60.0) == {"a": 10.0, "b": 900.0}
    fleet.node(70.0, node("a", taints=[{"key": "t", "effect": "NoSchedule"}], gpu="y"))
    assert fleet.expected(70.0) == {"b": 900.0}
    fleet.known.put_daemonset("p", None, now=80.0, age_s=None)
    assert fleet.expected(80.0) == {}


def test_nodes_may_be_named_by_labels_instead() -> None:
    labelled = config.Plugin(plugin="p", nodes={"gpu": "y"})
    fleet = Fleet(config.Cluster(plugins=(labelled,)))
    fleet.nodes(0.0, node("a"), node("b", gpu="y"))
    assert fleet.expected(0.0) == {"b": 1000.0}


def test_causes_are_the_zone_and_the_revision_that_runs_there() -> None:
    fleet = Fleet()
    fleet.known.put_daemonset("p", daemonset("2"), now=0.0, age_s=0.0)
    fleet.nodes(0.0, node("a"))
    fleet.known.replace_pods("p", [pod("u1", "a", "r1", "1")])
    assert fleet.known.current_revision("p") == "generation 2"
    fleet.known.put_pod("p", pod("u2", "b", "r2", "2"))
    assert fleet.known.current_revision("p") == "r2"
    (_, told) = fleet.known.news(0.0)
    assert told == signals.ExpectedNodes(
        plugin="p",
        nodes={"a": facts.Expected(age_s=0.0, causes=("zone=z1", "revision=r1"), revision="r1")},
    )
    fleet.known.drop_pod("p", pod("u1", "a", "r1", "1"))
    (told,) = fleet.known.news(0.0)
    assert told == signals.ExpectedNodes(
        plugin="p", nodes={"a": facts.Expected(age_s=0.0, causes=("zone=z1",))}
    )


def test_offers_are_told_when_they_change_and_when_their_node_goes() -> None:
    def offers(now: float) -> list[tuple[str, int | None]]:
        return [
            (told.node, told.offers[GPU].allocatable if told.offers else None)
            for told in fleet.known.news(now)
            if isinstance(told, signals.NodeOffers)
        ]

    fleet = Fleet()
    fleet.nodes(0.0, node("a"), node("b", gpus="5k"))
    assert offers(0.0) == [("a", 1), ("b", 5000)]
    fleet.node(1.0, node("a"))
    assert offers(1.0) == []
    fleet.node(2.0, node("a", gpus="0"))
    assert offers(2.0) == [("a", 0)]
    fleet.nodes(3.0, node("a", gpus="0"))
    assert offers(3.0) == [("b", None)]


def test_only_labels_that_matter_are_kept() -> None:
    fleet = Fleet()
    kept = fleet.known.node(node("a", gpu="y"), now=0.0, age_s=None)
    assert kept.labels == {ZONE: "z1"}
    fleet.known.put_daemonset("p", daemonset(nodeSelector={"gpu": "y"}), now=0.0, age_s=None)
    assert fleet.known.label_keys == {ZONE, "gpu"}
    kept = fleet.known.node(node("a", gpu="y"), now=0.0, age_s=None)
    assert kept.labels == {ZONE: "z1", "gpu": "y"}
