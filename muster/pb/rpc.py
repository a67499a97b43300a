"""Adapter: gRPC: which path, request and answer each method of the kubelet's services has.

The generated half stops at the messages. A `_pb2_grpc.py` would refuse every grpcio older than
its generator, so the tables are here, once, for servers and clients: a `*_handler` function
wraps a servicer for `server.add_generic_rpc_handlers`, a `*Client` holds one multicallable per
method. Paths and shapes are those of the .proto files in `proto/muster/pb`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

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
    Methods: TypeAlias = dict[str, grpc.RpcMethodHandler[Any, Any]]
    Context: TypeAlias = grpc.aio.ServicerContext[Request, Answer]
    Unary: TypeAlias = grpc.aio.UnaryUnaryMultiCallable[Request, Answer]
    Stream: TypeAlias = grpc.aio.UnaryStreamMultiCallable[Request, Answer]
else:
    # grpc.aio's classes take type arguments only in the stubs; at run time these are annotations.
    Context = Unary = Stream = dict


class RegistrationServicer(Protocol):
    """The service of the kubelet on kubelet.sock."""

    async def register(
        self, request: dp.RegisterRequest, context: Context[dp.RegisterRequest, dp.Empty]
    ) -> dp.Empty:
        """Register a plugin, or abort with the reason."""


class DevicePluginServicer(Protocol):
    """The service of a plugin on its own socket, one socket per resource."""

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
    """The service of a plugin on a socket under plugins_registry/."""

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
    """The service of the kubelet on pod-resources/kubelet.sock."""

    async def list(
        self,
        request: podres.ListPodResourcesRequest,
        context: Context[podres.ListPodResourcesRequest, podres.ListPodResourcesResponse],
    ) -> podres.ListPodResourcesResponse:
        """List every active pod with its devices."""

    async def get_allocatable_resources(
        self,
        request: podres.AllocatableResourcesRequest,
        context: Context[podres.AllocatableResourcesRequest, podres.AllocatableResourcesResponse],
    ) -> podres.AllocatableResourcesResponse:
        """List every healthy device of the node, including allocated ones."""

    async def get(
        self,
        request: podres.GetPodResourcesRequest,
        context: Context[podres.GetPodResourcesRequest, podres.GetPodResourcesResponse],
    ) -> podres.GetPodResourcesResponse:
        """Return one pod with its devices, or abort."""


def registration_handler(servicer: RegistrationServicer) -> grpc.GenericRpcHandler:
    """Wrap the kubelet's half of a registration for a server."""
    methods: Methods = {"Register": _unary(servicer.register, dp.RegisterRequest, dp.Empty)}
    return grpc.method_handlers_generic_handler(REGISTRATION, methods)


def device_plugin_handler(servicer: DevicePluginServicer) -> grpc.GenericRpcHandler:
    """Wrap a plugin for a server."""
    methods: Methods = {
        "GetDevicePluginOptions": _unary(
            servicer.get_device_plugin_options, dp.Empty, dp.DevicePluginOptions
        ),
        "ListAndWatch": grpc.unary_stream_rpc_method_handler(
            servicer.list_and_watch,
            dp.Empty.FromString,
            dp.ListAndWatchResponse.SerializeToString,
        ),
        "GetPreferredAllocation": _unary(
            servicer.get_preferred_allocation,
            dp.PreferredAllocationRequest,
            dp.PreferredAllocationResponse,
        ),
        "Allocate": _unary(servicer.allocate, dp.AllocateRequest, dp.AllocateResponse),
        "PreStartContainer": _unary(
            servicer.pre_start_container, dp.PreStartContainerRequest, dp.PreStartContainerResponse
        ),
    }
    return grpc.method_handlers_generic_handler(DEVICE_PLUGIN, methods)


