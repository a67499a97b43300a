"""What health derives from Kubernetes objects, and which nodes should have a plugin."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from muster.kubernetes import known_plugins, objects
from muster_health.kubernetes import cluster_facts, membership
from muster_health.model import config, signals

ZONE = "topology.kubernetes.io/zone"
GPU = "nvidia.com/gpu"


def read(shape: type[Any], tree: object) -> Any:
    return msgspec.json.decode(json.dumps(tree), type=shape)


def template(**spec: object) -> objects.PodSpec:
    template: objects.PodSpec = read(objects.PodSpec, spec)
    return template


def test_a_pod_belongs_only_on_nodes_that_its_template_selects() -> None:
    spec = template(nodeSelector={"gpu": "yes"})
    assert membership.should_run(spec, "n", {"gpu": "yes"}, ())
    assert not membership.should_run(spec, "n", {"gpu": "no"}, ())


@pytest.mark.parametrize(
    ("taint", "tolerations", "expected"),
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
    taint: tuple[str, str, str], tolerations: list[object], *, expected: bool
) -> None:
    spec = template(tolerations=tolerations)
    assert membership.should_run(spec, "n", {}, [objects.Taint(*taint)]) == expected


def test_the_pod_network_need_not_be_up_for_a_pod_with_host_network() -> None:
    taint = objects.Taint("node.kubernetes.io/network-unavailable", "", "NoSchedule")
    assert membership.should_run(template(hostNetwork=True), "n", {}, [taint])


def test_ages_are_by_the_api_servers_clock_and_never_negative() -> None:
    then = datetime(2026, 1, 1, tzinfo=UTC)
    assert cluster_facts.age_s(then, then + timedelta(seconds=9)) == 9
    assert cluster_facts.age_s(then, then - timedelta(seconds=9)) == 0
    assert cluster_facts.age_s(then, None) is None
    assert cluster_facts.age_s(None, then) is None


def test_whether_a_node_is_ready_whether_it_will_be_removed_and_what_it_offers() -> None:
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
    assert cluster_facts.is_ready(node) is False
    assert cluster_facts.planned(node) == (
        signals.Planned.UNSCHEDULABLE,
        signals.Planned.TO_BE_DELETED,
    )
    assert cluster_facts.offers(node) == {
        GPU: signals.Offer(capacity=5000, allocatable=0),
        "example.com/fuse": signals.Offer(capacity=0, allocatable=0),
    }
    assert cluster_facts.is_ready(read(objects.Node, {"status": {"capacity": None}})) is None


def test_the_facts_about_a_plugins_pod() -> None:
    pod = read(
        objects.Pod,
        {
            "metadata": {
                "name": "p",
                "namespace": "n",
                "uid": "u",
                "labels": {cluster_facts.REVISION: "r1"},
            },
            "spec": {"nodeName": "a"},
            "status": {
                "phase": "Running",
                "conditions": [{"type": "Ready", "status": "False"}],
                "containerStatuses": [
                    {
                        "restartCount": 2,
                        "state": {"running": {}},
                        "lastState": {
                            "terminated": {
                                "exitCode": 137,
                                "reason": "OOMKilled",
                                "finishedAt": "2026-01-01T12:00:00Z",
                            }
                        },
                    },
                    {"restartCount": 3, "state": {"waiting": {"reason": "CrashLoopBackOff"}}},
                ],
            },
        },
    )
    assert cluster_facts.pod(pod, current_revision="r2") == signals.Pod(
        name="n/p",
        uid="u",
        phase="Running",
        ready=False,
        restarts=5,
        waiting="CrashLoopBackOff",
        last_exit="exit code 137 (OOMKilled) at 2026-01-01T12:00:00Z",
        revision="r1",
        current="r2",
    )


def pod_in(phase: str = "Running", **spec: object) -> object:
    return {
        "metadata": {"name": "p", "namespace": "n", "labels": {"a": "b"}},
        "spec": {"containers": [{"name": "c"}], **spec},
        "status": {"phase": phase},
    }


def requesting(resource: str, amount: object = "1", *, how: str = "requests") -> list[object]:
    return [{"resources": {"requests": {"cpu": "1"}}}, {"resources": {how: {resource: amount}}}]


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        (pod_in(containers=requesting(GPU)), True),
        (pod_in("Pending", containers=requesting(GPU, how="limits")), True),
        (pod_in(initContainers=requesting(GPU)), True),
        (pod_in(containers=requesting("x/y")), False),
        (pod_in(containers=requesting(GPU, "0")), False),
        (pod_in(containers=requesting(GPU, 0)), False),
        (pod_in(containers=requesting(GPU, 1)), True),
        (pod_in("Succeeded", containers=requesting(GPU)), False),
        (pod_in("Failed", containers=requesting(GPU)), False),
        (pod_in(containers=[{"resources": {"limits": None}}], initContainers=None), False),
        ({}, False),
    ],
)
def test_a_pod_requests_what_any_of_its_containers_requests_until_it_has_ended(
    pod: object, *, expected: bool
) -> None:
    listed = msgspec.json.encode({"metadata": {"resourceVersion": "1"}, "items": [pod]})
    assert cluster_facts.pods_requesting(listed, (GPU, "a/b")) == (("n/p",) if expected else ())


# which nodes should have a plugin

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


def pod(uid: str, on: str, revision: str, generation: str, *, of: str = "") -> membership.Pod:
    labels = {cluster_facts.REVISION: revision, cluster_facts.TEMPLATE_GENERATION: generation}
    shape = read(
        membership.OwnedPod,
        {
            "metadata": {
                "name": uid,
                "uid": uid,
                "labels": labels,
                "ownerReferences": [{"kind": "DaemonSet", "name": of, "controller": True}],
            },
            "spec": {"nodeName": on},
        },
    )
    return membership.to_pod(shape)


class Fleet:
    def __init__(self, settings: config.Cluster = SETTINGS) -> None:
        self.membership = membership.Membership(settings)

    def nodes(self, now: float, *shapes: objects.Node, age_s: float = 1000.0) -> None:
        nodes = [self.membership.to_node(shape, now=now, age_s=age_s) for shape in shapes]
        self.membership.replace_nodes(nodes, now)

    def node(self, now: float, shape: objects.Node, age_s: float = 1000.0) -> None:
        self.membership.put_node(self.membership.to_node(shape, now=now, age_s=age_s), now)

    def expected_nodes(self, now: float) -> list[Mapping[str, signals.Expected]]:
        changes = self.membership.changes(now)
        return [change.nodes for change in changes if isinstance(change, signals.ExpectedNodes)]

    def expected(self, now: float) -> dict[str, float] | None:
        for nodes in self.expected_nodes(now):
            return {name: expected.age_s for name, expected in nodes.items()}
        return None


def test_nodes_are_expected_since_the_later_of_node_and_daemonset() -> None:
    fleet = Fleet()
    fleet.membership.put_daemonset("p", daemonset(), now=10.0, age_s=300.0)
    assert fleet.membership.changes(10.0) == []
    fleet.nodes(10.0, node("a"), age_s=1000.0)
    fleet.node(10.0, node("b"), age_s=20.0)
    assert fleet.expected(10.0) == {"a": 300.0, "b": 20.0}
    assert fleet.membership.changes(20.0) == []
    fleet.membership.drop_node("a")
    assert fleet.expected(30.0) == {"b": 20.0}


def test_a_changed_pod_costs_its_own_node_and_no_other() -> None:
    fleet = Fleet()
    fleet.membership.put_daemonset("p", daemonset(), now=0.0, age_s=0.0)
    fleet.nodes(0.0, *(node(name) for name in "abc"))
    (before,) = fleet.expected_nodes(0.0)
    fleet.membership.put_pod("p", pod("u1", "a", "r1", "1"))
    (now,) = fleet.expected_nodes(9.0)
    assert now["a"].revision == "r1"
    assert all(now[name] is before[name] for name in "bc")
    # a change without effect is not reported
    fleet.membership.put_pod("p", pod("u2", "a", "r1", "1"))
    fleet.membership.drop_pod("p", pod("u1", "a", "r1", "1"))
    assert fleet.membership.changes(10.0) == []
    assert fleet.membership.pods_on("p", "a") == ("u2",)


def test_a_node_that_is_selected_later_is_expected_from_then_on() -> None:
    fleet = Fleet()
    fleet.membership.put_daemonset("p", daemonset(nodeSelector={"gpu": "y"}), now=0.0, age_s=900.0)
    fleet.nodes(0.0, node("a"), node("b", gpu="y"))
    assert fleet.expected(0.0) == {"b": 900.0}
    fleet.node(50.0, node("a", gpu="y"))
    assert fleet.expected(60.0) == {"a": 10.0, "b": 900.0}
    fleet.node(70.0, node("a", taints=[{"key": "t", "effect": "NoSchedule"}], gpu="y"))
    assert fleet.expected(70.0) == {"b": 900.0}
    fleet.membership.put_daemonset("p", None, now=80.0, age_s=None)
    assert fleet.expected(80.0) == {}


def test_nodes_may_be_selected_by_labels_instead() -> None:
    labelled = config.Plugin(plugin="p", nodes={"gpu": "y"})
    fleet = Fleet(config.Cluster(plugins=(labelled,)))
    fleet.nodes(0.0, node("a"), node("b", gpu="y"))
    assert fleet.expected(0.0) == {"b": 1000.0}


def test_causes_are_the_zone_and_the_revision_that_runs_there() -> None:
    fleet = Fleet()
    fleet.membership.put_daemonset("p", daemonset("2"), now=0.0, age_s=0.0)
    fleet.nodes(0.0, node("a"))
    fleet.membership.replace_pods("p", [pod("u1", "a", "r1", "1")])
    assert fleet.membership.current_revision("p") == "generation 2"
    fleet.membership.put_pod("p", pod("u3", "b", "other", "2", of="d-of-a-label"))
    assert fleet.membership.current_revision("p") == "generation 2"
    fleet.membership.put_pod("p", pod("u2", "b", "r2", "2", of="d"))
    assert fleet.membership.current_revision("p") == "r2"
    _, listed, change = fleet.membership.changes(0.0)
    assert listed == signals.NodesListed()
    assert change == signals.ExpectedNodes(
        plugin="p",
        nodes={"a": signals.Expected(age_s=0.0, causes=("zone=z1", "revision=r1"), revision="r1")},
    )
    fleet.membership.drop_pod("p", pod("u1", "a", "r1", "1"))
    (change,) = fleet.membership.changes(0.0)
    assert change == signals.ExpectedNodes(
        plugin="p", nodes={"a": signals.Expected(age_s=0.0, causes=("zone=z1",))}
    )


def test_offers_are_reported_when_they_change_and_when_their_node_is_removed() -> None:
    def offers(now: float) -> list[tuple[str, int | None]]:
        return [
            (change.node, change.offers[GPU].allocatable if change.offers else None)
            for change in fleet.membership.changes(now)
            if isinstance(change, signals.NodeOffers)
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
    kept = fleet.membership.to_node(node("a", gpu="y"), now=0.0, age_s=None)
    assert kept.labels == {ZONE: "z1"}
    fleet.membership.put_daemonset("p", daemonset(nodeSelector={"gpu": "y"}), now=0.0, age_s=None)
    assert fleet.membership.label_keys == {ZONE, "gpu"}
    kept = fleet.membership.to_node(node("a", gpu="y"), now=0.0, age_s=None)
    assert kept.labels == {ZONE: "z1", "gpu": "y"}


# the pods of a watched plugin

NVIDIA = "nvcr.io/nvidia/k8s-device-plugin:v0.17.1"


def listed_pod(name: str, image: str = "other", *, path: str = "", **metadata: object) -> object:
    volumes = [{"hostPath": {"path": path}}] if path else None
    return {
        "metadata": {
            "name": name,
            "namespace": "n",
            "uid": f"uid-{name}",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            **metadata,
        },
        "spec": {"containers": [{"name": "c", "image": image}], "volumes": volumes},
        "status": {"phase": "Running"},
    }


OF_NVIDIA = listed_pod("nvidia", NVIDIA)
UNKNOWN = listed_pod("unknown", path="/var/lib/kubelet/device-plugins/")
EXPORTER = listed_pod("dcgm", path="/var/lib/kubelet/pod-resources")
OURS = listed_pod(
    "ours",
    path="/var/lib/kubelet/device-plugins",
    labels={"app.kubernetes.io/part-of": "muster"},
)
STATIC = listed_pod("static", annotations={"kubernetes.io/config.mirror": "hash-1"})
STATIC_PLUGIN = listed_pod(
    "static",
    path="/var/lib/k0s/kubelet/device-plugins",
    annotations={"kubernetes.io/config.mirror": "hash-1"},
)
DATABASE = listed_pod("database", path="/data")


@pytest.mark.parametrize(
    ("pods", "name", "uid", "expected"),
    [
        ([OF_NVIDIA, UNKNOWN], "nvidia.com/gpu", "", ("n/nvidia",)),
        ([OF_NVIDIA], "nvidia.com/gpu", "uid-nvidia", ("n/nvidia",)),
        ([OF_NVIDIA, UNKNOWN], "nvidia.com/gpu", "uid-unknown", ("n/unknown",)),
        ([OF_NVIDIA, STATIC_PLUGIN], "x.example/y", "hash-1", ("n/static",)),
        ([UNKNOWN], "x.sock", "uid-unknown", ("n/unknown",)),
        # a compromised agent names a pod of another application
        ([DATABASE], "x.example/y", "uid-database", None),
        ([DATABASE, OF_NVIDIA], "nvidia.com/gpu", "uid-database", ("n/nvidia",)),
        ([OF_NVIDIA], "x.example/y", "uid-nvidia", None),
        ([OURS], "x.example/y", "uid-ours", None),
        ([STATIC], "x.example/y", "hash-1", None),
        # the pod that served no longer exists: these may have replaced it
        ([OF_NVIDIA], "nvidia.com/gpu", "uid-gone", ("n/nvidia",)),
        ([UNKNOWN], "x.example/y", "uid-gone", ()),
        # only a pod of a known plugin could serve it
        ([], "nvidia.com/gpu", "", ()),
        ([EXPORTER, OURS, STATIC], "nvidia.com/gpu", "", ()),
        # an unknown pod may be the plugin
        ([UNKNOWN], "nvidia.com/gpu", "", None),
        # how this plugin runs is unknown
        ([], "x.example/y", "", None),
        ([OF_NVIDIA], "x.example/y", "", None),
    ],
)
def test_the_pods_of_a_watched_plugin_are_found_by_the_table_or_the_agents_uid(
    pods: list[object], name: str, uid: str, expected: tuple[str, ...] | None
) -> None:
    listed = msgspec.json.encode({"items": pods})
    now = datetime(2026, 1, 1, 0, 0, 30, tzinfo=UTC)
    serving = cluster_facts.watched_pods(listed, name, uid, now=now)
    assert (None if serving is None else tuple(pod.name for pod in serving)) == expected
    assert {pod.age_s for pod in serving or ()} <= {30.0}


def test_the_pods_of_a_plugin_in_the_configuration_are_found() -> None:
    listed = msgspec.json.encode({"items": [listed_pod("own", "registry.example/own-plugin:1")]})
    own = known_plugins.KnownPlugin(name="own", images=("own-plugin",), resources=("x.example/*",))
    serving = cluster_facts.watched_pods(listed, "x.example/y", "", now=None, more=(own,))
    assert [(pod.name, pod.age_s) for pod in serving or ()] == [("n/own", None)]
