"""Adapter: polls the kubelet's podresources API, and compares its list with the plugin's.

The kubelet answers at most 100 calls per second, from all clients together, so it is polled rarely.
When it is busy (RESOURCE_EXHAUSTED), its last answer stays valid for a while; after any other error
no answer is valid.

The kubelet processes a device list as soon as it arrives (device manager, 1.36), so a difference
that is in two listings at least two seconds apart is a mismatch. Some kubelets list unhealthy
devices as allocatable (k/k#104122), so unhealthy devices are ignored.
"""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from google.protobuf import message

from muster import vocabulary
from muster.pb import podresources_pb2 as podres
from muster.service import logs
from muster_plugin.kubelet import unary_call, unary_client
from muster_plugin.model import errors

SOCKET: Final = Path("pod-resources") / "kubelet.sock"
PERIOD_S: Final = 10.0
_SOON_S: Final = 1.0
"""The delay of a poll after an allocation: the kubelet lists it only after Allocate returns."""
_TIMEOUT_S: Final = 5.0
_DEFERRED_MAX: Final = 3
"""After this many busy answers in a row, the last answer is no longer valid."""
_LIST: Final = "/v1.PodResourcesLister/List"
_ALLOCATABLE: Final = "/v1.PodResourcesLister/GetAllocatableResources"
MESSAGE_BYTES_MAX: Final = 4 * 1024 * 1024
"""The largest answer that is decoded, in bytes.

A decoded answer takes 20 times as much memory; a plugin may have hundreds of thousands of devices.
"""
_UNKNOWN: Final = 2
_BUSY: Final = 8
_UNIMPLEMENTED: Final = 12
"""gRPC's status code for an unknown call: a kubelet before 1.21 does not have `_ALLOCATABLE`.

A kubelet before 1.23 answers that call with UNKNOWN by default.
"""


PERSISTS_S: Final = 2.0
_RECHECK_S: Final = 10.0
"""Differences newer than this are rechecked soon, because they may end."""
_SHOWN_MAX: Final = 5


_Answer = TypeVar("_Answer", bound=message.Message)


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """One answer from the kubelet; `holders` are pods (`namespace/name`) by resource and id.

    `allocatable` are the ids that the kubelet can allocate, by resource; None if this kubelet does
    not report them. `cdi_devices` are the CDI devices that DRA drivers assigned to containers, by
    driver.
    """

    holders: Mapping[tuple[str, str], str]
    allocatable: Mapping[str, frozenset[str]] | None
    cdi_devices: Mapping[str, frozenset[str]] = {}

    def pods_by_resource(self) -> dict[str, dict[str, str]]:
        """Return the pod that holds each device, by resource and id."""
        pods: dict[str, dict[str, str]] = {}
        for (resource, device_id), pod in self.holders.items():
            pods.setdefault(resource, {})[device_id] = pod
        return pods


class Allocation(msgspec.Struct, frozen=True):
    """Devices of a resource that a pod holds, but did not hold in the previous listing."""

    resource: str
    pod: str
    device_ids: tuple[str, ...]


class Advertised(msgspec.Struct, frozen=True):
    """The advertised devices of a resource, and when they were last sent; None if never."""

    devices: Iterable[vocabulary.Device]
    sent_at: float | None


