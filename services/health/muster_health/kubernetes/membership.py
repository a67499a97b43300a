"""Pure: Which nodes should have which plugin, since when, and what every node offers.

Fed by whoever watches the API; told apart from what was told before, so that only changes go on.
Ages are counted on our clock: when the API server says an object was made, by its own clock, and
when we first saw that a node is wanted, whichever is later.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from muster_health.kubernetes import daemonset_placement, objects
from muster_health.model import config, facts, signals


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What is kept of a node: only the labels that somebody asks about."""

    name: str
    made_at: float
    """On our clock."""
    labels: objects.Labels
    taints: tuple[objects.Taint, ...]
    offers: Mapping[str, facts.Offer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """What is kept of a pod."""

    uid: str
    name: str
    node: str
    revision: str
    generation: str


@dataclass(slots=True)
class _Plugin:
    settings: config.Plugin
    daemonset: objects.DaemonSet | None = None
    made_at: float = -math.inf
    pods: dict[str, Pod] = field(default_factory=dict)
    on: dict[str, dict[str, Pod]] = field(default_factory=dict)
    """The same, by node."""
    since: dict[str, float] = field(default_factory=dict)
    told: Mapping[str, facts.Expected] | None = None
    changed: set[str] = field(default_factory=set)
    """Nodes to be looked at anew: a rollout changes some each second, of a hundred thousand."""

    def put(self, pod: Pod) -> None:
        """Take a pod."""
        was = self.pods.get(pod.uid)
        if was == pod:
            return
        if was is not None:
            self.drop(was)
        self.pods[pod.uid] = pod
        self.on.setdefault(pod.node, {})[pod.uid] = pod
        self.changed.add(pod.node)

    def drop(self, pod: Pod) -> None:
        """Take that a pod is gone."""
        was = self.pods.pop(pod.uid, None)
        if was is None:
            return
        del self.on[was.node][was.uid]
        if not self.on[was.node]:
            del self.on[was.node]
        self.changed.add(was.node)


def pod(shape: objects.Pod) -> Pod:
    """Return what is kept of a pod."""
    labels = shape.metadata.labels or {}
    return Pod(
        uid=shape.metadata.uid,
        name=shape.metadata.name,
        node=shape.spec.node_name,
        revision=labels.get(objects.REVISION, ""),
        generation=labels.get(objects.TEMPLATE_GENERATION, ""),
    )


class Membership:
    """Of one cluster; see the module."""

    def __init__(self, settings: config.Cluster) -> None:
        self._cause_labels = settings.cause_labels
        self._plugins = {one.plugin: _Plugin(settings=one) for one in settings.plugins}
        self._nodes: dict[str, Node] = {}
        self._offers: dict[str, Mapping[str, facts.Offer] | None] = {}
        self._has_nodes = False

    @property
    def label_keys(self) -> frozenset[str]:
        """Return the node labels that must be kept."""
        found = set(self._cause_labels)
        for plugin in self._plugins.values():
            found.update(plugin.settings.nodes)
            if plugin.daemonset is not None:
                found |= daemonset_placement.keys(plugin.daemonset.spec.template.spec)
        return frozenset(found)

    def node(self, shape: objects.Node, *, now: float, age_s: float | None) -> Node:
        """Return what is kept of a node."""
        keys, labels = self.label_keys, shape.metadata.labels or {}
        return Node(
            name=shape.metadata.name,
            made_at=now - (age_s or 0.0),
            labels={key: value for key, value in labels.items() if key in keys},
            taints=shape.spec.taints or (),
            offers=shape.offers,
        )

    def replace_nodes(self, nodes: Iterable[Node], now: float) -> None:
        """Take all nodes that there are."""
        found = {node.name: node for node in nodes}
        for name in self._nodes.keys() - found.keys():
            self.drop_node(name)
        is_first, self._has_nodes = not self._has_nodes, True
        for node in found.values():
            self._put(node, now, is_first=is_first)

    def put_node(self, node: Node, now: float) -> None:
        """Take a node that is new or has changed."""
        self._put(node, now, is_first=False)

    def drop_node(self, name: str) -> None:
        """Take that a node is gone."""
        if self._nodes.pop(name, None) is None:
            return
        self._offers[name] = None
        for plugin in self._plugins.values():
            if plugin.since.pop(name, None) is not None:
                plugin.changed.add(name)

    def put_daemonset(
        self, name: str, shape: objects.DaemonSet | None, *, now: float, age_s: float | None
    ) -> None:
        """Take a plugin's DaemonSet, or that it is gone."""
        plugin = self._plugins[name]
        is_first = plugin.daemonset is None
        plugin.daemonset, plugin.made_at = shape, now - (age_s or 0.0)
        for node in self._nodes.values():
            self._judge(plugin, node, now, is_first=is_first)

    def replace_pods(self, name: str, pods: Iterable[Pod]) -> None:
        """Take all pods of a plugin that there are."""
        plugin = self._plugins[name]
        found = {pod.uid: pod for pod in pods}
        for gone in [pod for uid, pod in plugin.pods.items() if uid not in found]:
            plugin.drop(gone)
        for pod in found.values():
            plugin.put(pod)

    def put_pod(self, name: str, pod: Pod) -> None:
        """Take a pod of a plugin that is new or has changed."""
        self._plugins[name].put(pod)

    def drop_pod(self, name: str, pod: Pod) -> None:
        """Take that a pod of a plugin is gone."""
        self._plugins[name].drop(pod)

    def pods_on(self, name: str, node: str) -> tuple[str, ...]:
        """Return the names of a plugin's pods on a node."""
        return tuple(pod.name for pod in self._plugins[name].on.get(node, {}).values())

    def current_revision(self, name: str) -> str:
        """Return the newest revision of a plugin's DaemonSet, empty if unknown.

        While no pod has it yet, it has a name that none of theirs can be.
        """
        plugin = self._plugins[name]
        generation = plugin.daemonset.generation if plugin.daemonset is not None else ""
        if not generation:
            return ""
        found = (pod.revision for pod in plugin.pods.values() if pod.generation == generation)
        return next(found, f"generation {generation}")

    def news(self, now: float) -> list[signals.ExpectedNodes | signals.NodeOffers]:
        """Return what has changed since it was last asked for."""
        if not self._has_nodes:
            return []
        found: list[signals.ExpectedNodes | signals.NodeOffers] = [
            signals.NodeOffers(node=node, offers=offers) for node, offers in self._offers.items()
        ]
        self._offers.clear()
        for name, plugin in self._plugins.items():
            if self._is_known(plugin) and self._has_changed(plugin, now):
                assert plugin.told is not None, "what has changed is known"
                found.append(signals.ExpectedNodes(plugin=name, nodes=plugin.told))
        return found

    def _has_changed(self, plugin: _Plugin, now: float) -> bool:
        """Find what is to be told; what is as it was stays the same object, of the same age."""
        before = plugin.told
        nodes = dict(before or {})
        for name in plugin.changed:
            one = self._expected(plugin, name, now)
            was = nodes.pop(name, None)
            if one is not None:
                same = was is not None and replace(was, age_s=one.age_s) == one
                nodes[name] = was if was is not None and same else one
        changed, plugin.changed = plugin.changed, set()
        if before is not None and all(before.get(name) is nodes.get(name) for name in changed):
            return False
        plugin.told = nodes
        return True

    def _is_known(self, plugin: _Plugin) -> bool:
        return bool(plugin.settings.nodes) or plugin.daemonset is not None or bool(plugin.told)

    def _put(self, node: Node, now: float, *, is_first: bool) -> None:
        was = self._nodes.get(node.name)
        self._nodes[node.name] = node
        if was is None or was.offers != node.offers:
            self._offers[node.name] = node.offers
        if was is not None and (was.labels, was.taints) == (node.labels, node.taints):
            return
        for plugin in self._plugins.values():
            self._judge(plugin, node, now, is_first=is_first or was is None)

    def _judge(self, plugin: _Plugin, node: Node, now: float, *, is_first: bool) -> None:
        """Note since when a node is wanted: from its making, if it was wanted when first seen."""
        plugin.changed.add(node.name)
        if not _is_wanted(plugin, node):
            plugin.since.pop(node.name, None)
        elif node.name not in plugin.since:
            since = max(node.made_at, plugin.made_at) if is_first else now
            plugin.since[node.name] = min(since, now)

    def _expected(self, plugin: _Plugin, name: str, now: float) -> facts.Expected | None:
        since = plugin.since.get(name)
        if since is None:
            return None
        labels = self._nodes[name].labels
        pods = list(plugin.on.get(name, {}).values())
        revision = pods[-1].revision if pods else ""
        causes = [
            f"{key.rpartition('/')[2]}={labels[key]}" for key in self._cause_labels if key in labels
        ]
        if revision:
            causes.append(f"revision={revision}")
        return facts.Expected(age_s=now - since, causes=tuple(causes), revision=revision)


def _is_wanted(plugin: _Plugin, node: Node) -> bool:
    if plugin.settings.nodes:
        return plugin.settings.nodes.items() <= node.labels.items()
    if plugin.daemonset is None:
        return False
    template = plugin.daemonset.spec.template.spec
    return daemonset_placement.wants(template, node.name, node.labels, node.taints)
