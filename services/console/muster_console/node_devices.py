"""Pure: the devices of a node: those of the last inventory, with later changes of their health."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from muster import codec, vocabulary
from muster.fleet import health_state
from muster_console import device_names


class DeviceView(msgspec.Struct, frozen=True, kw_only=True):
    """One device that the last inventory lists, with later changes of its health."""

    id: str
    resource: str
    is_healthy: bool
    reason: str
    label: str
    """The short name of the device."""
    what: str
    """The product and PCI address of a GPU."""
    pod: str
    count: int
    index: int
    is_gpu: bool
    """Whether it is a whole GPU, or a replica of one."""
    physical: str
    """The id of the physical device (such as a GPU), or this device's id if none is reported."""


def devices(events: Iterable[codec.CloudEvent]) -> list[DeviceView]:
    """Return the devices, those that are not Healthy first."""
    views: dict[tuple[str, str], DeviceView] = {}
    physical: dict[tuple[str, str], list[tuple[str, str]]] = {}
    pods: dict[tuple[str, str], str] = {}
    for event in events:
        match event.data:
            case vocabulary.InventoryReported() as inventory:
                known = device_names.by_uuid(inventory.gpus)
                kept = set(inventory.resources)
                views = {key: each for key, each in views.items() if key[0] not in kept}
                for device in inventory.devices:
                    key = device.resource, device.id
                    view = _device(device, known, pods.get(key, ""))
                    views[key] = view
                    physical.setdefault((device.resource, device.physical), []).append(key)
            case vocabulary.DeviceHealthChanged() as change:
                named = (change.resource, change.device_id)
                for key in {named, *physical.get(named, ())} & views.keys():
                    is_healthy = change.health is vocabulary.Health.HEALTHY
                    views[key] = msgspec.structs.replace(
                        views[key],
                        is_healthy=is_healthy,
                        reason="" if is_healthy else change.reason,
                    )
            case vocabulary.AllocationObserved(pod=pod, resource=resource, device_ids=ids) if pod:
                # the last inventory, the only one that is stored, may be newer
                pods |= {(resource, each): pod for each in ids}
                for key in {(resource, each) for each in ids} & views.keys():
                    views[key] = msgspec.structs.replace(views[key], pod=pod)
            case _:
                pass
    return sorted(views.values(), key=lambda d: (d.is_healthy, d.resource, d.index, d.id))


def gpus(events: Sequence[codec.CloudEvent]) -> vocabulary.GpuNode | None:
    """Return the GPUs of the last inventory that has any; None if no inventory has GPUs."""
    for event in reversed(events):
        if isinstance(event.data, vocabulary.InventoryReported) and event.data.gpus:
            return event.data.gpus
    return None


def faulty(views: Iterable[DeviceView], plugin: health_state.Plugin) -> Iterable[str]:
    """Yield a text such as `1 of 8 GPUs Unhealthy` for each resource with Unhealthy devices.

    All replicas of a GPU or MIG device count as one device; other replicas count separately.
    """
    of_resource: dict[str, list[DeviceView]] = {}
    for view in views:
        of_resource.setdefault(view.resource, []).append(view)
    for resource in sorted(plugin.devices):
        every = of_resource.get(resource, [])
        total = _number(every)
        unhealthy = _number(view for view in every if not view.is_healthy)
        if unhealthy:
            is_gpu = all(view.is_gpu for view in every)
            ending = "" if total == 1 else "s"
            noun = f"GPU{ending}" if is_gpu else f"device{ending} of {resource}"
            yield f"{unhealthy} of {total} {noun} Unhealthy"


def _number(views: Iterable[DeviceView]) -> int:
    # one view stands for all Healthy replicas of a device node; replicas of a GPU share its id
    counts = {view.physical: view.count if view.physical == view.id else 1 for view in views}
    return sum(counts.values())


def _device(device: vocabulary.Device, gpus: Mapping[str, vocabulary.Gpu], pod: str) -> DeviceView:
    gpu = gpus.get(device.physical)
    return DeviceView(
        id=device.id,
        resource=device.resource,
        is_healthy=device.health is vocabulary.Health.HEALTHY,
        reason=device.reason,
        label=device_names.label(device, gpu),
        what=device_names.described(gpu) + (" (simulated)" if device.simulated else ""),
        pod=pod,
        count=device.count,
        index=(gpu.index or 0) if gpu else 0,
        is_gpu=gpu is not None and gpu.uuid == device.physical,
        physical=device.physical or device.id,
    )
