"""Pure: what the kubelet lists of each resource, what it should list, and whether to trust it."""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from muster_plugin.watch import expectation, naming, observation

RESOURCES_MAX: Final = 256
FORGOTTEN_S: Final = 24 * 3600.0
"""A plugin whose socket and devices are gone for so long was uninstalled."""
AWAY_S: Final = 300.0
"""A kubelet that is away for longer is not being restarted; what is wrong by then is wrong."""
TOGETHER_S: Final = 5.0
"""What appears or vanishes within this time belongs together."""


class Listing(msgspec.Struct, frozen=True):
    """How many devices are listed, and when the kubelet last began or ceased to list any."""

    count: int | None = None
    changed_at: float = 0.0


class Listings:
    """The kubelet's list of every resource that it ever listed, with what is expected."""

    def __init__(
        self, expect: Mapping[str, int], learned: Mapping[str, int], *, settles_s: float, now: float
    ) -> None:
        self.expectations = expectation.Expectations(expect, learned)
        self.listed = observation.Listed()
        """The latest answer."""
        self.steady_at = now
        """Until then a kubelet has just started."""
        self.has_changed = False
        self.has_learned = False
        """Both are to be reset by the reader."""
        self._listings: dict[str, Listing] = {}
        self._settles_s = settles_s
        self._was_answering = False
        self._is_kubelet_there = True
        self._kubelet = ""
        self._away_at: float | None = None
        """When the kubelet's socket vanished, or it ceased to answer; None while it is there."""

    @property
    def resources(self) -> frozenset[str]:
        """Every resource that is or was listed, or is expected."""
        return self.expectations.resources | self._listings.keys()

    def __getitem__(self, resource: str) -> Listing:
        return self._listings.get(resource, Listing())

    def count(self, resource: str) -> int | None:
        """Return how many devices the kubelet lists; None if that is unknown."""
        if not self.listed.is_answering or self.listed.counts is None:
            return None
        if not self[resource].count and not self.expectations.is_listable(resource):
            return None
        if resource in self._listings:
            return self._listings[resource].count or 0
        return 0 if self.expectations.expects(resource) else None

    def expected(self, resource: str) -> int | None:
        """Return how many devices should be listed; at 0 at least as many as there were."""
        expected = self.expectations.expected(resource)
        if expected is None and self[resource].count == 0:
            return self.expectations.had(resource) or None
        return expected

    @property
    def held_until(self) -> float:
        """When nothing is held any more because the kubelet is away, or has just started."""
        away_until = -math.inf if self._away_at is None else self._away_at + AWAY_S
        return max(self.steady_at, away_until)

    def _record_away(self, now: float) -> None:
        is_away = self._was_answering and not self.listed.is_answering
        if not is_away and self._is_kubelet_there:
            self._away_at = None
        elif self._away_at is None:
            self._away_at = now

    def zero_until(self, resources: Sequence[str]) -> float:
        """Return until when the kubelet may be the cause that it lists none of these resources.

        It is in the past if the kubelet lists any, or if they did not vanish together.
        """
        listable = filter(self.expectations.is_listable, resources)
        listings = [self[name] for name in listable if self.expected(name)]
        times = [listing.changed_at for listing in listings]
        is_together = len(times) > 1 and max(times) - min(times) <= TOGETHER_S
        if not is_together or any(listing.count != 0 for listing in listings):
            return -math.inf
        return max(times) + self._settles_s

    def record_kubelet(self, age_s: float | None, kubelet: str, now: float) -> None:
        """Take in how old the kubelet's socket is, and which it is; None if it has none.

        Only the age of a new one counts: while its clock is set back, a socket does not get older.
        """
        is_there = age_s is not None
        self.has_changed |= is_there != self._is_kubelet_there or kubelet != self._kubelet
        if age_s is not None and kubelet != self._kubelet:
            self.steady_at = now + self._settles_s - age_s
        self._is_kubelet_there, self._kubelet = is_there, kubelet
        self._record_away(now)

    def record(self, listed: observation.Listed, ours: frozenset[str], now: float) -> list[str]:
        """Take in the kubelet's list; return the resources that it has ceased to list."""
        self.has_changed |= listed != self.listed
        self.listed = listed
        self._was_answering |= listed.is_answering
        self._record_away(now)
        dropped = []
        for name in {*self._listings, *(listed.counts or {})} if listed.counts is not None else ():
            count = listed.counts.get(name, 0) if listed.counts else 0
            before = self[name]
            if not self._may_list(name):
                continue
            has_flipped = bool(before.count) != bool(count)
            self._listings[name] = Listing(count, now if has_flipped else before.changed_at)
            if name not in ours and self.expectations.record_listed(name, count, now):
                self.has_learned = self.has_changed = True
            if before.count and not count:
                dropped.append(name)
        return dropped

    def record_registered(self, counts: Mapping[str, int], now: float) -> None:
        """Take in what the kubelet's checkpoint holds."""
        for name, count in counts.items():
            if self._may_list(name):
                self._listings.setdefault(name, Listing(None, now))
                self.has_learned |= self.expectations.record_registered(name, count)
                self.has_changed = True

    def forget_if_old(self, resource: str, now: float) -> None:
        """Forget a resource if the kubelet has not listed any device of it for `FORGOTTEN_S`."""
        listing = self[resource]
        if listing.count == 0 and now - listing.changed_at >= FORGOTTEN_S:
            self.has_learned |= self.expectations.forget(resource)

    def _may_list(self, name: str) -> bool:
        has_room = name in self._listings or len(self._listings) < RESOURCES_MAX
        return has_room and naming.RESOURCE.fullmatch(name) is not None
