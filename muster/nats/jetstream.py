"""Adapter for JetStream: creates streams and buckets, stores, pulls and acknowledges messages.

If the server does not confirm that it has stored a message, the message is published again with the
same `Nats-Msg-Id`, so that the server drops duplicates.
"""

import contextlib
import enum
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Final

import nats.errors
import nats.js.errors
import prometheus_client
from nats.aio.client import Client
from nats.js import api

from muster.nats import compat, connection, stream_info, streams
from muster.service import logs, runtime

_OTHER_CONFIGURATION: Final = 10058
"""nats-server's JSStreamNameExistErr: the stream exists with another configuration."""
_DUPLICATES_S: Final = 120.0


async def create_streams(client: Client, *, replicas: int = 1) -> None:
    """Create missing streams and buckets, and update existing ones.

    Several processes may call this at the same time.

    The number of replicas is never reduced, so that processes with different settings do not undo
    each other's changes.
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
            subjects, count = list(bucket.subjects), max(replicas, existing.num_replicas or 1)
            if (existing.subjects, existing.num_replicas or 1) != (subjects, count):
                wanted = existing.evolve(subjects=subjects, num_replicas=count)
                await jetstream.update_stream(wanted)
        except nats.js.errors.NotFoundError:
            await _create_bucket(client, bucket, replicas=replicas)


async def _create_bucket(client: Client, bucket: streams.Bucket, *, replicas: int) -> None:
    """Create a bucket as nats-py does (client.py, create_key_value; 2.16).

    The revisions of a lock start at the time in ms, which grows faster than the number of claims.
    If they started at 1, a process that remembers a lost bucket would mistake every later holder of
    the lock for an earlier one.
    """
    config = api.StreamConfig(
        name=f"KV_{bucket.name}",
        subjects=list(bucket.subjects),
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
        first_seq=int(time.time() * 1000) if bucket.lock_key else None,
    )
    try:
        await client.jetstream().add_stream(config)
    except nats.js.errors.BadRequestError as error:
        # another process was faster
        if error.err_code != _OTHER_CONFIGURATION:
            raise


ABANDONED_S: Final = 30.0
"""How long the server keeps an ephemeral consumer without a reader."""

_STORE_TIMEOUT_S: Final = 2.0
_PULL_S: Final = 1.0
_PULL_BATCH: Final = 500
"""How many messages are requested together: a plugin's message has at most 49 KiB, and nats-py
drops messages while 128 MiB are waiting.
"""
_FAILURES_LOGGED: Final = 5
"""Log after this many consecutive failures."""
_FINAL_REFUSALS: Final = (nats.js.errors.BadRequestError, nats.errors.MaxPayloadError)
_NO_MESSAGE: Final = 10037
"""nats-server's JSNoMessageFoundErr."""

_REFUSALS: Final = prometheus_client.Counter(
    "muster_bus_stream_refusals_total",
    "Failed attempts to read a stream.",
    ["stream"],
)


class ConsumerLost(Exception):
    """A new consumer is needed: this one no longer exists, or did not deliver every message."""


class Refused(Exception):
    """The server refused the message, and would refuse it again; the text says why."""


class Stored(enum.StrEnum):
    """The outcome of storing a message."""

    NEW = "new"
    REPEATED = "repeated"
    """The stream already contained the message."""
    NO_LONGER_LEADER = "no_longer_leader"


class ReadRetry:
    """Waits between attempts to read a stream; logs lasting failures and the recovery.

    Without the log the failure would be invisible: NATS is connected, and a stream that cannot be
    read looks like a stream without new events.
    """

    def __init__(self, link: connection.Connection, stream: str) -> None:
        self._link = link
        self._stream = stream
        self._retry = runtime.Retry(connection.BACKOFF)

    async def wait(self, error: BaseException) -> None:
        """Count a failure, and wait until the next attempt."""
        _REFUSALS.labels(self._stream).inc()
        if self._retry.failures + 1 >= _FAILURES_LOGGED:
            text = f"{self._stream} cannot be read: {error or type(error).__name__}"
            if self not in self._link.unread:
                stream_info.log_failure("stream_unreadable", error, stream=self._stream, error=text)
            self._link.unread[self] = text
        await self._retry.wait()

    def reset(self) -> None:
        """Record that NATS serves the stream again."""
        self._retry.reset()
        if self._link.unread.pop(self, None) is not None:
            logs.logger().info("stream_readable", stream=self._stream)


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
    """Create a consumer, and yield its messages as they arrive.

    With `until_empty`, only the messages that were stored when the consumer was created are
    yielded.

    This function does not use nats-py's `fetch`, which collects a batch before it returns the first
    message. `served` is called on every answer from the server, even one without a message. Raises
    ConsumerLost if the server no longer has the consumer or messages were lost in transit, and
    nats-py's errors.
    """
    info = await client.jetstream().add_consumer(stream, config)
    runtime.end_if_cancelled()
    left = info.num_pending or 0
    inbox = client.new_inbox()
    request = f"{compat.api(client)}.CONSUMER.MSG.NEXT.{stream}.{info.name}"
    expires = json.dumps({"batch": _PULL_BATCH, "expires": int(_PULL_S * 1e9)}).encode()
    received = compat.Received(client)
    subscription = await client.subscribe(inbox, cb=received.put)
    try:
        while not (until_empty and left <= 0):
            await client.publish(request, expires, reply=inbox)
            for _ in range(_PULL_BATCH):
                message = await received.next(timeout_s=2 * _PULL_S)
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
    """Acknowledge a message; a server that is unreachable now will redeliver it later."""
    with contextlib.suppress(*connection.LOST):
        await message.ack()


