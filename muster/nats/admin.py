"""Adapter: JetStream: makes streams and buckets, and removes what others leave behind in them."""

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
_PASSING_S: Final = 600.0
"""So long at most a consumer without a name may outlive its user; ours take 30 s."""


async def create_streams(client: Client, *, replicas: int = 1) -> None:
    """Make what is missing and bring what differs up to date; several may do so at once.

    Nothing gets fewer replicas than it has: who was not told of them would take them from the rest.
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
            there = (await jetstream.stream_info(stream.name)).config.num_replicas or 1
            await jetstream.update_stream(config.evolve(num_replicas=max(replicas, there)))
    for bucket in streams.BUCKETS:
        try:
            found = (await jetstream.stream_info(f"KV_{bucket.name}")).config
            if (found.num_replicas or 1) < replicas:
                await jetstream.update_stream(found.evolve(num_replicas=replicas))
        except nats.js.errors.NotFoundError:
            await _create_bucket(client, bucket, replicas=replicas)


async def _create_bucket(client: Client, bucket: streams.Bucket, *, replicas: int) -> None:
    """Make a bucket as nats-py does (client.py, create_key_value; 2.16), but for where it begins.

    The revisions of a lock must not begin anew with the bucket: whoever remembers one of a bucket
    that was lost would take every later holder for a former one. So they begin with the time, which
    no claims outrun; only a clock that is set back further than the lost bucket was old undoes it.
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
        # another was faster, and began a moment earlier
        if error.err_code != _OTHER_CONFIGURATION:
            raise


async def sweep(client: Client) -> int:
    """Remove passing consumers that would stay long after whoever made them; return how many.

    nats-server takes 1,000 for each stream, from whoever may read it, and then no more from anybody
    (2.15). Raises what nats-py raises.
    """
    removed = 0
    for stream in (streams.EVENTS, streams.ALERTS):
        for name in await _left_behind(client, stream.name):
            # its own time may have come first
            with contextlib.suppress(nats.js.errors.NotFoundError):
                removed += await client.jetstream().delete_consumer(stream.name, name)
            runtime.end_if_cancelled()
    return removed


async def _left_behind(client: Client, stream: str) -> list[str]:
    found: list[api.ConsumerInfo] = []
    while True:
        some = await client.jetstream().consumers_info(stream, offset=len(found))
        runtime.end_if_cancelled()
        found += some
        if not some:
            break
    return [
        one.name
        for one in found
        if not one.config.durable_name and (one.config.inactive_threshold or 0) > _PASSING_S
    ]
