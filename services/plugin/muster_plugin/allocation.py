"""Pure. From the kubelet's request to what a container is given, or the reason why it is not.

Answers come from memory: while Allocate hangs, the kubelet admits no pod at all on the node.
The kubelet never says which devices are free again; it shows when it offers them the next time.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from muster_plugin import cdi, inventory, names, units

VISIBLE_DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
_SHOWN_MAX: Final = 5


class Refusal(Exception):
    """A request that names what we do not have; the text ends up in the pod's event."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What one container is given; `cdi_devices` name what a CDI spec says in its place."""

    devices: tuple[units.DeviceSpec, ...] = ()
    mounts: tuple[units.Mount, ...] = ()
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    cdi_devices: tuple[str, ...] = ()


class Allocator:
    """Allocates the devices of one resource; remembers what it gave away."""

    def __init__(self, devices: inventory.Inventory, resource: str) -> None:
        self._inventory = devices
        self._resource = resource
        self._given: set[str] = set()

    @property
    def allocated(self) -> int:
        """How many ids were given away and not offered again since: at least those in use."""
        return len(self._given)

    def allocate(self, containers: Sequence[Collection[str]]) -> tuple[Answer, ...]:
        """Answer each container's request, in order; raises Refusal for an id that is not ours.

        Health is not looked at: the kubelet offers only what we called Healthy, and a veto would
        make it fail one pod after the other (kubelet devicemanager/manager.go).
        """
        wanted = [self._entries(ids) for ids in containers]
        self._given.update(entry.id for entries in wanted for entry in entries)
        return tuple(self._answer(entries) for entries in wanted)

    def host_paths(self, containers: Sequence[Collection[str]]) -> tuple[str, ...]:
        """Return what has to be there on the host; raises Refusal like `allocate`."""
        entries = [entry for ids in containers for entry in self._entries(ids)]
        devices = (device.host_path for entry in entries for device in entry.devices)
        mounts = (mount.host_path for entry in entries for mount in entry.mounts)
        return tuple(dict.fromkeys([*devices, *mounts]))

    def prefer(
        self, available: Collection[str], must_include: Collection[str], size: int
    ) -> list[str]:
        """Return `size` of the `available` ids, best first; fewer if there are fewer.

        Must-include ids come first, then those whose physical device serves the fewest containers.
        Ties are broken by id, so the same request always gets the same answer.

        Never raises: an error would fail the pod's admission, while a short answer lets the kubelet
        choose the rest (kubelet devicemanager/manager.go, devicesToAllocate).
        """
        chosen = list(dict.fromkeys(must_include))
        free = set(available) - set(chosen)
        self._given -= free
        busy = Counter(self._physical(name) for name in self._given.union(chosen))
        while free and len(chosen) < size:
            best = min(free, key=lambda name: (busy[self._physical(name)], name))
            free.remove(best)
            chosen.append(best)
            busy[self._physical(best)] += 1
        return chosen[: max(size, 0)]

    def _entries(self, ids: Collection[str]) -> list[inventory.Entry]:
        return [self._entry(name) for name in dict.fromkeys(ids)]

    def _entry(self, device_id: str) -> inventory.Entry:
        entry = self._inventory.entry(self._resource, device_id)
        if entry is None:
            known = [device.id for device in self._inventory.devices(self._resource)]
            more = f" and {len(known) - _SHOWN_MAX} more" if len(known) > _SHOWN_MAX else ""
            has = f"it has {', '.join(known[:_SHOWN_MAX])}{more}" if known else "it has none"
            raise Refusal(f"{self._resource} has no device {device_id!r}; {has}")
        return entry

    def _physical(self, device_id: str) -> str:
        entry = self._inventory.entry(self._resource, device_id)
        return entry.physical if entry else ""

    def _answer(self, entries: Sequence[inventory.Entry]) -> Answer:
        devices = tuple(dict.fromkeys(device for entry in entries for device in entry.devices))
        mounts = tuple(dict.fromkeys(mount for entry in entries for mount in entry.mounts))
        visible = ",".join(dict.fromkeys(entry.visible for entry in entries if entry.visible))
        environment = {VISIBLE_DEVICES: visible} if visible else {}
        rule = self._inventory.rule(self._resource)
        if rule is None:
            return Answer(devices=devices, mounts=mounts, environment=environment)
        seen = [spec.container_path for spec in devices] + [m.container_path for m in mounts]
        variable = names.variable(self._resource) if rule.env is None else rule.env
        if variable and seen:
            environment[variable] = ",".join(seen)
        if rule.cdi:
            qualified = tuple(cdi.qualified(self._resource, entry.id) for entry in entries)
            return Answer(environment=environment, cdi_devices=qualified)
        return Answer(devices=devices, mounts=mounts, environment=environment)
