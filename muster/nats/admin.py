"""Adapter: JetStream: creates streams and buckets, and removes abandoned consumers."""

import contextlib
import time
from typing import Final

import nats.js.errors
from nats.aio.client import Client
from nats.js import api

from muster.nats import streams
from muster.service import runtime

_OTHER_CONFIGURATION: Final = 10058
"""nats-server's JSStreamNameExistErr: the stream is there with another configuration."""
_DUPLICATES_S: Final = 120.0
_EPHEMERAL_S: Final = 600.0
"""How long an ephemeral consumer may outlive its user; ours last 30 s."""


async def create_streams(client: Client, *, replicas: int = 1) -> None:
    """Create what is missing and update what differs; several processes may do so at once.

    The number of replicas is never reduced: a process with another setting would undo ours.
    """
    jetstream = client.jetstream()
    for stream in streams.STREAMS:
        config = api.StreamConfig(
            name=stream.name,
            subjects=list(stream.subjects),
            max_age=stream.age_max_s,
            max_bytes=stream.bytes_max,
            max_msgs_per_subject=stream.per_subject_max,
            max_msg_size=stream.message_bytes_max,
            duplicate_window=stream.duplicate_window_s,
            num_replicas=replicas,
            storage=api.StorageType.FILE,
            retention=(
                api.RetentionPolicy.WORK_QUEUE if stream.is_queue else api.RetentionPolicy.LIMITS
            ),
            discard=api.DiscardPolicy.NEW if stream.is_queue else api.DiscardPolicy.OLD,
            compression=api.StoreCompression.S2,
            allow_direct=True,
            allow_rollup_hdrs=stream.rolls_up,
        )
        try:
            await jetstream.add_stream(config)
        except nats.js.errors.BadRequestError as error:
            if error.err_code != _OTHER_CONFIGURATION:
                raise
            replicas_now = (await jetstream.stream_info(stream.name)).config.num_replicas or 1
            await jetstream.update_stream(config.evolve(num_replicas=max(replicas, replicas_now)))
    for bucket in streams.BUCKETS:
        try:
            existing = (await jetstream.stream_info(f"KV_{bucket.name}")).config
            if (existing.num_replicas or 1) < replicas:
                await jetstream.update_stream(existing.evolve(num_replicas=replicas))
        except nats.js.errors.NotFoundError:
            await _create_bucket(client, bucket, replicas=replicas)


async def _create_bucket(client: Client, bucket: streams.Bucket, *, replicas: int) -> None:
    """Create a bucket as nats-py does (client.py, create_key_value; 2.16), with a first revision.

    The revisions of a lock must not restart with the bucket: a process that remembers a revision of
    a lost bucket would take every later holder for an earlier one. So they start at the time in ms,
    which grows faster than any claims; only setting the clock back by more than the lost bucket's
    age breaks this.
    """
    config = api.StreamConfig(
        name=f"KV_{bucket.name}",
        subjects=[f"$KV.{bucket.name}.>"],
        max_age=bucket.age_max_s,
        max_bytes=bucket.bytes_max,
        max_msgs_per_subject=1,
        max_msg_size=bucket.value_bytes_max,
        duplicate_window=_DUPLICATES_S,
        num_replicas=replicas,
        discard=api.DiscardPolicy.NEW,
        allow_rollup_hdrs=True,
        allow_msg_ttl=True,
        deny_delete=True,
        first_seq=int(time.time() * 1000) if bucket.is_lock else None,
    )
    try:
        await client.jetstream().add_stream(config)
    except nats.js.errors.BadRequestError as error:
        # another process was faster
        if error.err_code != _OTHER_CONFIGURATION:
            raise


async def sweep(client: Client) -> int:
    """Remove ephemeral consumers that would long outlive their users; return how many.

    nats-server allows 1,000 for each stream, whoever created them (2.15). Raises what nats-py
    raises.
    """
    removed = 0
    for stream in (streams.EVENTS, streams.ALERTS):
        for name in await _abandoned(client, stream.name):
            # the server may have removed it first
            with contextlib.suppress(nats.js.errors.NotFoundError):
                removed += await client.jetstream().delete_consumer(stream.name, name)
            runtime.end_if_cancelled()
    return removed


async def _abandoned(client: Client, stream: str) -> list[str]:
    consumers: list[api.ConsumerInfo] = []
    while True:
        page = await client.jetstream().consumers_info(stream, offset=len(consumers))
        runtime.end_if_cancelled()
        consumers += page
        if not page:
            break
    return [
        consumer.name
        for consumer in consumers
        if not consumer.config.durable_name
        and (consumer.config.inactive_threshold or 0) > _EPHEMERAL_S
    ]
