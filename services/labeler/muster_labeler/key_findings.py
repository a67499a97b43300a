"""Pure: What is wrong with labels that others read: values they refuse, keys that mislead them."""

from collections.abc import Iterable
from typing import Final

from muster_labeler import facts, schemes
from muster_labeler.findings import Finding, Fix, Id, Scope, Severity, Where

_AUTOSCALERS_GPUS: Final = frozenset(
    {
        "nvidia.com/gpu",
        "amd.com/gpu",
        "gpu.intel.com/xe",
        "habana.ai/gaudi",
        facts.DIRECTX,
    }
)
"""What the Cluster Autoscaler takes for a GPU (processors/customresources/gpu_processor.go)."""
_PROVIDERS: Final = {
    "aws": frozenset({"k8s.amazonaws.com/accelerator"}),
    "azure": frozenset({"kubernetes.azure.com/accelerator", "accelerator"}),
    "external-cloudstack": frozenset({"accelerator"}),
    "digitalocean": frozenset({"cloud.digitalocean.com/gpu-node"}),
    "gce": frozenset({"cloud.google.com/gke-accelerator"}),
    "hcloud": frozenset({"hcloud/gpu-node"}),
}
"""Which key the Cluster Autoscaler looks at, by the scheme of a node's providerID."""


def invalid(node: facts.Node, where: Where) -> Iterable[Finding]:
    """Tell each value that its scheme refuses: the first one hides the scheme for the cluster."""
    for reading in schemes.read(node.labels):
        if reading.fault is None or (reading.scheme.id == "muster" and not reading.value):
            continue
        yield Finding(
            id=Id.GPU003,
            severity=Severity.ERROR,
            scope=Scope.NODE,
            object=node.name,
            message=f"{reading.scheme.key}={reading.value!r} is {reading.fault}",
            evidence=(f"scheme {reading.scheme.id}",),
            fix=Fix(command=where.kubectl("label", "node", node.name, f"{reading.scheme.key}-")),
        )


def held_unready(node: facts.Node, where: Where) -> Iterable[Finding]:
    """Tell each key by which the Cluster Autoscaler waits for a GPU that is not there."""
    if any(node.allocatable.get(name, 0) for name in _AUTOSCALERS_GPUS):
        return
    if node.ready_since is None:
        return
    provider = node.provider_id.partition("://")[0]
    if not provider:
        # no autoscaler can know whose machine this is
        return
    # a key is one provider's; where we do not know whose cloud this is, it may matter
    mine = _PROVIDERS.get(provider, schemes.AUTOSCALER_KEYS - {"accelerator"})
    for key in sorted(mine & node.labels.keys()):
        yield Finding(
            id=Id.GPU009,
            severity=Severity.ERROR if provider in _PROVIDERS else Severity.WARN,
            scope=Scope.NODE,
            object=node.name,
            message=f"the Cluster Autoscaler holds it for unready: {key} without a GPU",
            evidence=(f"{key}={node.labels[key]}", *resources(node)),
            fix=Fix(command=where.kubectl("label", "node", node.name, f"{key}-")),
        )


def resources(node: facts.Node) -> tuple[str, ...]:
    """Return in words how many accelerators a node has."""
    return tuple(
        f"{name}: {node.allocatable.get(name, 0)} of {node.capacity.get(name, 0)} allocatable"
        for name in sorted(node.accelerators)
    ) or ("no accelerator in its capacity",)
