"""Pure: How the devices of a node are listed in one message that everybody takes.

Replicas that are alike are listed once, with their number. If that is not enough, all Healthy
devices of a resource are one entry: who reads the list to learn what is wrong with which device
misses nothing. If that is not enough either, so are the Unhealthy ones beyond the first.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Final

import msgspec

from muster import vocabulary
from muster_plugin.discovery import resource_plan

_NAMED: Final = (resource_plan.DEVICES_MAX, 20, 1)
"""Unhealthy devices of one resource that are listed one by one, where not all devices can be."""
_REASON_MAX: Final = 100


class Listing(msgspec.Struct, frozen=True):
    """The devices in few words; `problem` says what is not in them, empty if nothing is missing."""

    devices: tuple[vocabulary.Device, ...]
    problem: str = ""


def alike(devices: Iterable[tuple[vocabulary.Device, str]]) -> tuple[vocabulary.Device, ...]:
    """List replicas of one thing that are alike once; each device comes with what it is made of.

    Everybody hears of a GPU as a whole. Device nodes are known by their ids, so of those only what
    is Healthy is summed up.
    """
    replicas: dict[Hashable, list[vocabulary.Device]] = {}
    for device, thing in devices:
        is_known_by_id = not device.physical and device.health is not vocabulary.Health.HEALTHY
        which = device.id if is_known_by_id else thing
        key = device.resource, which, device.health, device.reason, device.numa_node
        replicas.setdefault(key, []).append(device)
    return tuple(_together(same) for same in replicas.values())


def fitting(devices: Sequence[vocabulary.Device], bytes_max: int) -> Listing:
    """List the devices in so many bytes of JSON."""
    if _fits(devices, bytes_max):
        return Listing(tuple(devices))
    every = sum(device.count for device in devices)
    few, *fewer = (_shortened(devices, named_max) for named_max in _NAMED)
    told = f"{every} devices are too many to be told one by one: of the Healthy ones only how many"
    if _fits(few, bytes_max):
        return Listing(few, told)
    shortest = next((one for one in fewer if _fits(one, bytes_max)), fewer[-1])
    return Listing(shortest, f"{told}, and of the Unhealthy ones a few of each resource")


def _shortened(
    devices: Iterable[vocabulary.Device], named_max: int
) -> tuple[vocabulary.Device, ...]:
    """List one by one only so many Unhealthy devices of each resource, and why in short."""
    found: dict[Hashable, list[vocabulary.Device]] = {}
    named: Counter[str] = Counter()
    for device in devices:
        which = ""
        if device.health is not vocabulary.Health.HEALTHY and named[device.resource] < named_max:
            named[device.resource] += 1
            which = device.id
        found.setdefault((device.resource, device.health, which), []).append(device)
    return tuple(
        msgspec.structs.replace(one, reason=one.reason[:_REASON_MAX])
        for one in map(_together, found.values())
    )


def _together(devices: Sequence[vocabulary.Device]) -> vocabulary.Device:
    count = sum(device.count for device in devices)
    return devices[0] if count == 1 else msgspec.structs.replace(devices[0], count=count)


def _fits(devices: Iterable[vocabulary.Device], bytes_max: int) -> bool:
    return len(msgspec.json.encode([*devices])) <= bytes_max
