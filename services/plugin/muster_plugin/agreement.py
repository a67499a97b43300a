"""Pure. Whether the kubelet lists what we told it, and which pod holds what.

Only what lasts is a disagreement: the kubelet is told of a change before anybody, but asked on a
period. Some kubelets list unhealthy devices as allocatable (k/k#104122), so those prove nothing.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from muster import vocabulary

LASTS_S: Final = 25.0
_SHOWN_MAX: Final = 5


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """What the kubelet says: pods (`namespace/name`) by resource and id; allocatable ids.

    `allocatable` is None where this kubelet does not tell.
    """

    holders: Mapping[tuple[str, str], str]
    allocatable: Mapping[str, frozenset[str]] | None

    def held(self) -> dict[str, dict[str, str]]:
        """Return which pod holds what, by resource and id."""
        found: dict[str, dict[str, str]] = {}
        for (resource, device_id), pod in self.holders.items():
            found.setdefault(resource, {})[device_id] = pod
        return found


class Allocation(msgspec.Struct, frozen=True):
    """A pod holds devices of a resource that it did not hold before."""

    resource: str
    pod: str
    device_ids: tuple[str, ...]


class Agreement:
    """Compares each listing with what we advertise, and with the listing before."""

    def __init__(self) -> None:
        self.listing: Listing | None = None
        self._apart: dict[str, tuple[float, str]] = {}

    def compare(
        self,
        listing: Listing | None,
        ours: Mapping[str, Iterable[vocabulary.Device]],
        now: float,
    ) -> list[Allocation]:
        """Take a listing (None: the kubelet cannot be asked); return what pods hold newly.

        What they held before the first listing is nothing new.
        """
        before, self.listing = self.listing, listing
        found: dict[str, tuple[float, str]] = {}
        allocatable = listing.allocatable if listing else None
        for resource, devices in ours.items() if allocatable is not None else ():
            assert allocatable is not None, "nothing is compared with nothing"
            text = _difference(devices, allocatable.get(resource, frozenset()))
            if text:
                since, _ = self._apart.get(resource, (now, ""))
                found[resource] = since, text
        self._apart = found
        if listing is None or before is None:
            return []
        return _new(listing, before, ours)

    def apart(self, resource: str, now: float) -> str:
        """Say in words what the kubelet lists otherwise, if that has lasted; else empty."""
        since, text = self._apart.get(resource, (now, ""))
        if not text or now - since < LASTS_S:
            return ""
        return f"{text}, for {now - since:.0f} s"

    def held(self, resource: str) -> int | None:
        """Count the ids of a resource that pods hold; None if nobody knows."""
        if self.listing is None:
            return None
        return sum(name == resource for name, _ in self.listing.holders)


def _difference(devices: Iterable[vocabulary.Device], listed: frozenset[str]) -> str:
    ours = {device.id: device.health for device in devices}
    missing = {name for name, health in ours.items() if health is vocabulary.Health.HEALTHY}
    missing -= listed
    strange = listed - ours.keys()
    told = []
    if missing:
        told.append(f"the kubelet does not list {_some(missing)}")
    if strange:
        told.append(f"the kubelet lists {_some(strange)}, which we do not advertise")
    return "; ".join(told)


def _new(
    listing: Listing, before: Listing, ours: Mapping[str, Iterable[vocabulary.Device]]
) -> list[Allocation]:
    found: dict[tuple[str, str], list[str]] = {}
    for (resource, device_id), pod in sorted(listing.holders.items()):
        if resource in ours and before.holders.get((resource, device_id)) != pod:
            found.setdefault((resource, pod), []).append(device_id)
    return [Allocation(resource, pod, tuple(ids)) for (resource, pod), ids in found.items()]


def _some(ids: Iterable[str]) -> str:
    named = sorted(ids)
    more = f" and {len(named) - _SHOWN_MAX} more" if len(named) > _SHOWN_MAX else ""
    return ", ".join(named[:_SHOWN_MAX]) + more
