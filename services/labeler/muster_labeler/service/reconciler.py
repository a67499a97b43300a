"""Adapter: the running service: inventories and nodes come, decisions are carried out and told.

Level-triggered: whatever changes about a node, it is looked at again as a whole, so that a label
that was removed comes back and a swapped GPU is noticed. Everything about one node goes through one
worker, so that it is decided in order.
"""

import asyncio
import contextlib
import itertools
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import prometheus_client

from muster import codec, leadership, vocabulary
from muster.kubernetes import watch
from muster.service import logs
from muster_labeler import config, model
from muster_labeler.kubernetes import cluster_api
from muster_labeler.kubernetes import pace as pacing
from muster_labeler.service import (
    decision_publisher,
    decisions,
    fleet,
    label_writer,
    node_conditions,
)

_WORKERS: Final = 8
_DENIED_ROUNDS: Final = 6
_INVENTORY_S: Final = 2.0

_DECISIONS = prometheus_client.Counter(
    "muster_labeler_decisions_total", "Decisions about nodes, by what was done.", ["action"]
)
_WAITING = prometheus_client.Gauge(
    "muster_labeler_waiting", "Nodes that are to be labelled and cannot be yet."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The Kubernetes API as the service uses it."""

    door: cluster_api.Nodes
    pace: pacing.Pace
    name_missing_rights: Callable[[], Coroutine[None, None, None]]
    notes: decision_publisher.Notes
    reflector: Callable[[model.Sink], watch.Reflector[msgspec.Raw, model.Node]]
    elect: Callable[[leadership.OnChange], leadership.Election] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ears:
    """What the bus tells: all there was, then what comes."""

    newest: Callable[[], AsyncIterator[codec.CloudEvent]]
    follow: Sequence[Callable[[], AsyncIterator[codec.CloudEvent]]]
    publish: decision_publisher.Publish


class Service:
    """The labeler; `run` it."""

    def __init__(self, settings: config.Settings, ears: Ears, cluster: Cluster | None) -> None:
        self.is_restored = False
        self._settings = settings
        self._ears = ears
        self._cluster = cluster
        rules = decisions.Rules(
            mode=settings.mode,
            policy=settings.policy,
            may_label_simulated=settings.simulated,
        )
        self._fleet = fleet.Fleet(rules, aliases=settings.aliases, is_blind=True)
        self._hand = label_writer.Hand(
            self._fleet, rules, cluster.door if cluster else None, may_write=self._may_write
        )
        self._queues: list[asyncio.Queue[str]] = [asyncio.Queue() for _ in range(_WORKERS)]
        self._causes: dict[str, str] = {}
        self._is_held = False
        self._covering: str | None = None
        notes = cluster.notes if cluster else None
        self._telling = decision_publisher.Telling(ears.publish, notes)
        self._judging = node_conditions.Judging(notes.judge if notes else None)
        sink = model.Sink(self._replaced, self._put, self._dropped)
        self._reflector = cluster.reflector(sink) if cluster else None
        elect = cluster.elect if cluster else None
        self._election = elect(self._leadership_changed) if elect else None
        if cluster is not None:
            cluster.pace.may_write = self._may_write

    def view(self) -> dict[str, fleet.View]:
        """Return every node as it stands."""
        return self._fleet.view()

    async def run(self) -> None:
        """Look at everything there is, then at each change, for ever."""
        if self._settings.mode is config.Mode.OFF:
            self.is_restored = True
            await asyncio.Event().wait()
        async with self._election or contextlib.nullcontext(), asyncio.TaskGroup() as tasks:
            if self._election is not None:
                tasks.create_task(self._election.failed())
            if self._reflector is not None:
                tasks.create_task(self._reflector.run())
            else:
                logs.logger().info(
                    "no_kubernetes_api", consequence="suggestions from inventories alone"
                )
            async for event in self._ears.newest():
                self._hear(event)
            await self._nodes_listed()
            self.is_restored = True
            for queue in self._queues:
                tasks.create_task(self._work(queue))
            for follow in self._ears.follow:
                tasks.create_task(self._listen(follow))
            tasks.create_task(self._telling.run())
            if self._cluster is not None:
                tasks.create_task(self._cluster.name_missing_rights())
            tasks.create_task(self._try_again())
            if self._cluster is not None:
                tasks.create_task(self._list_gpus())

    async def _nodes_listed(self) -> None:
        """Wait for the nodes, but not for ever: suggestions need them less than writes do."""
        if self._reflector is None:
            return
        try:
            async with asyncio.timeout(self._settings.kubernetes.timeout_s):
                await self._reflector.tried.wait()
        except TimeoutError:
            return

    async def _listen(self, follow: Callable[[], AsyncIterator[codec.CloudEvent]]) -> None:
        async for event in follow():
            self._hear(event)

    def _hear(self, event: codec.CloudEvent) -> None:
        match event.data:
            case vocabulary.InventoryReported():
                if self._fleet.take(event):
                    self._look(event.node, event.id)
            case vocabulary.VerdictChanged() as verdict:
                if self._judging.hear(verdict):
                    self._look(verdict.node, event.id)
            case _:
                pass

    def _look(self, node: str, cause: str) -> None:
        """Have a node looked at, once for all that happened to it."""
        if node not in self._causes:
            self._queues[zlib.crc32(node.encode()) % _WORKERS].put_nowait(node)
        self._causes[node] = cause
        self._look_at_others()

    def _look_at_others(self) -> None:
        """Have those looked at of which something else is true now that a node changed."""
        held, covering = self._fleet.objection(), self._fleet.covering()
        if (held is not None) != self._is_held:
            self._is_held = held is not None
            if self._settings.mode is config.Mode.APPLY:
                logs.logger().info("held" if held else "held_no_more", reason=held or "")
            for name, cause in self._fleet.held().items():
                self._look(name, cause)
        if covering != self._covering:
            self._covering = covering
            for name in self._fleet.names():
                self._look(name, f"covering:{name}:{covering}")

    def _replaced(self, found: list[model.Node]) -> None:
        self._fleet.is_blind = False
        for name in self._fleet.replace(found):
            self._look(name, f"list:{name}")
        for name, cause in self._fleet.waiting().items():
            self._look(name, cause)

    def _put(self, node: model.Node) -> None:
        if self._fleet.put(node):
            self._look(node.name, f"{node.uid}:{node.version}")

    def _dropped(self, name: str) -> None:
        self._fleet.drop(name)
        self._judging.drop(name)
        self._hand.drop(name)
        self._look_at_others()

    def _leadership_changed(self, _: leadership.Leadership, __: leadership.Leadership) -> None:
        if not self._may_write():
            self._judging.forget()
        for name in self._fleet.names():
            self._look(name, f"lead:{name}")

    async def _try_again(self) -> None:
        for round_ in itertools.count(1):
            await asyncio.sleep(self._settings.retry_s)
            self._hand.forget()
            waiting = self._fleet.waiting()
            _WAITING.set(len(waiting) + len(self._fleet.held()))
            if round_ % _DENIED_ROUNDS == 0:
                waiting |= self._fleet.denied()
            for node, cause in waiting.items():
                self._look(node, cause)
            for node in self._judging.unwritten():
                self._look(node, f"condition:{node}")

    async def _work(self, queue: asyncio.Queue[str]) -> None:
        while True:
            node = await queue.get()
            cause = self._causes.pop(node, node)
            await self._settle(node, cause)
            one = self._fleet.standing(node)
            if self._settings.condition and one is not None and self._may_write():
                await self._judging.judge(one.node)

    async def _settle(self, node: str, cause: str) -> None:
        """Decide about a node, do it, and have it told if it is news."""
        if not self._may_tell():
            return
        decision, may_pass = await self._hand.carry_out(node)
        is_news = self._fleet.settle(node, decision, cause=cause, may_pass=may_pass)
        _DECISIONS.labels(decision.action).inc()
        if not is_news or decision.source == "":
            return
        logs.logger().info(
            "decided",
            node=node,
            action=decision.action,
            labels=dict(decision.labels),
            reason=decision.reason,
        )
        self._telling.tell(decision, node=node, cause=cause)
        one = self._fleet.standing(node)
        is_written_down = self._settings.kubernetes.events and self._may_write()
        if one is not None and one.node.uid and is_written_down:
            self._telling.note(one.node, decision)

    async def _list_gpus(self) -> None:
        """Write down, now and then, what agents report: the commands read it."""
        assert self._cluster is not None, "there is a cluster to write it down in"
        written = -1
        while True:
            heard = self._fleet.heard
            is_due = heard != written and self._may_write()
            if is_due and await self._cluster.notes.list_gpus(*self._fleet.reported()):
                written = heard
            await asyncio.sleep(_INVENTORY_S)

    def _may_write(self) -> bool:
        return self._cluster is not None and (
            self._election is None or self._election.term() is not None
        )

    def _may_tell(self) -> bool:
        """Suggest also where nobody can lead: the bus drops what two say alike."""
        election = self._election
        return election is None or election.term() is not None or election.problem() is not None
