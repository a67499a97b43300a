"""Adapter: executes the detector's outputs: publishes verdicts and alerts, and saves state.

Probes, cluster queries, remediation and alarms go to the adapters that execute them. Actions that
need a round trip run in the background: those for one node run in order, and nodes rarely wait for
each other. An action that concerns all nodes runs after everything that was submitted before it: a
position in the stream of events must not be saved before its consequences are published.

State is saved before the verdict or alert in it is published, and both happen only while this
process leads. After a crash in between, the verdict or alert is therefore published again under the
same id. A bucket that accepts nothing (it is full, or has lost its quorum) must not hide a failure
from people: after a few seconds the verdict or alert is published anyway, and the state is saved
once that is possible. Until then, a crash may repeat an alert.
"""

import asyncio
import functools
import zlib
from collections.abc import Awaitable, Callable
from typing import Final, assert_never

from muster import leadership, vocabulary, wording
from muster.nats import bus, jetstream, storage, streams
from muster.service import logs
from muster_health import metrics
from muster_health.bus import inputs, self_monitoring
from muster_health.fleet import fleet_alerts
from muster_health.kubernetes import watches
from muster_health.model import limits, signals

IsLeader = Callable[[], bool]
_LeaderOnly = signals.Publish | signals.Store | signals.Remediate


class Outputs:
    """Executes the outputs of one detector; `executor` and `store` must be running.

    `put` fills the detector's inbox; `cluster` is None if no Kubernetes API is configured.
    """

    def __init__(
        self,
        connected: bus.Bus,
        election: leadership.Election,
        put: inputs.Put,
        *,
        prober: inputs.Prober,
        alarms: self_monitoring.AlarmSender,
        cluster: watches.ClusterWatcher | None,
    ) -> None:
        self.executor = KeyedExecutor()
        self.store = StateStore(functools.partial(_save, connected), last=fleet_alerts.KEY)
        self._bus = connected
        self._election = election
        self._put = put
        self._prober = prober
        self._alarms = alarms
        self._cluster = cluster
        self._refusals = RefusalLog()

    async def execute(self, output: signals.Output) -> None:
        """Execute one output; outputs reserved for the leader are dropped unless we lead."""
        match output:
            case signals.Probe():
                self._prober.start(output)
            case signals.AskCluster():
                await self._query_cluster(output)
            case signals.Alarm():
                await self._alarms.send(output)
            case signals.Noted():
                metrics.count(output)
                if output.refusal is not None:
                    self._refusals.refused(output.refusal, output.node)
            case signals.Publish() | signals.Store() | signals.Remediate():
                term = self._election.term()
                if term is not None:
                    await self._submit(output, functools.partial(self._election.is_term, term))
            case _:
                assert_never(output)

    async def publish_tick(self, event: vocabulary.WatchdogTicked, is_leader: IsLeader) -> None:
        """Publish a tick after everything submitted earlier, if we still lead; then return."""
        published = asyncio.Event()

        async def publish() -> None:
            await self._bus.publish(event, is_leader=is_leader)
            published.set()

        await self.executor.submit_after_all(publish)
        await published.wait()

    def problem(self) -> str | None:
        """Return why alerts are not published or state is not saved; None if both work."""
        seconds = self.executor.stuck_s()
        if seconds > self_monitoring.STUCK_S:
            return f"NATS has not accepted an alert or verdict for {seconds:.0f} s"
        return self.store.problem or None

    async def _submit(self, output: _LeaderOnly, is_leader: IsLeader) -> None:
        """Submit an output to its node's queue, or after all queues if it is about the fleet."""
        action = functools.partial(self._execute_as_leader, output, is_leader)
        match output:
            case signals.Publish():
                event = output.event
                # the state of an alert about a noisy node is saved with the fleet's
                is_noisy = getattr(event, "kind", None) is vocabulary.AlertKind.NOISY_NODE
                node = vocabulary.FLEET if is_noisy else event.node
            case signals.Store():
                node = vocabulary.node_of(output.key.partition(".")[0])
            case signals.Remediate():
                node = output.node
            case _:
                assert_never(output)
        if node == vocabulary.FLEET:
            await self.executor.submit_after_all(action)
        else:
            await self.executor.submit(node, action)

    async def _execute_as_leader(self, output: _LeaderOnly, is_leader: IsLeader) -> None:
        match output:
            case signals.Publish():
                if await self._bus.publish(
                    output.event, event_id=output.event_id, is_leader=is_leader
                ):
                    log_published(output.event)
            case signals.Store():
                await self.store.save(output.key, output.value, is_leader)
            case signals.Remediate():
                if self._cluster is not None:
                    self._cluster.queries.remediate(
                        output, dry_run=output.dry_run, is_leader=is_leader
                    )
                    return
                no_cluster = signals.Remediated(
                    node=output.node,
                    plugin=output.plugin,
                    pod=output.pod,
                    error="no Kubernetes API is configured",
                )
                await self._put(no_cluster)
            case _:
                assert_never(output)

    async def _query_cluster(self, query: signals.AskCluster) -> None:
        if self._cluster is not None:
            self._cluster.queries.start(query)
            return
        no_facts = signals.ClusterAnswered(
            node=query.node, plugin=query.plugin, number=query.number, facts=None
        )
        await self._put(no_facts)


