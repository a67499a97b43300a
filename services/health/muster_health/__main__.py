"""Adapter: runs the health process: connects the detector to NATS and to the Kubernetes API.

Every input goes through one inbox into one state machine. The machine's outputs are carried out in
the background, in order. Probes run in the background, too, and their results are inputs.
"""

from muster.service import start  # isort: skip  # before everything else

import asyncio
import contextlib
import functools
import os
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec
import prometheus_client

from muster import machine
from muster.kubernetes import api
from muster.nats import bus, heartbeat_reader, leader_lock, streams
from muster.service import entry, logs, probes, runtime
from muster_health import metrics
from muster_health.bus import inputs, nats_connections, notified, outputs, self_monitoring
from muster_health.bus import inputs as bus_probes
from muster_health.fleet import detector, state_query
from muster_health.kubernetes import plugin_reader, watches
from muster_health.model import config, signals
from muster_health.replay import recorder

start.end_imports()

_POST_S: Final = 5.0


def main() -> int:
    """Run the health service and return its exit code."""
    return entry.main("health", config.Settings, serve)


async def serve(settings: config.Settings) -> None:
    """Serve until SIGTERM."""
    logs.configure("health", level=settings.log.level)
    async with contextlib.AsyncExitStack() as stack:
        parts = await _parts(settings, stack)
        await _serve_http(parts, settings, stack)
        if parts.cluster is None:
            logs.logger().info(
                "kubernetes_not_configured", reason="not in a pod, and no kubeconfig is set"
            )
        await _run(parts, settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """The components of the process.

    `cluster` and `reader` are None if no Kubernetes API is configured. `reader` is also None unless
    `cluster.reads_plugins` is set.
    """

    name: str
    watched: detector.Detector
    driven: machine.Machine[signals.Input, signals.Output]
    """The detector, or a recorder around it."""
    connected: bus.Bus
    election: leader_lock.Lock
    inbox: inputs.Inbox
    incoming: inputs.Inputs
    receivers: notified.ReceiverStatus
    monitor: nats_connections.ConnectionMonitor
    alarms: self_monitoring.AlarmSender
    cluster: watches.ClusterWatcher | None
    reader: plugin_reader.PluginReader | None
    outgoing: outputs.Outputs
    pages: state_query.NodePages


async def _parts(settings: config.Settings, stack: contextlib.AsyncExitStack) -> _Parts:
    """Create and connect the components; the stack closes them. Raises CannotStart."""
    kubernetes = await _kubernetes(settings.cluster, stack)
    watched = _detector(settings, has_cluster=kubernetes is not None)
    connected = await stack.enter_async_context(_bus(settings))
    name = f"muster-health {connected.instance}"
    election = await stack.enter_async_context(_election(connected, settings.leading, name))
    stream = await stack.enter_async_context(
        heartbeat_reader.HeartbeatStream(settings.bus.url, name=name)
    )
    inbox: inputs.Inbox = asyncio.Queue(runtime.INBOX_MAX)
    incoming = inputs.Inputs(connected.link, stream, election, inbox, watched.nodes)
    receivers = notified.ReceiverStatus(began_at=asyncio.get_running_loop().time())
    await connected.link.subscribe(notified.SUBJECT, receivers.receive)
    prober = bus_probes.Prober(
        connected, incoming.put, concurrent_max=settings.detection.probes_max
    )
    stack.push_async_callback(prober.close)
    post = functools.partial(kubernetes.post, timeout_s=_POST_S) if kubernetes else None
    alarms = self_monitoring.AlarmSender(settings.blind, name=name, post=post)
    cluster = (
        watches.ClusterWatcher(kubernetes, settings.cluster, incoming.put) if kubernetes else None
    )
    return _Parts(
        name=name,
        watched=watched,
        driven=_recorded(watched, settings, stack, has_cluster=kubernetes is not None)
        if settings.recording.file
        else watched,
        connected=connected,
        election=election,
        inbox=inbox,
        incoming=incoming,
        receivers=receivers,
        monitor=_monitor(connected, incoming, name),
        alarms=alarms,
        cluster=cluster,
        reader=_reader(kubernetes, settings.cluster, incoming, election),
        outgoing=outputs.Outputs(
            connected, election, incoming.put, prober=prober, alarms=alarms, cluster=cluster
        ),
        pages=state_query.NodePages(),
    )


async def _serve_http(
    parts: _Parts, settings: config.Settings, stack: contextlib.AsyncExitStack
) -> None:
    """Serve HTTP for probes, Prometheus and `muster status` until the stack closes."""

    def exported() -> probes.Answer:
        return 200, *metrics.exported(parts.watched, per_node=settings.metrics.per_node)

    def problem() -> str | None:
        return (
            parts.connected.link.problem() or parts.outgoing.problem() or parts.election.problem()
        )

    address = await stack.enter_async_context(
        probes.serve(
            settings.http.host,
            settings.http.port,
            ready=problem,
            more={"/metrics": exported},
            queried={"/state": functools.partial(_state, parts)},
        )
    )
    logs.logger().info("listening", http=address)


async def _run(parts: _Parts, settings: config.Settings) -> None:
    """Run all tasks; when one ends, cancel the others."""
    watched, outgoing = parts.watched, parts.outgoing
    await runtime.run(
        runtime.drive(parts.driven, parts.inbox, outgoing.execute),
        parts.election.failed(),
        parts.incoming.run(),
        outgoing.executor.run(),
        outgoing.store.run(),
        parts.monitor.run(),
        parts.alarms.run(),
        self_monitoring.publish_ticks(
            parts.election,
            outgoing.publish_tick,
            holder=parts.name,
            interval_s=settings.leading.watchdog_s,
            is_detector_leading=lambda term: watched.leader == term,
            is_blind=lambda: bool(parts.connected.link.unread),
        ),
        self_monitoring.watch_publishing(
            outgoing.executor.stuck_s,
            parts.alarms.send,
            is_disconnected=lambda: watched.is_disconnected,
        ),
        *([parts.cluster.run()] if parts.cluster else []),
        *([parts.reader.run()] if parts.reader else []),
    )


async def _kubernetes(settings: config.Cluster, stack: contextlib.AsyncExitStack) -> api.Api | None:
    """Return a Kubernetes API client, or None if none is configured. Raises CannotStart."""
    if settings.kubeconfig is None and not os.environ.get("KUBERNETES_SERVICE_HOST"):
        return None
    try:
        kubernetes = await api.find(kubeconfig=settings.kubeconfig, context=settings.context)
    except api.NoCluster as error:
        raise entry.CannotStart(f"cluster: {error}") from None
    return await stack.enter_async_context(kubernetes)


def _detector(settings: config.Settings, *, has_cluster: bool) -> detector.Detector:
    clock = asyncio.get_running_loop().time
    watched = detector.Detector(
        settings.detection,
        runbook_url=settings.runbook_url,
        at_zero=datetime.now(UTC) - timedelta(seconds=clock()),
        bounds=settings.bounds,
        restarts=settings.remediation,
        has_cluster=has_cluster,
        leader=None,
    )
    prometheus_client.REGISTRY.register(metrics.CurrentState(watched))
    return watched


def _bus(settings: config.Settings) -> bus.Bus:
    return bus.Bus(
        settings.bus.url,
        producer="services/health",
        name="muster-health",
        owner=True,
        replicas=settings.streams.replicas,
    )


def _monitor(
    connected: bus.Bus, incoming: inputs.Inputs, name: str
) -> nats_connections.ConnectionMonitor:
    link = nats_connections.Link(
        connected.subscribe, connected.link.probe_connect, connected.link.changes
    )
    return nats_connections.ConnectionMonitor(link, incoming.put, name=name)


def _reader(
    kubernetes: api.Api | None,
    settings: config.Cluster,
    incoming: inputs.Inputs,
    election: leader_lock.Lock,
) -> plugin_reader.PluginReader | None:
    """Return the reader for plugins that muster does not run; None if it is not enabled."""
    if kubernetes is None or not settings.reads_plugins:
        return None
    return plugin_reader.PluginReader(
        kubernetes,
        incoming.put,
        is_leading=lambda: election.term() is not None,
        more=settings.known,
    )


def _recorded(
    watched: detector.Detector,
    settings: config.Settings,
    stack: contextlib.AsyncExitStack,
    *,
    has_cluster: bool,
) -> recorder.Recorder:
    """Return a detector that records all its inputs. Raises CannotStart."""
    recording = recorder.Recorder(watched, settings, has_cluster=has_cluster)
    try:
        recording.begin(asyncio.get_running_loop().time())
    except OSError as error:
        raise entry.CannotStart(f"recording: {error}") from None
    stack.callback(recording.close)
    return recording


def _election(connected: bus.Bus, settings: config.Leading, name: str) -> leader_lock.Lock:
    key = leader_lock.Key(connected.link, streams.LEADER, "health")
    timing = leader_lock.Timing(
        ttl_s=settings.ttl_s, renew_s=settings.renew_s, margin_s=settings.margin_s
    )
    return leader_lock.Lock(
        key, us=leader_lock.this_process(name), timing=timing, on_change=metrics.count_leadership
    )


def _state(parts: _Parts, query: Mapping[str, str]) -> probes.Answer:
    """Return the response to `/state`: all nodes, one node, one page of nodes, or an error."""
    now = asyncio.get_running_loop().time()
    watched, election, outgoing = parts.watched, parts.election, parts.outgoing
    cluster, reader = parts.cluster, parts.reader
    try:
        wanted = state_query.parse(query)
    except state_query.BadQuery as error:
        return probes.bad_request(str(error))
    version, every = watched.nodes()
    nodes: Collection[str] = [wanted.node] if wanted.node else every
    following = ""
    if wanted.nodes is not None:
        nodes, following = parts.pages.page(version, every, after=wanted.after, most=wanted.nodes)
    state = {
        "plugins": list(watched.shown_plugins(now, nodes)),
        "places": _places(cluster, nodes),
        "next": following,
        "fleet": watched.shown(),
        "service": {
            "leads": election.term(),
            "leader": election.current.leader,
            "blind": watched.is_disconnected,
            "position": watched.position,
            "advisories": parts.monitor.problem or "received",
            "telling": outgoing.problem() or "",
            "notified": parts.receivers.problem(now),
            "notifier_alerts": parts.receivers.alerts(now),
            "cluster": cluster.problems | (reader.problems if reader else {})
            if cluster
            else "no Kubernetes API is configured",
        },
    }
    return 200, "application/json", msgspec.json.encode(state)


def _places(
    cluster: watches.ClusterWatcher | None, nodes: Iterable[str]
) -> dict[str, dict[str, str]]:
    """Return the known pool and zone of each node; omit nodes for which neither is known."""
    if cluster is None:
        return {}
    places = ((node, cluster.place(node)) for node in nodes)
    return {node: place for node, place in places if place}


if __name__ == "__main__":
    sys.exit(main())
