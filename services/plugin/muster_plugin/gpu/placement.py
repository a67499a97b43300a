"""Pure: preferred allocation: chooses, by policy, the free devices that a request should get.

Of whole GPUs that are not shared the best connected are preferred (`topology`), whatever the
policy, as in NVIDIA's plugin (k8s-device-plugin 1b826ac, internal/rm/nvml_manager.go). Otherwise
one device after the other is taken: `distributed` and `aligned` take from the physical device with
the fewest allocated replicas, `packed` from the one with the most (internal/rm/allocate.go);
`exclusive` is distributed, and never takes two replicas of one device. Ties are broken by id, so
the same request gets the same answer. Nothing queries the driver, so a lost GPU does no harm here.
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
"""Beyond this many GPUs their connections are ignored: the search would take too long."""

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

    `units` are all units of the resource. A unit that is not available is in use: that tells the
    policies the load of each device, right after a start too. An unknown id is chosen only if
    nothing else is left.

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
        chosen += _best_connected(included, candidates, size - len(chosen), links)
    pool = _Pool(free, chosen, units, policy)
    while len(chosen) < size and (name := pool.pop()) is not None:
        chosen.append(name)
    return chosen


def pair_score(link: gpu.Link) -> int:
    """Return how well two GPUs are connected (go-gpuallocator 876e7b7, calculateGPUPairScore).

    Links to a switch do not count: behind NVSwitch all GPUs are equal, and the PCIe bus decides.
    """
    return _NEAREST - link.level + _NVLINK * link.nvlinks


def _are_whole(candidates: Sequence[advertised.Unit], units: Units) -> bool:
    """Return whether all these are whole GPUs, few enough for the exact search."""
    if not 0 < len(candidates) <= GPUS_MAX or len(units) > GPUS_MAX:
        return False
    return all(
        unit.gpu is not None and unit.gpu.part.gi is None and unit.id == unit.gpu.uuid
        for unit in candidates
    )


def _best_connected(
    included: Sequence[advertised.Unit],
    free: Sequence[advertised.Unit],
    count: int,
    links: Links,
) -> list[str]:
    """Return the `count` free GPUs that are best connected, with each other and the included."""
    gpus = sorted([*included, *free], key=lambda unit: unit.id)
    names = [unit.id for unit in gpus]
    scores = [[_score(first, second, links) for second in names] for first in names]
    required = [names.index(unit.id) for unit in included]
    size = min(len(included) + count, len(names))
    best = topology.best(scores, size, required)
    return [names[at] for at in best if at not in required]


def _score(first: str, second: str, links: Links) -> int:
    if first == second:
        return 0
    return pair_score(links.get((min(first, second), max(first, second)), _UNKNOWN))


class _Device(msgspec.Struct):
    """The free ids of one physical device, and how many are in use or already picked."""

    parent: str
    names: list[str]
    busy: int = 0
    picked: int = 0


class _Pool:
    """The free ids by physical device, the best device on top of a heap."""

    def __init__(
        self, free: Sequence[str], chosen: Sequence[str], units: Units, policy: gpus.Placement
    ) -> None:
        self._policy = policy
        self._devices: dict[str, _Device] = {}
        remaining = set(free).difference(chosen)
        self._unknown = [name for name in reversed(free) if name not in units and name in remaining]
        self._used = {units[name].physical for name in chosen if name in units}
        self._by_parent: dict[str, set[str]] = {}
        for unit in units.values():
            parent = unit.gpu.part.gpu if unit.gpu else unit.physical
            device = self._devices.setdefault(unit.physical, _Device(parent=parent, names=[]))
            self._by_parent.setdefault(parent, set()).add(unit.physical)
            if unit.id in remaining:
                device.names.append(unit.id)
            else:
                device.busy += 1
        for device in self._devices.values():
            device.names.sort(reverse=True)
        self._busy_by_parent: Counter[str] = Counter()
        for device in self._devices.values():
            self._busy_by_parent[device.parent] += device.busy
        self._heap = [
            (self._rank(device), name) for name, device in self._devices.items() if device.names
        ]
        heapq.heapify(self._heap)

    def pop(self) -> str | None:
        """Remove and return the next id by policy; None if there is none left."""
        while self._heap:
            rank, physical = heapq.heappop(self._heap)
            device = self._devices[physical]
            # a device whose rank has changed since is in the heap again
            if device.names and rank == self._rank(device) and not self._is_used_up(physical):
                return self._pick(physical, device)
        return self._unknown.pop() if self._unknown else None

    def _pick(self, physical: str, device: _Device) -> str:
        self._used.add(physical)
        device.busy += 1
        device.picked += 1
        self._busy_by_parent[device.parent] += 1
        name = device.names.pop()
        for sibling in self._by_parent[device.parent]:
            if self._devices[sibling].names:
                heapq.heappush(self._heap, (self._rank(self._devices[sibling]), sibling))
        return name

    def _is_used_up(self, physical: str) -> bool:
        return self._policy is gpus.Placement.EXCLUSIVE and physical in self._used

    def _rank(self, device: _Device) -> tuple[int, int, int, str]:
        sign = -1 if self._policy is gpus.Placement.PACKED else 1
        return (
            sign * device.busy,
            device.picked,
            sign * self._busy_by_parent[device.parent],
            device.names[-1],
        )
