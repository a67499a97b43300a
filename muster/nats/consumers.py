"""Adapter: NATS: reads validated events from streams, and a fleet's heartbeats in batches.

Events come across every outage. Malformed messages are counted; a durable consumer moves them to
the dead letters with a reason. An inventory in several pages is yielded once it is whole.

Heartbeats arrive over a connection of their own, so that answers to requests do not queue behind
ten thousand heartbeats. A reader that cannot keep up leaves them with nats-server, which in the end
closes the connection. It is then known that heartbeats are missing; if some were dropped, their
senders would look silent.

A single heartbeat is handled at once. When more arrive, they are read every 100 ms, and when very
many arrive, every 250 ms: 2,000 heartbeats a second take 17 % of a core one by one through nats-py,
but 4 % in batches (CPython 3.11, nats-py 2.16).
"""

import asyncio
import contextlib
import functools
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import datetime
from typing import Final, Self

import nats.aio.client
import nats.errors
import nats.js.errors
import prometheus_client
from nats.js import api

from muster import codec, vocabulary
from muster.nats import assembly, compat, connection, jetstream, streams
from muster.service import logs, runtime

_UNACKNOWLEDGED_MAX: Final = 1_000
_ACK_WAIT_S: Final = 30.0
_DETAIL_SHOWN_MAX: Final = 500
_NO_STREAM: Final = 10059
"""nats-server's JSStreamNotFoundErr."""
_MISSING_S: Final = 1.0
_ONCE_S: Final = 2.0
"""How long the server keeps a consumer that reads a little once; it allows a limited number."""
Wants = Callable[[str, int], bool]
"""Whether to read a message, by its subject and how many messages are stored behind it."""

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

    With `after` the events begin after that position of the stream. A position that the stream has
    not reached belongs to an earlier stream; then this stream is yielded from its start. With
    `is_newest_first` the events begin with the newest stored event of each subject. Nothing remains
    on the server afterwards. Malformed messages are counted and skipped. A message is not decoded
    if `wants` rejects it.
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
            if after is not None and position < 0:
                position = after if after <= info.state.last_seq else 0
            elif since is None and position < 0 and not is_newest_first:
                position = info.state.last_seq
            elif created is not None and info.created != created:
                # after a loss a new stream counts from 1
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
                    if wants is not None and not _wanted(wants, message):
                        continue
                    event = whole.add(_decoded(message))
                    if event is not None:
                        yield event
        except (jetstream.ConsumerLost, *connection.LOST) as error:
            await _wait(retry, stream, error)


async def newest(
    link: connection.Connection, stream: streams.Stream, subject: str
) -> list[codec.CloudEvent]:
    """Return the newest event of each subject that matches a filter, oldest first."""
    whole = _Whole()
    events = [whole.add(_decoded(m)) for m in await jetstream.newest(link, stream.name, subject)]
    return [event for event in events if event is not None]


async def each_newest(
    link: connection.Connection,
    stream: streams.Stream,
    subject: str,
    *,
    wants: Wants | None = None,
    read_max: int | None = None,
) -> AsyncIterator[codec.CloudEvent]:
    """Yield the newest event of each subject, one at a time: ten thousand at once take 90 MiB.

    Starts over when the connection breaks; duplicates do no harm. Ends after `read_max` messages.
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
                    is_wanted = wants is None or _wanted(wants, message)
                    event = whole.add(_decoded(message)) if is_wanted else None
                    if event is not None:
                        yield event
                    if read == read_max:
                        return
        except (jetstream.ConsumerLost, *connection.LOST) as error:
            if _is_missing(stream, error):
                return
            await retry.wait(error)
        else:
            return


def _is_missing(stream: streams.Stream, error: BaseException) -> bool:
    is_missing = isinstance(error, nats.js.errors.NotFoundError) and error.err_code == _NO_STREAM
    return is_missing and stream.is_optional


async def _wait(retry: jetstream.ReadRetry, stream: streams.Stream, error: BaseException) -> None:
    """Wait for the next attempt; that an optional stream is missing is no problem of a reader."""
    await (asyncio.sleep(_MISSING_S) if _is_missing(stream, error) else retry.wait(error))


def _wanted(wants: Wants, message: connection.Message) -> bool:
    return wants(message.subject, message.metadata.num_pending)


class _Whole:
    """Puts the pages of one reader together, and counts those that stay incomplete."""

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
    logs.logger().warning(
        "dead_letter_stored",
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


HeartbeatHandler = Callable[[Sequence[vocabulary.Heartbeat]], Awaitable[None]]

_BATCH_S: Final = 0.1
_MANY: Final = 100
_LONG_BATCH_S: Final = 0.25
"""Each wake-up costs a millisecond because caches are cold. No suspicion depends on it."""
_BATCH_MAX: Final = 1_000
"""Larger batches would keep the event loop from other tasks."""
_COUNT: Final = re.compile(rb"[0-9]{1,8}")
"""NATS allows at most 64 MiB a message (max_payload)."""
_SHOWN_MAX: Final = 200
_LINE_BYTES_MAX: Final = 1024 * 1024
"""A longer line is no NATS; the longest are INFO with the addresses of a cluster."""


class HeartbeatStream:
    """Reads every heartbeat of a fleet; entering the context never waits for the server."""

    def __init__(self, url: str, *, name: str) -> None:
        self.link = connection.Connection(url, name=name, make=self._client)
        self._handler: HeartbeatHandler | None = None

    async def __aenter__(self) -> Self:
        """Start connecting."""
        await self.link.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connection."""
        await self.link.__aexit__()

    async def follow(self, handler: HeartbeatHandler) -> None:
        """Call `handler` with the valid heartbeats of each batch; count invalid ones.

        The next batch waits until it returns.
        """
        self._handler = handler
        await self.link.subscribe("muster.heartbeat.*.*", _ignore)

    def _client(self) -> nats.aio.client.Client:
        client = nats.aio.client.Client()
        _BatchParser(client, self._on_batch)
        return client

    async def _on_batch(self, messages: Sequence[tuple[bytes, bytes]]) -> None:
        heartbeats = []
        for subject, payload in messages:
            try:
                heartbeats.append(codec.decode_heartbeat(payload, subject=subject.decode()))
            except (codec.MalformedEvent, UnicodeDecodeError) as error:
                reason = getattr(error, "reason", codec.MalformedReason.WRONG_SUBJECT)
                connection.RECEIVED.labels(f"malformed_{reason}").inc()
        connection.RECEIVED.labels("heartbeat").inc(len(heartbeats))
        if heartbeats and self._handler is not None:
            await self._handler(heartbeats)


