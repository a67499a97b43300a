"""Door to the process: beats and events in, verdicts and alerts out.

Everything goes through one inbox into one machine; what the machine wants told and remembered is
done beside it, in order. Probes run beside it too, and their answers are inputs.
"""

import asyncio
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, assert_never

import msgspec
import prometheus_client

from muster import (
    buckets,
    bus,
    codec,
    connection,
    consumers,
    entry,
    lean,
    lock,
    logs,
    machine,
    probes,
    pulse,
    runtime,
    streams,
    vocabulary,
)
from muster_health import (
    alarm,
    config,
    connections,
    detector,
    fleet,
    lanes,
    leader,
    memory,
    metrics,
    recorder,
    signals,
    snapshot,
    teller,
    watchdog,
)

if TYPE_CHECKING:
    from muster import kube
    from muster_health import cluster

Inbox = asyncio.Queue[runtime.Delivery[signals.Input]]

_OWN_LINK_SHARE: Final = 0.25
"""Of a probe's time; a server that answers us later than this may be as late for the plugin."""
_POST_S: Final = 5.0
_REPORTS: Final = tuple(
    f"muster.event.*.*.{kind}.*" for kind in ("plugin", "inventory", "device", "expectation")
)


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


class Watch:
    """Hears everything for one detector, and does what it says.

    `put` is its inbox; `seen` the cluster, if there is one; `lanes` and `memory` must run.
    """

    def __init__(
        self,
        settings: config.Settings,
        connected: bus.Bus,
        heard: pulse.Pulse,
        leading: lock.Lock,
        watched: detector.Detector,
        inbox: Inbox,
    ) -> None:
        self.seen: cluster.Cluster | None = None
        self.alarms: alarm.Alarms | None = None
        self.lanes = lanes.Lanes()
        self.memory = memory.Memory(
            lambda key, value, still: buckets.remember(
                connected.link, streams.STATE, key, value, still=still
            ),
            last=fleet.KEY,
        )
        self._bus = connected
        self._pulse = heard
        self._leading = leading
        self._watched = watched
        self._inbox = inbox
        self._remembers = False
        self._prober = Prober(connected, inbox, at_once_max=settings.detection.probes_max)

    async def put(self, event: signals.Input) -> None:
        """Put an input in, when there is room."""
        await self._inbox.put(runtime.Delivery(event))

    async def listen(self) -> None:
        """Put in what we knew before our restart, then every beat and every report."""
        await self.put(signals.BusLost())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_link())
            position = await self._remembered()
            tasks.create_task(self._lead())
            await self._pulse.follow(self._beats)
            if not position:
                # without a memory the last word of each kind is enough; all of the past is not news
                position = await self._catch_up()
            reports = consumers.follow(
                self._bus.link, streams.EVENTS, filters=_REPORTS, after=position
            )
            async for told in reports:
                await self.put(_report(told, position=told.position))

    async def act(self, out: signals.Output) -> None:
        """Do what the detector says; what only a leader may do is done only while we lead."""
        match out:
            case signals.Probe():
                self._prober.ask(out)
            case signals.AskCluster():
                await self._ask_cluster(out)
            case signals.Alarm():
                if self.alarms is not None:
                    await self.alarms.tell(out)
            case signals.Noted():
                metrics.count(out)
            case signals.Publish() | signals.Remember() | signals.Remediate():
                revision = self._leading.revision()
                if revision is not None:
                    await self._later(out, functools.partial(self._leading.still, revision))
            case _:
                assert_never(out)

    async def tick(self, event: vocabulary.WatchdogTicked, still: Callable[[], bool]) -> None:
        """Tell of a tick after all that was to be told before it; return when it is told."""
        told = asyncio.Event()

        async def act() -> None:
            await self._bus.publish(event, still=still)
            told.set()

        await self.lanes.put_last(act)
        await told.wait()

    def problem(self) -> str | None:
        """Say why what is concluded is not told, or not remembered."""
        seconds = self.lanes.stuck_s()
        if seconds > watchdog.STUCK_S:
            return f"NATS has not taken an alert or verdict for {seconds:.0f} s"
        return self.memory.problem or None

    async def close(self) -> None:
        """Drop all questions."""
        await self._prober.close()

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
                if await self._bus.publish(out.event, event_id=out.event_id, still=still):
                    teller.log(out.event)
            case signals.Remember():
                await self.memory.keep(out.key, out.value, still)
            case signals.Remediate():
                if self.seen is not None:
                    self.seen.questions.remediate(out, dry_run=out.dry_run, still=still)
                else:
                    no_cluster = signals.Remediated(
                        node=out.node,
                        plugin=out.plugin,
                        pod=out.pod,
                        error="no Kubernetes API at hand",
                    )
                    await self.put(no_cluster)
            case _:
                assert_never(out)

    async def _ask_cluster(self, asked: signals.AskCluster) -> None:
        if self.seen is not None:
            self.seen.questions.ask(asked)
            return
        nothing = signals.ClusterAnswered(
            node=asked.node, plugin=asked.plugin, number=asked.number, facts=None
        )
        await self.put(nothing)

    async def _lead(self) -> None:
        """Put in who leads; who begins to lead is given first what was remembered."""
        async for revision in self._leading.follow():
            if revision is not None:
                await self._remembered()
                await self._fires_still()
            await self.put(signals.Leadership(revision=revision))

    async def _fires_still(self) -> None:
        """Put in what alerts were told and not ended, where all memory of them is gone."""
        if self._remembers:
            return
        told = [
            event.data
            for event in await consumers.newest(self._bus.link, streams.ALERTS, "muster.alert.>")
        ]
        firing = [event for event in told if isinstance(event, vocabulary.AlertChanged)]
        for known in snapshot.of_alerts(firing):
            await self.put(signals.Restored(state=known))

    async def _remembered(self) -> int:
        """Put in what is remembered; return how far in the stream of events that goes."""
        position = 0
        values = await buckets.recall(self._bus.link, streams.STATE)
        self._remembers = bool(values)
        for key, value in values.items():
            try:
                known = snapshot.decode(value)
            except ValueError as error:
                logs.logger().warning("state_unreadable", key=key, error=str(error))
                continue
            position = max(position, known.position)
            await self.put(signals.Restored(state=known))
        return position

    async def _catch_up(self) -> int:
        """Put in the newest report of each subject; return where the next ones begin."""
        newest = [
            told
            for kind in _REPORTS
            for told in await consumers.newest(self._bus.link, streams.EVENTS, kind)
        ]
        for told in sorted(newest, key=lambda told: told.position):
            await self.put(_report(told, position=told.position))
        return max((told.position for told in newest), default=0)

    async def _beats(self, beats: Sequence[vocabulary.Heartbeat]) -> None:
        """Put beats in, and return when they are dealt with: more can wait in NATS."""
        done = asyncio.Event()

        async def ack() -> None:
            done.set()

        await self._inbox.put(runtime.Delivery(signals.Beats(heartbeats=beats), ack))
        await done.wait()
        metrics.BEATS.labels("taken").inc(len(beats))

    async def _watch_link(self) -> None:
        """We hear while both of our connections are there."""
        links = (self._bus.link, self._pulse.link)
        there: set[connection.Connection] = set()

        async def watch(link: connection.Connection) -> None:
            async for is_there in link.changes():
                (there.add if is_there else there.discard)(link)
                hears = len(there) == len(links)
                await self.put(
                    signals.BusBack(at=datetime.now(UTC)) if hears else signals.BusLost()
                )

        async with asyncio.TaskGroup() as tasks:
            for link in links:
                tasks.create_task(watch(link))


