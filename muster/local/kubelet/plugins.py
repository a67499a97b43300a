"""Adapter for device plugins: registers them, follows their lists, and calls them for allocations.

They register through the kubelet's socket, or the plugin watcher finds their sockets. Each
registration has one connection and one ListAndWatch stream; neither is opened a second time. When a
stream ends, `device_manager` decides which connection this module closes.
"""

import asyncio
import collections
import contextlib
import os
import pathlib
import stat
from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

import grpc
import grpc.aio

from muster.local.kubelet import device_manager, rules
from muster.pb import deviceplugin_pb2 as dp
from muster.pb import pluginregistration_pb2 as pr
from muster.pb import rpc

# The kubelet's own limit for the dial, plugin/v1beta1/client.go.
DIAL_TIMEOUT_S = 10.0

Answer = TypeVar("Answer")
DIRECTORY = "plugins_registry"
_POLL_S = 0.2
_INFO_TIMEOUT_S = 1.0
_NOTIFY_TIMEOUT_S = 5.0
_BACKOFF_S = 0.5
_BACKOFF_MAX_S = 122.0
# The identity differs for a socket that was created later with the same name.
_Stamp = tuple[int, int]


class NotConnected(Exception):
    """The kubelet cannot connect to a registered plugin; the text is the kubelet's error."""


class _RpcFailed(Exception):
    """A call to a plugin failed; the text is the error as Go prints it."""


