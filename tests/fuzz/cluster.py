"""Fuzz targets for data from Kubernetes: nodes, pods, leases, and the kubelet's two sockets."""

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import google.protobuf.message
import msgspec

from muster import vocabulary
from muster.kubernetes import api, objects, scheduling
from muster.local import httpd
from muster.local.kubelet import device_manager, sockets
from muster.pb import deviceplugin_pb2 as dp
from muster.pb import podresources_pb2 as podres
from muster_health.kubernetes import cluster_facts
from muster_labeler.kubernetes import projection
from muster_labeler.naming import node_labels
from muster_plugin.config import resources
from muster_plugin.discovery import resource_plan
from muster_plugin.inventory import inventory
from muster_plugin.kubelet import allocation, podresources, protobuf
from muster_plugin.model import advertised
from tests.fuzz.target import compact, in_file, target

_NOW: Final = datetime(2026, 1, 2, tzinfo=UTC)
_NODE: Final = {
    "metadata": {
        "name": "node-a",
        "uid": "u",
        "resourceVersion": "7",
        "creationTimestamp": "2026-01-02T03:04:05Z",
        "labels": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "a": "b"},
        "annotations": {"muster.dev/accelerator-from": '{"source":"gfd","product":"H100"}'},
        "managedFields": [
            {
                "manager": "muster-labeler",
                "operation": "Apply",
                "time": "2026-01-02T03:04:05Z",
                "fieldsV1": {"f:metadata": {"f:labels": {"f:a": {}}}},
            }
        ],
    },
    "spec": {
        "providerID": "aws:///x",
        "unschedulable": True,
        "taints": [{"key": "k", "effect": "NoExecute"}],
    },
    "status": {
        "capacity": {"nvidia.com/gpu": "8", "memory": "131072Ki", "cpu": "1500m"},
        "allocatable": {"nvidia.com/gpu": "7"},
        "conditions": [
            {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-02T03:04:05Z"}
        ],
        "nodeInfo": {"containerRuntimeVersion": "containerd://2.1.0", "bootID": "b"},
    },
}
_POD: Final = {
    "metadata": {
        "name": "p",
        "namespace": "m",
        "uid": "u",
        "deletionTimestamp": "2026-01-02T03:04:05Z",
    },
    "spec": {
        "nodeName": "node-a",
        "containers": [
            {
                "name": "c",
                "resources": {"limits": {"nvidia.com/gpu": 1}, "requests": {"a.com/fuse": "1"}},
            }
        ],
    },
    "status": {
        "phase": "Running",
        "startTime": "2026-01-02T03:04:05Z",
        "conditions": [{"type": "Ready", "status": "False", "message": "fuse"}],
        "containerStatuses": [
            {
                "name": "c",
                "ready": True,
                "restartCount": 3,
                "state": {"running": {"startedAt": "2026-01-02T03:04:05Z"}},
                "lastState": {
                    "terminated": {"reason": "OOMKilled", "exitCode": 137, "message": "x"}
                },
            }
        ],
    },
}
_LEASE: Final = {
    "metadata": {"name": "node-a", "resourceVersion": "7"},
    "spec": {"holderIdentity": "node-a", "renewTime": "2026-01-02T03:04:05.000000Z"},
}


def _objects() -> Iterator[bytes]:
    yield from map(compact, (_NODE, _POD, _LEASE))
    yield compact({"items": [_POD], "metadata": {"resourceVersion": "7"}})
    yield compact(
        {"kind": "Status", "message": "no", "reason": "NotFound", "details": {"kind": "nodes"}}
    )