async def _save(connected: bus.Bus, key: str, value: bytes, is_leader: IsLeader) -> bool:
    try:
        return await storage.put(connected.link, streams.STATE, key, value, is_leader=is_leader)
    except jetstream.Refused:
        # `put` has logged the refusal; another attempt would be refused, too
        return True


_REFUSALS_S: Final = 60.0


class RefusalLog:
    """Logs refusals, each reason at most once a minute."""

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._counts: dict[limits.Refusal, int] = {}
        self._logged_at: dict[limits.Refusal, float] = {}

    def refused(self, refusal: limits.Refusal, node: str) -> None:
        """Count a refusal, and log it unless its reason was logged recently."""
        self._counts[refusal] = self._counts.get(refusal, 0) + 1
        now = self._clock()
        if now - self._logged_at.get(refusal, -_REFUSALS_S) < _REFUSALS_S:
            return
        self._logged_at[refusal] = now
        count = self._counts.pop(refusal)
        logs.logger().warning("report_refused", reason=refusal, node=node, count=count)


Action = Callable[[], Awaitable[None]]

_QUEUES: Final = 16
_PENDING_MAX: Final = 2_000
"""The maximum number of actions in all queues together; at this number, `submit` waits."""


class KeyedExecutor:
    """Executes submitted actions while `run` runs; queue 0 is for actions about all nodes."""

    def __init__(self) -> None:
        self._queues: list[asyncio.Queue[Action]] = [asyncio.Queue() for _ in range(_QUEUES + 1)]
        self._free = asyncio.Semaphore(_PENDING_MAX)
        self._submitted = [0] * (_QUEUES + 1)
        self._done = [0] * (_QUEUES + 1)
        self._changed = asyncio.Condition()
        self._clock = asyncio.get_running_loop().time
        self._started_at: list[float | None] = [None] * (_QUEUES + 1)

    def stuck_s(self) -> float:
        """Return how long the oldest action has been running; 0 if none is running."""
        now = self._clock()
        return max((now - at for at in self._started_at if at is not None), default=0.0)

    async def submit(self, node: str, action: Action) -> None:
        """Queue an action that runs after all earlier actions for the same node."""
        queue = 1 + zlib.crc32(node.encode()) % _QUEUES
        await self._submit(queue, action)

    async def submit_after_all(self, action: Action) -> None:
        """Queue an action that runs after all earlier actions for any node."""
        before = list(self._submitted)

        def is_everything_done() -> bool:
            return all(
                done >= submitted
                for done, submitted in zip(self._done[1:], before[1:], strict=True)
            )

        async def when_all_is_done() -> None:
            async with self._changed:
                await self._changed.wait_for(is_everything_done)
            self._started_at[0] = self._clock()
            await action()

        await self._submit(0, when_all_is_done)

    async def run(self) -> None:
        """Run actions forever."""
        async with asyncio.TaskGroup() as tasks:
            for queue in range(len(self._queues)):
                tasks.create_task(self._work(queue))

    async def _submit(self, queue: int, action: Action) -> None:
        await self._free.acquire()
        self._submitted[queue] += 1
        self._queues[queue].put_nowait(action)

    async def _work(self, queue: int) -> None:
        while True:
            action = await self._queues[queue].get()
            # an action in queue 0 first waits for the other queues, and is not stuck meanwhile
            self._started_at[queue] = self._clock() if queue else None
            await action()
            self._started_at[queue] = None
            self._free.release()
            async with self._changed:
                self._done[queue] += 1
                self._changed.notify_all()


