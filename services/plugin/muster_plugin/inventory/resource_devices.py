"""Pure: the advertised devices of one resource: its units, with the active faults of their GPUs.

Between two changes there are many queries about thousands of replicas, so most answers are cached
until something changes. The cost of a fault is proportional to the number of replicas of its GPU.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from muster import vocabulary
from muster_plugin.config import resources
from muster_plugin.inventory import device_lifecycle
from muster_plugin.model import advertised, gpu

CONDITIONS: Final = {
    gpu.Effect.DEGRADED: vocabulary.Condition.DEGRADED,
    gpu.Effect.UNMONITORED: vocabulary.Condition.UNMONITORED,
}
_NO_PODS: Final[Mapping[str, str]] = {}
_REASON_MAX: Final = 1000
_Key: TypeAlias = tuple[gpu.Part, gpu.Effect, str]


class ActiveFaults:
    """Every active fault, by GPU, part, effect and code."""

    def __init__(self) -> None:
        self._active: dict[str, dict[_Key, gpu.FaultBegan]] = {}
        self._reasons: dict[str, dict[tuple[gpu.Part, gpu.Effect], str]] = {}

    def apply(self, fault: gpu.FaultChange) -> bool:
        """Apply the beginning or end of a fault; return whether that changed anything."""
        uuid = fault.part.gpu
        key = fault.part, fault.effect, fault.code
        active = self._active.setdefault(uuid, {})
        self._reasons.pop(uuid, None)
        match fault:
            case gpu.FaultBegan():
                is_change = key not in active
                active[key] = fault
            case gpu.FaultEnded():
                is_change = active.pop(key, None) is not None
        if not active:
            del self._active[uuid]
        return is_change

    def reason(self, part: gpu.Part, effect: gpu.Effect) -> str:
        """Return the reasons of all active faults with this effect on a part; empty if none."""
        if part.gpu not in self._active:
            return ""
        cache = self._reasons.setdefault(part.gpu, {})
        if (part, effect) not in cache:
            reasons = (fault.reason for fault in self._matching(part, effect))
            cache[part, effect] = "; ".join(reasons)[:_REASON_MAX]
        return cache[part, effect]

    def count(self) -> Counter[tuple[gpu.Effect, str]]:
        """Count the active faults by effect and code."""
        return Counter(
            (effect, code) for active in self._active.values() for _, effect, code in active
        )

    def _matching(self, part: gpu.Part, effect: gpu.Effect) -> Iterator[gpu.FaultBegan]:
        for fault in self._active[part.gpu].values():
            if fault.effect is effect and fault.part.covers(part):
                yield fault


class ResourceDevices:
    """The devices of one resource; `simulated` is true if its GPUs are simulated."""

    def __init__(self, name: str, rule: resources.Resource, faults: ActiveFaults) -> None:
        self.name = name
        self.rule = rule
        self.simulated = False
        self.lifecycle = device_lifecycle.DeviceLifecycle(name, device_lifecycle.policy(rule))
        self._faults = faults
        self._pods: Mapping[str, str] = _NO_PODS
        self._units: tuple[advertised.Unit, ...] | None = None
        self._devices: tuple[vocabulary.Device, ...] | None = None
        self._advertised: dict[str, vocabulary.Device] = {}
        self._of_gpus: dict[str, list[advertised.Unit]] | None = None
        self._physical: frozenset[str] | None = None
        self._pods_by_device: dict[str, set[str]] | None = None

    def set_rule(self, rule: resources.Resource) -> None:
        """Apply a new rule from now on."""
        self.rule = rule
        self.lifecycle.policy = device_lifecycle.policy(rule)

    def receive(
        self, event: device_lifecycle.Signal, now: float
    ) -> Sequence[device_lifecycle.Fact]:
        """Handle one signal about the units; return the resulting changes."""
        facts = self.lifecycle.receive(event, now)
        self._clear_cache()
        return facts

    def tick(self, now: float) -> Sequence[device_lifecycle.Fact]:
        """Remove units that have been missing or replaced for long enough; return the changes."""
        facts = self.lifecycle.tick(now)
        if facts:
            self._clear_cache()
        return facts

    def remove_all(self) -> Sequence[device_lifecycle.Fact]:
        """Remove all units of a resource that is no longer configured; return the changes."""
        facts = self.lifecycle.remove_all()
        self._clear_cache()
        return facts

    def record_pods(
        self, pods: Mapping[str, str] | None, now: float
    ) -> Sequence[device_lifecycle.Fact]:
        """Record the pod that holds each device, by id; None if unknown. Return the changes."""
        self._pods, self._pods_by_device = pods or _NO_PODS, None
        facts = self.lifecycle.receive(
            device_lifecycle.AllocationsChanged(None if pods is None else frozenset(pods)), now
        )
        if facts:
            self._clear_cache()
        return facts

    def invalidate(self, part: gpu.Part) -> None:
        """Invalidate the cached devices of a whole GPU, because the faults of a part changed."""
        for unit in self._by_gpu().get(part.gpu, ()):
            self._advertised.pop(unit.id, None)
            self._devices = None

    # Queries

    def offered(self) -> tuple[advertised.Unit, ...]:
        """Return every unit, sorted by id."""
        if self._units is None:
            self._units = self.lifecycle.offered()
        return self._units

    def unit(self, device_id: str) -> advertised.Unit | None:
        """Return the unit with this id, or None if it is not advertised."""
        return self.lifecycle.unit(device_id)

    def has(self, uuid: str) -> bool:
        """Return whether any unit of a GPU or MIG device is advertised."""
        if self._physical is None:
            self._physical = frozenset(unit.physical for unit in self.offered())
        return uuid in self._physical

    def device(self, device_id: str) -> vocabulary.Device | None:
        """Return the advertised device with this id, or None if there is none."""
        unit = self.unit(device_id)
        return (self._advertised.get(device_id) or self._advertise(unit)) if unit else None

    def devices(self) -> tuple[vocabulary.Device, ...]:
        """Return the advertised devices, sorted by id, with the faults of their GPUs."""
        if self._devices is None:
            cached = self._advertised
            self._devices = tuple(
                cached.get(unit.id) or self._advertise(unit) for unit in self.offered()
            )
        return self._devices

    def parts(self, part: gpu.Part) -> dict[str, gpu.Part]:
        """Return the parts of the devices that a fault of `part` affects, by the devices' uuids."""
        return {
            unit.physical: unit.gpu.part
            for unit in self._by_gpu().get(part.gpu, ())
            if unit.gpu is not None and part.covers(unit.gpu.part)
        }

    def count(self) -> Counter[vocabulary.Health]:
        """Count the devices by health."""
        return Counter(device.health for device in self.devices())

    def conditions(self) -> Counter[vocabulary.Condition]:
        """Count the Healthy devices by condition."""
        counted: Counter[vocabulary.Condition] = Counter()
        healthy = Counter(
            device.physical
            for device in self.devices()
            if device.physical and device.health is vocabulary.Health.HEALTHY
        )
        parts = {unit.physical: unit.gpu.part for unit in self.offered() if unit.gpu is not None}
        for name, replicas in healthy.items():
            for effect, condition in CONDITIONS.items():
                if self._faults.reason(parts[name], effect):
                    counted[condition] += replicas
        return counted

    def pods_holding(self, name: str) -> tuple[str, ...]:
        """Return the pods that hold a device, or a replica of it."""
        if self._pods_by_device is None:
            self._pods_by_device = {}
            for device_id, pod in self._pods.items():
                unit = self.unit(device_id)
                for key in {device_id, unit.physical if unit else device_id}:
                    self._pods_by_device.setdefault(key, set()).add(pod)
        return tuple(sorted(self._pods_by_device.get(name, ())))

    def _clear_cache(self) -> None:
        self._units = self._devices = self._of_gpus = self._physical = self._pods_by_device = None
        self._advertised.clear()

    def _by_gpu(self) -> Mapping[str, Iterable[advertised.Unit]]:
        if self._of_gpus is None:
            self._of_gpus = {}
            for unit in self.offered():
                if unit.gpu is not None:
                    self._of_gpus.setdefault(unit.gpu.part.gpu, []).append(unit)
        return self._of_gpus

    def _advertise(self, unit: advertised.Unit) -> vocabulary.Device:
        """Return a device with the faults of its GPU, and cache it."""
        device = self._with_faults(unit, self.lifecycle.device(unit.id))
        self._advertised[unit.id] = device
        return device

    def _with_faults(self, unit: advertised.Unit, device: vocabulary.Device) -> vocabulary.Device:
        if unit.gpu is None:
            return device
        fault = self._faults.reason(unit.gpu.part, gpu.Effect.UNHEALTHY)
        reason = "; ".join(text for text in (device.reason, fault) if text)
        return msgspec.structs.replace(
            device,
            physical=unit.physical,
            simulated=self.simulated,
            health=vocabulary.Health.UNHEALTHY if fault else device.health,
            reason=reason,
        )
