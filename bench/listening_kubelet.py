"""Adapter for gRPC: a minimal kubelet that records the times of a plugin's actions.

It does only what a kubelet does to a plugin (answers Register, opens one ListAndWatch, removes
sockets at its restart), so that only the plugin is measured.
"""

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Final, NamedTuple, Self

import grpc
import grpc.aio

from muster.pb import deviceplugin_pb2 as dp
from muster.pb import rpc

NEVER_S: Final = 8.0
"""The longest wait, which is also the value of a missing reaction."""


class Observed(NamedTuple):
    """One Register, device list or end of a stream; the counts describe the list."""

    at: float
    resource: str
    devices: int = 0
    healthy: int = 0


class ListeningKubelet:
    """A kubelet.sock in a directory, and its open streams; an async context manager."""

    def __init__(self, sockets: Path) -> None:
        self.sockets = sockets
        self.registered: asyncio.Queue[Observed] = asyncio.Queue()
        self.lists: asyncio.Queue[Observed] = asyncio.Queue()
        self.ends: asyncio.Queue[Observed] = asyncio.Queue()
        self.endpoints: dict[str, Path] = {}
        self._server = grpc.aio.server()
        self._streams: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        await self._serve()
        return self

    async def __aexit__(self, *_: object) -> None:
        for resource in [*self._streams]:
            await self.drop(resource)
        await self._server.stop(None)

    async def register(
        self, request: dp.RegisterRequest, context: rpc.Context[dp.RegisterRequest, dp.Empty]
    ) -> dp.Empty:
        """Record the time, and follow the device list."""
        del context
        name = request.resource_name
        self.registered.put_nowait(Observed(time.perf_counter(), name))
        self.endpoints[name] = self.sockets / request.endpoint
        self._streams[name] = asyncio.create_task(self._follow(name))
        return dp.Empty()

    async def until_registered(self, started: float) -> float:
        """Return the seconds from `started` to the next Register."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(NEVER_S):
                return (await self.registered.get()).at - started
        return NEVER_S

    async def until_listed(self, resource: str, *, healthy: int) -> Observed:
        """Return the next list of this resource with `healthy` Healthy devices."""
        async with asyncio.timeout(NEVER_S):
            while True:
                listed = await self.lists.get()
                if (listed.resource, listed.healthy) == (resource, healthy):
                    return listed

    async def quiet(self) -> None:
        """Discard observations until no more arrive."""
        while True:
            came = 0
            for queue in (self.registered, self.lists, self.ends):
                while not queue.empty():
                    queue.get_nowait()
                    came += 1
            if not came:
                return
            await asyncio.sleep(0.1)

    async def drop(self, resource: str) -> None:
        """Close the connection, as after a stream error."""
        stream = self._streams.pop(resource, None)
        if stream is not None:
            stream.cancel()
            await asyncio.wait([stream])

    async def restart(self) -> float:
        """Simulate a restart; return the time just before kubelet.sock is created again."""
        await self._server.stop(None)
        for resource in [*self._streams]:
            await self.drop(resource)
        for path in self.sockets.iterdir():
            if path.is_socket():
                path.unlink(missing_ok=True)
        began = time.perf_counter()
        await self._serve()
        return began

    async def _serve(self) -> None:
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((rpc.registration_handler(self),))
        self._server.add_insecure_port(f"unix:{self.sockets / 'kubelet.sock'}")
        await self._server.start()

    async def _follow(self, resource: str) -> None:
        path = self.endpoints[resource]
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            # Go's servers refuse the authority that gRPC derives from a socket's path
            ("grpc.default_authority", "localhost"),
        ]
        async with grpc.aio.insecure_channel(f"unix:{path}", options=options) as channel:
            try:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    async for answer in rpc.DevicePluginClient(channel).list_and_watch(dp.Empty()):
                        healthy = sum(device.health == "Healthy" for device in answer.devices)
                        observed = Observed(
                            time.perf_counter(), resource, len(answer.devices), healthy
                        )
                        self.lists.put_nowait(observed)
            finally:
                self.ends.put_nowait(Observed(time.perf_counter(), resource))
