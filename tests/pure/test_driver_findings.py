"""Faults of DRA drivers that the Kubernetes API shows, and conditions that are no fault."""

from typing import Any

import msgspec
import pytest

from muster.kubernetes import plugin_objects as shapes
from muster.kubernetes.plugin_facts import Kind, Level, PluginFinding
from tests.worlds.plugin_view import (
    DRIVER,
    GPU,
    ago,
    claim,
    driver,
    findings,
    node,
    plugin,
    published,
    rollout,
    user,
)

SLICE = published("a", "gpu-0")
POD = "kube-system/plugin-a"


def bare(name: str = "a", **more: Any) -> Any:
    return node(name, {}, **more)


def event(message: str, *, age_s: float = 60, about: str = "p") -> shapes.Event:
    return msgspec.convert(
        {
            "metadata": {"name": "e", "namespace": "default"},
            "involvedObject": {"kind": "Pod", "namespace": "default", "name": about},
            "reason": "FailedPrepareDynamicResources",
            "message": message,
            "lastTimestamp": ago(age_s),
        },
        shapes.Event,
    )


def test_a_driver_that_works_is_no_finding() -> None:
    pods = [driver("a"), user()]
    read = findings(bare(), pods=pods, slices=[SLICE], claims=[claim("p")])
    assert read == []


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (
            f"prepare: DRA driver {DRIVER} is not registered",
            "it is not registered with the kubelet",
        ),
        (
            "NodePrepareResources: code = DeadlineExceeded desc = context deadline exceeded",
            "it does not answer within 45 s",
        ),
        ('code = Unavailable desc = "connection refused"', "nothing serves its socket"),
        ("NodePrepareResources failed for ResourceClaim c: sick", "it rejects the claims"),
    ],
)
def test_claims_that_cannot_be_prepared_are_told_apart_by_cause(message: str, cause: str) -> None:
    pods = [driver("a"), user(phase="Pending")]
    read = findings(bare(), pods=pods, slices=[SLICE], claims=[claim("p")], events=[event(message)])
    assert read == [
        PluginFinding(
            kind=Kind.PREPARE,
            level=Level.ERROR,
            name=DRIVER,
            node="a",
            pod=POD,
            text=f"{DRIVER} cannot prepare the claims of 1 pod: {cause}",
            evidence=(message, "default/p"),
        )
    ]


@pytest.mark.parametrize(("phase", "age_s"), [("Running", 60.0), ("Pending", 900.0)])
def test_a_failed_prepare_that_is_over_is_no_finding(phase: str, age_s: float) -> None:
    pods = [driver("a"), user(phase=phase)]
    events = [event("it refused", age_s=age_s), event("it refused", about="gone")]
    read = findings(bare(), pods=pods, slices=[SLICE], claims=[claim("p")], events=events)
    assert read == []


def test_an_event_about_a_driver_that_the_pod_does_not_use_is_no_finding() -> None:
    forged = [event("prepare: DRA driver other.example is not registered")]
    pods = [driver("a"), user(phase="Pending")]
    assert findings(bare(), pods=pods, slices=[SLICE], claims=[claim("p")], events=forged) == []
    forged = [event(f"prepare: DRA driver {DRIVER} is not registered")]
    stranger = msgspec.convert(
        {
            "metadata": {"name": "p", "namespace": "default", "uid": "u"},
            "spec": {"nodeName": "a", "containers": [{"name": "c", "image": "other"}]},
            "status": {"phase": "Pending"},
        },
        shapes.Pod,
    )
    assert findings(bare(), pods=[driver("a"), stranger], slices=[SLICE], events=forged) == []


def test_claims_on_a_node_without_a_live_driver_are_an_error() -> None:
    pods = [driver("b"), user()]
    nodes = [bare("a"), bare("b")]
    slices = [SLICE, published("b", "gpu-0")]
    assert findings(*nodes, pods=pods, slices=slices, claims=[claim("p")]) == [
        PluginFinding(
            kind=Kind.NO_DRIVER,
            level=Level.ERROR,
            name=DRIVER,
            node="a",
            text=f"{DRIVER} has no Ready pod here, but its claims are used by 1 pod: pods with its "
            "claims can neither restart nor terminate",
            evidence=("default/p",),
        )
    ]


