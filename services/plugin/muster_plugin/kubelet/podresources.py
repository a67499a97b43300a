"""Adapter: the kubelet's podresources socket: which pod holds which device, and what could be held.

The kubelet answers all clients together 100 times a second at most, so it is asked rarely. When it
has no time (RESOURCE_EXHAUSTED), its last answer holds for a while; else nothing is known.
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
_PUT_OFF_MAX: Final = 3
"""So often in a row an answer that is older is better than none."""
_LATER: Final = frozenset({grpc.StatusCode.RESOURCE_EXHAUSTED})
_UNKNOWN_CALL: Final = "GetAllocatableResources disabled"
"""A kubelet below 1.23 with its feature gate as it is by default; before 1.21 there is no call."""
_MESSAGE_BYTES: Final = (("grpc.max_receive_message_length", 16 * 1024 * 1024),)


class Unanswered(Exception):
    """The kubelet could not be asked, or not now; `later` if nothing is wrong with that."""

    def __init__(self, text: str, *, later: bool) -> None:
        super().__init__(text)
        self.later = later


class PodResources:
    """Asks on a period, and soon after an allocation; `heard` is given each answer, or None."""

    def __init__(
        self, socket: Path, heard: Callable[[podresources_check.Listing | None], Awaitable[None]]
    ) -> None:
        self.soon = asyncio.Event()
        """To be set when something was allocated."""
        self._socket = socket
        self._heard = heard
        self._told = ""
        self._put_off = 0

    async def follow(self, *, period_s: float = PERIOD_S, soon_s: float = _SOON_S) -> None:
        """Ask for ever."""
        while True:
            if self._socket.exists():
                await self._ask()
            else:
                await self._heard(None)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(period_s):
                    await self.soon.wait()
                    await asyncio.sleep(soon_s)
            self.soon.clear()

    async def _ask(self) -> None:
        try:
            listing = await ask(self._socket)
        except Unanswered as unanswered:
            self._put_off += unanswered.later
            if unanswered.later and self._put_off < _PUT_OFF_MAX:
                return
            if str(unanswered) != self._told:
                logs.logger().warning("podresources_unanswered", error=str(unanswered))
            self._told = str(unanswered)
            await self._heard(None)
            return
        self._told, self._put_off = "", 0
        await self._heard(listing)


async def ask(socket: Path) -> podresources_check.Listing:
    """Ask the kubelet once. Raises Unanswered."""
    options = (("grpc.use_local_subchannel_pool", 1), *_MESSAGE_BYTES)
    async with grpc.aio.insecure_channel(f"unix:{socket}", options=options) as channel:
        client = rpc.PodResourcesClient(channel)
        try:
            pods = await client.list(podres.ListPodResourcesRequest(), timeout=_TIMEOUT_S)
            allocatable = await _allocatable(client)
        except grpc.aio.AioRpcError as error:
            text = f"{error.code().name}: {error.details()}"
            raise Unanswered(text, later=error.code() in _LATER) from None
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
    found: dict[str, frozenset[str]] = {}
    # one entry for each device and NUMA node, so an id may stand there twice
    for devices in answer.devices:
        found[devices.resource_name] = found.get(devices.resource_name, frozenset()) | {
            *devices.device_ids
        }
    return found
