"""Pure: derives facts about known plugins on each node from the Kubernetes API.

Only settled nodes are evaluated: nodes that are Ready, not new and not about to be removed. Both
`muster check` and the health service report each `PluginFinding`.
"""

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

import msgspec

from muster.kubernetes import known_plugins, objects, plugin_objects, scheduling
from muster.kubernetes.plugin_objects import Pod

NEW_NODE_S: Final = 300.0
"""How long a node's plugins may take to start serving after the node became Ready."""
SERVES_S: Final = 120.0
"""How long a plugin's pod must be Ready before its devices count as missing. The plugin must start
and register, and kubelets report every 10 s.
"""
NOT_READY_S: Final = 300.0
"""How long a plugin's pod may be unready, for example after an update that pulls an image."""
OTHER_TYPES: Final = frozenset({"", "k3s", "rke2"})
"""Instance types that do not identify the machine: distributions use them for all nodes."""
GPU_LABELS: Final = (
    "nvidia.com/gpu.present",
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-count",
)
"""Labels on nodes with NVIDIA GPUs: from GPU feature discovery, GKE and Karpenter."""
_TYPE: Final = "node.kubernetes.io/instance-type"
_ENDED: Final = frozenset({"Succeeded", "Failed"})


class Kind(enum.StrEnum):
    """The kind of a problem with a plugin or driver; see docs/check.md."""

    LOST = "lost"
    """The kubelet lists the resource's devices, but none is usable."""
    NONE = "none"
    """The kubelet lists the resource, but none of its devices."""
    NEVER = "never"
    """The plugin offers devices on similar nodes, but not on this node."""
    FEWER = "fewer"
    POD = "pod"
    ADMISSION = "admission"
    UNHEALTHY = "unhealthy"
    NODE = "node"
    PREPARE = "prepare"
    NO_DRIVER = "no_driver"
    NO_SLICE = "no_slice"
    POOL = "pool"
    TERMINATING = "terminating"
    OFFERED_TWICE = "offered_twice"
    SAME_DEVICE = "same_device"
    CDI = "cdi"
    KUBELET = "kubelet"


class Level(enum.StrEnum):
    """The severity of a finding: an error makes pods fail."""

    ERROR = "error"
    WARN = "warn"
    INFO = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginFinding:
    """A problem: `name` is a resource, driver or plugin, and `pod` is the pod to inspect."""

    kind: Kind
    level: Level
    name: str
    text: str
    node: str = ""
    pod: str = ""
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The objects read from a cluster; None if pods, DaemonSets or slices could not be read.

    `now` is the API server's time.
    """

    now: datetime
    nodes: Sequence[objects.Node] = ()
    pods: Sequence[Pod] | None = ()
    daemon_sets: Sequence[plugin_objects.DaemonSet] | None = None
    slices: Sequence[plugin_objects.ResourceSlice] | None = None
    claims: Sequence[plugin_objects.ResourceClaim] = ()
    classes: Sequence[plugin_objects.DeviceClass] = ()
    events: Sequence[plugin_objects.Event] = ()
    more: Sequence[known_plugins.KnownPlugin] = ()
    """Plugins from the configuration."""


class NodeState(enum.StrEnum):
    """Whether a node's plugins can be evaluated, and if not, why."""

    SETTLED = "settled"
    NOT_READY = "not_ready"
    NEW = "new"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """How many devices of a resource the kubelet lists, and how many are available to pods."""

    capacity: int
    allocatable: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginPod:
    """A pod of a known plugin, and how many seconds it has been Ready or not Ready."""

    pod: Pod
    plugin: known_plugins.KnownPlugin
    ready_s: float | None
    unready_s: float | None
    is_rolling: bool

    def is_serving(self, least_s: float = SERVES_S) -> bool:
        """Return whether the pod has been Ready for so long that it should be serving."""
        return self.ready_s is not None and self.ready_s >= least_s


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """A node, its extended resources, and the known plugins on it."""

    node: objects.Node
    state: NodeState
    offers: dict[str, Offer]
    plugins: tuple[PluginPod, ...]

    @property
    def name(self) -> str:
        """Return the node's name."""
        return self.node.metadata.name

    @property
    def type(self) -> str:
        """Return the instance type; empty if it does not identify the machine."""
        kind = self.node.labels.get(_TYPE, "")
        return "" if kind in OTHER_TYPES else kind

    @property
    def is_settled(self) -> bool:
        """Return whether its plugins can be evaluated."""
        return self.state is NodeState.SETTLED

    def serving(self, name: str, least_s: float = SERVES_S) -> PluginPod | None:
        """Return the pod that should serve a resource or driver on this node, or None."""
        pods = (each for each in self.plugins if each.is_serving(least_s))
        return next((each for each in pods if each.plugin.serves(name)), None)


