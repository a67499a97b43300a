"""Adapter for gRPC: the kubelet's half of CSI, as far as a driver for inline volumes sees it.

It makes the calls of kubernetes pkg/volume/csi/csi_client.go and pkg/kubelet/pluginmanager (1.36),
with one connection for each call.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

import grpc.aio
from google.protobuf import message

from muster.pb import csi_pb2 as csi
from muster.pb import csi_rpc, rpc
from muster.pb import pluginregistration_pb2 as pr

Request = TypeVar("Request", bound=message.Message)
Answer = TypeVar("Answer", bound=message.Message)

_CALL_S: Final = 120.0
"""The kubelet's own timeout (csiTimeout)."""
UID: Final = str(uuid.uuid4())
"""A pod that only this process has: a broker searches the whole machine for a pod's mounts."""


class Kubelet:
    """A stand-in for the kubelet; `root` is its directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "plugins_registry").mkdir(parents=True, exist_ok=True)
        self.socket = root / "plugins_registry" / "fuse.muster.dev-reg.sock"

    async def register(self, *, error: str = "") -> tuple[pr.PluginInfo, csi.NodeGetInfoResponse]:
        """Register the driver behind the socket, or notify it of a failed registration."""
        async with self.channel() as channel:
            watcher = rpc.PluginWatcherClient(channel)
            info = await watcher.get_info(pr.InfoRequest(), timeout=1.0)
            node = await self.call(csi_rpc.NODE_INFO, csi.NodeGetInfoRequest())
            await watcher.notify_registration_status(
                pr.RegistrationStatus(plugin_registered=not error, error=error), timeout=5.0
            )
        return info, node

    async def publish(
        self,
        *,
        uid: str = UID,
        volume: str = "csi-1",
        attributes: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Have the driver publish a pod's volume; create the parent of its directory first."""
        target = self.target(uid=uid, volume=volume)
        target.parent.mkdir(parents=True, exist_ok=True)
        prefix = "csi.storage.k8s.io/"
        request = csi.NodePublishVolumeRequest(
            volume_id=volume,
            target_path=str(target),
            volume_capability=csi.VolumeCapability(mount=csi.VolumeCapability.Mount()),
            volume_context={
                f"{prefix}pod.name": "train-0",
                f"{prefix}pod.namespace": "team",
                f"{prefix}pod.uid": uid,
                f"{prefix}serviceAccount.name": "default",
                f"{prefix}ephemeral": "true",
                **attributes,
            },
        )
        await self.call(csi_rpc.PUBLISH, request)

    async def unpublish(self, *, uid: str = UID, volume: str = "csi-1") -> None:
        """Have the driver unpublish a pod's volume."""
        request = csi.NodeUnpublishVolumeRequest(
            volume_id=volume, target_path=str(self.target(uid=uid, volume=volume))
        )
        await self.call(csi_rpc.UNPUBLISH, request)

    def target(self, *, uid: str = UID, volume: str = "csi-1") -> Path:
        """Return the directory of a pod's volume."""
        return self.root / "pods" / uid / "volumes" / "kubernetes.io~csi" / volume / "mount"

    async def call(self, method: rpc.Method[Request, Answer], request: Request) -> Answer:
        """Call a method of the driver. Raises AioRpcError."""
        async with self.channel() as channel:
            return await method.on(channel)(request, timeout=_CALL_S)

    async def wait_for_socket(self, *, other_than: int = 0, timeout_s: float = 20.0) -> int:
        """Wait until the driver's socket exists; return its ctime in nanoseconds.

        A socket with the ctime `other_than` does not count.
        """
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            with contextlib.suppress(FileNotFoundError):
                if (made := self.socket.stat().st_ctime_ns) != other_than:
                    return made
            await asyncio.sleep(0.02)
        raise TimeoutError(f"{self.socket} was not made")

    def channel(self) -> grpc.aio.Channel:
        """Return a new connection to the driver's socket, which no other channel shares."""
        options = (("grpc.use_local_subchannel_pool", 1),)
        return grpc.aio.insecure_channel(f"unix:{self.socket}", options=options)
