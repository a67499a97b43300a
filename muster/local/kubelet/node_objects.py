"""Pure: What a kubelet writes about its node: the Node, its status, its Lease."""

import msgspec

from muster.local.kubelet import devices, rules

LEASE_DURATION_S = 40

# JSON as the API speaks it.
Json = dict[str, object]


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine has beside devices; in the API's own notation."""

    cpu: str
    memory: str
    kernel: str
    architecture: str


def node_object(name: str, usage: Usage) -> Json:
    """Write the Node that a kubelet creates when it finds none."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
                "kubernetes.io/arch": usage.architecture,
            },
        },
    }


def node_status(
    status: devices.Status, usage: Usage, *, started: str, now: str, zero: frozenset[str]
) -> Json:
    """Write one node status update; resources in `zero` are shown at 0."""
    base = {"cpu": usage.cpu, "memory": usage.memory, "pods": "110"}
    none = dict.fromkeys(zero, "0")
    return {
        "status": {
            "capacity": base | none | _quantities(status.capacity),
            "allocatable": base | none | _quantities(status.allocatable),
            "conditions": [
                {
                    "type": "Ready",
                    "status": "True",
                    "reason": "KubeletReady",
                    "message": "kubelet is posting ready status",
                    "lastHeartbeatTime": now,
                    "lastTransitionTime": started,
                }
            ],
            "nodeInfo": {
                "kubeletVersion": "v1.36.2+muster-local",
                "kernelVersion": usage.kernel,
                "architecture": usage.architecture,
                "operatingSystem": "linux",
                "osImage": "muster local stand-in",
                "containerRuntimeVersion": "none://0",
            },
        }
    }


def extended_resources(node: object) -> frozenset[str]:
    """Name the device resources that a Node object shows, from a kubelet before us."""
    found = msgspec.convert(node, _Node).status.capacity
    return frozenset(name for name in found if rules.is_extended_resource(name))


def lease(node: str, now: str) -> Json:
    """Write the node's Lease, renewed now."""
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": node, "namespace": "kube-node-lease"},
        "spec": {
            "holderIdentity": node,
            "leaseDurationSeconds": LEASE_DURATION_S,
            "renewTime": now,
        },
    }


class _NodeStatus(msgspec.Struct):
    capacity: dict[str, object] = {}


class _Node(msgspec.Struct):
    status: _NodeStatus = msgspec.field(default_factory=_NodeStatus)


def _quantities(counts: dict[str, int]) -> dict[str, str]:
    return {name: rules.quantity(count) for name, count in counts.items()}
