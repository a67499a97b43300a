"""Pure: Whether the kubelet lists what we told it, and which pod holds what.

The kubelet takes a list in as it comes (device manager, 1.36), so what it lists otherwise two
seconds later, and says so twice, it does not know. Some kubelets list unhealthy devices as
allocatable (k/k#104122), so those prove nothing.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Final

import msgspec

from muster import vocabulary

LASTS_S: Final = 2.0
_SURE_S: Final = 10.0
"""What began less long ago is looked at again soon: it may end."""
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


class Agreement:
    """Compares each listing with what we advertise, and with the listing before."""

    def __init__(self) -> None:
        self.listing: Listing | None = None
        self.is_doubtful = False
        """Whether the kubelet is to be asked again soon: it lists something otherwise, so far."""
        self.disputed: Mapping[str, str] = {}
        """What the kubelet lists otherwise, and that has lasted, in words by resource."""
        self._since: dict[str, dict[str, float]] = {}
        self._compared_at = -math.inf

    def compare(
        self, listing: Listing | None, ours: Mapping[str, Ours], now: float
    ) -> list[Allocation]:
        """Take a listing (None: the kubelet cannot be asked); return what pods hold newly.

        What they held before the first listing is nothing new.
        """
        before, self.listing = self.listing, listing
        known, self._since = self._since, {}
        disputed = {}
        allocatable = listing.allocatable if listing else None
        for resource, one in ours.items() if allocatable is not None else ():
            assert allocatable is not None, "nothing is compared with nothing"
            odd = _odd(one.devices, allocatable.get(resource, frozenset()))
            text = self._compare(resource, one.sent_at, odd, known.get(resource, {}), now)
            if text:
                disputed[resource] = text
        self.disputed, self._compared_at = disputed, now
        begun = [at for since in self._since.values() for at in since.values()]
        self.is_doubtful = now - max(begun, default=-math.inf) < _SURE_S
        if listing is None or before is None:
            return []
        return _new(listing, before, ours)

    def apart(self, resource: str, now: float) -> str:
        """Say in words what the kubelet lists otherwise, if that has lasted; else empty."""
        text = self.disputed.get(resource, "")
        if not text:
            return ""
        return f"{text}, for {now - min(self._since[resource].values()):.0f} s"

    def held(self, resource: str) -> int | None:
        """Count the ids of a resource that pods hold; None if nobody knows."""
        if self.listing is None:
            return None
        return sum(name == resource for name, _ in self.listing.holders)

    def _compare(
        self,
        resource: str,
        sent_at: float | None,
        odd: tuple[set[str], set[str]],
        known: Mapping[str, float],
        now: float,
    ) -> str:
        """Keep since when which ids are listed otherwise; return what has lasted, in words.

        To send the kubelet others meanwhile changes nothing of it.
        """
        missing, strange = odd
        if sent_at is None or not (missing or strange):
            # what the kubelet was not sent it cannot list
            return ""
        begun = sent_at if sent_at > self._compared_at else now
        since = {name: known.get(name, begun) for name in missing | strange}
        self._since[resource] = since
        lasts = {name for name in since if name in known and now - since[name] >= LASTS_S}
        return _words(missing & lasts, strange & lasts)


def _odd(devices: Iterable[vocabulary.Device], listed: frozenset[str]) -> tuple[set[str], set[str]]:
    """Return what we have and the kubelet does not list, and the other way round."""
    ours = {device.id: device.health for device in devices}
    healthy = {name for name, health in ours.items() if health is vocabulary.Health.HEALTHY}
    return healthy - listed, {*listed} - ours.keys()


def _words(missing: Collection[str], strange: Collection[str]) -> str:
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
