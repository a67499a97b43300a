"""Adapter: the Kubernetes API: reads nodes, and writes our labels on them by server-side apply.

A label that another manager owns stays as it is, and the answer names the owner, unless a person
said `--overwrite`. What was written is read back; a difference is a failure.
"""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import msgspec

from muster.kubernetes import api as kubernetes_api
from muster_labeler import facts, raw_nodes
from muster_labeler import pace as pacing

PATH: Final = "/api/v1/nodes"

_TRIES: Final = 3
_TRY_AGAIN_S: Final = 0.1
_DECODER: Final = msgspec.json.Decoder(raw_nodes.RawNode)


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

    async def get(self, name: str) -> facts.Node | Failure:
        """Return a node."""
        answer = await self._api.ask("GET", f"{PATH}/{name}", timeout_s=self._timeout_s)
        if not answer.is_ok:
            return _failure("get", name, answer)
        return _decoded("get", name, answer)

    async def label(
        self,
        node: facts.Node,
        labels: Mapping[str, str],
        *,
        provenance: str,
        drop: Collection[str] = (),
        force: bool = False,
    ) -> facts.Node | Failure:
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
            "annotations": {facts.PROVENANCE: provenance},
        }
        expected: dict[str, str | None] = {**dict.fromkeys(drop), **labels}
        return await self._apply(node, metadata, expected, force=force)

    async def unlabel(self, node: facts.Node) -> facts.Node | Failure:
        """Remove everything of ours from a node: what an apply leaves out, goes; read it back."""
        metadata = {"name": node.name, "uid": node.uid}
        gone: dict[str, str | None] = dict.fromkeys(node.ours)
        return await self._apply(node, metadata, gone, force=False)

    async def _apply(
        self,
        node: facts.Node,
        metadata: Mapping[str, object],
        expected: Mapping[str, str | None],
        *,
        force: bool,
    ) -> facts.Node | Failure:
        body = {"apiVersion": "v1", "kind": "Node", "metadata": metadata}
        answer = await write(
            self._api,
            self._pace,
            "PATCH",
            f"{PATH}/{node.name}",
            query={"fieldManager": facts.MANAGER, "force": str(force).lower()},
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

    async def _refused(self, node: facts.Node, answer: kubernetes_api.Answer) -> Failure:
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


def _decoded(verb: str, name: str, answer: kubernetes_api.Answer) -> facts.Node | Failure:
    try:
        return raw_nodes.node(_DECODER.decode(answer.body))
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
