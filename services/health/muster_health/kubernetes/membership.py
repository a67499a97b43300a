"""Pure: determines on which nodes each plugin belongs, when that began, and what nodes offer.

A plugin belongs on the nodes where the DaemonSet controller would place its pod, or on the nodes
with configured labels. The watches pass in the objects; `changes` returns only changes since its
last call. A plugin counts as expected from the time at which both the node and the DaemonSet
existed (by the API server's clock). If one of them changed later, it counts from the time at which
we saw that the node should run the plugin.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from muster.kubernetes import objects, scheduling
from muster_health.kubernetes import cluster_facts
from muster_health.model import config, signals

_REPELLING: Final = frozenset({"NoSchedule", "NoExecute"})
_DAEMON_TOLERATIONS: Final = tuple(
    objects.Toleration(key=f"node.kubernetes.io/{key}", operator="Exists", effect=effect)
    for key, effect in (
        ("not-ready", "NoExecute"),
        ("unreachable", "NoExecute"),
        ("disk-pressure", "NoSchedule"),
        ("memory-pressure", "NoSchedule"),
        ("pid-pressure", "NoSchedule"),
        ("unschedulable", "NoSchedule"),
    )
)
"""The tolerations that DaemonSet pods get by default (pkg/controller/daemon/util, 1.36)."""
_HOST_NETWORK_TOLERATION: Final = objects.Toleration(
    key="node.kubernetes.io/network-unavailable", operator="Exists", effect="NoSchedule"
)

_ZONES: Final = ("topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone")
_POOLS: Final = (
    "cloud.google.com/gke-nodepool",
    "eks.amazonaws.com/nodegroup",
    "kubernetes.azure.com/agentpool",
    "karpenter.sh/nodepool",
)
"""The labels with which clouds and autoscalers name a node's pool."""


class Owner(objects.Object, frozen=True):
    """An owner of a pod."""

    name: str = ""
    controller: bool | None = None


class OwnedMetadata(objects.Metadata, frozen=True):
    """The metadata of a pod with its owners."""

    owner_references: tuple[Owner, ...] | None = None


class OwnedPod(objects.Pod, frozen=True):
    """A pod whose metadata contains its owners."""

    metadata: OwnedMetadata = OwnedMetadata()


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The stored fields of a node, with only the labels that are needed here."""

    name: str
    created_at: float
    """The time of the node's creation, by our own clock."""
    labels: objects.Labels
    taints: tuple[objects.Taint, ...]
    offers: Mapping[str, signals.Offer]
    pool: str = ""
    zone: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """The stored fields of a pod."""

    uid: str
    name: str
    node: str
    revision: str
    generation: str
    daemonset: str
    """The DaemonSet that controls the pod; empty if that is unknown."""


@dataclass(slots=True)
class _Plugin:
    settings: config.Plugin
    daemonset: objects.DaemonSet | None = None
    created_at: float = -math.inf
    pods: dict[str, Pod] = field(default_factory=dict)
    pods_by_node: dict[str, dict[str, Pod]] = field(default_factory=dict)
    expected_since: dict[str, float] = field(default_factory=dict)
    reported: Mapping[str, signals.Expected] | None = None
    changed: set[str] = field(default_factory=set)
    """Nodes to evaluate again; a rollout changes only a few of them each second."""

    def put(self, pod: Pod) -> None:
        """Add or replace a pod."""
        was = self.pods.get(pod.uid)
        if was == pod:
            return
        if was is not None:
            self.drop(was)
        self.pods[pod.uid] = pod
        self.pods_by_node.setdefault(pod.node, {})[pod.uid] = pod
        self.changed.add(pod.node)

    def drop(self, pod: Pod) -> None:
        """Remove a pod."""
        was = self.pods.pop(pod.uid, None)
        if was is None:
            return
        del self.pods_by_node[was.node][was.uid]
        if not self.pods_by_node[was.node]:
            del self.pods_by_node[was.node]
        self.changed.add(was.node)


def should_run(
    template: objects.PodSpec,
    name: str,
    labels: objects.Labels,
    taints: Iterable[objects.Taint],
) -> bool:
    """Return whether a DaemonSet's pod belongs on a node.

    The rule is that of NodeShouldRunDaemonPod (pkg/controller/daemon/daemon_controller.go, 1.36).
    """
    tolerations = (*(template.tolerations or ()), *_DAEMON_TOLERATIONS)
    if template.host_network:
        tolerations += (_HOST_NETWORK_TOLERATION,)
    return scheduling.selects_node(template, name=name, labels=labels) and not any(
        taint.effect in _REPELLING
        and not any(_tolerates(toleration, taint) for toleration in tolerations)
        for taint in taints
    )