@pytest.mark.parametrize(
    ("pods", "sets"),
    [
        # its DaemonSet is being updated, or cannot be read and may be in an update
        ([driver("b"), user()], (rollout(updated=1),)),
        ([driver("b"), user()], None),
        # its pod has been not Ready for only 30 s
        ([driver("a", ready="False", ready_s=30), user()], ()),
        # a driver whose pods are not known
        ([user()], ()),
    ],
)
def test_a_driver_that_may_be_back_soon_is_no_finding(pods: Any, sets: Any) -> None:
    nodes = [bare("a"), bare("b")]
    slices = [SLICE, published("b", "gpu-0")]
    read = findings(*nodes, pods=pods, slices=slices, claims=[claim("p")], daemon_sets=sets)
    assert read == []


@pytest.mark.parametrize(
    ("others", "level", "end", "evidence"),
    [
        ([], Level.WARN, "; it may have no devices here", ()),
        (["b", "c"], Level.ERROR, "", ("2 of 2 other g5.xlarge nodes have one",)),
    ],
)
def test_a_driver_that_runs_without_a_slice_is_named(
    others: list[str], level: Level, end: str, evidence: tuple[str, ...]
) -> None:
    nodes = [bare(name) for name in ("a", *others)]
    pods = [driver(name) for name in ("a", *others)]
    slices = [published(name, "gpu-0") for name in others]
    assert findings(*nodes, pods=pods, slices=slices) == [
        PluginFinding(
            kind=Kind.NO_SLICE,
            level=level,
            name="*.example.com",
            node="a",
            pod=POD,
            text="dra-example-driver runs and is Ready, but has published no ResourceSlice for "
            f"this node{end}",
            evidence=(f"{POD}: Ready for 60 minutes", *evidence),
        )
    ]


@pytest.mark.parametrize(
    ("pods", "slices"),
    [
        ([driver("a", ready_s=30)], []),
        ([driver("a")], None),
        ([driver("a")], [published("", "gpu-0", pool="all")]),
    ],
)
def test_a_driver_that_just_started_or_serves_all_nodes_is_no_finding(
    pods: Any, slices: Any
) -> None:
    assert findings(bare(), pods=pods, slices=slices) == []


@pytest.mark.parametrize(
    ("slices", "problem"),
    [
        ([published("a", "gpu-0", count=2)], "1 of 2 slices of its newest generation exist"),
        (
            [
                published("a", "gpu-0", generation=2, count=2, name="1-a"),
                published("a", "gpu-1", generation=1, name="0-a"),
            ],
            "1 of 2 slices of its newest generation exist",
        ),
        (
            [
                published("a", "gpu-0", count=2, name="1-a"),
                published("a", "gpu-0", count=2, name="0-a"),
            ],
            "device gpu-0 is in it twice",
        ),
    ],
)
def test_a_pool_that_the_scheduler_skips_is_an_error(slices: Any, problem: str) -> None:
    (first,) = findings(bare(), pods=[driver("a")], slices=slices)
    assert (first.kind, first.level, first.node, first.pod, first.text) == (
        Kind.POOL,
        Level.ERROR,
        "a",
        POD,
        f"the scheduler skips all devices of pool a of {DRIVER}: {problem}",
    )


@pytest.mark.parametrize(
    "slices",
    [
        [published("a", "gpu-0", count=2, age_s=30)],
        [published("a", "gpu-0", generation=2), published("a", "x", generation=1, name="old")],
        [published("a", "gpu-0", count=0)],
    ],
)
def test_a_pool_that_is_being_written_or_has_old_slices_is_no_finding(slices: Any) -> None:
    assert findings(bare(), pods=[driver("a")], slices=slices) == []


def ended(**metadata: Any) -> shapes.Pod:
    gone = {"deletionTimestamp": ago(600), "name": "p", "namespace": "default", "uid": "p"}
    return user(metadata={**gone, **metadata})


@pytest.mark.parametrize(
    ("pods", "level", "evidence"),
    [
        ([], Level.ERROR, (f"no Ready pod of {DRIVER} is known on a",)),
        ([driver("a")], Level.WARN, ()),
    ],
)
def test_a_pod_with_claims_that_does_not_end_is_named(
    pods: list[Any], level: Level, evidence: tuple[str, ...]
) -> None:
    read = findings(bare(), pods=[ended(), *pods], slices=[SLICE], claims=[claim("p")])
    assert read == [
        PluginFinding(
            kind=Kind.TERMINATING,
            level=level,
            name=DRIVER,
            node="a",
            pod="default/p",
            text="has been Terminating for 10 minutes without a running container: the kubelet may "
            f"wait until {DRIVER} has released its claims",
            evidence=evidence,
        )
    ]


RUNNING = [{"name": "c", "state": {"running": {"startedAt": ago(900)}}}]


