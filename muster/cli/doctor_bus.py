"""Adapter for NATS: reads the state of the bus for `muster doctor`.

Only an administrator may use `stores`, `consumers_of_alerts` and `leaders`. Some functions have no
timeout, so the caller limits the time. Errors of nats-py are passed on.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Final

from muster import codec, vocabulary
from muster.cli.doctor_facts import LOCKS, WELL, Broken, Leader, NotSeen, Receivers
from muster.fleet import dead_letters, health_state
from muster.nats import bus, connection, consumers, jetstream, leader_lock, stream_info, streams

_RIGHTS_S: Final = 2.0
"""How long to wait for an answer that only an administrator receives."""
_REFUSED_MAX: Final = 50
_PLUGINS_MAX: Final = 100_000
_LISTEN_S: Final = 6.0
_INTERVALS: Final = 1.5
"""`plugins` listens for this many times the longest heartbeat interval, plus 1 s."""


async def has_all_rights(connected: bus.Bus) -> bool:
    """Return whether NATS answers a request that only an administrator may send."""
    live = await connected.link.client()
    try:
        await stream_info.describe(live, f"KV_{streams.LEADER.name}", timeout_s=_RIGHTS_S)
    except connection.LOST:
        return False
    return True


async def stores(connected: bus.Bus, *, timeout_s: float) -> Mapping[str, streams.Usage | None]:
    """Return the usage of each stream and bucket; None for one that does not exist."""
    live = await connected.link.client()
    names = [stream.name for stream in streams.STREAMS]
    names += [f"KV_{bucket.name}" for bucket in streams.BUCKETS]
    described = await asyncio.gather(
        *(stream_info.describe(live, name, timeout_s=timeout_s) for name in names)
    )
    return dict(zip(names, described, strict=True))


async def consumers_of_alerts(connected: bus.Bus, *, timeout_s: float) -> Sequence[streams.Durable]:
    """Return the durable consumers of alerts and of the outbox."""
    live = await connected.link.client()
    return [
        durable
        for stream in (streams.ALERTS, streams.OUTBOX)
        for durable in await stream_info.durables(live, stream.name, timeout_s=timeout_s)
    ]


async def leaders(connected: bus.Bus) -> Mapping[str, Leader | None]:
    """Return the holder of each service's lock; None if there is no holder."""
    live = await connected.link.client()
    leaders: dict[str, Leader | None] = {}
    for service, bucket in LOCKS.items():
        subject = f"$KV.{bucket.name}.{service}"
        claim = await jetstream.last(live, f"KV_{bucket.name}", subject)
        holder = leader_lock.decode_holder(claim.data or b"") if claim else None
        leaders[service] = Leader(f"{holder.host} (process {holder.pid})") if holder else None
    return leaders


async def receivers(connected: bus.Bus) -> Receivers | None:
    """Return the receivers that the notifier last published; None if no list is stored."""
    event = await consumers.receivers(connected.link)
    if event is None:
        return None
    live = await connected.link.client()
    letters = await jetstream.subjects(live, streams.DEAD_LETTERS.name, dead_letters.NOTIFICATIONS)
    dead = {subject.split(".")[3] for subject in letters}
    return Receivers(event.receivers, event.refused, sorted(dead & set(event.receivers)))


async def refused(connected: bus.Bus) -> Mapping[str, str]:
    """Return the first problem of up to 50 plugins whose last configuration was refused."""
    subject = vocabulary.ConfigurationRefused.SUBJECT.format(node="*", plugin="*")
    stream, live = streams.EVENTS.name, await connected.link.client()
    refused: dict[str, str] = {}
    stored = await jetstream.newest(connected.link, stream, subject)
    for message in reversed(stored[-_REFUSED_MAX:]):
        try:
            event = codec.decode(message.subject, message.data)
        except codec.MalformedEvent:
            continue
        assert isinstance(event.data, vocabulary.ConfigurationRefused), "by its subject"
        position = message.metadata.sequence.stream
        prefix = message.subject.removesuffix(vocabulary.ConfigurationRefused.TYPE)
        applied = await jetstream.last(live, stream, prefix + vocabulary.ConfigurationApplied.TYPE)
        started = await jetstream.last(live, stream, prefix + vocabulary.PluginStarted.TYPE)
        if applied is not None and (applied.seq or 0) > position:
            continue
        if started is not None and (started.seq or 0) > position:
            with contextlib.suppress(codec.MalformedEvent):
                process = codec.decode(started.subject or "", started.data or b"").instance
                if process != event.instance:
                    continue  # the plugin has started with a configuration that it accepts
        problem = next(iter(event.data.problems), "it gave no reason")
        refused[f"{event.data.node} {event.data.plugin}"] = problem
    return refused


async def plugins(
    connected: bus.Bus, fleet: health_state.State | Broken | NotSeen
) -> Mapping[str, str]:
    """Return the version of each plugin whose heartbeat arrives while this function listens.

    It listens until all healthy plugins have sent a heartbeat or should have sent one, but at most
    `_LISTEN_S`.
    """
    listen_s, expected = _LISTEN_S, set[tuple[str, str]]()
    if isinstance(fleet, health_state.State):
        well = [p for p in fleet.plugins if p.verdict in WELL and not p.watched]
        expected = {(plugin.node, plugin.plugin) for plugin in well}
        interval_s = max((plugin.interval_s for plugin in well), default=0.0)
        listen_s = min(_LISTEN_S, 1.0 + _INTERVALS * interval_s)
    versions: dict[tuple[str, str], str] = {}
    is_complete = asyncio.Event()

    async def receive(heartbeat: vocabulary.Heartbeat) -> None:
        if len(versions) < _PLUGINS_MAX:
            versions[heartbeat.node, heartbeat.plugin] = heartbeat.version
        if expected and expected <= versions.keys():
            is_complete.set()

    await connected.heartbeats(receive)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(listen_s):
            await is_complete.wait()
    return {f"{plugin} on {node}": version for (node, plugin), version in versions.items()}
