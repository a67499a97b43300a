"""Adapter: watches all nodes, and each plugin's DaemonSet and pods, in the Kubernetes API.

Leases are not watched, because each changes every 10 s; they are read when a plugin is suspected.
"""

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Final

import prometheus_client

from muster.kubernetes import api, objects, scheduling, watch
from muster_health.kubernetes import cluster_facts, membership, queries
from muster_health.model import config, signals

ClusterEvent = (
    signals.ExpectedNodes
    | signals.NodeOffers
    | signals.NodesListed
    | signals.ClusterAnswered
    | signals.Remediated
)

_REPORT_S: Final = 1.0
"""Changes are collected for this long, so that a rolling update is reported once a second."""
_DAEMONSET_S: Final = 5.0
"""How long to wait for the DaemonSets before reading nodes; they show which labels to keep."""

_CHECK_S: Final = 5.0
_ANSWER_S: Final = 5.0

_EXPECTED: Final = prometheus_client.Gauge(
    "muster_health_expected_nodes", "Nodes that should have a plugin.", ["plugin"]
)

_DaemonSets = watch.Reflector[objects.DaemonSet, objects.DaemonSet]


class ClusterWatcher:
    """Watches one cluster while `run` runs; `queries` runs queries; `put` receives all results."""

    def __init__(
        self,
        api: api.Api,
        settings: config.Cluster,
        put: Callable[[ClusterEvent], Awaitable[None]],
        *,
        check_s: float = _CHECK_S,
    ) -> None:
        self.queries = queries.ClusterQueries(
            api,
            put,
            self._locate_pods,
            concurrent_max=settings.asks_max,
            more=settings.known,
        )
        self._api = api
        self._check_s = check_s
        self._api_problem = ""
        self._put = put
        self._clock = asyncio.get_running_loop().time
        self._membership = membership.Membership(settings)
        self._label_keys = self._membership.label_keys
        self._plugins = {plugin.plugin: plugin for plugin in settings.plugins}
        self._selectors: dict[str, str] = {}
        self._selector_changed = asyncio.Event()
        """Set when a selector changes; a new event then replaces it."""
        self._nodes = watch.Reflector(
            api,
            "/api/v1/nodes",
            objects.Node,
            watch.Sink(self._to_node, self._replace_nodes, self._put_node, self._drop_node),
        )
        self._daemonsets = {
            plugin.plugin: self._watch_daemonset(plugin)
            for plugin in settings.plugins
            if plugin.daemonset
        }
        self._pods: dict[str, watch.Reflector[membership.OwnedPod, membership.Pod]] = {}

    @property
    def problems(self) -> dict[str, str]:
        """The operations that fail, each with the reason; empty if everything works."""
        problems = {
            "API": self._api_problem,
            "nodes": self._nodes.problem,
            **self.queries.refusals,
        }
        for plugin, reflector in self._daemonsets.items():
            is_missing = reflector.listed.is_set() and plugin not in self._selectors
            problems[f"daemonset of {plugin}"] = reflector.problem or (
                "does not exist" if is_missing else ""
            )
        for plugin, pods in self._pods.items():
            problems[f"pods of {plugin}"] = pods.problem
        return {what: problem for what, problem in problems.items() if problem}

    def place(self, node: str) -> dict[str, str]:
        """Return the pool and the zone of a node, if its labels name them."""
        return self._membership.place(node)

    async def run(self) -> None:
        """Watch forever; before reading nodes, wait briefly to learn which labels are needed."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for plugin, reflector in self._daemonsets.items():
                    tasks.create_task(reflector.run())
                    tasks.create_task(self._watch_pods(self._plugins[plugin]))
                tasks.create_task(self._watch_nodes())
                tasks.create_task(self._report_changes())
                tasks.create_task(self._check_api())
        finally:
            await self.queries.close()

    async def _check_api(self) -> None:
        """Detect an API that hangs; a watch without events may only mean that nothing changes."""
        timeout_s = min(_ANSWER_S, self._check_s)
        while True:
            await asyncio.sleep(self._check_s)
            answer = await self._api.request(
                "GET", "/api/v1/nodes", query={"limit": "1"}, timeout_s=timeout_s
            )
            self._api_problem = "" if answer.status else answer.problem

    async def _watch_nodes(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DAEMONSET_S):
                for reflector in self._daemonsets.values():
                    await reflector.listed.wait()
        self._label_keys = self._membership.label_keys
        await self._nodes.run()

    def _watch_daemonset(self, plugin: config.Plugin) -> _DaemonSets:
        put = functools.partial(self._put_daemonset, plugin.plugin)

        def replace(daemonsets: list[objects.DaemonSet]) -> None:
            put(daemonsets[0] if daemonsets else None)

        def drop(_: objects.DaemonSet) -> None:
            put(None)

        return watch.Reflector(
            self._api,
            f"/apis/apps/v1/namespaces/{plugin.namespace}/daemonsets",
            objects.DaemonSet,
            watch.Sink(_unchanged, replace, put, drop),
            query={"fieldSelector": f"metadata.name={plugin.daemonset}"},
        )

    async def _watch_pods(self, plugin: config.Plugin) -> None:
        """Watch the pods that a plugin's DaemonSet selects; restart when its selector changes."""
        sink = watch.Sink(
            membership.to_pod,
            functools.partial(self._membership.replace_pods, plugin.plugin),
            functools.partial(self._membership.put_pod, plugin.plugin),
            functools.partial(self._membership.drop_pod, plugin.plugin),
        )
        path = f"/api/v1/namespaces/{plugin.namespace}/pods"
        while True:
            selector = self._selectors.get(plugin.plugin)
            tasks = [asyncio.create_task(self._until_selector_is_not(plugin.plugin, selector))]
            if selector is not None:
                reflector = watch.Reflector(
                    self._api, path, membership.OwnedPod, sink, query={"labelSelector": selector}
                )
                self._pods[plugin.plugin] = reflector
                tasks.append(asyncio.create_task(reflector.run()))
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
            for result in results:
                if isinstance(result, Exception):
                    raise result

    async def _until_selector_is_not(self, plugin: str, selector: str | None) -> None:
        while self._selectors.get(plugin) == selector:
            await self._selector_changed.wait()

    def _put_daemonset(self, plugin: str, shape: objects.DaemonSet | None) -> None:
        age_s = self._age_s(shape.metadata.created_at) if shape is not None else None
        self._membership.put_daemonset(plugin, shape, now=self._clock(), age_s=age_s)
        if shape is None:
            self._selectors.pop(plugin, None)
        else:
            selector = shape.spec.selector if shape.spec is not None else None
            self._selectors[plugin] = scheduling.selector_query(selector or objects.LabelSelector())
        changed, self._selector_changed = self._selector_changed, asyncio.Event()
        changed.set()
        if not self._membership.label_keys <= self._label_keys:
            # labels that were not needed until now were not stored
            self._label_keys = self._membership.label_keys
            self._nodes.list_again()

    def _locate_pods(self, plugin: str, node: str) -> queries.PodLocation | str:
        settings, selector = self._plugins.get(plugin), self._selectors.get(plugin)
        if settings is None:
            return f"pods of {plugin}: the plugin is not in the settings (cluster.plugins)"
        if not settings.daemonset:
            return ""
        if selector is None:
            return (
                f"pods of {plugin}: daemonset {settings.namespace}/{settings.daemonset} "
                "is missing or not read yet"
            )
        return queries.PodLocation(
            namespace=settings.namespace,
            selector=selector,
            current_revision=self._membership.current_revision(plugin),
            names=self._membership.pods_on(plugin, node) if self._has_pods(plugin) else (),
        )

    def _has_pods(self, plugin: str) -> bool:
        reflector = self._pods.get(plugin)
        return reflector is not None and reflector.listed.is_set() and not reflector.problem

    def _to_node(self, shape: objects.Node) -> membership.Node:
        age_s = self._age_s(shape.metadata.created_at)
        return self._membership.to_node(shape, now=self._clock(), age_s=age_s)

    def _replace_nodes(self, nodes: list[membership.Node]) -> None:
        self._membership.replace_nodes(nodes, self._clock())

    def _put_node(self, node: membership.Node) -> None:
        self._membership.put_node(node, self._clock())

    def _drop_node(self, node: membership.Node) -> None:
        self._membership.drop_node(node.name)

    def _age_s(self, created_at: datetime | None) -> float | None:
        return cluster_facts.age_s(created_at, self._api.now())

    async def _report_changes(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_S)
            for change in self._membership.changes(self._clock()):
                if isinstance(change, signals.ExpectedNodes):
                    _EXPECTED.labels(change.plugin).set(len(change.nodes))
                await self._put(change)


def _unchanged(shape: objects.DaemonSet) -> objects.DaemonSet:
    return shape
