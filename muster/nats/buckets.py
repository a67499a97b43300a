"""Adapter: NATS: values by key, which are remembered, claimed for a while, and followed."""

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


async def remember(
    link: connection.Connection,
    bucket: streams.Bucket,
    key: str,
    value: bytes,
    *,
    still: Callable[[], bool] | None = None,
) -> bool:
    """Write a value, however long that takes; empty is forgetting it.

    `still` is that of `Bus.publish`.
    """
    headers = {} if value else {"KV-Operation": "DEL"}
    return await jetstream.store(link, _subject(bucket, key), value, headers, still=still)


async def recall(link: connection.Connection, bucket: streams.Bucket) -> dict[str, bytes]:
    """Return every remembered value of a bucket by its key, however long that takes."""
    every = _subject(bucket, ">")
    messages = await jetstream.newest(link, _stream(bucket), every)
    return {m.subject.removeprefix(every[:-1]): m.data for m in messages if m.data}


async def follow(
    link: connection.Connection, bucket: streams.Bucket
) -> AsyncIterator[tuple[str, bytes] | None]:
    """Give every key and value of a bucket, empty for one that is gone, then each change, for ever.

    None says that all that was there has been given. After an outage everything is given again.
    """
    stream, every = _stream(bucket), _subject(bucket, ">")
    config = jetstream.newest_of_each(every)
    patience = jetstream.Patience(link, stream)
    while True:
        client = await link.client()
        try:
            left = len(await jetstream.subjects(client, stream, every))
            if not left:
                yield None
            async with contextlib.aclosing(
                jetstream.pull(client, stream, config, served=patience.reset)
            ) as messages:
                async for message in messages:
                    gone = (message.headers or {}).get("KV-Operation") in _GONE
                    yield message.subject.removeprefix(every[:-1]), b"" if gone else message.data
                    left -= 1
                    if left == 0:
                        yield None
        except (jetstream.ConsumerLost, nats.js.errors.Error, *connection.LOST) as error:
            await patience.wait(error)


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
    """Write a value that lasts `ttl_s` if nobody wrote since `revision`; return what is there.

    What is there and would last for ever was never claimed, and is written over: JetStream sends
    its answers wherever a request asks it to, with nobody's rights. Raises TimeoutError when no
    answer came in time: the value may be there or not.
    """

    async def write(client: Client, over: int) -> tuple[streams.Claimed, bool]:
        return await _claim(client, bucket, key, value, ttl_s=ttl_s, revision=over)

    async with asyncio.timeout(timeout_s):
        client = await link.client()
        try:
            found, is_claim = await write(client, revision)
            if not is_claim:
                found, _ = await write(client, found.revision)
        except connection.LOST as error:
            runtime.end_if_cancelled()
            if isinstance(error, nats.js.errors.NoStreamResponseError):
                # the bucket is lost, though the server is there
                with contextlib.suppress(*connection.LOST):
                    await link.prepare(client)
            raise TimeoutError(str(error) or type(error).__name__) from error
    runtime.end_if_cancelled()
    return found


async def release(
    link: connection.Connection,
    bucket: streams.Bucket,
    key: str,
    *,
    revision: int,
    timeout_s: float,
) -> None:
    """Remove what was written at `revision` and nothing newer, if NATS is there."""
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
    """Return what is there now, and whether it is a claim or nothing. Raises what nats-py raises.

    Then the value may be there or not.
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
    found = await jetstream.last(client, stream, subject)
    if found is None:
        return streams.Claimed(0, b"", written=False), True
    is_claim = api.Header.MSG_TTL.value in (found.headers or {})
    return streams.Claimed(found.seq or 0, found.data or b"", written=False), is_claim


def _stream(bucket: streams.Bucket) -> str:
    return f"KV_{bucket.name}"


def _subject(bucket: streams.Bucket, key: str) -> str:
    return f"$KV.{bucket.name}.{key}"
