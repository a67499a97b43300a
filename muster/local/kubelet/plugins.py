"""Adapter: device plugins: dials them, follows their lists, calls them for allocations.

One connection and one ListAndWatch stream per registration, never dialled again. What an end of a
stream means is the device manager's business; here its answer (which connection to close) is
carried out.
"""

import asyncio
import collections
import contextlib
from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

import grpc
import grpc.aio

from muster.local.kubelet import device_manager, rules
from muster.pb import deviceplugin_pb2 as dp
from muster.pb import rpc

# The kubelet's own limit for the dial, plugin/v1beta1/client.go.
DIAL_TIMEOUT_S = 10.0

Answer = TypeVar("Answer")


class NotConnected(Exception):
    """Why a plugin that registered could not be taken in, in the kubelet's words."""


class _RpcFailed(Exception):
    """A call to a plugin failed; the text is what Go prints for it."""


class Plugins:
    """The connections to all plugins of one life of a kubelet.

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
        """Dial the plugin and ask for its options; then follow its list. NotConnected if it fails.

        A failure forgets the client of the name, as the kubelet does; streams go on all the same.
        """
        client = self._manager.connecting(resource, path)
        channel = grpc.aio.insecure_channel(
            f"unix:{path}",
            options=[
                # Without it a dial to a path whose socket is gone shares an open connection.
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.default_authority", "localhost"),
            ],
        )
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(channel.close)
            undo.callback(self._manager.not_connected, resource)
            options = await self._greet(channel)
            undo.pop_all()
        self._manager.connected(client, options)
        self._channels[client.number] = channel
        stream = asyncio.create_task(self._follow(client, channel), name=f"follow {resource}")
        self._streams[client.number] = stream
        stream.add_done_callback(lambda _: self._streams.pop(client.number, None))

    async def drop(self, resource: str) -> bool:
        """Close the connection of the name's newest registration; False if there is none."""
        client = self._manager.client(resource)
        if client is None:
            return False
        stream = self._streams.get(client.number)
        await self._disconnect(resource)
        if stream is not None:
            await asyncio.wait([stream])
        return True

    async def close(self) -> None:
        """Drop every connection without a word, as a kubelet does that dies."""
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
        """Get a container its devices; None if it has them. AllocationError if it fails.

        Without time limit, as in the kubelet: a plugin that hangs, hangs every pod of the node.
        """
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
            pass  # Any end is the same to the kubelet; it only logs the reason.
        finally:
            self.streams_open[resource] -= 1
        if client.number in self._channels:
            # Else we closed it ourselves. The kubelet's lookup then finds nobody, microseconds
            # later; ours would come so late that it might find the plugin's next registration.
            await self._disconnect(resource)
        # The kubelet leaks the connection of an overtaken stream (k/k#124716); we need not.
        self._channels.pop(client.number, None)
        await channel.close()

    async def _listen(self, client: device_manager.Client, channel: grpc.aio.Channel) -> None:
        async for message in rpc.DevicePluginClient(channel).list_and_watch(dp.Empty()):
            if client.number not in self._channels:
                return  # We are closing the connection; its last message comes too late.
            self._manager.listed(client.resource, [_device(device) for device in message.devices])
            self._changed()

    async def _disconnect(self, resource: str) -> None:
        client = self._manager.stream_ended(resource, asyncio.get_running_loop().time())
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


async def _called(call: Awaitable[Answer]) -> Answer:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise _RpcFailed(rules.rpc_error(error.code().name, error.details() or "")) from None
    except asyncio.CancelledError:
        # grpc.aio cancels whoever waits on a channel that somebody else closes.
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
