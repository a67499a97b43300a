"""Adapter for NATS: reads validated events from streams, and resumes after every outage.

Malformed messages are counted; a durable consumer also moves them to the dead letters with a
reason. All other readers yield an inventory of several pages as one event, when it is complete.
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime
from typing import Final

import prometheus_client
from nats.js import api

from muster import codec, vocabulary
from muster.nats import assembly, compat, connection, jetstream, stream_info, streams
from muster.service import logs, runtime

_UNACKNOWLEDGED_MAX: Final = 1_000
_ACK_WAIT_S: Final = 30.0
_DETAIL_SHOWN_MAX: Final = 500
_MISSING_S: Final = 1.0
_ONCE_S: Final = 2.0
"""How long the server keeps the consumer of a short read; the number of consumers is limited."""
Wants = Callable[[str, int], bool]
"""Receives a message's subject and the number of messages after it; returns whether to read it."""

_FORGOTTEN = prometheus_client.Counter(
    "muster_bus_pages_forgotten_total", "Pages of inventories that never became complete."
)


async def consume(
    link: connection.Connection,
    stream: streams.Stream,
    *,
    durable: str,
    filters: Sequence[str],
    ack_wait_s: float = _ACK_WAIT_S,
) -> AsyncIterator[runtime.Delivery[codec.CloudEvent]]:
    """Yield every event from the position of this durable consumer, until closed.

    A malformed message is moved to the dead letters and not yielded. An event that is not
    acknowledged within `ack_wait_s` is delivered again.
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
    wants: Wants | None = None,
    is_newest_first: bool = False,
) -> AsyncIterator[codec.CloudEvent]:
    """Yield every event from `since` (None: from now on), without gaps across reconnects.

    With `after`, events start after that position in the stream. A position that the stream has not
    reached belongs to an earlier stream; then events start at the beginning of this stream. With
    `is_newest_first`, events start with the newest stored event of each subject. The server removes
    the consumer `jetstream.ABANDONED_S` seconds after the last read. Malformed messages are counted
    and skipped, and messages that `wants` rejects are not decoded.
    """
    whole = _Whole()
    config = api.ConsumerConfig(
        filter_subjects=list(filters),
        ack_policy=api.AckPolicy.NONE,
        deliver_policy=(
            api.DeliverPolicy.LAST_PER_SUBJECT
            if is_newest_first
            else api.DeliverPolicy.BY_START_TIME
        ),
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
            runtime.end_if_cancelled()
            if after is not None and position < 0:
                position = after if after <= info.state.last_seq else 0
            elif since is None and position < 0 and not is_newest_first:
                position = info.state.last_seq
            elif created is not None and info.created != created:
                # if the stream was lost, the new stream counts from 1
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
                    position, left = compat.place(message)
                    if wants is not None and not wants(message.subject, left):
                        continue
                    event = whole.add(_decoded(message))
                    if event is not None:
                        yield event
        except (jetstream.ConsumerLost, *connection.LOST) as error:
            runtime.end_if_cancelled()
            is_missing = stream_info.is_missing(stream, error)
            await (asyncio.sleep(_MISSING_S) if is_missing else retry.wait(error))


async def newest(
    link: connection.Connection, stream: streams.Stream, subject: str
) -> list[codec.CloudEvent]:
    """Return the newest event of each subject that matches a filter, oldest first."""
    whole = _Whole()
    events = [whole.add(_decoded(m)) for m in await jetstream.newest(link, stream.name, subject)]
    return [event for event in events if event is not None]


async def receivers(link: connection.Connection) -> vocabulary.ReceiversConfigured | None:
    """Return the receivers that the notifier last published; None if it never published any."""
    subject = vocabulary.ReceiversConfigured.SUBJECT.format(node="*")
    for event in reversed(await newest(link, streams.NOTIFICATIONS, subject)):
        if isinstance(event.data, vocabulary.ReceiversConfigured):
            return event.data
    return None


async def each_newest(
    link: connection.Connection,
    stream: streams.Stream,
    subject: str,
    *,
    wants: Wants | None = None,
    read_max: int | None = None,
) -> AsyncIterator[codec.CloudEvent]:
    """Yield the newest event of each subject that matches a filter.

    Use this instead of `newest` for many events: a list of ten thousand takes 90 MiB. Starts over
    when the connection breaks, so that events may be yielded twice. Ends after `read_max` messages,
    or if an optional stream does not exist.
    """
    retry = jetstream.ReadRetry(link, stream.name)
    config = jetstream.newest_of_each(subject)
    if read_max is not None:
        config = config.evolve(inactive_threshold=_ONCE_S)
    while True:
        client = await link.client()
        whole = _Whole()
        try:
            pulled = jetstream.pull(
                client,
                stream.name,
                config,
                until_empty=True,
                served=retry.reset,
            )
            async with contextlib.aclosing(pulled) as messages:
                read = 0
                async for message in messages:
                    read += 1
                    is_wanted = wants is None or wants(message.subject, compat.place(message)[1])
                    event = whole.add(_decoded(message)) if is_wanted else None
                    if event is not None:
                        yield event
                    if read == read_max:
                        return
        except (jetstream.ConsumerLost, *connection.LOST) as error:
            if stream_info.is_missing(stream, error):
                return
            await retry.wait(error)
        else:
            return


async def past(
    link: connection.Connection,
    stream: streams.Stream,
    *,
    filters: Sequence[str],
    since: datetime,
    events_max: int,
    waits_for_stream: bool = True,
) -> list[codec.CloudEvent]:
    """Return the stored events since a time, oldest first; at most the first `events_max`.

    Waits for the server without a time limit. The list is empty if an optional stream does not
    exist. If another stream does not exist, waits for it, or raises an error for which
    `stream_info.is_no_stream` is true if `waits_for_stream` is False.
    """
    config = api.ConsumerConfig(
        filter_subjects=list(filters),
        ack_policy=api.AckPolicy.NONE,
        deliver_policy=api.DeliverPolicy.BY_START_TIME,
        opt_start_time=since,
        inactive_threshold=_ONCE_S,
        mem_storage=True,
    )
    retry = jetstream.ReadRetry(link, stream.name)
    while True:
        client = await link.client()
        whole = _Whole()
        events: list[codec.CloudEvent] = []
        try:
            pulled = jetstream.pull(
                client, stream.name, config, until_empty=True, served=retry.reset
            )
            async with contextlib.aclosing(pulled) as messages:
                async for message in messages:
                    event = whole.add(_decoded(message))
                    events += [event] if event is not None else []
                    if len(events) >= events_max:
                        break
        except (jetstream.ConsumerLost, *connection.LOST) as error:
            if stream_info.is_missing(stream, error):
                return []
            if stream_info.is_no_stream(error) and not waits_for_stream:
                raise
            await retry.wait(error)
        else:
            return events


class _Whole:
    """Joins the inventory pages of one reader, and counts the discarded pages."""

    def __init__(self) -> None:
        self._pages = assembly.Assembler()

    def add(self, event: codec.CloudEvent | codec.MalformedEvent) -> codec.CloudEvent | None:
        if isinstance(event, codec.MalformedEvent):
            return None
        before = self._pages.forgotten
        whole = self._pages.add(event)
        _FORGOTTEN.inc(self._pages.forgotten - before)
        return whole


def _decoded(message: connection.Message) -> codec.CloudEvent | codec.MalformedEvent:
    try:
        origin = message.metadata
        event = codec.decode(
            message.subject,
            message.data,
            position=origin.sequence.stream,
            stream=origin.stream,
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
    log = logs.logger().bind(
        subject=message.subject, reason=error.reason, detail=error.detail[:_DETAIL_SHOWN_MAX]
    )
    try:
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
    except jetstream.Refused as refused:
        log.warning("dead_letter_not_stored", error=str(refused))
    else:
        log.warning("dead_letter_stored")
