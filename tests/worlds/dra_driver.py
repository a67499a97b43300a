"""Adapter for gRPC: a small third-party DRA driver, as a program of its own.

Like other drivers it has two sockets, one for its registration and one for calls. It gives a
container an environment variable as a CDI device, and logs each call as a line of JSON. It repairs
nothing: it does not replace a socket that was removed.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from muster.pb import dra_pb2 as dra
from muster.pb import dra_rpc, rpc
from muster.pb import pluginregistration_pb2 as pr

NAME: Final = "lamps.example.com"
VERSION: Final = "v1.DRAPlugin"
DEVICE: Final = "lamp-0"
CDI: Final = "lamps.example.com/lamp"
REGISTRATION: Final = f"{NAME}-reg.sock"
SERVICE: Final = f"{NAME}/dra.sock"


class Driver:
    """A driver below the kubelet's directory; it writes CDI files into `cdi`."""

    def __init__(self, kubelet: Path, cdi: Path) -> None:
        self.registration = kubelet / "plugins_registry" / REGISTRATION
        self.service = kubelet / "plugins" / SERVICE
        self._cdi = cdi / f"{NAME}.json"

    async def serve(self) -> None:
        """Serve until cancelled."""
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((dra_rpc.handler(self), rpc.plugin_watcher_handler(self)))
        for socket in (self.service, self.registration):
            socket.parent.mkdir(parents=True, exist_ok=True)
            socket.unlink(missing_ok=True)
            server.add_insecure_port(f"unix:{socket}")
        await server.start()
        _say("serving")
        try:
            await asyncio.Event().wait()
        finally:
            await server.stop(1.0)

    async def get_info(
        self,
        request: pr.InfoRequest,  # noqa: ARG002  # empty
        context: rpc.Context[pr.InfoRequest, pr.PluginInfo],  # noqa: ARG002
    ) -> pr.PluginInfo:
        """Return the driver's name and versions, and the socket for calls."""
        _say("GetInfo")
        return pr.PluginInfo(
            type="DRAPlugin",
            name=NAME,
            endpoint=str(self.service),
            supported_versions=[VERSION],
        )

    async def notify_registration_status(
        self,
        request: pr.RegistrationStatus,
        context: rpc.Context[pr.RegistrationStatus, pr.RegistrationStatusResponse],  # noqa: ARG002
    ) -> pr.RegistrationStatusResponse:
        """Log whether the kubelet registered it."""
        _say("NotifyRegistrationStatus", registered=request.plugin_registered, error=request.error)
        return pr.RegistrationStatusResponse()

    async def node_prepare_resources(
        self,
        request: dra.NodePrepareResourcesRequest,
        context: rpc.Context[dra.NodePrepareResourcesRequest, dra.NodePrepareResourcesResponse],  # noqa: ARG002
    ) -> dra.NodePrepareResourcesResponse:
        """Give each claim the device."""
        _say("NodePrepareResources", claims=len(request.claims))
        edits = {"env": [f"LAMP={DEVICE}"]}
        self._cdi.write_text(
            json.dumps(
                {
                    "cdiVersion": "0.5.0",
                    "kind": CDI,
                    "devices": [{"name": DEVICE, "containerEdits": edits}],
                }
            )
        )
        device = dra.Device(
            pool_name=os.environ.get("NODE_NAME", ""),
            device_name=DEVICE,
            cdi_device_ids=[f"{CDI}={DEVICE}"],
        )
        answer = dra.NodePrepareResourceResponse(devices=[device])
        return dra.NodePrepareResourcesResponse(
            claims={claim.uid: answer for claim in request.claims}
        )

    async def node_unprepare_resources(
        self,
        request: dra.NodeUnprepareResourcesRequest,
        context: rpc.Context[dra.NodeUnprepareResourcesRequest, dra.NodeUnprepareResourcesResponse],  # noqa: ARG002
    ) -> dra.NodeUnprepareResourcesResponse:
        """Do nothing but log the call."""
        _say("NodeUnprepareResources", claims=len(request.claims))
        done = dra.NodeUnprepareResourceResponse()
        return dra.NodeUnprepareResourcesResponse(
            claims={claim.uid: done for claim in request.claims}
        )


def _say(event: str, **more: object) -> None:
    sys.stdout.write(json.dumps({"event": event, **more}) + "\n")
    sys.stdout.flush()


async def main() -> None:
    """Serve on the node until SIGTERM."""
    serving = asyncio.ensure_future(Driver(Path("/var/lib/kubelet"), Path("/var/run/cdi")).serve())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
    await asyncio.wait([serving])


if __name__ == "__main__":
    asyncio.run(main())
