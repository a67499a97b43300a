"""Pure: Every node and plugin that is known or expected, and what one node may cost."""

import functools
from collections.abc import Iterable, Mapping

from muster import ratelimit, vocabulary
from muster.vocabulary import Verdict
from muster_health.model import config, facts, signals
from muster_health.plugin import tracked_plugin


class Node:
    """What is kept of one node: its plugins, and what it offers."""

    __slots__ = ("bucket", "offers", "plugins")

    def __init__(self) -> None:
        self.plugins: tuple[tracked_plugin.TrackedPlugin, ...] = ()
        self.offers: Mapping[str, facts.Offer] | None = None
        self.bucket: ratelimit.TokenBucket | None = None

    def find(self, plugin: str) -> tracked_plugin.TrackedPlugin | None:
        """Return one of its plugins; there are few, and mostly one."""
        for found in self.plugins:
            if found.plugin == plugin:
                return found
        return None


class Registry:
    """The nodes, and the plugins by key."""

    def __init__(self, about: config.Context) -> None:
        self.plugins: dict[str, tracked_plugin.TrackedPlugin] = {}
        self._around = about
        self.nodes: dict[str, Node] = {}
        self._expected: dict[str, Mapping[str, facts.Expected]] = {}
        self._bucket: ratelimit.TokenBucket | None = None

    def find(self, node: str, plugin: str) -> tracked_plugin.TrackedPlugin | None:
        """Return what is known of a plugin, if anything."""
        home = self.nodes.get(node)
        return None if home is None else home.find(plugin)

    def find_or_add(
        self, node: str, plugin: str, now: float
    ) -> tracked_plugin.TrackedPlugin | None:
        """Return what is known of a plugin, new if need be; None if its node has too many."""
        home = self.nodes.get(node)
        if home is not None:
            for found in home.plugins:
                if found.plugin == plugin:
                    return found
        return self._add(node, plugin, now)

    def _add(self, node: str, plugin: str, now: float) -> tracked_plugin.TrackedPlugin | None:
        if node == vocabulary.FLEET:
            # who speaks for one node cannot speak for all: alerts and memory of that name are ours
            return None
        home = self.nodes.setdefault(node, Node())
        if len(home.plugins) >= self._around.bounds.plugins_per_node:
            return None
        found = tracked_plugin.TrackedPlugin(node, _same(plugin), self._around, now=now)
        found.receive(signals.NodeOffers(node=node, offers=home.offers), now)
        self.plugins[found.key] = found
        home.plugins = (*home.plugins, found)
        return found

    def remove(self, gone: tracked_plugin.TrackedPlugin) -> Iterable[tracked_plugin.TrackedPlugin]:
        """Forget a plugin; return those of its node for which that changes who tells of it."""
        del self.plugins[gone.key]
        home = self.nodes[gone.node]
        home.plugins = tuple(found for found in home.plugins if found is not gone)
        if not home.plugins and home.offers is None:
            del self.nodes[gone.node]
        return _inhibit(home.plugins)

    def is_placed(self, plugin: str) -> bool:
        """Tell whether Kubernetes says where a plugin should be."""
        return plugin in self._expected

    def expect(
        self, plugin: str, nodes: Mapping[str, facts.Expected], now: float
    ) -> tuple[list[tracked_plugin.TrackedPlugin], list[tracked_plugin.TrackedPlugin]]:
        """Take where a plugin should be; return where that is news, and where it is no longer."""
        before = self._expected.get(plugin, {})
        self._expected[plugin] = nodes
        present = []
        for node, expected in nodes.items():
            if before.get(node) is expected and self.find(node, plugin) is not None:
                continue
            found = self.find_or_add(node, plugin, now)
            if found is not None:
                found.receive(expected, now)
                present.append(found)
        gone = [self.find(node, plugin) for node in before.keys() - nodes.keys()]
        return present, [found for found in gone if found is not None]

    def offer(
        self, event: signals.NodeOffers, now: float
    ) -> Iterable[tracked_plugin.TrackedPlugin]:
        """Take what a node offers (None: there is no such node); return its plugins."""
        home = self.nodes.setdefault(event.node, Node())
        home.offers = event.offers
        if event.offers is None and not home.plugins:
            del self.nodes[event.node]
        for found in home.plugins:
            found.receive(event, now)
        return home.plugins

    def inhibit(
        self, changed: tracked_plugin.TrackedPlugin
    ) -> Iterable[tracked_plugin.TrackedPlugin]:
        """Let one alert say that a node is down; return the plugins for which that changes."""
        return _inhibit(self.nodes[changed.node].plugins)

    def may_open(self, now: float) -> bool:
        """Tell whether the fleet may have one more alert now."""
        return self._whole(now).has_token(now)

    def next_open_at(self, now: float) -> float:
        """Return when the fleet may have one more alert."""
        return self._whole(now).ready_at(now)

    def spend(self, node: str, now: float) -> bool:
        """Tell whether a node may have one more alert now, and count it."""
        whole, home = self._whole(now), self.nodes[node]
        if home.bucket is None:
            home.bucket = _bucket(self._around.bounds.alerts_per_node_minute, now)
        if not (whole.has_token(now) and home.bucket.has_token(now)):
            return False
        whole.take(now)
        home.bucket.take(now)
        return True

    def _whole(self, now: float) -> ratelimit.TokenBucket:
        if self._bucket is None:
            self._bucket = _bucket(self._around.bounds.alerts_per_minute, now)
        return self._bucket


def _bucket(per_minute: int, now: float) -> ratelimit.TokenBucket:
    return ratelimit.TokenBucket(per_s=per_minute / 60, burst=per_minute, now=now)


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
    """Return one string for the plugins of one name on all nodes, instead of one for each."""
    return plugin
