"""Adapter: NATS: carries out the detector's outputs: publishes verdicts and alerts, saves state.

Probes, cluster queries, remediation and alarms go to the adapters that do them. What takes a round
trip runs beside the detector, in order: state is saved before its conclusion is published, and both
only while this process leads.
"""

import asyncio
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, assert_never

from muster import leadership, vocabulary
from muster.nats import bus, storage, streams
from muster_health import metrics
from muster_health.bus import (
    inputs,
    keyed_executor,
    out_of_band_alarm,
    probes,
    state_store,
    verdict_log,
    watchdog,
)
from muster_health.fleet import fleet_alerts
from muster_health.model import signals

if TYPE_CHECKING:
    from muster_health.kubernetes import watches

_LeaderOnly = signals.Publish | signals.Store | signals.Remediate


class Outputs:
    """Carries out the outputs of one detector; `executor` and `store` must be running.

    `put` fills the detector's inbox; `cluster` is None without a Kubernetes API.
    """

    def __init__(
        self,
        connected: bus.Bus,
        election: leadership.Election,
        put: inputs.Put,
        *,
        prober: probes.Prober,
        alarms: out_of_band_alarm.AlarmSender,
        cluster: "watches.ClusterWatcher | None",
    ) -> None:
        self.executor = keyed_executor.KeyedExecutor()
        self.store = state_store.StateStore(
            functools.partial(_save, connected), last=fleet_alerts.KEY
        )
        self._bus = connected
        self._election = election
        self._put = put
        self._prober = prober
        self._alarms = alarms
        self._cluster = cluster

    async def execute(self, output: signals.Output) -> None:
        """Carry out one output; outputs reserved for the leader are dropped unless we lead."""
        match output:
            case signals.Probe():
                self._prober.start(output)
            case signals.AskCluster():
                await self._query_cluster(output)
            case signals.Alarm():
                await self._alarms.send(output)
            case signals.Noted():
                metrics.count(output)
            case signals.Publish() | signals.Store() | signals.Remediate():
                term = self._election.term()
                if term is not None:
                    await self._submit(output, functools.partial(self._election.is_term, term))
            case _:
                assert_never(output)

    async def publish_tick(
        self, event: vocabulary.WatchdogTicked, is_leader: Callable[[], bool]
    ) -> None:
        """Publish a tick after everything submitted earlier; return when it is published."""
        published = asyncio.Event()

        async def publish() -> None:
            await self._bus.publish(event, is_leader=is_leader)
            published.set()

        await self.executor.submit_after_all(publish)
        await published.wait()

    def problem(self) -> str | None:
        """Return why alerts are not published or state is not saved; None if all is well."""
        seconds = self.executor.stuck_s()
        if seconds > watchdog.STUCK_S:
            return f"NATS has not accepted an alert or verdict for {seconds:.0f} s"
        return self.store.problem or None

    async def _submit(self, output: _LeaderOnly, is_leader: Callable[[], bool]) -> None:
        """Submit an output to its node's queue, without delaying the detector."""
        action = functools.partial(self._execute_as_leader, output, is_leader)
        match output:
            case signals.Publish():
                node = output.event.node
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

    async def _execute_as_leader(self, output: _LeaderOnly, is_leader: Callable[[], bool]) -> None:
        match output:
            case signals.Publish():
                if await self._bus.publish(
                    output.event, event_id=output.event_id, is_leader=is_leader
                ):
                    verdict_log.log(output.event)
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


async def _save(
    connected: bus.Bus, key: str, value: bytes, is_leader: state_store.IsLeader
) -> bool:
    return await storage.put(connected.link, streams.STATE, key, value, is_leader=is_leader)
