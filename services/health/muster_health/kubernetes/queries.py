"""Adapter: queries the Kubernetes API about a suspected plugin, and deletes the plugin's pod.

A query GETs a node, its lease and the plugin's pods on it concurrently, within a time limit; the
answer contains the parts that arrived in time, and names the missing ones. Another kind of query
lists all pods on the node, to find those that a failure affects. Such lists have their own queue,
so they do not delay other queries.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Final

import msgspec
import prometheus_client

from muster.kubernetes import api, known_plugins, objects
from muster.service import logs
from muster_health.kubernetes import cluster_facts
from muster_health.model import signals

_DELETE_S: Final = 10.0
_LEASES_MAX: Final = 10_000
_PODS_MAX: Final = 4
_LIST_PODS_MAX: Final = 1_000
_LIST_BYTES_MAX: Final = 16 * 1024 * 1024
_LISTS_MAX: Final = 4
"""How many lists of a node's pods run concurrently; each may need `_LIST_BYTES_MAX` of memory."""
_QUEUE_S: Final = 15.0
"""How long a list may wait for its turn; the detector repeats the query after 20 s."""
_Listing = asyncio.Task[api.Answer]
_LISTED: Final = ""
"""The location of a watched plugin's pods, which are found by listing all pods of the node."""
_ANSWER_SHARE: Final = 0.9
"""Share of a query's timeout after which partial answers are used."""

