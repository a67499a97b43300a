"""Connections to a server that sends a PING before it accepts a client, as one with a gate does.

The server is scripted, because nothing controls when a real one sends its first PING.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from muster.nats import connection
from tests.worlds import bus_subjects

INFO = b'INFO {"server_id":"x","version":"2.15.0","headers":true,"max_payload":1048576}\r\n'
PING, PONG = b"PING\r\n", b"PONG\r\n"
REFUSED = b"-ERR 'Authorization Violation'\r\n"
END = b"+OK\r\n"
"""After an answer that ends with this, the server closes the connection."""


class Server:
    """A scripted server: one of `answers` for each connection, and PONG when they are used up."""

    def __init__(self, *answers: bytes) -> None:
        self._answers = [*answers]
        self._open: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection; after an answer other than PONG, send nothing more."""
        self._open.append(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            writer.write(INFO)
            answer = self._answers.pop(0) if self._answers else PONG
            while True:
                await reader.readuntil(PING)
                writer.write(answer)
                if answer.endswith(END):
                    writer.close()
                if answer != PONG:
                    return

    async def hang_up(self) -> None:
        """Close every connection."""
        while self._open:
            writer = self._open.pop()
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


@contextlib.asynccontextmanager
async def serving(*answers: bytes) -> AsyncIterator[tuple[Server, str]]:
    made = Server(*answers)
    async with asyncio.timeout(30), await asyncio.start_server(made.serve, "127.0.0.1", 0) as at:
        yield made, f"nats://127.0.0.1:{at.sockets[0].getsockname()[1]}"
        await made.hang_up()


NO_NATS = (b"-ERR\r\n", b"-ERR '\xff'\r\n", b"x" * 40_000 + b"\r\n")


@pytest.mark.parametrize("answer", [PING, PING + END, PING + REFUSED, *NO_NATS])
def test_a_client_that_is_not_accepted_at_first_dials_again(answer: bytes) -> None:
    async def story() -> None:
        async with (
            serving(answer) as (_, url),
            connection.Connection(url, name="test") as link,
        ):
            await link.client()
            assert link.epoch == 1

    asyncio.run(story())


@pytest.mark.parametrize("then", [END, REFUSED], ids=["end", "refusal"])
def test_a_client_that_is_not_accepted_after_a_loss_dials_again(then: bytes) -> None:
    async def story() -> None:
        async with (
            serving(PONG, PING + then) as (server, url),
            connection.Connection(url, name="test") as link,
        ):
            await link.client()
            await server.hang_up()
            await bus_subjects.until(lambda: link.epoch == 2)

    asyncio.run(story())


def test_a_client_that_silently_stops_dialling_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "_CHECK_S", 0.1)

    async def story() -> None:
        async with serving() as (server, url), connection.Connection(url, name="test") as link:
            changes = link.changes()
            while not await anext(changes):
                pass
            await server.hang_up()
            while await anext(changes):
                pass
            task = link._client._reconnection_task
            assert task is not None
            task.cancel()
            while not await anext(changes):
                pass

    asyncio.run(story())


def test_a_client_that_silently_stops_reading_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_CHECK_S", 0.1)

    async def story() -> None:
        async with serving() as (_, url), connection.Connection(url, name="test") as link:
            client = await link.client()
            task = client._reading_task
            assert task is not None
            task.cancel()
            await bus_subjects.until(lambda: link.epoch == 2)
            assert await link.client() is not client

    asyncio.run(story())


@pytest.mark.parametrize("hears", [1, -1])
def test_a_client_whose_tls_handshake_fails_at_first_dials_again(hears: int) -> None:
    """The server closes the connection during the handshake, or when the client gives up."""
    dialled = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal dialled
        dialled += 1
        writer.write(INFO.replace(b"{", b'{"tls_required":true,', 1))
        with contextlib.suppress(OSError):
            await reader.read(hears)
        writer.transport.abort()

    async def story() -> None:
        async with asyncio.timeout(30), await asyncio.start_server(serve, "127.0.0.1", 0) as at:
            url = f"tls://127.0.0.1:{at.sockets[0].getsockname()[1]}"
            async with connection.Connection(url, name="t"):
                await bus_subjects.until(lambda: dialled >= 3)

    asyncio.run(story())


def test_a_probe_connection_that_is_not_answered_does_not_count() -> None:
    async def story() -> None:
        async with (
            serving(PONG, PING) as (_, url),
            connection.Connection(url, name="test") as link,
        ):
            await link.client()
            assert not await link.probe_connect("other", 5)
            assert await link.probe_connect("other", 5)

    asyncio.run(story())
