"""Pure: decides which devices a container gets; answers or refuses allocation requests.

`server` receives the kubelet's calls. Answers come from memory, because the kubelet does not admit
any pod on the node while Allocate hangs. The kubelet never reports that a device is free again; it
only offers the device again.

Among whole GPUs that are not shared, the best connected GPUs are preferred (`topology`), whatever
the policy, as in NVIDIA's plugin (k8s-device-plugin 1b826ac, internal/rm/nvml_manager.go).
Otherwise ids are chosen one by one: `distributed` and `aligned` choose the physical device with the
fewest allocated replicas, `packed` the device with the most (internal/rm/allocate.go). `exclusive`
is like distributed, but never chooses two replicas of one device. Ties are broken by id, so that
the same request gets the same answer. The driver is never queried, so a lost GPU cannot block an
answer.
"""

import heapq
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from muster_plugin.config import gpus
from muster_plugin.gpu import container_spec, topology
from muster_plugin.inventory import inventory
from muster_plugin.model import advertised, errors, gpu

_SHOWN_MAX: Final = 5
GPUS_MAX: Final = 64
"""The maximum number of GPUs whose connections count; for more, the search takes too long."""
_NEAREST: Final = 60
_NVLINK: Final = 100
_UNKNOWN: Final = gpu.Link()
Links: TypeAlias = Mapping[tuple[str, str], gpu.Link]
Units: TypeAlias = Mapping[str, advertised.Unit]


class Allocator:
    """Allocates the devices of one resource, and counts the allocated ids."""

    def __init__(self, devices: inventory.Inventory, resource: str) -> None:
        self._inventory = devices
        self._resource = resource
        self._allocated: set[str] = set()

    @property
    def allocated(self) -> int:
        """How many ids this plugin has allocated and the kubelet has not offered again."""
        return len(self._allocated)

    def allocate(
        self,
        containers: Sequence[Collection[str]],
        *,
        present: Collection[str] = (),
        annotation: str = "",
    ) -> tuple[advertised.ContainerResponse, ...]:
        """Answer each container's request, in order; raises AllocationError to refuse them all.

        `present` are the `optional_paths` that exist now, and `annotation` is a unique name.

        Health is not checked: the kubelet offers only Healthy devices, and after a refusal the
        kubelet would fail one pod after another (kubelet devicemanager/manager.go).
        """
        requested = [self._units(ids) for ids in containers]
        answers = [
            self._answer(container_units, present, annotation) for container_units in requested
        ]
        self._allocated.update(unit.id for container_units in requested for unit in container_units)
        return tuple(answers)

    def host_paths(self, containers: Sequence[Collection[str]]) -> tuple[str, ...]:
        """Return the host paths that the containers require. Raises AllocationError."""
        requested = [unit for ids in containers for unit in self._units(ids)]
        gpus = [unit.gpu for unit in requested if unit.gpu]
        context = self._inventory.gpu_context
        needed = container_spec.device_nodes(gpus, context.rules.given, caps=context.scan.caps)
        devices = (device.host_path for unit in requested for device in unit.devices)
        mounts = (mount.host_path for unit in requested for mount in unit.mounts)
        return tuple(dict.fromkeys([*(node.host_path for node in needed), *devices, *mounts]))

    def optional_paths(self, containers: Sequence[Collection[str]]) -> tuple[str, ...]:
        """Return the paths that a container gets only if they exist; raises AllocationError."""
        if any(unit.gpu for ids in containers for unit in self._units(ids)):
            return container_spec.optional_paths(self._inventory.gpu_context.rules.given)
        return ()

    def prefer(
        self, available: Collection[str], must_include: Collection[str], size: int
    ) -> list[str]:
        """Return `size` of the `available` ids, best first; fewer if no more are allowed.

        Must-include ids come first, then the best connected whole GPUs, then ids by the configured
        placement; for device nodes, ids whose physical device has the fewest ids in use. Never
        raises.
        """
        self._allocated -= set(available).difference(must_include)
        offered = {unit.id: unit for unit in self._inventory.offered(self._resource)}
        context = self._inventory.gpu_context
        is_gpu = any(unit.gpu for unit in offered.values())
        return prefer(
            available,
            must_include,
            size,
            units=offered,
            policy=context.rules.placement if is_gpu else gpus.Placement.DISTRIBUTED,
            links=context.scan.links,
        )

    def _units(self, ids: Collection[str]) -> list[advertised.Unit]:
        """Return the units that one container requests; raises AllocationError."""
        requested = [self._unit(device_id) for device_id in dict.fromkeys(ids)]
        if any(unit.gpu for unit in requested):
            problem = container_spec.request_problem(
                self._resource, requested, self._inventory.gpu_context
            )
            if problem:
                raise advertised.AllocationError(problem)
        return requested

    def _unit(self, device_id: str) -> advertised.Unit:
        unit = self._inventory.unit(self._resource, device_id)
        if unit is None:
            ids = [device.id for device in self._inventory.devices(self._resource)]
            has = f"it has {errors.listed(ids, most=_SHOWN_MAX)}" if ids else "it has none"
            raise advertised.AllocationError(f"{self._resource} has no device {device_id!r}; {has}")
        return unit

    def _answer(
        self, requested: Sequence[advertised.Unit], present: Collection[str], annotation: str
    ) -> advertised.ContainerResponse:
        gpus = [unit.gpu for unit in requested if unit.gpu]
        if not gpus:
            return self._device_nodes(requested)
        context = self._inventory.gpu_context
        missing = container_spec.missing_channel(context.rules.given, present)
        if missing:
            raise advertised.AllocationError(f"{self._resource}: {missing}")
        return container_spec.container_response(
            gpus,
            context.rules.given,
            caps=context.scan.caps,
            present=present,
            annotation=annotation,
        )

    def _device_nodes(self, requested: Sequence[advertised.Unit]) -> advertised.ContainerResponse:
        """Return the answer for device nodes and mounts."""
        devices = tuple(dict.fromkeys(device for unit in requested for device in unit.devices))
        mounts = tuple(dict.fromkeys(mount for unit in requested for mount in unit.mounts))
        rule = self._inventory.rules.get(self._resource)
        if rule is None:
            return advertised.ContainerResponse(devices=devices, mounts=mounts)
        environment = {}
        paths = [spec.container_path for spec in devices] + [m.container_path for m in mounts]
        variable = advertised.environment_variable(self._resource) if rule.env is None else rule.env
        if variable and paths:
            environment[variable] = ",".join(paths)
        if rule.cdi:
            # a CDI device's name is vendor/class=name: a resource name has the first two
            cdi_devices = tuple(f"{self._resource}={unit.id}" for unit in requested)
            return advertised.ContainerResponse(environment=environment, cdi_devices=cdi_devices)
        return advertised.ContainerResponse(devices=devices, mounts=mounts, environment=environment)


