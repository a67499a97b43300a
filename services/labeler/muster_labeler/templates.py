"""Pure: What a node group's template must say so that an autoscaler expects the fuse resource.

One setting for each platform, as the providers' code reads it (kubernetes/autoscaler 55c37cd;
Karpenter v1.14 NodeOverlay). From inside a cluster nobody can see whether it is there.
"""

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from muster_labeler import facts
from muster_labeler.findings import Where

SLOTS: Final = 1000

_AZURE: Final = re.compile(
    r"azure:///subscriptions/[^/]+/resourceGroups/([^/]+)/.*/virtualMachineScaleSets/([^/]+)/.*",
    re.IGNORECASE,
)
_GCE: Final = re.compile(r"gce://([^/]+)/([^/]+)/.+")
_GKE_CONTEXT: Final = re.compile(r"gke_([^_]+)_([^_]+)_(.+)")


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """One group, what its template lacks, and the command that says so."""

    platform: str
    group: str
    setting: str
    command: str


def settings(
    nodes: Iterable[facts.Node], resource: str, where: Where, *, groups: Sequence[str] = ()
) -> list[Setting]:
    """Return the setting for each node group that nodes show, or an autoscaler names."""
    found: set[Setting] = set()
    platforms = set()
    for node in nodes:
        platform = node.provider_id.partition("://")[0]
        platforms.add(platform)
        if platform == "gce":
            found.add(_gke(node, resource, where))
        elif platform == "azure":
            found.add(_azure(node, resource))
    if "aws" in platforms:
        found.update(_aws(group, resource) for group in groups)
    return sorted(found)


def overlay(resource: str, where: Where) -> Setting:
    """Return Karpenter's NodeOverlay: it gives the resource to every instance type."""
    document = (
        '{"apiVersion":"karpenter.sh/v1alpha1","kind":"NodeOverlay","metadata":{"name":"fuse"},'
        '"spec":{"requirements":[{"key":"karpenter.sh/nodepool","operator":"Exists"}],'
        f'"capacity":{{"{resource}":"{SLOTS}"}}}}}}'
    )
    command = f"echo {shlex.quote(document)} | {where.kubectl('apply', '-f', '-')}"
    return Setting("karpenter", "every NodePool", f"NodeOverlay capacity {resource}", command)


def cluster_api(group: str, resource: str) -> Setting:
    """Return where Cluster API reads other resources from: annotations cannot name them."""
    setting = f"status.capacity of the infrastructure template: {resource}: {SLOTS}"
    return Setting("cluster-api", group, setting, "")


def _aws(group: str, resource: str) -> Setting:
    key = f"k8s.io/cluster-autoscaler/node-template/resources/{resource}"
    tag = (
        f"ResourceId={group},ResourceType=auto-scaling-group,Key={key},Value={SLOTS},"
        "PropagateAtLaunch=false"
    )
    command = shlex.join(["aws", "autoscaling", "create-or-update-tags", "--tags", tag])
    return Setting("aws", group, f"tag {key}={SLOTS}", command)


def _gke(node: facts.Node, resource: str, where: Where) -> Setting:
    key = f"clusterautoscaler-nodetemplate-resources.{resource}"
    pool = node.labels.get("cloud.google.com/gke-nodepool", "")
    command = ""
    context = _GKE_CONTEXT.fullmatch(where.context or "")
    place = _GCE.fullmatch(node.provider_id)
    if pool and context and place:
        words = ["gcloud", "container", "node-pools", "describe", pool]
        words += ["--cluster", context[3], "--project", context[1], "--location", context[2]]
        command = shlex.join([*words, "--format=value(config.labels)"])
    # --node-labels replaces the labels of a pool, so we print what shows them, not what drops them
    return Setting("gke", pool or "the node pool", f"node label {key}={SLOTS}", command)


def _azure(node: facts.Node, resource: str) -> Setting:
    name = resource.replace("_", "~2").replace("/", "_")
    key = f"k8s.io_cluster-autoscaler_node-template_resources_{name}"
    found = _AZURE.fullmatch(node.provider_id)
    scale_set = found[2] if found else "the scale set"
    # `az vmss update --set tags.KEY` would take the dots of the key for a path
    identity = node.provider_id.removeprefix("azure://").rpartition("/virtualMachines/")[0]
    words = ["az", "tag", "update", "--operation", "Merge", "--resource-id", identity]
    words += ["--tags", f"{key}={SLOTS}"]
    return Setting("azure", scale_set, f"tag {key}={SLOTS}", shlex.join(words) if found else "")
