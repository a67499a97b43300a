"""Adapter for the bus and the Kubernetes API: publishes decisions and node conditions.

Labelling never waits for publishing, and continues while NATS is disconnected: events wait in
bounded queues. If a queue is full, its oldest event is dropped and counted; a node is evaluated
again after its plugin's next inventory. The condition of a node shows health's verdicts on its
plugins.
"""

import asyncio
import functools
import zlib
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Final, NoReturn

import msgspec

from muster import escaping, vocabulary
from muster.kubernetes import api
from muster.service import logs, metrics
from muster.vocabulary import Verdict
from muster_labeler import model
from muster_labeler.kubernetes import cluster_api, projection
from muster_labeler.naming import sources
from muster_labeler.service import decisions

Publish = Callable[[vocabulary.Event, str], Awaitable[None]]

_QUEUE_MAX: Final = 20_000
_DROPPED: Final = metrics.counter(
    "muster_labeler_dropped_events_total",
    "Events dropped because too many were waiting.",
    "to",
    ("bus", "kubernetes"),
)
_COMPONENT: Final = "muster-labeler"
MESSAGE_MAX: Final = 1024
"""The maximum number of characters that the admission policy allows in a message."""
_REASONS: Final = {
    decisions.Action.SUGGEST: ("Normal", "LabelsSuggested"),
    decisions.Action.APPLY: ("Normal", "LabelsApplied"),
    decisions.Action.WITHDRAW: ("Normal", "LabelsWithdrawn"),
    decisions.Action.REFUSE: ("Warning", "LabelsRefused"),
}

_FAILED: Final = metrics.counter(
    "muster_labeler_record_failures_total",
    "Kubernetes Events, conditions and inventories that could not be written.",
    "what",
    ("event", "condition", "inventory"),
)
_GOOD: Final = (Verdict.HEALTHY, Verdict.MAINTENANCE, Verdict.DEGRADED)
_UNREACHABLE: Final = (Verdict.UNREACHABLE, Verdict.NODE_DOWN)


