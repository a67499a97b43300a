"""Adapter: fills health's inbox from NATS: heartbeats, reports, restored state and leadership.

The answers to probes of suspected plugins are inputs, too. A missing answer is evidence only if our
own connection to NATS worked before and after the probe.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Final

from muster import codec, leadership, vocabulary
from muster.nats import (
    bus,
    connection,
    consumers,
    heartbeat_budget,
    heartbeat_reader,
    storage,
    stream_info,
    streams,
)
from muster.service import logs, runtime
from muster_health import metrics
from muster_health.bus import event_budget
from muster_health.model import limits, signals, snapshot

Inbox = asyncio.Queue[runtime.Delivery[signals.Input]]
Put = Callable[[signals.Input], Awaitable[None]]
"""Puts an input into the inbox; waits while the inbox is full."""

_KINDS: Final = ("plugin", "inventory", "device", "expectation", "configuration")
_REPORTS: Final = (
    *(f"muster.event.*.*.{kind}.*" for kind in _KINDS),
    "muster.event.*.*.fuse.mount_changed",
)
"""The subjects of plugins' reports; earlier versions of plugins publish inventories here, too."""
_INVENTORIES: Final = ("muster.inventory.*.*.*",)
_AGAIN_S: Final = 0.5
_STREAMS_S: Final = 15.0
_LIMITED: Final = vocabulary.NodeLimited.SUBJECT.replace("{node}", "*")


class Inputs:
    """Fills one detector's inbox."""

    def __init__(
        self,
        link: connection.Connection,
        stream: heartbeat_reader.HeartbeatStream,
        election: leadership.Election,
        inbox: Inbox,
        nodes: heartbeat_reader.Nodes,
    ) -> None:
        self._link = link
        self._heartbeats = stream
        self._nodes = nodes
        self._election = election
        self._inbox = inbox
        self._has_state = False

    async def put(self, event: signals.Input) -> None:
        """Put one input into the inbox; wait while the inbox is full."""
        await self._inbox.put(runtime.Delivery(event))

    async def run(self) -> None:
        """Restore the saved state, then put heartbeats and reports into the inbox, forever."""
        await self.put(signals.BusLost())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_connections())
            position = await self._restore()
            tasks.create_task(self._follow_leadership())
            await self._heartbeats.follow(
                self._put_heartbeats, nodes=self._nodes, on_excess=self._put_excess
            )
            tasks.create_task(self._heartbeats.run())
            await self._link.subscribe(_LIMITED, self._put_limited)
            if not position:
                # without saved state, the newest report of each subject is enough
                position = await self._catch_up()
            tasks.create_task(self._follow_inventories())
            tasks.create_task(self._watch_streams())
            budget = event_budget.EventBudget()
            tasks.create_task(self._read_again(budget, streams.EVENTS))
            reports = consumers.follow(
                self._link,
                streams.EVENTS,
                filters=_REPORTS,
                after=position,
                wants=self._within(budget),
            )
            async for event in reports:
                await self.put(_report(event, position=event.position))

    async def _follow_inventories(self) -> None:
        """Put the newest inventory of each plugin into the inbox, then each new inventory.

        Every process reads all inventories, because no position in their stream is saved.
        """
        budget = event_budget.EventBudget()
        inventories = consumers.follow(
            self._link,
            streams.INVENTORY,
            filters=_INVENTORIES,
            is_newest_first=True,
            wants=self._within(budget),
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read_again(budget, streams.INVENTORY))
            async for event in inventories:
                await self.put(_report(event))

    def _within(self, budget: event_budget.EventBudget) -> consumers.Wants:
        clock = asyncio.get_running_loop().time

        def wants(subject: str, pending: int) -> bool:
            del pending
            is_wanted = budget.wants(subject, clock())
            if not is_wanted:
                metrics.EVENTS_SKIPPED.inc()
            return is_wanted

        return wants

    async def _read_again(self, budget: event_budget.EventBudget, stream: streams.Stream) -> None:
        """Read the newest events of nodes whose events were skipped; never returns."""
        clock = asyncio.get_running_loop().time
        kind = stream.subjects[0].split(".")[1]
        while True:
            await asyncio.sleep(_AGAIN_S)
            tokens, noisy = budget.due(clock())
            for each in noisy:
                await self.put(each)
            for token in tokens:
                newest = await consumers.newest(self._link, stream, f"muster.{kind}.{token}.>")
                for event in newest:
                    await self.put(_report(event))

    async def _watch_streams(self) -> None:
        """Check every few seconds whether a full stream removes messages too early."""
        while True:
            client = await self._link.client()
            with contextlib.suppress(*connection.LOST):
                early = [
                    streams.early_eviction(each, *await stream_info.stored(client, each.name))
                    for each in streams.FOLLOWED
                ]
                await self.put(signals.StreamsChecked(early=tuple(filter(None, early))))
            await asyncio.sleep(_STREAMS_S)

    async def _follow_leadership(self) -> None:
        """Put changes of leadership into the inbox; a new leader first gets all saved state."""
        async for term in self._election.terms():
            if term is not None:
                await self._restore()
                await self._restore_firing_alerts()
            await self.put(signals.Leadership(revision=term))

    async def _restore_firing_alerts(self) -> None:
        """If there is no saved state, restore firing alerts from the stream of alerts."""
        if self._has_state:
            return
        newest = await consumers.newest(self._link, streams.ALERTS, "muster.alert.>")
        alerts = [event.data for event in newest if isinstance(event.data, vocabulary.AlertChanged)]
        for state in snapshot.of_alerts(alerts):
            await self.put(signals.Restored(state=state))

    async def _restore(self) -> int:
        """Put all readable saved state into the inbox; return its position in the stream, or 0."""
        position = 0
        values = await storage.read_all(self._link, streams.STATE)
        self._has_state = bool(values)
        for key, value in values.items():
            try:
                state = snapshot.decode(value)
            except ValueError as error:
                logs.logger().warning("state_unreadable", key=key, error=str(error))
                continue
            position = max(position, state.position)
            await self.put(signals.Restored(state=state))
            # the detector handles it now, or all decoded states would be in the inbox together
            await asyncio.sleep(0)
        return position

    async def _catch_up(self) -> int:
        """Put the newest report of each subject into the inbox; return the last position, or 0."""
        newest = [
            event
            for subject in _REPORTS
            for event in await consumers.newest(self._link, streams.EVENTS, subject)
        ]
        inventories = await consumers.newest(self._link, streams.INVENTORY, _INVENTORIES[0])
        # events of two streams have no common order, but those of one plugin share its clock
        for event in sorted([*newest, *inventories], key=lambda event: event.time):
            await self.put(_report(event))
        return max((event.position for event in newest), default=0)

    async def _put_heartbeats(self, batch: Sequence[vocabulary.Heartbeat]) -> None:
        """Put a batch of heartbeats into the inbox; wait until the detector has processed it."""
        processed = asyncio.Event()

        async def ack() -> None:
            metrics.HEARTBEATS.count(len(batch))
            processed.set()

        await self._inbox.put(runtime.Delivery(signals.HeartbeatsArrived(heartbeats=batch), ack))
        await processed.wait()

    async def _put_excess(self, excess: heartbeat_budget.Excess) -> None:
        """Report to the inbox that a node sends too many heartbeats."""
        noisy = limits.NodeNoisy(
            node=excess.node,
            channel=limits.Channel.HEARTBEATS,
            messages=excess.messages,
            bytes=excess.bytes,
            seconds=excess.seconds,
            senders=excess.senders,
        )
        await self.put(noisy)

    async def _put_limited(self, message: connection.Message) -> None:
        """Report to the inbox that the gate has closed a node's connections."""
        try:
            event = codec.decode(message.subject, message.data).data
        except codec.MalformedEvent as error:
            connection.RECEIVED.labels(f"malformed_{error.reason}").inc()
            return
        assert isinstance(event, vocabulary.NodeLimited), "the subject determines the type"
        noisy = limits.NodeNoisy(
            node=event.node,
            channel=limits.Channel.CONNECTION,
            messages=event.messages,
            bytes=event.bytes,
            seconds=event.seconds,
            senders=(event.reason,),
        )
        await self.put(noisy)

    async def _watch_connections(self) -> None:
        """After each change, put into the inbox whether both our connections to NATS are up."""
        links = (self._link, self._heartbeats.link)
        connected: set[connection.Connection] = set()

        async def watch(link: connection.Connection) -> None:
            async for is_connected in link.changes():
                (connected.add if is_connected else connected.discard)(link)
                has_bus = len(connected) == len(links)
                await self.put(
                    signals.BusBack(at=datetime.now(UTC)) if has_bus else signals.BusLost()
                )

        async with asyncio.TaskGroup() as tasks:
            for link in links:
                tasks.create_task(watch(link))


