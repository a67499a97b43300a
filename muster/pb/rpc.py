"""Adapter for gRPC: path, request and answer of each method of the kubelet's services.

Only the messages are generated. A `_pb2_grpc.py` would refuse every grpcio older than its
generator, so the methods are defined here, once for servers and clients: a `*_handler` function
wraps a servicer for `server.add_generic_rpc_handlers`, a `*Client` has one multicallable per
method. Paths and message types are those of the .proto files in `proto/muster/pb`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

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
    Handler: TypeAlias = grpc.RpcMethodHandler[Any, Any]
    Context: TypeAlias = grpc.aio.ServicerContext[Request, Answer]
    Unary: TypeAlias = grpc.aio.UnaryUnaryMultiCallable[Request, Answer]
    Stream: TypeAlias = grpc.aio.UnaryStreamMultiCallable[Request, Answer]
else:
    # grpc.aio's classes take type arguments only in the stubs; at run time these are annotations.
    Context = Unary = Stream = dict


class Method(NamedTuple, Generic[Request, Answer]):
    """A method with one request and one answer."""

    path: str
    request: type[Request]
    answer: type[Answer]

    def serve(
        self, method: Callable[[Request, Context[Request, Answer]], Awaitable[Answer]]
    ) -> Handler:
        """Return the handler through which a server calls `method`."""
        return grpc.unary_unary_rpc_method_handler(
            method, self.request.FromString, self.answer.SerializeToString
        )

    def on(self, channel: grpc.aio.Channel) -> Unary[Request, Answer]:
        """Return a callable that calls this method over a channel."""
        return channel.unary_unary(
            self.path, self.request.SerializeToString, self.answer.FromString
        )


class _Stream(NamedTuple, Generic[Request, Answer]):
    """A method with one request and a stream of answers."""

    path: str
    request: type[Request]
    answer: type[Answer]

    def serve(
        self, method: Callable[[Request, Context[Request, Answer]], AsyncIterator[Answer]]
    ) -> Handler:
        return grpc.unary_stream_rpc_method_handler(
            method, self.request.FromString, self.answer.SerializeToString
        )

    def on(self, channel: grpc.aio.Channel) -> Stream[Request, Answer]:
        return channel.unary_stream(
            self.path, self.request.SerializeToString, self.answer.FromString
        )


_REGISTER = Method(f"/{REGISTRATION}/Register", dp.RegisterRequest, dp.Empty)
_OPTIONS = Method(f"/{DEVICE_PLUGIN}/GetDevicePluginOptions", dp.Empty, dp.DevicePluginOptions)
_LIST_AND_WATCH = _Stream(f"/{DEVICE_PLUGIN}/ListAndWatch", dp.Empty, dp.ListAndWatchResponse)
_PREFERRED = Method(
    f"/{DEVICE_PLUGIN}/GetPreferredAllocation",
    dp.PreferredAllocationRequest,
    dp.PreferredAllocationResponse,
)
_ALLOCATE = Method(f"/{DEVICE_PLUGIN}/Allocate", dp.AllocateRequest, dp.AllocateResponse)
_PRE_START = Method(
    f"/{DEVICE_PLUGIN}/PreStartContainer", dp.PreStartContainerRequest, dp.PreStartContainerResponse
)
_INFO = Method(f"/{PLUGIN_WATCHER}/GetInfo", pr.InfoRequest, pr.PluginInfo)
_NOTIFY = Method(
    f"/{PLUGIN_WATCHER}/NotifyRegistrationStatus",
    pr.RegistrationStatus,
    pr.RegistrationStatusResponse,
)
_LIST = Method(
    f"/{POD_RESOURCES}/List", podres.ListPodResourcesRequest, podres.ListPodResourcesResponse
)
_ALLOCATABLE = Method(
    f"/{POD_RESOURCES}/GetAllocatableResources",
    podres.AllocatableResourcesRequest,
    podres.AllocatableResourcesResponse,
)
_GET = Method(
    f"/{POD_RESOURCES}/Get", podres.GetPodResourcesRequest, podres.GetPodResourcesResponse
)


class RegistrationServicer(Protocol):
    """The kubelet's service on kubelet.sock."""

    async def register(
        self, request: dp.RegisterRequest, context: Context[dp.RegisterRequest, dp.Empty]
    ) -> dp.Empty:
        """Register a plugin, or abort with the reason."""


