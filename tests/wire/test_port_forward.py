"""Ports of pods, reached through the API stand-in."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final

import pytest

from muster.kubernetes import api as kubernetes_api
from muster.kubernetes import port_forward
from muster.local import httpd, kubernetes

PORT: Final = 4222
LONG: Final = bytes(range(256)) * 4096

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send everything back."""
    while piece := await reader.read(65_536):
        writer.write(piece)
        await writer.drain()
    writer.close()


async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send a long answer at once, and close the connection."""
    writer.write(LONG)
    writer.close()


@contextlib.asynccontextmanager
async def world(
    tmp_path: Path, serve: Serve, *, user: str = ""
) -> AsyncIterator[tuple[kubernetes.KubernetesApi, kubernetes_api.Api]]:
    """Yield a stand-in with a pod whose port is served, and a client of the stand-in."""
    config = tmp_path / "kubeconfig"
    async with asyncio.timeout(30), kubernetes.KubernetesApi() as stand_in:
        stand_in.write_kubeconfig(config, token=user)
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        stand_in.ports["pod-a", PORT] = httpd.Address("127.0.0.1", port)
        async with await kubernetes_api.find(kubeconfig=str(config), context=None) as api:
            yield stand_in, api
        server.close()


def forward(
    api: kubernetes_api.Api, *, pod: str = "pod-a", port: int = PORT
) -> port_forward.Forward:
    return port_forward.Forward(api, namespace="muster", pod=pod, port=port)


async def received(address: str, *, sent: bytes = b"", expect: int = -1) -> bytes:
    """Connect, send, and return what came back until the end, or `expect` bytes."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    try:
        if expect >= 0:
            return await reader.readexactly(expect)
        return await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def test_every_byte_arrives_in_both_directions_on_many_connections(tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path, echo) as (_, api), forward(api).opened() as address:
            echoed = await asyncio.gather(
                *(received(address, sent=LONG, expect=len(LONG)) for _ in range(4))
            )
            assert echoed == [LONG] * 4

    asyncio.run(story())


def test_what_was_sent_before_the_end_arrives_before_the_end(tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path, answer) as (_, api), forward(api).opened() as address:
            assert await received(address) == LONG

    asyncio.run(story())


def test_a_port_that_refuses_is_an_end_with_the_kubelets_words(tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path, echo) as (_, api):
            closed = forward(api, port=1)
            async with closed.opened() as address:
                assert await received(address) == b""
            assert closed.problem.startswith("error forwarding port 1 to pod pod-a: connection ref")

    asyncio.run(story())


@pytest.mark.parametrize("verb", ["get", "create"])
def test_without_the_right_a_check_is_refused(verb: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path, echo, user="viewer") as (stand_in, api):
            await forward(api).check()
            stand_in.users.deny("viewer", verb, "pods/portforward")
            with pytest.raises(kubernetes_api.Refused) as refused:
                await forward(api).check()
            assert refused.value.answer.status == 403

    asyncio.run(story())


def test_the_end_of_the_block_ends_every_connection(tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path, echo) as (_, api):
            async with forward(api).opened() as address:
                host, _, port = address.rpartition(":")
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(b"x")
                assert await reader.readexactly(1) == b"x"
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(host, int(port))

    asyncio.run(story())
