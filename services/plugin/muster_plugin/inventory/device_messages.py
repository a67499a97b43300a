"""Pure: composes messages about devices: an event for each change, and lists of all devices.

Replicas of one GPU that change in the same way become one event. A list has to fit into a limited
number of messages: equal replicas are listed once, with their number. If that is not enough, all
Healthy devices of a resource become one entry, so that all Unhealthy devices are still listed. If
that is not enough either, the Unhealthy devices after the first few become one entry too.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Final, TypedDict

import msgspec

from muster import vocabulary
from muster_plugin.discovery import resource_plan
from muster_plugin.inventory import device_lifecycle, resource_devices
from muster_plugin.model import gpu

_UNHEALTHY_LISTED_MAX: Final = (resource_plan.DEVICES_MAX, 20, 1)
"""How many Unhealthy devices of a resource are listed individually: limits to try in order."""
_SHORT_REASON_MAX: Final = 100
_WITHOUT_PODS_MAX: Final = 256
Fits = Callable[[tuple[vocabulary.Device, ...]], bool]


class Origin(TypedDict):
    """The fields that every event has: where and when it happened."""

    node: str
    plugin: str
    at: datetime


class DeviceEvents:
    """Creates the events about the devices of one plugin on one node."""

    def __init__(self, node: str, plugin: str, faults: resource_devices.ActiveFaults) -> None:
        self._node = node
        self._plugin = plugin
        self._faults = faults

    def for_units(
        self,
        resource: resource_devices.ResourceDevices,
        facts: Iterable[device_lifecycle.Fact],
        at: datetime,
    ) -> Iterator[vocabulary.PluginEvent]:
        """Yield the events of changes to units, in order; `resource` is already up to date."""
        announced: set[tuple[str, vocabulary.Health]] = set()
        for group in _group_facts(resource, facts):
            match group[0]:
                case device_lifecycle.Added(device=added):
                    # if the unit has already gone again, publish it as it was when added
                    device = resource.device(added.id) or added
                    yield vocabulary.DeviceAdded(
                        **self._origin(at),
                        device=msgspec.structs.replace(device, count=len(group)),
                    )
                case device_lifecycle.Removed(physical=physical) as fact:
                    yield vocabulary.DeviceRemoved(
                        **self._origin(at),
                        resource=resource.name,
                        device_id=fact.device_id,
                        reason=fact.reason,
                        physical="" if resource.has(physical) else physical,
                        count=len(group),
                    )
                case device_lifecycle.HealthChanged(device_id=device_id, health=health) as fact:
                    unit = resource.unit(device_id)
                    part = unit.gpu.part if unit and unit.gpu else None
                    name = unit.physical if unit and part else device_id
                    has_fault = part and self._faults.reason(part, gpu.Effect.UNHEALTHY)
                    if (name, health) not in announced and not (
                        has_fault and health is vocabulary.Health.HEALTHY
                    ):
                        announced.add((name, health))
                        yield vocabulary.DeviceHealthChanged(
                            **self._origin(at),
                            resource=resource.name,
                            device_id=name,
                            health=health,
                            reason=fact.reason,
                            code=fact.code,
                            pods=resource.pods_holding(name),
                        )

    def for_fault(
        self,
        resource: resource_devices.ResourceDevices,
        name: str,
        part: gpu.Part,
        fault: gpu.FaultChange,
    ) -> vocabulary.PluginEvent:
        """Return the event of a fault that began or ended on one device of a resource."""
        condition = resource_devices.CONDITIONS.get(fault.effect)
        if condition is not None:
            return vocabulary.DeviceConditionChanged(
                **self._origin(fault.at),
                resource=resource.name,
                device_id=name,
                condition=condition,
                holds=isinstance(fault, gpu.FaultBegan),
                reason=fault.reason,
                code=fault.code,
                policy=fault.policy,
                evidence=fault.evidence,
                pods=resource.pods_holding(name),
            )
        remaining = self._faults.reason(part, gpu.Effect.UNHEALTHY)
        reason = fault.reason
        if isinstance(fault, gpu.FaultEnded) and remaining:
            reason = f"{fault.reason}; but {remaining}"
        return vocabulary.DeviceHealthChanged(
            **self._origin(fault.at),
            resource=resource.name,
            device_id=name,
            health=vocabulary.Health.HEALTHY if not remaining else vocabulary.Health.UNHEALTHY,
            reason=reason,
            code=fault.code,
            policy=fault.policy,
            evidence=fault.evidence,
            pods=resource.pods_holding(name),
        )

    def _origin(self, at: datetime) -> Origin:
        return {"node": self._node, "plugin": self._plugin, "at": at}


class FaultsWithoutPods:
    """The latest faults of devices that no pod was known to hold: at most 256.

    The kubelet lists a pod about a second after the pod got its devices. A fault in that second was
    published without the pod, so it is published again as soon as the pod is known, once.
    """

    def __init__(self) -> None:
        self._faults: dict[tuple[str, str, str], vocabulary.PluginEvent] = {}

    def record(self, event: vocabulary.PluginEvent) -> None:
        """Record a fault reported without pods; remove faults that ended or now have pods."""
        match event:
            case vocabulary.DeviceHealthChanged():
                what, holds = "", event.health is not vocabulary.Health.HEALTHY
            case vocabulary.DeviceConditionChanged():
                what, holds = event.condition, event.holds
            case vocabulary.DeviceRemoved():
                gone = event.resource, event.physical or event.device_id
                self._faults = {k: fault for k, fault in self._faults.items() if k[:2] != gone}
                return
            case _:
                return
        key = event.resource, event.device_id, what
        self._faults.pop(key, None)
        if holds and not event.pods:
            self._faults[key] = event
            if len(self._faults) > _WITHOUT_PODS_MAX:
                del self._faults[next(iter(self._faults))]

    def named(
        self, pods_holding: Callable[[str, str], tuple[str, ...]], at: datetime
    ) -> Sequence[vocabulary.PluginEvent]:
        """Remove the recorded faults of devices that pods hold; return the faults with the pods."""
        named = []
        for key, event in list(self._faults.items()):
            pods = pods_holding(key[0], key[1])
            if pods:
                del self._faults[key]
                named.append(msgspec.structs.replace(event, at=at, pods=pods))
        return named


def _group_facts(
    resource: resource_devices.ResourceDevices, facts: Iterable[device_lifecycle.Fact]
) -> Iterable[Sequence[device_lifecycle.Fact]]:
    """Group replicas of one GPU that were added or removed together; other changes stay single."""
    groups: dict[Hashable, list[device_lifecycle.Fact]] = {}
    for number, fact in enumerate(facts):
        key: Hashable = number
        match fact:
            case device_lifecycle.Added(device=device):
                unit = resource.unit(device.id)
                if unit is not None and unit.gpu is not None:
                    key = device_lifecycle.Added, unit.physical, device.health, device.reason
            case device_lifecycle.Removed(physical=physical, reason=reason) if physical:
                key = device_lifecycle.Removed, physical, reason
            case _:
                pass
        groups.setdefault(key, []).append(fact)
    return groups.values()


class Listing(msgspec.Struct, frozen=True):
    """A list of devices; `problem` says which devices are only counted; empty if none are."""

    devices: tuple[vocabulary.Device, ...]
    problem: str = ""


def group_replicas(
    devices: Iterable[tuple[vocabulary.Device, str]],
) -> tuple[vocabulary.Device, ...]:
    """List equal replicas of one physical device once; `devices` are (replica, physical) pairs.

    Subscribers see a GPU as a whole. Device nodes are known by their ids, so only Healthy device
    nodes are combined.
    """
    replicas: dict[Hashable, list[vocabulary.Device]] = {}
    for device, physical in devices:
        is_known_by_id = not device.physical and device.health is not vocabulary.Health.HEALTHY
        which = device.id if is_known_by_id else physical
        key = device.resource, which, device.health, device.reason, device.numa_node
        replicas.setdefault(key, []).append(device)
    return tuple(_counted(group) for group in replicas.values())


def fit_list(devices: Sequence[vocabulary.Device], fits: Fits) -> Listing:
    """Return the devices as a list, shortened until it fits or cannot be shortened further."""
    if fits(tuple(devices)):
        return Listing(tuple(devices))
    every = sum(device.count for device in devices)
    few, *fewer = (_shortened(devices, named_max) for named_max in _UNHEALTHY_LISTED_MAX)
    problem = f"{every} devices are too many to list; Healthy devices are only counted"
    if fits(few):
        return Listing(few, problem)
    shortest = next((short for short in fewer if fits(short)), fewer[-1])
    return Listing(
        shortest, f"{problem}, and only a few Unhealthy devices of each resource are listed"
    )


def _shortened(
    devices: Iterable[vocabulary.Device], named_max: int
) -> tuple[vocabulary.Device, ...]:
    """List at most `named_max` Unhealthy devices of each resource, with shortened reasons.

    The other devices of a resource become one entry for each health.
    """
    groups: dict[Hashable, list[vocabulary.Device]] = {}
    named: Counter[str] = Counter()
    for device in devices:
        which = ""
        if device.health is not vocabulary.Health.HEALTHY and named[device.resource] < named_max:
            named[device.resource] += 1
            which = device.id
        groups.setdefault((device.resource, device.health, which), []).append(device)
    return tuple(
        msgspec.structs.replace(device, reason=device.reason[:_SHORT_REASON_MAX])
        for device in map(_counted, groups.values())
    )


def _counted(devices: Sequence[vocabulary.Device]) -> vocabulary.Device:
    count = sum(device.count for device in devices)
    return devices[0] if count == 1 else msgspec.structs.replace(devices[0], count=count)
