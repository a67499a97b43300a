"""Adapter: NATS: events out of a stream, each validated, across every outage.

Messages that cannot be believed are counted, and set aside with a reason by whoever works them off.
"""

import contextlib
import functools
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Final

from nats.js import api

from muster import codec
from muster.nats import connection, jetstream, streams
from muster.service import logs, runtime

_UNACKNOWLEDGED_MAX: Final = 1_000
_ACK_WAIT_S: Final = 30.0
_DETAIL_SHOWN_MAX: Final = 500


async def consume(
    link: connection.Connection,
    stream: streams.Stream,
    *,
    durable: str,
    filters: Sequence[str],
    ack_wait_s: float = _ACK_WAIT_S,
) -> AsyncIterator[runtime.Delivery[codec.CloudEvent]]:
    """Give every event from where this durable consumer stands, for ever.

    A message that cannot be believed is set aside among the dead letters and never seen here.
    What is not acknowledged within `ack_wait_s` comes again.
    """
    config = api.ConsumerConfig(
        name=durable,
        durable_name=durable,
        filter_subjects=list(filters),
        ack_policy=api.AckPolicy.EXPLICIT,
        ack_wait=ack_wait_s,
        max_ack_pending=_UNACKNOWLEDGED_MAX,
    )
    patience = jetstream.Patience(link, stream.name)
    while True:
        client = await link.client()
        try:
            async with contextlib.aclosing(
                jetstream.pull(client, stream.name, config, served=patience.reset)
            ) as messages:
                async for message in messages:
                    event = _decoded(message)
                    if isinstance(event, codec.MalformedEvent):
                        await _set_aside(link, message, durable, event)
                        await jetstream.ack(message)
                    else:
                        yield runtime.Delivery(event, functools.partial(jetstream.ack, message))
        except (jetstream.ConsumerLost, *connection.LOST) as error:
            await patience.wait(error)


async def follow(
    link: connection.Connection,
    stream: streams.Stream,
    *,
    filters: Sequence[str],
    since: datetime | None = None,
    after: int | None = None,
) -> AsyncIterator[codec.CloudEvent]:
    """Give every event from `since` (None: from now on), without gaps across reconnects.

    With `after` they begin behind that position of the stream; one that the stream has not come
    to yet is of another stream, and all of this one is given. Leaves nothing behind on the
    server. Unbelievable messages are counted and skipped.
    """
    config = api.ConsumerConfig(
        filter_subjects=list(filters),
        ack_policy=api.AckPolicy.NONE,
        deliver_policy=api.DeliverPolicy.BY_START_TIME,
        opt_start_time=since,
        inactive_threshold=jetstream.ABANDONED_S,
        mem_storage=True,
    )
    seen = -1
    created: datetime | None = None
    patience = jetstream.Patience(link, stream.name)
    while True:
        client = await link.client()
        try:
            info = await client.jetstream().stream_info(stream.name)
            if after is not None and seen < 0:
                seen = after if after <= info.state.last_seq else 0
            elif since is None and seen < 0:
                seen = info.state.last_seq
            elif created is not None and info.created != created:
                # a stream that was lost and made again counts from 1
                seen = 0
            created = info.created
            if seen >= 0:
                config.deliver_policy = api.DeliverPolicy.BY_START_SEQUENCE
                config.opt_start_time = None
                config.opt_start_seq = seen + 1
            async with contextlib.aclosing(
                jetstream.pull(client, stream.name, config, served=patience.reset)
            ) as messages:
                async for message in messages:
                    seen = message.metadata.sequence.stream
                    event = _decoded(message)
                    if isinstance(event, codec.CloudEvent):
                        yield event
        except (jetstream.ConsumerLost, *connection.LOST) as error:
            await patience.wait(error)


async def newest(
    link: connection.Connection, stream: streams.Stream, subject: str
) -> list[codec.CloudEvent]:
    """Return the newest event of each subject that matches a filter, oldest first."""
    events = [_decoded(m) for m in await jetstream.newest(link, stream.name, subject)]
    return [event for event in events if isinstance(event, codec.CloudEvent)]


def _decoded(message: connection.Message) -> codec.CloudEvent | codec.MalformedEvent:
    try:
        event = codec.decode(
            message.subject, message.data, position=message.metadata.sequence.stream
        )
    except codec.MalformedEvent as error:
        connection.RECEIVED.labels(f"malformed_{error.reason}").inc()
        return error
    connection.RECEIVED.labels("event").inc()
    return event


async def _set_aside(
    link: connection.Connection,
    message: connection.Message,
    consumer: str,
    error: codec.MalformedEvent,
) -> None:
    origin = message.metadata
    logs.logger().warning(
        "event_set_aside",
        subject=message.subject,
        reason=error.reason,
        detail=error.detail[:_DETAIL_SHOWN_MAX],
    )
    await jetstream.store(
        link,
        f"muster.dlq.{consumer}.{error.reason}",
        message.data,
        {
            "Nats-Msg-Id": f"{origin.stream}:{origin.sequence.stream}:{consumer}",
            "Muster-Subject": message.subject,
            "Muster-Reason": str(error.reason),
        },
    )
