"""Objects of a cluster with third-party device plugins and DRA drivers."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec

from muster.kubernetes import driver_findings, objects, plugin_facts, plugin_findings
from muster.kubernetes import plugin_objects as shapes
from muster.kubernetes.plugin_facts import PluginFinding

NOW: Final = datetime(2026, 1, 1, 12, tzinfo=UTC)
GPU: Final = "nvidia.com/gpu"
NVIDIA: Final = "nvcr.io/nvidia/k8s-device-plugin:v0.17.1"
DRIVER: Final = "gpu.example.com"
EXAMPLE: Final = "registry.k8s.io/dra-example-driver/dra-example-driver:v0.2.0"
HOUR: Final = 3600.0


def ago(seconds: float) -> str:
    """Return the time `seconds` before `NOW`, in the format of the Kubernetes API."""
    return (NOW - timedelta(seconds=seconds)).isoformat()


def node(
    name: str = "a",
    offers: Mapping[str, tuple[int, int]] | None = None,
    *,
    kind: str = "g5.xlarge",
    age_s: float = HOUR,
    ready: str = "True",
    **more: Any,
) -> objects.Node:
    """Return a node; `offers` contains capacity and allocatable of each resource."""
    counts = offers if offers is not None else {GPU: (8, 8)}
    labels = {"node.kubernetes.io/instance-type": kind, **more.pop("labels", {})}
    condition = {"type": "Ready", "status": ready, "lastTransitionTime": ago(age_s)}
    return msgspec.convert(
        {
            "metadata": {"name": name, "creationTimestamp": ago(age_s), "labels": labels},
            "spec": more,
            "status": {
                "capacity": {"cpu": "8", **{key: str(pair[0]) for key, pair in counts.items()}},
                "allocatable": {"cpu": "8", **{key: str(pair[1]) for key, pair in counts.items()}},
                "conditions": [condition],
                "nodeInfo": {"kubeletVersion": "v1.36.2"},
            },
        },
        objects.Node,
    )


def plugin(on: str = "a", *, image: str = NVIDIA, ready_s: float = HOUR, **more: Any) -> shapes.Pod:
    """Return a plugin's pod, Ready for `ready_s`, or not Ready with `ready="False"`."""
    condition = {
        "type": "Ready",
        "status": more.pop("ready", "True"),
        "lastTransitionTime": ago(ready_s),
    }
    container = {"name": "ctr", "ready": True, "state": {"running": {"startedAt": ago(ready_s)}}}
    return msgspec.convert(
        {
            "metadata": {
                "name": f"plugin-{on}",
                "namespace": "kube-system",
                "uid": f"plugin-{on}",
                "creationTimestamp": ago(ready_s),
                "labels": {"app": "plugin"},
                **more.pop("metadata", {}),
            },
            "spec": {"nodeName": on, "containers": [{"name": "ctr", "image": image}]},
            "status": {
                "phase": "Running",
                "conditions": [condition],
                "containerStatuses": [{**container, **more.pop("container", {})}],
            },
        },
        shapes.Pod,
    )


def driver(on: str = "a", **more: Any) -> shapes.Pod:
    """Return the pod of a DRA driver."""
    return plugin(on, image=EXAMPLE, **more)


def user(name: str = "p", *, on: str = "a", asks: str = "", **more: Any) -> shapes.Pod:
    """Return a pod that requests the resource `asks`, or has a resource claim if that is empty."""
    limits = {asks: "1"} if asks else {}
    spec = {"nodeName": on, "containers": [{"name": "c", "resources": {"limits": limits}}]}
    return msgspec.convert(
        {
            "metadata": {
                "name": name,
                "namespace": "default",
                "uid": name,
                "creationTimestamp": ago(HOUR),
                **more.pop("metadata", {}),
            },
            "spec": {**spec, **({} if asks else {"resourceClaims": [{"name": "gpu"}]})},
            "status": {"phase": "Running", "startTime": ago(HOUR), **more},
        },
        shapes.Pod,
    )


def claim(*pods: str, of: str = DRIVER) -> shapes.ResourceClaim:
    """Return a resource claim that is reserved for pods."""
    result = {"driver": of, "pool": "a", "device": "gpu-0", "request": "gpu"}
    consumers = [{"resource": "pods", "name": pod, "uid": pod} for pod in pods]
    return msgspec.convert(
        {
            "metadata": {"name": "claim", "namespace": "default"},
            "status": {"allocation": {"devices": {"results": [result]}}, "reservedFor": consumers},
        },
        shapes.ResourceClaim,
    )


def published(
    on: str = "a",
    *devices: str,
    pool: str = "",
    generation: int = 1,
    count: int = 1,
    age_s: float = HOUR,
    **more: Any,
) -> shapes.ResourceSlice:
    """Return a ResourceSlice of a node."""
    uuid = more.pop("uuid", "")
    attributes = {"uuid": {"string": uuid}} if uuid else {}
    return msgspec.convert(
        {
            "metadata": {"name": more.pop("name", f"0-{on}"), "creationTimestamp": ago(age_s)},
            "spec": {
                "driver": more.pop("of", DRIVER),
                "nodeName": on,
                "pool": {
                    "name": pool or on,
                    "generation": generation,
                    "resourceSliceCount": count,
                },
                "devices": [{"name": name, "attributes": attributes} for name in devices],
            },
        },
        shapes.ResourceSlice,
    )


def rollout(*, updated: int = 1) -> shapes.DaemonSet:
    """Return the plugins' DaemonSet on two nodes; its rollout is complete with `updated=2`."""
    return msgspec.convert(
        {
            "metadata": {"name": "plugin", "namespace": "kube-system", "generation": 2},
            "spec": {"selector": {"matchLabels": {"app": "plugin"}}},
            "status": {
                "observedGeneration": 2,
                "desiredNumberScheduled": 2,
                "updatedNumberScheduled": updated,
                "numberAvailable": 2,
            },
        },
        shapes.DaemonSet,
    )


def view(*nodes: objects.Node, pods: Any = (), **more: Any) -> plugin_facts.View:
    """Return the view of a cluster with these objects."""
    read = {"daemon_sets": (), "slices": (), **more}
    return plugin_facts.View(now=NOW, nodes=nodes, pods=pods, **read)


def findings(*nodes: objects.Node, pods: Any = (), **more: Any) -> list[PluginFinding]:
    """Return the findings about a cluster with these objects."""
    facts = plugin_facts.gather(view(*nodes, pods=pods, **more))
    return [*plugin_findings.evaluate(facts), *driver_findings.evaluate(facts)]