def to_pod(shape: OwnedPod) -> Pod:
    """Return the fields of a pod to store."""
    owners = shape.metadata.owner_references or ()
    return Pod(
        uid=shape.metadata.uid,
        name=shape.metadata.name,
        node=shape.node_name,
        revision=shape.labels.get(cluster_facts.REVISION, ""),
        generation=shape.labels.get(cluster_facts.TEMPLATE_GENERATION, ""),
        daemonset=next((owner.name for owner in owners if owner.controller), ""),
    )


class Membership:
    """Determines which nodes of one cluster should run which plugin."""

    def __init__(self, settings: config.Cluster) -> None:
        self._cause_labels = settings.cause_labels
        self._plugins = {plugin.plugin: _Plugin(settings=plugin) for plugin in settings.plugins}
        self._nodes: dict[str, Node] = {}
        self._changed_offers: dict[str, Mapping[str, signals.Offer] | None] = {}
        self._has_nodes = False
        self._are_nodes_reported = False

    @property
    def label_keys(self) -> frozenset[str]:
        """Return the keys of the node labels to store."""
        keys = set(self._cause_labels)
        for plugin in self._plugins.values():
            keys.update(plugin.settings.nodes)
            if plugin.daemonset is not None:
                keys |= scheduling.node_label_keys(plugin.daemonset.pod_spec)
        return frozenset(keys)

    def to_node(self, shape: objects.Node, *, now: float, age_s: float | None) -> Node:
        """Return the fields of a node to store."""
        keys = self.label_keys
        return Node(
            name=shape.metadata.name,
            created_at=now - (age_s or 0.0),
            labels={key: value for key, value in shape.labels.items() if key in keys},
            taints=shape.taints,
            offers=cluster_facts.offers(shape),
            pool=_first_label(shape, _POOLS),
            zone=_first_label(shape, _ZONES),
        )

    def place(self, node: str) -> dict[str, str]:
        """Return the pool and the zone of a node, if its labels name them."""
        known = self._nodes.get(node)
        named = {"pool": known.pool, "zone": known.zone} if known is not None else {}
        return {key: value for key, value in named.items() if value}

    def replace_nodes(self, nodes: Iterable[Node], now: float) -> None:
        """Replace all nodes."""
        current = {node.name: node for node in nodes}
        for name in self._nodes.keys() - current.keys():
            self.drop_node(name)
        is_first, self._has_nodes = not self._has_nodes, True
        for node in current.values():
            self.put_node(node, now, is_first=is_first)

    def put_node(self, node: Node, now: float, *, is_first: bool = False) -> None:
        """Add or replace a node; `is_first` if no nodes were known before."""
        was = self._nodes.get(node.name)
        self._nodes[node.name] = node
        if was is None or was.offers != node.offers:
            self._changed_offers[node.name] = node.offers
        if was is not None and (was.labels, was.taints) == (node.labels, node.taints):
            return
        for plugin in self._plugins.values():
            self._evaluate(plugin, node, now, is_first=is_first or was is None)

    def drop_node(self, name: str) -> None:
        """Remove a node."""
        if self._nodes.pop(name, None) is None:
            return
        self._changed_offers[name] = None
        for plugin in self._plugins.values():
            if plugin.expected_since.pop(name, None) is not None:
                plugin.changed.add(name)

    def put_daemonset(
        self, name: str, shape: objects.DaemonSet | None, *, now: float, age_s: float | None
    ) -> None:
        """Set a plugin's DaemonSet; None if it no longer exists."""
        plugin = self._plugins[name]
        is_first = plugin.daemonset is None
        plugin.daemonset, plugin.created_at = shape, now - (age_s or 0.0)
        for node in self._nodes.values():
            self._evaluate(plugin, node, now, is_first=is_first)

    def replace_pods(self, name: str, pods: Iterable[Pod]) -> None:
        """Replace all pods of a plugin."""
        plugin = self._plugins[name]
        current = {pod.uid: pod for pod in pods}
        for gone in [pod for uid, pod in plugin.pods.items() if uid not in current]:
            plugin.drop(gone)
        for pod in current.values():
            plugin.put(pod)

    def put_pod(self, name: str, pod: Pod) -> None:
        """Add or replace a pod of a plugin."""
        self._plugins[name].put(pod)

    def drop_pod(self, name: str, pod: Pod) -> None:
        """Remove a plugin's pod."""
        self._plugins[name].drop(pod)

    def pods_on(self, name: str, node: str) -> tuple[str, ...]:
        """Return the names of a plugin's pods on a node."""
        return tuple(pod.name for pod in self._plugins[name].pods_by_node.get(node, {}).values())

    def current_revision(self, name: str) -> str:
        """Return the newest revision of a plugin's DaemonSet; empty if unknown.

        While no pod has that revision yet, the result is a name that no revision can have. The
        selector may match pods of other DaemonSets (`muster config daemonsets`); they do not count.
        """
        plugin = self._plugins[name]
        if plugin.daemonset is None:
            return ""
        generation = cluster_facts.template_generation(plugin.daemonset)
        if not generation:
            return ""
        owners = {"", plugin.settings.daemonset}
        revisions = (
            pod.revision
            for pod in plugin.pods.values()
            if pod.generation == generation and pod.daemonset in owners
        )
        return next(revisions, f"generation {generation}")

    def changes(
        self, now: float
    ) -> list[signals.ExpectedNodes | signals.NodeOffers | signals.NodesListed]:
        """Return all changes since the last call; none before the nodes are known."""
        if not self._has_nodes:
            return []
        changes: list[signals.ExpectedNodes | signals.NodeOffers | signals.NodesListed] = [
            signals.NodeOffers(node=node, offers=offers)
            for node, offers in self._changed_offers.items()
        ]
        self._changed_offers.clear()
        if not self._are_nodes_reported:
            self._are_nodes_reported = True
            changes.append(signals.NodesListed())
        for name, plugin in self._plugins.items():
            if _is_determined(plugin) and self._update(plugin, now):
                assert plugin.reported is not None, "an update sets what is reported"
                changes.append(signals.ExpectedNodes(plugin=name, nodes=plugin.reported))
        return changes

    def _update(self, plugin: _Plugin, now: float) -> bool:
        """Evaluate changed nodes again; return whether the result changed.

        An unchanged node keeps the same object, with the age that it had at its last change.
        """
        before = plugin.reported
        nodes = dict(before or {})
        for name in plugin.changed:
            expected = self._expected(plugin, name, now)
            was = nodes.pop(name, None)
            if expected is not None:
                is_same = was is not None and replace(was, age_s=expected.age_s) == expected
                nodes[name] = was if was is not None and is_same else expected
        changed, plugin.changed = plugin.changed, set()
        if before is not None and all(before.get(name) is nodes.get(name) for name in changed):
            return False
        plugin.reported = nodes
        return True

    def _evaluate(self, plugin: _Plugin, node: Node, now: float, *, is_first: bool) -> None:
        """Record whether a node needs a plugin, from now or, if `is_first`, since both exist."""
        plugin.changed.add(node.name)
        if not _is_expected(plugin, node):
            plugin.expected_since.pop(node.name, None)
        elif node.name not in plugin.expected_since:
            since = max(node.created_at, plugin.created_at) if is_first else now
            plugin.expected_since[node.name] = min(since, now)

    def _expected(self, plugin: _Plugin, name: str, now: float) -> signals.Expected | None:
        since = plugin.expected_since.get(name)
        if since is None:
            return None
        labels = self._nodes[name].labels
        pods = list(plugin.pods_by_node.get(name, {}).values())
        revision = pods[-1].revision if pods else ""
        causes = [
            f"{key.rpartition('/')[2]}={labels[key]}" for key in self._cause_labels if key in labels
        ]
        if revision:
            causes.append(f"revision={revision}")
        return signals.Expected(age_s=now - since, causes=tuple(causes), revision=revision)


def _is_determined(plugin: _Plugin) -> bool:
    return bool(plugin.settings.nodes) or plugin.daemonset is not None or bool(plugin.reported)


def _is_expected(plugin: _Plugin, node: Node) -> bool:
    if plugin.settings.nodes:
        return plugin.settings.nodes.items() <= node.labels.items()
    if plugin.daemonset is None:
        return False
    return should_run(plugin.daemonset.pod_spec, node.name, node.labels, node.taints)


def _tolerates(toleration: objects.Toleration, taint: objects.Taint) -> bool:
    """Return whether a toleration matches a taint (component-helpers/scheduling/corev1, 1.36)."""
    if toleration.effect and toleration.effect != taint.effect:
        return False
    if toleration.key and toleration.key != taint.key:
        return False
    if toleration.operator == "Exists":
        return True
    is_equal = toleration.operator in {"", "Equal"} and toleration.value == taint.value
    return bool(toleration.key) and is_equal


def _first_label(shape: objects.Node, keys: Iterable[str]) -> str:
    return next((shape.labels[key] for key in keys if shape.labels.get(key)), "")
