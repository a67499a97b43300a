"""Adapter: suspected plugins: asked over the bus, one that lives answers with a heartbeat.

No answer says something of a plugin only if our own link to NATS held meanwhile.
"""

import asyncio
from typing import Final

from muster import codec, vocabulary
from muster.nats import bus
from muster_health import metrics
from muster_health.bus import inputs
from muster_health.model import signals

_OWN_LINK_SHARE: Final = 0.25
"""Of a probe's time; a server that answers us later than this may be as late for the plugin."""


class Prober:
    """Asks suspected plugins for a sign of life, so many at once; `put` gets what comes of it."""

    def __init__(self, on: bus.Bus, put: inputs.Put, *, at_once_max: int) -> None:
        self._bus = on
        self._put = put
        self._free = asyncio.Semaphore(at_once_max)
        self._running: set[asyncio.Task[None]] = set()

    def ask(self, probe: signals.Probe) -> None:
        """Ask, without waiting for the answer."""
        task = asyncio.create_task(self._ask(probe))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        """Drop all questions."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _ask(self, probe: signals.Probe) -> None:
        async with self._free:
            found = await self._result(probe)
        metrics.PROBES.labels(_named(found)).inc()
        await self._put(found)

    async def _result(self, probe: signals.Probe) -> signals.Input:
        unclear = signals.ProbeInconclusive(
            node=probe.node, plugin=probe.plugin, number=probe.number
        )
        subject = vocabulary.rpc_subject(probe.node, probe.plugin, "probe")
        epoch = self._bus.link.epoch
        # if our own link fails, before or after, then silence tells nothing about the plugin
        own_s = probe.timeout_s * _OWN_LINK_SHARE
        if not await self._bus.is_reachable(timeout_s=own_s):
            return unclear
        try:
            beat = codec.decode_heartbeat(await self._bus.ask(subject, timeout_s=probe.timeout_s))
        except bus.NobodyAnswered as error:
            reachable = await self._bus.is_reachable(timeout_s=own_s)
            if not reachable or self._bus.link.epoch != epoch:
                return unclear
            return signals.ProbeFailed(
                node=probe.node,
                plugin=probe.plugin,
                number=probe.number,
                subscribed=error.subscribed,
            )
        except codec.MalformedEvent:
            return unclear
        if (beat.node, beat.plugin) != (probe.node, probe.plugin):
            return unclear
        return signals.ProbeAnswered(heartbeat=beat, number=probe.number)


def _named(found: signals.Input) -> str:
    match found:
        case signals.ProbeAnswered():
            return "answered"
        case signals.ProbeFailed(subscribed=True):
            return "no_answer"
        case signals.ProbeFailed():
            return "nobody_listens"
        case _:
            return "inconclusive"
