"""Adapter: the Kubernetes API: what is watched of it, and who asks it.

Watched are all nodes, and of each plugin its DaemonSet and its pods. Leases are never watched: they
change every 10 s on each node, and are asked for when a node is suspect.
"""

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Final

import prometheus_client

from muster.kubernetes import api, watch
from muster_health.kubernetes import membership, objects, queries
from muster_health.model import config, signals

Told = signals.ExpectedNodes | signals.NodeOffers | signals.ClusterAnswered | signals.Remediated

_NEWS_S: Final = 1.0
"""Changes are gathered this long: a rolling update is one change a second, not one a pod."""
_DAEMONSET_S: Final = 5.0
"""How long the nodes wait for what tells which of their labels matter."""

_PULSE_S: Final = 15.0
_ANSWER_S: Final = 5.0

_NODES: Final = prometheus_client.Gauge(
    "muster_health_expected_nodes", "Nodes that should have a plugin.", ["plugin"]
)

_DaemonSets = watch.Reflector[objects.DaemonSet, objects.DaemonSet]


class Cluster:
    """One cluster; `run` it, and ask `questions`. What it knows goes into `put`."""

    def __init__(
        self,
        api: api.Api,
        settings: config.Cluster,
        put: Callable[[Told], Awaitable[None]],
        *,
        pulse_s: float = _PULSE_S,
    ) -> None:
        self.questions = queries.Questions(api, put, self._pods_of, asks_max=settings.asks_max)
        self._api = api
        self._pulse_s = pulse_s
        self._mute = ""
        self._put = put
        self._clock = asyncio.get_running_loop().time
        self._known = membership.Membership(settings)
        self._keys = self._known.label_keys
        self._plugins = {one.plugin: one for one in settings.plugins}
        self._selectors: dict[str, str] = {}
        self._selected = asyncio.Event()
        """Replaced whenever a selector changes."""
        self._nodes = watch.Reflector(
            api,
            "/api/v1/nodes",
            objects.Node,
            watch.Sink(self._kept, self._replace_nodes, self._put_node, self._drop_node),
        )
        self._daemonsets = {
            one.plugin: self._daemonset(one) for one in settings.plugins if one.daemonset
        }
        self._pods: dict[str, watch.Reflector[objects.Pod, membership.Pod]] = {}

    @property
    def problems(self) -> dict[str, str]:
        """Say what cannot be read or done, in words, by what it is; empty if all can."""
        found = {"API": self._mute, "nodes": self._nodes.problem, **self.questions.refusals}
        for plugin, watched in self._daemonsets.items():
            is_gone = watched.listed.is_set() and plugin not in self._selectors
            found[f"daemonset of {plugin}"] = watched.problem or ("is not there" if is_gone else "")
        for plugin, pods in self._pods.items():
            found[f"pods of {plugin}"] = pods.problem
        return {what: problem for what, problem in found.items() if problem}

    async def run(self) -> None:
        """Watch for ever; nodes are read once it is known which of their labels matter."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for plugin, watched in self._daemonsets.items():
                    tasks.create_task(watched.run())
                    tasks.create_task(self._watch_pods(self._plugins[plugin]))
                tasks.create_task(self._watch_nodes())
                tasks.create_task(self._tell())
                tasks.create_task(self._feel())
        finally:
            await self.questions.close()

    async def _feel(self) -> None:
        """Notice an API that hangs: a watch that says nothing may mean that nothing happens."""
        timeout_s = min(_ANSWER_S, self._pulse_s)
        while True:
            await asyncio.sleep(self._pulse_s)
            answer = await self._api.ask(
                "GET", "/api/v1/nodes", query={"limit": "1"}, timeout_s=timeout_s
            )
            self._mute = "" if answer.status else answer.problem

    async def _watch_nodes(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DAEMONSET_S):
                for watched in self._daemonsets.values():
                    await watched.listed.wait()
        self._keys = self._known.label_keys
        await self._nodes.run()

    def _daemonset(self, one: config.Plugin) -> _DaemonSets:
        put = functools.partial(self._put_daemonset, one.plugin)

        def replace(found: list[objects.DaemonSet]) -> None:
            put(found[0] if found else None)

        def drop(_: objects.DaemonSet) -> None:
            put(None)

        return watch.Reflector(
            self._api,
            f"/apis/apps/v1/namespaces/{one.namespace}/daemonsets",
            objects.DaemonSet,
            watch.Sink(_itself, replace, put, drop),
            query={"fieldSelector": f"metadata.name={one.daemonset}"},
        )

    async def _watch_pods(self, one: config.Plugin) -> None:
        """Watch the pods that a plugin's DaemonSet selects; a new DaemonSet may select others."""
        sink = watch.Sink(
            membership.pod,
            functools.partial(self._known.replace_pods, one.plugin),
            functools.partial(self._known.put_pod, one.plugin),
            functools.partial(self._known.drop_pod, one.plugin),
        )
        path = f"/api/v1/namespaces/{one.namespace}/pods"
        while True:
            selector = self._selectors.get(one.plugin)
            tasks = [asyncio.create_task(self._selects_otherwise(one.plugin, selector))]
            if selector is not None:
                watched = watch.Reflector(
                    self._api, path, objects.Pod, sink, query={"labelSelector": selector}
                )
                self._pods[one.plugin] = watched
                tasks.append(asyncio.create_task(watched.run()))
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                ends = await asyncio.gather(*tasks, return_exceptions=True)
            for end in ends:
                if isinstance(end, Exception):
                    raise end

    async def _selects_otherwise(self, plugin: str, selector: str | None) -> None:
        while self._selectors.get(plugin) == selector:
            await self._selected.wait()

    def _put_daemonset(self, plugin: str, shape: objects.DaemonSet | None) -> None:
        made = shape.metadata.creation_timestamp if shape is not None else None
        age_s = self._age_s(made)
        self._known.put_daemonset(plugin, shape, now=self._clock(), age_s=age_s)
        if shape is None:
            self._selectors.pop(plugin, None)
        else:
            self._selectors[plugin] = shape.pods
        changed, self._selected = self._selected, asyncio.Event()
        changed.set()
        if not self._known.label_keys <= self._keys:
            # labels that nobody asked about until now were not kept
            self._keys = self._known.label_keys
            self._nodes.list_again()

    def _pods_of(self, plugin: str, node: str) -> queries.Pods | str:
        one, selector = self._plugins.get(plugin), self._selectors.get(plugin)
        if one is None or not one.daemonset:
            return f"pods of {plugin}: no daemonset is named"
        if selector is None:
            return f"pods of {plugin}: daemonset {one.namespace}/{one.daemonset} is not known"
        return queries.Pods(
            namespace=one.namespace,
            selector=selector,
            current=self._known.current_revision(plugin),
            names=self._known.pods_on(plugin, node) if self._sees_pods(plugin) else (),
        )

    def _sees_pods(self, plugin: str) -> bool:
        watched = self._pods.get(plugin)
        return watched is not None and watched.listed.is_set() and not watched.problem

    def _kept(self, shape: objects.Node) -> membership.Node:
        age_s = self._age_s(shape.metadata.creation_timestamp)
        return self._known.node(shape, now=self._clock(), age_s=age_s)

    def _replace_nodes(self, found: list[membership.Node]) -> None:
        self._known.replace_nodes(found, self._clock())

    def _put_node(self, node: membership.Node) -> None:
        self._known.put_node(node, self._clock())

    def _drop_node(self, node: membership.Node) -> None:
        self._known.drop_node(node.name)

    def _age_s(self, made: datetime | None) -> float | None:
        return objects.age_s(made, self._api.now())

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(_NEWS_S)
            for told in self._known.news(self._clock()):
                if isinstance(told, signals.ExpectedNodes):
                    _NODES.labels(told.plugin).set(len(told.nodes))
                await self._put(told)


def _itself(shape: objects.DaemonSet) -> objects.DaemonSet:
    return shape
