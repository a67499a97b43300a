"""Adapter: the process: inventories come, labels are suggested or applied."""

import contextlib
import functools
import os
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

from muster import codec, leadership, vocabulary
from muster.kubernetes import api, lease, watch
from muster.nats import bus, connection, consumers, jetstream, streams
from muster.service import entry, logs, probes, runtime
from muster_labeler import config
from muster_labeler.kubernetes import cluster_api, pace, projection
from muster_labeler.service import decision_publisher, reconciler

_INVENTORIES: Final = "muster.event.*.*.inventory.reported"
_VERDICTS: Final = "muster.verdict.*.*.verdict.changed"
_STREAMS: Final = {_INVENTORIES: streams.EVENTS, _VERDICTS: streams.ALERTS}
_OVERLAP: Final = timedelta(seconds=5)
"""What is followed begins before what was newest was read; what comes twice is known."""
_ATTEMPTS: Final = 4
_IN_A_POD: Final = "KUBERNETES_SERVICE_HOST"


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
                return "NATS is away"
            reading = None if labeler.is_restored else "the inventories are being read"
            return connected.link.problem() or reading

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
    where = settings.kubernetes
    if where.kubeconfig is None and _IN_A_POD not in os.environ:
        if settings.mode is config.Mode.APPLY:
            raise entry.CannotStart(
                "mode apply: no Kubernetes API: this is no pod, and no kubernetes.kubeconfig is set"
            )
        return None
    try:
        return await api.find(
            kubeconfig=where.kubeconfig, context=where.context, attempts=_ATTEMPTS
        )
    except api.NoCluster as error:
        raise entry.CannotStart(str(error)) from None


def _labeler(
    settings: config.Settings, connected: bus.Bus, kubernetes: api.Api | None
) -> reconciler.Reconciler:
    cluster = None
    if kubernetes is not None:
        where, turns = settings.kubernetes, pace.WritePace(settings.policy.writes_per_s)
        keep = functools.partial(projection.read_node, selector=settings.policy.nodes)

        def elect(on_change: leadership.OnChange) -> lease.Lease:
            return lease.Lease(
                kubernetes,
                namespace=where.namespace,
                name=settings.lease.name,
                duration_s=settings.lease.lasts_s,
                on_change=on_change,
            )

        cluster = reconciler.Cluster(
            node_api=cluster_api.NodeApi(kubernetes, turns, timeout_s=where.timeout_s),
            pace=turns,
            log_missing_permissions=lambda: cluster_api.log_missing_permissions(
                kubernetes, _rights(settings), timeout_s=where.timeout_s
            ),
            records=decision_publisher.ClusterRecords(
                kubernetes, turns, namespace=where.namespace, timeout_s=where.timeout_s
            ),
            reflector=lambda sink: watch.Reflector(
                kubernetes,
                cluster_api.NODES_PATH,
                msgspec.Raw,
                watch.Sink(keep, sink.replace, sink.put, lambda node: sink.drop(node.name)),
            ),
            elect=elect if settings.lease.enabled else None,
        )
    return reconciler.Reconciler(settings, _ears(settings, connected), cluster)


def _rights(settings: config.Settings) -> list[cluster_api.Permission]:
    """Return the rights without which these settings cannot be followed."""
    own = settings.kubernetes.namespace
    rights = [cluster_api.Permission(verb, "nodes") for verb in ("get", "list", "watch")]
    if settings.mode is config.Mode.APPLY:
        rights.append(cluster_api.Permission("patch", "nodes"))
    if settings.condition:
        rights.append(cluster_api.Permission("patch", "nodes/status"))
    if settings.kubernetes.events:
        rights.append(cluster_api.Permission("create", "events", namespace="default"))
    if settings.lease.enabled:
        group = "coordination.k8s.io"
        rights.append(cluster_api.Permission("create", "leases", group, own))
        # the role names the one Lease
        name = settings.lease.name
        rights += [
            cluster_api.Permission(verb, "leases", group, own, name) for verb in ("get", "update")
        ]
    return rights


def _ears(settings: config.Settings, connected: bus.Bus) -> reconciler.Bus:
    since = datetime.now(UTC) - _OVERLAP
    kinds = [_INVENTORIES, *([_VERDICTS] if settings.condition else [])]

    async def newest() -> AsyncIterator[codec.CloudEvent]:
        for kind in kinds:
            async for event in _newest(connected, kind):
                yield event

    def follow(kind: str) -> AsyncIterator[codec.CloudEvent]:
        return consumers.follow(connected.link, _STREAMS[kind], filters=[kind], since=since)

    async def publish(event: vocabulary.Event, event_id: str) -> None:
        await connected.publish(event, event_id=event_id)

    return reconciler.Bus(
        newest=newest, follow=[functools.partial(follow, kind) for kind in kinds], publish=publish
    )


async def _newest(connected: bus.Bus, kind: str) -> AsyncIterator[codec.CloudEvent]:
    """Give the newest event of each subject, one by one: ten thousand at once cost 90 MiB.

    Begins again when the link breaks; what comes twice is known.
    """
    stream = _STREAMS[kind].name
    patience = jetstream.ReadRetry(connected.link, stream)
    while True:
        client = await connected.link.client()
        try:
            pulled = jetstream.pull(
                client,
                stream,
                jetstream.newest_of_each(kind),
                until_empty=True,
                served=patience.reset,
            )
            async with contextlib.aclosing(pulled) as messages:
                async for message in messages:
                    # what cannot be believed is counted and set aside where it is followed
                    with contextlib.suppress(codec.MalformedEvent):
                        position = message.metadata.sequence.stream
                        yield codec.decode(message.subject, message.data, position=position)
        except (jetstream.ConsumerLost, *connection.LOST) as error:
            await patience.wait(error)
        else:
            return


if __name__ == "__main__":
    sys.exit(main())
