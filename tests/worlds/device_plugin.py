"""A device plugin whose answers a test chooses, and which records the kubelet's calls."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final, Self

import grpc
import grpc.aio

from muster.pb import deviceplugin_pb2 as dp
from muster.pb import pluginregistration_pb2 as pr
from muster.pb import rpc

OWN_POOL: Final = (("grpc.use_local_subchannel_pool", 1),)


def devices(*ids: str, **healths: str) -> list[dp.Device]:
    """Return devices: healthy ones with the ids `ids`, and others with a health by id."""
    listed = [dp.Device(ID=id_, health="Healthy") for id_ in ids]
    return listed + [dp.Device(ID=id_, health=health) for id_, health in healths.items()]


class Stream:
    """One ListAndWatch stream that the kubelet has opened."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self._messages: asyncio.Queue[list[dp.Device] | None] = asyncio.Queue()

    def send(self, message: Sequence[dp.Device]) -> None:
        """Send a complete list of devices."""
        self._messages.put_nowait([*message])

    def end(self) -> None:
        """End the stream from the plugin's side; its server keeps running."""
        self._messages.put_nowait(None)

    async def messages(self) -> AsyncIterator[dp.ListAndWatchResponse]:
        """Yield what is sent, until the end."""
        try:
            while (message := await self._messages.get()) is not None:
                yield dp.ListAndWatchResponse(devices=message)
        finally:
            self.ended.set()


class DevicePlugin:
    """A plugin on one socket; `async with` serves it.

    `greeting` is the first message of each stream, None for none. Allocate waits until `held` is
    set, GetDevicePluginOptions until `options_held` is. A `*_refusal` that is not empty is the
    message of the error with which the plugin answers.
    """

    def __init__(self, path: Path, resource: str, *ids: str) -> None:
        self.path = path
        self.greeting: list[dp.Device] | None = devices(*ids)
        self.options = dp.DevicePluginOptions()
        self.answers = [dp.ContainerAllocateResponse()]
        self.prefers: list[str] = []
        self.allocate_refusal = ""
        self.options_refusal = ""
        self.options_code = grpc.StatusCode.INTERNAL
        self.preference_refusal = ""
        self.start_refusal = ""
        self.held, self.options_held = asyncio.Event(), asyncio.Event()
        self.held.set()
        self.options_held.set()
        self.info = pr.PluginInfo(
            type="DevicePlugin", name=resource, supported_versions=["v1beta1"]
        )
        self.calls: list[str] = []
        self.allocations: list[list[list[str]]] = []
        self.preferences: list[dp.ContainerPreferredAllocationRequest] = []
        self.starts: list[list[str]] = []
        self.statuses: list[tuple[bool, str]] = []
        self.streams: list[Stream] = []

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers(
            (rpc.device_plugin_handler(self), rpc.plugin_watcher_handler(self))
        )
        self._server.add_insecure_port(f"unix:{self.path}")
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Cut every stream, as a killed process does, and remove the socket."""
        for stream in self.streams:
            stream.end()
        await self._server.stop(None)

    def send(self, *ids: str, **healths: str) -> None:
        """Send a list on every stream."""
        for stream in self.streams:
            stream.send(devices(*ids, **healths))

    async def get_device_plugin_options(
        self, _request: dp.Empty, context: rpc.Context[dp.Empty, dp.DevicePluginOptions]
    ) -> dp.DevicePluginOptions:
        self.calls.append("options")
        await self.options_held.wait()
        if self.options_refusal:
            await context.abort(self.options_code, self.options_refusal)
        return self.options

    async def list_and_watch(
        self, _request: dp.Empty, _context: rpc.Context[dp.Empty, dp.ListAndWatchResponse]
    ) -> AsyncIterator[dp.ListAndWatchResponse]:
        self.calls.append("list")
        stream = Stream()
        if self.greeting is not None:
            stream.send(self.greeting)
        self.streams.append(stream)
        async for message in stream.messages():
            yield message

    async def get_preferred_allocation(
        self,
        request: dp.PreferredAllocationRequest,
        context: rpc.Context[dp.PreferredAllocationRequest, dp.PreferredAllocationResponse],
    ) -> dp.PreferredAllocationResponse:
        self.preferences.extend(request.container_requests)
        if self.preference_refusal:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, self.preference_refusal)
        return dp.PreferredAllocationResponse(
            container_responses=[dp.ContainerPreferredAllocationResponse(deviceIDs=self.prefers)]
        )

    async def allocate(
        self,
        request: dp.AllocateRequest,
        context: rpc.Context[dp.AllocateRequest, dp.AllocateResponse],
    ) -> dp.AllocateResponse:
        self.allocations.append([sorted(each.devices_ids) for each in request.container_requests])
        await self.held.wait()
        if self.allocate_refusal:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, self.allocate_refusal)
        return dp.AllocateResponse(container_responses=self.answers)

    async def pre_start_container(
        self,
        request: dp.PreStartContainerRequest,
        context: rpc.Context[dp.PreStartContainerRequest, dp.PreStartContainerResponse],
    ) -> dp.PreStartContainerResponse:
        self.starts.append(sorted(request.devices_ids))
        if self.start_refusal:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, self.start_refusal)
        return dp.PreStartContainerResponse()

    async def get_info(
        self, _request: pr.InfoRequest, _context: rpc.Context[pr.InfoRequest, pr.PluginInfo]
    ) -> pr.PluginInfo:
        self.calls.append("info")
        return self.info

    async def notify_registration_status(
        self,
        request: pr.RegistrationStatus,
        _context: rpc.Context[pr.RegistrationStatus, pr.RegistrationStatusResponse],
    ) -> pr.RegistrationStatusResponse:
        self.statuses.append((request.plugin_registered, request.error))
        return pr.RegistrationStatusResponse()
