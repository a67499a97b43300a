"""`muster check` against the API stand-in: every finding, every exit code."""

import datetime as dt
import os
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree as ET  # for documents that muster wrote

import orjson
import pytest

from muster.local import nats
from muster.local.kubernetes import refusals
from muster_labeler.naming.sources import Product
from tests.worlds import labeler_cluster as clusters
from tests.worlds.labeler_cluster import GFD, KEY, Cluster, node

FUSE = "muster.dev/fuse"
T4 = {GFD: "Tesla-T4"}
AGENT = {"app.kubernetes.io/name": "muster-plugin"}
EKS = "k8s.amazonaws.com/accelerator"
REQUIRED = "required-plugins.noderesource.dev"
HIDES = "SkyPilot reads one scheme and does not see the other"
OLD, NEW = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
WHEN = "%Y-%m-%d %H:%M:%S.123456789 +0000 UTC"


@pytest.fixture
def here(tmp_path: pathlib.Path) -> Iterator[Cluster]:
    with clusters.cluster(tmp_path) as cluster:
        yield cluster


def pod(name: str = "p", *, on: str = "a", **more: Any) -> dict[str, Any]:
    running = {"state": {"running": {"startedAt": more.get("started", OLD)}}, "ready": True}
    limits = dict.fromkeys(more.get("asks", ()), "1")
    metadata = {"name": name, "namespace": "default", "annotations": more.get("annotations", {})}
    return {
        "kind": "Pod",
        "metadata": {**metadata, "labels": more.get("labels", {})},
        "spec": {
            "containers": [{"name": "c", "image": "i", "resources": {"limits": limits}}],
            **({"nodeName": on} if on else {}),
        },
        "status": {
            "phase": more.get("phase", "Running"),
            "containerStatuses": [{**running, **more.get("container", {})}],
            "conditions": more.get("conditions", []),
        },
    }


def put_pod(here: Cluster, made: dict[str, Any]) -> None:
    here.put(made)
    path = f"/api/v1/namespaces/default/pods/{made['metadata']['name']}/status"
    body = {"status": made["status"]}
    here.send("PATCH", path, body, "application/merge-patch+json")


def saying(text: str) -> dict[str, Any]:
    return {"ready": False, "lastState": {"terminated": {"message": text}}}


def event(reason: str, message: str, about: str = "p") -> dict[str, Any]:
    return {
        "kind": "Event",
        "metadata": {"name": f"{about}.{reason.lower()}", "namespace": "default"},
        "involvedObject": {"kind": "Pod", "name": about, "namespace": "default"},
        "reason": reason,
        "message": message,
    }


def autoscaler(
    *arguments: str, image: str = "registry.example.com/autoscaling/cluster-autoscaler:v1"
) -> dict[str, Any]:
    container = {"name": "ca", "image": image, "command": ["./cluster-autoscaler", *arguments]}
    return {
        "kind": "Deployment",
        "metadata": {"name": "cluster-autoscaler", "namespace": "kube-system"},
        "spec": {"template": {"spec": {"containers": [container]}}},
    }


def karpenter(gates: str) -> dict[str, Any]:
    env = [{"name": "FEATURE_GATES", "value": gates}]
    container = {"name": "c", "image": "public.ecr.aws/karpenter/controller:1.14", "env": env}
    return {
        "kind": "Deployment",
        "metadata": {"name": "karpenter", "namespace": "kube-system"},
        "spec": {"template": {"spec": {"containers": [container]}}},
    }


def slices(driver: str, on: str) -> dict[str, Any]:
    devices = [{"name": "fuse-0"}]
    return {
        "kind": "ResourceSlice",
        "metadata": {"name": f"{on}-{driver}"},
        "spec": {"driver": driver, "nodeName": on, "devices": devices},
    }


def status(at: dt.datetime) -> dict[str, Any]:
    return {
        "kind": "ConfigMap",
        "metadata": {
            "name": "cluster-autoscaler-status",
            "namespace": "kube-system",
            "annotations": {"cluster-autoscaler.kubernetes.io/last-updated": at.strftime(WHEN)},
        },
        "data": {"status": "nodeGroups:\n- name: workers\n"},
    }