def prefer(
    available: Collection[str],
    must_include: Collection[str],
    size: int,
    *,
    units: Units,
    policy: gpus.Placement,
    links: Links,
) -> list[str]:
    """Return `size` of the `available` ids, `must_include` first; fewer if no more are allowed.

    `units` are all units of the resource. A unit that is not in `available` counts as in use, so
    that the load of each device is known even right after a start. An unknown id is chosen only if
    no other id is left.

    Never raises: an error would fail the pod's admission, while a short answer lets the kubelet
    choose the missing ids (kubelet devicemanager/manager.go, devicesToAllocate).
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


def _are_whole(candidates: Sequence[advertised.Unit], units: Units) -> bool:
    """Return whether the candidates are whole, unshared GPUs, not too many for a search."""
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
    """Return the ids of the `count` free GPUs that are best connected, also with `included`."""
    gpus = sorted([*included, *free], key=lambda unit: unit.id)
    names = [unit.id for unit in gpus]
    scores = [[_score(first, second, links) for second in names] for first in names]
    required = [names.index(unit.id) for unit in included]
    size = min(len(included) + count, len(names))
    best = topology.best(scores, size, required)
    return [names[at] for at in best if at not in required]


def _score(first: str, second: str, links: Links) -> int:
    """Return how well two GPUs are connected (go-gpuallocator 876e7b7, calculateGPUPairScore).

    Links to a switch do not count: behind NVSwitch all GPUs are equal, and the PCIe bus decides.
    """
    if first == second:
        return 0
    link = links.get((min(first, second), max(first, second)), _UNKNOWN)
    return _NEAREST - link.level + _NVLINK * link.nvlinks


class _Device(msgspec.Struct):
    """The free ids of one physical device.

    `busy` counts its ids that are in use or chosen, `picked` those that the pool has chosen.
    """

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
        """Remove and return the next id by policy; None if no id is left or allowed."""
        while self._heap:
            rank, physical = heapq.heappop(self._heap)
            device = self._devices[physical]
            # a device whose rank has changed is in the heap a second time
            is_used_up = self._policy is gpus.Placement.EXCLUSIVE and physical in self._used
            if device.names and rank == self._rank(device) and not is_used_up:
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

    def _rank(self, device: _Device) -> tuple[int, int, int, str]:
        sign = -1 if self._policy is gpus.Placement.PACKED else 1
        return (
            sign * device.busy,
            device.picked,
            sign * self._busy_by_parent[device.parent],
            device.names[-1],
        )
