"""Adapter: runs the event loop, which reconciles a node's labels whenever the node changes.

It is level-triggered: a node is always evaluated as a whole, so that a removed label is written
again and a replaced GPU is noticed. One worker handles everything about one node, in order. If
another writer keeps changing a label back, the labeler writes the node at most ten times a minute,
and logs a warning.
"""

import asyncio
import contextlib
import functools
import itertools
import zlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import msgspec
import prometheus_client

import muster
from muster import codec, escaping, leadership, pacing, vocabulary
from muster.kubernetes import api as kubernetes_api
from muster.kubernetes import watch
from muster.service import logs, metrics
from muster_labeler import config, model
from muster_labeler.kubernetes import cluster_api, projection
from muster_labeler.naming import node_labels
from muster_labeler.service import decision_publisher, decisions, fleet, limits, stream_reader

_WORKERS: Final = 8
_DENIED_ROUNDS: Final = 6
"""The number of rounds between retries of a write that the API refused."""
_INVENTORY_S: Final = 2.0

_DECISIONS = metrics.counter(
    "muster_labeler_decisions_total",
    "Decisions about nodes, by action.",
    "action",
    decisions.Action,
)
_WAITING = prometheus_client.Gauge(
    "muster_labeler_waiting_nodes", "Nodes that are to be labelled but cannot be labelled yet."
)
_WRITES_MAX: Final = 10
_WRITES_PERIOD_S: Final = 60.0
_CHANGES_OFTEN: Final = "its plugins' reports change repeatedly"
_CONTESTED: Final = (
    f"labels written {_WRITES_MAX} times within a minute: another writer changes them back"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """How the service uses the Kubernetes API; `elect` is None if there is no election."""

    api: kubernetes_api.Api
    node_api: cluster_api.NodeApi
    pace: cluster_api.WritePace
    log_missing_permissions: Callable[[], Coroutine[None, None, None]]
    records: decision_publisher.ClusterRecords
    elect: Callable[[leadership.OnChange], leadership.Election] | None


class Reconciler:
    """Keeps the labels of all nodes correct while `run` runs."""

    def __init__(
        self, settings: config.Settings, bus: stream_reader.Bus, cluster: Cluster | None
    ) -> None:
        self._settings = settings
        self._cluster = cluster
        self._clock = asyncio.get_running_loop().time
        self._fleet = fleet.Fleet(settings, are_nodes_unknown=True)
        self._reader = stream_reader.StreamReader(bus, self._fleet, self._observe)
        self._label_writer = LabelWriter(
            self._fleet, settings, cluster.node_api if cluster else None, may_write=self._may_write
        )
        self._queues: list[asyncio.Queue[str]] = [asyncio.Queue() for _ in range(_WORKERS)]
        self._causes: dict[str, str] = {}
        self._is_held = False
        self._covering_scheme: str | None = None
        self._news: pacing.KeyedBuckets[str] = pacing.KeyedBuckets(
            per_s=_WRITES_MAX / _WRITES_PERIOD_S, burst=_WRITES_MAX, keys_max=limits.NODES_MAX
        )
        records = cluster.records if cluster else None
        self._publisher = decision_publisher.DecisionPublisher(bus.publish, records)
        self._conditions = decision_publisher.NodeConditionWriter(
            records.write_condition if records else None
        )
        self._reflector = self._watch_nodes(cluster.api) if cluster else None
        elect = cluster.elect if cluster else None
        self._election = elect(self._leadership_changed) if elect else None
        if cluster is not None:
            cluster.pace.may_write = self._may_write

    def _watch_nodes(self, api: kubernetes_api.Api) -> watch.Reflector[msgspec.Raw, model.Node]:
        keep = functools.partial(projection.read_node, selector=self._settings.policy.nodes)
        sink = watch.Sink(keep, self._replaced, self._put, self._dropped)
        return watch.Reflector(api, cluster_api.NODES_PATH, msgspec.Raw, sink)

    def view(self) -> dict[str, fleet.View]:
        """Return every node, as `/state` shows it."""
        return self._fleet.view()

    def problem(self) -> str | None:
        """Return why this replica cannot act on new reports now; None if it can."""
        is_off = self._settings.mode is config.Mode.OFF
        return None if is_off else self._reader.problem()

    async def run(self) -> None:
        """Evaluate all nodes, then each node that changes, until cancelled."""
        if self._settings.mode is config.Mode.OFF:
            await asyncio.Event().wait()
        async with self._election or contextlib.nullcontext(), asyncio.TaskGroup() as tasks:
            if self._election is not None:
                tasks.create_task(self._election.failed())
            if self._reflector is not None:
                tasks.create_task(self._reflector.run())
            else:
                logs.logger().info(
                    "kubernetes_api_not_configured",
                    consequence="labels are only suggested, from inventories alone",
                )
            await self._wait_for_nodes()
            await self._reader.restore()
            for queue in self._queues:
                tasks.create_task(self._work(queue))
            tasks.create_task(self._reader.run())
            tasks.create_task(self._publisher.run())
            if self._cluster is not None:
                tasks.create_task(self._cluster.log_missing_permissions())
            tasks.create_task(self._retry())
            if self._cluster is not None:
                tasks.create_task(self._write_inventory())

    async def _wait_for_nodes(self) -> None:
        """Wait a limited time for the list of nodes; suggestions are possible without it."""
        if self._reflector is None:
            return
        try:
            async with asyncio.timeout(self._settings.kubernetes.timeout_s):
                await self._reflector.tried.wait()
        except TimeoutError:
            return

    def _observe(self, event: codec.CloudEvent) -> None:
        match event.data:
            case vocabulary.InventoryReported():
                if self._fleet.observe_inventory(event):
                    self._enqueue(event.node, event.id)
            case vocabulary.VerdictChanged() as verdict:
                if self._conditions.observe_verdict(verdict):
                    self._enqueue(verdict.node, event.id)
            case _:
                pass

    def _enqueue(self, node: str, cause: str) -> None:
        """Queue a node for evaluation, unless it is queued already."""
        if node not in self._causes:
            self._queues[zlib.crc32(node.encode()) % _WORKERS].put_nowait(node)
        self._causes[node] = cause
        self._enqueue_affected()

    def _enqueue_affected(self) -> None:
        """Queue other nodes whose decision depends on the node that has just changed."""
        held, covering = self._fleet.objection(), self._fleet.covering_scheme()
        if (held is not None) != self._is_held:
            self._is_held = held is not None
            if self._settings.mode is config.Mode.APPLY:
                logs.logger().info(
                    "labelling_held" if held else "labelling_resumed", reason=held or ""
                )
            for name, cause in self._fleet.pending(decisions.Action.HOLD).items():
                self._enqueue(name, cause)
        if covering != self._covering_scheme:
            self._covering_scheme = covering
            for name in self._fleet.names():
                self._enqueue(name, f"covering:{name}:{covering}")

    def _replaced(self, nodes: list[model.Node]) -> None:
        self._fleet.are_nodes_unknown = False
        for name in self._fleet.replace(nodes):
            self._enqueue(name, f"list:{name}")
        for name, cause in self._fleet.pending(decisions.Action.WAIT).items():
            self._enqueue(name, cause)

    def _put(self, node: model.Node) -> None:
        if self._fleet.put(node):
            self._enqueue(node.name, f"{node.uid}:{node.version}")

    def _dropped(self, node: model.Node) -> None:
        self._fleet.drop(node.name)
        self._reader.forget(node.name)
        self._conditions.drop(node.name)
        self._label_writer.drop(node.name)
        self._enqueue_affected()

    def _leadership_changed(self, _: leadership.Leadership, __: leadership.Leadership) -> None:
        if not self._may_write():
            self._conditions.forget_written()
        for name in self._fleet.names():
            self._enqueue(name, f"leader:{name}")

    async def _retry(self) -> None:
        for round_ in itertools.count(1):
            await asyncio.sleep(self._settings.retry_s)
            self._label_writer.forget()
            waiting = self._fleet.pending(decisions.Action.WAIT)
            _WAITING.set(len(waiting) + len(self._fleet.pending(decisions.Action.HOLD)))
            if round_ % _DENIED_ROUNDS == 0:
                waiting |= self._fleet.pending(decisions.Action.REFUSE)
            for node, cause in waiting.items():
                self._enqueue(node, cause)
            for node in self._conditions.unwritten():
                self._enqueue(node, f"condition:{node}")

    async def _work(self, queue: asyncio.Queue[str]) -> None:
        while True:
            node = await queue.get()
            cause = self._causes.pop(node, node)
            await self._reconcile(node, cause)
            status = self._fleet.status(node)
            if self._settings.condition and status is not None and self._may_write():
                await self._conditions.write(status.node)

    async def _reconcile(self, node: str, cause: str) -> None:
        """Decide about a node, carry out the decision, and publish it if it is new."""
        if not self._may_suggest():
            return
        decision, is_retriable = await self._label_writer.reconcile(node)
        is_news = self._fleet.is_news(node, decision)
        if is_news and not self._news.try_take(node, self._clock()):
            decision = _waiting_decision(decision, _CHANGES_OFTEN)
        is_new = self._fleet.record_decision(node, decision, cause=cause, is_retriable=is_retriable)
        _DECISIONS.labels(decision.action).inc()
        if not is_new or decision.source == "":
            return
        logs.logger().info(
            "label_decided",
            node=node,
            action=decision.action,
            labels=dict(decision.labels),
            reason=decision.reason,
        )
        self._publisher.publish(decision, node=node, cause=cause)
        status = self._fleet.status(node)
        has_events = self._settings.kubernetes.events and self._may_write()
        if status is not None and status.node.uid and has_events:
            self._publisher.record_event(status.node, decision)

    async def _write_inventory(self) -> None:
        """Keep the ConfigMap with plugins' reports, which the commands read, up to date."""
        assert self._cluster is not None, "the inventory is written only where there is a cluster"
        written = -1
        while True:
            version = self._fleet.inventory_version
            is_due = version != written and self._may_write()
            if is_due and await self._cluster.records.write_inventory(*self._fleet.reported()):
                written = version
            await asyncio.sleep(_INVENTORY_S)

    def _may_write(self) -> bool:
        return self._cluster is not None and (
            self._election is None or self._election.term() is not None
        )

    def _may_suggest(self) -> bool:
        """Return whether to publish suggestions; all replicas do if no leader is known for long."""
        election = self._election
        return election is None or election.term() is not None or election.problem() is not None


class LabelWriter:
    """Writes labels while `may_write` is true; `node_api` is None without a cluster."""

    def __init__(
        self,
        nodes: fleet.Fleet,
        settings: config.Settings,
        node_api: cluster_api.NodeApi | None,
        *,
        may_write: Callable[[], bool],
    ) -> None:
        self._fleet = nodes
        self._settings = settings
        self._nodes = node_api
        self._may_write = may_write
        self._write_limit = cluster_api.WriteLimit(_WRITES_MAX, _WRITES_PERIOD_S)
        self._contested: set[str] = set()
        self._clock = asyncio.get_running_loop().time

    async def reconcile(self, name: str) -> tuple[decisions.Decision, bool]:
        """Decide about a node and act; return the decision, and whether to retry a write."""
        status = self._fleet.status(name)
        if status is None:
            return decisions.Decision(decisions.Action.NOTHING, {}, "no such node"), False
        decision = decisions.decide(
            status,
            self._settings,
            report=self._fleet.report(name),
            covering=self._fleet.covering_scheme(),
            objection=None if self._settings.policy.partial else self._fleet.objection(),
        )
        if decision.action not in {decisions.Action.APPLY, decisions.Action.WITHDRAW}:
            return decision, False
        if self._fleet.are_nodes_unknown or not self._may_write():
            return _waiting_decision(decision, "the Kubernetes API is unavailable"), False
        if not self._write_limit.may_write(name, self._clock()):
            if name not in self._contested:
                self._contested.add(name)
                logs.logger().warning("label_overwritten_repeatedly", node=name, writes=_WRITES_MAX)
            return _waiting_decision(decision, _CONTESTED), False
        self._contested.discard(name)
        self._write_limit.note_write(name, self._clock())
        return await self._write(status, decision)

    def forget(self) -> None:
        """Drop the counts of writes that no longer count towards the limit."""
        self._write_limit.forget(self._clock())

    def drop(self, name: str) -> None:
        """Forget a node that no longer exists."""
        self._contested.discard(name)

    async def _write(
        self, status: node_labels.LabelStatus, decision: decisions.Decision
    ) -> tuple[decisions.Decision, bool]:
        """Carry out a decision to write; return the outcome, and whether to retry a refusal."""
        node_api = self._nodes
        assert node_api is not None, "without a cluster nothing is written"
        if decision.action is decisions.Action.WITHDRAW:
            result = await node_api.unlabel(status.node)
        else:
            provenance = _provenance(status, decision)
            result = await node_api.label(
                status.node, decision.labels, provenance=provenance, drop=decision.drop
            )
        if isinstance(result, model.Node):
            self._fleet.put_written(status.node, result)
            return decision, False
        if result.is_gone:
            return decisions.Decision(decisions.Action.NOTHING, {}, "the node is gone"), False
        if result.is_passing:
            return _waiting_decision(decision, result.text), False
        refusal = decisions.Decision(
            decisions.Action.REFUSE, decision.labels, result.text, decision.source
        )
        return refusal, not result.is_conflict


def _waiting_decision(decision: decisions.Decision, why: str) -> decisions.Decision:
    return decisions.Decision(decisions.Action.WAIT, decision.labels, why, decision.source)


def _provenance(status: node_labels.LabelStatus, decision: decisions.Decision) -> str:
    at = datetime.now(UTC).isoformat(timespec="seconds")
    value = decision.labels.get(decisions.KEY)
    provenance = node_labels.provenance(
        status, value, actor=model.FIELD_MANAGER, version=muster.__version__, at=at
    )
    return escaping.json_of(provenance)