def _report(told: codec.CloudEvent, *, position: int) -> signals.FromPlugin:
    return signals.FromPlugin(
        event=told.data, instance=told.instance, sequence=told.sequence, position=position
    )


async def serve(settings: config.Settings) -> None:
    """Serve until SIGTERM."""
    logs.configure("health", level=settings.log.level)
    async with contextlib.AsyncExitStack() as stack:
        api = await _api(settings.cluster, stack)
        clock = asyncio.get_running_loop().time
        watched = detector.Detector(
            settings.detection,
            runbook_url=settings.runbook_url,
            at_zero=datetime.now(UTC) - timedelta(seconds=clock()),
            bounds=settings.bounds,
            remediation=settings.remediation,
            has_cluster=api is not None,
            leader=None,
        )
        prometheus_client.REGISTRY.register(metrics.Holdings(watched))
        connected = await stack.enter_async_context(
            bus.Bus(
                settings.bus.url,
                producer="services/health",
                name="muster-health",
                owner=True,
                replicas=settings.streams.replicas,
            )
        )
        name = f"muster-health {connected.instance}"
        leading = await stack.enter_async_context(_lock(connected, settings.leading, name))
        inbox: Inbox = asyncio.Queue(runtime.INBOX_MAX)
        beats = await stack.enter_async_context(pulse.Pulse(settings.bus.url, name=name))
        watch = Watch(settings, connected, beats, leading, watched, inbox)
        stack.push_async_callback(watch.close)
        link = connections.Link(connected.listen, connected.link.knock, connected.link.changes)
        heard = connections.Connections(link, watch.put, name=name)
        post = functools.partial(api.post, timeout_s=_POST_S) if api else None
        watch.alarms = alarm.Alarms(settings.blind, name=name, post=post)
        if api is not None:
            watch.seen = _cluster(api, settings.cluster, watch.put)
        driven: machine.Machine[signals.Input, signals.Output] = watched
        if settings.recording.file:
            driven = _recorded(watched, settings, stack, has_cluster=api is not None)
        state = _State(watched, leading, heard, watch)

        def unready() -> str | None:
            return connected.link.problem() or watch.problem()

        address = await stack.enter_async_context(
            probes.serve(
                settings.http.host,
                settings.http.port,
                ready=unready,
                more={"/state": state.show},
            )
        )
        logs.logger().info("listening", http=address)
        if api is None:
            logs.logger().info("no_cluster", reason="no kubeconfig is given, and this is no pod")
        await runtime.run(
            runtime.drive(driven, inbox, watch.act),
            watch.listen(),
            watch.lanes.run(),
            watch.memory.run(),
            heard.run(),
            watch.alarms.run(),
            watchdog.tick(
                leading,
                watch.tick,
                holder=name,
                interval_s=settings.leading.watchdog_s,
                leads=lambda revision: watched.leader == revision,
            ),
            watchdog.mind(
                watch.lanes.stuck_s, watch.alarms.tell, is_blind=lambda: watched.is_blind
            ),
            *([watch.seen.run()] if watch.seen else []),
        )


