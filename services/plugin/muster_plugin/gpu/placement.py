"""Pure: Which of the free devices are advised for a request, by policy.

Whole GPUs that are not shared are those that are best joined (`gpu_sets`), whatever the policy, as
in NVIDIA's plugin (k8s-device-plugin 1b826ac, internal/rm/nvml_manager.go). Else one device after
the other is taken: `distributed`, and `aligned` too, take from what serves the fewest, `packed`
from what serves the most (internal/rm/allocate.go); `exclusive` is distributed, and never takes two
replicas of one device. Ties are broken by id, so the same request gets the same answer, and nothing
is asked of anybody: one lost GPU spoils no advice.
"""

import heapq
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from muster_plugin.config import gpus
from muster_plugin.gpu import topology
from muster_plugin.model import advertised, gpu

GPUS_MAX: Final = 64
"""Of more GPUs than that, none is advised by how they are joined: it would take too long."""

_NEAREST: Final = 60
_NVLINK: Final = 100
_UNKNOWN: Final = gpu.Link()

Links: TypeAlias = Mapping[tuple[str, str], gpu.Link]
Units: TypeAlias = Mapping[str, advertised.Unit]


def prefer(
    available: Collection[str],
    must_include: Collection[str],
    size: int,
    *,
    units: Units,
    policy: gpus.Placement,
    links: Links,
) -> list[str]:
    """Return `size` of the `available` ids, `must_include` first; fewer if there are fewer.

    `units` are all units of the resource. What is known and not available is in use: that is how
    the policies know how much each device serves, right after a start too. An id that is not known
    is advised only if nothing else is left.

    Never raises: an error would fail the pod's admission, while a short answer lets the kubelet
    choose the rest (kubelet devicemanager/manager.go, devicesToAllocate).
    """
    chosen = list(dict.fromkeys(must_include))
    if len(chosen) >= size:
        return chosen[: max(size, 0)]
    free = sorted({*available}.difference(chosen))
    included = [units[name] for name in chosen if name in units]
    candidates = [units[name] for name in free if name in units]
    if _are_whole([*included, *candidates], units):
        chosen += _aligned(included, candidates, size - len(chosen), links)
    pool = _Shelf(free, chosen, units, policy)
    while len(chosen) < size and (name := pool.take()) is not None:
        chosen.append(name)
    return chosen


def pair_score(link: gpu.Link) -> int:
    """Return how well two GPUs are joined (go-gpuallocator 876e7b7, calculateGPUPairScore).

    Links to a switch do not count: behind NVSwitch all are joined alike, and the bus decides.
    """
    return _NEAREST - link.level + _NVLINK * link.nvlinks


def _are_whole(candidates: Sequence[advertised.Unit], units: Units) -> bool:
    """Say whether all of these are whole GPUs, and those of the resource few enough."""
    if not 0 < len(candidates) <= GPUS_MAX or len(units) > GPUS_MAX:
        return False
    return all(
        unit.gpu is not None and unit.gpu.part.gi is None and unit.id == unit.gpu.uuid
        for unit in candidates
    )


def _aligned(
    included: Sequence[advertised.Unit],
    free: Sequence[advertised.Unit],
    count: int,
    links: Links,
) -> list[str]:
    """Return `count` of the free GPUs that are best joined, together with those taken."""
    gpus = sorted([*included, *free], key=lambda unit: unit.id)
    names = [unit.id for unit in gpus]
    scores = [[_joined(first, second, links) for second in names] for first in names]
    required = [names.index(unit.id) for unit in included]
    size = min(len(included) + count, len(names))
    best = topology.best(scores, size, required)
    return [names[at] for at in best if at not in required]


def _joined(first: str, second: str, links: Links) -> int:
    if first == second:
        return 0
    return pair_score(links.get((min(first, second), max(first, second)), _UNKNOWN))


class _Pile(msgspec.Struct):
    """The free ids of one device, and how many of its ids are in use or picked just now."""

    parent: str
    names: list[str]
    busy: int = 0
    picked: int = 0


class _Shelf:
    """What is free, device by device, the best on top of a heap."""

    def __init__(
        self, free: Sequence[str], chosen: Sequence[str], units: Units, policy: gpus.Placement
    ) -> None:
        self._policy = policy
        self._piles: dict[str, _Pile] = {}
        remaining = set(free).difference(chosen)
        self._unknown = [name for name in reversed(free) if name not in units and name in remaining]
        self._held = {units[name].physical for name in chosen if name in units}
        self._under: dict[str, set[str]] = {}
        for unit in units.values():
            parent = unit.gpu.part.gpu if unit.gpu else unit.physical
            pile = self._piles.setdefault(unit.physical, _Pile(parent=parent, names=[]))
            self._under.setdefault(parent, set()).add(unit.physical)
            if unit.id in remaining:
                pile.names.append(unit.id)
            else:
                pile.busy += 1
        for pile in self._piles.values():
            pile.names.sort(reverse=True)
        self._beside: Counter[str] = Counter()
        for pile in self._piles.values():
            self._beside[pile.parent] += pile.busy
        self._heap = [(self._rank(pile), name) for name, pile in self._piles.items() if pile.names]
        heapq.heapify(self._heap)

    def take(self) -> str | None:
        """Take the next id by policy; None if there is none that may be taken."""
        while self._heap:
            rank, physical = heapq.heappop(self._heap)
            pile = self._piles[physical]
            # one whose rank has changed since stands in the heap again
            if pile.names and rank == self._rank(pile) and not self._is_closed(physical):
                return self._taken(physical, pile)
        return self._unknown.pop() if self._unknown else None

    def _taken(self, physical: str, pile: _Pile) -> str:
        self._held.add(physical)
        pile.busy += 1
        pile.picked += 1
        self._beside[pile.parent] += 1
        name = pile.names.pop()
        for beside in self._under[pile.parent]:
            if self._piles[beside].names:
                heapq.heappush(self._heap, (self._rank(self._piles[beside]), beside))
        return name

    def _is_closed(self, physical: str) -> bool:
        return self._policy is gpus.Placement.EXCLUSIVE and physical in self._held

    def _rank(self, pile: _Pile) -> tuple[int, int, int, str]:
        sign = -1 if self._policy is gpus.Placement.PACKED else 1
        return sign * pile.busy, pile.picked, sign * self._beside[pile.parent], pile.names[-1]
