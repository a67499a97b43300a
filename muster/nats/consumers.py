"""Adapter: NATS: validated events out of a stream, across every outage.

Malformed messages are counted; a durable consumer moves them to the dead letters with a reason.
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
    """Yield every event from the position of this durable consumer, for ever.

    A malformed message is moved to the dead letters and not yielded. An event that is not
    acknowledged within `ack_wait_s` comes again.
    """
    config = api.ConsumerConfig(
        name=durable,
        durable_name=durable,
        filter_subjects=list(filters),
        ack_policy=api.AckPolicy.EXPLICIT,
        ack_wait=ack_wait_s,
        max_ack_pending=_UNACKNOWLEDGED_MAX,
    )
    retry = jetstream.ReadRetry(link, stream.name)
    while True:
        client = await link.client()
        try:
            async with contextlib.aclosing(
                jetstream.pull(client, stream.name, config, served=retry.reset)
            ) as messages:
                async for message in messages:
                    event = _decoded(message)
                    if isinstance(event, codec.MalformedEvent):
                        await _dead_letter(link, message, durable, event)
                        await jetstream.ack(message)
                    else:
                        yield runtime.Delivery(event, functools.partial(jetstream.ack, message))
        except (jetstream.ConsumerLost, *connection.LOST) as error:
            await retry.wait(error)


async def follow(
    link: connection.Connection,
    stream: streams.Stream,
    *,
    filters: Sequence[str],
    since: datetime | None = None,
    after: int | None = None,
) -> AsyncIterator[codec.CloudEvent]:
    """Yield every event from `since` (None: from now on), without gaps across reconnects.

    With `after` they begin behind that position of the stream; a position that the stream has not
    reached is of another stream, and this one is yielded from its start. Leaves nothing behind on
    the server. Malformed messages are counted and skipped.
    """
    config = api.ConsumerConfig(
        filter_subjects=list(filters),
        ack_policy=api.AckPolicy.NONE,
        deliver_policy=api.DeliverPolicy.BY_START_TIME,
        opt_start_time=since,
        inactive_threshold=jetstream.ABANDONED_S,
        mem_storage=True,
    )
    position = -1
    created: datetime | None = None
    retry = jetstream.ReadRetry(link, stream.name)
    while True:
        client = await link.client()
        try:
            info = await client.jetstream().stream_info(stream.name)
            if after is not None and position < 0:
                position = after if after <= info.state.last_seq else 0
            elif since is None and position < 0:
                position = info.state.last_seq
            elif created is not None and info.created != created:
                # a stream that was lost and created again counts from 1
                position = 0
            created = info.created
            if position >= 0:
                config.deliver_policy = api.DeliverPolicy.BY_START_SEQUENCE
                config.opt_start_time = None
                config.opt_start_seq = position + 1
            async with contextlib.aclosing(
                jetstream.pull(client, stream.name, config, served=retry.reset)
            ) as messages:
                async for message in messages:
                    position = message.metadata.sequence.stream
                    event = _decoded(message)
                    if isinstance(event, codec.CloudEvent):
                        yield event
        except (jetstream.ConsumerLost, *connection.LOST) as error:
            await retry.wait(error)


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


async def _dead_letter(
    link: connection.Connection,
    message: connection.Message,
    consumer: str,
    error: codec.MalformedEvent,
) -> None:
    origin = message.metadata
    logs.logger().warning(
        "event_dead_letter",
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
