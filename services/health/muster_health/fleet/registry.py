"""Pure: stores all nodes and plugins that are tracked or expected, within limits per node.

Once the Kubernetes API has listed all nodes, only these are tracked; until then, the number of
nodes is limited.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

from muster import pacing, vocabulary
from muster.vocabulary import Verdict
from muster_health.model import config, limits, signals
from muster_health.plugin import tracked_plugin, watched_plugin

_WATCHED_PER_S: Final = 1 / 60
_HELD_PER_NODE: Final = 4
"""The maximum number of inventories held per node: they are large, and nodes have few plugins."""
_SELDOM_S: Final = 600.0
_SELDOM_BURST: Final = 3


class Node(msgspec.Struct, eq=False, gc=False):
    """One node: its plugins, the watched plugins, the resources that it offers, and its limits."""

    plugins: tuple[tracked_plugin.TrackedPlugin, ...] = ()
    watched: tuple[watched_plugin.WatchedPlugin, ...] = ()
    offers: Mapping[str, signals.Offer] | None = None
    bucket: pacing.TokenBucket | None = None
    watched_bucket: pacing.TokenBucket | None = None
    """The limit on alerts about watched plugins: invented plugins must not delay other alerts."""
    seldom: pacing.TokenBucket | None = None
    """How many more alerts the node may open before it shares the limit for frequent alerts."""
    additions: pacing.TokenBucket | None = None
    """How many more watched plugins may be added now."""

    @property
    def everything(self) -> tuple[tracked_plugin.TrackedPlugin, ...]:
        """Return the node's plugins, including those that are only watched."""
        return (*self.plugins, *self.watched)


