"""Adapter: the bus and to Kubernetes Events: what was decided is told, without anybody waiting.

Labels are kept right while NATS is away: what is to be told waits in a queue with an end. What does
not fit any more is counted; a plugin's next inventory has everything looked at again.
"""

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Final, NoReturn

import prometheus_client

from muster import vocabulary
from muster.kubernetes import api
from muster.service import logs
from muster_labeler import model
from muster_labeler.kubernetes import cluster_api, projection
from muster_labeler.kubernetes import pace as pacing
from muster_labeler.naming import sources
from muster_labeler.service import decisions, node_conditions

Publish = Callable[[vocabulary.Event, str], Awaitable[None]]

_WAITING_MAX: Final = 20_000
_UNTOLD: Final = prometheus_client.Counter(
    "muster_labeler_untold_total", "Decisions that were not told: too many waited.", ["to"]
)
_COMPONENT: Final = "muster-labeler"
_MESSAGE_MAX: Final = 1024
_REASONS: Final = {
    decisions.Action.SUGGEST: ("Normal", "LabelsSuggested"),
    decisions.Action.APPLY: ("Normal", "LabelsApplied"),
    decisions.Action.WITHDRAW: ("Normal", "LabelsWithdrawn"),
    decisions.Action.REFUSE: ("Warning", "LabelsRefused"),
}

_FAILED: Final = prometheus_client.Counter(
    "muster_labeler_notes_failed_total", "What was to be noted in Kubernetes and was not.", ["what"]
)


class Notes:
    """What a replica that leads writes down in the cluster besides labels."""

    def __init__(
        self, api: api.Api, pace: pacing.Pace, *, namespace: str, timeout_s: float
    ) -> None:
        self._api = api
        self._pace = pace
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._written = -1
        self._left_out = False
        self._ails: set[str] = set()

    async def tell(self, node: model.Node, decision: decisions.Decision) -> None:
        """Write a Kubernetes Event about a decision, if it is one to tell."""
        if decision.action not in _REASONS:
            return
        kind, reason = _REASONS[decision.action]
        labels = ", ".join(f"{key}={value}" for key, value in sorted(decision.labels.items()))
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": "muster-labeler.", "namespace": "default"},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Node",
                "name": node.name,
                "uid": node.uid,
            },
            "type": kind,
            "reason": reason,
            "message": f"{labels or 'no label'}: {decision.reason}"[:_MESSAGE_MAX],
            "source": {"component": _COMPONENT},
            "reportingComponent": _COMPONENT,
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }
        path = "/api/v1/namespaces/default/events"
        answer = await self._write("POST", path, event, content=api.JSON)
        self._note("event", answer)

    async def judge(self, node: model.Node, wanted: node_conditions.Condition) -> bool:
        """Write a node's condition; return whether it is there."""
        body = node_conditions.condition_patch(node.name, node.uid, wanted, at=datetime.now(UTC))
        query = {"fieldManager": model.MANAGER, "force": "false"}
        answer = await self._write(
            "PATCH", f"{cluster_api.NODES_PATH}/{node.name}/status", body, query=query
        )
        self._note("condition", answer)
        return answer.is_ok

    async def list_gpus(self, kinds: dict[str, sources.Kinds], simulated: frozenset[str]) -> bool:
        """Write down what agents reported, if it is not there yet; return whether it is."""
        text = projection.encode_inventory(kinds, simulated)
        mark = zlib.crc32(text.encode())
        left_out = kinds.keys() - projection.decode_inventory(text)[0].keys()
        if left_out and not self._left_out:
            logs.logger().warning("inventory_cut", nodes=len(left_out), such_as=min(left_out))
        self._left_out = bool(left_out)
        if mark == self._written:
            return True
        path = f"/api/v1/namespaces/{self._namespace}/configmaps/{projection.INVENTORY_CONFIG_MAP}"
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": projection.INVENTORY_CONFIG_MAP, "namespace": self._namespace},
            "data": {projection.INVENTORY_KEY: text},
        }
        query = {"fieldManager": model.MANAGER, "force": "true"}
        answer = await self._write("PATCH", path, body, query=query)
        self._note("inventory", answer)
        if answer.is_ok:
            self._written = mark
        return answer.is_ok

    async def _write(
        self,
        verb: str,
        path: str,
        body: object,
        *,
        query: Mapping[str, str] | None = None,
        content: str = api.APPLY,
    ) -> api.Answer:
        return await cluster_api.write(
            self._api,
            self._pace,
            verb,
            path,
            query=query,
            body=body,
            content=content,
            timeout_s=self._timeout_s,
        )

    def _note(self, what: str, answer: api.Answer) -> None:
        if answer.is_ok:
            self._ails.discard(what)
            return
        _FAILED.labels(what).inc()
        if what not in self._ails:
            self._ails.add(what)
            logs.logger().warning("note_failed", what=what, error=answer.problem)


class Telling:
    """Tells of decisions on the bus, and in the cluster if there are `notes`; `run` it."""

    def __init__(self, publish: Publish, notes: Notes | None) -> None:
        self._publish = publish
        self._notes = notes
        self._news: asyncio.Queue[tuple[vocabulary.Event, str]] = asyncio.Queue(_WAITING_MAX)
        self._events: asyncio.Queue[tuple[model.Node, decisions.Decision]] = asyncio.Queue(
            _WAITING_MAX
        )

    def tell(self, decision: decisions.Decision, *, node: str, cause: str) -> None:
        """Have a decision told on the bus, once for each cause; not every decision is."""
        event = decisions.event_of(decision, node=node, at=datetime.now(UTC))
        if event is None:
            return
        if self._news.full():
            _UNTOLD.labels("bus").inc()
            self._news.get_nowait()
        self._news.put_nowait((event, f"{cause}:{event.TYPE}"))

    def note(self, node: model.Node, decision: decisions.Decision) -> None:
        """Have a Kubernetes Event written about it."""
        if self._events.full():
            _UNTOLD.labels("kubernetes").inc()
            self._events.get_nowait()
        self._events.put_nowait((node, decision))

    async def run(self) -> None:
        """Tell, for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._to_bus())
            tasks.create_task(self._to_cluster())

    async def _to_bus(self) -> NoReturn:
        while True:
            await self._publish(*await self._news.get())

    async def _to_cluster(self) -> NoReturn:
        while True:
            node, decision = await self._events.get()
            if self._notes is not None:
                await self._notes.tell(node, decision)