@dataclass(frozen=True, slots=True)
class Group:
    """The settled nodes of one instance type on which one plugin should serve."""

    nodes: set[str] = field(default_factory=set)
    capacities: dict[str, Counter[int]] = field(default_factory=dict)
    """For each resource, the number of nodes by capacity."""

    def add(self, node: NodeFacts) -> None:
        """Add a node."""
        self.nodes.add(node.name)
        for resource, offer in node.offers.items():
            self.capacities.setdefault(resource, Counter())[offer.capacity] += 1


@dataclass(frozen=True, slots=True)
class Peers:
    """The other nodes of a node's group."""

    node: NodeFacts
    group: Group

    @property
    def count(self) -> int:
        """Return how many other nodes there are."""
        return len(self.group.nodes) - (self.node.name in self.group.nodes)

    @property
    def resources(self) -> Iterable[str]:
        """Return the names of all resources in the group, in order."""
        return sorted(self.group.capacities)

    def offering(self, resource: str) -> int:
        """Return how many of these nodes have devices of a resource."""
        return sum(count for capacity, count in self._counts(resource).items() if capacity)

    def usual(self, resource: str) -> int | None:
        """Return the capacity that all of these nodes have; None if they differ."""
        counts = self._counts(resource)
        return next((c for c, count in counts.items() if count == self.count), None)

    def _counts(self, resource: str) -> Counter[int]:
        counts = Counter(self.group.capacities.get(resource, ()))
        own = self.node.offers.get(resource)
        if own is not None and self.node.name in self.group.nodes:
            counts[own.capacity] -= 1
        return +counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts by which the plugins of a cluster are evaluated."""

    view: View
    nodes: dict[str, NodeFacts]
    plugins: tuple[PluginPod, ...]
    groups: dict[tuple[str, str], Group]
    """By instance type and plugin."""
    pods_on: dict[str, list[Pod]]
    """By node; unbound pods have the empty name as key."""
    offered: frozenset[str]
    """The resources of which at least one node has a usable device."""
    drivers_of: dict[str, set[str]]
    """The drivers of a pod's allocated claims, by the pod's uid."""

    @property
    def pods(self) -> Sequence[Pod]:
        """Return the pods; none if they could not be read."""
        return self.view.pods or ()

    def age_s(self, then: datetime | None) -> float | None:
        """Return the seconds since a time on the API server's clock; None if unknown."""
        return None if then is None else max(0.0, (self.view.now - then).total_seconds())

    def peers(self, node: NodeFacts, plugin: known_plugins.KnownPlugin) -> Peers:
        """Return the other settled nodes of the node's type on which the plugin should serve."""
        return Peers(node, self.groups.get((node.type, plugin.name), Group()))


def gather(view: View) -> Facts:
    """Return the facts of a cluster."""
    plugins = tuple(_plugin_pods(view))
    by_node: dict[str, list[PluginPod]] = {}
    for each in plugins:
        by_node.setdefault(each.pod.node_name, []).append(each)
    nodes = {
        node.metadata.name: NodeFacts(
            node=node,
            state=_state(node, view.now),
            offers=_offers(node),
            plugins=tuple(by_node.get(node.metadata.name, ())),
        )
        for node in view.nodes
    }
    pods_on: dict[str, list[Pod]] = {}
    for pod in view.pods or ():
        pods_on.setdefault(pod.node_name, []).append(pod)
    drivers_of: dict[str, set[str]] = {}
    for claim in view.claims:
        for uid in claim.pods:
            drivers_of.setdefault(uid, set()).update(claim.drivers)
    offers = (offer for node in nodes.values() for offer in node.offers.items())
    return Facts(
        view=view,
        nodes=nodes,
        plugins=plugins,
        groups=_groups(nodes.values()),
        pods_on=pods_on,
        offered=frozenset(name for name, offer in offers if offer.allocatable),
        drivers_of=drivers_of,
    )


