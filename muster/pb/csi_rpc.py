"""Adapter for gRPC: path, request and answer of the CSI methods that serve inline volumes of pods.

As in `rpc`, only the messages are generated. Paths and message types are those of csi.proto.
"""

from __future__ import annotations

from typing import Final, Protocol

import grpc

from muster.pb import csi_pb2 as csi
from muster.pb import rpc

_IDENTITY: Final = "csi.v1.Identity"
_NODE: Final = "csi.v1.Node"
PLUGIN_INFO: Final = rpc.Method(
    f"/{_IDENTITY}/GetPluginInfo", csi.GetPluginInfoRequest, csi.GetPluginInfoResponse
)
PLUGIN_CAPABILITIES: Final = rpc.Method(
    f"/{_IDENTITY}/GetPluginCapabilities",
    csi.GetPluginCapabilitiesRequest,
    csi.GetPluginCapabilitiesResponse,
)
PROBE: Final = rpc.Method(f"/{_IDENTITY}/Probe", csi.ProbeRequest, csi.ProbeResponse)
PUBLISH: Final = rpc.Method(
    f"/{_NODE}/NodePublishVolume", csi.NodePublishVolumeRequest, csi.NodePublishVolumeResponse
)
UNPUBLISH: Final = rpc.Method(
    f"/{_NODE}/NodeUnpublishVolume", csi.NodeUnpublishVolumeRequest, csi.NodeUnpublishVolumeResponse
)
NODE_CAPABILITIES: Final = rpc.Method(
    f"/{_NODE}/NodeGetCapabilities", csi.NodeGetCapabilitiesRequest, csi.NodeGetCapabilitiesResponse
)
NODE_INFO: Final = rpc.Method(
    f"/{_NODE}/NodeGetInfo", csi.NodeGetInfoRequest, csi.NodeGetInfoResponse
)


class Servicer(Protocol):
    """A driver for inline volumes, as the kubelet calls it."""

    async def get_plugin_info(
        self,
        request: csi.GetPluginInfoRequest,
        context: rpc.Context[csi.GetPluginInfoRequest, csi.GetPluginInfoResponse],
    ) -> csi.GetPluginInfoResponse:
        """Return the driver's name and version."""

    async def get_plugin_capabilities(
        self,
        request: csi.GetPluginCapabilitiesRequest,
        context: rpc.Context[csi.GetPluginCapabilitiesRequest, csi.GetPluginCapabilitiesResponse],
    ) -> csi.GetPluginCapabilitiesResponse:
        """Return which optional services the driver has."""

    async def probe(
        self, request: csi.ProbeRequest, context: rpc.Context[csi.ProbeRequest, csi.ProbeResponse]
    ) -> csi.ProbeResponse:
        """Return whether the driver is ready."""

    async def publish(
        self,
        request: csi.NodePublishVolumeRequest,
        context: rpc.Context[csi.NodePublishVolumeRequest, csi.NodePublishVolumeResponse],
    ) -> csi.NodePublishVolumeResponse:
        """Make a volume available at its target path, or abort with the reason."""

    async def unpublish(
        self,
        request: csi.NodeUnpublishVolumeRequest,
        context: rpc.Context[csi.NodeUnpublishVolumeRequest, csi.NodeUnpublishVolumeResponse],
    ) -> csi.NodeUnpublishVolumeResponse:
        """Remove a volume from its target path; succeed if it is already gone."""

    async def get_node_capabilities(
        self,
        request: csi.NodeGetCapabilitiesRequest,
        context: rpc.Context[csi.NodeGetCapabilitiesRequest, csi.NodeGetCapabilitiesResponse],
    ) -> csi.NodeGetCapabilitiesResponse:
        """Return which optional calls the driver serves."""

    async def get_node_info(
        self,
        request: csi.NodeGetInfoRequest,
        context: rpc.Context[csi.NodeGetInfoRequest, csi.NodeGetInfoResponse],
    ) -> csi.NodeGetInfoResponse:
        """Return the node's name, and how many volumes fit on it."""


def handlers(servicer: Servicer) -> tuple[grpc.GenericRpcHandler, ...]:
    """Return the gRPC handlers that serve a driver's methods."""
    return (
        rpc.handler(
            _IDENTITY,
            {
                PLUGIN_INFO.path: PLUGIN_INFO.serve(servicer.get_plugin_info),
                PLUGIN_CAPABILITIES.path: PLUGIN_CAPABILITIES.serve(
                    servicer.get_plugin_capabilities
                ),
                PROBE.path: PROBE.serve(servicer.probe),
            },
        ),
        rpc.handler(
            _NODE,
            {
                PUBLISH.path: PUBLISH.serve(servicer.publish),
                UNPUBLISH.path: UNPUBLISH.serve(servicer.unpublish),
                NODE_CAPABILITIES.path: NODE_CAPABILITIES.serve(servicer.get_node_capabilities),
                NODE_INFO.path: NODE_INFO.serve(servicer.get_node_info),
            },
        ),
    )
