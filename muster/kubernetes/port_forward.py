"""Adapter for WebSocket: forwards local ports to pods through the API server.

Each connection to a local port is one WebSocket of `v4.channel.k8s.io`: the first byte of a message
is a channel, 0 for data and 1 for an error, and the first message on each channel is the port
(kubelet `cri/streaming/portforward/websocket.go`; Kubernetes 1.37). A WebSocket has no half-close:
when one side closes, the other is closed too.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

import aiohttp

from muster.kubernetes import api as kubernetes_api

PROTOCOL: Final = "v4.channel.k8s.io"
_DATA: Final = b"\x00"
_PIECE_BYTES: Final = 32 * 1024
_CONNECTIONS_MAX: Final = 32
_CONNECT_S: Final = 10.0
_ERROR_CHARS_MAX: Final = 300


class Forward:
    """Forwards a local port to one pod's port while the `opened` block runs."""

    def __init__(self, api: kubernetes_api.Api, *, namespace: str, pod: str, port: int) -> None:
        self.pod = pod
        self.local_port = 0
        self.problem = ""
        """The problem of the last failed connection; empty if none has failed."""
        self._api = api
        self._path = f"/api/v1/namespaces/{namespace}/pods/{pod}/portforward"
        self._port = port
        self._open: set[asyncio.Task[None]] = set()

    async def check(self) -> None:
        """Open a WebSocket and close it. Raises Refused and the exceptions in `api.LOST`."""
        socket = await self._connect()
        await socket.close()

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[str]:
        """Listen on a free port of this machine; yield `host:port`."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.local_port = server.sockets[0].getsockname()[1]
        try:
            yield f"127.0.0.1:{self.local_port}"
        finally:
            server.close()
            for task in self._open:
                task.cancel()
            await asyncio.gather(*self._open, return_exceptions=True)

    async def _connect(self) -> aiohttp.ClientWebSocketResponse:
        return await self._api.connect(
            self._path, {"ports": str(self._port)}, protocol=PROTOCOL, timeout_s=_CONNECT_S
        )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "streams run this as a task"
        self._open.add(task)
        try:
            if len(self._open) <= _CONNECTIONS_MAX:
                await self._relay(reader, writer)
        except kubernetes_api.Refused as error:
            self.problem = str(error)
        except kubernetes_api.LOST as error:
            self.problem = str(error) or type(error).__name__
        except asyncio.CancelledError:
            pass  # the block has ended
        finally:
            self._open.discard(task)
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copy in both directions until one side ends."""
        socket = await self._connect()
        try:
            sending = asyncio.create_task(_send(reader, socket))
            try:
                await self._receive(socket, writer)
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
        finally:
            await socket.close()

    async def _receive(
        self, socket: aiohttp.ClientWebSocketResponse, writer: asyncio.StreamWriter
    ) -> None:
        """Copy the pod's data to the client until the pod disconnects or reports an error."""
        begun: set[bytes] = set()
        async for message in socket:
            if message.type is not aiohttp.WSMsgType.BINARY:
                continue
            channel, content = message.data[:1], message.data[1:]
            if channel not in begun:
                begun.add(channel)  # the port number
            elif channel != _DATA:
                text = content[: 4 * _ERROR_CHARS_MAX].decode("utf-8", "replace")
                self.problem = " ".join(text.split())[:_ERROR_CHARS_MAX]
                return
            else:
                writer.write(content)
                await writer.drain()
        writer.close()
        async with asyncio.timeout(_CONNECT_S):
            await writer.wait_closed()


async def _send(reader: asyncio.StreamReader, socket: aiohttp.ClientWebSocketResponse) -> None:
    """Copy the local client's data to the pod; close the WebSocket at the end."""
    try:
        with contextlib.suppress(*kubernetes_api.LOST):
            while piece := await reader.read(_PIECE_BYTES):
                await socket.send_bytes(_DATA + piece)
    finally:
        await socket.close()
