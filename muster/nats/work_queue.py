"""Adapter: NATS: work queues, whose messages stay until the work they ask for is done.

A message is put under a subject of its own, and a newer one on the same subject replaces it. A
consumer holds each until it reports it done; the next consumer gets what a dead one held.
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

import nats.js.errors
from nats.aio.client import Client
from nats.js import api

from muster.nats import connection, jetstream, streams
from muster.service import runtime

_ACK_TIMEOUT_S: Final = 2.0
_READ_AT_ONCE: Final = 32
_HELD_MAX: Final = 10_000
_ACK_WAIT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Job:
    """One message; `number` is its sequence in the stream.

    `done` removes it, and returns when the server has confirmed that or is away. `hold` reports
    that it is still being worked on: call it every `HOLD_S`.
    """

    number: int
    subject: str
    body: bytes
    headers: Mapping[str, str]
    done: Callable[[], Awaitable[None]]
    hold: Callable[[], Awaitable[None]]


HOLD_S: Final = _ACK_WAIT_S / 3


async def put(
    link: connection.Connection,
    subject: str,
    body: bytes,
    *,
    key: str,
    headers: Mapping[str, str] | None = None,
) -> bool:
    """Store a message, however long that takes; the server drops repeats under the same `key`.

    A full queue accepts it once it has space. Returns whether it was new.
    """
    headers = {"Nats-Msg-Id": key, **(headers or {})}
    stored = await jetstream.store(link, subject, body, headers, is_queue=True)
    return stored is jetstream.Stored.NEW


async def consume(
    link: connection.Connection, stream: streams.Stream, *, durable: str, subject: str
) -> AsyncIterator[Job]:
    """Yield every message of one subject filter, first those that a consumer before us held.

    No other process may take from this consumer at the same time.
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
        except (jetstream.ConsumerLost, nats.js.errors.Error, *connection.LOST) as error:
            await retry.wait(error)


async def waiting(
    link: connection.Connection, stream: streams.Stream, subject: str
) -> list[tuple[str, bytes, Mapping[str, str], int]]:
    """Return subject, body, headers and sequence of every message, however long that takes."""
    # a work queue delivers to its workers only, so each message is read by itself
    retry = jetstream.ReadRetry(link, stream.name)
    while True:
        client = await link.client()
        try:
            names = await jetstream.subjects(client, stream.name, subject)
            messages: list[tuple[str, bytes, Mapping[str, str], int]] = []
            for start in range(0, len(names), _READ_AT_ONCE):
                some = names[start : start + _READ_AT_ONCE]
                async with asyncio.TaskGroup() as tasks:
                    reads = [tasks.create_task(_newest(client, stream.name, n)) for n in some]
                messages += filter(None, (read.result() for read in reads))
        except* (nats.js.errors.Error, *connection.LOST) as error:
            await retry.wait(error)
        else:
            return messages


async def _newest(
    client: Client, stream: str, subject: str
) -> tuple[str, bytes, Mapping[str, str], int] | None:
    try:
        stored = await client.jetstream().get_last_msg(stream, subject, direct=True)
    except nats.js.errors.NotFoundError:
        return None
    runtime.end_if_cancelled()
    return subject, stored.data or b"", stored.headers or {}, stored.seq or 0


async def subjects(link: connection.Connection, stream: streams.Stream, subject: str) -> list[str]:
    """Return the subjects with a waiting message, however long that takes."""
    retry = jetstream.ReadRetry(link, stream.name)
    while True:
        client = await link.client()
        try:
            return await jetstream.subjects(client, stream.name, subject)
        except (nats.js.errors.Error, *connection.LOST) as error:
            await retry.wait(error)


async def remove(
    link: connection.Connection, stream: streams.Stream, subject: str, *, up_to: int = 0
) -> bool:
    """Remove the messages of a subject; return whether the server confirmed it.

    With `up_to` only messages up to that sequence.
    """
    client = link.live_client()
    if client is None:
        return False
    try:
        await client.jetstream().purge_stream(
            stream.name, subject=subject, seq=up_to + 1 if up_to else None
        )
    except (nats.js.errors.Error, *connection.LOST):
        return False
    runtime.end_if_cancelled()
    return True


async def _forget(client: Client, stream: str, durable: str) -> None:
    """Remove a consumer, so that what its last user held is delivered again at once."""
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
