"""Adapter for NATS: the services' storage: values in buckets, and messages in work queues.

Values in a key-value bucket are stored, claimed for a time, and watched. A message in a work queue
has its own subject, and stays until a consumer has processed it or a newer message on that subject
replaces it. It is assigned to one consumer at a time. If the consumer ends before it has processed
the message, the message is redelivered to the next consumer.
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import nats.js.errors
from nats.aio.client import Client
from nats.js import api

from muster.nats import connection, jetstream, streams
from muster.service import runtime

_WRITTEN_SINCE: Final = frozenset({10071, 10164})
"""nats-server's JSStreamWrongLastSequenceErr, with and without the sequence."""
_GONE: Final = frozenset({"DEL", "PURGE"})


async def put(
    link: connection.Connection,
    bucket: streams.Bucket,
    key: str,
    value: bytes,
    *,
    is_leader: Callable[[], bool] | None = None,
) -> bool:
    """Write a value, without a time limit; an empty value deletes the key.

    Returns False if `is_leader` returned False before NATS confirmed the write (see `Bus.publish`).
    Raises `jetstream.Refused`.
    """
    headers = {} if value else {"KV-Operation": "DEL"}
    subject = _subject(bucket, key)
    stored = await jetstream.store(link, subject, value, headers, is_leader=is_leader)
    return stored is not jetstream.Stored.NO_LONGER_LEADER


async def read_all(link: connection.Connection, bucket: streams.Bucket) -> dict[str, bytes]:
    """Return every value of a bucket by key; retries without limit."""
    every = _subject(bucket, ">")
    messages = await jetstream.newest(link, _stream(bucket), every)
    return {m.subject.removeprefix(every[:-1]): m.data for m in messages if m.data}


async def follow(
    link: connection.Connection, bucket: streams.Bucket
) -> AsyncIterator[tuple[str, bytes] | None]:
    """Yield every key and value of a bucket, then each change; the value of a deleted key is empty.

    After the values that are stored when reading begins, it yields None. After an outage, all
    values and None are yielded again.
    """
    stream, every = _stream(bucket), _subject(bucket, ">")
    config = jetstream.newest_of_each(every)
    retry = jetstream.ReadRetry(link, stream)
    while True:
        client = await link.client()
        try:
            left = len(await jetstream.subjects(client, stream, every))
            if not left:
                yield None
            async with contextlib.aclosing(
                jetstream.pull(client, stream, config, served=retry.reset)
            ) as messages:
                async for message in messages:
                    gone = (message.headers or {}).get("KV-Operation") in _GONE
                    yield message.subject.removeprefix(every[:-1]), b"" if gone else message.data
                    left -= 1
                    if left == 0:
                        yield None
        except (jetstream.ConsumerLost, *connection.LOST) as error:
            await retry.wait(error)


async def claim(
    link: connection.Connection,
    bucket: streams.Bucket,
    key: str,
    value: bytes,
    *,
    ttl_s: int,
    revision: int,
    timeout_s: float,
) -> streams.Claimed:
    """Write a value for `ttl_s` if the key is unchanged since `revision`; return the stored value.

    A stored value without an expiry is not a claim, and is overwritten: it may be an answer of
    JetStream, which sends answers to any reply subject without checking rights. Raises TimeoutError
    if NATS failed or did not answer in time: the value may or may not be stored.
    """

    async def write(client: Client, over: int) -> tuple[streams.Claimed, bool]:
        return await _claim(client, bucket, key, value, ttl_s=ttl_s, revision=over)

    async with asyncio.timeout(timeout_s):
        client = await link.client()
        try:
            stored, is_claim = await write(client, revision)
            if not is_claim:
                stored, _ = await write(client, stored.revision)
        except connection.LOST as error:
            runtime.end_if_cancelled()
            if isinstance(error, nats.js.errors.NoStreamResponseError):
                # the bucket is lost although the server is connected
                with contextlib.suppress(*connection.LOST):
                    await link.prepare(client)
            raise TimeoutError(str(error) or type(error).__name__) from error
    runtime.end_if_cancelled()
    return stored