def log_published(
    event: vocabulary.VerdictChanged | vocabulary.AlertChanged | vocabulary.RemediationDecided,
) -> None:
    """Log a published verdict, alert or remediation decision."""
    match event:
        case vocabulary.VerdictChanged():
            logs.logger().info(
                "verdict_changed",
                node=event.node,
                plugin=event.plugin,
                verdict=event.verdict,
                previous=event.previous,
                rule=event.rule,
                evidence=[evidence.observed for evidence in event.evidence],
            )
        case vocabulary.AlertChanged():
            logs.logger().info(
                "alert_changed",
                node=event.node,
                fingerprint=event.fingerprint,
                state=event.state,
                summary=event.summary,
            )
        case vocabulary.RemediationDecided():
            logs.logger().info(
                "remediation_decided",
                node=event.node,
                plugin=event.plugin,
                outcome=event.outcome,
                reason=event.reason,
            )
        case _:
            assert_never(event)


Write = Callable[[str, bytes, IsLeader], Awaitable[bool]]
"""Writes a value under a key; returns whether the value was written.

It retries while the third argument, which is called before every try, returns True.
"""

_DELAY_MAX_S: Final = 5.0
_RETRY_S: Final = 2.0


class StateStore:
    """Saves values by key in the background (`run`). The key `last` is written after all others."""

    def __init__(
        self,
        write: Write,
        *,
        last: str,
        delay_max_s: float = _DELAY_MAX_S,
        retry_s: float = _RETRY_S,
    ) -> None:
        self._write = write
        self._last = last
        self._delay_max_s, self._retry_s = delay_max_s, retry_s
        self._unsaved: dict[str, tuple[bytes, IsLeader]] = {}
        self._clock = asyncio.get_running_loop().time
        self._unsaved_since = 0.0

    @property
    def problem(self) -> str:
        """A description of the values that are not saved; empty if all are saved."""
        if not self._unsaved:
            return ""
        seconds = self._clock() - self._unsaved_since
        return (
            f"NATS has not stored the state of {wording.counted(len(self._unsaved), 'plugin')} "
            f"for {seconds:.0f} s: is the bucket muster_state full? "
            "A restart of health now may repeat alerts"
        )

    async def save(self, key: str, value: bytes, is_leader: IsLeader) -> None:
        """Save a value now or soon, while we lead; an empty value deletes the key."""
        until: float | None = None

        def may_retry() -> bool:
            nonlocal until
            if until is None:
                until = self._clock() + self._delay_max_s
            return is_leader() and self._clock() < until

        if not self._unsaved and await self._write(key, value, may_retry):
            return
        if is_leader():
            self._save_later(key, value, is_leader)

    async def run(self) -> None:
        """Keep trying to save the values that could not be saved in time."""
        while True:
            await asyncio.sleep(self._retry_s)
            if self._unsaved:
                await self._save_all()

    def _save_later(self, key: str, value: bytes, is_leader: IsLeader) -> None:
        if not self._unsaved:
            self._unsaved_since = self._clock()
            logs.logger().error("state_not_saved", key=key)
        self._unsaved[key] = value, is_leader

    async def _save_all(self) -> None:
        """Write all unsaved values; a newer value that arrives meanwhile is written too."""
        while self._unsaved:
            key = next((key for key in self._unsaved if key != self._last), self._last)
            entry = self._unsaved[key]
            await self._write(key, *entry)
            if self._unsaved[key] is entry:
                del self._unsaved[key]
        unsaved_s = round(self._clock() - self._unsaved_since, 1)
        logs.logger().info("state_saved", unsaved_s=unsaved_s)
