"""Faults of device plugins that the Kubernetes API shows, and conditions that are no fault."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.kubernetes import known_plugins, plugin_facts, plugin_findings
from muster.kubernetes.plugin_facts import Kind, Level, PluginFinding
from tests.worlds.plugin_view import GPU, ago, findings, node, plugin, user, view

LOST = {GPU: (8, 0)}
GONE = {GPU: (0, 0)}
READY = "kube-system/plugin-a: Ready for 60 minutes"
UNHEALTHY = [
    {
        "name": "c",
        "allocatedResourcesStatus": [
            {"name": GPU, "resources": [{"resourceID": "GPU-1", "health": "Unhealthy"}]}
        ],
    }
]


def kinds(*nodes: Any, **more: Any) -> list[tuple[Kind, Level, str]]:
    return [(each.kind, each.level, each.node) for each in findings(*nodes, **more)]


def test_a_plugin_that_runs_while_its_node_offers_none_is_an_error() -> None:
    assert findings(node("a", LOST), pods=[plugin("a")]) == [
        PluginFinding(
            kind=Kind.LOST,
            level=Level.ERROR,
            name=GPU,
            node="a",
            pod="kube-system/plugin-a",
            text=f"offers no {GPU}: NVIDIA k8s-device-plugin runs and is Ready, but the kubelet "
            "has lost its connection to it, or it reports all devices Unhealthy",
            evidence=(f"{GPU}: 0 of 8 allocatable", READY),
        )
    ]


def test_devices_that_the_plugin_itself_reported_unhealthy_are_told_from_a_lost_plugin() -> None:
    holder = user(asks=GPU, containerStatuses=UNHEALTHY)
    lost, held = findings(node("a", LOST), pods=[plugin("a"), holder])
    assert lost.text == (
        f"offers no {GPU}: NVIDIA k8s-device-plugin runs, but reports its devices Unhealthy"
    )
    assert lost.evidence[-1] == "default/p: GPU-1 is Unhealthy"
    assert (held.kind, held.level, held.text, held.evidence) == (
        Kind.UNHEALTHY,
        Level.WARN,
        f"default/p holds 1 Unhealthy device of {GPU}",
        ("GPU-1: Unhealthy",),
    )


def test_a_resource_that_no_known_plugin_serves_is_a_warning_if_its_devices_are_unusable() -> None:
    (lost,) = findings(node("a", {"acme.io/x": (4, 0)}))
    assert (lost.kind, lost.level, lost.pod, lost.text) == (
        Kind.LOST,
        Level.WARN,
        "",
        (
            "offers no acme.io/x: no pod of a known plugin serves it here: its plugin is "
            "restarting, ended within the last 5 minutes, or reports all devices Unhealthy"
        ),
    )


def test_what_the_kubelet_has_forgotten_is_a_warning_without_a_sign_that_it_should_be_there() -> (
    None
):
    assert findings(node("a", GONE), pods=[plugin("a")]) == [
        PluginFinding(
            kind=Kind.NONE,
            level=Level.WARN,
            name=GPU,
            node="a",
            pod="kube-system/plugin-a",
            text=f"offers no {GPU}: NVIDIA k8s-device-plugin runs and is Ready, but it did not "
            "register after the kubelet restarted, was disconnected for 5 minutes, or has no "
            "devices",
            evidence=(f"{GPU}: 0 of 0 allocatable", READY),
        )
    ]


@pytest.mark.parametrize(
    ("others", "pods", "labels", "evidence"),
    [
        ([], [user(asks=GPU)], {}, "devices are held by default/p"),
        (
            [node("b"), node("c", GONE)],
            [plugin("b"), plugin("c")],
            {},
            f"1 of 2 other g5.xlarge nodes with this plugin offer {GPU}",
        ),
        (
            [],
            [user(asks=GPU, on="", phase="Pending")],
            {},
            f"no node offers {GPU}, which default/p requested",
        ),
        ([], [], {"nvidia.com/gpu.present": "true"}, "nvidia.com/gpu.present=true"),
    ],
)
def test_what_the_kubelet_has_forgotten_is_an_error_where_it_should_be_there(
    others: list[Any], pods: list[Any], labels: dict[str, str], evidence: str
) -> None:
    here = node("a", GONE, labels=labels)
    first = findings(here, *others, pods=[plugin("a"), *pods])[0]
    assert (first.kind, first.level, first.node, first.evidence[-1]) == (
        Kind.NONE,
        Level.ERROR,
        "a",
        evidence,
    )


def test_a_name_that_is_left_over_from_another_configuration_is_no_fault() -> None:
    here = node("a", {GPU: (0, 0), "nvidia.com/mig-1g.5gb": (7, 7)})
    assert findings(here, pods=[plugin("a")]) == []


def test_a_plugin_that_has_never_offered_what_nodes_like_its_own_offer_is_an_error() -> None:
    nodes = [node("a", {}), node("b"), node("c")]
    assert findings(*nodes, pods=[plugin("a"), plugin("b"), plugin("c")]) == [
        PluginFinding(
            kind=Kind.NEVER,
            level=Level.ERROR,
            name=GPU,
            node="a",
            pod="kube-system/plugin-a",
            text=f"offers no {GPU}: NVIDIA k8s-device-plugin runs and is Ready, but has never "
            "registered it here",
            evidence=(f"2 of 2 other g5.xlarge nodes with this plugin offer {GPU}", READY),
        )
    ]


@pytest.mark.parametrize(("kind", "other"), [("m5.large", "g5.xlarge"), ("k3s", "k3s"), ("", "")])
def test_a_plugin_without_devices_is_no_fault_on_another_kind_of_node(
    kind: str, other: str
) -> None:
    nodes = [node("a", {}, kind=kind), node("b", kind=other), node("c", kind=other)]
    assert findings(*nodes, pods=[plugin("a"), plugin("b"), plugin("c")]) == []


def test_a_node_that_offers_fewer_than_all_others_like_it_is_named() -> None:
    nodes = [node("a", {GPU: (7, 7)}), node("b"), node("c")]
    assert findings(*nodes, pods=[plugin("a"), plugin("b"), plugin("c")]) == [
        PluginFinding(
            kind=Kind.FEWER,
            level=Level.WARN,
            name=GPU,
            node="a",
            pod="kube-system/plugin-a",
            text=f"offers 7 {GPU}, but all 2 other g5.xlarge nodes offer 8; this may be intended",
            evidence=(f"{GPU}: 7 of 7 allocatable",),
        )
    ]
    disagreeing = [*nodes, node("d", {GPU: (4, 4)})]
    assert findings(*disagreeing, pods=[plugin(name) for name in "abcd"]) == []


def test_some_unhealthy_devices_are_a_warning() -> None:
    (sick,) = findings(node("a", {GPU: (8, 6)}), pods=[plugin("a")])
    assert (sick.kind, sick.level, sick.text) == (
        Kind.UNHEALTHY,
        Level.WARN,
        f"2 of 8 {GPU} are Unhealthy",
    )


CRASH = {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}


@pytest.mark.parametrize(
    ("pod", "level", "text", "evidence"),
    [
        (
            plugin(
                "a",
                ready="False",
                ready_s=60,
                container={"restartCount": 7, "state": {"waiting": CRASH}},
            ),
            Level.ERROR,
            "NVIDIA k8s-device-plugin crashes repeatedly: 7 restarts",
            ("CrashLoopBackOff: back-off 5m0s",),
        ),
        (
            plugin("a", ready="False", ready_s=600),
            Level.ERROR,
            "NVIDIA k8s-device-plugin has been unready for 10 minutes",
            (),
        ),
        (
            plugin(
                "a",
                ready_s=100,
                container={"restartCount": 5, "state": {"running": {"startedAt": ago(100)}}},
            ),
            Level.WARN,
            (
                "NVIDIA k8s-device-plugin has restarted 5 times, "
                "the last time less than 10 minutes ago"
            ),
            (),
        ),
    ],
)
def test_a_plugins_pod_that_does_not_stay_up_is_named(
    pod: Any, level: Level, text: str, evidence: tuple[str, ...]
) -> None:
    assert findings(node("a"), pods=[pod]) == [
        PluginFinding(
            kind=Kind.POD,
            level=level,
            name="NVIDIA k8s-device-plugin",
            node="a",
            pod="kube-system/plugin-a",
            text=text,
            evidence=evidence,
        )
    ]


REFUSED = f"Pod was rejected: Allocate failed due to no healthy devices present; {GPU}"


def refused(age_s: float) -> Any:
    return user(
        asks=GPU,
        phase="Failed",
        reason="UnexpectedAdmissionError",
        message=REFUSED,
        startTime=ago(age_s),
    )


@pytest.mark.parametrize(("age_s", "level"), [(120, Level.ERROR), (1800, Level.WARN)])
def test_pods_that_the_kubelet_refused_their_devices_are_counted(
    age_s: float, level: Level
) -> None:
    (first,) = findings(node("a"), pods=[plugin("a"), refused(age_s)])
    assert first == PluginFinding(
        kind=Kind.ADMISSION,
        level=level,
        name=GPU,
        node="a",
        pod="kube-system/plugin-a",
        text=f"refused {GPU} to 1 pod within the last hour, most recently {int(age_s // 60)} "
        "minutes ago",
        evidence=(
            f"UnexpectedAdmissionError: {REFUSED}",
            "default/p",
        ),
    )


def test_a_refusal_of_long_ago_is_no_finding() -> None:
    assert findings(node("a"), pods=[plugin("a"), refused(2 * 3600)]) == []


KUBEVIRT = "quay.io/kubevirt/virt-handler:v1.6"


@pytest.mark.parametrize(
    ("here", "pods"),
    [
        # just started, restarting within an update, or being deleted
        (node("a", LOST), [plugin("a", ready_s=60)]),
        (node("a", LOST), [plugin("a", ready_s=60, ready="False")]),
        (node("a", GONE), [plugin("a", metadata={"deletionTimestamp": ago(5)})]),
        # no plugin runs that could have offered it
        (node("a", GONE), []),
        # a new node, a drained one, one that an autoscaler removes
        (node("a", LOST, age_s=200), [plugin("a")]),
        (node("a", LOST, unschedulable=True), [plugin("a")]),
        (
            node("a", LOST, taints=[{"key": "ToBeDeletedByClusterAutoscaler"}]),
            [plugin("a", ready="False")],
        ),
        # this plugin serves a resource only while something requests it
        (node("a", {"devices.kubevirt.io/kvm": (0, 0)}), [plugin("a", image=KUBEVIRT)]),
        (node("a", {"devices.kubevirt.io/kvm": (9, 0)}), [plugin("a", image=KUBEVIRT)]),
        # a healthy plugin
        (node("a"), [plugin("a")]),
    ],
)
def test_what_is_planned_new_or_on_demand_is_no_fault(here: Any, pods: list[Any]) -> None:
    assert findings(here, pods=pods) == []


def test_of_a_node_that_is_not_ready_only_that_is_said() -> None:
    here = node("a", LOST, ready="Unknown")
    assert findings(here, pods=[plugin("a", ready="False", ready_s=900)]) == [
        PluginFinding(
            kind=Kind.NODE,
            level=Level.INFO,
            name="NVIDIA k8s-device-plugin",
            node="a",
            text="the node is not Ready, so the state of NVIDIA k8s-device-plugin there is unknown",
        )
    ]


def test_without_the_right_to_list_pods_only_the_nodes_numbers_speak() -> None:
    (lost,) = findings(node("a", LOST), node("b", GONE), pods=None)
    assert (lost.node, lost.level, lost.text) == (
        "a",
        Level.WARN,
        f"offers no {GPU}: pods cannot be read, so the state of its plugin is unknown",
    )


def test_an_own_entry_makes_a_plugin_known() -> None:
    entry = known_plugins.KnownPlugin(name="acme", images=("acme/x",), resources=("acme.io/*",))
    read = view(node("a", {"acme.io/x": (4, 0)}), pods=[plugin("a", image="acme/x")], more=[entry])
    (lost,) = plugin_findings.evaluate(plugin_facts.gather(read))
    assert (lost.level, lost.pod) == (Level.ERROR, "kube-system/plugin-a")


@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    ready_s=st.lists(st.floats(0, 7200), min_size=5, max_size=5),
    age_s=st.lists(st.floats(0, 7200), min_size=5, max_size=5),
)
def test_healthy_plugins_are_never_an_error(
    counts: list[int], ready_s: list[float], age_s: list[float]
) -> None:
    names = [f"n{number}" for number in range(len(counts))]
    nodes = [
        node(name, {GPU: (count, count)}, age_s=age)
        for name, count, age in zip(names, counts, age_s, strict=False)
    ]
    pods = [plugin(name, ready_s=ready) for name, ready in zip(names, ready_s, strict=False)]
    assert {each.kind for each in findings(*nodes, pods=pods)} <= {Kind.FEWER}