async def _api(settings: config.Cluster, stack: contextlib.AsyncExitStack) -> "kube.Api | None":
    """Return the Kubernetes API, or None where there is none. Raises CannotStart."""
    if settings.kubeconfig is None and not os.environ.get("KUBERNETES_SERVICE_HOST"):
        return None
    # aiohttp keeps the classes that it finds
    lean.fully("ssl")
    from muster import kube  # noqa: PLC0415  # 20 MiB that are not needed without a cluster

    try:
        found = await kube.find(kubeconfig=settings.kubeconfig, context=settings.context)
    except kube.NoCluster as error:
        raise entry.CannotStart(f"cluster: {error}") from None
    return await stack.enter_async_context(found)


def _recorded(
    watched: detector.Detector,
    settings: config.Settings,
    stack: contextlib.AsyncExitStack,
    *,
    has_cluster: bool,
) -> recorder.Recorder:
    """Return the detector, with all it takes in written down. Raises CannotStart."""
    written = recorder.Recorder(watched, settings, has_cluster=has_cluster)
    try:
        written.begin(asyncio.get_running_loop().time())
    except OSError as error:
        raise entry.CannotStart(f"recording: {error}") from None
    stack.callback(written.close)
    return written


def _cluster(api: "kube.Api", settings: config.Cluster, put: "cluster.Put") -> "cluster.Cluster":
    from muster_health import cluster  # noqa: PLC0415  # as above

    return cluster.Cluster(api, settings, put)


def _lock(connected: bus.Bus, settings: config.Leading, name: str) -> lock.Lock:
    key = lock.key(connected.link, streams.LEADER, "health")
    terms = lock.Terms(ttl_s=settings.ttl_s, renew_s=settings.renew_s, margin_s=settings.margin_s)
    return lock.Lock(key, us=lock.this(name), terms=terms, told=leader.told)


class _State:
    """What is known, for people: /state."""

    def __init__(
        self,
        watched: detector.Detector,
        leading: lock.Lock,
        heard: connections.Connections,
        watch: Watch,
    ) -> None:
        self._watched = watched
        self._leading = leading
        self._heard = heard
        self._watch = watch

    def show(self) -> probes.Answer:
        """Return it as JSON."""
        now = asyncio.get_running_loop().time()
        shown = {
            "plugins": [dossier.view(now) for dossier in self._watched.dossiers()],
            "fleet": {
                "alerts": list(self._watched.fleet_alerts()),
                "storms": self._watched.storms,
                "suspects": self._watched.suspects,
                "held": self._watched.held,
            },
            "service": {
                "leads": self._leading.revision(),
                "leader": self._leading.standing.holder,
                "blind": self._watched.is_blind,
                "position": self._watched.position,
                "advisories": self._heard.problem or "they come",
                "telling": self._watch.problem() or "",
                "cluster": self._watch.seen.problems if self._watch.seen else "none at hand",
            },
        }
        return 200, "application/json", msgspec.json.encode(shown)


def main() -> int:
    """Run the health service; return the exit code."""
    return entry.main("health", config.Settings, serve)


if __name__ == "__main__":
    sys.exit(main())
