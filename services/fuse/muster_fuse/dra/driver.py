"""Adapter for gRPC: the DRA driver, which informs the kubelet about the devices of a claim.

Every claim gets the same CDI device, /dev/fuse. So the driver reads no claims, has no state and
needs no permission on the Kubernetes API. It rewrites the CDI file for each claim, because the file
is on a tmpfs and a pod's claims survive a reboot. The file's name and content never change, so
runtimes may cache them.
"""

from pathlib import Path
from typing import Final

import orjson

from muster import blocking
from muster.pb import dra_pb2 as dra
from muster.pb import dra_rpc, rpc
from muster.service import logs
from muster_fuse import registration

DRIVER: Final = "device.fuse.muster.dev"
"""The driver's name; this and the names below are the same as in k8s/components/fuse-dra."""
POOL: Final = "cluster"
DEVICE: Final = "fuse"
CDI_KIND: Final = "fuse.muster.dev/device"
CDI_NAME: Final = f"{CDI_KIND}={DEVICE}"
CDI_FILE: Final = "fuse.muster.dev-device.json"
_CDI: Final = {
    "cdiVersion": "0.5.0",
    "kind": CDI_KIND,
    "devices": [
        {
            "name": DEVICE,
            "containerEdits": {
                "deviceNodes": [
                    {
                        "path": "/dev/fuse",
                        "type": "c",
                        "major": 10,
                        "minor": 229,
                        "fileMode": 0o666,
                        "permissions": "rw",
                    }
                ]
            },
        }
    ],
}
_WRITE_S: Final = 20.0
"""The timeout for writing the CDI file: shorter than the 45 s that the kubelet waits."""


class Driver:
    """The driver's services; `registration` offers them to the kubelet."""

    def __init__(self, *, registry: Path, cdi: Path) -> None:
        self.prepared = 0
        """The number of claims prepared, including repeated requests."""
        self.failed = 0
        self._cdi = cdi / CDI_FILE
        self._files = blocking.Serial()
        offer = registration.Driver(
            kind="DRAPlugin",
            name=DRIVER,
            versions=("v1.DRAPlugin",),
            handlers=(dra_rpc.handler(self),),
        )
        self.registration = registration.Registration(registry, offer, prepare=self._write)

    async def node_prepare_resources(
        self,
        request: dra.NodePrepareResourcesRequest,
        context: rpc.Context[dra.NodePrepareResourcesRequest, dra.NodePrepareResourcesResponse],  # noqa: ARG002
    ) -> dra.NodePrepareResourcesResponse:
        """Assign the device to all requests of each claim, and write the CDI file."""
        answer = dra.NodePrepareResourceResponse(
            devices=[
                dra.Device(pool_name=POOL, device_name=DEVICE, cdi_device_ids=[CDI_NAME]),
            ]
        )
        try:
            await self._write()
            self.prepared += len(request.claims)
        except OSError as error:
            self.failed += len(request.claims)
            text = f"{self._cdi}: {error.strerror or 'cannot be written in time'}"
            answer = dra.NodePrepareResourceResponse(error=text)
            logs.logger().warning("claims_not_prepared", error=text, claims=len(request.claims))
        return dra.NodePrepareResourcesResponse(
            claims={claim.uid: answer for claim in request.claims}
        )

    async def node_unprepare_resources(
        self,
        request: dra.NodeUnprepareResourcesRequest,
        context: rpc.Context[dra.NodeUnprepareResourcesRequest, dra.NodeUnprepareResourcesResponse],  # noqa: ARG002
    ) -> dra.NodeUnprepareResourcesResponse:
        """Do nothing: the file stays for the next claim."""
        done = dra.NodeUnprepareResourceResponse()
        return dra.NodeUnprepareResourcesResponse(
            claims={claim.uid: done for claim in request.claims}
        )

    async def _write(self) -> None:
        """Write the CDI file. Raises OSError."""
        await self._files.run(lambda: _replace(self._cdi), timeout_s=_WRITE_S)


def _replace(file: Path) -> None:
    """Write a file atomically, so that no reader sees a partial file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # a runtime reads every *.json file of the directory
    unfinished = file.with_suffix(".new")
    unfinished.write_bytes(orjson.dumps(_CDI))
    unfinished.chmod(0o644)
    unfinished.replace(file)