@pytest.mark.parametrize(
    ("here", "pod"),
    [
        (bare(), ended(deletionTimestamp=ago(60))),
        (bare(), ended(finalizers=["batch.kubernetes.io/job-tracking"])),
        (bare(ready="Unknown"), ended()),
        (
            bare(),
            user(metadata={"deletionTimestamp": ago(600)}, containerStatuses=RUNNING),
        ),
        (bare(), user(asks=GPU, metadata={"deletionTimestamp": ago(600)})),
    ],
)
def test_a_pod_that_waits_for_something_else_is_no_finding(here: Any, pod: Any) -> None:
    assert findings(here, pods=[pod], slices=[SLICE], claims=[claim("p")]) == []


def device_class(resource: str, of: str) -> shapes.DeviceClass:
    selector = {"cel": {"expression": f'device.driver == "{of}"'}}
    spec = {"extendedResourceName": resource, "selectors": [selector]}
    return msgspec.convert({"metadata": {"name": "c"}, "spec": spec}, shapes.DeviceClass)


TWICE = (
    f"offers {GPU} through a device plugin and the devices of gpu.nvidia.com through DRA: the "
    "scheduler treats them as different devices, and may allocate one to two pods"
)


@pytest.mark.parametrize(
    ("read", "holder", "level", "evidence"),
    [
        ({}, user(asks=GPU), Level.WARN, ()),
        (
            {"classes": [device_class(GPU, "gpu.nvidia.com")]},
            user(asks=GPU),
            Level.ERROR,
            (f"a DeviceClass of gpu.nvidia.com also offers {GPU}",),
        ),
        (
            {},
            user(
                asks=GPU,
                containerStatuses=[
                    {
                        "name": "c",
                        "allocatedResourcesStatus": [
                            {"name": GPU, "resources": [{"resourceID": "GPU-7"}]}
                        ],
                    }
                ],
            ),
            Level.ERROR,
            ("GPU-7 is offered by both",),
        ),
    ],
)
def test_devices_that_are_offered_by_plugin_and_by_dra_are_named(
    read: dict[str, Any], holder: Any, level: Level, evidence: tuple[str, ...]
) -> None:
    slices = [published("a", "gpu-0", of="gpu.nvidia.com", uuid="GPU-7")]
    assert findings(node("a"), pods=[plugin("a"), holder], slices=slices, **read) == [
        PluginFinding(
            kind=Kind.OFFERED_TWICE,
            level=level,
            name=GPU,
            node="a",
            text=TWICE,
            evidence=(f"{GPU}: 8 allocatable", *evidence),
        )
    ]


def test_a_plugin_that_offers_none_beside_a_driver_is_no_double_offer() -> None:
    slices = [published("a", "gpu-0", of="gpu.nvidia.com")]
    assert findings(bare(), slices=slices) == []
    # a driver of another vendor offers other devices
    assert findings(node("a"), pods=[plugin("a")], slices=[SLICE]) == []


def test_a_pool_name_that_two_nodes_use_makes_two_devices_one() -> None:
    slices = [
        published("a", "gpu-0", "gpu-1", pool="gpus", count=2),
        published("b", "gpu-0", pool="gpus", count=2),
    ]
    assert findings(bare("a"), bare("b"), slices=slices) == [
        PluginFinding(
            kind=Kind.SAME_DEVICE,
            level=Level.ERROR,
            name=DRIVER,
            text=f"pool gpus of {DRIVER} is on 2 nodes: the scheduler treats all their devices "
            "named gpu-0 as one, so only one pod can get it",
            evidence=("a, b", "1 device in all"),
        )
    ]


def test_a_pod_whose_cdi_files_are_gone_is_an_error() -> None:
    text = "Error: unresolvable CDI devices k8s.gpu.example.com/gpu=1"
    waiting = {"waiting": {"reason": "CreateContainerError", "message": text}}
    pod = user(containerStatuses=[{"name": "c", "state": waiting}])
    (first,) = findings(bare(), pods=[driver("a"), pod], slices=[SLICE], claims=[claim("p")])
    assert (first.kind, first.level, first.name, first.pod, first.evidence) == (
        Kind.CDI,
        Level.ERROR,
        DRIVER,
        "default/p",
        (text,),
    )


def test_the_kubelet_that_forgets_quiet_drivers_is_named() -> None:
    here = bare()
    info = msgspec.structs.replace(here.status.node_info, kubelet_version="v1.34.0+k3s1")
    status = msgspec.structs.replace(here.status, node_info=info)
    deaf = msgspec.structs.replace(here, status=status)
    (first,) = findings(deaf, pods=[driver("a")], slices=[SLICE])
    assert (first.kind, first.level, first.evidence) == (
        Kind.KUBELET,
        Level.WARN,
        ("v1.34.0+k3s1",),
    )