class DevicePluginServicer(Protocol):
    """A plugin's service on its own socket, one socket per resource."""

    async def get_device_plugin_options(
        self, request: dp.Empty, context: Context[dp.Empty, dp.DevicePluginOptions]
    ) -> dp.DevicePluginOptions:
        """Return which optional calls the plugin serves."""

    def list_and_watch(
        self, request: dp.Empty, context: Context[dp.Empty, dp.ListAndWatchResponse]
    ) -> AsyncIterator[dp.ListAndWatchResponse]:
        """Yield the whole list first, then again after every change."""

    async def get_preferred_allocation(
        self,
        request: dp.PreferredAllocationRequest,
        context: Context[dp.PreferredAllocationRequest, dp.PreferredAllocationResponse],
    ) -> dp.PreferredAllocationResponse:
        """Return the preferred devices among the available ones."""

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
    """A plugin's service on a socket under plugins_registry/."""

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
    """The kubelet's service on pod-resources/kubelet.sock."""

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
    """Return the gRPC handler that serves the kubelet's registration service."""
    return handler(REGISTRATION, {_REGISTER.path: _REGISTER.serve(servicer.register)})


def device_plugin_handler(servicer: DevicePluginServicer) -> grpc.GenericRpcHandler:
    """Return the gRPC handler that serves a device plugin."""
    methods = {
        _OPTIONS.path: _OPTIONS.serve(servicer.get_device_plugin_options),
        _LIST_AND_WATCH.path: _LIST_AND_WATCH.serve(servicer.list_and_watch),
        _PREFERRED.path: _PREFERRED.serve(servicer.get_preferred_allocation),
        _ALLOCATE.path: _ALLOCATE.serve(servicer.allocate),
        _PRE_START.path: _PRE_START.serve(servicer.pre_start_container),
    }
    return handler(DEVICE_PLUGIN, methods)


def plugin_watcher_handler(servicer: PluginWatcherServicer) -> grpc.GenericRpcHandler:
    """Return the gRPC handler that serves a plugin's registration socket."""
    methods = {
        _INFO.path: _INFO.serve(servicer.get_info),
        _NOTIFY.path: _NOTIFY.serve(servicer.notify_registration_status),
    }
    return handler(PLUGIN_WATCHER, methods)


def pod_resources_handler(servicer: PodResourcesServicer) -> grpc.GenericRpcHandler:
    """Return the gRPC handler that serves the kubelet's podresources API."""
    methods = {
        _LIST.path: _LIST.serve(servicer.list),
        _ALLOCATABLE.path: _ALLOCATABLE.serve(servicer.get_allocatable_resources),
        _GET.path: _GET.serve(servicer.get),
    }
    return handler(POD_RESOURCES, methods)


class RegistrationClient:
    """Calls the kubelet as a plugin does."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.register = _REGISTER.on(channel)


class DevicePluginClient:
    """Calls a plugin as the kubelet does."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.get_device_plugin_options = _OPTIONS.on(channel)
        self.list_and_watch = _LIST_AND_WATCH.on(channel)
        self.get_preferred_allocation = _PREFERRED.on(channel)
        self.allocate = _ALLOCATE.on(channel)
        self.pre_start_container = _PRE_START.on(channel)


class PluginWatcherClient:
    """Calls a plugin's registration socket as the kubelet does."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.get_info = _INFO.on(channel)
        self.notify_registration_status = _NOTIFY.on(channel)


class PodResourcesClient:
    """Reads from the kubelet which pod holds which device."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.list = _LIST.on(channel)
        self.get_allocatable_resources = _ALLOCATABLE.on(channel)
        self.get = _GET.on(channel)


def handler(service: str, by_path: dict[str, Handler]) -> grpc.GenericRpcHandler:
    """Return the gRPC handler of a service with these methods, by their paths."""
    methods = {path.rpartition("/")[2]: handler for path, handler in by_path.items()}
    return grpc.method_handlers_generic_handler(service, methods)
