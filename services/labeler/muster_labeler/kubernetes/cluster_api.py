"""Adapter for the Kubernetes API: checks permissions, and reads and labels nodes.

Labels are written by server-side apply as one field manager, so that the API records the owner of
each label. A label that another manager owns stays as it is, and the error names that manager,
unless a person passed `--overwrite`. Written labels are read back; a difference is a failure.

The rate limits how fast writes arrive, not only how fast they are sent. A write in flight may
arrive at any moment until it is answered, so it counts from when it is sent until at least a second
after its answer. A token bucket would limit only the sending.
"""

import asyncio
import collections
import contextlib
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import msgspec

from muster import pacing
from muster.kubernetes import api as kubernetes_api
from muster.kubernetes import objects
from muster.service import logs
from muster_labeler import model
from muster_labeler.kubernetes import projection

NODES_PATH: Final = "/api/v1/nodes"

_ACCESS_REVIEWS: Final = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_ATTEMPTS: Final = 3
_BACKOFF: Final = pacing.Backoff(first_s=0.2)
_LEASE: Final = "muster-labeler"
_NODE: Final = msgspec.json.Decoder(objects.Node)


class WritePace:
    """Limits the rate of writes to one cluster: `async with pace.turn()` admits one request.

    `may_write` is evaluated only when the turn comes, because it may change during a long wait.
    """

    def __init__(self, per_s: float) -> None:
        self._rate = WriteRate(per_s)
        self._line = asyncio.Lock()
        self._answered = asyncio.Event()
        self._clock = asyncio.get_running_loop().time
        self.may_write: Callable[[], bool] = lambda: True

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncGenerator[None, None]:
        """Wait for a turn, in order of arrival; the write counts as answered after the block."""
        async with self._line:
            while (wait_s := self._rate.wait_s(self._clock())) != 0:
                self._answered.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._answered.wait()
            self._rate.start(self._clock())
        try:
            yield
        finally:
            self._rate.finish(self._clock())
            self._answered.set()


class WriteRate:
    """Allows at most `per_s` writes a second, evenly spaced, without a burst after a pause."""

    def __init__(self, per_s: float) -> None:
        assert per_s > 0, f"the rate must be above 0 writes a second, not {per_s}"
        self._gap_s = 1.0 / per_s
        self._window_s, self._writes_max = max(1.0, self._gap_s), max(1, int(per_s))
        self._next_at = float("-inf")
        self._under_way = 0
        self._counted_until: collections.deque[float] = collections.deque()
        """The time until which each answered write counts."""

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until the next write may start; None: a running one must end first."""
        while self._counted_until and self._counted_until[0] <= now:
            self._counted_until.popleft()
        if self._under_way + len(self._counted_until) < self._writes_max:
            return max(0.0, self._next_at - now)
        if not self._counted_until:
            return None
        return max(self._counted_until[0], self._next_at) - now

    def start(self, now: float) -> None:
        """Count a write that is sent now; the next write must wait for the minimum gap."""
        assert self.wait_s(now) == 0, "a write was started too early"
        self._under_way += 1
        self._next_at = now + self._gap_s

    def finish(self, now: float) -> None:
        """Record that a write was answered or abandoned."""
        assert self._under_way, "only a write in flight can be answered"
        self._under_way -= 1
        self._counted_until.append(now + self._window_s)


class WriteLimit:
    """Limits how often each node is written in a period, to stop conflicts with another writer."""

    def __init__(self, writes_max: int, period_s: float) -> None:
        self._writes_max = writes_max
        self._period_s = period_s
        self._written: dict[str, tuple[float, int]] = {}
        """For each node, the start of its period, and the number of writes in this period."""

    def may_write(self, node: str, now: float) -> bool:
        """Return whether the limit allows another write to a node."""
        since, count = self._written.get(node, (now, 0))
        return now - since >= self._period_s or count < self._writes_max

    def note_write(self, node: str, now: float) -> None:
        """Count a write to a node."""
        since, count = self._written.get(node, (now, 0))
        is_over = now - since >= self._period_s
        self._written[node] = (now, 1) if is_over else (since, count + 1)

    def forget(self, now: float) -> None:
        """Drop the nodes whose period is over."""
        over = [node for node, (since, _) in self._written.items() if now - since >= self._period_s]
        for node in over:
            del self._written[node]


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed request, and why it failed.

    `is_passing` means that another attempt may succeed, `is_gone` that the node no longer exists,
    and `is_conflict` that another manager owns the label.
    """

    text: str
    is_passing: bool = False
    is_gone: bool = False
    is_conflict: bool = False


