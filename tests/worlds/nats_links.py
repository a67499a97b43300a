"""Helpers for tests of connections to NATS: a server, another client, and waits."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import nats.aio.client

from muster.local import nats as local
from muster.nats import connection

Story = Callable[[local.NatsServer], Awaitable[None]]


def play(directory: Path, story: Story, config: str | None = None) -> None:
    """Run `story` with a new NATS server, for at most 100 s."""

    async def played() -> None:
        file = None
        if config is not None:
            file = directory / "nats.conf"
            file.write_text(config)
        async with (
            asyncio.timeout(100),
            local.NatsServer(directory / "nats", config=file) as server,
        ):
            await story(server)

    asyncio.run(played())


@contextlib.asynccontextmanager
async def raw(url: str) -> AsyncIterator[nats.aio.client.Client]:
    """Connect a client of nats-py to the server; yield it."""
    client = nats.aio.client.Client()
    await client.connect(url)
    try:
        yield client
    finally:
        await client.close()


async def flushed(client: nats.aio.client.Client) -> None:
    """Wait until the server has received everything that a client sent.

    This takes two flushes: nats-py 2.16 writes the PING of the first one before pending data.
    """
    await client.flush()
    await client.flush()


async def settled(link: connection.Connection) -> None:
    """Wait until the server knows the subscriptions of this connection."""
    await flushed(await link.client())


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, while the event loop runs."""
    while not condition():  # it may depend on another library, which does not notify
        await asyncio.sleep(0.005)
