"""Karpenter in the real cluster, with a node group that starts at zero.

Karpenter, the scheduler and the API server are real. The nodes are simulated: Karpenter's provider
`kwok` creates a Node object instead of a machine, and the program kwok acts as its kubelet, which
reports each pod as Running.
"""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from scripts.cluster import layout, tools
from tests.worlds.real_cluster import Cluster, until

POOL: Final = "apps"
SELECTOR: Final[Mapping[str, str]] = MappingProxyType({"karpenter.sh/nodepool": POOL})
"""Selects the nodes of the group, which the cluster's real node is not in."""
_KWOK: Final = (
    f"--config={layout.TOOLS / 'kwok/stages.yaml'}",
    f"--manage-nodes-with-label-selector=karpenter.sh/nodepool={POOL}",
    "--node-lease-duration-seconds=40",
)
_INSTANCE: Final = {
    "name": "small",
    "architecture": "amd64",
    "operatingSystems": ["linux"],
    "resources": {"cpu": "2", "memory": "8Gi", "ephemeral-storage": "20Gi"},
    "offerings": [
        {
            "Price": 0.1,
            "Requirements": [
                {"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["on-demand"]},
                {"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["zone-a"]},
            ],
        }
    ],
}
"""The only kind of node that the group can have; Karpenter reserves 100m of its CPU."""
_CLASS: Final = {"group": "karpenter.kwok.sh", "kind": "KWOKNodeClass", "name": POOL}
_GROUP: Final = {
    "apiVersion": "v1",
    "kind": "List",
    "items": [
        {
            "apiVersion": "karpenter.kwok.sh/v1alpha1",
            "kind": "KWOKNodeClass",
            "metadata": {"name": POOL},
        },
        {
            "apiVersion": "karpenter.sh/v1",
            "kind": "NodePool",
            "metadata": {"name": POOL},
            "spec": {
                "limits": {"cpu": "8"},
                "disruption": {"consolidateAfter": "Never"},
                "template": {
                    "spec": {"nodeClassRef": _CLASS, "requirements": [], "expireAfter": "Never"}
                },
            },
        },
    ],
}


@contextlib.contextmanager
def node_group(cluster: Cluster, folder: Path) -> Iterator[None]:
    """Run Karpenter with an empty group of nodes; at the end remove its nodes and its CRDs."""
    programs = {name: tools.built(name, print) / name for name in ("kwok", "karpenter")}
    source = tools.source("karpenter", "sigs.k8s.io/karpenter")
    kinds = ("-f", str(source / "pkg/apis/crds"), "-f", str(source / "kwok/apis/crds"))
    cluster.good("apply", *kinds)
    cluster.good("wait", "--for=condition=Established", "--timeout=30s", *kinds)
    types = folder / "instance-types.json"
    types.write_text(json.dumps([_INSTANCE]))
    settings = {
        "KUBECONFIG": cluster.kubeconfig,
        "DISABLE_LEADER_ELECTION": "true",
        "INSTANCE_TYPES_FILE_PATH": str(types),
        # any free port
        "METRICS_PORT": "0",
        "HEALTH_PROBE_PORT": "0",
    }
    kwok = [str(programs["kwok"]), f"--kubeconfig={cluster.kubeconfig}", *_KWOK]
    with _running(kwok, {}), _running([str(programs["karpenter"])], settings):
        # what an interrupted run has left
        _remove(cluster)
        try:
            cluster.good("create", "-f", "-", given=_GROUP)
            cluster.good("wait", f"nodepool/{POOL}", "--for=condition=Ready", "--timeout=60s")
            yield
        finally:
            _remove(cluster)
    cluster.good("delete", *kinds)


def nodes(cluster: Cluster) -> list[dict[str, Any]]:
    """Return the group's nodes, oldest first."""
    listed = cluster.get("nodes", "", "-l", f"karpenter.sh/nodepool={POOL}")["items"]
    return sorted(listed, key=lambda node: str(node["metadata"]["creationTimestamp"]))


def claims(cluster: Cluster) -> list[dict[str, Any]]:
    """Return Karpenter's NodeClaims, oldest first."""
    listed = cluster.get("nodeclaims")["items"]
    return sorted(listed, key=lambda claim: str(claim["metadata"]["creationTimestamp"]))


def _remove(cluster: Cluster) -> None:
    """Delete the group; Karpenter then drains and deletes its nodes."""
    cluster.good("delete", "nodepools,kwoknodeclasses", "--all", "--timeout=60s")
    until(lambda: not claims(cluster) and not nodes(cluster), "Karpenter has deleted its nodes")


@contextlib.contextmanager
def _running(command: list[str], settings: Mapping[str, str]) -> Iterator[None]:
    """Run a program; pytest shows what it printed when a test fails."""
    with subprocess.Popen(command, env={**os.environ, **settings}) as process:
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
