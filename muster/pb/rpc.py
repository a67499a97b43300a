"""Adapter: gRPC: which path, request and answer each method of the kubelet's services has.

The generated half stops at the messages. A `_pb2_grpc.py` would refuse every grpcio older than
its generator, so the tables are here, once, for servers and clients: a `*_handler` function
wraps a servicer for `server.add_generic_rpc_handlers`, a `*Client` holds one multicallable per
method. Paths and shapes are those of the .proto files in `proto/muster/pb`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf import message

from muster.pb import deviceplugin_pb2 as dp
from muster.pb import pluginregistration_pb2 as pr
from muster.pb import podresources_pb2 as podres

REGISTRATION = "v1beta1.Registration"
DEVICE_PLUGIN = "v1beta1.DevicePlugin"
PLUGIN_WATCHER = "pluginregistration.Registration"
POD_RESOURCES = "v1.PodResourcesLister"

Request = TypeVar("Request", bound=message.Message)
Answer = TypeVar("Answer", bound=message.Message)
if TYPE_CHECKING:
    Context: TypeAlias = grpc.aio.ServicerContext[Request, Answer]
    Unary: TypeAlias = grpc.aio.UnaryUnaryMultiCallable[Request, Answer]
    Stream: TypeAlias = grpc.aio.UnaryStreamMultiCallable[Request, Answer]
else:
    # grpc.aio's classes take type arguments only in the stubs; at run time these are annotations.
    Context = Unary = Stream = dict


class RegistrationServicer(Protocol):
    """What the kubelet serves on kubelet.sock."""

    async def register(
        self, request: dp.RegisterRequest, context: Context[dp.RegisterRequest, dp.Empty]
    ) -> dp.Empty:
        """Register a plugin, or abort with the reason."""


class DevicePluginServicer(Protocol):
    """What a plugin serves on its own socket, one resource a socket."""

    async def get_device_plugin_options(
        self, request: dp.Empty, context: Context[dp.Empty, dp.DevicePluginOptions]
    ) -> dp.DevicePluginOptions:
        """Return which of the optional calls are wanted."""

    def list_and_watch(
        self, request: dp.Empty, context: Context[dp.Empty, dp.ListAndWatchResponse]
    ) -> AsyncIterator[dp.ListAndWatchResponse]:
        """Yield the whole list first, then again after every change."""

    async def get_preferred_allocation(
        self,
        request: dp.PreferredAllocationRequest,
        context: Context[dp.PreferredAllocationRequest, dp.PreferredAllocationResponse],
    ) -> dp.PreferredAllocationResponse:
        """Return which of the available devices to prefer."""

    async def allocate(
        self, request: dp.AllocateRequest, context: Context[dp.AllocateRequest, dp.AllocateResponse]
    ) -> dp.AllocateResponse:
        """Return what a container needs to use its devices."""

    async def pre_start_container(
        self,
        request: dp.PreStartContainerRequest,
        context: Context[dp.PreStartContainerRequest, dp.PreStartContainerResponse],
    ) -> dp.PreStartContainerResponse:
        """Prepare devices before a container starts."""


class PluginWatcherServicer(Protocol):
    """What a plugin serves on a socket under plugins_registry/."""

    async def get_info(
        self, request: pr.InfoRequest, context: Context[pr.InfoRequest, pr.PluginInfo]
    ) -> pr.PluginInfo:
        """Return the plugin's name and the path of its own socket."""

    async def notify_registration_status(
        self,
        request: pr.RegistrationStatus,
        context: Context[pr.RegistrationStatus, pr.RegistrationStatusResponse],
    ) -> pr.RegistrationStatusResponse:
        """Receive whether the kubelet registered the plugin."""


class PodResourcesServicer(Protocol):
    """What the kubelet serves on pod-resources/kubelet.sock."""

    async def list(
        self,
        request: podres.ListPodResourcesRequest,
        context: Context[podres.ListPodResourcesRequest, podres.ListPodResourcesResponse],
    ) -> podres.ListPodResourcesResponse:
        """Every active pod with its devices."""

    async def get_allocatable_resources(
        self,
        request: podres.AllocatableResourcesRequest,
        context: Context[podres.AllocatableResourcesRequest, podres.AllocatableResourcesResponse],
    ) -> podres.AllocatableResourcesResponse:
        """Every healthy device of the node, allocated ones included."""

    async def get(
        self,
        request: podres.GetPodResourcesRequest,
        context: Context[podres.GetPodResourcesRequest, podres.GetPodResourcesResponse],
    ) -> podres.GetPodResourcesResponse:
        """One pod with its devices, or abort."""


def registration_handler(servicer: RegistrationServicer) -> grpc.GenericRpcHandler:
    """Wrap the kubelet's half of a registration for a server."""
    return grpc.method_handlers_generic_handler(
        REGISTRATION,
        {
            "Register": grpc.unary_unary_rpc_method_handler(
                servicer.register, dp.RegisterRequest.FromString, dp.Empty.SerializeToString
            )
        },
    )


def device_plugin_handler(servicer: DevicePluginServicer) -> grpc.GenericRpcHandler:
    """Wrap a plugin for a server."""
    return grpc.method_handlers_generic_handler(
        DEVICE_PLUGIN,
        {
            "GetDevicePluginOptions": grpc.unary_unary_rpc_method_handler(
                servicer.get_device_plugin_options,
                dp.Empty.FromString,
                dp.DevicePluginOptions.SerializeToString,
            ),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                servicer.list_and_watch,
                dp.Empty.FromString,
                dp.ListAndWatchResponse.SerializeToString,
            ),
            "GetPreferredAllocation": grpc.unary_unary_rpc_method_handler(
                servicer.get_preferred_allocation,
                dp.PreferredAllocationRequest.FromString,
                dp.PreferredAllocationResponse.SerializeToString,
            ),
            "Allocate": grpc.unary_unary_rpc_method_handler(
                servicer.allocate,
                dp.AllocateRequest.FromString,
                dp.AllocateResponse.SerializeToString,
            ),
            "PreStartContainer": grpc.unary_unary_rpc_method_handler(
                servicer.pre_start_container,
                dp.PreStartContainerRequest.FromString,
                dp.PreStartContainerResponse.SerializeToString,
            ),
        },
    )