class Plugins:
    """The connections to all plugins during one kubelet run.

    `changed` is called after every message and every end of a stream.
    """

    def __init__(
        self,
        manager: device_manager.DeviceManager,
        *,
        dial_timeout_s: float,
        changed: Callable[[], None],
    ) -> None:
        self.streams_open: collections.Counter[str] = collections.Counter()
        self._manager = manager
        self._dial_timeout_s = dial_timeout_s
        self._changed = changed
        self._channels: dict[int, grpc.aio.Channel] = {}
        self._streams: dict[int, asyncio.Task[None]] = {}

    async def connect(self, resource: str, path: str) -> None:
        """Dial the plugin, read its options, and follow its list.

        Raises NotConnected. After a failure, the client of the resource is forgotten, as in the
        kubelet, but the streams of the resource continue.
        """
        client = self._manager.connecting(resource, path)
        channel = grpc.aio.insecure_channel(
            f"unix:{path}",
            options=[
                # Otherwise a dial to the path of a removed socket would share an open connection.
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.default_authority", "localhost"),
            ],
        )
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(channel.close)
            undo.callback(self._manager.forget, client)
            options = await self._greet(channel)
            try:
                self._manager.connected(client, options)
            except device_manager.AlreadyConnected as refused:
                raise NotConnected(str(refused)) from None
            undo.pop_all()
        self._channels[client.number] = channel
        stream = asyncio.create_task(self._follow(client, channel), name=f"follow {resource}")
        self._streams[client.number] = stream
        stream.add_done_callback(lambda _: self._streams.pop(client.number, None))

    async def drop(self, resource: str) -> bool:
        """Close the connection of a resource's newest client; return False if there is none."""
        client = self._manager.client(resource)
        if client is None:
            return False
        stream = self._streams.get(client.number)
        await self._disconnect(client)
        if stream is not None:
            await asyncio.wait([stream])
        return True

    async def close(self) -> None:
        """Drop every connection without notice, like a killed kubelet."""
        streams = [*self._streams.values()]
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    async def allocate(
        self, request: device_manager.Request, *, reusable: Collection[str] = frozenset()
    ) -> device_manager.Grant | None:
        """Allocate devices for a container.

        Raises AllocationError. Returns None if the container needs no more devices, or if the
        resource was never registered. Only the scheduler checks unregistered resources; a pod that
        bypasses it runs without devices.

        There is no time limit, as in the kubelet: a plugin that hangs blocks every pod of the node.
        """
        if not self._manager.knows(request.resource):
            return None
        offer = self._manager.offer(request, reusable=reusable)
        if offer is None:
            return None
        preferred: Collection[str] = ()
        if self._manager.wants_preference(offer):
            preferred = await self._preferred(offer)
        ids = self._manager.take(offer, preferred)
        with contextlib.ExitStack() as undo:
            undo.callback(self._manager.abandon, request.resource)
            answer = await self._allocated(request.resource, ids)
            undo.pop_all()
        return self._manager.grant(request, ids, answer.SerializeToString())

    async def _greet(self, channel: grpc.aio.Channel) -> device_manager.Options:
        try:
            async with asyncio.timeout(self._dial_timeout_s):
                await channel.channel_ready()
        except TimeoutError:
            raise NotConnected("failed to dial device plugin: context deadline exceeded") from None
        stub = rpc.DevicePluginClient(channel)
        try:
            answer = await _called(stub.get_device_plugin_options(dp.Empty()))
        except _RpcFailed as failed:
            raise NotConnected(f"failed to get device plugin options: {failed}") from None
        return device_manager.Options(
            pre_start_required=answer.pre_start_required,
            preferred_allocation=answer.get_preferred_allocation_available,
        )

    async def _follow(self, client: device_manager.Client, channel: grpc.aio.Channel) -> None:
        resource = client.resource
        self.streams_open[resource] += 1
        try:
            await _called(self._listen(client, channel))
        except _RpcFailed:
            pass  # The kubelet treats every end the same; it only logs the reason.
        finally:
            self.streams_open[resource] -= 1
        if client.number in self._channels:
            # Otherwise this process closed it. The kubelet's lookup, microseconds later, would find
            # no client; a lookup here would be so late that it might find the plugin's next
            # registration.
            await self._disconnect(client)
        # The kubelet leaks the connection of a replaced stream (k/k#124716); that is not copied
        # here.
        self._channels.pop(client.number, None)
        await channel.close()

    async def _listen(self, client: device_manager.Client, channel: grpc.aio.Channel) -> None:
        async for message in rpc.DevicePluginClient(channel).list_and_watch(dp.Empty()):
            if client.number not in self._channels:
                return  # The connection is being closed; its last message comes too late.
            self._manager.listed(client.resource, [_device(device) for device in message.devices])
            self._changed()

    async def _disconnect(self, ended: device_manager.Client) -> None:
        client = self._manager.stream_ended(ended, asyncio.get_running_loop().time())
        self._changed()
        channel = self._channels.pop(client.number, None) if client else None
        if channel is not None:
            await channel.close()

    async def _preferred(self, offer: device_manager.Offer) -> Collection[str]:
        stub = self._stub(self._manager.callee(offer.request.resource))
        request = dp.ContainerPreferredAllocationRequest(
            available_deviceIDs=offer.available | offer.reused,
            must_include_deviceIDs=offer.reused,
            allocation_size=offer.request.count,
        )
        try:
            answer = await _called(
                stub.get_preferred_allocation(
                    dp.PreferredAllocationRequest(container_requests=[request])
                )
            )
        except _RpcFailed as failed:
            raise device_manager.preference_error(str(failed)) from None
        if not answer.container_responses:
            return ()
        return answer.container_responses[0].deviceIDs

    async def _allocated(self, resource: str, ids: Collection[str]) -> dp.ContainerAllocateResponse:
        stub = self._stub(self._manager.callee(resource))
        request = dp.ContainerAllocateRequest(devices_ids=ids)
        try:
            answer = await _called(stub.allocate(dp.AllocateRequest(container_requests=[request])))
        except _RpcFailed as failed:
            raise device_manager.AllocationError(str(failed)) from None
        if not answer.container_responses:
            raise device_manager.AllocationError(
                f"no containers return in allocation response {answer}"
            )
        return answer.container_responses[0]

    def _stub(self, client: device_manager.Client) -> rpc.DevicePluginClient:
        return rpc.DevicePluginClient(self._channels[client.number])


class Registration:
    """The registration service of one kubelet run; `connect` dials a plugin's socket."""

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        accepts: Callable[[], bool],
        connect: Callable[[str, str], Awaitable[None]],
    ) -> None:
        self._directory = directory
        self._accepts = accepts
        self._connect = connect

    async def register(
        self, request: dp.RegisterRequest, context: rpc.Context[dp.RegisterRequest, dp.Empty]
    ) -> dp.Empty:
        """Register a plugin; the call's deadline includes the dial and the call for its options."""
        if not self._accepts():
            await context.abort(grpc.StatusCode.UNAVAILABLE, "registrations are switched off")
        refusal = rules.refusal(request.version, request.resource_name)
        if refusal is not None:
            await context.abort(grpc.StatusCode.UNKNOWN, refusal)
        try:
            await self._connect(request.resource_name, self._path(request.endpoint))
        except NotConnected as error:
            await context.abort(grpc.StatusCode.UNKNOWN, str(error))
        return dp.Empty()

    def _path(self, endpoint: str) -> str:
        # Go's filepath.Join: an absolute endpoint stays below the directory, `..` is resolved.
        return os.path.normpath(f"{self._directory}/{endpoint}")