async def release(
    link: connection.Connection,
    bucket: streams.Bucket,
    key: str,
    *,
    revision: int,
    timeout_s: float,
) -> None:
    """Remove the value written at `revision`, but not a newer one, if NATS is connected."""
    client = link.live_client()
    with contextlib.suppress(*connection.LOST):
        async with asyncio.timeout(timeout_s):
            if client is not None:
                await client.jetstream().purge_stream(
                    _stream(bucket), seq=revision + 1, subject=_subject(bucket, key)
                )


async def _claim(
    client: Client,
    bucket: streams.Bucket,
    key: str,
    value: bytes,
    *,
    ttl_s: int,
    revision: int,
) -> tuple[streams.Claimed, bool]:
    """Try once to write a claim; return the stored value, and whether it is a claim or absent.

    Raises nats-py's errors: the value may or may not be stored then.
    """
    js = client.jetstream()
    stream, subject = _stream(bucket), _subject(bucket, key)
    headers = {
        api.Header.MSG_TTL.value: f"{ttl_s}s",
        api.Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(revision),
    }
    try:
        ack = await js.publish(subject, value, stream=stream, headers=headers)
    except nats.js.errors.BadRequestError as error:
        if error.err_code not in _WRITTEN_SINCE:
            raise
    else:
        return streams.Claimed(ack.seq, value, written=True), True
    stored = await jetstream.last(client, stream, subject)
    if stored is None:
        return streams.Claimed(0, b"", written=False), True
    is_claim = api.Header.MSG_TTL.value in (stored.headers or {})
    return streams.Claimed(stored.seq or 0, stored.data or b"", written=False), is_claim


def _stream(bucket: streams.Bucket) -> str:
    return f"KV_{bucket.name}"


def _subject(bucket: streams.Bucket, key: str) -> str:
    return f"$KV.{bucket.name}.{key}"


_ACK_TIMEOUT_S: Final = 2.0
_READ_AT_ONCE: Final = 32
_HELD_MAX: Final = 10_000
_ACK_WAIT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Job:
    """One message of a work queue; `number` is its sequence in the stream.

    `done` removes the message, and returns when the server has confirmed this or is unreachable.
    `hold` reports that the message is still being processed: call it every `HOLD_S`.
    """

    number: int
    subject: str
    body: bytes
    headers: Mapping[str, str]
    done: Callable[[], Awaitable[None]]
    hold: Callable[[], Awaitable[None]]


HOLD_S: Final = _ACK_WAIT_S / 3


async def enqueue(
    link: connection.Connection,
    subject: str,
    body: bytes,
    *,
    key: str,
    headers: Mapping[str, str] | None = None,
) -> bool:
    """Store a message, without a time limit; the server drops duplicates with the same `key`.

    A full queue accepts the message once it has space. Returns whether the message was new.
    """
    headers = {"Nats-Msg-Id": key, **(headers or {})}
    stored = await jetstream.store(link, subject, body, headers, is_queue=True)
    return stored is jetstream.Stored.NEW


async def jobs(
    link: connection.Connection, stream: streams.Stream, *, durable: str, subject: str
) -> AsyncIterator[Job]:
    """Yield every message that matches a subject filter.

    This includes messages that an earlier process received but did not acknowledge. No other
    process may use this consumer at the same time.
    """
    config = api.ConsumerConfig(
        name=durable,
        durable_name=durable,
        filter_subject=subject,
        ack_policy=api.AckPolicy.EXPLICIT,
        ack_wait=_ACK_WAIT_S,
        max_ack_pending=_HELD_MAX,
    )
    retry = jetstream.ReadRetry(link, stream.name)
    is_first = True
    while True:
        client = await link.client()
        try:
            if is_first:
                await _forget(client, stream.name, durable)
                is_first = False
            async with contextlib.aclosing(
                jetstream.pull(client, stream.name, config, served=retry.reset)
            ) as messages:
                async for message in messages:
                    yield Job(
                        message.metadata.sequence.stream,
                        message.subject,
                        message.data,
                        message.headers or {},
                        functools.partial(_done, message),
                        functools.partial(_hold, message),
                    )
        except (jetstream.ConsumerLost, *connection.LOST) as error:
            await retry.wait(error)


