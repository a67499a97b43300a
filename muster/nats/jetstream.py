"""Adapter: JetStream: stores messages, pulls and acknowledges them.

A message is published until its stream has it, always under the same `Nats-Msg-Id`, so that the
server drops repeats.
"""

import contextlib
import json
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Final

import nats.js.errors
import prometheus_client
from nats.aio.client import Client
from nats.js import api

from muster.nats import connection
from muster.service import logs, runtime

ABANDONED_S: Final = 30.0
"""So long the server keeps a passing consumer that nobody asks any more."""

_STORE_TIMEOUT_S: Final = 2.0
_PULL_S: Final = 1.0
_PULL_BATCH: Final = 100
"""Of a MiB each at most: nats-py drops what comes while 128 MiB wait in a subscription."""
_FAILURES_TOLD: Final = 5
_NO_MESSAGE: Final = 10037
"""nats-server's JSNoMessageFoundErr."""

_REFUSALS: Final = prometheus_client.Counter(
    "muster_bus_stream_refusals_total",
    "Tries to read a stream that NATS did not serve.",
    ["stream"],
)


class ConsumerLost(Exception):
    """The server no longer knows our consumer."""


class Patience:
    """The waits of one who reads a stream; it tells when that goes on failing, and when it is over.

    Nothing else would: NATS is there, and what is not heard looks like silence.
    """

    def __init__(self, link: connection.Connection, stream: str) -> None:
        self._link = link
        self._stream = stream
        self._backoff = connection.Backoff()
        self._failures = 0

    async def wait(self, error: BaseException) -> None:
        """Wait for the next try."""
        self._failures += 1
        _REFUSALS.labels(self._stream).inc()
        if self._failures >= _FAILURES_TOLD:
            text = f"{self._stream} cannot be read: {error or type(error).__name__}"
            if self not in self._link.unread:
                logs.logger().error("stream_unread", stream=self._stream, error=text)
            self._link.unread[self] = text
        await self._backoff.wait()

    def reset(self) -> None:
        """Take note that NATS serves the stream."""
        self._backoff.reset()
        self._failures = 0
        if self._link.unread.pop(self, None) is not None:
            logs.logger().info("stream_read_again", stream=self._stream)


def _nothing() -> None:
    pass


async def pull(
    client: Client,
    stream: str,
    config: api.ConsumerConfig,
    *,
    until_empty: bool = False,
    served: Callable[[], None] = _nothing,
) -> AsyncGenerator[connection.Message, None]:
    """Give the messages of one consumer, each as it comes; with `until_empty`, only what is there.

    Our own loop over pull requests: nats-py's `fetch` gathers a batch before it gives the first.
    `served` is called with every answer of the server's, also with one that there is nothing.
    Raises ConsumerLost when the server forgot the consumer, or messages were lost on the way, and
    what nats-py raises.
    """
    info = await client.jetstream().add_consumer(stream, config)
    runtime.end_if_cancelled()
    left = info.num_pending or 0
    inbox = client.new_inbox()
    request = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{info.name}"
    expires = json.dumps({"batch": _PULL_BATCH, "expires": int(_PULL_S * 1e9)}).encode()
    subscription = await client.subscribe(inbox)
    try:
        while not (until_empty and left <= 0):
            await client.publish(request, expires, reply=inbox)
            for _ in range(_PULL_BATCH):
                message = await subscription.next_msg(timeout=2 * _PULL_S)
                runtime.end_if_cancelled()
                ends = _ends_pull(message)
                served()
                if ends:
                    if until_empty:
                        await _must_have_more(client, stream, info.name)
                    break
                left -= 1
                yield message
                if until_empty and left <= 0:
                    return
    finally:
        with contextlib.suppress(*connection.LOST):
            await subscription.unsubscribe()


async def ack(message: connection.Message) -> None:
    """Acknowledge; if the server is away the message comes again, and is known by its id."""
    with contextlib.suppress(*connection.LOST):
        await message.ack()


