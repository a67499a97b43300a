"""Pure: finds problems that keep an autoscaler from adding nodes for fuse (AS001 to AS006).

Without a setting in the template of a node group, an autoscaler does not expect the fuse resource
on new nodes. Each platform has its own setting, as in the providers' code (kubernetes/autoscaler
55c37cd; Karpenter v1.14 NodeOverlay); templates are not visible from inside a cluster.
"""

import datetime as dt
import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from muster_labeler import model
from muster_labeler.check import findings
from muster_labeler.check.findings import ClusterView, Commands, Finding, Id, Severity

_REFUSALS: Final = frozenset({"NotTriggerScaleUp", "FailedScheduling"})
"""The event reasons with which Cluster Autoscaler and Karpenter report that they add no node."""
_INSUFFICIENT: Final = re.compile(r"Insufficient ([-a-z0-9.]+/fuse[-_.A-Za-z0-9]*)")
_KARPENTER: Final = re.compile(r"(no instance type [^,]+).* (resources=.*/fuse.*)", re.DOTALL)
"""Karpenter's message: why no instance type is suitable, and all resources that the pod requests.

The message does not name the missing resource (v1.14,
pkg/controllers/provisioning/scheduling/nodeclaim.go).
"""
_GATE: Final = re.compile(r"NodeOverlay=true", re.IGNORECASE)
_STALE: Final = dt.timedelta(minutes=5)
"""The age at which the Cluster Autoscaler's status is reported as stale.

The status is renewed in each loop, every 10 s by default (--scan-interval).
"""
_SLOTS: Final = 1000
_AZURE: Final = re.compile(
    r"azure:///subscriptions/[^/]+/resourceGroups/([^/]+)/.*/virtualMachineScaleSets/([^/]+)/.*",
    re.IGNORECASE,
)
_GCE: Final = re.compile(r"gce://([^/]+)/([^/]+)/.+")
_GKE_CONTEXT: Final = re.compile(r"gke_([^_]+)_([^_]+)_(.+)")


def evaluate(view: ClusterView, commands: Commands, *, only: str | None = None) -> list[Finding]:
    """Return the findings about autoscalers and fuse; with `only`, just AS004."""
    nodes = [node for node in view.nodes or () if only in {None, node.name}]
    pending = [p for p in view.pods or () if p.phase == "Pending" and not p.node and p.requests]
    result: list[Finding] = [*_node_local(view.slices, commands)]
    if only is not None:
        return result
    offered = {name for node in view.nodes or () for name, count in node.fuse.items() if count}
    for pod in pending:
        result.extend(_pending(pod, offered, commands))
    refused = [event for event in view.events or () if event.reason in _REFUSALS]
    result.extend(_refused(refused, commands))
    result.extend(_templates(view, nodes, pending, commands))
    result.extend(_gate(view, commands))
    result.extend(_stale_status(view, commands))
    return result


def _resources(view: ClusterView) -> list[str]:
    """Return the fuse resources that nodes list or pods request."""
    offered = {name for node in view.nodes or () for name in node.fuse}
    requested = {name for pod in view.pods or () for name in pod.requests}
    return sorted(offered | requested)


def _pending(pod: model.Pod, offered: Collection[str], commands: Commands) -> Iterable[Finding]:
    """Report a pod that waits for a resource that no node has.

    A resource that nodes offer is not reported, even if all of it is in use: autoscalers can derive
    it from those nodes.
    """
    # a name may contain dots, and the scheduler's sentence also ends with a dot
    short = {m[1].rstrip(".") for text in pod.messages for m in _INSUFFICIENT.finditer(text)}
    unknown = sorted(short.intersection(pod.requests).difference(offered))
    if not unknown:
        return
    yield findings.finding(
        Id.AS001,
        Severity.ERROR,
        f"{pod.namespace}/{pod.name}",
        f"pending on {', '.join(unknown)}: no node offers it, and autoscalers may not support it",
        evidence=pod.messages[:3],
        command=commands.kubectl("describe", "pod", pod.name, "-n", pod.namespace),
    )


