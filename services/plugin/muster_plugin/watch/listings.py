"""Pure: tracks the kubelet's device lists, the expected devices, and when a list can be trusted."""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from muster_plugin.watch import expectation, naming, observation

RESOURCES_MAX: Final = 256
FORGOTTEN_S: Final = 24 * 3600.0
"""A plugin whose socket and devices have been gone for this long counts as uninstalled."""
AWAY_S: Final = 300.0
"""How long a kubelet may be away before findings begin; a restart takes less time."""
TOGETHER_S: Final = 5.0
"""Sockets and resources that appear or disappear within this time belong together."""


class Listing(msgspec.Struct, frozen=True):
    """How many devices are listed, and when the kubelet last started or stopped listing any."""

    count: int | None = None
    changed_at: float = 0.0


class Listings:
    """The kubelet's device list, when it changed, and the expected devices of each resource."""

    def __init__(
        self, expect: Mapping[str, int], learned: Mapping[str, int], *, settles_s: float, now: float
    ) -> None:
        self.expectations = expectation.Expectations(expect, learned)
        self.listed = observation.Listed()
        """The kubelet's latest answer."""
        self.steady_at = now
        """The time until which the kubelet counts as just started."""
        self.has_changed = False
        self.has_learned = False
        """Whether the learned counts changed; the caller resets this flag and `has_changed`."""
        self._listings: dict[str, Listing] = {}
        self._settles_s = settles_s
        self._was_answering = False
        self._is_kubelet_there = True
        self._kubelet_identity = ""
        self._away_at: float | None = None
        """When the kubelet's socket disappeared or the kubelet stopped answering, or None."""

    @property
    def resources(self) -> frozenset[str]:
        """All resources that are or were listed, or are expected."""
        return self.expectations.resources | self._listings.keys()

    def __getitem__(self, resource: str) -> Listing:
        return self._listings.get(resource, Listing())

    def count(self, resource: str) -> int | None:
        """Return how many devices the kubelet lists.

        None if that is unknown, or if the resource is neither listed nor expected.
        """
        if not self.listed.is_answering or self.listed.counts is None:
            return None
        if not self[resource].count and not self.expectations.is_listable(resource):
            return None
        if resource in self._listings:
            return self._listings[resource].count or 0
        return 0 if self.expectations.expects(resource) else None

    def expected(self, resource: str) -> int | None:
        """Return how many devices should be listed; None if that is unknown.

        If no count is known and no device is listed, the result is the last count above 0.
        """
        expected = self.expectations.expected(resource)
        if expected is None and self[resource].count == 0:
            return self.expectations.had(resource) or None
        return expected

    @property
    def held_until(self) -> float:
        """The time until which no finding begins: the kubelet is away or has just started."""
        away_until = -math.inf if self._away_at is None else self._away_at + AWAY_S
        return max(self.steady_at, away_until)

    def _record_away(self, now: float) -> None:
        is_away = self._was_answering and not self.listed.is_answering
        if not is_away and self._is_kubelet_there:
            self._away_at = None
        elif self._away_at is None:
            self._away_at = now

    def zero_until(self, resources: Sequence[str]) -> float:
        """Return the time until which the kubelet may be why all `resources` have 0 devices.

        Resources that have no expected devices, and those that the kubelet would never list, are
        ignored. The result is in the past if fewer than two remain, if one of them may have
        devices, or if their devices did not disappear together.
        """
        listable = filter(self.expectations.is_listable, resources)
        listings = [self[name] for name in listable if self.expected(name)]
        times = [listing.changed_at for listing in listings]
        is_together = len(times) > 1 and max(times) - min(times) <= TOGETHER_S
        if not is_together or any(listing.count != 0 for listing in listings):
            return -math.inf
        return max(times) + self._settles_s

    def record_kubelet(self, age_s: float | None, identity: str, now: float) -> None:
        """Record the identity of the kubelet's socket and its age, which is None without a socket.

        The age is used only if the socket is a new one: an old socket seems young after the clock
        was set back.
        """
        is_there = age_s is not None
        is_new = identity != self._kubelet_identity
        self.has_changed |= is_there != self._is_kubelet_there or is_new
        if age_s is not None and is_new:
            self.steady_at = now + self._settles_s - age_s
        self._is_kubelet_there, self._kubelet_identity = is_there, identity
        self._record_away(now)

    def record(self, listed: observation.Listed, ours: frozenset[str], now: float) -> list[str]:
        """Record the kubelet's list; return the resources that it no longer lists."""
        self.has_changed |= listed != self.listed
        self.listed = listed
        self._was_answering |= listed.is_answering
        self._record_away(now)
        dropped = []
        for name in {*self._listings, *(listed.counts or {})} if listed.counts is not None else ():
            count = listed.counts.get(name, 0) if listed.counts else 0
            before = self[name]
            if not self._can_track(name):
                continue
            has_changed = bool(before.count) != bool(count)
            self._listings[name] = Listing(count, now if has_changed else before.changed_at)
            if name not in ours and self.expectations.record_listed(name, count, now):
                self.has_learned = self.has_changed = True
            if before.count and not count:
                dropped.append(name)
        return dropped

    def record_registered(self, counts: Mapping[str, int], now: float) -> None:
        """Record the counts in the kubelet's checkpoint."""
        for name, count in counts.items():
            if self._can_track(name):
                self._listings.setdefault(name, Listing(None, now))
                self.has_learned |= self.expectations.record_registered(name, count)
                self.has_changed = True

    def forget_if_old(self, resource: str, now: float) -> None:
        """Forget the counts of a resource of which no device has been listed for `FORGOTTEN_S`."""
        listing = self[resource]
        if listing.count == 0 and now - listing.changed_at >= FORGOTTEN_S:
            self.has_learned |= self.expectations.forget(resource)

    def _can_track(self, name: str) -> bool:
        has_room = name in self._listings or len(self._listings) < RESOURCES_MAX
        return has_room and naming.RESOURCE.fullmatch(name) is not None
