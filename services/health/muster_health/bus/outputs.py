"""Adapter: NATS, where all goes to that health concludes; and to whoever else does as it says.

What takes a round trip is done beside the detector, in order: told after it was remembered, and
only while we lead.
"""

import asyncio
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, assert_never

from muster import vocabulary
from muster.nats import buckets, bus, lock, streams
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


class Outputs:
    """Does what one detector says; `lanes` and `memory` must run.

    `put` is the detector's inbox; `seen` the cluster, if there is one.
    """

    def __init__(
        self,
        connected: bus.Bus,
        leading: lock.Lock,
        put: inputs.Put,
        *,
        probes: probes.Prober,
        alarms: out_of_band_alarm.Alarms,
        seen: "watches.Cluster | None",
    ) -> None:
        self.lanes = keyed_executor.Lanes()
        self.memory = state_store.Memory(
            functools.partial(_remember, connected), last=fleet_alerts.KEY
        )
        self._bus = connected
        self._leading = leading
        self._put = put
        self._probes = probes
        self._alarms = alarms
        self._seen = seen

    async def act(self, out: signals.Output) -> None:
        """Do what the detector says; what only a leader may do is done only while we lead."""
        match out:
            case signals.Probe():
                self._probes.ask(out)
            case signals.AskCluster():
                await self._ask_cluster(out)
            case signals.Alarm():
                await self._alarms.tell(out)
            case signals.Noted():
                metrics.count(out)
            case signals.Publish() | signals.Remember() | signals.Remediate():
                revision = self._leading.term()
                if revision is not None:
                    await self._later(out, functools.partial(self._leading.is_term, revision))
            case _:
                assert_never(out)

    async def tick(self, event: vocabulary.WatchdogTicked, still: Callable[[], bool]) -> None:
        """Tell of a tick after all that was to be told before it; return when it is told."""
        told = asyncio.Event()

        async def act() -> None:
            await self._bus.publish(event, is_leader=still)
            told.set()

        await self.lanes.put_last(act)
        await told.wait()

    def problem(self) -> str | None:
        """Say why what is concluded is not told, or not remembered."""
        seconds = self.lanes.stuck_s()
        if seconds > watchdog.STUCK_S:
            return f"NATS has not taken an alert or verdict for {seconds:.0f} s"
        return self.memory.problem or None

    async def _later(
        self,
        out: signals.Publish | signals.Remember | signals.Remediate,
        still: Callable[[], bool],
    ) -> None:
        """Have it done in its order; the detector goes on meanwhile."""
        act = functools.partial(self._tell, out, still)
        match out:
            case signals.Publish():
                node = out.event.node
            case signals.Remember():
                node = vocabulary.node_of(out.key.partition(".")[0])
            case signals.Remediate():
                node = out.node
            case _:
                assert_never(out)
        if node == vocabulary.FLEET:
            await self.lanes.put_last(act)
        else:
            await self.lanes.put(node, act)

    async def _tell(
        self,
        out: signals.Publish | signals.Remember | signals.Remediate,
        still: Callable[[], bool],
    ) -> None:
        match out:
            case signals.Publish():
                if await self._bus.publish(out.event, event_id=out.event_id, is_leader=still):
                    verdict_log.log(out.event)
            case signals.Remember():
                await self.memory.keep(out.key, out.value, still)
            case signals.Remediate():
                if self._seen is not None:
                    self._seen.questions.remediate(out, dry_run=out.dry_run, still=still)
                else:
                    no_cluster = signals.Remediated(
                        node=out.node,
                        plugin=out.plugin,
                        pod=out.pod,
                        error="no Kubernetes API at hand",
                    )
                    await self._put(no_cluster)
            case _:
                assert_never(out)

    async def _ask_cluster(self, asked: signals.AskCluster) -> None:
        if self._seen is not None:
            self._seen.questions.ask(asked)
            return
        nothing = signals.ClusterAnswered(
            node=asked.node, plugin=asked.plugin, number=asked.number, facts=None
        )
        await self._put(nothing)


async def _remember(connected: bus.Bus, key: str, value: bytes, still: state_store.Still) -> bool:
    return await buckets.remember(connected.link, streams.STATE, key, value, is_leader=still)