class Condition(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A node condition without its times: equal as long as nothing changed."""

    type: str = model.CONDITION
    status: str
    reason: str
    message: str


WriteCondition = Callable[[model.Node, Condition], Awaitable[bool]]
"""Writes the condition of a node; returns whether it succeeded."""


class ClusterRecords:
    """Writes the leader's Kubernetes Events, node conditions and inventory to the cluster.

    No decision depends on these records: a failure is counted, logged once, and not retried here.
    """

    def __init__(
        self, api: api.Api, pace: cluster_api.WritePace, *, namespace: str, timeout_s: float
    ) -> None:
        self._write = functools.partial(cluster_api.write, api, pace, timeout_s=timeout_s)
        self._namespace = namespace
        self._written = -1
        self._left_out = False
        self._failing: set[str] = set()

    async def write_event(self, node: model.Node, decision: decisions.Decision) -> None:
        """Write the Kubernetes Event of a decision, if it has one."""
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
            "message": escaping.plain(f"{labels or 'no label'}: {decision.reason}"[:MESSAGE_MAX]),
            "source": {"component": _COMPONENT},
            "reportingComponent": _COMPONENT,
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }
        path = "/api/v1/namespaces/default/events"
        answer = await self._write("POST", path, body=event, content=api.JSON)
        self._note("event", answer)

    async def write_condition(self, node: model.Node, wanted: Condition) -> bool:
        """Write a node's condition; return whether that succeeded."""
        body = condition_patch(node.name, node.uid, wanted, at=datetime.now(UTC))
        query = {"fieldManager": model.FIELD_MANAGER, "force": "false"}
        answer = await self._write(
            "PATCH", f"{cluster_api.NODES_PATH}/{node.name}/status", body=body, query=query
        )
        self._note("condition", answer)
        return answer.is_ok

    async def write_inventory(
        self, kinds: dict[str, sources.Kinds], simulated: frozenset[str]
    ) -> bool:
        """Write the plugins' reports if they have changed; return whether they are up to date."""
        text = projection.encode_inventory(kinds, simulated)
        checksum = zlib.crc32(text.encode())
        left_out = kinds.keys() - projection.decode_inventory(text)[0].keys()
        if left_out and not self._left_out:
            logs.logger().warning(
                "inventory_truncated", nodes_left_out=len(left_out), first_left_out=min(left_out)
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
        answer = await self._write("PATCH", path, body=body, query=query)
        self._note("inventory", answer)
        if answer.is_ok:
            self._written = checksum
        return answer.is_ok

    def _note(self, record: str, answer: api.Answer) -> None:
        if answer.is_ok:
            self._failing.discard(record)
            return
        _FAILED.labels(record).inc()
        if record not in self._failing:
            self._failing.add(record)
            logs.logger().warning("kubernetes_write_failed", record=record, error=answer.problem)


class DecisionPublisher:
    """Publishes decisions on the bus and, with `records`, in the cluster too."""

    def __init__(self, publish: Publish, records: ClusterRecords | None) -> None:
        self._publish = publish
        self._records = records
        self._bus_events: asyncio.Queue[tuple[vocabulary.Event, str]] = asyncio.Queue(_QUEUE_MAX)
        self._events: asyncio.Queue[tuple[model.Node, decisions.Decision]] = asyncio.Queue(
            _QUEUE_MAX
        )

    def publish(self, decision: decisions.Decision, *, node: str, cause: str) -> None:
        """Queue a decision's event for the bus, with an id from `cause`; skip one without event."""
        event = decisions.to_event(decision, node=node, at=datetime.now(UTC))
        if event is None:
            return
        if self._bus_events.full():
            _DROPPED.labels("bus").inc()
            self._bus_events.get_nowait()
        self._bus_events.put_nowait((event, f"{cause}:{event.TYPE}"))

    def record_event(self, node: model.Node, decision: decisions.Decision) -> None:
        """Queue the Kubernetes Event of a decision."""
        if self._events.full():
            _DROPPED.labels("kubernetes").inc()
            self._events.get_nowait()
        self._events.put_nowait((node, decision))

    async def run(self) -> None:
        """Publish queued decisions and events until cancelled."""
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


class NodeConditionWriter:
    """Writes node conditions; stores the verdicts and the last written condition of each node."""

    def __init__(self, write: WriteCondition | None) -> None:
        self._write = write
        self._verdicts: dict[str, dict[str, vocabulary.VerdictChanged]] = {}
        self._written: dict[str, Condition] = {}
        self._unwritten: set[str] = set()

    def observe_verdict(self, verdict: vocabulary.VerdictChanged) -> bool:
        """Store a verdict; return False if it is from an earlier leader, or if there is no room.

        Leaders' terms grow even if their bucket is lost (see muster.nats.jetstream). Plugins that
        muster only watches have a separate limit; healthy ones are dropped to make room.
        """
        verdicts = self._verdicts.setdefault(verdict.node, {})
        newest = verdicts.get(verdict.plugin)
        if newest is None and not _has_room(verdicts, verdict):
            return False
        if newest is not None and newest.leader > verdict.leader:
            return False
        verdicts[verdict.plugin] = verdict
        return True

    async def write(self, node: model.Node) -> None:
        """Write the condition of a node if it differs from the last written condition."""
        verdicts = self._verdicts.get(node.name)
        if not verdicts or self._write is None:
            return
        wanted = condition_of({_name(each): each.verdict for each in verdicts.values()})
        if self._written.get(node.name) == wanted:
            return
        if await self._write(node, wanted):
            self._written[node.name] = wanted
            self._unwritten.discard(node.name)
        else:
            self._unwritten.add(node.name)

    def unwritten(self) -> list[str]:
        """Return the nodes whose condition could not be written."""
        return sorted(self._unwritten)

    def drop(self, name: str) -> None:
        """Forget a node that no longer exists."""
        for kept in (self._verdicts, self._written):
            kept.pop(name, None)
        self._unwritten.discard(name)

    def forget_written(self) -> None:
        """Forget the written conditions, because another replica writes from now on."""
        self._written.clear()


def _has_room(
    verdicts: dict[str, vocabulary.VerdictChanged], added: vocabulary.VerdictChanged
) -> bool:
    """Return whether another plugin's verdict fits; may drop a watched plugin's to make room."""
    same = [name for name, each in verdicts.items() if bool(each.watched) is bool(added.watched)]
    if not added.watched:
        return len(same) < vocabulary.PLUGINS_MAX
    if len(same) < vocabulary.WATCHED_MAX:
        return True
    well = next((name for name in same if verdicts[name].verdict in _GOOD), None)
    if well is not None:
        del verdicts[well]
    return well is not None


def _name(verdict: vocabulary.VerdictChanged) -> str:
    return f"{verdict.watched} (watched)" if verdict.watched else verdict.plugin


def condition_of(verdicts: Mapping[str, Verdict]) -> Condition:
    """Return the condition of a node from the last verdict on each of its plugins.

    The worst verdict counts: down is worse than unreachable.
    """
    down = {name: v for name, v in verdicts.items() if v not in _GOOD and v not in _UNREACHABLE}
    unreachable = {name: v for name, v in verdicts.items() if v in _UNREACHABLE}
    worst = down or unreachable
    status = "False" if down else "Unknown" if unreachable or not verdicts else "True"
    shown = worst or verdicts
    message = ", ".join(f"{name}: {shown[name]}" for name in sorted(shown))
    first = shown[min(shown)] if shown else Verdict.UNREACHABLE
    reason = "".join(word.capitalize() for word in first.split("_"))
    return Condition(status=status, reason=reason, message=message[:MESSAGE_MAX])


def condition_patch(node: str, uid: str, wanted: Condition, *, at: datetime) -> dict[str, object]:
    """Return the server-side apply patch for a condition that changed at `at`."""
    time = at.strftime("%Y-%m-%dT%H:%M:%SZ")
    condition = {**msgspec.to_builtins(wanted), "lastTransitionTime": time}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": node, "uid": uid},
        "status": {"conditions": [{**condition, "lastHeartbeatTime": time}]},
    }
