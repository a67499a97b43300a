"""Adapter for gRPC: a minimal device plugin, the floor for plugins in Python with grpcio.

python bench/empty_plugin.py DIRECTORY RESOURCE DEVICE

It serves one device to the kubelet in that directory, and registers only once.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from typing import Final

import grpc.aio

from muster.pb import deviceplugin_pb2 as dp
from muster.pb import rpc

_SOCKET: Final = "empty.sock"


class EmptyPlugin:
    """Answers with prebuilt messages."""

    def __init__(self, device: str) -> None:
        given = dp.DeviceSpec(host_path=device, container_path=device, permissions="rw")
        container = dp.ContainerAllocateResponse(devices=[given])
        self._answer = dp.AllocateResponse(container_responses=[container])
        self._list = dp.ListAndWatchResponse(devices=[dp.Device(ID="0", health="Healthy")])

    async def get_device_plugin_options(
        self, request: dp.Empty, context: rpc.Context[dp.Empty, dp.DevicePluginOptions]
    ) -> dp.DevicePluginOptions:
        """Return no options."""
        del request, context
        return dp.DevicePluginOptions()

    async def list_and_watch(
        self, request: dp.Empty, context: rpc.Context[dp.Empty, dp.ListAndWatchResponse]
    ) -> AsyncIterator[dp.ListAndWatchResponse]:
        """Send one device list."""
        del request, context
        yield self._list
        await asyncio.Event().wait()

    async def allocate(
        self,
        request: dp.AllocateRequest,
        context: rpc.Context[dp.AllocateRequest, dp.AllocateResponse],
    ) -> dp.AllocateResponse:
        """Allocate the device."""
        del request, context
        return self._answer

    async def get_preferred_allocation(
        self,
        request: dp.PreferredAllocationRequest,
        context: rpc.Context[dp.PreferredAllocationRequest, dp.PreferredAllocationResponse],
    ) -> dp.PreferredAllocationResponse:
        """Return no preference."""
        del request, context
        return dp.PreferredAllocationResponse()

    async def pre_start_container(
        self,
        request: dp.PreStartContainerRequest,
        context: rpc.Context[dp.PreStartContainerRequest, dp.PreStartContainerResponse],
    ) -> dp.PreStartContainerResponse:
        """Do nothing."""
        del request, context
        return dp.PreStartContainerResponse()


async def serve(directory: str, resource: str, device: str) -> None:
    """Serve and register; serve until the process ends."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((rpc.device_plugin_handler(EmptyPlugin(device)),))
    server.add_insecure_port(f"unix:{directory}/device-plugins/{_SOCKET}")
    await server.start()
    async with grpc.aio.insecure_channel(
        f"unix:{directory}/device-plugins/kubelet.sock"
    ) as kubelet:
        await rpc.RegistrationClient(kubelet).register(
            dp.RegisterRequest(version="v1beta1", endpoint=_SOCKET, resource_name=resource)
        )
    await server.wait_for_termination()


if __name__ == "__main__":
    try:
        asyncio.run(serve(*sys.argv[1:]))
    finally:
        os._exit(0)