async def store(
    link: connection.Connection,
    subject: str,
    payload: bytes,
    headers: Mapping[str, str],
    *,
    still: Callable[[], bool] | None = None,
) -> bool:
    """Publish until it is acknowledged; a definite refusal is logged, counted.

    `still` is asked before every try; once it says no, nothing more is tried and the answer is
    False. What goes on failing while the server is there is logged when it begins and when it ends.
    """
    backoff = connection.Backoff()
    failures = 0
    while True:
        client = await link.client()
        if still is not None and not still():
            connection.PUBLISHED.labels("no_longer_ours").inc()
            return False
        try:
            ack = await client.jetstream().publish(
                subject, payload, timeout=_STORE_TIMEOUT_S, headers=dict(headers)
            )
        except (nats.js.errors.BadRequestError, nats.errors.MaxPayloadError) as error:
            connection.PUBLISHED.labels("refused").inc()
            logs.logger().error("event_refused", subject=subject, error=str(error))
            return True
        except connection.LOST as error:
            connection.PUBLISHED.labels("retried").inc()
            failures += 1
            if failures == _FAILURES_TOLD:
                kind = type(error).__name__
                logs.logger().error("event_waits", subject=subject, error=str(error) or kind)
            if isinstance(error, nats.js.errors.NoStreamResponseError):
                with contextlib.suppress(*connection.LOST):
                    await link.prepare(client)
            await backoff.wait()
        else:
            runtime.end_if_cancelled()
            if ack.duplicate and not failures and not await _is_of(client, ack, subject):
                connection.PUBLISHED.labels("forestalled").inc()
                logs.logger().error("event_forestalled", subject=subject, stored=ack.seq)
                headers = {**headers, "Nats-Msg-Id": uuid.uuid4().hex}
                continue
            connection.PUBLISHED.labels("repeat" if ack.duplicate else "stored").inc()
            if failures >= _FAILURES_TOLD:
                logs.logger().info("event_stored_late", subject=subject, attempts=failures + 1)
            return True


def newest_of_each(subject: str) -> api.ConsumerConfig:
    """Return the configuration of a passing consumer: the newest of each subject, then changes."""
    return api.ConsumerConfig(
        filter_subjects=[subject],
        ack_policy=api.AckPolicy.NONE,
        deliver_policy=api.DeliverPolicy.LAST_PER_SUBJECT,
        inactive_threshold=ABANDONED_S,
        mem_storage=True,
    )


async def newest(
    link: connection.Connection, stream: str, subject: str
) -> list[connection.Message]:
    """Return the newest message of each subject that matches, oldest first, in whatever time.

    Everything that was stored before this was called is there: a passing consumer may be with a
    replica that is behind, and the stream's leader is asked how far it should be.
    """
    config = newest_of_each(subject)
    patience = Patience(link, stream)
    while True:
        client = await link.client()
        try:
            known = await last(client, stream, subject)
            pulled = pull(client, stream, config, until_empty=True)
            async with contextlib.aclosing(pulled) as messages:
                found = [message async for message in messages]
            there = max((one.metadata.sequence.stream for one in found), default=0)
            if known is None or (known.seq or 0) <= there:
                patience.reset()
                return found
            await patience.wait(ConsumerLost("a replica is behind"))
        except (ConsumerLost, *connection.LOST) as error:
            await patience.wait(error)


async def last(client: Client, stream: str, subject: str) -> api.RawStreamMsg | None:
    """Return the newest message that matches, as the leader has it. Raises what nats-py raises."""
    try:
        return await client.jetstream().get_last_msg(stream, subject)
    except nats.js.errors.NotFoundError as error:
        if error.err_code != _NO_MESSAGE:
            raise
        return None
    finally:
        runtime.end_if_cancelled()


async def subjects(client: Client, stream: str, subject: str) -> list[str]:
    """Return under which subjects there is something. Raises what nats-py raises."""
    info = await client.jetstream().stream_info(stream, subjects_filter=subject)
    runtime.end_if_cancelled()
    return sorted(info.state.subjects or {})


async def _is_of(client: Client, ack: api.PubAck, subject: str) -> bool:
    """Tell whether what was stored before under the same id is on this subject, or cannot be known.

    All who may write to a stream share one space of ids: another may have used up one of ours.
    """
    try:
        found = await client.jetstream().get_msg(ack.stream, ack.seq)
    except connection.LOST:
        runtime.end_if_cancelled()
        return True
    runtime.end_if_cancelled()
    return found.subject == subject


async def _must_have_more(client: Client, stream: str, consumer: str) -> None:
    """Raise ConsumerLost if the server has given all there was: what did not come, never comes."""
    info = await client.jetstream().consumer_info(stream, consumer)
    runtime.end_if_cancelled()
    if not info.num_pending:
        raise ConsumerLost(f"{stream}: messages were given and did not come")


def _ends_pull(message: connection.Message) -> bool:
    """Tell a status line from a message (ADR-37): 404 and 408 end a pull, others a consumer."""
    status = (message.headers or {}).get(api.Header.STATUS)
    # whoever speaks may call a header so; a message of the stream can be acknowledged
    if status is None or message.reply:
        return False
    if status in {api.StatusCode.NO_MESSAGES, api.StatusCode.REQUEST_TIMEOUT}:
        return True
    raise ConsumerLost(f"{status} {(message.headers or {}).get(api.Header.DESCRIPTION, '')}")
