"""Adapter: NATS: key-value buckets: values are stored, claimed for a time, and watched."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Final

import nats.js.errors
from nats.aio.client import Client
from nats.js import api

from muster.nats import connection, jetstream, streams
from muster.service import runtime

_WRITTEN_SINCE: Final = frozenset({10071, 10164})
"""nats-server's JSStreamWrongLastSequenceErr, and the same without the sequence."""
_GONE: Final = frozenset({"DEL", "PURGE"})


async def put(
    link: connection.Connection,
    bucket: streams.Bucket,
    key: str,
    value: bytes,
    *,
    is_leader: Callable[[], bool] | None = None,
) -> bool:
    """Write a value, however long that takes; an empty one deletes the key.

    Returns False if `is_leader` returned False before that; see `Bus.publish`.
    """
    headers = {} if value else {"KV-Operation": "DEL"}
    subject = _subject(bucket, key)
    stored = await jetstream.store(link, subject, value, headers, is_leader=is_leader)
    return stored is not jetstream.Stored.NO_LONGER_LEADER


async def read_all(link: connection.Connection, bucket: streams.Bucket) -> dict[str, bytes]:
    """Return every value of a bucket by its key, however long that takes."""
    every = _subject(bucket, ">")
    messages = await jetstream.newest(link, _stream(bucket), every)
    return {m.subject.removeprefix(every[:-1]): m.data for m in messages if m.data}


async def follow(
    link: connection.Connection, bucket: streams.Bucket
) -> AsyncIterator[tuple[str, bytes] | None]:
    """Yield every key and value of a bucket, then each change; the value of a deleted key is empty.

    None marks the end of what was there at first. After an outage everything is yielded again.
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
        except (jetstream.ConsumerLost, nats.js.errors.Error, *connection.LOST) as error:
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
    """Write a value that lasts `ttl_s` if nobody wrote since `revision`; return what is stored.

    A stored value without an end was never claimed, and is overwritten: JetStream sends its answers
    to any subject that a request names, with nobody's rights. Raises TimeoutError when no answer
    came in time: the value may be stored or not.
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
                # the bucket is lost, though the server is connected
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
    """Remove what was written at `revision` and nothing newer, if NATS is connected."""
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
    """Return what is stored now, and whether it is a claim or nothing.

    Raises what nats-py raises: then the value may be stored or not.
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
