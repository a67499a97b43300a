"""Adapter: the Kubernetes API: questions about a suspected plugin, and the restart of its pod.

A question is one GET of a node, of its lease and of the plugin's pods on it, at once and within a
time; what has been answered by then is told, and what has not is said. Or it is one list of all
pods on the node: whom a failure affects waits in a queue of its own, so as not to delay what it is.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Final

import msgspec
import prometheus_client

from muster.kubernetes import api
from muster.service import logs
from muster_health.kubernetes import objects
from muster_health.model import facts, signals

_DELETE_S: Final = 10.0
_LEASES_MAX: Final = 10_000
_PODS_MAX: Final = 4
_HOLDERS_MAX: Final = 1_000
_HOLDERS_BYTES_MAX: Final = 16 * 1024 * 1024
_LISTS_MAX: Final = 4
"""All pods of so many nodes are read at once: each may take that many bytes."""
_QUEUE_S: Final = 15.0
"""For so long a list waits for its turn; it is asked for anew after 20 s."""
_ANSWER_SHARE: Final = 0.9
"""Of a question's time: what has been answered by then is better than nothing."""

_ASKED: Final = prometheus_client.Histogram(
    "muster_health_cluster_question_seconds",
    "How long the Kubernetes API took to answer about one node.",
    buckets=(0.005, 0.01, 0.05, 0.1, 0.5, 1, 2),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """Where a plugin's pods are: namespace, label selector, and its DaemonSet's newest revision.

    `names` are those that are known to be on the node.
    """

    namespace: str
    selector: str
    current: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """A lease as we saw it: `since` and until `last`; `before` is the end of the one before it."""

    version: str
    since: float
    last: float
    before: float | None


class Questions:
    """Asks and acts beside each other, `asks_max` at once; what comes of it goes into `put`.

    `pods_of` tells where a plugin's pods on a node are, or why that is not known.
    """

    def __init__(
        self,
        api: api.Api,
        put: Callable[[signals.ClusterAnswered | signals.Remediated], Awaitable[None]],
        pods_of: Callable[[str, str], Pods | str],
        *,
        asks_max: int,
    ) -> None:
        self.refusals: dict[str, str] = {}
        """What we have not the right to do, by what it is, in the API's words."""
        self._api = api
        self._put = put
        self._pods_of = pods_of
        self._clock = asyncio.get_running_loop().time
        self._leases: OrderedDict[str, _Seen] = OrderedDict()
        self._free = asyncio.Semaphore(asks_max)
        self._lists = asyncio.Semaphore(_LISTS_MAX)
        self._running: set[asyncio.Task[None]] = set()

    def ask(self, asked: signals.AskCluster) -> None:
        """Ask about a node, without waiting; exactly one `ClusterAnswered` follows."""
        self._start(self._answer(asked))

    def remediate(
        self, told: signals.Remediate, *, dry_run: bool, still: Callable[[], bool]
    ) -> None:
        """Delete a pod that still has this uid, without waiting; one `Remediated` follows.

        Unless it is not ours to do any more (`still`): then nothing happens.
        """
        self._start(self._delete(told, still, dry_run=dry_run))

    async def close(self) -> None:
        """Drop everything that runs."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _answer(self, asked: signals.AskCluster) -> None:
        try:
            found = await (self._holders(asked) if asked.resources else self._known(asked))
        except Exception:  # noqa: BLE001  # strangers write the answers: a suspect must not wait for ever
            logs.logger().exception("cluster_question_failed", node=asked.node)
            found = None
        await self._put(
            signals.ClusterAnswered(
                node=asked.node,
                plugin=asked.plugin,
                number=asked.number,
                facts=found,
                resources=asked.resources,
            )
        )

    async def _known(self, asked: signals.AskCluster) -> facts.Facts | None:
        with contextlib.suppress(TimeoutError), _ASKED.time():
            async with asyncio.timeout(asked.timeout_s), self._free:
                return await self._facts(asked)
        return None

    async def _facts(self, asked: signals.AskCluster) -> facts.Facts | None:
        timeout_s = asked.timeout_s * _ANSWER_SHARE
        lease_path = f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{asked.node}"
        where = self._pods_of(asked.plugin, asked.node)
        node, lease, pods = await asyncio.gather(
            self._get("nodes", f"/api/v1/nodes/{asked.node}", timeout_s=timeout_s),
            self._get("leases", lease_path, timeout_s=timeout_s),
            self._get_pods(where, asked.node, timeout_s=timeout_s),
        )
        answers = (node, lease, *pods)
        if not any(answer.status for answer in answers):
            return None
        gone = _says_no_such_node(node)
        problems = ["" if gone else node.problem]
        problems += [answer.problem for answer in (lease, *pods) if not _is_absent(answer)]
        if isinstance(where, str):
            problems.append(where)
        found = facts.Facts(
            exists=True if node.is_ok else (False if gone else None),
            lease_age_s=self._lease_age_s(asked.node, lease),
            problem="; ".join(filter(None, problems)),
        )
        with contextlib.suppress(*api.UNREADABLE):
            if node.is_ok:
                shape = msgspec.json.decode(node.body, type=objects.Node)
                found = replace(
                    found, ready=shape.ready, planned=shape.planned, offers=shape.offers
                )
            if isinstance(where, Pods) and all(answer.is_ok for answer in pods):
                shown = [pod for answer in pods for pod in _decoded(answer)]
                told = tuple(pod.in_our_words(where.current) for pod in shown)
                found = replace(found, pods=told)
        return found

    async def _get_pods(
        self, where: Pods | str, node: str, *, timeout_s: float
    ) -> Sequence[api.Answer]:
        """Get the pods that are known by name; all on the node if none is, or one has gone."""
        if isinstance(where, str):
            return ()
        path = f"/api/v1/namespaces/{where.namespace}/pods"
        answers = await asyncio.gather(
            *(
                self._get("pods", f"{path}/{name}", timeout_s=timeout_s)
                for name in where.names[:_PODS_MAX]
            )
        )
        if answers and not any(map(_is_absent, answers)):
            return answers
        # version 0 is what the API server has in memory, found by its index of pods by node
        query = {
            "labelSelector": where.selector,
            "fieldSelector": f"spec.nodeName={node}",
            "resourceVersion": "0",
        }
        return (await self._get("pods", path, query=query, timeout_s=timeout_s),)

    async def _holders(self, asked: signals.AskCluster) -> facts.Facts | None:
        """Return which pods request what is asked for; None is no answer, or none to be read."""
        timeout_s = asked.timeout_s * _ANSWER_SHARE
        query = {
            "fieldSelector": f"spec.nodeName={asked.node}",
            "limit": str(_HOLDERS_MAX),
            "resourceVersion": "0",
        }
        with contextlib.suppress(TimeoutError, *api.UNREADABLE):
            # the list's own time begins with its turn
            async with asyncio.timeout(_QUEUE_S + timeout_s), self._lists:
                answer = await self._api.ask(
                    "GET",
                    "/api/v1/pods",
                    query=query,
                    timeout_s=timeout_s,
                    body_bytes_max=_HOLDERS_BYTES_MAX,
                )
            self._note_refusal("list pods of all namespaces", answer)
            if answer.is_ok:
                return facts.Facts(holders=objects.holders_of(answer.body, asked.resources))
            if answer.is_forbidden:
                return facts.Facts(problem=answer.problem)
        return None

    async def _get(
        self, what: str, path: str, *, query: Mapping[str, str] | None = None, timeout_s: float
    ) -> api.Answer:
        answer = await self._api.ask("GET", path, query=query, timeout_s=timeout_s)
        self._note_refusal(f"get {what}", answer)
        return answer

    def _lease_age_s(self, node: str, answer: api.Answer) -> float | None:
        """Return how old a lease is by the API server's clock, within what we saw by our own."""
        if not answer.is_ok:
            return None
        try:
            lease = msgspec.json.decode(answer.body, type=objects.Lease)
        except api.UNREADABLE:
            return None
        now, version = self._clock(), lease.metadata.resource_version
        was = self._leases.pop(node, None)
        if was is None:
            seen = _Seen(version=version, since=now, last=now, before=None)
        elif was.version == version:
            seen = replace(was, last=now)
        else:
            seen = _Seen(version=version, since=now, last=now, before=was.last)
        self._leases[node] = seen
        if len(self._leases) > _LEASES_MAX:
            self._leases.popitem(last=False)
        age_s = objects.age_s(lease.renewed_at, answer.date)
        if age_s is None:
            return None
        oldest_s = age_s if seen.before is None else min(age_s, now - seen.before)
        return max(oldest_s, now - seen.since)

    async def _delete(
        self, told: signals.Remediate, still: Callable[[], bool], *, dry_run: bool
    ) -> None:
        namespace, _, name = told.pod.partition("/")
        body = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "preconditions": {"uid": told.uid},
            **({"dryRun": ["All"]} if dry_run else {}),
        }
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        if not still():
            return
        answer = await self._api.ask("DELETE", path, body=body, timeout_s=_DELETE_S)
        self._note_refusal("delete pods", answer)
        problem = "" if _is_absent(answer) else answer.problem
        logs.logger().warning(
            "plugin_pod_deleted" if not problem else "plugin_pod_kept",
            node=told.node,
            plugin=told.plugin,
            pod=told.pod,
            reason=told.reason,
            dry_run=dry_run,
            problem=problem,
        )
        await self._put(
            signals.Remediated(node=told.node, plugin=told.plugin, pod=told.pod, error=problem)
        )

    def _note_refusal(self, what: str, answer: api.Answer) -> None:
        """Name a right that we have not once, and remember it until we have it."""
        if answer.status and not answer.is_forbidden:
            self.refusals.pop(what, None)
        elif answer.is_forbidden and what not in self.refusals:
            self.refusals[what] = answer.problem
            logs.logger().warning("cluster_right_missing", what=what, problem=answer.problem)


class _Details(msgspec.Struct, frozen=True):
    kind: str = ""


class _Status(msgspec.Struct, frozen=True):
    kind: str = ""
    reason: str = ""
    details: _Details | None = None


_NO_SUCH_NODE: Final = _Status(kind="Status", reason="NotFound", details=_Details(kind="nodes"))


class _PodList(msgspec.Struct, frozen=True):
    """A list of pods has `items`, one pod has not."""

    items: tuple[objects.Pod, ...] | None = None


def _decoded(answer: api.Answer) -> tuple[objects.Pod, ...]:
    items = msgspec.json.decode(answer.body, type=_PodList).items
    return (msgspec.json.decode(answer.body, type=objects.Pod),) if items is None else items


def _is_absent(answer: api.Answer) -> bool:
    return answer.status == HTTPStatus.NOT_FOUND


def _says_no_such_node(answer: api.Answer) -> bool:
    """Tell whether the API says so itself: a proxy without a way to it answers 404, too."""
    if _is_absent(answer):
        with contextlib.suppress(*api.UNREADABLE):
            return msgspec.json.decode(answer.body, type=_Status) == _NO_SUCH_NODE
    return False
