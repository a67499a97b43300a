"""The launcher of a real nats-server."""

import asyncio
import os
import socket
from pathlib import Path

import nats.aio.client
import pytest

from muster.local import nats as local
from tests.worlds import nats_links


async def answers(server: local.NatsServer) -> bool:
    client = nats.aio.client.Client()
    await client.connect(server.url, allow_reconnect=False)
    await nats_links.flushed(client)
    await client.close()
    return True


def test_a_server_is_ready_when_it_is_entered_and_gone_when_it_is_left(tmp_path: Path) -> None:
    async def story() -> None:
        async with asyncio.timeout(100), local.NatsServer(tmp_path / "nats") as server:
            assert await answers(server)
            pid = server.pid
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", server.port))

    asyncio.run(story())


def test_streams_outlive_a_kill_on_the_same_port(tmp_path: Path) -> None:
    async def story() -> None:
        async with asyncio.timeout(100), local.NatsServer(tmp_path / "nats") as server:
            port = server.port
            client = nats.aio.client.Client()
            await client.connect(server.url)
            await client.jetstream().add_stream(name="S", subjects=["s"])
            await client.jetstream().publish("s", b"kept")
            await client.close()
            await server.kill()
            await server.start()
            assert server.port == port
            client = nats.aio.client.Client()
            await client.connect(server.url)
            assert (await client.jetstream().get_msg("S", seq=1)).data == b"kept"
            await client.close()

    asyncio.run(story())


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    async def story() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(local.NatsUnavailable, match=rf"port {port}: .*address already in"):
                async with asyncio.timeout(100), local.NatsServer(tmp_path / "nats", port=port):
                    pass

    asyncio.run(story())


def test_a_broken_configuration_is_named(tmp_path: Path) -> None:
    file = tmp_path / "nats.conf"
    file.write_text("authorization { users = [")

    async def story() -> None:
        with pytest.raises(local.NatsUnavailable, match="nats-server on port"):
            async with asyncio.timeout(100), local.NatsServer(tmp_path / "nats", config=file):
                pass

    asyncio.run(story())


def test_stopping_a_server_that_is_gone_ends_all_the_same(tmp_path: Path) -> None:
    async def story() -> None:
        async with asyncio.timeout(100), local.NatsServer(tmp_path / "nats") as server:
            await server.kill()
            await server.kill()
            await server.stop()

    asyncio.run(story())
