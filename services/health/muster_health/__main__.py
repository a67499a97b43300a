"""Adapter: the process: beats and events in, verdicts and alerts out.

Everything goes through one inbox into one machine; what the machine wants told and remembered is
done beside it, in order. Probes run beside it too, and their answers are inputs.
"""

import asyncio
import contextlib
import functools
import os
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

import msgspec
import prometheus_client

from muster import lean, machine
from muster.nats import bus, heartbeat_stream, lock, streams
from muster.service import entry, logs, probes, runtime
from muster_health import metrics
from muster_health.bus import (
    inputs,
    nats_connections,
    out_of_band_alarm,
    outputs,
    verdict_log,
    watchdog,
)
from muster_health.bus import probes as bus_probes
from muster_health.fleet import detector
from muster_health.model import config, signals
from muster_health.plugin import view
from muster_health.replay import recorder

if TYPE_CHECKING:
    from muster.kubernetes import api
    from muster_health.kubernetes import watches

_POST_S: Final = 5.0


async def serve(settings: config.Settings) -> None:
    """Serve until SIGTERM."""
    logs.configure("health", level=settings.log.level)
    async with contextlib.AsyncExitStack() as stack:
        api = await _api(settings.cluster, stack)
        watched = _detector(settings, has_cluster=api is not None)
        connected = await stack.enter_async_context(_bus(settings))
        name = f"muster-health {connected.instance}"
        leading = await stack.enter_async_context(_lock(connected, settings.leading, name))
        beats = await stack.enter_async_context(
            heartbeat_stream.HeartbeatStream(settings.bus.url, name=name)
        )
        inbox: inputs.Inbox = asyncio.Queue(runtime.INBOX_MAX)
        hears = inputs.Inputs(connected.link, beats, leading, inbox)
        link = nats_connections.Link(
            connected.listen, connected.link.probe_connect, connected.link.changes
        )
        advised = nats_connections.Connections(link, hears.put, name=name)
        asks = bus_probes.Prober(connected, hears.put, at_once_max=settings.detection.probes_max)
        stack.push_async_callback(asks.close)
        post = functools.partial(api.post, timeout_s=_POST_S) if api else None
        alarms = out_of_band_alarm.Alarms(settings.blind, name=name, post=post)
        seen = _cluster(api, settings.cluster, hears.put) if api else None
        does = outputs.Outputs(connected, leading, hears.put, probes=asks, alarms=alarms, seen=seen)
        driven: machine.Machine[signals.Input, signals.Output] = watched
        if settings.recording.file:
            driven = _recorded(watched, settings, stack, has_cluster=api is not None)
        state = _State(watched, leading, advised, does, seen)
        address = await stack.enter_async_context(
            probes.serve(
                settings.http.host,
                settings.http.port,
                ready=lambda: connected.link.problem() or does.problem() or leading.problem(),
                more={"/state": state.show},
            )
        )
        logs.logger().info("listening", http=address)
        if api is None:
            logs.logger().info("no_cluster", reason="no kubeconfig is given, and this is no pod")
        await runtime.run(
            runtime.drive(driven, inbox, does.act),
            leading.failed(),
            hears.listen(),
            does.lanes.run(),
            does.memory.run(),
            advised.run(),
            alarms.run(),
            watchdog.tick(
                leading,
                does.tick,
                holder=name,
                interval_s=settings.leading.watchdog_s,
                leads=lambda revision: watched.leader == revision,
            ),
            watchdog.mind(
                does.lanes.stuck_s, alarms.tell, is_blind=lambda: watched.is_disconnected
            ),
            *([seen.run()] if seen else []),
        )


def _detector(settings: config.Settings, *, has_cluster: bool) -> detector.Detector:
    clock = asyncio.get_running_loop().time
    made = detector.Detector(
        settings.detection,
        runbook_url=settings.runbook_url,
        at_zero=datetime.now(UTC) - timedelta(seconds=clock()),
        bounds=settings.bounds,
        restarts=settings.remediation,
        has_cluster=has_cluster,
        leader=None,
    )
    prometheus_client.REGISTRY.register(metrics.Holdings(made))
    return made


def _bus(settings: config.Settings) -> bus.Bus:
    return bus.Bus(
        settings.bus.url,
        producer="services/health",
        name="muster-health",
        owner=True,
        replicas=settings.streams.replicas,
    )


async def _api(settings: config.Cluster, stack: contextlib.AsyncExitStack) -> "api.Api | None":
    """Return the Kubernetes API, or None where there is none. Raises CannotStart."""
    if settings.kubeconfig is None and not os.environ.get("KUBERNETES_SERVICE_HOST"):
        return None
    # aiohttp keeps the classes that it finds
    lean.fully("ssl")
    from muster.kubernetes import api  # noqa: PLC0415  # 20 MiB that are not needed without a cluster

    try:
        found = await api.find(kubeconfig=settings.kubeconfig, context=settings.context)
    except api.NoCluster as error:
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


def _cluster(api: "api.Api", settings: config.Cluster, put: inputs.Put) -> "watches.Cluster":
    from muster_health.kubernetes import watches  # noqa: PLC0415  # as above

    return watches.Cluster(api, settings, put)


def _lock(connected: bus.Bus, settings: config.Leading, name: str) -> lock.Lock:
    key = lock.Key(connected.link, streams.LEADER, "health")
    timing = lock.Timing(ttl_s=settings.ttl_s, renew_s=settings.renew_s, margin_s=settings.margin_s)
    return lock.Lock(
        key, us=lock.this_process(name), timing=timing, on_change=verdict_log.log_leadership
    )


class _State:
    """What is known, for people: /state."""

    def __init__(
        self,
        watched: detector.Detector,
        leading: lock.Lock,
        advised: nats_connections.Connections,
        does: outputs.Outputs,
        seen: "watches.Cluster | None",
    ) -> None:
        self._watched = watched
        self._leading = leading
        self._advised = advised
        self._does = does
        self._seen = seen

    def show(self) -> probes.Answer:
        """Return it as JSON."""
        now = asyncio.get_running_loop().time()
        shown = {
            "plugins": [view.of(found, now) for found in self._watched.plugins()],
            "fleet": {
                "alerts": list(self._watched.fleet_alerts()),
                "storms": self._watched.mass_failures,
                "suspects": self._watched.suspects,
                "held": self._watched.held,
            },
            "service": {
                "leads": self._leading.term(),
                "leader": self._leading.current.leader,
                "blind": self._watched.is_disconnected,
                "position": self._watched.position,
                "advisories": self._advised.problem or "they come",
                "telling": self._does.problem() or "",
                "cluster": self._seen.problems if self._seen else "none at hand",
            },
        }
        return 200, "application/json", msgspec.json.encode(shown)


def main() -> int:
    """Run the health service; return the exit code."""
    return entry.main("health", config.Settings, serve)


if __name__ == "__main__":
    sys.exit(main())