def _report(event: codec.CloudEvent, *, position: int = 0) -> signals.FromPlugin:
    return signals.FromPlugin(
        event=event.data, instance=event.instance, sequence=event.sequence, position=position
    )


_OWN_CHECK_SHARE: Final = 0.25
"""NATS must answer health within this share of a probe's timeout, or the probe is inconclusive."""


class Prober:
    """Probes plugins, up to `concurrent_max` concurrently; passes each result to `put`."""

    def __init__(self, connected: bus.Bus, put: Put, *, concurrent_max: int) -> None:
        self._bus = connected
        self._put = put
        self._free = asyncio.Semaphore(concurrent_max)
        self._running: set[asyncio.Task[None]] = set()

    def start(self, probe: signals.Probe) -> None:
        """Start a probe without waiting for its result."""
        task = asyncio.create_task(self._run(probe))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        """Cancel all probes."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _run(self, probe: signals.Probe) -> None:
        async with self._free:
            result = await self._result(probe)
        metrics.PROBES.labels(_label(result)).inc()
        await self._put(result)

    async def _result(self, probe: signals.Probe) -> signals.Input:
        inconclusive = signals.ProbeInconclusive(
            node=probe.node, plugin=probe.plugin, number=probe.number
        )
        subject = vocabulary.rpc_subject(probe.node, probe.plugin, "probe")
        epoch = self._bus.link.epoch
        own_check_s = probe.timeout_s * _OWN_CHECK_SHARE
        if not await self._bus.is_reachable(timeout_s=own_check_s):
            return inconclusive
        try:
            answer = await self._bus.request(subject, timeout_s=probe.timeout_s)
            heartbeat = codec.decode_heartbeat(answer)
        except bus.NobodyAnswered as error:
            reachable = await self._bus.is_reachable(timeout_s=own_check_s)
            if not reachable or self._bus.link.epoch != epoch:
                return inconclusive
            return signals.ProbeFailed(
                node=probe.node,
                plugin=probe.plugin,
                number=probe.number,
                subscribed=error.subscribed,
            )
        except codec.MalformedEvent:
            return inconclusive
        if (heartbeat.node, heartbeat.plugin) != (probe.node, probe.plugin):
            return inconclusive
        return signals.ProbeAnswered(heartbeat=heartbeat, number=probe.number)


def _label(result: signals.Input) -> str:
    match result:
        case signals.ProbeAnswered():
            return "answered"
        case signals.ProbeFailed(subscribed=True):
            return "no_answer"
        case signals.ProbeFailed():
            return "not_subscribed"
        case _:
            return "inconclusive"
