"""Door to our own socket: one gRPC server for one resource and one generation.

A server on a reused path would be a trap: C-core unlinks the path when the older server is
destroyed, whoever owns it by then. So every generation has its own socket name.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final, TypeAlias

import grpc
import grpc.aio
import msgspec

from muster.pb import deviceplugin_pb2 as dp
from muster.pb import rpc
from muster_plugin import allocation, directory, inventory, signals, wire

OWN_POOL: Final = (("grpc.use_local_subchannel_pool", 1),)
"""Without it, a channel shares the connection of another to the same path, dead or alive."""

_ASK: Final = "muster-probe"
_INSTANCE: Final = "muster-instance"
_PROBE_TIMEOUT_S: Final = 2.0
_STOP_GRACE_S: Final = 0.5

ListContext: TypeAlias = rpc.Context[dp.Empty, dp.ListAndWatchResponse]


class ProbeFailed(Exception):
    """Dialling a socket by its path did not reach this instance; the text says what it did."""


class Figures(msgspec.Struct, kw_only=True):
    """What one resource has done since the process started."""

    sends: int = 0
    sent_at: float | None = None
    allocations: int = 0
    refused_allocations: int = 0
    allocation_seconds: float = 0.0


class _Stream(msgspec.Struct, eq=False):
    """One ListAndWatch with a state of its own: a flag for all would lose updates."""

    changed: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    is_sent: asyncio.Event = msgspec.field(default_factory=asyncio.Event)


class Endpoint:
    """Serves one resource on one socket; tells about streams that open and close."""

    def __init__(
        self,
        path: Path,
        generation: int,
        *,
        devices: inventory.Inventory,
        resource: str,
        allocator: allocation.Allocator,
        figures: Figures,
        tell: Callable[[signals.Signal], None],
        observed: Callable[[tuple[str, ...]], None],
    ) -> None:
        self.path = path
        self.generation = generation
        self._instance = os.urandom(8).hex()
        self._devices = devices
        self._resource = resource
        self._allocator = allocator
        self._figures = figures
        self._tell = tell
        self._observed = observed
        self._streams: set[_Stream] = set()
        self._is_ending = False
        self._bound: tuple[int, int] | None = None
        self._termination: asyncio.Task[bool] | None = None
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((rpc.device_plugin_handler(self),))

    async def start(self) -> None:
        """Listen. Raises OSError or RuntimeError, which name the path."""
        if self.path.exists():
            raise OSError(f"{self.path}: exists already")
        self._server.add_insecure_port(f"unix:{self.path}")
        await self._server.start()
        self._bound = directory.inode(self.path)
        self._termination = asyncio.create_task(self._server.wait_for_termination())
        self._termination.add_done_callback(self._terminated)

    @property
    def is_lost(self) -> bool:
        """Whether the socket we made is gone from our path."""
        return self._bound is not None and directory.inode(self.path) != self._bound

    async def advertise(self, timeout_s: float) -> None:
        """Send the list to every open stream; return when they have it, or after `timeout_s`."""
        waiting = []
        for stream in self._streams:
            stream.is_sent.clear()
            stream.changed.set()
            waiting.append(asyncio.create_task(stream.is_sent.wait()))
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=timeout_s)
            for task in late:
                task.cancel()

    async def stop(self) -> None:
        """End the streams, then the server; afterwards the socket is gone. May be repeated."""
        self._is_ending = True
        for stream in self._streams:
            stream.changed.set()
        await self._server.stop(_STOP_GRACE_S)
        if self._termination is not None:
            await self._termination
        if self._bound is not None and not self.is_lost:
            self.path.unlink(missing_ok=True)

    async def probe(self) -> float:
        """Dial our path as a stranger would; return the seconds it took. Raises ProbeFailed."""
        started = time.perf_counter()
        channel = grpc.aio.insecure_channel(f"unix:{self.path}", options=OWN_POOL)
        async with channel:
            call = rpc.DevicePluginClient(channel).get_device_plugin_options(
                dp.Empty(), timeout=_PROBE_TIMEOUT_S, metadata=((_ASK, "1"),)
            )
            try:
                await call
                said = dict(await call.initial_metadata()).get(_INSTANCE)
            except grpc.aio.AioRpcError as error:
                raise ProbeFailed(f"{error.code().name}: {error.details()}") from None
        if said != self._instance:
            raise ProbeFailed(f"{self.path.name} answers as another instance")
        return time.perf_counter() - started

    # The kubelet's calls

    async def get_device_plugin_options(
        self, request: dp.Empty, context: rpc.Context[dp.Empty, dp.DevicePluginOptions]
    ) -> dp.DevicePluginOptions:
        """Say which optional calls we want; to our own probe also who we are."""
        del request
        if _ASK in dict(context.invocation_metadata() or ()):
            await context.send_initial_metadata(((_INSTANCE, self._instance),))
        return wire.options()

    async def list_and_watch(
        self, request: dp.Empty, context: ListContext
    ) -> AsyncIterator[dp.ListAndWatchResponse]:
        """Send the whole list first, then again after every change, until the stream ends."""
        del request
        stream = _Stream()
        self._streams.add(stream)
        self._tell(signals.StreamOpened(self.generation))
        # types-grpcio declares a class where grpc takes any callable
        context.add_done_callback(lambda _: self._closed(stream))  # type: ignore[arg-type]
        while not self._is_ending:
            stream.changed.clear()
            yield wire.device_list(self._devices.devices(self._resource))
            self._figures.sends += 1
            self._figures.sent_at = time.monotonic()
            if not stream.changed.is_set():
                stream.is_sent.set()
            await stream.changed.wait()

    async def get_preferred_allocation(
        self,
        request: dp.PreferredAllocationRequest,
        context: rpc.Context[dp.PreferredAllocationRequest, dp.PreferredAllocationResponse],
    ) -> dp.PreferredAllocationResponse:
        """Advise; never fails."""
        del context
        return wire.preferred(request, self._allocator)

    async def allocate(
        self,
        request: dp.AllocateRequest,
        context: rpc.Context[dp.AllocateRequest, dp.AllocateResponse],
    ) -> dp.AllocateResponse:
        """Allocate from memory, or say what was asked for that we do not have."""
        started = time.perf_counter()
        containers = wire.requested(request)
        try:
            answer = wire.allocated(self._allocator.allocate(containers))
        except allocation.Refusal as refusal:
            self._figures.refused_allocations += 1
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(refusal))
        self._figures.allocations += 1
        self._figures.allocation_seconds += time.perf_counter() - started
        self._observed(tuple(name for ids in containers for name in ids))
        return answer

    async def pre_start_container(
        self,
        request: dp.PreStartContainerRequest,
        context: rpc.Context[dp.PreStartContainerRequest, dp.PreStartContainerResponse],
    ) -> dp.PreStartContainerResponse:
        """Do nothing: we never ask for this call."""
        del request, context
        return dp.PreStartContainerResponse()

    def _closed(self, stream: _Stream) -> None:
        self._streams.discard(stream)
        stream.is_sent.set()
        if not self._is_ending:
            self._tell(signals.StreamClosed(self.generation))

    def _terminated(self, _: asyncio.Task[bool]) -> None:
        if not self._is_ending:
            self._tell(signals.ServerEnded(self.generation))