def findings_of(report: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return id, severity, object and message of each finding except FUSE010."""
    return [
        (f["id"], f["severity"], f["object"], f["message"])
        for f in report["findings"]
        if f["id"] != "FUSE010"
    ]


UNLABELLED = f"no label {KEY}: expected"


@pytest.mark.parametrize(
    ("objects", "findings", "code"),
    [
        ([], [], 0),
        ([node(gpus=None)], [], 0),
        # a scheme that names every GPU node is enough
        ([node("a", labels=T4), node("b", labels=T4)], [], 0),
        (
            [node("a", labels=T4), node("b")],
            [
                (
                    "GPU004",
                    "error",
                    "nodes",
                    f"{GFD} is on some GPU nodes only: {HIDES} 1",
                ),
                ("GPU001", "suggest", "a", f"{UNLABELLED} t4"),
                (
                    "GPU010",
                    "unknown",
                    "b",
                    "no source reports which GPUs it has: no agent, no DRA, no label",
                ),
            ],
            1,
        ),
        (
            [node(labels={"doks.digitalocean.com/gpu-model": "h100"})],
            [("GPU001", "suggest", "a", f"{UNLABELLED} h100")],
            0,
        ),
        (
            [node(labels={KEY: "l4", **T4})],
            [("GPU002", "error", "a", "labelled l4 by kubectl, but the node has t4")],
            1,
        ),
        (
            [node(labels={KEY: "T4", **T4})],
            [("GPU003", "error", "a", f"{KEY}='T4' is not lower case")],
            1,
        ),
        (
            [node(labels={KEY: "", **T4})],
            [("GPU003", "error", "a", f"{KEY}='' is empty")],
            1,
        ),
        (
            [node(labels={KEY: "t4", **T4}, usable=0)],
            [("GPU005", "error", "a", "labelled t4, but no accelerator is allocatable")],
            1,
        ),
        (
            [node(labels={GFD: "NVIDIA-A100"})],
            [
                (
                    "GPU006",
                    "warn",
                    "a",
                    "may be a100; the name depends on the memory size, which is unknown",
                )
            ],
            0,
        ),
        (
            [node(labels={GFD: "NVIDIA-T400-4GB"})],
            [
                (
                    "GPU006",
                    "warn",
                    "a",
                    "an unknown model, maybe t400: review it, and add it to an alias file",
                )
            ],
            0,
        ),
        (
            [node(labels={GFD: "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb"})],
            [
                (
                    "GPU007",
                    "info",
                    "a",
                    "MIG partitions are not whole GPUs, so muster does not label the node",
                )
            ],
            0,
        ),
        (
            [node(labels={GFD: "GRID-A100X-40C"})],
            [
                (
                    "GPU007",
                    "info",
                    "a",
                    "virtual GPUs are not whole GPUs, so muster does not label the node",
                )
            ],
            0,
        ),
        (
            [node(labels={"nebius.com/gpu-name": "L4", "doks.digitalocean.com/gpu-model": "t4"})],
            [
                (
                    "GPU008",
                    "error",
                    "a",
                    "sources disagree about the model; the node is not labelled",
                )
            ],
            1,
        ),
        (
            [
                node(
                    gpus=None,
                    labels={"k8s.amazonaws.com/accelerator": "nvidia-l4"},
                    provider="aws:///z/i-1",
                )
            ],
            [
                (
                    "GPU009",
                    "error",
                    "a",
                    f"the Cluster Autoscaler treats the node as unready: it has {EKS}, but no GPU",
                )
            ],
            1,
        ),
        (
            [node()],
            [
                (
                    "GPU010",
                    "unknown",
                    "a",
                    "no source reports which GPUs it has: no agent, no DRA, no label",
                )
            ],
            0,
        ),
    ],
)
def test_each_state_of_gpu_labels_has_its_finding(
    here: Cluster, objects: list[dict[str, Any]], findings: list[tuple[str, ...]], code: int
) -> None:
    here.put(*objects)
    got, report = here.check("gpu")
    assert (findings_of(report), got) == (findings, code)
    assert here.check("gpu", "--strict")[0] == (
        1 if code or any(f[1] in {"warn", "suggest"} for f in findings) else 0
    )


def test_several_models_on_one_node_are_reported(here: Cluster) -> None:
    here.put(
        node(),
        clusters.reports({"a": {Product("Tesla T4", 15360): 1, Product("NVIDIA L4", 23034): 1}}),
    )
    _, report = here.check("gpu", "--muster-namespace", "default")
    assert findings_of(report) == [
        ("GPU006", "warn", "a", "several models on one node: no single label is right")
    ]


def test_what_agents_report_goes_before_labels(here: Cluster) -> None:
    here.put(node(labels=T4), clusters.reports({"a": {Product("NVIDIA L4", 23034): 2}}))
    code, report = here.check("gpu", "--muster-namespace", "default")
    assert (code, [finding[0] for finding in findings_of(report)]) == (1, ["GPU008"])
    assert report["findings"][0]["evidence"] == [
        "agent inventory: 2 x NVIDIA L4 (23034 MiB) -> l4 (exact)",
        f"GPU feature discovery: {GFD}=Tesla-T4 -> t4 (exact)",
    ]


@pytest.mark.parametrize(
    ("text", "id_"),
    [
        ("fuse: device not found, try 'modprobe fuse' first", "FUSE001"),
        ("fuse: failed to open /dev/fuse: Permission denied", "FUSE002"),
        ("fuse: failed to open /dev/fuse: Operation not permitted", "FUSE006"),
        ("fusermount3: mount failed: Operation not permitted", "FUSE007"),
    ],
)
def test_what_a_container_said_when_it_failed_is_understood(
    here: Cluster, text: str, id_: str
) -> None:
    here.put(node(gpus=None))
    put_pod(here, pod(container=saying(text)))
    code, report = here.check("fuse")
    first, recommended = report["findings"]
    assert (first["id"], first["object"], first["evidence"]) == (id_, "default/p", ["node a", text])
    assert recommended["id"] == "FUSE010"
    assert code == 1


def test_what_the_kubelet_said_of_a_missing_device_is_understood(here: Cluster) -> None:
    text = (
        "MountVolume.SetUp failed: hostPath type check failed: /dev/fuse is not a character device"
    )
    here.put(node(gpus=None), event("FailedMount", text))
    assert findings_of(here.check("fuse")[1]) == [
        ("FUSE001", "error", "default/p", "/dev/fuse is missing on the node")
    ]


DEVICE = "fuse.muster.dev/device"
ANNOTATED: dict[str, Any] = {"annotations": {DEVICE: "true"}}


@pytest.mark.parametrize(
    ("runtime", "severity"),
    [("containerd://1.6.3", "error"), ("containerd://1.7.9", "warn"), ("docker://20.10", "error")],
)
def test_a_runtime_that_cannot_add_devices_by_annotation_is_reported(
    here: Cluster, runtime: str, severity: str
) -> None:
    here.put(node(gpus=None, runtime=runtime))
    put_pod(here, pod(**ANNOTATED))
    report = here.check("fuse")[1]
    assert [f["severity"] for f in report["findings"] if f["id"] == "FUSE003"] == [severity]


def test_an_annotated_pod_needs_an_agent_a_namespace_and_its_order(here: Cluster) -> None:
    required = {"required-plugins.noderesource.dev": '["muster-fuse"]', DEVICE: "true"}
    here.put(node("a", gpus=None), node("b", gpus=None))
    put_pod(here, pod("lost", on="a", annotations=required))
    put_pod(here, pod("early", on="b", started=OLD, **ANNOTATED))
    giver = {"app.kubernetes.io/name": "muster-fuse-nri"}
    put_pod(here, pod("muster-fuse-nri-x", on="b", started=NEW, labels=giver))
    report = here.check("fuse")[1]
    refused = (
        "its namespace does not allow the device: no label fuse.muster.dev/device-allowed=true"
    )
    assert [finding for finding in findings_of(report) if finding[0] != "FUSE003"] == [
        ("FUSE004", "error", "a", "muster-fuse-nri is not ready, and default/lost needs it"),
        ("FUSE009", "error", "default/early", refused),
        ("FUSE009", "error", "default/lost", refused),
        (
            "FUSE005",
            "warn",
            "a",
            f"the runtime ignores {REQUIRED}: default/lost runs without muster-fuse-nri",
        ),
        (
            "FUSE006",
            "warn",
            "default/early",
            "it started before muster-fuse-nri on its node, so it may lack /dev/fuse",
        ),
    ]


def test_the_check_of_fuse_alone_recommends_a_way_and_is_no_problem(here: Cluster) -> None:
    here.put(node("a", gpus=None), autoscaler())
    put_pod(here, pod(asks=["smarter-devices/fuse"]))
    code, report = here.check("fuse", "--strict")
    (recommended,) = report["findings"]
    assert (code, recommended["id"], recommended["severity"]) == (0, "FUSE010", "info")
    assert recommended["message"] == (
        "use the volume of fuse.muster.dev: pods mount without a resource, a device or a "
        "capability; its webhook removes the fuse resource from new pods"
    )
    assert recommended["evidence"][0] == "Kubernetes v1.37.2"
    assert "autoscalers: the Cluster Autoscaler" in recommended["evidence"]
    assert [f["id"] for f in here.check("all")[1]["findings"] if f["id"] == "FUSE010"] == []
    assert here.check("fuse", "--node", "a")[1]["findings"] == []


def test_a_fuse_resource_at_0_is_reported_with_what_shows_why(here: Cluster) -> None:
    here.put(
        node("a", gpus=None, resources={FUSE: "0"}), node("b", gpus=None, resources={FUSE: "1000"})
    )
    put_pod(here, pod("muster-plugin-x", labels=AGENT))
    code, report = here.check("fuse")
    assert findings_of(report) == [
        (
            "FUSE008",
            "error",
            "a",
            f"{FUSE}: 0 devices (other nodes offer it); its plugin is gone or has not registered",
        )
    ]
    assert code == 1
    command_ = report["findings"][0]["fix"]["command"]
    assert shlex.split(command_)[5:] == [
        *("logs", "muster-plugin-x", "-n", "default", "--tail=50"),
    ]


def test_a_fuse_resource_that_a_removed_plugin_left_behind_is_no_problem(here: Cluster) -> None:
    left = node("a", gpus=None)
    for counts in ("capacity", "allocatable"):
        left["status"][counts]["squat.ai/fuse"] = "0"
    here.put(left)
    put_pod(here, pod("muster-plugin-x", labels=AGENT))
    code, report = here.check("fuse")
    message = (
        "squat.ai/fuse is left over from a plugin that is gone: no node offers it, and no pod "
        "requests it"
    )
    assert (code, findings_of(report)) == (0, [("FUSE008", "info", "a", message)])
    # send the patch of the printed command
    words = shlex.split(report["findings"][0]["fix"]["command"])
    assert words[5:-1] == ["patch", "node", "a", "--subresource=status", "--type=json", "-p"]
    content = "application/json-patch+json"
    here.send("PATCH", "/api/v1/nodes/a/status", orjson.loads(words[-1]), content)
    assert findings_of(here.check("fuse")[1]) == []

    # a pod that requests the resource makes this a problem
    here.put(left | {"metadata": {"name": "b"}})
    put_pod(here, pod(on="", phase="Pending", asks=["squat.ai/fuse"], container={}))
    code, report = here.check("fuse")
    text = "squat.ai/fuse: 0 devices; its plugin is gone or has not registered"
    assert (code, findings_of(report)) == (1, [("FUSE008", "error", "b", text)])


def test_a_gpu_resource_that_a_removed_plugin_left_behind_makes_no_gpu_node(here: Cluster) -> None:
    here.put(node("a", gpus=0), node("b", gpus=0, labels=T4))
    code, report = here.check("gpu")
    # a node whose labels name its GPU still counts: its plugin may only be unavailable
    assert (code, report["checked"], report["findings"]) == (0, {"nodes": 2, "gpuNodes": 1}, [])


def test_a_wrong_label_of_simulated_gpus_is_fixed_with_the_option_for_them(here: Cluster) -> None:
    here.put(
        node("a", labels={KEY: "t4"}),
        clusters.reports({"a": {Product("NVIDIA L4", 23034): 8}}, simulated=frozenset({"a"})),
    )
    words = ("--muster-namespace", "default")
    report = here.check("gpu", *words)[1]
    assert [entry["id"] for entry in report["findings"]] == ["GPU002"]
    command = shlex.split(report["findings"][0]["fix"]["command"])
    assert "--simulated" in command
    assert here.run(*(word for word in command[1:]))[0] == 0
    assert here.labels("a")[KEY] == "l4"


def test_a_pod_that_waits_for_a_resource_in_use_is_no_problem_of_an_autoscaler(
    here: Cluster,
) -> None:
    # a message of the scheduler of Kubernetes 1.37
    text = (
        f"0/1 nodes are available: 1 Insufficient {FUSE}. preemption: 0/1 nodes are available: "
        "1 No preemption victims found for incoming pod."
    )
    unscheduled = {"type": "PodScheduled", "status": "False", "message": text}
    here.put(node(gpus=None, resources={FUSE: "1"}))
    put_pod(here, pod(on="", phase="Pending", asks=[FUSE], conditions=[unscheduled], container={}))
    assert here.check("autoscaler")[1]["findings"] == []


def test_pods_that_no_autoscaler_helps_are_reported(here: Cluster) -> None:
    text = f"pod didn't trigger scale-up: 1 Insufficient {FUSE}"
    unscheduled = {
        "type": "PodScheduled",
        "status": "False",
        "message": f"0/1 nodes: 1 Insufficient {FUSE}",
    }
    here.put(node(gpus=None), event("NotTriggerScaleUp", text))
    put_pod(here, pod(on="", phase="Pending", asks=[FUSE], conditions=[unscheduled], container={}))
    code, report = here.check("autoscaler")
    assert findings_of(report) == [
        (
            "AS001",
            "error",
            "default/p",
            f"pending on {FUSE}: no node offers it, and autoscalers may not support it",
        ),
        ("AS005", "error", "default/p", f"the autoscaler adds no node for the pod: {text}"),
    ]
    assert code == 1


def test_karpenters_refusal_is_reported_with_what_the_pod_requests(here: Cluster) -> None:
    # a message of Karpenter 1.14.1; events of the scheduler have the same reason
    text = (
        "Failed to schedule pod, no instance type has enough resources, "
        "requirements=karpenter.sh/nodepool In [apps], "
        f'resources={{"cpu":"1500m","{FUSE}":"1","memory":"1Gi","pods":"1"}}'
    )
    from_karpenter = {**event("FailedScheduling", text), "reportingComponent": "karpenter"}
    from_scheduler = {
        **event("FailedScheduling", f"0/1 nodes are available: 1 Insufficient {FUSE}.", "q"),
        "reportingComponent": "default-scheduler",
    }
    here.put(node(gpus=None), from_karpenter, from_scheduler)
    said_ = (
        "the autoscaler adds no node for the pod: no instance type has enough resources, "
        f'resources={{"cpu":"1500m","{FUSE}":"1","memory":"1Gi","pods":"1"}}'
    )
    assert findings_of(here.check("autoscaler")[1]) == [("AS005", "error", "default/p", said_)]


@pytest.mark.parametrize(
    ("provider", "labels", "object_", "setting"),
    [
        (
            "aws:///eu-west-1a/i-1",
            {},
            "aws/workers",
            f"tag k8s.io/cluster-autoscaler/node-template/resources/{FUSE}=1000",
        ),
        (
            "gce://project/europe-west1/gke-x-1",
            {"cloud.google.com/gke-nodepool": "pool-1"},
            "gke/pool-1",
            f"node label clusterautoscaler-nodetemplate-resources.{FUSE}=1000",
        ),
        (
            "azure:///subscriptions/s/resourceGroups/rg/providers/Microsoft.Compute/virtualMachineScaleSets/vmss/virtualMachines/0",
            {},
            "azure/vmss",
            "tag k8s.io_cluster-autoscaler_node-template_resources_muster.dev_fuse=1000",
        ),
    ],
)
def test_a_template_that_must_offer_fuse_is_reported_with_the_platforms_setting(
    here: Cluster, provider: str, labels: dict[str, str], object_: str, setting: str
) -> None:
    here.put(
        node(gpus=None, provider=provider, labels=labels, resources={FUSE: "1000"}),
        autoscaler("--nodes=0:9:workers"),
    )
    report = here.check("autoscaler")[1]
    said_ = f"its template must offer {FUSE}, or no node is added; set {setting}"
    assert findings_of(report) == [("AS002", "suggest", object_, said_)]


def test_cluster_api_reads_other_resources_from_its_infrastructure_template(here: Cluster) -> None:
    here.put(
        node(gpus=None, resources={FUSE: "1000"}),
        autoscaler("--cloud-provider=clusterapi", "--nodes=0:9:workers"),
    )
    assert [finding[:3] for finding in findings_of(here.check("autoscaler")[1])] == [
        ("AS002", "suggest", "cluster-api/workers")
    ]


def test_an_autoscaler_that_ignores_the_resource_needs_no_template(here: Cluster) -> None:
    here.put(
        node(gpus=None, provider="aws:///z/i-1", resources={FUSE: "1000"}),
        autoscaler("--nodes=0:9:workers", "--scheduler-config-file=/c"),
    )
    assert findings_of(here.check("autoscaler")[1]) == []


def test_karpenter_needs_its_gate_and_an_overlay(here: Cluster) -> None:
    here.put(
        node(gpus=None, resources={FUSE: "1000"}), karpenter("SpotToSpot=true,NodeOverlay=false")
    )
    first = here.check("autoscaler")[1]
    assert [finding[:3] for finding in findings_of(first)] == [
        ("AS002", "suggest", "karpenter/every NodePool"),
        ("AS003", "suggest", "karpenter"),
    ]
    assert shlex.split(first["findings"][1]["fix"]["command"])[5:] == [
        *("set", "env", "deployment/karpenter", "-n", "kube-system"),
        "FEATURE_GATES=SpotToSpot=true,NodeOverlay=true",
    ]
    overlay = {
        "kind": "NodeOverlay",
        "metadata": {"name": "fuse"},
        "spec": {"capacity": {FUSE: "1000"}},
    }
    here.put(overlay)
    assert findings_of(here.check("autoscaler")[1]) == [
        (
            "AS003",
            "warn",
            "karpenter",
            "Karpenter's feature gate NodeOverlay is off, so it ignores NodeOverlays",
        )
    ]


def test_node_local_devices_for_fuse_are_reported(here: Cluster) -> None:
    here.put(node(gpus=None), slices("fuse.example.com", "a"))
    assert findings_of(here.check("autoscaler")[1]) == [
        (
            "AS004",
            "warn",
            "fuse.example.com",
            "on nodes with DRA fuse devices, scale-down considers only the use of these devices",
        )
    ]


def test_an_autoscaler_whose_status_is_old_is_reported(here: Cluster) -> None:
    here.put(status(dt.datetime.now(dt.UTC) - dt.timedelta(hours=1)))
    code, report = here.check("autoscaler")
    assert (code, [finding[:3] for finding in findings_of(report)]) == (
        1,
        [("AS006", "error", "cluster-autoscaler")],
    )
    assert here.check("gpu")[0] == 0


def test_missing_permissions_give_unknown_lines_and_are_named(here: Cluster) -> None:
    here.put(node(labels={KEY: "t4", **T4}))
    limited = here.user(("list", "pods"), ("list", "events"))
    code, report = here.check("all", kubeconfig=limited)
    assert (code, findings_of(report)) == (
        4,
        [
            ("ACCESS", "unknown", "events", "cannot be read: not allowed to list events"),
            ("ACCESS", "unknown", "pods", "cannot be read: not allowed to list pods"),
        ],
    )
    assert here.check("gpu", kubeconfig=limited)[0] == 0
    here.api.users.deny("limited", "list", "nodes")
    assert here.check("gpu", kubeconfig=limited)[0] == 4


def test_an_error_counts_more_than_what_cannot_be_read(here: Cluster) -> None:
    here.put(node(labels={KEY: "l4", **T4}))
    assert here.check("all", kubeconfig=here.user(("list", "pods")))[0] == 1


def test_sources_that_cannot_be_read_are_noted_and_decide_nothing(here: Cluster) -> None:
    here.put(node(labels={KEY: "t4", **T4}))
    code, report = here.check("gpu", kubeconfig=here.user(("*", "resourceslices")))
    assert (code, findings_of(report), len(report["notes"])) == (0, [], 1)


def test_one_node_can_be_checked(here: Cluster) -> None:
    here.put(node("a", labels={KEY: "l4", **T4}), node("b", labels={KEY: "l4", **T4}))
    assert [finding[2] for finding in findings_of(here.check("gpu", "--node", "b")[1])] == ["b"]
    assert here.run("check", "gpu", "--node", "c") == (2, "", "muster check: no such node: c\n")


@pytest.mark.parametrize("reason", [refusals.Reason.UNAVAILABLE, refusals.Reason.TOO_MANY_REQUESTS])
def test_an_api_that_refuses_lists_is_no_crash(here: Cluster, reason: refusals.Reason) -> None:
    here.put(node(labels={KEY: "l4", **T4}))
    here.api.refuse("/api/v1/pods", reason)
    code, report = here.check("all", "--timeout", "5s")
    ids = [finding[0] for finding in findings_of(report)]
    assert (code, ids, findings_of(report)[1][2]) == (1, ["GPU002", "UNREAD"], "/api/v1/pods")
    assert findings_of(report)[1][3].startswith("cannot be read: get /api/v1/pods: HTTP ")


@pytest.mark.parametrize("path", ["/api/v1/nodes", "/apis/resource.k8s.io", "/api/v1/namespaces"])
def test_what_was_not_read_is_never_fine(here: Cluster, path: str) -> None:
    here.put(node(labels={KEY: "t4", **T4}))
    here.api.refuse(path, refusals.Reason.UNAVAILABLE)
    code, report = here.check("gpu", "--timeout", "2s")
    assert (code, [finding[:2] for finding in findings_of(report)]) == (3, [("UNREAD", "unknown")])
    before = here.labels("a") if path != "/api/v1/nodes" else {}
    code, _, errors = here.run("label-gpus", "--apply", "--yes", "--overwrite", "--timeout", "2s")
    assert (code, "HTTP 503" in errors) == (3, True)
    here.api.allow(path)
    assert here.labels("a") == before or {KEY: "t4", **T4}


def test_an_unreachable_cluster_and_rejected_credentials_give_3(
    here: Cluster, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "stranger"
    here.api.write_kubeconfig(file)
    text = file.read_text().replace('"user": {}', '"user": {"token": "eve"}')
    file.write_text(text)
    code, _, errors = here.run("check", kubeconfig=str(file))
    name = f"{here.api.url} (context muster)"
    assert (code, errors) == (3, f"muster check: {name}: get /version: HTTP 401 Unauthorized\n")
    file.write_text(text.replace(here.api.url, f"http://127.0.0.1:{nats.free_port()}"))
    assert here.run("check", "--timeout", "2s", kubeconfig=str(file))[0] == 3
    assert here.run("check", kubeconfig="/nowhere")[0] == 3


@pytest.mark.parametrize("words", [["nothing"], ["--timeout", "soon"], ["--output", "xml"]])
def test_what_cannot_be_meant_gives_2(here: Cluster, words: list[str]) -> None:
    assert here.run("check", *words)[0] == 2


def test_the_printed_command_has_the_same_options(
    here: Cluster, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.put(
        node("a"),
        clusters.reports({"a": {Product("NVIDIA L4", 23034): 8}}, simulated=frozenset({"a"})),
    )
    file = tmp_path / "reviewed names.yaml"
    file.write_text("X: x")
    monkeypatch.setenv("KUBECONFIG", here.kubeconfig)
    words = ("check", "gpu", "--muster-namespace", "default", "--aliases", str(file))
    report = orjson.loads(here.run(*words, "--output", "json", kubeconfig="")[1])
    command_ = report["findings"][0]["fix"]["command"]
    assert command_ == shlex.join(
        [
            *("muster", "label-gpus", "--apply", "--yes", "--simulated"),
            *("--context", "muster", "--kubeconfig", here.kubeconfig),
            *("--muster-namespace", "default", "--aliases", str(file)),
        ]
    )
    assert not report["findings"][0]["safeToAutoApply"]
    assert here.run(*shlex.split(command_)[1:])[0] == 0
    assert here.labels("a")[KEY] == "l4"


def test_what_a_product_is_called_commands_no_terminal_and_no_shell(here: Cluster) -> None:
    evil = "Evil\x1b]0;pwned\x07\x1b[2J'; touch pwned; '"
    here.put(node("a"), clusters.reports({"a": {Product(evil): 1}}))
    code, out, _ = here.run("check", "gpu", "--muster-namespace", "default")
    assert (code, all(c.isprintable() or c == "\n" for c in out)) == (0, True)
    _, report = here.check("gpu", "--muster-namespace", "default")
    assert report["findings"][0]["fix"]["command"].startswith("kubectl ")


@pytest.mark.parametrize("output", ["json", "junit"])
def test_a_program_reads_one_document_also_where_there_is_no_cluster(
    here: Cluster, output: str
) -> None:
    code, out, errors = here.run("check", "--output", output, kubeconfig="/nowhere")
    assert (code, errors.count("\n")) == (3, 1)
    if output == "json":
        assert [f["id"] for f in orjson.loads(out)["findings"]] == ["UNREAD"]
    else:
        assert ET.fromstring(out).get("skipped") == "1"  # noqa: S314  # muster wrote it


@pytest.mark.parametrize(
    ("provider", "key", "severity"),
    [
        ("", "accelerator", None),
        ("", EKS, None),
        ("kind://x", "accelerator", None),
        ("kind://x", EKS, "warn"),
        ("azure:///x", "accelerator", "error"),
        ("external-cloudstack:///x", "accelerator", "error"),
        ("gce://x", EKS, None),
    ],
)
def test_a_key_is_an_autoscalers_where_that_autoscaler_can_be(
    here: Cluster, provider: str, key: str, severity: str | None
) -> None:
    here.put(node(gpus=None, labels={key: "frontend"}, provider=provider))
    _, report = here.check("gpu")
    severities = [f["severity"] for f in report["findings"] if f["id"] == "GPU009"]
    assert severities == ([severity] if severity else [])


def test_what_the_autoscaler_takes_for_a_gpu_is_one_to_it(here: Cluster) -> None:
    here.put(
        node(
            gpus=None,
            resources={"microsoft.com/directx": "1"},
            labels={"kubernetes.azure.com/accelerator": "nvidia"},
            provider="azure:///x",
        )
    )
    assert here.check("gpu")[1]["findings"] == []


def test_junit_has_a_case_for_each_finding(here: Cluster) -> None:
    here.put(node("a", labels={KEY: "l4", **T4}), node("b"))
    code, out, _ = here.run("check", "gpu", "--output", "junit")
    suite = ET.fromstring(out)  # noqa: S314  # muster wrote it
    cases = [(case.get("classname"), case.get("name")) for case in suite.iter("testcase")]
    assert code == 1
    assert cases == [("GPU002", "a"), ("GPU004", "nodes"), ("GPU010", "b")]
    assert (suite.get("failures"), suite.get("skipped")) == ("2", "1")


def test_text_has_a_line_for_each_finding_and_then_what_fixes_it(here: Cluster) -> None:
    here.put(node("a", labels={KEY: "l4", **T4}))
    code, out, _ = here.run("check", "gpu")
    lines = out.splitlines()
    mended = "muster label-gpus --apply --overwrite --yes"
    assert code == 1
    assert lines[0] == "ERROR    GPU002   a: labelled l4 by kubectl, but the node has t4"
    assert lines[2:5] == [
        "To fix:",
        "  # GPU002",
        f"  {mended} --node a --context muster --kubeconfig {here.kubeconfig}",
    ]
    assert lines[-1] == f"{here.api.url} (context muster): 1 error (1 node, 1 GPU node)"


def test_every_printed_command_runs_and_the_cluster_is_fine_in_the_end(
    here: Cluster, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here.put(
        node("a", labels={KEY: "l4", **T4}),
        node("b", labels=T4),
        node("d", labels={GFD: "NVIDIA-T400-4GB"}),
        node("e", labels={GFD: "NVIDIA-A100"}),
        node("f", gpus=None, labels={"k8s.amazonaws.com/accelerator": "x"}, provider="aws:///i"),
        node("g", labels={KEY: "T4", **T4}),
    )
    monkeypatch.setenv("PATH", f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    failed = []
    reviewed: list[str] = []
    for _ in range(3):
        _, report = here.check("gpu", *reviewed)
        for fix in dict.fromkeys(f["fix"]["command"] for f in report["findings"]):
            if fix.startswith("muster "):
                code = here.run(*shlex.split(fix)[1:])[0]
            else:
                code = subprocess.run(fix, shell=True, check=False, capture_output=True).returncode  # noqa: S602  # as printed
            if code and not fix.startswith("muster check "):
                failed.append(fix)
        reviewed = ["--aliases", "muster-aliases.yaml"]
    # all or none: the A100 gets no label until the name of another product is reviewed
    assert [fix.split(" --context")[0] for fix in failed] == [
        "muster label-gpus --apply --force-ambiguous --yes"
    ]
    assert {name: here.labels(name).get(KEY) for name in "abdeg"} == {
        "a": "t4",
        "b": "t4",
        "g": "t4",
        "d": "t400",
        "e": "a100",
    }
    assert "k8s.amazonaws.com/accelerator" not in here.labels("f")
    assert findings_of(here.check("gpu", *reviewed)[1]) == []


def test_the_real_command_has_the_exit_codes_of_the_table(here: Cluster) -> None:
    def run(*words: str) -> int:
        muster = pathlib.Path(sys.executable).with_name("muster")
        return subprocess.run([str(muster), *words], check=False, capture_output=True).returncode

    here.put(node("a", labels={KEY: "t4", **T4}))
    with_ = ("--kubeconfig", here.kubeconfig)
    limited = here.user(("list", "pods"))
    assert run("check", "gpu", *with_) == 0
    assert run("check", "all", "--kubeconfig", limited) == 4
    assert run("check", "--nonsense", *with_) == 2
    assert run("check", "--kubeconfig", "/nowhere") == 3
    here.put(node("b", labels={KEY: "", **T4}))
    assert run("check", "gpu", *with_) == 1
    report = orjson.loads(here.run("check", "gpu", "--output", "json")[1])
    assert report["schemaVersion"] == 1