async def store(
    link: connection.Connection,
    subject: str,
    payload: bytes,
    headers: Mapping[str, str],
    *,
    is_leader: Callable[[], bool] | None = None,
    is_queue: bool = False,
) -> Stored:
    """Publish a message, without a time limit, until the stream has stored it.

    `is_leader` is called before every attempt; if it returns False, attempts end. With
    `is_queue`, a refusal is temporary (a full work queue has space later), and a stored message
    with the same `Nats-Msg-Id` counts as this message.

    Failures that last while the server is connected are logged when they begin and when they end.
    Raises Refused, which is logged, too.
    """
    retry = runtime.Retry(connection.BACKOFF)
    while True:
        client = await link.client()
        if is_leader is not None and not is_leader():
            connection.PUBLISHED.labels("no_longer_leader").inc()
            return Stored.NO_LONGER_LEADER
        try:
            ack = await client.jetstream().publish(
                subject, payload, timeout=_STORE_TIMEOUT_S, headers=dict(headers)
            )
        except connection.LOST as error:
            if not is_queue and isinstance(error, _FINAL_REFUSALS):
                connection.PUBLISHED.labels("refused").inc()
                logs.logger().error("message_refused_by_nats", subject=subject, error=str(error))
                reason = getattr(error, "description", None) or str(error)
                raise Refused(reason) from error
            connection.PUBLISHED.labels("retried").inc()
            if retry.failures + 1 == _FAILURES_LOGGED:
                text = str(error) or type(error).__name__
                stream_info.log_failure("publishing_delayed", error, subject=subject, error=text)
            if isinstance(error, nats.js.errors.NoStreamResponseError):
                with contextlib.suppress(*connection.LOST):
                    await link.prepare(client)
            await retry.wait()
            continue
        runtime.end_if_cancelled()
        is_first = not is_queue and not retry.failures
        if ack.duplicate and is_first and not await _is_on_subject(client, ack, subject):
            connection.PUBLISHED.labels("id_taken").inc()
            logs.logger().error("message_id_reused", subject=subject, stored=ack.seq)
            headers = {**headers, "Nats-Msg-Id": uuid.uuid4().hex}
            continue
        connection.PUBLISHED.labels("repeat" if ack.duplicate else "stored").inc()
        if retry.failures >= _FAILURES_LOGGED:
            attempts = retry.failures + 1
            logs.logger().info("publishing_resumed", subject=subject, attempts=attempts)
        return Stored.REPEATED if ack.duplicate else Stored.NEW


def newest_of_each(subject: str) -> api.ConsumerConfig:
    """Return the configuration of a consumer that starts with each subject's newest message."""
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
    """Return the newest message of each matching subject, oldest first; retries without limit.

    Every message that was stored before this call is included: an ephemeral consumer may be on a
    replica that is behind, so the last message is requested from the stream's leader.
    """
    config = newest_of_each(subject)
    retry = ReadRetry(link, stream)
    while True:
        client = await link.client()
        try:
            newest_stored = await last(client, stream, subject)
            pulled = pull(client, stream, config, until_empty=True)
            async with contextlib.aclosing(pulled) as messages:
                received = [message async for message in messages]
            position = max((m.metadata.sequence.stream for m in received), default=0)
            if newest_stored is None or (newest_stored.seq or 0) <= position:
                retry.reset()
                return received
            await retry.wait(ConsumerLost("a replica is behind"))
        except (ConsumerLost, *connection.LOST) as error:
            await retry.wait(error)


async def last(client: Client, stream: str, subject: str) -> api.RawStreamMsg | None:
    """Return the stream leader's newest matching message, or None. Raises nats-py's errors."""
    try:
        return await client.jetstream().get_last_msg(stream, subject)
    except nats.js.errors.NotFoundError as error:
        if error.err_code != _NO_MESSAGE:
            raise
        return None
    finally:
        runtime.end_if_cancelled()


async def subjects(client: Client, stream: str, subject: str) -> list[str]:
    """Return the matching subjects that have a message. Raises nats-py's errors."""
    info = await client.jetstream().stream_info(stream, subjects_filter=subject)
    runtime.end_if_cancelled()
    return sorted(info.state.subjects or {})


async def _is_on_subject(client: Client, ack: api.PubAck, subject: str) -> bool:
    """Return whether the message stored under the same id is on this subject; True if unknown.

    All publishers of a stream share one space of ids: another publisher may have used the same id.
    """
    try:
        stored = await client.jetstream().get_msg(ack.stream, ack.seq)
    except connection.LOST:
        runtime.end_if_cancelled()
        return True
    runtime.end_if_cancelled()
    return stored.subject == subject


async def _must_have_more(client: Client, stream: str, consumer: str) -> None:
    """Raise ConsumerLost if the server has sent every message: the missing ones are lost."""
    info = await client.jetstream().consumer_info(stream, consumer)
    runtime.end_if_cancelled()
    if not info.num_pending:
        raise ConsumerLost(f"{stream}: messages that the server sent did not arrive")


def _ends_pull(message: connection.Message) -> bool:
    """Return whether this is a status that ends a pull (ADR-37: 404 and 408), instead of a message.

    Raises ConsumerLost for any other status.
    """
    status = (message.headers or {}).get(api.Header.STATUS)
    # any publisher may set this header, but a message from the stream has a subject for its ack
    if status is None or message.reply:
        return False
    if status in {api.StatusCode.NO_MESSAGES, api.StatusCode.REQUEST_TIMEOUT}:
        return True
    raise ConsumerLost(f"{status} {(message.headers or {}).get(api.Header.DESCRIPTION, '')}")