def plugin_watcher_handler(servicer: PluginWatcherServicer) -> grpc.GenericRpcHandler:
    """Wrap a plugin's registration socket for a server."""
    methods: Methods = {
        "GetInfo": _unary(servicer.get_info, pr.InfoRequest, pr.PluginInfo),
        "NotifyRegistrationStatus": _unary(
            servicer.notify_registration_status,
            pr.RegistrationStatus,
            pr.RegistrationStatusResponse,
        ),
    }
    return grpc.method_handlers_generic_handler(PLUGIN_WATCHER, methods)


def pod_resources_handler(servicer: PodResourcesServicer) -> grpc.GenericRpcHandler:
    """Wrap the kubelet's podresources API for a server."""
    methods: Methods = {
        "List": _unary(
            servicer.list, podres.ListPodResourcesRequest, podres.ListPodResourcesResponse
        ),
        "GetAllocatableResources": _unary(
            servicer.get_allocatable_resources,
            podres.AllocatableResourcesRequest,
            podres.AllocatableResourcesResponse,
        ),
        "Get": _unary(servicer.get, podres.GetPodResourcesRequest, podres.GetPodResourcesResponse),
    }
    return grpc.method_handlers_generic_handler(POD_RESOURCES, methods)


class RegistrationClient:
    """Calls the kubelet as a plugin does."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        path = f"/{REGISTRATION}/Register"
        self.register = _caller(channel, path, dp.RegisterRequest, dp.Empty)


class DevicePluginClient:
    """Calls a plugin as the kubelet does."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        service = f"/{DEVICE_PLUGIN}"
        self.get_device_plugin_options = _caller(
            channel, f"{service}/GetDevicePluginOptions", dp.Empty, dp.DevicePluginOptions
        )
        self.list_and_watch: Stream[dp.Empty, dp.ListAndWatchResponse] = channel.unary_stream(
            f"{service}/ListAndWatch",
            dp.Empty.SerializeToString,
            dp.ListAndWatchResponse.FromString,
        )
        self.get_preferred_allocation = _caller(
            channel,
            f"{service}/GetPreferredAllocation",
            dp.PreferredAllocationRequest,
            dp.PreferredAllocationResponse,
        )
        self.allocate = _caller(
            channel, f"{service}/Allocate", dp.AllocateRequest, dp.AllocateResponse
        )
        self.pre_start_container = _caller(
            channel,
            f"{service}/PreStartContainer",
            dp.PreStartContainerRequest,
            dp.PreStartContainerResponse,
        )


class PluginWatcherClient:
    """Calls a plugin's registration socket as the kubelet does."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        service = f"/{PLUGIN_WATCHER}"
        self.get_info = _caller(channel, f"{service}/GetInfo", pr.InfoRequest, pr.PluginInfo)
        self.notify_registration_status = _caller(
            channel,
            f"{service}/NotifyRegistrationStatus",
            pr.RegistrationStatus,
            pr.RegistrationStatusResponse,
        )


class PodResourcesClient:
    """Reads from the kubelet which pod holds which device."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        service = f"/{POD_RESOURCES}"
        self.list = _caller(
            channel,
            f"{service}/List",
            podres.ListPodResourcesRequest,
            podres.ListPodResourcesResponse,
        )
        self.get_allocatable_resources = _caller(
            channel,
            f"{service}/GetAllocatableResources",
            podres.AllocatableResourcesRequest,
            podres.AllocatableResourcesResponse,
        )
        self.get = _caller(
            channel,
            f"{service}/Get",
            podres.GetPodResourcesRequest,
            podres.GetPodResourcesResponse,
        )


def _unary(
    method: Callable[[Request, Context[Request, Answer]], Awaitable[Answer]],
    request: type[Request],
    answer: type[Answer],
) -> grpc.RpcMethodHandler[Request, Answer]:
    return grpc.unary_unary_rpc_method_handler(method, request.FromString, answer.SerializeToString)


def _caller(
    channel: grpc.aio.Channel, path: str, request: type[Request], answer: type[Answer]
) -> Unary[Request, Answer]:
    return channel.unary_unary(path, request.SerializeToString, answer.FromString)
