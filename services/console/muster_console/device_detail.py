"""Pure: one device of a node: its properties, its use, and its faults by XID or other code."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Final

import msgspec

from muster import codec, vocabulary
from muster_console import device_names

_CODES_MAX: Final = 50


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """The faults that a device reported with one code, such as `xid-79`."""

    code: str
    times: int
    first: datetime
    last: datetime
    reason: str
    """The reason of the last fault with this code."""
    policy: str


class DeviceDetail(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of one device, its faults by code, and how often it was allocated."""

    id: str
    label: str
    facts: tuple[tuple[str, str], ...]
    codes: tuple[Code, ...]
    allocations: int
    changes: int
    """How many times the device became Healthy or Unhealthy."""


def concerns(event: vocabulary.Event, names: frozenset[str]) -> bool:
    """Return whether an event names a device; `names` are its id and those of its replicas."""
    match event:
        case vocabulary.DeviceAdded(device=added):
            named = {added.id, added.physical}
        case vocabulary.DeviceRemoved(device_id=removed, physical=physical):
            named = {removed, physical}
        case (
            vocabulary.DeviceHealthChanged(device_id=changed)
            | vocabulary.DeviceConditionChanged(device_id=changed)
        ):
            named = {changed}
        case vocabulary.AllocationObserved(device_ids=ids) | vocabulary.AlertChanged(devices=ids):
            named = set(ids)
        case _:
            return False
    return not named.isdisjoint(names)


def detail(
    device: str, events: Iterable[codec.CloudEvent], gpus: vocabulary.GpuNode | None
) -> DeviceDetail:
    """Return a device's details; `events` are those that concern it, in order of time."""
    gpu = device_names.by_uuid(gpus).get(device)
    codes: dict[str, Code] = {}
    allocations, changes = 0, 0
    for event in events:
        match event.data:
            case vocabulary.DeviceHealthChanged(health=vocabulary.Health.HEALTHY):
                changes += 1
            case vocabulary.DeviceHealthChanged() as fault:
                changes += 1
                _count(codes, fault)
            case vocabulary.DeviceConditionChanged(holds=True) as fault:
                _count(codes, fault)
            case vocabulary.AllocationObserved():
                allocations += 1
            case _:
                pass
    newest = sorted(codes.values(), key=lambda code: code.last, reverse=True)
    of_gpu = vocabulary.Device(id=device, resource="gpu", physical=device)
    return DeviceDetail(
        id=device,
        label=device_names.label(of_gpu, gpu),
        facts=tuple((name, value) for name, value in _facts(gpu, gpus) if value),
        codes=tuple(newest[:_CODES_MAX]),
        allocations=allocations,
        changes=changes,
    )


def _count(
    codes: dict[str, Code],
    fault: vocabulary.DeviceHealthChanged | vocabulary.DeviceConditionChanged,
) -> None:
    name = fault.code or "without a code"
    before = codes.get(name)
    codes[name] = Code(
        code=name,
        times=before.times + 1 if before else 1,
        first=before.first if before else fault.at,
        last=fault.at,
        reason=fault.reason,
        policy=fault.policy,
    )


def _facts(
    gpu: vocabulary.Gpu | None, node: vocabulary.GpuNode | None
) -> Iterable[tuple[str, str]]:
    """Yield the names and values of a GPU's properties; an unknown value is empty."""
    if gpu is None or node is None:
        return
    yield "product", gpu.product + (" (simulated)" if node.simulated else "")
    yield "index", "" if gpu.index is None else str(gpu.index)
    yield "PCI address", gpu.pci_bus_id or ""
    yield "serial", gpu.serial or ""
    yield "memory", f"{gpu.memory_mib:,} MiB" if gpu.memory_mib is not None else ""
    yield "compute capability", gpu.compute_capability or ""
    yield "NUMA node", "" if gpu.numa_node is None else str(gpu.numa_node)
    yield "MIG", _mig(gpu)
    yield "NVLink clique", gpu.clique
    yield "driver", node.driver_version or ""
    yield "CUDA", node.cuda_version or ""


def _mig(gpu: vocabulary.Gpu) -> str:
    profiles: Mapping[str, None] = dict.fromkeys(mig.profile for mig in gpu.mig)
    if profiles:
        return ", ".join(profiles)
    return {True: "enabled, no device", False: "off", None: ""}[gpu.mig_enabled]
