"""Door to the process: beats and events in, verdicts and alerts out.

Everything goes through one inbox into one machine; what the machine wants done about an input is
done before the input is acknowledged. Probes run beside it, and their answers are inputs.
"""

import asyncio
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final, assert_never

import msgspec
import prometheus_client

from muster import bus, codec, entry, logs, probes, runtime, streams, vocabulary
from muster_health import config, detector, metrics, signals, snapshot

Inbox = asyncio.Queue[runtime.Delivery[signals.Input]]

_OWN_LINK_SHARE: Final = 0.25
"""Of a probe's time; a server that answers us later than this may be as late for the plugin."""
_REPORTS: Final = tuple(f"muster.event.*.*.{kind}.*" for kind in ("plugin", "inventory", "device"))


class Prober:
    """Asks suspected plugins for a sign of life, so many at once, and puts what comes of it in."""

    def __init__(self, on: bus.Bus, inbox: Inbox, *, at_once_max: int) -> None:
        self._bus = on
        self._inbox = inbox
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
        await self._inbox.put(runtime.Delivery(found))

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


async def listen(connected: bus.Bus, inbox: Inbox) -> None:
    """Put in what we knew before our restart, then all that comes."""
    for key, value in (await connected.recall(streams.STATE)).items():
        try:
            known = snapshot.decode(value)
        except ValueError as error:
            logs.logger().warning("state_unreadable", key=key, error=str(error))
            continue
        await inbox.put(runtime.Delivery(signals.Restored(state=known)))

    async def take(beat: vocabulary.Heartbeat) -> None:
        try:
            inbox.put_nowait(runtime.Delivery(signals.Beat(heartbeat=beat)))
        except asyncio.QueueFull:
            metrics.BEATS.labels("dropped").inc()
        else:
            metrics.BEATS.labels("taken").inc()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watch_link(connected, inbox))
        await connected.heartbeats(take)
        reports = connected.consume(streams.EVENTS, durable="health", filters=_REPORTS)
        async for told in reports:
            report = signals.FromPlugin(
                event=told.event.data,
                instance=told.event.instance,
                sequence=told.event.sequence,
            )
            await inbox.put(runtime.Delivery(report, told.ack))


async def watch_link(connected: bus.Bus, inbox: Inbox) -> None:
    """Put in when we can hear and when we cannot."""
    async for is_there in connected.link.changes():
        change = signals.BusBack(at=datetime.now(UTC)) if is_there else signals.BusLost()
        await inbox.put(runtime.Delivery(change))


async def serve(settings: config.Settings) -> None:
    """Serve until SIGTERM."""
    logs.configure("health", level=settings.log.level)
    clock = asyncio.get_running_loop().time
    watched = detector.Detector(
        settings.detection,
        runbook_url=settings.runbook_url,
        at_zero=datetime.now(UTC) - timedelta(seconds=clock()),
    )
    prometheus_client.REGISTRY.register(metrics.Holdings(watched))
    inbox: Inbox = asyncio.Queue(runtime.INBOX_MAX)
    async with bus.Bus(
        settings.bus.url, producer="services/health", name="muster-health", owner=True
    ) as connected:
        prober = Prober(connected, inbox, at_once_max=settings.detection.probes_max)

        async def act(out: signals.Output) -> None:
            match out:
                case signals.Probe():
                    prober.ask(out)
                case signals.AskCluster() | signals.Alarm() | signals.Remediate():
                    logs.logger().warning("not_wired", output=type(out).__name__)
                case signals.Publish():
                    await connected.publish(out.event, event_id=out.event_id)
                    _log(out.event)
                case signals.Remember():
                    await connected.remember(streams.STATE, out.key, out.value)
                case signals.Noted():
                    metrics.count(out)
                case _:
                    assert_never(out)

        def unready() -> str | None:
            return None if connected.link.is_connected else "not connected to NATS"

        shown = {"/state": lambda: _state(watched, clock)}
        try:
            async with probes.serve(
                settings.http.host, settings.http.port, ready=unready, more=shown
            ) as address:
                logs.logger().info("listening", http=address)
                await runtime.run(runtime.drive(watched, inbox, act), listen(connected, inbox))
        finally:
            await prober.close()


def _state(watched: detector.Detector, clock: Callable[[], float]) -> probes.Answer:
    now = clock()
    shown = [dossier.view(now) for dossier in watched.dossiers()]
    return 200, "application/json", msgspec.json.encode({"plugins": shown})


def _log(
    event: vocabulary.VerdictChanged | vocabulary.AlertChanged | vocabulary.RemediationDecided,
) -> None:
    match event:
        case vocabulary.VerdictChanged():
            logs.logger().info(
                "verdict_changed",
                node=event.node,
                plugin=event.plugin,
                verdict=event.verdict,
                previous=event.previous,
                rule=event.rule,
                evidence=[seen.observed for seen in event.evidence],
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


def main() -> int:
    """Run the health service; return the exit code."""
    return entry.main("health", config.Settings, serve)


if __name__ == "__main__":
    sys.exit(main())
