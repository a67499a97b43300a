"""A stand-in for a third-party device plugin, which shares no code with muster's plugin.

    python -m tests.programs.foreign_plugin DIRECTORY SOCKET RESOURCE DEVICES [FRAGILE]

It serves SOCKET and registers it, once, with the kubelet in DIRECTORY. It logs its registration,
each connection to its socket and each called method as lines of JSON; to notice connections, it
forwards them to a second socket, which gRPC serves. It exits if a request contains FRAGILE.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import grpc.aio

from muster.pb import deviceplugin_pb2 as dp

OPTIONS: Final = "/v1beta1.DevicePlugin/GetDevicePluginOptions"
LIST: Final = "/v1beta1.DevicePlugin/ListAndWatch"
_LOCAL: Final = (("grpc.use_local_subchannel_pool", 1),)


def say(event: str, **facts: object) -> None:
    sys.stdout.write(f"{json.dumps({'event': event, **facts})}\n")
    sys.stdout.flush()


class Methods(grpc.GenericRpcHandler):
    """Serves the methods that the kubelet calls, and logs every call."""

    def __init__(self, count: int) -> None:
        self._devices = [dp.Device(ID=str(at), health="Healthy") for at in range(count)]

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        say("called", method=details.method)
        if details.method == OPTIONS:
            return grpc.unary_unary_rpc_method_handler(self._options)
        if details.method == LIST:
            return grpc.unary_stream_rpc_method_handler(self._list)
        return None

    async def _options(self, _request: bytes, _context: object) -> bytes:
        return b""

    async def _list(self, _request: bytes, _context: object) -> AsyncIterator[bytes]:
        yield dp.ListAndWatchResponse(devices=self._devices).SerializeToString()
        await asyncio.Event().wait()


async def serve(
    directory: Path, name: str, resource: str, count: int, fragile: bytes = b""
) -> None:
    with tempfile.TemporaryDirectory(prefix="mu-") as folder:
        inner = f"{folder}/grpc.sock"
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((Methods(count),))
        server.add_insecure_port(f"unix:{inner}")
        await server.start()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            say("connected")
            inside = await asyncio.open_unix_connection(inner)
            # the kubelet's connection is cancelled at the end
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(copy(reader, inside[1], fragile), copy(inside[0], writer))
            say("disconnected")

        path = directory / "device-plugins" / name
        path.unlink(missing_ok=True)
        await asyncio.start_unix_server(connected, path)
        await register(directory, name, resource)
        say("registered", process=os.getpid())
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        await stopped.wait()
        path.unlink(missing_ok=True)


async def copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fragile: bytes = b""
) -> None:
    with contextlib.suppress(OSError, asyncio.CancelledError):
        while data := await reader.read(65_536):
            if fragile and fragile in data:
                os._exit(1)
            writer.write(data)
            await writer.drain()
    writer.close()


async def register(directory: Path, name: str, resource: str) -> None:
    kubelet = directory / "device-plugins" / "kubelet.sock"
    request = dp.RegisterRequest(version="v1beta1", endpoint=name, resource_name=resource)
    async with grpc.aio.insecure_channel(f"unix:{kubelet}", options=_LOCAL) as channel:
        call = channel.unary_unary(
            "/v1beta1.Registration/Register",
            dp.RegisterRequest.SerializeToString,
            dp.Empty.FromString,
        )
        await call(request)


if __name__ == "__main__":
    root, name, resource, count, text = [*sys.argv[1:], ""][:5]
    asyncio.run(serve(Path(root), name, resource, int(count), text.encode()))
