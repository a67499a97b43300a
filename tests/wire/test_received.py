"""The messages of a subscription, in order and without delay, until its client is closed."""

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator, Awaitable, Callable

import nats.errors
import pytest
from nats.aio.client import Client

from muster.local import nats as local_nats
from muster.nats import compat


@contextlib.asynccontextmanager
async def received(directory: pathlib.Path) -> AsyncIterator[tuple[Client, compat.Received]]:
    client = Client()
    async with local_nats.NatsServer(directory) as server:
        await compat.connect(client, [server.url])
        messages = compat.Received(client)
        await client.subscribe("a", cb=messages.put)
        try:
            yield client, messages
        finally:
            await compat.close(client)


def play(
    story: Callable[[Client, compat.Received], Awaitable[None]], directory: pathlib.Path
) -> None:
    async def played() -> None:
        async with asyncio.timeout(30), received(directory) as (client, messages):
            await story(client, messages)

    asyncio.run(played())


def test_messages_come_in_order_and_other_tasks_run_meanwhile(tmp_path: pathlib.Path) -> None:
    async def story(client: Client, messages: compat.Received) -> None:
        for number in range(200):
            await client.publish("a", str(number).encode())
        await client.flush()
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        read = [(await messages.next(timeout_s=5)).data for _ in range(200)]
        counting.cancel()
        assert read == [str(number).encode() for number in range(200)]
        assert turns >= 10

    play(story, tmp_path)


def test_a_reader_waits_for_a_limited_time(tmp_path: pathlib.Path) -> None:
    async def story(client: Client, messages: compat.Received) -> None:
        with pytest.raises(nats.errors.TimeoutError):
            await messages.next(timeout_s=0.1)
        waiting = asyncio.create_task(messages.next(timeout_s=20))
        await client.publish("a", b"late")
        assert (await waiting).data == b"late"

    play(story, tmp_path)


def test_a_reader_notices_that_its_client_is_closed(tmp_path: pathlib.Path) -> None:
    async def story(client: Client, messages: compat.Received) -> None:
        waiting = asyncio.create_task(messages.next(timeout_s=4))
        await compat.close(client)
        with pytest.raises(nats.errors.ConnectionClosedError):
            await waiting

    play(story, tmp_path)
