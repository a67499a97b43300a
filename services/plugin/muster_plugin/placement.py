"""Pure. Which of the free devices are advised for a request, by policy.

Whole GPUs that are not shared are those that are best joined (`gpu_sets`), whatever the policy, as
in NVIDIA's plugin (k8s-device-plugin 1b826ac, internal/rm/nvml_manager.go). Else one device after
the other is taken: `distributed`, and `aligned` too, take from what serves the fewest, `packed`
from what serves the most (internal/rm/allocate.go); `exclusive` is distributed, and never takes two
replicas of one device. Ties are broken by id, so the same request gets the same answer, and nothing
is asked of anybody: one lost GPU spoils no advice.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from muster_plugin import gpu, gpu_rules, gpu_sets, units

GPUS_MAX: Final = 64
"""Of more GPUs than that, none is advised by how they are joined: it would take too long."""

_NEAREST: Final = 60
_NVLINK: Final = 100
_UNKNOWN: Final = gpu.Link()

Links: TypeAlias = Mapping[tuple[str, str], gpu.Link]
Known: TypeAlias = Mapping[str, units.Unit]


def prefer(
    available: Collection[str],
    must_include: Collection[str],
    size: int,
    *,
    known: Known,
    policy: gpu_rules.Placement,
    links: Links,
) -> list[str]:
    """Return `size` of the `available` ids, `must_include` first; fewer if there are fewer.

    `known` are all units of the resource. What is known and not available is in use: that is how
    the policies know how much each device serves, right after a start too. An id that is not known
    is advised only if nothing else is left.

    Never raises: an error would fail the pod's admission, while a short answer lets the kubelet
    choose the rest (kubelet devicemanager/manager.go, devicesToAllocate).
    """
    chosen = list(dict.fromkeys(must_include))
    if len(chosen) >= size:
        return chosen[: max(size, 0)]
    free = sorted({*available}.difference(chosen))
    taken = [known[name] for name in chosen if name in known]
    open_to = [known[name] for name in free if name in known]
    if _are_whole([*taken, *open_to], known):
        chosen += _aligned(taken, open_to, size - len(chosen), links)
    shelf = _Shelf(free, chosen, known)
    while len(chosen) < size and (name := shelf.take(policy)) is not None:
        chosen.append(name)
    return chosen


def score(link: gpu.Link) -> int:
    """Return how well two GPUs are joined (go-gpuallocator 876e7b7, calculateGPUPairScore).

    Links to a switch do not count: behind NVSwitch all are joined alike, and the bus decides.
    """
    return _NEAREST - link.level + _NVLINK * link.nvlinks


def _are_whole(candidates: Sequence[units.Unit], known: Known) -> bool:
    """Say whether all of these are whole GPUs, and those of the resource few enough."""
    if not 0 < len(candidates) <= GPUS_MAX or len(known) > GPUS_MAX:
        return False
    return all(
        unit.gpu is not None and unit.gpu.part.gi is None and unit.id == unit.gpu.uuid
        for unit in candidates
    )


def _aligned(
    taken: Sequence[units.Unit], free: Sequence[units.Unit], count: int, links: Links
) -> list[str]:
    """Return `count` of the free GPUs that are best joined, together with those taken."""
    gpus = sorted([*taken, *free], key=lambda unit: unit.id)
    names = [unit.id for unit in gpus]
    joined = [[_joined(one, other, links) for other in names] for one in names]
    required = [names.index(unit.id) for unit in taken]
    size = min(len(taken) + count, len(names))
    best = gpu_sets.best(joined, size, required)
    return [names[at] for at in best if at not in required]


def _joined(one: str, other: str, links: Links) -> int:
    if one == other:
        return 0
    return score(links.get((min(one, other), max(one, other)), _UNKNOWN))


class _Pile(msgspec.Struct):
    """The free ids of one device, and how many of its ids are in use or picked just now."""

    parent: str
    names: list[str]
    busy: int = 0
    picked: int = 0


class _Shelf:
    """What is free, device by device."""

    def __init__(self, free: Sequence[str], chosen: Sequence[str], known: Known) -> None:
        self._piles: dict[str, _Pile] = {}
        self._unknown = [name for name in free if name not in known and name not in chosen]
        self._unknown.reverse()
        left = set(free).difference(chosen)
        self._held = {known[name].physical for name in chosen if name in known}
        for unit in known.values():
            parent = unit.gpu.part.gpu if unit.gpu else unit.physical
            pile = self._piles.setdefault(unit.physical, _Pile(parent=parent, names=[]))
            if unit.id in left:
                pile.names.append(unit.id)
            else:
                pile.busy += 1
        for pile in self._piles.values():
            pile.names.sort(reverse=True)
        self._beside: Counter[str] = Counter()
        for pile in self._piles.values():
            self._beside[pile.parent] += pile.busy

    def take(self, policy: gpu_rules.Placement) -> str | None:
        """Take the next id by policy; None if there is none that may be taken."""
        is_exclusive = policy is gpu_rules.Placement.EXCLUSIVE
        open_to = [
            (physical, pile)
            for physical, pile in self._piles.items()
            if pile.names and not (is_exclusive and physical in self._held)
        ]
        if not open_to:
            return self._unknown.pop() if self._unknown else None
        rank = self._packed if policy is gpu_rules.Placement.PACKED else self._spread
        physical, pile = min(open_to, key=lambda one: rank(one[1]))
        self._held.add(physical)
        pile.busy += 1
        pile.picked += 1
        self._beside[pile.parent] += 1
        return pile.names.pop()

    def _spread(self, pile: _Pile) -> tuple[int, int, int, str]:
        return pile.busy, pile.picked, self._beside[pile.parent], pile.names[-1]

    def _packed(self, pile: _Pile) -> tuple[int, int, int, str]:
        return -pile.busy, pile.picked, -self._beside[pile.parent], pile.names[-1]