def _refused(events: Iterable[model.KubernetesEvent], commands: Commands) -> Iterable[Finding]:
    for event in events:
        if match := _KARPENTER.search(event.text):
            text = f"{match[1]}, {match[2]}"
        elif _INSUFFICIENT.search(event.text) or "cannot allocate all claims" in event.text:
            text = event.text
        else:
            continue
        yield findings.finding(
            Id.AS005,
            Severity.ERROR,
            f"{event.namespace}/{event.name}",
            f"the autoscaler adds no node for the pod: {text[:300]}",
            evidence=(f"event {event.reason}",),
            command=commands.kubectl("get", "events", "-n", event.namespace),
        )


def _templates(
    view: ClusterView, nodes: list[model.Node], pending: list[model.Pod], commands: Commands
) -> Iterable[Finding]:
    """Report the node groups whose templates must offer a fuse resource."""
    in_use = _resources(view)
    if not in_use or (view.autoscaler is None and view.karpenter is None):
        return
    resource = next(iter(p.requests[0] for p in pending), in_use[0])
    settings: list[_TemplateSetting] = []
    if view.karpenter is not None and resource not in view.karpenter.overlays:
        settings.append(_overlay(resource, commands))
    if view.autoscaler is not None and not _ignores(view.autoscaler.arguments):
        groups = view.autoscaler.groups
        settings.extend(_template_settings(nodes, resource, commands, groups=groups))
        if "--cloud-provider=clusterapi" in view.autoscaler.arguments:
            settings.extend(_cluster_api(group, resource) for group in groups)
    for setting in settings:
        yield findings.finding(
            Id.AS002,
            Severity.WARN if pending else Severity.SUGGEST,
            f"{setting.platform}/{setting.group}",
            f"its template must offer {resource}, or no node is added; set {setting.setting}",
            evidence=("templates are not visible from inside the cluster",)
            if setting.platform != "karpenter"
            else ("no NodeOverlay adds it",),
            command=setting.command,
        )


def _ignores(arguments: Iterable[str]) -> bool:
    """Return whether a scheduler configuration may make the autoscaler ignore the resource."""
    return any(argument.startswith("--scheduler-config-file") for argument in arguments)


def _gate(view: ClusterView, commands: Commands) -> Iterable[Finding]:
    karpenter = view.karpenter
    if karpenter is None or _GATE.search(karpenter.gates) or not _resources(view):
        return
    yield findings.finding(
        Id.AS003,
        Severity.WARN if karpenter.overlays else Severity.SUGGEST,
        "karpenter",
        "Karpenter's feature gate NodeOverlay is off, so it ignores NodeOverlays",
        evidence=(f"FEATURE_GATES={karpenter.gates}",),
        command=commands.kubectl(
            *("set", "env", f"deployment/{karpenter.name}", "-n", karpenter.namespace),
            f"FEATURE_GATES={_with_gate(karpenter.gates)}",
        )
        if karpenter.name
        else "",
    )


def _with_gate(gates: str) -> str:
    others = [gate for gate in gates.split(",") if gate and not gate.startswith("NodeOverlay=")]
    return ",".join([*others, "NodeOverlay=true"])


def _node_local(slices: Iterable[model.ResourceSlice], commands: Commands) -> Iterable[Finding]:
    for driver in sorted({s.driver for s in slices if s.node and _is_fuse(s)}):
        yield findings.finding(
            Id.AS004,
            Severity.WARN,
            driver,
            "on nodes with DRA fuse devices, scale-down considers only the use of these devices",
            evidence=(f"ResourceSlices of driver {driver} with a node name",),
            command=commands.kubectl("get", "resourceslices", "-o", "wide"),
        )


def _is_fuse(slice_: model.ResourceSlice) -> bool:
    return "fuse" in slice_.driver or any("fuse" in device for device in slice_.devices)


def _stale_status(view: ClusterView, commands: Commands) -> Iterable[Finding]:
    """Report an autoscaler with a stale status; its events and health check do not show that."""
    autoscaler = view.autoscaler
    if autoscaler is None or autoscaler.renewed is None:
        return
    age = view.now - autoscaler.renewed
    if age < _STALE:
        return
    yield findings.finding(
        Id.AS006,
        Severity.ERROR,
        "cluster-autoscaler",
        f"its status is {int(age.total_seconds())} s old: its main loop fails, or its pod is gone",
        evidence=(f"kube-system/cluster-autoscaler-status of {autoscaler.renewed.isoformat()}",),
        command=commands.kubectl(
            *("get", "configmap", "cluster-autoscaler-status", "-n", "kube-system", "-o", "yaml")
        ),
    )