def _groups(nodes: Iterable[NodeFacts]) -> dict[tuple[str, str], Group]:
    groups: dict[tuple[str, str], Group] = {}
    for node in nodes:
        if node.type and node.is_settled:
            for name in {each.plugin.name for each in node.plugins if each.is_serving()}:
                groups.setdefault((node.type, name), Group()).add(node)
    return groups


def trimmed_node(node: objects.Node) -> objects.Node:
    """Return a node without unused labels, resources and conditions, to save memory."""
    replace = msgspec.structs.replace
    kept = {_TYPE, *GPU_LABELS}
    labels = {key: value for key, value in node.labels.items() if key in kept}
    metadata = replace(node.metadata, labels=labels, annotations=None, managed_fields=None)
    status = node.status or objects.NodeStatus()
    ready = objects.condition(node.conditions, "Ready")
    return replace(
        node,
        metadata=metadata,
        status=replace(
            status,
            capacity={k: v for k, v in node.capacity.items() if scheduling.is_extended(k)},
            allocatable={k: v for k, v in node.allocatable.items() if scheduling.is_extended(k)},
            conditions=(ready,) if ready else None,
        ),
    )


def trimmed_pod(pod: Pod) -> Pod:
    """Return a copy of a pod without annotations and managed fields, to save memory."""
    metadata = msgspec.structs.replace(pod.metadata, annotations=None, managed_fields=None)
    return msgspec.structs.replace(pod, metadata=metadata)


def is_relevant(pod: Pod, more: Sequence[known_plugins.KnownPlugin] = ()) -> bool:
    """Return whether a pod runs a known plugin, has claims, or requests or was refused devices."""
    return (
        pod.has_claims
        or bool(pod.requested())
        or bool(pod.rejection)
        or known_plugins.plugin_of(pod, more) is not None
    )


def is_active(pod: Pod) -> bool:
    """Return whether a pod runs or may still run."""
    return pod.phase not in _ENDED and not pod.metadata.is_being_deleted


def _plugin_pods(view: View) -> Iterable[PluginPod]:
    for pod in view.pods or ():
        if pod.metadata.is_being_deleted or pod.phase in _ENDED:
            continue
        plugin = known_plugins.plugin_of(pod, view.more)
        if plugin is None:
            continue
        ready = objects.condition(pod.conditions, "Ready")
        since = objects.parse_time(ready.last_transition_time) if ready else None
        age_s = (view.now - (since or pod.metadata.created_at or view.now)).total_seconds()
        is_ready = ready is not None and ready.status == "True"
        yield PluginPod(
            pod=pod,
            plugin=plugin,
            ready_s=age_s if is_ready else None,
            unready_s=None if is_ready else age_s,
            is_rolling=_is_rolling(pod, view.daemon_sets or ()),
        )


def _is_rolling(pod: Pod, daemon_sets: Iterable[plugin_objects.DaemonSet]) -> bool:
    return any(
        each.is_rolling
        for each in daemon_sets
        if each.metadata.namespace == pod.metadata.namespace
        and each.spec is not None
        and each.spec.selector is not None
        and scheduling.matches(each.spec.selector, pod.labels)
    )


def _state(node: objects.Node, now: datetime) -> NodeState:
    ready = objects.condition(node.conditions, "Ready")
    if ready is None or ready.status != "True":
        return NodeState.NOT_READY
    is_cordoned = node.spec is not None and node.spec.unschedulable
    is_removed = any(taint.key in scheduling.REMOVAL_TAINTS for taint in node.taints)
    if is_cordoned or is_removed or node.metadata.is_being_deleted:
        return NodeState.LEAVING
    since = objects.parse_time(ready.last_transition_time) or node.metadata.created_at
    if since is not None and (now - since).total_seconds() < NEW_NODE_S:
        return NodeState.NEW
    return NodeState.SETTLED


def _offers(node: objects.Node) -> dict[str, Offer]:
    capacity, allocatable = node.capacity, node.allocatable
    return {
        name: Offer(
            capacity=scheduling.quantity_count(capacity.get(name, 0)),
            allocatable=scheduling.quantity_count(allocatable.get(name, 0)),
        )
        for name in sorted({*capacity, *allocatable})
        if scheduling.is_extended(name)
    }
