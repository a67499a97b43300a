"""Pure. Whether the kubelet lists what we told it, and which pod holds what.

The kubelet takes a list in as it comes (device manager, 1.36), so what it lists otherwise two
seconds later, and says so twice, it does not know. Some kubelets list unhealthy devices as
allocatable (k/k#104122), so those prove nothing.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from muster import vocabulary

LASTS_S: Final = 2.0
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


class Ours(msgspec.Struct, frozen=True):
    """What we advertise of a resource, and when the kubelet was last sent it; None if it has none.

    Times are monotonic seconds.
    """

    devices: Iterable[vocabulary.Device]
    sent_at: float | None


class _Apart(msgspec.Struct, frozen=True):
    """What the kubelet lists otherwise, and since when; `lasts` if that is no matter of time."""

    since: float
    text: str
    lasts: bool


class Agreement:
    """Compares each listing with what we advertise, and with the listing before."""

    def __init__(self) -> None:
        self.listing: Listing | None = None
        self._apart: dict[str, _Apart] = {}

    def compare(
        self, listing: Listing | None, ours: Mapping[str, Ours], now: float
    ) -> list[Allocation]:
        """Take a listing (None: the kubelet cannot be asked); return what pods hold newly.

        What they held before the first listing is nothing new.
        """
        before, self.listing = self.listing, listing
        allocatable = listing.allocatable if listing else None
        apart = {}
        for resource, one in ours.items() if allocatable is not None else ():
            assert allocatable is not None, "nothing is compared with nothing"
            found = self._compare(resource, one, allocatable.get(resource, frozenset()), now)
            if found is not None:
                apart[resource] = found
        self._apart = apart
        if listing is None or before is None:
            return []
        return _new(listing, before, ours)

    @property
    def is_doubtful(self) -> bool:
        """Whether the kubelet is to be asked again soon: it lists something otherwise, so far."""
        return any(not found.lasts for found in self._apart.values())

    @property
    def disputed(self) -> frozenset[str]:
        """The resources of which the kubelet lists something otherwise, and that has lasted."""
        return frozenset(name for name, found in self._apart.items() if found.lasts)

    def apart(self, resource: str, now: float) -> str:
        """Say in words what the kubelet lists otherwise, if that has lasted; else empty."""
        found = self._apart.get(resource)
        if found is None or not found.lasts:
            return ""
        return f"{found.text}, for {now - found.since:.0f} s"

    def held(self, resource: str) -> int | None:
        """Count the ids of a resource that pods hold; None if nobody knows."""
        if self.listing is None:
            return None
        return sum(name == resource for name, _ in self.listing.holders)

    def _compare(
        self, resource: str, ours: Ours, listed: frozenset[str], now: float
    ) -> _Apart | None:
        text = _difference(ours.devices, listed)
        if not text or ours.sent_at is None:
            # what the kubelet was not sent it cannot list
            return None
        known = self._apart.get(resource)
        if known is None or ours.sent_at > known.since:
            return _Apart(now, text, lasts=False)
        return _Apart(known.since, text, lasts=known.lasts or now - ours.sent_at >= LASTS_S)


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


def _new(listing: Listing, before: Listing, ours: Mapping[str, Ours]) -> list[Allocation]:
    found: dict[tuple[str, str], list[str]] = {}
    for (resource, device_id), pod in sorted(listing.holders.items()):
        if resource in ours and before.holders.get((resource, device_id)) != pod:
            found.setdefault((resource, pod), []).append(device_id)
    return [Allocation(resource, pod, tuple(ids)) for (resource, pod), ids in found.items()]


def _some(ids: Iterable[str]) -> str:
    named = sorted(ids)
    more = f" and {len(named) - _SHOWN_MAX} more" if len(named) > _SHOWN_MAX else ""
    return ", ".join(named[:_SHOWN_MAX]) + more
