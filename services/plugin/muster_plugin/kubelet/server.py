"""Adapter: our own socket: one gRPC server for one resource and one generation.

A server on a reused path would be a trap: C-core unlinks the path when the older server is
destroyed, whoever owns it by then. So every generation has its own socket name.
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
from muster_plugin.kubelet import allocation, protobuf, registration_events, socket_directory

OWN_POOL: Final = (("grpc.use_local_subchannel_pool", 1),)
"""Without it, a channel shares the connection of another to the same path, dead or alive."""

_ASK: Final = "muster-probe"
_INSTANCE: Final = "muster-instance"
_PROBE_TIMEOUT_S: Final = 2.0
_ALLOCATE_TIMEOUT_S: Final = 2.0
"""The kubelet sets no deadline, and while Allocate hangs it admits no pod at all (1.36.2)."""
_STATUSES_MAX: Final = 16
_STOP_GRACE_S: Final = 0.5
_LAST_STEPS_S: Final = 0.1

Request = TypeVar("Request", bound=message.Message)
Answer = TypeVar("Answer", bound=message.Message)
ListContext: TypeAlias = rpc.Context[dp.Empty, dp.ListAndWatchResponse]


class ProbeFailed(Exception):
    """Dialling a socket by its path did not reach this instance; the text says what it did."""


async def settle() -> None:
    """Let what gRPC still does after its last server stopped come to its end.

    The event loop cancels what is left when it ends, and gRPC prints a traceback for a call that is
    cancelled in its last steps (1.85.1, server.pyx.pxi, _schedule_rpc_coro).
    """
    tasks = asyncio.all_tasks()
    left = [task for task in tasks if "rpc_coro" in getattr(task.get_coro(), "__qualname__", "")]
    if left:
        await asyncio.wait(left, timeout=_LAST_STEPS_S)


class Figures(msgspec.Struct, kw_only=True):
    """What one resource has done since the process started."""

    sends: int = 0
    sent_at: float | None = None
    allocations: int = 0
    refused_allocations: int = 0
    allocation_seconds: float = 0.0


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """What one resource serves, whatever the generation."""

    resource: str
    devices: inventory.Inventory
    allocator: allocation.Allocator
    figures: Figures
    pre_start: bool = False


class Observer(Protocol):
    """Who is asked and told in the kubelet's calls."""

    async def absent(self, paths: Sequence[str]) -> str:
        """Say which of these paths of the host are gone, after telling the kubelet; else empty."""

    async def present(self, paths: Sequence[str]) -> frozenset[str]:
        """Return those of these paths of the host that are there."""

    def allocated(self, resource: str, device_ids: tuple[str, ...]) -> None:
        """Hear which devices a container was given."""

    def sent(self) -> None:
        """Hear that the kubelet was sent a list."""


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
        service: Service,
        *,
        tell: Callable[[registration_events.Signal], None],
        observer: Observer,
    ) -> None:
        self.path = path
        self.generation = generation
        self._instance = os.urandom(8).hex()
        self._service = service
        self._figures = service.figures
        self._tell = tell
        self._observer = observer
        self._streams: set[_Stream] = set()
        self._kubelets: _Stream | None = None
        """The kubelet's: the first of this generation, whose name nobody else knows yet. Others may
        look on, and their coming and going means nothing."""
        self._statuses: asyncio.Queue[str] = asyncio.Queue(_STATUSES_MAX)
        self._is_ending = False
        self._bound: tuple[int, int] | None = None
        self._termination: asyncio.Task[bool] | None = None
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers(
            (rpc.device_plugin_handler(self), rpc.plugin_watcher_handler(self))
        )

    async def start(self) -> None:
        """Listen. Raises OSError or RuntimeError, which name the path."""
        if self.path.exists():
            raise OSError(f"{self.path}: exists already")
        try:
            self._server.add_insecure_port(f"unix:{self.path}")
        except RuntimeError:
            # which says only that it failed
            socket_directory.try_to_bind(self.path)
            raise
        await self._server.start()
        self._bound = socket_directory.inode(self.path)
        self._termination = asyncio.create_task(self._server.wait_for_termination())
        self._termination.add_done_callback(self._terminated)

    @property
    def is_lost(self) -> bool:
        """Whether the socket we made is gone from our path."""
        return self._bound is not None and socket_directory.inode(self.path) != self._bound

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

    async def noticed(self) -> str:
        """Wait until the plugin watcher has dealt with us; return its error, empty if none."""
        return await self._statuses.get()

    # The kubelet's calls

    async def get_device_plugin_options(
        self, request: dp.Empty, context: rpc.Context[dp.Empty, dp.DevicePluginOptions]
    ) -> dp.DevicePluginOptions:
        """Say which optional calls we want; to our own probe also who we are."""
        del request
        if _ASK in dict(context.invocation_metadata() or ()):
            await context.send_initial_metadata(((_INSTANCE, self._instance),))
        return protobuf.options(pre_start=self._service.pre_start)

    async def list_and_watch(
        self, request: dp.Empty, context: ListContext
    ) -> AsyncIterator[dp.ListAndWatchResponse]:
        """Send the whole list first, then again after every change, until the stream ends."""
        del request
        stream = _Stream()
        self._streams.add(stream)
        if self._kubelets is None:
            self._kubelets = stream
            self._tell(registration_events.StreamOpened(self.generation))
        # types-grpcio declares a class where grpc takes any callable
        context.add_done_callback(lambda _: self._closed(stream))  # type: ignore[arg-type]
        while not self._is_ending:
            stream.changed.clear()
            yield protobuf.device_list(self._service.devices.devices(self._service.resource))
            if stream is self._kubelets:
                self._figures.sends += 1
                self._figures.sent_at = time.monotonic()
                self._observer.sent()
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
        return protobuf.preferred(request, self._service.allocator)

    async def allocate(
        self,
        request: dp.AllocateRequest,
        context: rpc.Context[dp.AllocateRequest, dp.AllocateResponse],
    ) -> dp.AllocateResponse:
        """Allocate from memory, or say what was asked for that we do not have.

        Only what is really gone is vetoed, and by then the kubelet knows (`Observer.absent`).
        """
        started = time.perf_counter()
        containers = protobuf.requested(request)
        allocator = self._service.allocator
        try:
            async with asyncio.timeout(_ALLOCATE_TIMEOUT_S):
                await self._refuse_absent(containers, context)
                present = await self._observer.present(allocator.optional_paths(containers))
            given = allocator.allocate(containers, present=present, annotation=os.urandom(16).hex())
        except TimeoutError:
            await self._refuse_unanswered(context)
        except allocation.Refusal as refusal:
            await self._refuse(grpc.StatusCode.INVALID_ARGUMENT, str(refusal), context)
        answer = protobuf.allocated(given)
        self._figures.allocations += 1
        self._figures.allocation_seconds += time.perf_counter() - started
        names = tuple(dict.fromkeys(name for ids in containers for name in ids))
        self._observer.allocated(self._service.resource, names)
        return answer

    async def pre_start_container(
        self,
        request: dp.PreStartContainerRequest,
        context: rpc.Context[dp.PreStartContainerRequest, dp.PreStartContainerResponse],
    ) -> dp.PreStartContainerResponse:
        """Let the container start if its devices are there; called only if it is configured."""
        try:
            async with asyncio.timeout(_ALLOCATE_TIMEOUT_S):
                await self._refuse_absent([request.devices_ids], context)
        except TimeoutError:
            await self._refuse_unanswered(context)
        except allocation.Refusal as refusal:
            await self._refuse(grpc.StatusCode.INVALID_ARGUMENT, str(refusal), context)
        return dp.PreStartContainerResponse()

    # The plugin watcher's calls

    async def get_info(
        self, request: pr.InfoRequest, context: rpc.Context[pr.InfoRequest, pr.PluginInfo]
    ) -> pr.PluginInfo:
        """Introduce ourselves to the kubelet that found our socket."""
        del request, context
        return protobuf.plugin_info(self._service.resource)

    async def notify_registration_status(
        self,
        request: pr.RegistrationStatus,
        context: rpc.Context[pr.RegistrationStatus, pr.RegistrationStatusResponse],
    ) -> pr.RegistrationStatusResponse:
        """Hear whether the kubelet took us."""
        del context
        error = "" if request.plugin_registered else request.error or "refused without a reason"
        # an older status than these is of no interest
        if self._statuses.full():
            self._statuses.get_nowait()
        self._statuses.put_nowait(error)
        return pr.RegistrationStatusResponse()

    async def _refuse_absent(
        self, containers: Sequence[Collection[str]], context: rpc.Context[Request, Answer]
    ) -> None:
        """Abort if what is behind these ids is gone. Raises Refusal for an unknown id."""
        absent = await self._observer.absent(self._service.allocator.host_paths(containers))
        if absent:
            text = f"{self._service.resource}: {absent}"
            await self._refuse(grpc.StatusCode.FAILED_PRECONDITION, text, context)

    async def _refuse_unanswered(self, context: rpc.Context[Request, Answer]) -> NoReturn:
        text = f"{self._service.resource}: the host's files did not answer in time"
        await self._refuse(grpc.StatusCode.DEADLINE_EXCEEDED, text, context)

    async def _refuse(
        self, code: grpc.StatusCode, text: str, context: rpc.Context[Request, Answer]
    ) -> NoReturn:
        self._figures.refused_allocations += 1
        await context.abort(code, text)
        raise AssertionError("abort raises")

    def _closed(self, stream: _Stream) -> None:
        self._streams.discard(stream)
        stream.is_sent.set()
        if stream is self._kubelets:
            self._kubelets = None
            if not self._is_ending:
                self._tell(registration_events.StreamClosed(self.generation))

    def _terminated(self, _: asyncio.Task[bool]) -> None:
        if not self._is_ending:
            self._tell(registration_events.ServerEnded(self.generation))