def _fields(*kinds: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(
        f'"{field.encode_name}":' for kind in kinds for field in msgspec.structs.fields(kind)
    )


@target(
    seeds=_objects,
    words=(
        *_fields(objects.Node, objects.Pod, objects.Metadata, objects.Lease, objects.LeaseSpec),
        *('"0001-01-01T00:00:00+23:59"', '"9999-12-31T23:59:59-23:59"', "1e3", "Ki", "128E"),
    ),
    long=lambda size: compact({"items": [_POD] * size}),
)
def kubernetes_objects(data: bytes) -> None:
    """Check that health and the labeler can read any object of the API, or report it unreadable."""
    answer = api.Answer(what="get", status=500, body=data)
    assert "\n" not in answer.problem
    with contextlib.suppress(*api.UNREADABLE):
        reduced = projection.read_node(msgspec.Raw(data))
        label = node_labels.label_status(reduced)
        assert label.wanted is None or len(label.wanted) <= 63
    with contextlib.suppress(*api.UNREADABLE):
        node = msgspec.json.decode(data, type=objects.Node)
        cluster_facts.is_ready(node)
        cluster_facts.planned(node)
        cluster_facts.offers(node)
    with contextlib.suppress(*api.UNREADABLE):
        pod = msgspec.json.decode(data, type=objects.Pod)
        cluster_facts.pod(pod, current_revision="r")
        projection.pod(pod)
        if pod.spec is not None:
            scheduling.selects_node(pod.spec, name="node-a", labels={"a": "b"})
    with contextlib.suppress(*api.UNREADABLE):
        cluster_facts.pods_requesting(data, {"nvidia.com/gpu"})
    with contextlib.suppress(*api.UNREADABLE):
        lease = msgspec.json.decode(data, type=objects.Lease)
        cluster_facts.age_s(lease.renewed_at, _NOW)


@target(
    seeds=lambda: iter((b"8", b"131072Ki", b"1500m", b"1e3", b"128E", b"-1", b"+.5Gi", b"0.1n")),
    words=("Ki", "Mi", "Gi", "e", "E", "-", "+", "m", "n"),
)
def quantities(data: bytes) -> None:
    """Check that any text is read as a Kubernetes quantity of bounded size."""
    text = data.decode("utf-8", "replace")
    count = scheduling.quantity_count(text)
    assert isinstance(count, int)
    assert count.bit_length() < 100_000
    scheduling.whole_quantity(text)


def _listings() -> Iterator[bytes]:
    devices = [podres.ContainerDevices(resource_name="a.com/x", device_ids=["x-0", "x-1"])]
    container = podres.ContainerResources(name="c", devices=devices)
    pod = podres.PodResources(name="p", namespace="ml", containers=[container])
    yield b"L" + podres.ListPodResourcesResponse(pod_resources=[pod]).SerializeToString()
    yield b"A" + podres.AllocatableResourcesResponse(devices=devices).SerializeToString()


@target(seeds=_listings)
def podresources_answers(data: bytes) -> None:
    """Check that any answer of the kubelet can be compared with the plugin's devices."""
    pods, allocatable = podres.ListPodResourcesResponse(), podres.AllocatableResourcesResponse()
    try:
        (pods if data[:1] == b"L" else allocatable).ParseFromString(data[1:])
    except google.protobuf.message.DecodeError:
        return
    listing = podresources.listing(pods, allocatable)
    device = vocabulary.Device(id="x-0", resource="a.com/x", health=vocabulary.Health.HEALTHY)
    ours = {"a.com/x": podresources.Advertised(devices=[device], sent_at=0.0)}
    check = podresources.PodResourcesCheck()
    for now in (1.0, 2.0, 5.0):
        check.compare(listing, ours, now)
    assert len(check.mismatch("a.com/x", 5.0)) < 2000
    listing.pods_by_resource()


_RULE: Final = resources.Resource(name="a.com/x", groups=(), env="", grace_s=60.0)


def _allocator() -> allocation.Allocator:
    units = tuple(
        advertised.Unit(id=f"x-{n}", physical=f"x{n}", identity={0: f"x{n}"}) for n in range(4)
    )
    offer = resource_plan.PlannedResource(name=_RULE.name, rule=_RULE, units=units)
    devices = inventory.Inventory(node="n1", plugin="p")
    devices.observe(resource_plan.Plan(resources=(offer,)), (_RULE,), now=0.0, at=_NOW)
    return allocation.Allocator(devices, _RULE.name)


def _asked() -> Iterator[bytes]:
    container = dp.ContainerAllocateRequest(devices_ids=["x-0", "x-1"])
    yield b"A" + dp.AllocateRequest(container_requests=[container]).SerializeToString()
    choice = dp.ContainerPreferredAllocationRequest(
        available_deviceIDs=["x-0", "x-1", "x-2"], must_include_deviceIDs=["x-1"], allocation_size=2
    )
    yield b"P" + dp.PreferredAllocationRequest(container_requests=[choice]).SerializeToString()


@target(
    seeds=_asked,
    words=("x-0", "x-1", "x-2", "x-3"),
    long=lambda size: (
        b"A"
        + dp.AllocateRequest(
            container_requests=[
                dp.ContainerAllocateRequest(devices_ids=[f"y-{n}" for n in range(size)])
            ]
        ).SerializeToString()
    ),
)
def kubelet_requests(data: bytes) -> None:
    """Check that any Allocate is answered or refused, and any GetPreferredAllocation answered."""
    allocator = _allocator()
    if data[:1] == b"P":
        request = dp.PreferredAllocationRequest()
        try:
            request.ParseFromString(data[1:])
        except google.protobuf.message.DecodeError:
            return
        protobuf.preferred(request, allocator)
        return
    asked = dp.AllocateRequest()
    try:
        asked.ParseFromString(data[1:])
    except google.protobuf.message.DecodeError:
        return
    containers = protobuf.requested(asked)
    try:
        answer = allocator.allocate(containers)
    except advertised.AllocationError as refused:
        assert len(str(refused)) < 2000
        return
    assert len(protobuf.allocated(answer).container_responses) == len(containers)


def _checkpoints() -> Iterator[bytes]:
    grant = device_manager.Grant(
        pod="u", container="c", resource="a.com/x", ids_by_node={-1: ("x-0",)}, answer=b""
    )
    written = device_manager.Checkpoint(grants=(grant,), healthy={"a.com/x": ("x-0",)})
    directory = in_file(b"").parent
    sockets.write_checkpoint(directory, written)
    yield (directory / sockets.CHECKPOINT).read_bytes()


@target(seeds=_checkpoints)
def checkpoints(data: bytes) -> None:
    """Check that the kubelet's stand-in reads a checkpoint, or refuses it with a message."""
    directory: Path = in_file(data).parent
    (directory / sockets.CHECKPOINT).write_bytes(data)
    try:
        sockets.read_checkpoint(directory)
    except httpd.UsageError as refused:
        assert str(refused)
