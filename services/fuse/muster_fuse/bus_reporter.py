"""Adapter for NATS and HTTP: reports on the broker to the bus, Kubernetes probes and Prometheus."""

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, assert_never

import muster
from muster import pacing, vocabulary, wording
from muster.nats import heartbeat_sender
from muster.nats.auth import permissions
from muster.service import logs, probes
from muster_fuse import config, metrics
from muster_fuse.broker import observations
from muster_fuse.request import caller
from muster_fuse.volume import publication
from muster_fuse.watch import mounts

_DIGITS: Final = 2
_NEVER_S: Final = -1.0
_PROBLEMS_MAX: Final = 20
_OFTEN_PER_S: Final = 20.0
_OFTEN_BURST: Final = 200
"""The largest burst of events that pods can cause; after that, `_OFTEN_PER_S` applies.

The gates refuse a node that sends 100 messages a second.
"""
_STARTING: Final = vocabulary.Phase.STARTING


class BusReporter:
    """Reports on a node's broker, which calls `observe` with its actions and observations."""

    plugin: Final = permissions.FUSE_BROKER
    resources: Final = (publication.DRIVER,)

    def __init__(self, chosen: config.Settings, node: str, *, stopping: asyncio.Event) -> None:
        self.name = node
        self.config_hash = chosen.hash
        self.heartbeat_due = asyncio.Event()
        self._chosen = chosen
        self._stopping = stopping
        self._started_at = time.monotonic()
        self._often = pacing.TokenBucket(
            per_s=_OFTEN_PER_S, burst=_OFTEN_BURST, now=self._started_at
        )
        self._publish: Callable[[vocabulary.Event], None] = _dropped
        self._parts: metrics.Parts | None = None
        self._reporter = heartbeat_sender.Reporter(
            self,
            url=chosen.bus.url,
            interval_s=chosen.heartbeat.interval_s,
            snapshot_period_s=chosen.snapshot_period_s,
            started_at=self._started_at,
        )

    async def run(self, parts: metrics.Parts) -> None:
        """Connect, and report until cancelled."""
        self._parts = parts
        metrics.register(parts, lambda: self._reporter.heartbeat_at)
        http = self._chosen.http
        async with (
            probes.serve(
                http.host, http.port, ready=self._not_ready, healthy=self._stuck
            ) as address,
            asyncio.TaskGroup() as tasks,
        ):
            logs.logger().info("listening", http=address)
            for changed in (parts.check.changed, parts.offered.changed):
                tasks.create_task(self._send_heartbeat_on(changed))
            tasks.create_task(self._publish_mounts())
            await self._reporter.report(until=asyncio.Event())

    def observe(self, observation: observations.Observation) -> None:
        """Publish, count and log an action or observation of the broker."""
        if not observation.pod.namespace:
            # the self-check's own mount, which is reported separately
            return
        event = self._event(observation, datetime.now(UTC))
        # mounts and their conditions are in the inventory as well, ended connections are not
        is_frequent = not (
            isinstance(observation, observations.Aborted) and observation.pod_has_ended
        )
        if is_frequent and not self._often.try_take(time.monotonic()):
            metrics.UNPUBLISHED.inc()
            return
        self._publish(event)

    # The reported plugin, as `heartbeat_sender.Plugin`

    def heartbeat(self, sender: heartbeat_sender.Sender) -> vocabulary.Heartbeat:
        """Return the broker's current status."""
        parts, now = self._present, time.monotonic()
        phase = vocabulary.Phase.SERVING if parts.offered.registrations else _STARTING
        return vocabulary.Heartbeat(
            node=self.name,
            plugin=self.plugin,
            instance=sender.instance,
            boot=sender.boot,
            version=muster.__version__,
            config_hash=self.config_hash,
            seq=sender.seq,
            interval_s=sender.interval_s,
            uptime_s=_age_s(self._started_at, now),
            wall=round(time.time(), _DIGITS),
            phase=vocabulary.Phase.DRAINING if sender.is_draining else phase,
            resources=(self._resource(parts, now),),
            checkers={
                "hello": _age_s(parts.check.answered_at, now),
                "mounts": _age_s(parts.broker.looked_at, now),
            },
            loop_lag_ms=sender.loop_lag_ms,
            reconnects=sender.reconnects,
            problems=_problems(parts),
        )

    def snapshot(self, at: datetime) -> vocabulary.InventoryReported:
        """Return an inventory of all mounts."""
        return vocabulary.InventoryReported(
            node=self.name,
            plugin=self.plugin,
            at=at,
            devices=(),
            resources=self.resources,
            fuse_mounts=self._mounts(),
        )

    def publish_to(self, publish: Callable[[vocabulary.Event], None]) -> None:
        """Use this function to publish all further events."""
        self._publish = publish

    def stop_reason(self) -> vocabulary.StopReason | None:
        """Return why the broker is stopping; None after a failure."""
        return vocabulary.StopReason.SIGNAL if self._stopping.is_set() else None

    @property
    def _present(self) -> metrics.Parts:
        assert self._parts is not None, "the broker is reported on only while it runs"
        return self._parts

    async def _send_heartbeat_on(self, changed: asyncio.Event) -> None:
        """Send a heartbeat immediately whenever its content has changed."""
        while True:
            await changed.wait()
            changed.clear()
            self.heartbeat_due.set()

    async def _publish_mounts(self) -> None:
        """Publish the mounts whenever a check shows that they have changed.

        There is no event for the end of a mount.
        """
        published: tuple[vocabulary.FuseMount, ...] = ()
        while True:
            await asyncio.sleep(self._chosen.limits.watch_s)
            if (mounts := self._mounts()) != published:
                published = mounts
                self._publish(self.snapshot(datetime.now(UTC)))

    def _mounts(self) -> tuple[vocabulary.FuseMount, ...]:
        parts = self._present
        return tuple(
            self._mount(mount, pod)
            for mount in parts.broker.mounts()
            if (pod := parts.served.pod(mount.pod_uid)) is not None
        )

    def _resource(self, parts: metrics.Parts, now: float) -> vocabulary.ResourceBeat:
        offered, check = parts.offered, parts.check
        is_sound = check.problem(now) is None
        return vocabulary.ResourceBeat(
            name=publication.DRIVER,
            registered_age_s=_age_s(offered.registered_at, now),
            streams=int(offered.registered_at is not None),
            registrations=offered.registrations,
            probe_ok=is_sound,
            probe_ms=round(check.seconds * 1000, _DIGITS),
            probe_age_s=_age_s(check.tested_at, now),
            devices=1,
            healthy=int(is_sound),
            allocated=parts.served.pods,
            problem=offered.problem,
            # a CSI driver adds nothing to the node's allocatable
            extended=False,
        )

    def _event(self, seen: observations.Observation, at: datetime) -> vocabulary.Event:
        node, plugin, pod = self.name, self.plugin, _shown(seen.pod)
        log = logs.logger()
        match seen:
            case observations.Mounted():
                metrics.MOUNTED.inc()
                mount = self._mount(seen.mount, seen.pod)
                log.info(
                    "file_system_mounted",
                    pod=pod,
                    mount_point=mount.mount_point,
                    source=mount.source,
                )
                return vocabulary.FuseMounted(node=node, plugin=plugin, at=at, mount=mount)
            case observations.Refused():
                metrics.REFUSED.labels(seen.reason).inc()
                log.warning("request_refused", pod=pod, reason=seen.reason, problem=seen.text)
                return vocabulary.FuseRefused(
                    node=node, plugin=plugin, at=at, pod=pod, reason=seen.reason, text=seen.text
                )
            case observations.Aborted():
                metrics.ABORTED.inc(seen.count)
                log.warning("connections_aborted", pod=pod, count=seen.count, reason=seen.reason)
                return vocabulary.FuseAborted(
                    node=node, plugin=plugin, at=at, pod=pod, count=seen.count, reason=seen.reason
                )
            case observations.ConditionChanged():
                log.log(
                    logging.WARNING if seen.holds else logging.INFO,
                    "mount_changed",
                    pod=pod,
                    mount_point=seen.mount.mount_point,
                    condition=seen.condition,
                    holds=seen.holds,
                    problem=seen.text,
                )
                return vocabulary.FuseMountChanged(
                    node=node,
                    plugin=plugin,
                    at=at,
                    mount=self._mount(seen.mount, seen.pod),
                    condition=seen.condition,
                    holds=seen.holds,
                    text=seen.text,
                )
            case _:
                assert_never(seen)

    def _mount(self, mount: mounts.Mount, pod: caller.Pod) -> vocabulary.FuseMount:
        # pods are served a moment before the broker is reported on
        conditions = self._parts.broker.conditions(mount) if self._parts else ()
        return vocabulary.FuseMount(
            id=mount.id,
            pod=_shown(pod),
            connection=mount.connection,
            source=mount.source,
            subtype=mount.subtype,
            mount_point=mount.mount_point,
            user_id=mount.user_id,
            conditions=conditions,
        )

    def _not_ready(self) -> str | None:
        parts = self._present
        if parts.served.is_hanging:
            return "a volume's file system could not be mounted or unmounted in time"
        return parts.offered.problem or parts.check.problem(time.monotonic())

    def _stuck(self) -> str | None:
        return self._reporter.stuck() or self._present.check.stuck(time.monotonic())


def _dropped(event: vocabulary.Event) -> None:
    """Drop an event: the bus is not connected yet, and an inventory will follow."""


def _problems(parts: metrics.Parts) -> tuple[str, ...]:
    problems = [f"pod {uid}: {text}" for uid, text in sorted(parts.served.problems.items())]
    if parts.mounter.stuck:
        problems.append(
            f"hanging in the kernel: {wording.counted(parts.mounter.stuck, 'mount or unmount job')}"
        )
    return tuple(problems[:_PROBLEMS_MAX])


def _shown(pod: caller.Pod) -> str:
    return f"{pod.namespace}/{pod.name}"


def _age_s(at: float | None, now: float) -> float:
    return _NEVER_S if at is None else round(max(0.0, now - at), _DIGITS)