@dataclass(frozen=True, slots=True, order=True)
class _TemplateSetting:
    """A node group, the setting that its template needs, and the command for it (may be empty)."""

    platform: str
    group: str
    setting: str
    command: str


def _template_settings(
    nodes: Iterable[model.Node], resource: str, commands: Commands, *, groups: Sequence[str] = ()
) -> list[_TemplateSetting]:
    """Return the setting for each node group, from the nodes and the autoscaler's `groups`."""
    settings: set[_TemplateSetting] = set()
    platforms = set()
    for node in nodes:
        platform = node.provider_id.partition("://")[0]
        platforms.add(platform)
        if platform == "gce":
            settings.add(_gke(node, resource, commands))
        elif platform == "azure":
            settings.add(_azure(node, resource))
    if "aws" in platforms:
        settings.update(_aws(group, resource) for group in groups)
    return sorted(settings)


def _overlay(resource: str, commands: Commands) -> _TemplateSetting:
    """Return the Karpenter NodeOverlay that adds the resource to every instance type."""
    document = (
        '{"apiVersion":"karpenter.sh/v1alpha1","kind":"NodeOverlay","metadata":{"name":"fuse"},'
        '"spec":{"requirements":[{"key":"karpenter.sh/nodepool","operator":"Exists"}],'
        f'"capacity":{{"{resource}":"{_SLOTS}"}}}}}}'
    )
    command = f"echo {shlex.quote(document)} | {commands.kubectl('apply', '-f', '-')}"
    return _TemplateSetting(
        "karpenter", "every NodePool", f"NodeOverlay capacity {resource}", command
    )


def _cluster_api(group: str, resource: str) -> _TemplateSetting:
    """Return the setting from which Cluster API reads resources that annotations cannot name."""
    setting = f"{resource}: {_SLOTS} in status.capacity of the infrastructure template"
    return _TemplateSetting("cluster-api", group, setting, "")


def _aws(group: str, resource: str) -> _TemplateSetting:
    key = f"k8s.io/cluster-autoscaler/node-template/resources/{resource}"
    tag = (
        f"ResourceId={group},ResourceType=auto-scaling-group,Key={key},Value={_SLOTS},"
        "PropagateAtLaunch=false"
    )
    command = shlex.join(["aws", "autoscaling", "create-or-update-tags", "--tags", tag])
    return _TemplateSetting("aws", group, f"tag {key}={_SLOTS}", command)


def _gke(node: model.Node, resource: str, commands: Commands) -> _TemplateSetting:
    key = f"clusterautoscaler-nodetemplate-resources.{resource}"
    pool = node.labels.get("cloud.google.com/gke-nodepool", "")
    command = ""
    context = _GKE_CONTEXT.fullmatch(commands.context or "")
    place = _GCE.fullmatch(node.provider_id)
    if pool and context and place:
        words = ["gcloud", "container", "node-pools", "describe", pool]
        words += ["--cluster", context[3], "--project", context[1], "--location", context[2]]
        command = shlex.join([*words, "--format=value(config.labels)"])
    # --node-labels would replace all labels of the pool, so the command only shows them
    return _TemplateSetting("gke", pool or "the node pool", f"node label {key}={_SLOTS}", command)


def _azure(node: model.Node, resource: str) -> _TemplateSetting:
    name = resource.replace("_", "~2").replace("/", "_")
    key = f"k8s.io_cluster-autoscaler_node-template_resources_{name}"
    match = _AZURE.fullmatch(node.provider_id)
    scale_set = match[2] if match else "the scale set"
    # `az vmss update --set tags.KEY` would read the dots of the key as a path
    identity = node.provider_id.removeprefix("azure://").rpartition("/virtualMachines/")[0]
    words = ["az", "tag", "update", "--operation", "Merge", "--resource-id", identity]
    words += ["--tags", f"{key}={_SLOTS}"]
    return _TemplateSetting(
        "azure", scale_set, f"tag {key}={_SLOTS}", shlex.join(words) if match else ""
    )
