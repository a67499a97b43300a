"""The end of a connection that dials, or that has unsent messages."""

import asyncio
from pathlib import Path

import pytest
from nats.aio import client as aio

from muster.local import nats
from muster.nats import compat, connection


@pytest.mark.parametrize("turns", range(8))
def test_leaving_while_a_dial_is_refused_never_hangs(turns: int) -> None:
    async def story() -> None:
        url = f"nats://127.0.0.1:{nats.free_port()}"
        async with asyncio.timeout(30), connection.Connection(url, name="test"):
            for _ in range(turns):
                await asyncio.sleep(0)

    asyncio.run(story())


def test_a_client_with_unsent_messages_is_closed_completely(tmp_path: Path) -> None:
    async def story() -> None:
        async with asyncio.timeout(30), nats.NatsServer(tmp_path / "nats") as server:
            client = aio.Client()
            await client.connect(server.url, allow_reconnect=False)
            messages = await client.subscribe("b")
            hearing = asyncio.ensure_future(anext(aiter(messages.messages)))
            await asyncio.sleep(0)
            await client.publish("a", b"")
            compat.abort(client)
            await compat.close(client)
            with pytest.raises(StopAsyncIteration):
                await hearing

    asyncio.run(story())
