"""Adapter: runs the labeler: connects the bus, the Kubernetes API and the reconciler."""

from muster.service import start  # isort: skip  # before everything else

import contextlib
import functools
import os
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

from muster import codec, leadership, vocabulary
from muster.kubernetes import api, lease
from muster.nats import bus, consumers, streams
from muster.service import entry, logs, probes, runtime
from muster_labeler import config
from muster_labeler.kubernetes import cluster_api
from muster_labeler.service import decision_publisher, limits, reconciler, stream_reader

start.end_imports()

_INVENTORIES: Final = vocabulary.subject_filters(vocabulary.InventoryReported.TYPE)
"""The subject filters of inventories; plugins of earlier versions use another subject."""
_VERDICTS: Final = vocabulary.subject_filters(vocabulary.VerdictChanged.TYPE)
_OVERLAP: Final = timedelta(seconds=5)
"""Events from this period before the start are read as new ones; duplicates do no harm."""
_ATTEMPTS: Final = 4
_POD_MARK: Final = "KUBERNETES_SERVICE_HOST"


def main() -> int:
    """Run the labeler; return its exit code."""
    return entry.main("labeler", config.Settings, _serve)


async def _serve(settings: config.Settings) -> None:
    logs.configure("labeler", level=settings.log.level)
    async with contextlib.AsyncExitStack() as open_:
        kubernetes = await _kubernetes(settings)
        if kubernetes is not None:
            await open_.enter_async_context(kubernetes)
        connected = await open_.enter_async_context(
            bus.Bus(
                settings.bus.url,
                producer="services/labeler",
                name="labeler",
            )
        )
        labeler = _labeler(settings, connected, kubernetes)

        def problem() -> str | None:
            if not connected.link.is_connected:
                return "not connected to NATS"
            return connected.link.problem() or labeler.problem()

        def state() -> probes.Answer:
            return 200, "application/json", msgspec.json.encode({"nodes": labeler.view()})

        address = await open_.enter_async_context(
            probes.serve(
                settings.http.host, settings.http.port, ready=problem, more={"/state": state}
            )
        )
        logs.logger().info("listening", http=address)
        await runtime.run(labeler.run())


async def _kubernetes(settings: config.Settings) -> api.Api | None:
    if settings.mode is config.Mode.OFF:
        return None
    options = settings.kubernetes
    if options.kubeconfig is None and _POD_MARK not in os.environ:
        if settings.mode is config.Mode.APPLY:
            raise entry.CannotStart(
                "mode apply needs a Kubernetes API; run the labeler in a pod, or set "
                "kubernetes.kubeconfig"
            )
        return None
    try:
        return await api.find(
            kubeconfig=options.kubeconfig, context=options.context, attempts=_ATTEMPTS
        )
    except api.NoCluster as error:
        raise entry.CannotStart(str(error)) from None


def _labeler(
    settings: config.Settings, connected: bus.Bus, kubernetes: api.Api | None
) -> reconciler.Reconciler:
    cluster = None
    if kubernetes is not None:
        options = settings.kubernetes
        write_pace = cluster_api.WritePace(settings.policy.writes_per_s)

        def elect(on_change: leadership.OnChange) -> lease.Lease:
            return lease.Lease(
                kubernetes,
                namespace=options.namespace,
                name=settings.lease.name,
                duration_s=settings.lease.lasts_s,
                on_change=on_change,
            )

        cluster = reconciler.Cluster(
            api=kubernetes,
            node_api=cluster_api.NodeApi(kubernetes, write_pace, timeout_s=options.timeout_s),
            pace=write_pace,
            log_missing_permissions=lambda: cluster_api.log_missing_permissions(
                kubernetes, _permissions(settings), timeout_s=options.timeout_s
            ),
            records=decision_publisher.ClusterRecords(
                kubernetes, write_pace, namespace=options.namespace, timeout_s=options.timeout_s
            ),
            elect=elect if settings.lease.enabled else None,
        )
    return reconciler.Reconciler(settings, _bus(settings, connected), cluster)


def _permissions(settings: config.Settings) -> list[cluster_api.Permission]:
    """Return the permissions that the settings require."""
    namespace = settings.kubernetes.namespace
    permissions = [cluster_api.Permission(verb, "nodes") for verb in ("get", "list", "watch")]
    if settings.mode is config.Mode.APPLY:
        permissions.append(cluster_api.Permission("patch", "nodes"))
    if settings.condition:
        permissions.append(cluster_api.Permission("patch", "nodes/status"))
    if settings.kubernetes.events:
        permissions.append(cluster_api.Permission("create", "events", namespace="default"))
    if settings.lease.enabled:
        group = "coordination.k8s.io"
        permissions.append(cluster_api.Permission("create", "leases", group, namespace))
        # the Role allows access to this Lease only
        name = settings.lease.name
        permissions += [
            cluster_api.Permission(verb, "leases", group, namespace, name)
            for verb in ("get", "update")
        ]
    return permissions


def _bus(settings: config.Settings, connected: bus.Bus) -> stream_reader.Bus:
    since = datetime.now(UTC) - _OVERLAP
    subjects = (*_INVENTORIES, *(_VERDICTS if settings.condition else ()))

    async def newest(wants: stream_reader.Wants, node: str) -> AsyncIterator[codec.CloudEvent]:
        for each in subjects:
            subject = each.replace("*", vocabulary.node_token(node), 1) if node else each
            async for event in consumers.each_newest(
                connected.link,
                streams.required(subject),
                subject,
                wants=wants,
                read_max=limits.MESSAGES_MAX if node else None,
            ):
                yield event

    def follow(subject: str, wants: stream_reader.Wants) -> AsyncIterator[codec.CloudEvent]:
        stream = streams.required(subject)
        return consumers.follow(connected.link, stream, filters=[subject], since=since, wants=wants)

    async def publish(event: vocabulary.Event, event_id: str) -> None:
        await connected.publish(event, event_id=event_id)

    return stream_reader.Bus(
        newest=newest,
        follow=[functools.partial(follow, each) for each in subjects],
        publish=publish,
    )


if __name__ == "__main__":
    sys.exit(main())
