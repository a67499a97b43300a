"""Adapter: the process: wires bus, Kubernetes API and reconciler together."""

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
from muster.nats import bus, connection, consumers, jetstream, streams
from muster.service import entry, logs, probes, runtime
from muster_labeler import config
from muster_labeler.kubernetes import cluster_api
from muster_labeler.service import decision_publisher, limits, reconciler, stream_reader

_INVENTORIES: Final = "muster.event.*.*.inventory.reported"
_VERDICTS: Final = "muster.verdict.*.*.verdict.changed"
_OVERLAP: Final = timedelta(seconds=5)
"""Events are followed from this long before the newest are read; duplicates do no harm."""
_ONCE_S: Final = 2.0
"""How long the server keeps the consumer that reads one node; it allows a limited number."""
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
                "mode apply: no Kubernetes API: not in a pod, and kubernetes.kubeconfig is not set"
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
    """Return the permissions that these settings need."""
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
        # the role allows only this Lease
        name = settings.lease.name
        permissions += [
            cluster_api.Permission(verb, "leases", group, namespace, name)
            for verb in ("get", "update")
        ]
    return permissions


def _bus(settings: config.Settings, connected: bus.Bus) -> stream_reader.Bus:
    since = datetime.now(UTC) - _OVERLAP
    kinds = [_INVENTORIES, *([_VERDICTS] if settings.condition else [])]

    async def newest(wants: stream_reader.Wants, node: str) -> AsyncIterator[codec.CloudEvent]:
        for kind in kinds:
            subject = kind.replace("*", vocabulary.node_token(node), 1) if node else kind
            read_max = limits.PLUGINS_MAX if node else None
            async for event in _newest(connected, subject, wants, read_max=read_max):
                yield event

    def follow(kind: str, wants: stream_reader.Wants) -> AsyncIterator[codec.CloudEvent]:
        return consumers.follow(
            connected.link, _stream(kind), filters=[kind], since=since, wants=wants
        )

    async def publish(event: vocabulary.Event, event_id: str) -> None:
        await connected.publish(event, event_id=event_id)

    return stream_reader.Bus(
        newest=newest, follow=[functools.partial(follow, kind) for kind in kinds], publish=publish
    )


def _stream(subject: str) -> streams.Stream:
    stream = streams.stream_of(subject)
    assert stream is not None, f"{subject}: in no stream"
    return stream


async def _newest(
    connected: bus.Bus, subject: str, wants: stream_reader.Wants, *, read_max: int | None
) -> AsyncIterator[codec.CloudEvent]:
    """Yield the newest event of each subject, one at a time: ten thousand at once take 90 MiB.

    Starts over when the connection breaks; duplicates do no harm. Ends after `read_max` messages.
    """
    stream = _stream(subject).name
    retry = jetstream.ReadRetry(connected.link, stream)
    newest = jetstream.newest_of_each(subject)
    if read_max is not None:
        newest = newest.evolve(inactive_threshold=_ONCE_S)
    while True:
        client = await connected.link.client()
        try:
            pulled = jetstream.pull(client, stream, newest, until_empty=True, served=retry.reset)
            async with contextlib.aclosing(pulled) as messages:
                read = 0
                async for message in messages:
                    position, left = message.metadata.sequence.stream, message.metadata.num_pending
                    # malformed events are counted where events are followed
                    with contextlib.suppress(codec.MalformedEvent):
                        if wants(message.subject, left):
                            yield codec.decode(message.subject, message.data, position=position)
                    read += 1
                    if read == read_max:
                        return
        except (jetstream.ConsumerLost, *connection.LOST) as error:
            await retry.wait(error)
        else:
            return


if __name__ == "__main__":
    sys.exit(main())