class PodResourcesCheck:
    """Compares each listing with the advertised devices and with the previous listing."""

    def __init__(self) -> None:
        self.listing: Listing | None = None
        self.needs_recheck = False
        """Whether to poll soon: a new difference may end, or another plugin displaced this one."""
        self.mismatches: Mapping[str, str] = {}
        """Persistent differences by resource, as text."""
        self.displaced: Mapping[str, str] = {}
        """How the kubelet's list persistently differs from the plugin's, as text, by resource.

        The text is empty if the kubelet lists some of the plugin's devices, or if nothing differs.
        A resource is left out while this is uncertain.
        """
        self._since: dict[str, dict[str, float]] = {}
        self._compared_at = -math.inf

    def compare(
        self, listing: Listing | None, advertised: Mapping[str, Advertised], now: float
    ) -> list[Allocation]:
        """Compare a listing (None: the kubelet does not answer); return the new allocations.

        Allocations in the first listing, and in the first after a missing answer, are not new.
        """
        before, self.listing = self.listing, listing
        since_before, self._since = self._since, {}
        mismatches, displaced = {}, {}
        if listing is not None and listing.allocatable is not None:
            for resource, ours in advertised.items():
                listed = listing.allocatable.get(resource, frozenset())
                text = self._compare(
                    resource,
                    ours.sent_at,
                    _differences(ours.devices, listed),
                    since_before.get(resource, {}),
                    now,
                )
                if text:
                    mismatches[resource] = text
                is_listed = any(device.id in listed for device in ours.devices)
                if ours.sent_at is not None and (text or resource not in self._since or is_listed):
                    displaced[resource] = "" if is_listed else text
        self.mismatches, self.displaced, self._compared_at = mismatches, displaced, now
        began = [at for since in self._since.values() for at in since.values()]
        is_young = now - max(began, default=-math.inf) < _RECHECK_S
        self.needs_recheck = is_young or any(displaced.values())
        if listing is None or before is None:
            return []
        return _new_allocations(listing, before, advertised)

    def mismatch(self, resource: str, now: float) -> str:
        """Describe how the kubelet's listing persistently differs; empty if it does not."""
        text = self.mismatches.get(resource, "")
        if not text:
            return ""
        return f"{text}, for {now - min(self._since[resource].values()):.0f} s"

    def allocated_count(self, resource: str) -> int | None:
        """Return how many ids of a resource pods hold; None if that is unknown."""
        if self.listing is None:
            return None
        return sum(name == resource for name, _ in self.listing.holders)

    def allocatable_count(self, resource: str) -> int | None:
        """Return how many ids of a resource the kubelet offers; None if that is unknown."""
        if self.listing is None or self.listing.allocatable is None:
            return None
        return len(self.listing.allocatable.get(resource, ()))

    def _compare(
        self,
        resource: str,
        sent_at: float | None,
        differing: tuple[set[str], set[str]],
        since_before: Mapping[str, float],
        now: float,
    ) -> str:
        """Record when each id began to differ; return the persistent differences, or an empty text.

        A new list sent to the kubelet in the meantime does not reset these times.
        """
        missing, unexpected = differing
        if sent_at is None or not (missing or unexpected):
            # the kubelet cannot list devices that it was never sent
            return ""
        began = sent_at if sent_at > self._compared_at else now
        since = {name: since_before.get(name, began) for name in missing | unexpected}
        self._since[resource] = since
        persistent = {
            name for name in since if name in since_before and now - since[name] >= PERSISTS_S
        }
        return _described(missing & persistent, unexpected & persistent)


def _differences(
    devices: Iterable[vocabulary.Device], listed: frozenset[str]
) -> tuple[set[str], set[str]]:
    """Return Healthy ids that the kubelet does not list, and listed ids that are not advertised."""
    ours = {device.id: device.health for device in devices}
    healthy = {name for name, health in ours.items() if health is vocabulary.Health.HEALTHY}
    return healthy - listed, {*listed} - ours.keys()


def _described(missing: Collection[str], unexpected: Collection[str]) -> str:
    differences = []
    if missing:
        differences.append(f"the kubelet does not list {_first_few(missing)}")
    if unexpected:
        differences.append(
            f"the kubelet lists {_first_few(unexpected)}, which the plugin does not advertise"
        )
    return "; ".join(differences)


def _new_allocations(
    listing: Listing, before: Listing, advertised: Mapping[str, Advertised]
) -> list[Allocation]:
    allocations: dict[tuple[str, str], list[str]] = {}
    for (resource, device_id), pod in sorted(listing.holders.items()):
        if resource in advertised and before.holders.get((resource, device_id)) != pod:
            allocations.setdefault((resource, pod), []).append(device_id)
    return [Allocation(resource, pod, tuple(ids)) for (resource, pod), ids in allocations.items()]


def _first_few(ids: Iterable[str]) -> str:
    return errors.listed(sorted(ids), most=_SHOWN_MAX)