async def waiting_messages(
    link: connection.Connection, stream: streams.Stream, subject: str
) -> list[tuple[str, bytes, Mapping[str, str], int]]:
    """Return the newest message on each subject that matches a filter, as in `newest_messages`."""
    return await newest_messages(link, stream, await waiting_subjects(link, stream, subject))


async def newest_messages(
    link: connection.Connection, stream: streams.Stream, names: Sequence[str]
) -> list[tuple[str, bytes, Mapping[str, str], int]]:
    """Return subject, body, headers and sequence of the newest message on each of these subjects.

    Subjects without a message are omitted. Retries without limit.
    """
    # a work queue delivers only to its workers, so each message is read individually
    retry = jetstream.ReadRetry(link, stream.name)
    while True:
        client = await link.client()
        try:
            messages: list[tuple[str, bytes, Mapping[str, str], int]] = []
            for start in range(0, len(names), _READ_AT_ONCE):
                some = names[start : start + _READ_AT_ONCE]
                async with asyncio.TaskGroup() as tasks:
                    reads = [tasks.create_task(_newest(client, stream.name, n)) for n in some]
                messages += filter(None, (read.result() for read in reads))
        except* connection.LOST as error:
            await retry.wait(error)
        else:
            return messages


async def _newest(
    client: Client, stream: str, subject: str
) -> tuple[str, bytes, Mapping[str, str], int] | None:
    try:
        stored = await client.jetstream().get_last_msg(stream, subject)
    except nats.js.errors.NotFoundError:
        return None
    runtime.end_if_cancelled()
    # nats-py returns objects of its e-mail parser for values that are not ASCII
    headers = {name: str(value) for name, value in (stored.headers or {}).items()}
    return subject, stored.data or b"", headers, stored.seq or 0


async def waiting_subjects(
    link: connection.Connection, stream: streams.Stream, subject: str
) -> list[str]:
    """Return the subjects that match a filter and have a message; retries without limit."""
    retry = jetstream.ReadRetry(link, stream.name)
    while True:
        client = await link.client()
        try:
            return await jetstream.subjects(client, stream.name, subject)
        except connection.LOST as error:
            await retry.wait(error)


async def remove_waiting(
    link: connection.Connection, stream: streams.Stream, subject: str, *, up_to: int = 0
) -> bool:
    """Remove the messages on a subject; return whether the server confirmed this.

    With `up_to`, only messages up to that sequence are removed.
    """
    client = link.live_client()
    if client is None:
        return False
    try:
        await client.jetstream().purge_stream(
            stream.name, subject=subject, seq=up_to + 1 if up_to else None
        )
    except connection.LOST:
        return False
    runtime.end_if_cancelled()
    return True


async def _forget(client: Client, stream: str, durable: str) -> None:
    """Remove a consumer, so that its unfinished messages are redelivered immediately."""
    with contextlib.suppress(nats.js.errors.NotFoundError):
        await client.jetstream().delete_consumer(stream, durable)
    runtime.end_if_cancelled()


async def _done(message: connection.Message) -> None:
    with contextlib.suppress(*connection.LOST):
        await message.ack_sync(timeout=_ACK_TIMEOUT_S)
    runtime.end_if_cancelled()


async def _hold(message: connection.Message) -> None:
    with contextlib.suppress(*connection.LOST):
        await message.in_progress()
