"""Adapter for gRPC: answers the kubelet's CSI calls to publish and unpublish volumes.

The text of an error becomes an event of the pod. The kubelet retries a failed call.
"""

import asyncio
from pathlib import Path
from typing import Final, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf import message

import muster
from muster.pb import csi_pb2 as csi
from muster.pb import csi_rpc, rpc
from muster.service import logs
from muster_fuse import registration
from muster_fuse.volume import publication, volumes

Request = TypeVar("Request", bound=message.Message)
Answer = TypeVar("Answer", bound=message.Message)

REGISTRY: Final = "plugins_registry"
"""The directory of plugin sockets, below the kubelet's directory."""
_CALL_S: Final = 30.0
"""The timeout of a call: shorter than the two minutes after which the kubelet retries."""
_CODES: Final = {
    publication.Reason.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    publication.Reason.NO_POD: grpc.StatusCode.FAILED_PRECONDITION,
    publication.Reason.NAMESPACE: grpc.StatusCode.PERMISSION_DENIED,
}


class Driver:
    """The driver's services on one node."""

    def __init__(
        self, node: str, served: volumes.Volumes, *, kubelet: str, namespaces: tuple[str, ...]
    ) -> None:
        self.published = 0
        self.refused = 0
        self._node = node
        self._volumes = served
        self._kubelet = kubelet
        self._namespaces = namespaces

    async def get_plugin_info(
        self,
        request: csi.GetPluginInfoRequest,  # noqa: ARG002  # empty
        context: rpc.Context[csi.GetPluginInfoRequest, csi.GetPluginInfoResponse],  # noqa: ARG002
    ) -> csi.GetPluginInfoResponse:
        """Return the driver's name and version."""
        return csi.GetPluginInfoResponse(name=publication.DRIVER, vendor_version=muster.__version__)

    async def get_plugin_capabilities(
        self,
        request: csi.GetPluginCapabilitiesRequest,  # noqa: ARG002  # empty
        context: rpc.Context[  # noqa: ARG002
            csi.GetPluginCapabilitiesRequest, csi.GetPluginCapabilitiesResponse
        ],
    ) -> csi.GetPluginCapabilitiesResponse:
        """Return no capabilities: there is no other service, such as a controller."""
        return csi.GetPluginCapabilitiesResponse()

    async def probe(
        self,
        request: csi.ProbeRequest,  # noqa: ARG002  # empty
        context: rpc.Context[csi.ProbeRequest, csi.ProbeResponse],  # noqa: ARG002
    ) -> csi.ProbeResponse:
        """Report that the driver is ready."""
        return csi.ProbeResponse(ready=csi.Ready(value=True))

    async def publish(
        self,
        request: csi.NodePublishVolumeRequest,
        context: rpc.Context[csi.NodePublishVolumeRequest, csi.NodePublishVolumeResponse],
    ) -> csi.NodePublishVolumeResponse:
        """Mount a volume with the pod's socket, or abort the call with the reason."""
        try:
            wanted = publication.wanted(
                request.volume_id,
                request.target_path,
                dict(request.volume_context),
                is_mount=request.volume_capability.HasField("mount"),
                kubelet=self._kubelet,
                namespaces=self._namespaces,
            )
            async with asyncio.timeout(_CALL_S):
                await self._volumes.publish(wanted)
        except (publication.Refused, volumes.TooManyPods, OSError, TimeoutError) as error:
            self.refused += 1
            await self._abort(context, error, request.target_path)
        self.published += 1
        return csi.NodePublishVolumeResponse()

    async def unpublish(
        self,
        request: csi.NodeUnpublishVolumeRequest,
        context: rpc.Context[csi.NodeUnpublishVolumeRequest, csi.NodeUnpublishVolumeResponse],
    ) -> csi.NodeUnpublishVolumeResponse:
        """Remove a volume; succeed if there is none."""
        try:
            volume = publication.existing(
                request.volume_id, request.target_path, kubelet=self._kubelet
            )
            async with asyncio.timeout(_CALL_S):
                await self._volumes.unpublish(volume)
        except (publication.Refused, OSError, TimeoutError) as error:
            await self._abort(context, error, request.target_path)
        return csi.NodeUnpublishVolumeResponse()

    async def get_node_capabilities(
        self,
        request: csi.NodeGetCapabilitiesRequest,  # noqa: ARG002  # empty
        context: rpc.Context[  # noqa: ARG002
            csi.NodeGetCapabilitiesRequest, csi.NodeGetCapabilitiesResponse
        ],
    ) -> csi.NodeGetCapabilitiesResponse:
        """Return no capabilities: volumes are neither staged nor measured."""
        return csi.NodeGetCapabilitiesResponse()

    async def get_node_info(
        self,
        request: csi.NodeGetInfoRequest,  # noqa: ARG002  # empty
        context: rpc.Context[csi.NodeGetInfoRequest, csi.NodeGetInfoResponse],  # noqa: ARG002
    ) -> csi.NodeGetInfoResponse:
        """Return the node's name, and no volume limit, so that schedulers do not count volumes."""
        return csi.NodeGetInfoResponse(node_id=self._node)

    @staticmethod
    async def _abort(
        context: rpc.Context[Request, Answer], error: Exception, target: str
    ) -> NoReturn:
        match error:
            case publication.Refused():
                code, text = _CODES[error.reason], str(error)
            case volumes.TooManyPods():
                code, text = grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)
            case TimeoutError():
                code, text = grpc.StatusCode.DEADLINE_EXCEEDED, "the node's kernel did not answer"
            case _:
                code, text = grpc.StatusCode.INTERNAL, str(error)
        logs.logger().warning("volume_failed", target=target, code=code.name, problem=text)
        await context.abort(code, text)


def offered(
    driver: Driver, kubelet: Path, *, unregistered_s: float = 60.0
) -> registration.Registration:
    """Return the registration of the driver with the kubelet that uses this directory."""
    offer = registration.Driver(
        kind="CSIPlugin",
        name=publication.DRIVER,
        versions=("1.0.0",),
        handlers=csi_rpc.handlers(driver),
    )
    return registration.Registration(kubelet / REGISTRY, offer, unregistered_s=unregistered_s)