class _BatchParser(compat.Parser):
    """Extracts the messages from a client's input; nats-py's parser handles the rest."""

    def __init__(
        self,
        client: nats.aio.client.Client,
        on_batch: Callable[[Sequence[tuple[bytes, bytes]]], Awaitable[None]],
    ) -> None:
        super().__init__(client)
        self._on_batch = on_batch
        self._read_at = 0.0
        self._received = 0
        """How many messages have arrived since then."""

    def reset(self) -> None:
        """Start over for another connection."""
        super().reset()
        self._rest = b""
        self._messages: list[tuple[bytes, bytes]] = []

    async def parse(self, data: bytes = b"") -> None:
        """Handle the bytes that were read; return when it is time to read again."""
        messages, others, self._rest = split_messages(self._rest + data)
        self._messages += messages
        self._received += len(messages)
        for line in others:
            await super().parse(line)
        if self.has_unread() and len(self._messages) < _BATCH_MAX:
            return
        if self._messages:
            await self._on_batch(self._messages)
            self._messages = []
        if len(data) < compat.READ_BYTES:
            await self._pause()

    async def _pause(self) -> None:
        """Pause reading, unless the last read was long ago."""
        clock = asyncio.get_running_loop().time
        batch_s = _BATCH_S if self._received < _MANY else _LONG_BATCH_S
        await self.pause_reading(self._read_at + batch_s - clock())
        self._read_at, self._received = clock(), 0


def split_messages(data: bytes) -> tuple[list[tuple[bytes, bytes]], list[bytes], bytes]:
    """Return (subject, payload) of each message, all other lines, and the incomplete rest.

    NATS protocol: `MSG <subject> <sid> [reply] <bytes>`, and with headers `HMSG <subject> <sid>
    [reply] <bytes of headers> <bytes>`. Raises ProtocolError.
    """
    messages: list[tuple[bytes, bytes]] = []
    others: list[bytes] = []
    at = 0
    while (end := data.find(b"\r\n", at)) >= 0:
        start = end + 2
        is_plain = data.startswith(b"MSG ", at)
        if not is_plain and not data.startswith(b"HMSG ", at):
            others.append(data[at:start])
            at = start
            continue
        words = data[at:end].split()
        # int() would also accept a sign: a negative length would lead back, for ever
        counts = words[-1:] if is_plain else words[-2:]
        is_whole = len(words) in ((4, 5) if is_plain else (5, 6))
        if not is_whole or not all(_COUNT.fullmatch(count) for count in counts):
            raise nats.errors.ProtocolError(f"nats: malformed {data[at:end][:_SHOWN_MAX]!r}")
        subject, stop = words[1], start + int(counts[-1])
        skip = 0 if is_plain else int(counts[0])
        if len(data) < stop + 2:
            break
        messages.append((subject, data[start + skip : stop]))
        at = stop + 2
    if end < 0 and len(data) - at > _LINE_BYTES_MAX:
        raise nats.errors.ProtocolError(f"nats: endless {data[at:][:_SHOWN_MAX]!r}")
    return messages, others, data[at:]


async def _ignore(_: connection.Message) -> None:
    """Ignore a message; never called, because the batch parser takes all messages."""