class _Refused(Exception):
    """The error that the plugin receives in NotifyRegistrationStatus."""


class Watcher:
    """Registers the sockets in the directory, and deregisters those that are removed.

    `connect(resource, socket)` and `drop(resource)` are functions of the kubelet.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        connect: Callable[[str, str], Awaitable[None]],
        drop: Callable[[str], Awaitable[object]],
    ) -> None:
        self._directory = directory
        self._connect = connect
        self._drop = drop
        self._stamps: dict[str, _Stamp] = {}
        self._resources: dict[str, str] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            while True:
                await self._reconcile(_sockets(self._directory))
                await asyncio.sleep(_POLL_S)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _reconcile(self, stamps: dict[str, _Stamp]) -> None:
        for path, stamp in [*self._stamps.items()]:
            if stamps.get(path) != stamp:
                await self._forget(path)
        for path in stamps.keys() - self._stamps.keys():
            self._stamps[path] = stamps[path]
            self._tasks[path] = asyncio.create_task(self._register(path), name=f"register {path}")

    async def _forget(self, path: str) -> None:
        del self._stamps[path]
        task = self._tasks.pop(path)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        resource = self._resources.pop(path, None)
        if resource is not None:
            await self._drop(resource)

    async def _register(self, path: str) -> None:
        delay_s = _BACKOFF_S
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
                async with grpc.aio.insecure_channel(
                    f"unix:{path}", options=[("grpc.use_local_subchannel_pool", 1)]
                ) as channel:
                    if await self._introduce(path, channel):
                        return
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _BACKOFF_MAX_S)

    async def _introduce(self, path: str, channel: grpc.aio.Channel) -> bool:
        """Read a plugin's info, register it, and send it the result; return whether that worked."""
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            await channel.channel_ready()
        stub = rpc.PluginWatcherClient(channel)
        info = await stub.get_info(pr.InfoRequest(), timeout=_INFO_TIMEOUT_S)
        try:
            await self._admit(path, info)
        except _Refused as refused:
            answer = pr.RegistrationStatus(plugin_registered=False, error=str(refused))
            await stub.notify_registration_status(answer, timeout=_NOTIFY_TIMEOUT_S)
            return False
        try:
            answer = pr.RegistrationStatus(plugin_registered=True)
            await stub.notify_registration_status(answer, timeout=_NOTIFY_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            await self._drop(self._resources.pop(path))
            raise
        return True

    async def _admit(self, path: str, info: pr.PluginInfo) -> None:
        if info.type != rules.PLUGIN_TYPE:
            raise _Refused(
                "RegisterPlugin error -- no handler registered for plugin type: "
                f"{info.type} at socket {path}"
            )
        refusal = rules.watcher_refusal(info.name, list(info.supported_versions))
        if refusal is not None:
            raise _Refused(f"RegisterPlugin error -- plugin validation failed with err: {refusal}")
        try:
            await self._connect(info.name, info.endpoint or path)
        except NotConnected as error:
            raise _Refused(
                f"RegisterPlugin error -- plugin registration failed with err: {error}"
            ) from None
        self._resources[path] = info.name


async def _called(call: Awaitable[Answer]) -> Answer:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise _RpcFailed(rules.rpc_error(error.code().name, error.details() or "")) from None
    except asyncio.CancelledError:
        # grpc.aio cancels tasks that wait on a channel when another task closes it.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise _RpcFailed(
            rules.rpc_error("CANCELLED", "grpc: the client connection is closing")
        ) from None


def _device(device: dp.Device) -> device_manager.Device:
    return device_manager.Device(
        id=device.ID,
        health=device.health,
        numa_nodes=tuple(node.ID for node in device.topology.nodes),
    )


def _sockets(directory: pathlib.Path) -> dict[str, _Stamp]:
    stamps: dict[str, _Stamp] = {}
    for folder, folders, files in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            path = os.path.join(folder, name)  # noqa: PTH118 (a Path per file and poll is wasted)
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(path)
                if stat.S_ISSOCK(status.st_mode) and not name.startswith("."):
                    stamps[path] = (status.st_ino, status.st_mtime_ns)
    return stamps