class NodeApi:
    """Reads the nodes of one cluster, and writes them at a limited rate."""

    def __init__(self, api: kubernetes_api.Api, pace: WritePace, *, timeout_s: float) -> None:
        self._api = api
        self._pace = pace
        self._timeout_s = timeout_s

    async def get(self, name: str) -> model.Node | Failure:
        """Return a node, or the failure if it cannot be read."""
        answer = await self._api.request("GET", f"{NODES_PATH}/{name}", timeout_s=self._timeout_s)
        if not answer.is_ok:
            return _failure("get", name, answer)
        try:
            return projection.node(_NODE.decode(answer.body))
        except kubernetes_api.UNREADABLE as error:
            return Failure(f"get node {name}: {error}", is_passing=True)

    async def label(
        self,
        node: model.Node,
        labels: Mapping[str, str],
        *,
        provenance: str,
        drop: Collection[str] = (),
        force: bool = False,
    ) -> model.Node | Failure:
        """Write labels and their provenance, and remove the labels in `drop`.

        Returns the node as read back, or the failure. Muster's other labels stay.

        The patch contains the node's uid, so that a node deleted in the meantime is a conflict;
        without the uid, the API would create the node (apiserver endpoints/handlers/patch.go).
        """
        kept = {key: value for key, value in node.our_labels.items() if key not in drop}
        metadata = {
            "name": node.name,
            "uid": node.uid,
            "labels": {**kept, **labels},
            "annotations": {model.PROVENANCE: provenance},
        }
        expected: dict[str, str | None] = {**dict.fromkeys(drop), **labels}
        return await self._apply(node, metadata, expected, force=force)

    async def unlabel(self, node: model.Node) -> model.Node | Failure:
        """Remove muster's labels by an empty apply; return the node read back, or the failure."""
        metadata = {"name": node.name, "uid": node.uid}
        removed: dict[str, str | None] = dict.fromkeys(node.our_labels)
        return await self._apply(node, metadata, removed, force=False)

    async def remove_condition(self, node: model.Node) -> Failure | None:
        """Remove muster's condition from a node; return the failure, if any.

        The patch names the condition. A server-side apply that omits it would also remove every
        condition without an owner, such as those that a kubelet has not changed since it created
        its node.
        """
        conditions = [{"$patch": "delete", "type": model.CONDITION}]
        answer = await write(
            self._api,
            self._pace,
            "PATCH",
            f"{NODES_PATH}/{node.name}/status",
            query={"fieldManager": model.FIELD_MANAGER},
            body={"metadata": {"uid": node.uid}, "status": {"conditions": conditions}},
            content=kubernetes_api.STRATEGIC,
            timeout_s=self._timeout_s,
        )
        return None if answer.is_ok else await self._refused("remove condition of", node, answer)

    async def _apply(
        self,
        node: model.Node,
        metadata: Mapping[str, object],
        expected: Mapping[str, str | None],
        *,
        force: bool,
    ) -> model.Node | Failure:
        answer = await write(
            self._api,
            self._pace,
            "PATCH",
            f"{NODES_PATH}/{node.name}",
            query={"fieldManager": model.FIELD_MANAGER, "force": str(force).lower()},
            body={"apiVersion": "v1", "kind": "Node", "metadata": metadata},
            timeout_s=self._timeout_s,
        )
        if not answer.is_ok:
            return await self._refused("label", node, answer)
        after = await self.get(node.name)
        if isinstance(after, Failure):
            return after
        labels = {**after.labels, **after.our_labels}
        # a removed label that another manager also owns stays, but is no longer muster's
        wrong = [
            key
            for key, value in sorted(expected.items())
            if (key in after.our_labels if value is None else labels.get(key) != value)
        ]
        if not wrong:
            return after
        read = ", ".join(f"{key}={labels.get(key)!r}" for key in wrong)
        return Failure(f"label node {node.name}: after the write, the node has {read}")

    async def _refused(self, verb: str, node: model.Node, answer: kubernetes_api.Answer) -> Failure:
        if answer.status in {HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY}:
            # a conflict about a label, a node that no longer exists, or a new node of this name
            after = await self.get(node.name)
            if isinstance(after, Failure) and after.is_gone:
                return after
            if isinstance(after, model.Node) and after.uid != node.uid:
                text = f"{verb} node {node.name}: it was deleted and created again"
                return Failure(text, is_gone=True)
        return _failure(verb, node.name, answer)


