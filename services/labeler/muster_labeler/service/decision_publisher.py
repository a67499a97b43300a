"""Adapter: the bus and the Kubernetes API: publishes decisions, without anybody waiting for it.

Labelling goes on while NATS is disconnected: events wait in bounded queues. What does not fit is
dropped and counted; a plugin's next inventory has its node evaluated again.
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

_QUEUE_MAX: Final = 20_000
_DROPPED: Final = prometheus_client.Counter(
    "muster_labeler_dropped_events_total", "Events that were dropped: too many waited.", ["to"]
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
    "muster_labeler_record_failures_total",
    "Kubernetes Events, conditions and inventories that could not be written.",
    ["what"],
)


class ClusterRecords:
    """What the leader writes into the cluster besides labels.

    Nothing depends on it: a failure is counted, logged once, and not retried here.
    """

    def __init__(
        self, api: api.Api, pace: pacing.WritePace, *, namespace: str, timeout_s: float
    ) -> None:
        self._api = api
        self._pace = pace
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._written = -1
        self._left_out = False
        self._failing: set[str] = set()

    async def write_event(self, node: model.Node, decision: decisions.Decision) -> None:
        """Write a Kubernetes Event about a decision, if that has one."""
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

    async def write_condition(self, node: model.Node, wanted: node_conditions.Condition) -> bool:
        """Write a node's condition; return whether that succeeded."""
        body = node_conditions.condition_patch(node.name, node.uid, wanted, at=datetime.now(UTC))
        query = {"fieldManager": model.FIELD_MANAGER, "force": "false"}
        answer = await self._write(
            "PATCH", f"{cluster_api.NODES_PATH}/{node.name}/status", body, query=query
        )
        self._note("condition", answer)
        return answer.is_ok

    async def write_inventory(
        self, kinds: dict[str, sources.Kinds], simulated: frozenset[str]
    ) -> bool:
        """Write what agents reported, unless it has not changed; return whether it is written."""
        text = projection.encode_inventory(kinds, simulated)
        checksum = zlib.crc32(text.encode())
        left_out = kinds.keys() - projection.decode_inventory(text)[0].keys()
        if left_out and not self._left_out:
            logs.logger().warning(
                "inventory_truncated", nodes_left_out=len(left_out), such_as=min(left_out)
            )
        self._left_out = bool(left_out)
        if checksum == self._written:
            return True
        path = f"/api/v1/namespaces/{self._namespace}/configmaps/{projection.INVENTORY_CONFIG_MAP}"
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": projection.INVENTORY_CONFIG_MAP, "namespace": self._namespace},
            "data": {projection.INVENTORY_KEY: text},
        }
        query = {"fieldManager": model.FIELD_MANAGER, "force": "true"}
        answer = await self._write("PATCH", path, body, query=query)
        self._note("inventory", answer)
        if answer.is_ok:
            self._written = checksum
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
            self._failing.discard(what)
            return
        _FAILED.labels(what).inc()
        if what not in self._failing:
            self._failing.add(what)
            logs.logger().warning("record_failed", what=what, error=answer.problem)


class DecisionPublisher:
    """Publishes decisions on the bus, and in the cluster if there are `records`; `run` it."""

    def __init__(self, publish: Publish, records: ClusterRecords | None) -> None:
        self._publish = publish
        self._records = records
        self._bus_events: asyncio.Queue[tuple[vocabulary.Event, str]] = asyncio.Queue(_QUEUE_MAX)
        self._events: asyncio.Queue[tuple[model.Node, decisions.Decision]] = asyncio.Queue(
            _QUEUE_MAX
        )

    def publish(self, decision: decisions.Decision, *, node: str, cause: str) -> None:
        """Queue a decision for the bus, once for each cause; some decisions have no event."""
        event = decisions.to_event(decision, node=node, at=datetime.now(UTC))
        if event is None:
            return
        if self._bus_events.full():
            _DROPPED.labels("bus").inc()
            self._bus_events.get_nowait()
        self._bus_events.put_nowait((event, f"{cause}:{event.TYPE}"))

    def record_event(self, node: model.Node, decision: decisions.Decision) -> None:
        """Queue a decision for a Kubernetes Event."""
        if self._events.full():
            _DROPPED.labels("kubernetes").inc()
            self._events.get_nowait()
        self._events.put_nowait((node, decision))

    async def run(self) -> None:
        """Publish what is queued, for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._to_bus())
            tasks.create_task(self._to_cluster())

    async def _to_bus(self) -> NoReturn:
        while True:
            await self._publish(*await self._bus_events.get())

    async def _to_cluster(self) -> NoReturn:
        while True:
            node, decision = await self._events.get()
            if self._records is not None:
                await self._records.write_event(node, decision)
