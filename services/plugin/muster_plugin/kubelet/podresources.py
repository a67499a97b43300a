"""Adapter: the kubelet's podresources socket: lists each pod's devices and the allocatable ones.

The kubelet answers all clients together at most 100 times a second, so it is polled rarely. When it
is busy (RESOURCE_EXHAUSTED), its last answer stays valid for a while; otherwise there is none.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from muster.pb import podresources_pb2 as podres
from muster.pb import rpc
from muster.service import logs
from muster_plugin.kubelet import podresources_check

SOCKET: Final = Path("pod-resources") / "kubelet.sock"
PERIOD_S: Final = 10.0
_SOON_S: Final = 1.0
"""After an allocation: the kubelet lists it when Allocate has returned."""
_TIMEOUT_S: Final = 5.0
_DEFERRED_MAX: Final = 3
"""So many times in a row an old answer is better than none."""
_BUSY: Final = frozenset({grpc.StatusCode.RESOURCE_EXHAUSTED})
_UNKNOWN_CALL: Final = "GetAllocatableResources disabled"
"""A kubelet before 1.23 with its default feature gates; before 1.21 the call does not exist."""
_MESSAGE_BYTES: Final = (("grpc.max_receive_message_length", 16 * 1024 * 1024),)


class Unavailable(Exception):
    """The kubelet did not answer; `is_busy` if it only asks for less frequent calls."""

    def __init__(self, text: str, *, is_busy: bool) -> None:
        super().__init__(text)
        self.is_busy = is_busy


class PodResourcesPoller:
    """Polls periodically, and soon after an allocation; `on_listing` gets each answer, or None."""

    def __init__(
        self,
        socket: Path,
        on_listing: Callable[[podresources_check.Listing | None], Awaitable[None]],
    ) -> None:
        self.soon = asyncio.Event()
        """Set after an allocation."""
        self._socket = socket
        self._on_listing = on_listing
        self._last_error = ""
        self._deferred = 0

    async def run(self, *, period_s: float = PERIOD_S, soon_s: float = _SOON_S) -> None:
        """Poll until cancelled."""
        while True:
            if self._socket.exists():
                await self._poll()
            else:
                await self._on_listing(None)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(period_s):
                    await self.soon.wait()
                    await asyncio.sleep(soon_s)
            self.soon.clear()

    async def _poll(self) -> None:
        try:
            listing = await query(self._socket)
        except Unavailable as unavailable:
            self._deferred += unavailable.is_busy
            if unavailable.is_busy and self._deferred < _DEFERRED_MAX:
                return
            if str(unavailable) != self._last_error:
                logs.logger().warning("podresources_unavailable", error=str(unavailable))
            self._last_error = str(unavailable)
            await self._on_listing(None)
            return
        self._last_error, self._deferred = "", 0
        await self._on_listing(listing)


async def query(socket: Path) -> podresources_check.Listing:
    """Query the kubelet once. Raises Unavailable."""
    options = (("grpc.use_local_subchannel_pool", 1), *_MESSAGE_BYTES)
    async with grpc.aio.insecure_channel(f"unix:{socket}", options=options) as channel:
        client = rpc.PodResourcesClient(channel)
        try:
            pods = await client.list(podres.ListPodResourcesRequest(), timeout=_TIMEOUT_S)
            allocatable = await _allocatable(client)
        except grpc.aio.AioRpcError as error:
            text = f"{error.code().name}: {error.details()}"
            raise Unavailable(text, is_busy=error.code() in _BUSY) from None
    holders = {
        (devices.resource_name, device_id): f"{pod.namespace}/{pod.name}"
        for pod in pods.pod_resources
        for container in pod.containers
        for devices in container.devices
        for device_id in devices.device_ids
    }
    return podresources_check.Listing(holders=holders, allocatable=allocatable)


async def _allocatable(client: rpc.PodResourcesClient) -> dict[str, frozenset[str]] | None:
    try:
        answer = await client.get_allocatable_resources(
            podres.AllocatableResourcesRequest(), timeout=_TIMEOUT_S
        )
    except grpc.aio.AioRpcError as error:
        unimplemented = error.code() is grpc.StatusCode.UNIMPLEMENTED
        if unimplemented or _UNKNOWN_CALL in (error.details() or ""):
            return None
        raise
    allocatable: dict[str, frozenset[str]] = {}
    # there is one entry for each device and NUMA node, so an id may occur twice
    for devices in answer.devices:
        allocatable[devices.resource_name] = allocatable.get(devices.resource_name, frozenset()) | {
            *devices.device_ids
        }
    return allocatable
