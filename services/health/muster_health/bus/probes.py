"""Adapter: NATS: probes suspected plugins; a live plugin answers with a heartbeat.

A missing answer says something about the plugin only if our own connection to NATS worked before
and after the probe.
"""

import asyncio
from typing import Final

from muster import codec, vocabulary
from muster.nats import bus
from muster_health import metrics
from muster_health.bus import inputs
from muster_health.model import signals

_OWN_CHECK_SHARE: Final = 0.25
"""Share of a probe's timeout; if NATS answers later than that, the result proves nothing."""


class Prober:
    """Probes plugins, at most `concurrent_max` at once; passes each result to `put`."""

    def __init__(self, connected: bus.Bus, put: inputs.Put, *, concurrent_max: int) -> None:
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