class Registry:
    """All nodes, and all plugins by key."""

    def __init__(self, context: config.Context) -> None:
        self.plugins: dict[str, tracked_plugin.TrackedPlugin] = {}
        self._context = context
        self.nodes: dict[str, Node] = {}
        self._expected: dict[str, Mapping[str, signals.Expected]] = {}
        self._held: dict[str, dict[str, signals.FromPlugin]] = {}
        """By node and plugin: inventories of plugins that are not tracked."""
        self._bucket: pacing.TokenBucket | None = None
        self._often: pacing.TokenBucket | None = None
        self._has_all_nodes = False
        self.version = 0
        """A number that changes whenever a node is added or removed."""

    def plugins_on(self, nodes: Iterable[str]) -> Iterator[tracked_plugin.TrackedPlugin]:
        """Yield the plugins of these nodes; unknown nodes have none."""
        for name in nodes:
            node = self.nodes.get(name)
            yield from node.everything if node is not None else ()

    def find(self, node: str, plugin: str) -> tracked_plugin.TrackedPlugin | None:
        """Return a plugin; None if it is not tracked."""
        there = self.nodes.get(node)
        if there is not None:
            # a node has few plugins, usually only one
            for tracked in there.plugins:
                if tracked.plugin == plugin:
                    return tracked
            for watched in there.watched:
                if watched.plugin == plugin:
                    return watched
        return None

    def find_or_add(
        self, node: str, plugin: str, now: float, *, is_expected: bool = False
    ) -> tracked_plugin.TrackedPlugin | limits.Refusal:
        """Return a plugin, adding it if needed and allowed; otherwise why it is refused."""
        known = self.find(node, plugin)
        if known is not None:
            return known
        refusal = self._refusal(node, is_expected=is_expected)
        if refusal is not None:
            return refusal
        there = self.nodes.get(node)
        if there is not None and len(there.plugins) >= self._context.bounds.plugins_per_node:
            return limits.Refusal.PLUGINS
        if plugin.startswith(vocabulary.WATCHED_PREFIX):
            return limits.Refusal.RESERVED
        there = self._node(node)
        tracked = tracked_plugin.TrackedPlugin(node, _same(plugin), self._context, now=now)
        tracked.receive(signals.NodeOffers(node=node, offers=there.offers), now)
        self.plugins[tracked.key] = tracked
        there.plugins = (*there.plugins, tracked)
        return tracked

    def hold(self, node: str, plugin: str, inventory: signals.FromPlugin) -> limits.Refusal | None:
        """Store an inventory until its plugin is tracked; return why it is refused, or None.

        The stream retains the inventories of removed plugins, so an inventory does not prove that
        its plugin exists.
        """
        refusal = self._refusal(node, is_expected=False)
        if refusal is not None:
            return refusal
        held = self._held.get(node, {})
        if not held and len(self._held) >= self._context.bounds.nodes:
            return limits.Refusal.NODES
        if plugin not in held and len(held) >= _HELD_PER_NODE:
            return limits.Refusal.PLUGINS
        self._held[node] = held | {plugin: inventory}
        return None

    def release(self, tracked: tracked_plugin.TrackedPlugin) -> signals.FromPlugin | None:
        """Remove and return the inventory that was stored for a plugin, if any."""
        held = self._held.get(tracked.node, {})
        inventory = held.pop(tracked.plugin, None)
        if not held:
            self._held.pop(tracked.node, None)
        return inventory

    def find_or_watch(
        self, node: str, name: str, now: float, *, is_restored: bool = False
    ) -> watched_plugin.WatchedPlugin | limits.Refusal:
        """Return a watched plugin, adding it if needed and allowed; otherwise why it is refused.

        Each new plugin publishes a verdict, and a hostile agent may invent names. A node may
        therefore add only a few names, besides the resources that it offers.
        """
        there = self.nodes.get(node)
        for known in there.watched if there is not None else ():
            if known.name == name:
                return known
        refusal = self._refusal(node, is_expected=False)
        if refusal is not None:
            return refusal
        there = self._node(node)
        plugin = vocabulary.watched_plugin(name)
        is_taken = any(known.plugin == plugin for known in there.watched)
        if is_taken or len(there.watched) >= vocabulary.WATCHED_MAX:
            return limits.Refusal.WATCHED
        if there.additions is None:
            burst = vocabulary.WATCHED_MAX
            there.additions = pacing.TokenBucket(per_s=_WATCHED_PER_S, burst=burst, now=now)
        is_offered = there.offers is not None and name in there.offers
        if not (is_restored or is_offered or there.additions.try_take(now)):
            return limits.Refusal.WATCHED
        watched = watched_plugin.WatchedPlugin(node, name, self._context, now=now)
        watched.receive(signals.NodeOffers(node=node, offers=there.offers), now)
        self.plugins[watched.key] = watched
        there.watched = (*there.watched, watched)
        return watched

    def agent_of(
        self, watched: watched_plugin.WatchedPlugin
    ) -> tracked_plugin.TrackedPlugin | None:
        """Return the plugin that observes a watched plugin; None if it is not tracked."""
        return self.find(watched.node, watched.agent)

    def watched_by(self, agent: tracked_plugin.TrackedPlugin) -> list[watched_plugin.WatchedPlugin]:
        """Return the plugins that an agent watches."""
        node = self.nodes.get(agent.node)
        watched = node.watched if node is not None else ()
        return [each for each in watched if each.agent == agent.plugin]

    def mark_nodes_complete(self) -> list[tracked_plugin.TrackedPlugin]:
        """Record that all nodes are known; return plugins on missing nodes, unless expected."""
        self._has_all_nodes = True
        for name in [name for name in self._held if self._refusal(name, is_expected=False)]:
            del self._held[name]
        return [
            tracked
            for node in self.nodes.values()
            if node.offers is None
            for tracked in node.everything
            if not tracked.alive.is_expected
        ]

    def remove(self, gone: tracked_plugin.TrackedPlugin) -> Iterable[tracked_plugin.TrackedPlugin]:
        """Remove a plugin; return the plugins on its node whose inhibition changes."""
        del self.plugins[gone.key]
        node = self.nodes[gone.node]
        node.plugins = tuple(tracked for tracked in node.plugins if tracked is not gone)
        node.watched = tuple(watched for watched in node.watched if watched is not gone)
        self._forget_if_empty(gone.node)
        return _inhibit(node.everything)

    def is_placed(self, plugin: str) -> bool:
        """Return whether Kubernetes reports on which nodes this plugin is expected."""
        return plugin in self._expected

    def expect(
        self, plugin: str, nodes: Mapping[str, signals.Expected], now: float
    ) -> tuple[list[tracked_plugin.TrackedPlugin], list[tracked_plugin.TrackedPlugin]]:
        """Record where a plugin is expected.

        Returns two lists of its instances: on nodes where it is newly expected or has new data in
        `nodes`, and on nodes where it is no longer expected.
        """
        before = self._expected.get(plugin, {})
        self._expected[plugin] = nodes
        present = []
        for node, expected in nodes.items():
            if before.get(node) is expected and self.find(node, plugin) is not None:
                continue
            tracked = self.find_or_add(node, plugin, now, is_expected=True)
            if not isinstance(tracked, limits.Refusal):
                tracked.receive(expected, now)
                present.append(tracked)
        gone = [self.find(node, plugin) for node in before.keys() - nodes.keys()]
        return present, [tracked for tracked in gone if tracked is not None]

    def offer(
        self, event: signals.NodeOffers, now: float
    ) -> Iterable[tracked_plugin.TrackedPlugin]:
        """Record a node's resources (None if the node does not exist); return its plugins."""
        node = self._node(event.node)
        node.offers = event.offers
        if event.offers is None:
            self._held.pop(event.node, None)
        self._forget_if_empty(event.node)
        for tracked in node.everything:
            tracked.receive(event, now)
        return node.everything

    def inhibit(
        self, changed: tracked_plugin.TrackedPlugin
    ) -> Iterable[tracked_plugin.TrackedPlugin]:
        """Let only one alert report that a node is down; return the plugins that this changes."""
        return _inhibit(self.nodes[changed.node].everything)

    def may_open(self, now: float) -> bool:
        """Return whether the fleet's rate limit allows another alert now."""
        return self._whole(now).has_token(now)

    def next_open_at(self, now: float) -> float:
        """Return when the fleet's rate limit allows another alert."""
        return self._whole(now).ready_at(now)

    def spend(self, plugin: tracked_plugin.TrackedPlugin, now: float) -> bool:
        """Return whether the rate limits allow another alert about a plugin; if so, count it."""
        there = self.nodes[plugin.node]
        buckets = [self._whole(now), self._alerts(plugin, now)]
        there.seldom = there.seldom or pacing.TokenBucket(
            per_s=1 / _SELDOM_S, burst=_SELDOM_BURST, now=now
        )
        # a few nodes that always have new alerts must not delay those of others
        buckets.append(there.seldom if there.seldom.has_token(now) else self._half(now))
        if not all(bucket.has_token(now) for bucket in buckets):
            return False
        for bucket in buckets:
            bucket.take(now)
        return True

    def _alerts(self, plugin: tracked_plugin.TrackedPlugin, now: float) -> pacing.TokenBucket:
        there, per_minute = self.nodes[plugin.node], self._context.bounds.alerts_per_node_minute
        if isinstance(plugin, watched_plugin.WatchedPlugin):
            there.watched_bucket = there.watched_bucket or _bucket(per_minute, now)
            return there.watched_bucket
        there.bucket = there.bucket or _bucket(per_minute, now)
        return there.bucket

    def _refusal(self, node: str, *, is_expected: bool) -> limits.Refusal | None:
        if node == vocabulary.FLEET:
            # this name is reserved for health's own alerts and saved state
            return limits.Refusal.RESERVED
        there = self.nodes.get(node)
        if is_expected or (there is not None and there.offers is not None):
            return None
        if self._has_all_nodes:
            return limits.Refusal.UNKNOWN_NODE
        if there is None and len(self.nodes) >= self._context.bounds.nodes:
            return limits.Refusal.NODES
        return None

    def _node(self, name: str) -> Node:
        node = self.nodes.get(name)
        if node is None:
            node = self.nodes[name] = Node()
            self.version += 1
        return node

    def _forget_if_empty(self, name: str) -> None:
        node = self.nodes[name]
        if not node.everything and node.offers is None:
            del self.nodes[name]
            self.version += 1

    def _whole(self, now: float) -> pacing.TokenBucket:
        if self._bucket is None:
            self._bucket = _bucket(self._context.bounds.alerts_per_minute, now)
        return self._bucket

    def _half(self, now: float) -> pacing.TokenBucket:
        """Return the limit for all nodes that often have new alerts: half of the fleet's."""
        if self._often is None:
            half = max(1, self._context.bounds.alerts_per_minute // 2)
            self._often = _bucket(half, now)
        return self._often


def _bucket(per_minute: int, now: float) -> pacing.TokenBucket:
    return pacing.TokenBucket(per_s=per_minute / 60, burst=per_minute, now=now)


def _inhibit(
    plugins: tuple[tracked_plugin.TrackedPlugin, ...],
) -> list[tracked_plugin.TrackedPlugin]:
    down = [plugin for plugin in plugins if plugin.current_verdict is Verdict.NODE_DOWN]
    first = min(down, key=lambda plugin: (not plugin.reports_node, plugin.plugin), default=None)
    return [
        plugin
        for plugin in plugins
        if plugin.inhibit(inhibited=first is not None and plugin is not first)
    ]


@functools.lru_cache(maxsize=64)
def _same(plugin: str) -> str:
    """Return one shared string for plugins of the same name on all nodes, to save memory."""
    return plugin
