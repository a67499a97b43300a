"""Pure: fits the device list of a node into one message of limited size.

Equal replicas are listed once, with their number. If that is not enough, all Healthy devices of a
resource are one entry: everything that is wrong is still listed. If that is not enough either, so
are the Unhealthy devices beyond the first few.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Final

import msgspec

from muster import vocabulary
from muster_plugin.discovery import resource_plan

_UNHEALTHY_LISTED_MAX: Final = (resource_plan.DEVICES_MAX, 20, 1)
"""How many Unhealthy devices of a resource are listed one by one, if not all devices can be."""
_REASON_MAX: Final = 100


class Listing(msgspec.Struct, frozen=True):
    """The listed devices; `problem` says what is left out, empty if nothing is."""

    devices: tuple[vocabulary.Device, ...]
    problem: str = ""


def grouped(devices: Iterable[tuple[vocabulary.Device, str]]) -> tuple[vocabulary.Device, ...]:
    """List equal replicas of one physical device once; each device comes with its physical device.

    Subscribers see a GPU as a whole. Device nodes are known by their ids, so only Healthy ones are
    summed up.
    """
    replicas: dict[Hashable, list[vocabulary.Device]] = {}
    for device, physical in devices:
        is_known_by_id = not device.physical and device.health is not vocabulary.Health.HEALTHY
        which = device.id if is_known_by_id else physical
        key = device.resource, which, device.health, device.reason, device.numa_node
        replicas.setdefault(key, []).append(device)
    return tuple(_counted(group) for group in replicas.values())


def fit(devices: Sequence[vocabulary.Device], bytes_max: int) -> Listing:
    """List the devices in at most `bytes_max` bytes of JSON."""
    if _fits(devices, bytes_max):
        return Listing(tuple(devices))
    every = sum(device.count for device in devices)
    few, *fewer = (_shortened(devices, named_max) for named_max in _UNHEALTHY_LISTED_MAX)
    problem = f"{every} devices are too many to list; Healthy ones are only counted"
    if _fits(few, bytes_max):
        return Listing(few, problem)
    shortest = next((short for short in fewer if _fits(short, bytes_max)), fewer[-1])
    return Listing(
        shortest, f"{problem}, and only a few Unhealthy ones of each resource are listed"
    )


def _shortened(
    devices: Iterable[vocabulary.Device], named_max: int
) -> tuple[vocabulary.Device, ...]:
    """List at most `named_max` Unhealthy devices of each resource, with shortened reasons."""
    groups: dict[Hashable, list[vocabulary.Device]] = {}
    named: Counter[str] = Counter()
    for device in devices:
        which = ""
        if device.health is not vocabulary.Health.HEALTHY and named[device.resource] < named_max:
            named[device.resource] += 1
            which = device.id
        groups.setdefault((device.resource, device.health, which), []).append(device)
    return tuple(
        msgspec.structs.replace(device, reason=device.reason[:_REASON_MAX])
        for device in map(_counted, groups.values())
    )


def _counted(devices: Sequence[vocabulary.Device]) -> vocabulary.Device:
    count = sum(device.count for device in devices)
    return devices[0] if count == 1 else msgspec.structs.replace(devices[0], count=count)


def _fits(devices: Iterable[vocabulary.Device], bytes_max: int) -> bool:
    return len(msgspec.json.encode([*devices])) <= bytes_max
