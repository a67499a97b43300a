"""Adapter for gRPC: a foreign device plugin for `bench.watch`, which logs connections and can fail.

python -m bench.foreign_plugin DIRECTORY RESOURCE SOCKET DEVICES NOTES

It serves DEVICES devices on a socket in the kubelet's directory. Each connection, and each call of
GetDevicePluginOptions, is logged in the file NOTES, with the machine's monotonic time. SIGUSR1 ends
its ListAndWatch streams, which no kubelet reopens; SIGUSR2 makes it register again.
"""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import grpc.aio

from bench import empty_plugin
from muster.pb import deviceplugin_pb2 as dp
from muster.pb import rpc

CONNECTED: Final = "connected"
ASKED: Final = "asked"
_OWN_POOL: Final = (("grpc.use_local_subchannel_pool", 1),)
_CHUNK_BYTES: Final = 65_536


class ForeignPlugin(empty_plugin.EmptyPlugin):
    """Answers like the empty plugin, with more devices."""

    def __init__(self, devices: int, notes: Path) -> None:
        super().__init__("/dev/null")
        self._listed = dp.ListAndWatchResponse(
            devices=[dp.Device(ID=f"device-{n}", health="Healthy") for n in range(devices)]
        )
        self._notes = notes
        self._broken = asyncio.Event()

    def note(self, what: str) -> None:
        """Append a line with the current time to NOTES."""
        with self._notes.open("a") as file:
            file.write(f"{time.monotonic():.6f} {what}\n")

    def end_streams(self) -> None:
        """End the streams that are open."""
        self._broken.set()
        self._broken = asyncio.Event()

    async def get_device_plugin_options(
        self, request: dp.Empty, context: rpc.Context[dp.Empty, dp.DevicePluginOptions]
    ) -> dp.DevicePluginOptions:
        """Return no options, and log the call."""
        self.note(ASKED)
        return await super().get_device_plugin_options(request, context)

    async def list_and_watch(
        self, request: dp.Empty, context: rpc.Context[dp.Empty, dp.ListAndWatchResponse]
    ) -> AsyncIterator[dp.ListAndWatchResponse]:
        """Send one device list, and keep the stream open until `end_streams`."""
        del request, context
        broken = self._broken
        yield self._listed
        await broken.wait()


class Front:
    """The public socket: logs each connection, and forwards it to the real server."""

    def __init__(self, plugin: ForeignPlugin, behind: str) -> None:
        self._plugin = plugin
        self._behind = behind

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward bytes in both directions until either side closes."""
        self._plugin.note(CONNECTED)
        theirs, ours = await asyncio.open_unix_connection(self._behind)
        passing = [
            asyncio.create_task(_pass(reader, ours)),
            asyncio.create_task(_pass(theirs, writer)),
        ]
        await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
        for task in passing:
            task.cancel()
        for each in (writer, ours):
            each.close()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(_CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()


async def serve(directory: str, resource: str, name: str, devices: str, notes: str) -> None:
    """Serve and register; serve until the process ends."""
    sockets = Path(directory, "device-plugins")
    plugin = ForeignPlugin(int(devices), Path(notes))
    loop = asyncio.get_running_loop()
    again = asyncio.Event()
    loop.add_signal_handler(signal.SIGUSR1, plugin.end_streams)
    loop.add_signal_handler(signal.SIGUSR2, again.set)
    with tempfile.TemporaryDirectory() as folder:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((rpc.device_plugin_handler(plugin),))
        server.add_insecure_port(f"unix:{folder}/behind.sock")
        await server.start()
        front = Front(plugin, f"{folder}/behind.sock")
        (sockets / name).unlink(missing_ok=True)
        await asyncio.start_unix_server(front.connected, sockets / name)
        while True:
            await _register(sockets / "kubelet.sock", resource, name)
            again.clear()
            await again.wait()


async def _register(kubelet: Path, resource: str, endpoint: str) -> None:
    async with grpc.aio.insecure_channel(f"unix:{kubelet}", options=_OWN_POOL) as channel:
        await rpc.RegistrationClient(channel).register(
            dp.RegisterRequest(version="v1beta1", endpoint=endpoint, resource_name=resource)
        )


if __name__ == "__main__":
    try:
        asyncio.run(serve(*sys.argv[1:]))
    finally:
        os._exit(0)
