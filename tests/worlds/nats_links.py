"""Connections to NATS in tests: what is waited for, and another client on the same server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import nats.aio.client

from muster.local import nats as local
from muster.nats import connection

Story = Callable[[local.NatsServer], Awaitable[None]]


def play(directory: Path, story: Story, config: str | None = None) -> None:
    """Play a story with a server of its own."""

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
    """Connect another client to the same server."""
    client = nats.aio.client.Client()
    await client.connect(url)
    try:
        yield client
    finally:
        await client.close()


async def flushed(client: nats.aio.client.Client) -> None:
    """Return when the server has received all that a client sent.

    The first of two flushes sends it: nats-py writes its PING ahead of what is pending (2.16).
    """
    await client.flush()
    await client.flush()


async def settled(link: connection.Connection) -> None:
    """Return when the server knows our subscriptions."""
    await flushed(await link.client())


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop go on until a condition holds."""
    while not condition():  # what it waits for is another library's
        await asyncio.sleep(0.005)
