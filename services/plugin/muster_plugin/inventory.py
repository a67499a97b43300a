"""Pure. Every device of the node, what is wrong with each, and what a container is given with it.

A physical device (a device node, a GPU) stands behind one id or several. Faults concern physical
devices and are told apart by their code; an id is Healthy while nothing holds against what stands
behind it. Ids are those of the settings: a device that is missing stays in the list, Unhealthy, so
that pods which hold it stay accounted for.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Final

import msgspec

from muster import vocabulary
from muster_plugin import config

_ID_MAX: Final = 63
_PLAIN = re.compile(r"[A-Za-z0-9._-]+")
_UNIQUE: Final = 8


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One id: what stands behind it, and what a container gets that is given it."""

    device: vocabulary.Device
    physical: str
    path: str = ""
    permissions: str = ""
    visible: str = ""
    """The GPU's name for NVIDIA_VISIBLE_DEVICES."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Something holds against a physical device from now on."""

    physical: str
    code: str
    reason: str
    at: datetime


class Mended(msgspec.Struct, frozen=True, kw_only=True):
    """Something no longer holds against a physical device."""

    physical: str
    code: str
    at: datetime


Change = Fault | Mended


class Inventory:
    """The devices of one node as one plugin advertises them."""

    def __init__(self, entries: Iterable[Entry], *, node: str, plugin: str) -> None:
        self._node = node
        self._plugin = plugin
        self._entries = {(e.device.resource, e.device.id): e for e in entries}
        self._holding: dict[str, dict[str, str]] = {e.physical: {} for e in self._entries.values()}
        self.resources = tuple(dict.fromkeys(resource for resource, _ in self._entries))

    def apply(self, change: Change) -> tuple[vocabulary.DeviceHealthChanged, ...]:
        """Take one change; return the ids whose health it turned, empty if it was known."""
        holding = self._holding.get(change.physical)
        if holding is None:
            return ()
        was_healthy = not holding
        match change:
            case Fault():
                holding[change.code] = change.reason
            case Mended():
                holding.pop(change.code, None)
        if was_healthy == (not holding):
            return ()
        reason = _reason(holding) if holding else f"{change.code} no longer holds"
        return tuple(
            vocabulary.DeviceHealthChanged(
                node=self._node,
                at=change.at,
                plugin=self._plugin,
                resource=entry.device.resource,
                device_id=entry.device.id,
                health=_health(holding),
                reason=reason,
                code=change.code,
            )
            for entry in self._entries.values()
            if entry.physical == change.physical
        )

    def devices(self, resource: str) -> tuple[vocabulary.Device, ...]:
        """Return the devices of a resource as they are now, in the order of the settings."""
        return tuple(
            self._now(entry) for (name, _), entry in self._entries.items() if name == resource
        )

    def entry(self, resource: str, device_id: str) -> Entry | None:
        """Return what stands behind an id, or None if it is none of ours."""
        return self._entries.get((resource, device_id))

    def count(self, resource: str) -> Counter[vocabulary.Health]:
        """Count the devices of a resource by health."""
        return Counter(device.health for device in self.devices(resource))

    def snapshot(self, at: datetime) -> vocabulary.InventoryReported:
        """Return the whole inventory as an event."""
        return vocabulary.InventoryReported(
            node=self._node,
            at=at,
            plugin=self._plugin,
            devices=tuple(self._now(entry) for entry in self._entries.values()),
            resources=self.resources,
        )

    def _now(self, entry: Entry) -> vocabulary.Device:
        holding = self._holding[entry.physical]
        if not holding:
            return entry.device
        return msgspec.structs.replace(
            entry.device, health=_health(holding), reason=_reason(holding)
        )


def planned(settings: config.Settings, *, node: str) -> Iterator[Entry]:
    """Give every id that the settings ask for, before anybody has looked whether it is there."""
    for resource in settings.resources:
        for path in resource.paths:
            for number in range(resource.count):
                device = vocabulary.Device(id=device_id(path, number), resource=resource.name)
                yield Entry(
                    device=device, physical=path, path=path, permissions=resource.permissions
                )
    if settings.simulated_gpus:
        yield from _simulated(settings.simulated_gpus, node)


def device_id(path: str, number: int) -> str:
    """Return the id of a device node: the same after every restart, at most 63 characters."""
    short = path.removeprefix("/dev/")
    tail = f"-{number}"
    if _PLAIN.fullmatch(short) and len(short + tail) <= _ID_MAX:
        return short + tail
    unique = f".{hashlib.sha256(path.encode()).hexdigest()[:_UNIQUE]}{tail}"
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", short).strip("-")
    return readable[-(_ID_MAX - len(unique)) :] + unique


def gpu_uuid(node: str, index: int) -> str:
    """Return the uuid of a simulated GPU: unique in the cluster, the same after every restart."""
    told = hashlib.sha256(f"{node}/{index}".encode()).hexdigest()
    return f"GPU-{told[:8]}-{told[8:12]}-{told[12:16]}-{told[16:20]}-{told[20:32]}"


def _simulated(gpus: config.SimulatedGpus, node: str) -> Iterator[Entry]:
    for index in range(gpus.count):
        name = gpu_uuid(node, index)
        device = vocabulary.Device(
            id=name,
            resource=gpus.resource,
            simulated=True,
            gpu=vocabulary.Gpu(uuid=name, product=gpus.product, memory_mib=gpus.memory_mib),
        )
        yield Entry(device=device, physical=name, visible=name)


def _health(holding: dict[str, str]) -> vocabulary.Health:
    return vocabulary.Health.UNHEALTHY if holding else vocabulary.Health.HEALTHY


def _reason(holding: dict[str, str]) -> str:
    return "; ".join(holding.values())