def plugin_watcher_handler(servicer: PluginWatcherServicer) -> grpc.GenericRpcHandler:
    """Wrap a plugin's registration socket for a server."""
    return grpc.method_handlers_generic_handler(
        PLUGIN_WATCHER,
        {
            "GetInfo": grpc.unary_unary_rpc_method_handler(
                servicer.get_info, pr.InfoRequest.FromString, pr.PluginInfo.SerializeToString
            ),
            "NotifyRegistrationStatus": grpc.unary_unary_rpc_method_handler(
                servicer.notify_registration_status,
                pr.RegistrationStatus.FromString,
                pr.RegistrationStatusResponse.SerializeToString,
            ),
        },
    )


def pod_resources_handler(servicer: PodResourcesServicer) -> grpc.GenericRpcHandler:
    """Wrap the kubelet's podresources API for a server."""
    return grpc.method_handlers_generic_handler(
        POD_RESOURCES,
        {
            "List": grpc.unary_unary_rpc_method_handler(
                servicer.list,
                podres.ListPodResourcesRequest.FromString,
                podres.ListPodResourcesResponse.SerializeToString,
            ),
            "GetAllocatableResources": grpc.unary_unary_rpc_method_handler(
                servicer.get_allocatable_resources,
                podres.AllocatableResourcesRequest.FromString,
                podres.AllocatableResourcesResponse.SerializeToString,
            ),
            "Get": grpc.unary_unary_rpc_method_handler(
                servicer.get,
                podres.GetPodResourcesRequest.FromString,
                podres.GetPodResourcesResponse.SerializeToString,
            ),
        },
    )


class RegistrationClient:
    """Calls the kubelet as a plugin does."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.register: Unary[dp.RegisterRequest, dp.Empty] = channel.unary_unary(
            f"/{REGISTRATION}/Register", dp.RegisterRequest.SerializeToString, dp.Empty.FromString
        )


class DevicePluginClient:
    """Calls a plugin as the kubelet does."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.get_device_plugin_options: Unary[dp.Empty, dp.DevicePluginOptions] = (
            channel.unary_unary(
                f"/{DEVICE_PLUGIN}/GetDevicePluginOptions",
                dp.Empty.SerializeToString,
                dp.DevicePluginOptions.FromString,
            )
        )
        self.list_and_watch: Stream[dp.Empty, dp.ListAndWatchResponse] = channel.unary_stream(
            f"/{DEVICE_PLUGIN}/ListAndWatch",
            dp.Empty.SerializeToString,
            dp.ListAndWatchResponse.FromString,
        )
        self.get_preferred_allocation: Unary[
            dp.PreferredAllocationRequest, dp.PreferredAllocationResponse
        ] = channel.unary_unary(
            f"/{DEVICE_PLUGIN}/GetPreferredAllocation",
            dp.PreferredAllocationRequest.SerializeToString,
            dp.PreferredAllocationResponse.FromString,
        )
        self.allocate: Unary[dp.AllocateRequest, dp.AllocateResponse] = channel.unary_unary(
            f"/{DEVICE_PLUGIN}/Allocate",
            dp.AllocateRequest.SerializeToString,
            dp.AllocateResponse.FromString,
        )
        self.pre_start_container: Unary[
            dp.PreStartContainerRequest, dp.PreStartContainerResponse
        ] = channel.unary_unary(
            f"/{DEVICE_PLUGIN}/PreStartContainer",
            dp.PreStartContainerRequest.SerializeToString,
            dp.PreStartContainerResponse.FromString,
        )


class PluginWatcherClient:
    """Calls a plugin's registration socket as the kubelet does."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.get_info: Unary[pr.InfoRequest, pr.PluginInfo] = channel.unary_unary(
            f"/{PLUGIN_WATCHER}/GetInfo",
            pr.InfoRequest.SerializeToString,
            pr.PluginInfo.FromString,
        )
        self.notify_registration_status: Unary[
            pr.RegistrationStatus, pr.RegistrationStatusResponse
        ] = channel.unary_unary(
            f"/{PLUGIN_WATCHER}/NotifyRegistrationStatus",
            pr.RegistrationStatus.SerializeToString,
            pr.RegistrationStatusResponse.FromString,
        )


class PodResourcesClient:
    """Reads from the kubelet which pod holds which device."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.list: Unary[podres.ListPodResourcesRequest, podres.ListPodResourcesResponse] = (
            channel.unary_unary(
                f"/{POD_RESOURCES}/List",
                podres.ListPodResourcesRequest.SerializeToString,
                podres.ListPodResourcesResponse.FromString,
            )
        )
        self.get_allocatable_resources: Unary[
            podres.AllocatableResourcesRequest, podres.AllocatableResourcesResponse
        ] = channel.unary_unary(
            f"/{POD_RESOURCES}/GetAllocatableResources",
            podres.AllocatableResourcesRequest.SerializeToString,
            podres.AllocatableResourcesResponse.FromString,
        )
        self.get: Unary[podres.GetPodResourcesRequest, podres.GetPodResourcesResponse] = (
            channel.unary_unary(
                f"/{POD_RESOURCES}/Get",
                podres.GetPodResourcesRequest.SerializeToString,
                podres.GetPodResourcesResponse.FromString,
            )
        )