class Unavailable(Exception):
    """The kubelet gave no usable answer; `code` is gRPC's status code, if there was one."""

    def __init__(self, text: str, *, code: int | None = None) -> None:
        super().__init__(text)
        self.code = code
        self.is_busy = code == _BUSY
        """Whether the kubelet refused the call only because it receives too many calls."""


class PodResourcesPoller:
    """Polls periodically and when `soon` is set.

    `on_listing` receives each listing, or None if there is no valid answer.
    """

    def __init__(
        self,
        socket: Path,
        on_listing: Callable[[Listing | None], Awaitable[None]],
    ) -> None:
        self.soon = asyncio.Event()
        """Set, for example after an allocation, so that the next poll comes soon."""
        self._socket = socket
        self._on_listing = on_listing
        self._last_error = ""
        self._deferred = 0

    async def run(self, *, period_s: float = PERIOD_S) -> None:
        """Poll until cancelled."""
        while True:
            if self._socket.exists():
                await self._poll()
            else:
                await self._on_listing(None)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(period_s):
                    await self.soon.wait()
                    await asyncio.sleep(_SOON_S)
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


async def query(socket: Path) -> Listing:
    """Query the kubelet once, and return its listing. Raises Unavailable."""
    pods = _decoded(podres.ListPodResourcesResponse, await _called(socket, _LIST))
    try:
        answer = await _called(socket, _ALLOCATABLE)
    except Unavailable as unavailable:
        if unavailable.code in {_UNKNOWN, _UNIMPLEMENTED}:
            return listing(pods, None)
        raise
    return listing(pods, _decoded(podres.AllocatableResourcesResponse, answer))


async def _called(socket: Path, method: str) -> bytes:
    """Call the kubelet over a new connection; return the answer. Raises Unavailable."""
    name = method.rpartition("/")[2]
    try:
        with unary_client.connected(socket) as connection:
            outcome = await unary_client.call(
                connection, method, timeout_s=_TIMEOUT_S, bytes_max=MESSAGE_BYTES_MAX
            )
    except unary_client.Late:
        outcome = None
    except OSError as error:
        raise Unavailable(f"{name}: {error.strerror}") from None
    if outcome is None:
        raise Unavailable(f"{name}: not answered within {_TIMEOUT_S:g} s")
    if outcome.problem:
        raise Unavailable(_problem(name, outcome), code=outcome.status)
    return outcome.message


def _problem(name: str, outcome: unary_call.Outcome) -> str:
    if outcome.status == _BUSY:
        return f"{name}: too many calls (RESOURCE_EXHAUSTED)"
    code = "" if outcome.status is None else f" (gRPC code {outcome.status})"
    return f"{name}: {outcome.problem}{code}"


def _decoded(kind: type[_Answer], answer: bytes) -> _Answer:
    try:
        return kind.FromString(answer)
    except message.DecodeError as error:
        raise Unavailable(f"{kind.DESCRIPTOR.name}: {error}") from None


def listing(
    pods: podres.ListPodResourcesResponse, answer: podres.AllocatableResourcesResponse | None
) -> Listing:
    """Combine the kubelet's two answers; the second is None if the kubelet lacks that call."""
    holders = {
        (devices.resource_name, device_id): f"{pod.namespace}/{pod.name}"
        for pod in pods.pod_resources
        for container in pod.containers
        for devices in container.devices
        for device_id in devices.device_ids
    }
    cdi_devices: dict[str, set[str]] = {}
    for pod in pods.pod_resources:
        for container in pod.containers:
            for dynamic in container.dynamic_resources:
                for claimed in dynamic.claim_resources:
                    names = (device.name for device in claimed.cdi_devices)
                    cdi_devices.setdefault(claimed.driver_name, set()).update(names)
    given = {driver: frozenset(names) for driver, names in cdi_devices.items()}
    if answer is None:
        return Listing(holders=holders, allocatable=None, cdi_devices=given)
    allocatable: dict[str, set[str]] = {}
    # each device has an entry for each NUMA node, so an id may occur twice
    for devices in answer.devices:
        allocatable.setdefault(devices.resource_name, set()).update(devices.device_ids)
    return Listing(
        holders=holders,
        allocatable={name: frozenset(ids) for name, ids in allocatable.items()},
        cdi_devices=given,
    )
