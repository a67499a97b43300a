"""Adapter: the Kubernetes API: reads nodes, and writes our labels on them by server-side apply.

A label that another manager owns stays as it is, and the answer names the owner, unless a person
said `--overwrite`. What was written is read back; a difference is a failure.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import msgspec

from muster.kubernetes import api, objects
from muster.kubernetes import api as kubernetes_api
from muster.service import logs
from muster_labeler import model
from muster_labeler.kubernetes import pace, projection
from muster_labeler.kubernetes import pace as pacing

NODES_PATH: Final = "/api/v1/nodes"

_TRIES: Final = 3
_TRY_AGAIN_S: Final = 0.1
_DECODER: Final = msgspec.json.Decoder(objects.Node)


@dataclass(frozen=True, slots=True)
class Failure:
    """What was not done, and why.

    `is_passing` if it may be in a moment, `is_gone` if never; `is_conflict` if it is another's.
    """

    text: str
    is_passing: bool = False
    is_gone: bool = False
    is_conflict: bool = False


class Nodes:
    """The nodes of one cluster, and the pace at which they are written."""

    def __init__(self, api: kubernetes_api.Api, pace: pacing.Pace, *, timeout_s: float) -> None:
        self._api = api
        self._pace = pace
        self._timeout_s = timeout_s

    async def get(self, name: str) -> model.Node | Failure:
        """Return a node."""
        answer = await self._api.ask("GET", f"{NODES_PATH}/{name}", timeout_s=self._timeout_s)
        if not answer.is_ok:
            return _failure("get", name, answer)
        return _decoded("get", name, answer)

    async def label(
        self,
        node: model.Node,
        labels: Mapping[str, str],
        *,
        provenance: str,
        drop: Collection[str] = (),
        force: bool = False,
    ) -> model.Node | Failure:
        """Write labels and their provenance, keep what else is ours; return what was read back.

        But for the labels of ours to `drop`.

        The node's uid goes along: a node that was deleted meanwhile is a conflict, where without it
        server-side apply would create one (apiserver endpoints/handlers/patch.go).
        """
        kept = {key: value for key, value in node.ours.items() if key not in drop}
        wanted = {**kept, **labels}
        metadata = {
            "name": node.name,
            "uid": node.uid,
            "labels": wanted,
            "annotations": {model.PROVENANCE: provenance},
        }
        expected: dict[str, str | None] = {**dict.fromkeys(drop), **labels}
        return await self._apply(node, metadata, expected, force=force)

    async def unlabel(self, node: model.Node) -> model.Node | Failure:
        """Remove everything of ours from a node: what an apply leaves out, goes; read it back."""
        metadata = {"name": node.name, "uid": node.uid}
        gone: dict[str, str | None] = dict.fromkeys(node.ours)
        return await self._apply(node, metadata, gone, force=False)

    async def _apply(
        self,
        node: model.Node,
        metadata: Mapping[str, object],
        expected: Mapping[str, str | None],
        *,
        force: bool,
    ) -> model.Node | Failure:
        body = {"apiVersion": "v1", "kind": "Node", "metadata": metadata}
        answer = await write(
            self._api,
            self._pace,
            "PATCH",
            f"{NODES_PATH}/{node.name}",
            query={"fieldManager": model.MANAGER, "force": str(force).lower()},
            body=body,
            timeout_s=self._timeout_s,
        )
        if not answer.is_ok:
            return await self._refused(node, answer)
        now = await self.get(node.name)
        if isinstance(now, Failure):
            return now
        there = {**now.labels, **now.ours}
        # what another owns as well stays, and is not ours any more
        wrong = [
            key
            for key, value in sorted(expected.items())
            if (key in now.ours if value is None else there.get(key) != value)
        ]
        if not wrong:
            return now
        read = ", ".join(f"{key}={there.get(key)!r}" for key in wrong)
        return Failure(f"label node {node.name}: written, then read back {read}")

    async def _refused(self, node: model.Node, answer: kubernetes_api.Answer) -> Failure:
        if answer.status == HTTPStatus.CONFLICT:
            # of somebody's label, or of a node that is not there any more
            now = await self.get(node.name)
            if isinstance(now, Failure) and now.is_gone:
                return now
        return _failure("label", node.name, answer)


async def write(
    api: kubernetes_api.Api,
    pace: pacing.Pace,
    verb: str,
    path: str,
    *,
    body: object,
    timeout_s: float,
    query: Mapping[str, str] | None = None,
    content: str = kubernetes_api.APPLY,
) -> kubernetes_api.Answer:
    """Write something; each try takes a turn: an API in trouble gets no more than usual.

    Who may not write any more when the turn comes does not.
    """
    answer = kubernetes_api.Answer(
        what=f"{verb.lower()} {path}", status=0, body=b"another leads by now"
    )
    for attempt in range(1, _TRIES + 1):
        async with pace.turn():
            if not pace.may_write():
                break
            answer = await api.ask(
                verb,
                path,
                query=query,
                body=body,
                content=content,
                timeout_s=timeout_s,
                attempts=1,
            )
        if not answer.is_passing or attempt == _TRIES:
            break
        await asyncio.sleep(max(answer.wait_s, _TRY_AGAIN_S * 2**attempt))
    return answer


def _decoded(verb: str, name: str, answer: kubernetes_api.Answer) -> model.Node | Failure:
    try:
        return projection.node(_DECODER.decode(answer.body))
    except kubernetes_api.UNREADABLE as error:
        return Failure(f"{verb} node {name}: {error}", is_passing=True)


def _failure(verb: str, name: str, answer: kubernetes_api.Answer) -> Failure:
    said = answer.problem.partition(": ")[2]
    return Failure(
        f"{verb} node {name}: {said}",
        is_passing=answer.is_passing,
        is_gone=answer.status == HTTPStatus.NOT_FOUND,
        is_conflict=answer.status == HTTPStatus.CONFLICT,
    )


_ACCESS_REVIEWS: Final = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


@dataclass(frozen=True, slots=True)
class Right:
    """A verb on a resource, or on the one of that name; without a namespace in all of them."""

    verb: str
    resource: str
    group: str = ""
    namespace: str = ""
    name: str = ""

    def __str__(self) -> str:
        group = f".{self.group}" if self.group else ""
        name = f"/{self.name}" if self.name else ""
        where = f" in namespace {self.namespace}" if self.namespace else ""
        return f"{self.verb} {self.resource}{group}{name}{where}"


class _Status(msgspec.Struct, frozen=True):
    allowed: bool = False
    reason: str = ""


class _Review(msgspec.Struct, frozen=True):
    status: _Status = _Status()


async def missing_rights(
    api: kubernetes_api.Api, rights: Sequence[Right], *, timeout_s: float
) -> list[Right]:
    """Return the rights that the API says we have not.

    A right about which it says nothing counts as there: the request itself will tell.
    """
    allowed = await asyncio.gather(*(_allowed(api, right, timeout_s) for right in rights))
    return [right for right, is_allowed in zip(rights, allowed, strict=True) if not is_allowed]


async def log_missing_rights(
    api: kubernetes_api.Api, rights: Sequence[Right], *, timeout_s: float
) -> None:
    """Say which rights are missing, all at once: each would come to light by itself, and late."""
    lacking = await missing_rights(api, rights, timeout_s=timeout_s)
    if lacking:
        logs.logger().warning("rights_missing", rights=[str(right) for right in lacking])


async def _allowed(api: kubernetes_api.Api, right: Right, timeout_s: float) -> bool:
    resource, _, subresource = right.resource.partition("/")
    attributes = {"verb": right.verb, "resource": resource, "group": right.group}
    if right.name:
        attributes["name"] = right.name
    if subresource:
        attributes["subresource"] = subresource
    if right.namespace:
        attributes["namespace"] = right.namespace
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = await api.ask("POST", _ACCESS_REVIEWS, body=review, timeout_s=timeout_s)
    if not answer.is_ok:
        return True
    try:
        return msgspec.json.decode(answer.body, type=_Review).status.allowed
    except kubernetes_api.UNREADABLE:
        return True


_LEASE: Final = "muster-labeler"


async def remove_objects(
    api: api.Api, turns: pace.Pace, *, nodes: Sequence[str], namespace: str, timeout_s: float
) -> list[str]:
    """Remove our condition from nodes, the inventory and the Lease; return what was not."""
    left = []
    for name in nodes:
        # what an apply leaves out goes, if nobody else owns it
        answer = await write(
            api,
            turns,
            "PATCH",
            f"{NODES_PATH}/{name}/status",
            query={"fieldManager": model.MANAGER, "force": "false"},
            body={"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}},
            timeout_s=timeout_s,
        )
        left.append(answer)
    here = f"namespaces/{namespace}"
    for path in (
        f"/api/v1/{here}/configmaps/{projection.INVENTORY_CONFIG_MAP}",
        f"/apis/coordination.k8s.io/v1/{here}/leases/{_LEASE}",
    ):
        async with turns.turn():
            left.append(await api.ask("DELETE", path, timeout_s=timeout_s))
    return [one.problem for one in left if not one.is_ok and one.status != HTTPStatus.NOT_FOUND]