_QUERY_S: Final = prometheus_client.Histogram(
    "muster_health_cluster_query_seconds",
    "How long the Kubernetes API took to answer about one node.",
    buckets=(0.005, 0.01, 0.05, 0.1, 0.5, 1, 2),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodLocation:
    """Where to find a plugin's pods: namespace, label selector and newest DaemonSet revision.

    `names` are the known names of the plugin's pods on the node.
    """

    namespace: str
    selector: str
    current_revision: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _LeaseHistory:
    """When the current version of a lease was first (`since`) and last read.

    `before` is when the previous version was last read. All times are by our own clock.
    """

    version: str
    since: float
    last: float
    before: float | None


class ClusterQueries:
    """Runs up to `concurrent_max` queries concurrently; `put` receives the results.

    `locate_pods` returns where to find a plugin's pods on a node, or why that is unknown: no pods
    are then queried. The reason is empty if the settings name no DaemonSet. `more` are plugins that
    muster does not run, in addition to the well-known ones.
    """

    def __init__(
        self,
        api: api.Api,
        put: Callable[[signals.ClusterAnswered | signals.Remediated], Awaitable[None]],
        locate_pods: Callable[[str, str], PodLocation | str],
        *,
        concurrent_max: int,
        more: Sequence[known_plugins.KnownPlugin] = (),
    ) -> None:
        self.refusals: dict[str, str] = {}
        """Missing permissions, each with the API's error message."""
        self._api = api
        self._put = put
        self._locate_pods = locate_pods
        self._known_plugins = more
        self._clock = asyncio.get_running_loop().time
        self._leases: OrderedDict[str, _LeaseHistory] = OrderedDict()
        self._free = asyncio.Semaphore(concurrent_max)
        self._lists = asyncio.Semaphore(_LISTS_MAX)
        self._running: set[asyncio.Task[Any]] = set()
        self._listings: dict[str, _Listing] = {}
        """The requests in progress that list the pods for watched plugins, by node."""

    def start(self, query: signals.AskCluster) -> None:
        """Start a query without waiting; exactly one `ClusterAnswered` follows."""
        self._start(self._answer(query))

    def remediate(
        self, request: signals.Remediate, *, dry_run: bool, is_leader: Callable[[], bool]
    ) -> None:
        """Delete a pod if it still has this uid, without waiting; one `Remediated` follows.

        If we no longer lead (`is_leader`), nothing is deleted, and no `Remediated` follows.
        """
        self._start(self._delete(request, is_leader, dry_run=dry_run))

    async def close(self) -> None:
        """Cancel all running queries and deletions."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _answer(self, query: signals.AskCluster) -> None:
        try:
            result = await (self._list_pods(query) if query.resources else self._query(query))
        except Exception:  # noqa: BLE001  # the caller must get an answer in any case
            logs.logger().exception("cluster_query_failed", node=query.node)
            result = None
        await self._put(
            signals.ClusterAnswered(
                node=query.node,
                plugin=query.plugin,
                number=query.number,
                facts=result,
                resources=query.resources,
            )
        )

    async def _query(self, query: signals.AskCluster) -> signals.Facts | None:
        with contextlib.suppress(TimeoutError), _QUERY_S.time():
            async with asyncio.timeout(query.timeout_s), self._free:
                return await self._facts(query)
        return None

    async def _facts(self, query: signals.AskCluster) -> signals.Facts | None:
        timeout_s = query.timeout_s * _ANSWER_SHARE
        lease_path = f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{query.node}"
        location = _LISTED if query.watched else self._locate_pods(query.plugin, query.node)
        node, lease, pods = await asyncio.gather(
            self._get("nodes", f"/api/v1/nodes/{query.node}", timeout_s=timeout_s),
            self._get("leases", lease_path, timeout_s=timeout_s),
            self._list_watched(query, timeout_s=timeout_s)
            if query.watched
            else self._get_pods(location, query.node, timeout_s=timeout_s),
        )
        answers = (node, lease, *pods)
        if not any(answer.status for answer in answers):
            return None
        is_gone = _says_no_such_node(node)
        problems = ["" if is_gone else node.problem]
        problems += [answer.problem for answer in (lease, *pods) if not _is_absent(answer)]
        if isinstance(location, str) and location:
            problems.append(location)
        result = signals.Facts(
            exists=True if node.is_ok else (False if is_gone else None),
            lease_age_s=self._lease_age_s(query.node, lease),
            problem="; ".join(filter(None, problems)),
        )
        with contextlib.suppress(*api.UNREADABLE):
            if node.is_ok:
                result = _with_node(result, node)
            if isinstance(location, PodLocation) and all(answer.is_ok for answer in pods):
                result = _with_pods(result, pods, current_revision=location.current_revision)
            if query.watched and pods[0].is_ok:
                serving = cluster_facts.watched_pods(
                    pods[0].body,
                    query.watched,
                    query.pod,
                    now=pods[0].date,
                    more=self._known_plugins,
                )
                result = replace(result, pods=serving)
        return result

    async def _list_watched(
        self, query: signals.AskCluster, *, timeout_s: float
    ) -> Sequence[api.Answer]:
        """List the node's pods; queries about several plugins of a node share one list."""
        listing = self._listings.get(query.node)
        if listing is None:
            listing = asyncio.create_task(self._list_node(query.node, timeout_s=timeout_s))
            self._listings[query.node] = listing
            self._running.add(listing)
            listing.add_done_callback(self._running.discard)
            listing.add_done_callback(lambda _: self._listings.pop(query.node, None))
        return (await asyncio.shield(listing),)

    async def _get_pods(
        self, location: PodLocation | str, node: str, *, timeout_s: float
    ) -> Sequence[api.Answer]:
        """Get a plugin's pods by name; list them if no name is known or one of them is gone."""
        if isinstance(location, str):
            return ()
        path = f"/api/v1/namespaces/{location.namespace}/pods"
        answers = await asyncio.gather(
            *(
                self._get("pods", f"{path}/{name}", timeout_s=timeout_s)
                for name in location.names[:_PODS_MAX]
            )
        )
        if answers and not any(map(_is_absent, answers)):
            return answers
        # version 0: the API server answers from its memory, using its index of pods by node
        query = {
            "labelSelector": location.selector,
            "fieldSelector": f"spec.nodeName={node}",
            "resourceVersion": "0",
        }
        return (await self._get("pods", path, query=query, timeout_s=timeout_s),)

    async def _list_pods(self, query: signals.AskCluster) -> signals.Facts | None:
        """Return the pods that request the query's resources, or the permission that is missing.

        Return None if there is no usable answer.
        """
        timeout_s = query.timeout_s * _ANSWER_SHARE
        with contextlib.suppress(TimeoutError, *api.UNREADABLE):
            # the list's own timeout begins only when it gets its turn
            async with asyncio.timeout(_QUEUE_S + timeout_s):
                answer = await self._list_node(query.node, timeout_s=timeout_s)
            if answer.is_ok:
                holders = cluster_facts.pods_requesting(answer.body, query.resources)
                return signals.Facts(holders=holders)
            if answer.is_forbidden:
                return signals.Facts(problem=answer.problem)
        return None

    async def _list_node(self, node: str, *, timeout_s: float) -> api.Answer:
        """List all pods on a node; first wait until fewer than `_LISTS_MAX` lists are running."""
        parameters = {
            "fieldSelector": f"spec.nodeName={node}",
            "limit": str(_LIST_PODS_MAX),
            "resourceVersion": "0",
        }
        async with self._lists:
            answer = await self._api.request(
                "GET",
                "/api/v1/pods",
                query=parameters,
                timeout_s=timeout_s,
                body_bytes_max=_LIST_BYTES_MAX,
            )
        self._note_refusal("list pods of all namespaces", answer)
        return answer

    async def _get(
        self, what: str, path: str, *, query: Mapping[str, str] | None = None, timeout_s: float
    ) -> api.Answer:
        answer = await self._api.request("GET", path, query=query, timeout_s=timeout_s)
        self._note_refusal(f"get {what}", answer)
        return answer

    def _lease_age_s(self, node: str, answer: api.Answer) -> float | None:
        """Return a lease's age by the server's clock, within the bounds that observed changes set.

        None if the age is unknown.
        """
        if not answer.is_ok:
            return None
        try:
            lease = msgspec.json.decode(answer.body, type=objects.Lease)
        except api.UNREADABLE:
            return None
        now, version = self._clock(), lease.metadata.resource_version
        was = self._leases.pop(node, None)
        if was is None:
            history = _LeaseHistory(version=version, since=now, last=now, before=None)
        elif was.version == version:
            history = replace(was, last=now)
        else:
            history = _LeaseHistory(version=version, since=now, last=now, before=was.last)
        self._leases[node] = history
        if len(self._leases) > _LEASES_MAX:
            self._leases.popitem(last=False)
        age_s = cluster_facts.age_s(lease.renewed_at, answer.date)
        if age_s is None:
            return None
        oldest_s = age_s if history.before is None else min(age_s, now - history.before)
        return max(oldest_s, now - history.since)

    async def _delete(
        self, request: signals.Remediate, is_leader: Callable[[], bool], *, dry_run: bool
    ) -> None:
        namespace, _, name = request.pod.partition("/")
        body = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "preconditions": {"uid": request.uid},
            **({"dryRun": ["All"]} if dry_run else {}),
        }
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        if not is_leader():
            return
        answer = await self._api.request("DELETE", path, body=body, timeout_s=_DELETE_S)
        self._note_refusal("delete pods", answer)
        problem = "" if _is_absent(answer) else answer.problem
        logs.logger().warning(
            "plugin_pod_deleted" if not problem else "plugin_pod_not_deleted",
            node=request.node,
            plugin=request.plugin,
            pod=request.pod,
            reason=request.reason,
            dry_run=dry_run,
            problem=problem,
        )
        await self._put(
            signals.Remediated(
                node=request.node, plugin=request.plugin, pod=request.pod, error=problem
            )
        )

    def _note_refusal(self, what: str, answer: api.Answer) -> None:
        """Log a missing permission once, and record it until it is granted."""
        if answer.status and not answer.is_forbidden:
            self.refusals.pop(what, None)
        elif answer.is_forbidden and what not in self.refusals:
            self.refusals[what] = answer.problem
            logs.logger().warning("cluster_permission_missing", what=what, problem=answer.problem)


