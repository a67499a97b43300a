"""Adapter for WebSocket: serves `pods/portforward` by forwarding connections to local ports.

The frames are those of `v4.channel.k8s.io`: the first byte is a channel, 0 for data and 1 for an
error, and the first message on each channel is the port (kubelet
`cri/streaming/portforward/websocket.go`; Kubernetes 1.37).
"""

import asyncio
import contextlib
from collections.abc import Mapping

from aiohttp import WSMsgType, web

from muster.local import httpd
from muster.local.kubernetes import refusals

PROTOCOL = "v4.channel.k8s.io"
_DATA, _ERROR = b"\x00", b"\x01"
_PIECE_BYTES = 32 * 1024

Targets = Mapping[tuple[str, int], httpd.Address]
"""The real address of a pod's port, by the pod's name and the port."""


async def serve(request: web.Request, pod: str, targets: Targets) -> web.WebSocketResponse:
    """Forward one connection to a port of a pod; refuse it if the port has no target."""
    number = request.query.get("ports", "")
    if not (number.isascii() and number.isdigit()):
        raise refusals.bad_request("you must specify at least 1 port")
    socket = web.WebSocketResponse(protocols=(PROTOCOL,))
    await socket.prepare(request)
    port = int(number)
    for channel in (_DATA, _ERROR):
        await socket.send_bytes(channel + port.to_bytes(2, "little"))
    target = targets.get((pod, port), httpd.Address("127.0.0.1", 1))
    try:
        reader, writer = await asyncio.open_connection(target.host, target.port)
    except OSError as error:
        text = f"error forwarding port {port} to pod {pod}: connection refused ({error.errno})"
        await socket.send_bytes(_ERROR + text.encode())
        await socket.close()
        return socket
    sending = asyncio.create_task(_send(reader, socket))
    try:
        async for message in socket:
            if message.type is WSMsgType.BINARY and message.data[:1] == _DATA:
                writer.write(message.data[1:])
                await writer.drain()
    finally:
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await sending
        writer.close()
    return socket


async def _send(reader: asyncio.StreamReader, socket: web.WebSocketResponse) -> None:
    """Copy data from the pod's port to the client, until the port closes the connection."""
    with contextlib.suppress(OSError):
        while piece := await reader.read(_PIECE_BYTES):
            await socket.send_bytes(_DATA + piece)
    await socket.close()