@dataclass(frozen=True, slots=True)
class Permission:
    """A right to use a verb on a resource or an object; in all namespaces by default."""

    verb: str
    resource: str
    group: str = ""
    namespace: str = ""
    name: str = ""

    def __str__(self) -> str:
        group = f".{self.group}" if self.group else ""
        name = f"/{self.name}" if self.name else ""
        namespace = f" in namespace {self.namespace}" if self.namespace else ""
        return f"{self.verb} {self.resource}{group}{name}{namespace}"


class _ReviewStatus(msgspec.Struct, frozen=True):
    allowed: bool = False


class _Review(msgspec.Struct, frozen=True):
    status: _ReviewStatus = _ReviewStatus()


async def missing_permissions(
    api: kubernetes_api.Api, permissions: Sequence[Permission], *, timeout_s: float
) -> list[Permission]:
    """Return the permissions that the API denies.

    A permission that cannot be checked counts as granted: the actual request will show whether it
    is.
    """
    allowed = await asyncio.gather(*(_is_allowed(api, entry, timeout_s) for entry in permissions))
    return [entry for entry, is_ours in zip(permissions, allowed, strict=True) if not is_ours]


async def log_missing_permissions(
    api: kubernetes_api.Api, permissions: Sequence[Permission], *, timeout_s: float
) -> None:
    """Log all missing permissions together, rather than one by one when they are needed."""
    missing = await missing_permissions(api, permissions, timeout_s=timeout_s)
    if missing:
        logs.logger().warning("permissions_missing", permissions=[str(entry) for entry in missing])


async def write(
    api: kubernetes_api.Api,
    pace: WritePace,
    verb: str,
    path: str,
    *,
    body: object,
    timeout_s: float,
    query: Mapping[str, str] | None = None,
    content: str = kubernetes_api.APPLY,
) -> kubernetes_api.Answer:
    """Write an object; each attempt waits for its turn, so that retries do not exceed the rate.

    Nothing is written if writing is no longer allowed when the turn comes.
    """
    answer = kubernetes_api.Answer(
        what=f"{verb.lower()} {path}", status=0, body=b"another replica leads by now"
    )
    for attempt in range(1, _ATTEMPTS + 1):
        async with pace.turn():
            if not pace.may_write():
                break
            answer = await api.request(
                verb,
                path,
                query=query,
                body=body,
                content=content,
                timeout_s=timeout_s,
                attempts=1,
            )
        if not answer.is_passing or attempt == _ATTEMPTS:
            break
        await asyncio.sleep(max(answer.wait_s, _BACKOFF.delay_s(attempt)))
    return answer


async def remove_objects(
    api: kubernetes_api.Api, pace: WritePace, *, namespace: str, timeout_s: float
) -> list[str]:
    """Remove the labeler's inventory and Lease; return the failures."""
    answers = []
    for path in (
        f"/api/v1/namespaces/{namespace}/configmaps/{projection.INVENTORY_CONFIG_MAP}",
        f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{_LEASE}",
    ):
        async with pace.turn():
            answers.append(await api.request("DELETE", path, timeout_s=timeout_s))
    failed = (a for a in answers if not a.is_ok and a.status != HTTPStatus.NOT_FOUND)
    return [answer.problem for answer in failed]


def _failure(verb: str, name: str, answer: kubernetes_api.Answer) -> Failure:
    problem = answer.problem.partition(": ")[2]
    return Failure(
        f"{verb} node {name}: {problem}",
        is_passing=answer.is_passing,
        is_gone=answer.status == HTTPStatus.NOT_FOUND,
        is_conflict=answer.status == HTTPStatus.CONFLICT,
    )


async def _is_allowed(api: kubernetes_api.Api, permission: Permission, timeout_s: float) -> bool:
    resource, _, subresource = permission.resource.partition("/")
    attributes = {"verb": permission.verb, "resource": resource, "group": permission.group}
    optional = {
        "name": permission.name,
        "subresource": subresource,
        "namespace": permission.namespace,
    }
    attributes |= {key: value for key, value in optional.items() if value}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = await api.request("POST", _ACCESS_REVIEWS, body=review, timeout_s=timeout_s)
    if not answer.is_ok:
        return True
    try:
        return msgspec.json.decode(answer.body, type=_Review).status.allowed
    except kubernetes_api.UNREADABLE:
        return True
