"""Pure: compares the kubelet's podresources listing with the devices that the plugin advertises.

The kubelet processes a device list as it arrives (device manager, 1.36), so a difference in two
listings, two seconds later, is a mismatch. Some kubelets list unhealthy devices as allocatable
(k/k#104122), so those prove nothing.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Final

import msgspec

from muster import vocabulary
from muster_plugin.model import errors

PERSISTS_S: Final = 2.0
_RECHECK_S: Final = 10.0
"""Younger differences are rechecked soon: they may end."""
_SHOWN_MAX: Final = 5


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of the kubelet: pods (`namespace/name`) by resource and id; allocatable ids.

    `allocatable` is None if this kubelet does not report it.
    """

    holders: Mapping[tuple[str, str], str]
    allocatable: Mapping[str, frozenset[str]] | None

    def pods_by_resource(self) -> dict[str, dict[str, str]]:
        """Return the pod that holds each device, by resource and id."""
        pods: dict[str, dict[str, str]] = {}
        for (resource, device_id), pod in self.holders.items():
            pods.setdefault(resource, {})[device_id] = pod
        return pods


class Allocation(msgspec.Struct, frozen=True):
    """Devices of a resource that a pod holds and did not hold before."""

    resource: str
    pod: str
    device_ids: tuple[str, ...]


class Advertised(msgspec.Struct, frozen=True):
    """The advertised devices of a resource, and when they were last sent to the kubelet."""

    devices: Iterable[vocabulary.Device]
    sent_at: float | None


class PodResourcesCheck:
    """Compares each listing with the advertised devices, and with the listing before."""

    def __init__(self) -> None:
        self.listing: Listing | None = None
        self.needs_recheck = False
        """Whether to poll again soon, because a difference has appeared that may end."""
        self.mismatches: Mapping[str, str] = {}
        """Persistent differences by resource, in words."""
        self._since: dict[str, dict[str, float]] = {}
        self._compared_at = -math.inf

    def compare(
        self, listing: Listing | None, advertised: Mapping[str, Advertised], now: float
    ) -> list[Allocation]:
        """Compare a listing (None: the kubelet does not answer); return the new allocations.

        Allocations in the first listing are not new.
        """
        before, self.listing = self.listing, listing
        since_before, self._since = self._since, {}
        mismatches = {}
        if listing is not None and listing.allocatable is not None:
            for resource, ours in advertised.items():
                differing = _differences(
                    ours.devices, listing.allocatable.get(resource, frozenset())
                )
                text = self._compare(
                    resource, ours.sent_at, differing, since_before.get(resource, {}), now
                )
                if text:
                    mismatches[resource] = text
        self.mismatches, self._compared_at = mismatches, now
        began = [at for since in self._since.values() for at in since.values()]
        self.needs_recheck = now - max(began, default=-math.inf) < _RECHECK_S
        if listing is None or before is None:
            return []
        return _new_allocations(listing, before, advertised)

    def mismatch(self, resource: str, now: float) -> str:
        """Say how the kubelet's listing persistently differs; empty if it does not."""
        text = self.mismatches.get(resource, "")
        if not text:
            return ""
        return f"{text}, for {now - min(self._since[resource].values()):.0f} s"

    def allocated_count(self, resource: str) -> int | None:
        """Return how many ids of a resource pods hold; None if that is unknown."""
        if self.listing is None:
            return None
        return sum(name == resource for name, _ in self.listing.holders)

    def _compare(
        self,
        resource: str,
        sent_at: float | None,
        differing: tuple[set[str], set[str]],
        since_before: Mapping[str, float],
        now: float,
    ) -> str:
        """Record since when each id differs; return the persistent differences, in words.

        Sending the kubelet another list meanwhile does not restart the clock.
        """
        missing, unexpected = differing
        if sent_at is None or not (missing or unexpected):
            # the kubelet cannot list what it was never sent
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
    """Return the ids that the kubelet does not list, and those that only the kubelet lists."""
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
