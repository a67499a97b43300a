"""Adapter for gRPC: path, request and answer of the methods that the kubelet calls on a DRA driver.

As in `rpc`, only the messages are generated. Paths and message types are those of dra.proto.
"""

from __future__ import annotations

from typing import Final, Protocol

import grpc
import grpc.aio

from muster.pb import dra_pb2 as dra
from muster.pb import rpc

_SERVICE: Final = "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
_PREPARE: Final = rpc.Method(
    f"/{_SERVICE}/NodePrepareResources",
    dra.NodePrepareResourcesRequest,
    dra.NodePrepareResourcesResponse,
)
_UNPREPARE: Final = rpc.Method(
    f"/{_SERVICE}/NodeUnprepareResources",
    dra.NodeUnprepareResourcesRequest,
    dra.NodeUnprepareResourcesResponse,
)


class Servicer(Protocol):
    """A driver, as the kubelet calls it."""

    async def node_prepare_resources(
        self,
        request: dra.NodePrepareResourcesRequest,
        context: rpc.Context[dra.NodePrepareResourcesRequest, dra.NodePrepareResourcesResponse],
    ) -> dra.NodePrepareResourcesResponse:
        """Prepare claims; return the CDI devices that the containers of each claim get."""

    async def node_unprepare_resources(
        self,
        request: dra.NodeUnprepareResourcesRequest,
        context: rpc.Context[dra.NodeUnprepareResourcesRequest, dra.NodeUnprepareResourcesResponse],
    ) -> dra.NodeUnprepareResourcesResponse:
        """Undo the preparation of claims."""


def handler(servicer: Servicer) -> grpc.GenericRpcHandler:
    """Return the gRPC handler that serves a driver's methods."""
    methods = {
        _PREPARE.path: _PREPARE.serve(servicer.node_prepare_resources),
        _UNPREPARE.path: _UNPREPARE.serve(servicer.node_unprepare_resources),
    }
    return rpc.handler(_SERVICE, methods)


class Client:
    """Calls a driver as the kubelet does."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.prepare = _PREPARE.on(channel)
        self.unprepare = _UNPREPARE.on(channel)
