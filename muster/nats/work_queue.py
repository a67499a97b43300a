"""Adapter: NATS: work queues, whose messages stay until somebody has done what they ask for.

A message goes in under a subject of its own, and a newer one on the same subject takes its place.
A consumer holds each until it says that it is done; whoever dies leaves all it held to the next.
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
from muster.service import logs, runtime

_PUT_TIMEOUT_S: Final = 2.0
_FAILURES_TOLD: Final = 5
_ASKED_AT_ONCE: Final = 32
_HELD_MAX: Final = 10_000
_ACK_WAIT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Job:
    """One message; `number` is its place in the stream.

    `done` removes it, and returns when the server has said so or cannot be asked. `hold` says that
    it is still being worked on: it must be called every `HOLD_S`.
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
    """Store a message, however long that takes; what repeats it under the same `key` is dropped.

    A queue that is full takes it when there is room. Returns whether it was none that was dropped.
    """
    backoff = connection.Backoff()
    failures = 0
    while True:
        client = await link.client()
        try:
            stored = await client.jetstream().publish(
                subject,
                body,
                timeout=_PUT_TIMEOUT_S,
                headers={"Nats-Msg-Id": key, **(headers or {})},
            )
        except (nats.js.errors.Error, *connection.LOST) as error:
            failures += 1
            if failures == _FAILURES_TOLD:
                text = str(error) or type(error).__name__
                logs.logger().error("message_waits", subject=subject, error=text)
            if isinstance(error, nats.js.errors.NoStreamResponseError):
                with contextlib.suppress(*connection.LOST):
                    await link.prepare(client)
            await backoff.wait()
        else:
            runtime.end_if_cancelled()
            if failures >= _FAILURES_TOLD:
                logs.logger().info("message_stored_late", subject=subject, attempts=failures + 1)
            return not stored.duplicate


async def take(
    link: connection.Connection, stream: streams.Stream, *, durable: str, subject: str
) -> AsyncIterator[Job]:
    """Give every message of one subject filter, those first that somebody held before us.

    Nobody else may take from this consumer at the same time.
    """
    config = api.ConsumerConfig(
        name=durable,
        durable_name=durable,
        filter_subject=subject,
        ack_policy=api.AckPolicy.EXPLICIT,
        ack_wait=_ACK_WAIT_S,
        max_ack_pending=_HELD_MAX,
    )
    patience = jetstream.Patience(link, stream.name)
    is_first = True
    while True:
        client = await link.client()
        try:
            if is_first:
                await _forget(client, stream.name, durable)
                is_first = False
            async with contextlib.aclosing(
                jetstream.pull(client, stream.name, config, served=patience.reset)
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
            await patience.wait(error)


async def waiting(
    link: connection.Connection, stream: streams.Stream, subject: str
) -> list[tuple[str, bytes, Mapping[str, str], int]]:
    """Return subject, body, headers and place of everything that waits, however long that takes."""
    # a work queue gives its messages to nobody but its workers: each is asked for by itself
    patience = jetstream.Patience(link, stream.name)
    while True:
        client = await link.client()
        try:
            names = await jetstream.subjects(client, stream.name, subject)
            found: list[tuple[str, bytes, Mapping[str, str], int]] = []
            for begin in range(0, len(names), _ASKED_AT_ONCE):
                some = names[begin : begin + _ASKED_AT_ONCE]
                async with asyncio.TaskGroup() as tasks:
                    asked = [tasks.create_task(_newest(client, stream.name, one)) for one in some]
                found += [one for one in (task.result() for task in asked) if one is not None]
        except* (nats.js.errors.Error, *connection.LOST) as error:
            await patience.wait(error)
        else:
            return found


async def _newest(
    client: Client, stream: str, subject: str
) -> tuple[str, bytes, Mapping[str, str], int] | None:
    try:
        got = await client.jetstream().get_last_msg(stream, subject, direct=True)
    except nats.js.errors.NotFoundError:
        return None
    runtime.end_if_cancelled()
    return subject, got.data or b"", got.headers or {}, got.seq or 0


async def subjects(link: connection.Connection, stream: streams.Stream, subject: str) -> list[str]:
    """Return under which subjects something waits, however long that takes."""
    patience = jetstream.Patience(link, stream.name)
    while True:
        client = await link.client()
        try:
            return await jetstream.subjects(client, stream.name, subject)
        except (nats.js.errors.Error, *connection.LOST) as error:
            await patience.wait(error)


async def remove(
    link: connection.Connection, stream: streams.Stream, subject: str, *, up_to: int = 0
) -> bool:
    """Remove what is under a subject; tell whether the server said so.

    With `up_to` what came after that place in the stream stays.
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
    """Remove a consumer, so that what its last user held is given again at once."""
    with contextlib.suppress(nats.js.errors.NotFoundError):
        await client.jetstream().delete_consumer(stream, durable)
    runtime.end_if_cancelled()


async def _done(message: connection.Message) -> None:
    with contextlib.suppress(*connection.LOST):
        await message.ack_sync(timeout=_PUT_TIMEOUT_S)
    runtime.end_if_cancelled()


async def _hold(message: connection.Message) -> None:
    with contextlib.suppress(*connection.LOST):
        await message.in_progress()