class _Details(msgspec.Struct, frozen=True):
    kind: str = ""


class _Status(msgspec.Struct, frozen=True):
    kind: str = ""
    reason: str = ""
    details: _Details | None = None


_NO_SUCH_NODE: Final = _Status(kind="Status", reason="NotFound", details=_Details(kind="nodes"))


class _PodList(msgspec.Struct, frozen=True):
    """A list of pods (with `items`), or a single pod (without)."""

    items: tuple[objects.Pod, ...] | None = None


def _with_node(result: signals.Facts, answer: api.Answer) -> signals.Facts:
    node = msgspec.json.decode(answer.body, type=objects.Node)
    return replace(
        result,
        ready=cluster_facts.is_ready(node),
        planned=cluster_facts.planned(node),
        offers=cluster_facts.offers(node),
    )


def _with_pods(
    result: signals.Facts, answers: Sequence[api.Answer], *, current_revision: str
) -> signals.Facts:
    pods = [pod for answer in answers for pod in _decoded(answer)]
    return replace(
        result,
        pods=tuple(cluster_facts.pod(pod, current_revision=current_revision) for pod in pods),
    )


def _decoded(answer: api.Answer) -> tuple[objects.Pod, ...]:
    items = msgspec.json.decode(answer.body, type=_PodList).items
    return (msgspec.json.decode(answer.body, type=objects.Pod),) if items is None else items


def _is_absent(answer: api.Answer) -> bool:
    return answer.status == HTTPStatus.NOT_FOUND


def _says_no_such_node(answer: api.Answer) -> bool:
    """Return whether the API server says that a node is missing; not every 404 says that."""
    if _is_absent(answer):
        with contextlib.suppress(*api.UNREADABLE):
            return msgspec.json.decode(answer.body, type=_Status) == _NO_SUCH_NODE
    return False
