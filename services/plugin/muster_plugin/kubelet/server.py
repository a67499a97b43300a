"""Adapter: serves the device plugin API on one socket, for one generation of one resource.

Every generation has its own socket name: gRPC's C-core unlinks a path when the older server on it
is destroyed, even if a newer server owns the path by then.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from pathlib import Path
from typing import Final, NoReturn, Protocol, TypeAlias, TypeVar

import grpc
import grpc.aio
import msgspec
from google.protobuf import message

from muster.pb import deviceplugin_pb2 as dp
from muster.pb import pluginregistration_pb2 as pr
from muster.pb import rpc
from muster_plugin.inventory import inventory
from muster_plugin.kubelet import allocation, plugin_sockets, protobuf, registration_signals
from muster_plugin.model import advertised

OWN_POOL: Final = (("grpc.use_local_subchannel_pool", 1),)
"""Gives a channel its own connection; otherwise channels to a path share one, even a broken one."""

_PROBE_HEADER: Final = "muster-probe"
_INSTANCE_HEADER: Final = "muster-instance"
_PROBE_TIMEOUT_S: Final = 2.0
_STATUSES_MAX: Final = 16
_STOP_GRACE_S: Final = 0.5
_DRAIN_TIMEOUT_S: Final = 0.1

Request = TypeVar("Request", bound=message.Message)
Answer = TypeVar("Answer", bound=message.Message)
ListContext: TypeAlias = rpc.Context[dp.Empty, dp.ListAndWatchResponse]


class ProbeFailed(Exception):
    """Dialling the socket by its path did not reach this server; the message gives the reason."""


async def drain_grpc_tasks() -> None:
    """Wait for the tasks that gRPC still runs after its last server stopped.

    The event loop would cancel these tasks when it closes, and gRPC prints a traceback for a call
    that is cancelled in its last steps (1.85.1, server.pyx.pxi, _schedule_rpc_coro).
    """
    tasks = asyncio.all_tasks()
    left = [task for task in tasks if "rpc_coro" in getattr(task.get_coro(), "__qualname__", "")]
    if left:
        await asyncio.wait(left, timeout=_DRAIN_TIMEOUT_S)


class Counters(msgspec.Struct, kw_only=True):
    """Counters of one resource since its plugin was created."""

    sends: int = 0
    sent_at: float | None = None
    allocations: int = 0
    refused_allocations: int = 0
    allocation_seconds: float = 0.0


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """The data that the successive servers of one resource share."""

    resource: str
    devices: inventory.Inventory
    allocator: allocation.Allocator
    counters: Counters
    pre_start: bool = False


class Observer(Protocol):
    """The node, as a server uses it: it checks paths and is informed of allocations."""

    async def missing_paths(self, paths: Sequence[str]) -> str:
        """Return which host paths are missing, as text; empty if none is.

        If any is missing, the kubelet first gets the new list of devices. Raises TimeoutError after
        about a second. The kubelet sets no deadline, and while Allocate hangs it does not admit any
        pod (1.36.2).
        """

    async def existing_paths(self, paths: Sequence[str]) -> frozenset[str]:
        """Return which of these host paths exist; raises TimeoutError like `missing_paths`."""

    def on_allocated(self, resource: str, device_ids: tuple[str, ...]) -> None:
        """React to an allocation of devices to a container."""

    def on_list_sent(self) -> None:
        """React to a device list that was sent to the kubelet."""


class _Stream(msgspec.Struct, eq=False):
    """One ListAndWatch stream, with its own event: a shared event would lose updates."""

    changed: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    is_sent: asyncio.Event = msgspec.field(default_factory=asyncio.Event)


class Endpoint:
    """Serves one resource on one socket; sends a signal when a stream opens or closes."""

    def __init__(
        self,
        path: Path,
        generation: int,
        service: Service,
        *,
        send: Callable[[registration_signals.Signal], None],
        observer: Observer,
    ) -> None:
        self.path = path
        self.generation = generation
        self._instance = os.urandom(8).hex()
        self._service = service
        self._counters = service.counters
        self._send = send
        self._observer = observer
        self._streams: set[_Stream] = set()
        self._kubelet_stream: _Stream | None = None
        """The open stream that counts as the kubelet's, or None.

        The kubelet opens the first stream, before any other client can learn the socket's name.
        Streams that open while this one is open get the list, but are not reported.
        """
        self._statuses: asyncio.Queue[str] = asyncio.Queue(_STATUSES_MAX)
        self._is_ending = False
        self._bound: tuple[int, int] | None = None
        self._termination: asyncio.Task[bool] | None = None
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers(
            (rpc.device_plugin_handler(self), rpc.plugin_watcher_handler(self))
        )

    async def start(self) -> None:
        """Start listening. Raises OSError or RuntimeError with the path."""
        if self.path.exists():
            raise OSError(f"{self.path}: exists already")
        try:
            self._server.add_insecure_port(f"unix:{self.path}")
        except RuntimeError:
            # gRPC reports only that binding failed
            plugin_sockets.try_to_bind(self.path)
            raise
        await self._server.start()
        self._bound = plugin_sockets.inode(self.path)
        self._termination = asyncio.create_task(self._server.wait_for_termination())
        self._termination.add_done_callback(self._on_terminated)

    @property
    def is_socket_lost(self) -> bool:
        """Whether the socket file is gone or was replaced."""
        return self._bound is not None and plugin_sockets.inode(self.path) != self._bound

    async def advertise(self, timeout_s: float) -> None:
        """Send the list to every open stream; return when all have it, or after `timeout_s`."""
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
        """End the streams, then the server, and remove the socket. May be called repeatedly."""
        self._is_ending = True
        for stream in self._streams:
            stream.changed.set()
        await self._server.stop(_STOP_GRACE_S)
        if self._termination is not None:
            await self._termination
        if self._bound is not None and not self.is_socket_lost:
            self.path.unlink(missing_ok=True)

    async def probe(self) -> float:
        """Dial the socket by its path, as a client; return the duration. Raises ProbeFailed."""
        started = time.perf_counter()
        channel = grpc.aio.insecure_channel(f"unix:{self.path}", options=OWN_POOL)
        async with channel:
            call = rpc.DevicePluginClient(channel).get_device_plugin_options(
                dp.Empty(), timeout=_PROBE_TIMEOUT_S, metadata=((_PROBE_HEADER, "1"),)
            )
            try:
                await call
                instance = dict(await call.initial_metadata()).get(_INSTANCE_HEADER)
            except grpc.aio.AioRpcError as error:
                raise ProbeFailed(f"{error.code().name}: {error.details()}") from None
        if instance != self._instance:
            raise ProbeFailed(f"another server answers on {self.path.name}")
        return time.perf_counter() - started

    async def registration_status(self) -> str:
        """Wait for the plugin watcher's answer; return its error, empty if there is none."""
        return await self._statuses.get()

    # The kubelet's calls

    async def get_device_plugin_options(
        self, request: dp.Empty, context: rpc.Context[dp.Empty, dp.DevicePluginOptions]
    ) -> dp.DevicePluginOptions:
        """Return the plugin's options; identify this server to its own probe."""
        del request
        if _PROBE_HEADER in dict(context.invocation_metadata() or ()):
            await context.send_initial_metadata(((_INSTANCE_HEADER, self._instance),))
        return protobuf.options(pre_start=self._service.pre_start)

    async def list_and_watch(
        self, request: dp.Empty, context: ListContext
    ) -> AsyncIterator[dp.ListAndWatchResponse]:
        """Send the whole list first, then again after every change, until the stream ends."""
        del request
        stream = _Stream()
        self._streams.add(stream)
        if self._kubelet_stream is None:
            self._kubelet_stream = stream
            self._send(registration_signals.StreamOpened(self.generation))
        # types-grpcio declares a class where grpc takes any callable
        context.add_done_callback(lambda _: self._stream_closed(stream))  # type: ignore[arg-type]
        while not self._is_ending:
            stream.changed.clear()
            yield protobuf.device_list(self._service.devices.devices(self._service.resource))
            if stream is self._kubelet_stream:
                self._counters.sends += 1
                self._counters.sent_at = time.monotonic()
                self._observer.on_list_sent()
            if not stream.changed.is_set():
                stream.is_sent.set()
            await stream.changed.wait()

    async def get_preferred_allocation(
        self,
        request: dp.PreferredAllocationRequest,
        context: rpc.Context[dp.PreferredAllocationRequest, dp.PreferredAllocationResponse],
    ) -> dp.PreferredAllocationResponse:
        """Return the preferred ids; never fails."""
        del context
        return protobuf.preferred(request, self._service.allocator)

    async def allocate(
        self,
        request: dp.AllocateRequest,
        context: rpc.Context[dp.AllocateRequest, dp.AllocateResponse],
    ) -> dp.AllocateResponse:
        """Allocate the requested ids from memory; refuse unknown ids and invalid requests.

        A known device is refused if one of its paths is missing; the kubelet has then already
        received the change (`Observer.missing_paths`).
        """
        started = time.perf_counter()
        containers = protobuf.requested(request)
        allocator = self._service.allocator
        try:
            await self._abort_if_missing(containers, context)
            present = await self._observer.existing_paths(allocator.optional_paths(containers))
            allocations = allocator.allocate(
                containers, present=present, annotation=os.urandom(16).hex()
            )
        except (TimeoutError, advertised.AllocationError) as problem:
            await self._abort_because(problem, context)
        answer = protobuf.allocated(allocations)
        self._counters.allocations += 1
        self._counters.allocation_seconds += time.perf_counter() - started
        device_ids = tuple(dict.fromkeys(name for ids in containers for name in ids))
        # after the answer, because a container waits for it
        asyncio.get_running_loop().call_soon(
            self._observer.on_allocated, self._service.resource, device_ids
        )
        return answer

    async def pre_start_container(
        self,
        request: dp.PreStartContainerRequest,
        context: rpc.Context[dp.PreStartContainerRequest, dp.PreStartContainerResponse],
    ) -> dp.PreStartContainerResponse:
        """Allow the container to start if its devices exist; called only with `pre_start`."""
        try:
            await self._abort_if_missing([request.devices_ids], context)
        except (TimeoutError, advertised.AllocationError) as problem:
            await self._abort_because(problem, context)
        return dp.PreStartContainerResponse()

    # The plugin watcher's calls

    async def get_info(
        self, request: pr.InfoRequest, context: rpc.Context[pr.InfoRequest, pr.PluginInfo]
    ) -> pr.PluginInfo:
        """Return the plugin's description to the kubelet's plugin watcher."""
        del request, context
        return protobuf.plugin_info(self._service.resource)

    async def notify_registration_status(
        self,
        request: pr.RegistrationStatus,
        context: rpc.Context[pr.RegistrationStatus, pr.RegistrationStatusResponse],
    ) -> pr.RegistrationStatusResponse:
        """Receive the kubelet's answer on whether it registered the plugin."""
        del context
        error = "" if request.plugin_registered else request.error or "refused without a reason"
        # only the newest statuses matter
        if self._statuses.full():
            self._statuses.get_nowait()
        self._statuses.put_nowait(error)
        return pr.RegistrationStatusResponse()

    async def _abort_if_missing(
        self, containers: Sequence[Collection[str]], context: rpc.Context[Request, Answer]
    ) -> None:
        """Abort if a host path of these ids is gone. Raises AllocationError for an unknown id."""
        missing = await self._observer.missing_paths(self._service.allocator.host_paths(containers))
        if missing:
            text = f"{self._service.resource}: {missing}"
            await self._abort(grpc.StatusCode.FAILED_PRECONDITION, text, context)

    async def _abort_because(
        self, problem: Exception, context: rpc.Context[Request, Answer]
    ) -> NoReturn:
        if isinstance(problem, advertised.AllocationError):
            await self._abort(grpc.StatusCode.INVALID_ARGUMENT, str(problem), context)
        text = f"{self._service.resource}: the host's file system did not answer in time"
        await self._abort(grpc.StatusCode.DEADLINE_EXCEEDED, text, context)

    async def _abort(
        self, code: grpc.StatusCode, text: str, context: rpc.Context[Request, Answer]
    ) -> NoReturn:
        self._counters.refused_allocations += 1
        await context.abort(code, text)
        raise AssertionError("abort raises")

    def _stream_closed(self, stream: _Stream) -> None:
        self._streams.discard(stream)
        stream.is_sent.set()
        if stream is self._kubelet_stream:
            self._kubelet_stream = None
            if not self._is_ending:
                self._send(registration_signals.StreamClosed(self.generation))

    def _on_terminated(self, _: asyncio.Task[bool]) -> None:
        if not self._is_ending:
            self._send(registration_signals.ServerEnded(self.generation))
