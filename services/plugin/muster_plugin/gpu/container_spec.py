"""Pure: composes a container's response for its GPUs, as NVIDIA's device plugin would.

Sources: k8s-device-plugin 1b826ac, internal/plugin/server.go getAllocateResponse and its callees,
internal/cdi/cdi.go, internal/rm/rm.go ValidateRequest. There are three intended differences:
devices are in the order of the request, not in random order; a device node is listed once, not once
for each replica; IMEX channels and control nodes are listed only if they exist on the host when
Allocate is called.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from muster_plugin.config import gpus
from muster_plugin.model import advertised, gpu

VISIBLE_DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
CDI_VENDOR: Final = "k8s.device-plugin.nvidia.com"
CONTROL_NODES: Final = (
    "/dev/nvidiactl",
    "/dev/nvidia-uvm",
    "/dev/nvidia-uvm-tools",
    "/dev/nvidia-modeset",
)
_IMEX_CHANNELS: Final = "NVIDIA_IMEX_CHANNELS"
_MOUNTS_ROOT: Final = "/var/run/nvidia-container-devices"
_MIG_MINORS: Final = "/proc/driver/nvidia-caps/mig-minors"
_DEV_NULL: Final = "/dev/null"
_MOUNTS: Final = gpus.DeviceList.VOLUME_MOUNTS
_CDI: Final = frozenset({gpus.DeviceList.CDI_ANNOTATIONS, gpus.DeviceList.CDI_CRI})


class AllocationContext(msgspec.Struct, frozen=True, kw_only=True):
    """The rules and the scan that an allocation of GPUs needs."""

    rules: gpus.Gpus = gpus.Gpus()
    scan: gpu.Scan = gpu.Scan()


def container_response(
    requested: Sequence[gpu.Device],
    options: gpus.ContainerOptions,
    *,
    caps: Mapping[str, int],
    present: Collection[str],
    annotation: str,
) -> advertised.ContainerResponse:
    """Return the response for a container that gets these devices, in the order of the request.

    `present` are the `optional_paths` that exist on the host. `annotation` is a unique name for CDI
    annotations. `caps` come from `gpu.Scan`. A device is listed once, however many of its replicas
    are requested.
    """
    devices = tuple({device.uuid: device for device in requested}.values())
    has_index = options.device_ids is gpus.DeviceIds.INDEX
    names = [device.index if has_index else device.uuid for device in devices]
    channels = [
        number for number in options.imex.channels if _channel_path(options, number) in present
    ]
    wanted = frozenset(options.device_list)
    qualified = tuple(_qualified(names, channels, options)) if wanted & _CDI else ()
    is_annotated = gpus.DeviceList.CDI_ANNOTATIONS in wanted
    key = f"{options.cdi_annotation_prefix}nvidia-device-plugin_{annotation}"
    specs = (
        *(_spec(options, path) for path in CONTROL_NODES if _on_host(options, path) in present),
        *device_nodes(devices, options, caps=caps),
        *(_spec(options, _channel(number)) for number in channels),
    )
    return advertised.ContainerResponse(
        devices=specs if _passes_nodes(options) else (),
        mounts=tuple(_mounts(names, channels)) if _MOUNTS in wanted else (),
        environment=_environment(names, channels, options),
        annotations={key: ",".join(qualified)} if is_annotated and qualified else {},
        cdi_devices=qualified if gpus.DeviceList.CDI_CRI in wanted else (),
    )


def request_problem(
    resource: str, requested: Sequence[advertised.Unit], context: AllocationContext
) -> str:
    """Return why a container may not get all of these units; empty if it may."""
    rules = context.rules
    shared = [unit for unit in requested if unit.gpu and unit.id != unit.gpu.uuid]
    prefix = f'invalid allocation request for "{resource}": invalid request: '
    if rules.sharing.one_per_request and shared and len(requested) > 1:
        limit = "maximum request size for shared resources is 1"
        return f"{prefix}{limit}; found {len(requested)}"
    if rules.placement is gpus.Placement.EXCLUSIVE:
        replica_counts = Counter(unit.physical for unit in requested)
        repeated = [f"{count} of {name}" for name, count in replica_counts.items() if count > 1]
        if repeated:
            counts = ", ".join(repeated)
            limit = "placement is exclusive and allows one replica of each GPU"
            return f"{prefix}{limit}; found {counts}"
    if _passes_nodes(rules.given):
        for unit in requested:
            missing = _unknown_node(unit.gpu, context.scan.caps) if unit.gpu else ""
            if missing:
                return f"{unit.id} of {resource} cannot be allocated: {missing}"
    return ""


def missing_channel(options: gpus.ContainerOptions, present: Collection[str]) -> str:
    """Return which required IMEX channel is absent, as text; empty if none is."""
    if options.imex.required:
        for number in options.imex.channels:
            if _channel_path(options, number) not in present:
                path = _channel_path(options, number)
                return f"IMEX channel {number} is required, but {path} is absent"
    return ""


def device_nodes(
    devices: Sequence[gpu.Device], options: gpus.ContainerOptions, *, caps: Mapping[str, int]
) -> tuple[advertised.DeviceSpec, ...]:
    """Return the device nodes that a container gets for these devices.

    The result is empty if `device_specs` is off, or if `device_list` has only CDI strategies.
    """
    if not _passes_nodes(options):
        return ()
    paths = dict.fromkeys(path for device in devices for path in _nodes(device, caps))
    return tuple(_spec(options, path) for path in paths)


def optional_paths(options: gpus.ContainerOptions) -> tuple[str, ...]:
    """Return the host paths that an answer to Allocate omits if they are absent."""
    control = [_on_host(options, path) for path in CONTROL_NODES] if _passes_nodes(options) else []
    return (*control, *(_channel_path(options, number) for number in options.imex.channels))


def _passes_nodes(options: gpus.ContainerOptions) -> bool:
    """Return whether `device_specs` is set and `device_list` has a strategy other than CDI."""
    return options.device_specs and not _CDI.issuperset(options.device_list)


def _environment(
    names: Sequence[str], channels: Sequence[int], options: gpus.ContainerOptions
) -> dict[str, str]:
    strategies = frozenset(options.device_list)
    # set even if CDI provides the devices
    environment = {f"NVIDIA_{feature.upper()}": "enabled" for feature in _features(options)}
    if gpus.DeviceList.ENVVAR in strategies:
        environment[VISIBLE_DEVICES] = ",".join(names)
        if channels:
            environment[_IMEX_CHANNELS] = ",".join(map(str, channels))
    if _MOUNTS in strategies:
        environment[VISIBLE_DEVICES] = _MOUNTS_ROOT
    return environment


def _mounts(names: Sequence[str], channels: Sequence[int]) -> Iterator[advertised.Mount]:
    for name in (*names, *(f"imex/{number}" for number in channels)):
        yield advertised.Mount(
            host_path=_DEV_NULL, container_path=f"{_MOUNTS_ROOT}/{name}", read_only=False
        )


def _qualified(
    names: Sequence[str], channels: Sequence[int], options: gpus.ContainerOptions
) -> Iterator[str]:
    yield from (f"{CDI_VENDOR}/gpu={name}" for name in names)
    yield from (f"{CDI_VENDOR}/imex-channel={number}" for number in channels)
    yield from (f"{CDI_VENDOR}/{feature}=all" for feature in _features(options))


def _features(options: gpus.ContainerOptions) -> Iterator[str]:
    wanted = {"gdrcopy": options.gdrcopy, "gds": options.gds, "mofed": options.mofed}
    return (feature for feature, is_wanted in wanted.items() if is_wanted)


def _nodes(device: gpu.Device, caps: Mapping[str, int]) -> Iterator[str]:
    yield f"/dev/nvidia{device.minor}"
    for name in _capabilities(device):
        yield f"/dev/nvidia-caps/nvidia-cap{caps[name]}"


def _capabilities(device: gpu.Device) -> tuple[str, ...]:
    """Return a MIG device's capabilities, as /proc/driver/nvidia-caps/mig-minors names them.

    A whole GPU has none.
    """
    if device.part.gi is None:
        return ()
    instance = f"gpu{device.minor}/gi{device.part.gi}"
    return f"{instance}/access", f"{instance}/ci{device.part.ci}/access"


def _unknown_node(device: gpu.Device, caps: Mapping[str, int]) -> str:
    """Return why a device node of a device is unknown; empty if all are known."""
    if device.minor is None:
        return "the minor number of its device node is unknown"
    unknown = [name for name in _capabilities(device) if name not in caps]
    return f"{_MIG_MINORS} does not list {unknown[0]}" if unknown else ""


def _channel(number: int) -> str:
    return f"/dev/nvidia-caps-imex-channels/channel{number}"


def _channel_path(options: gpus.ContainerOptions, number: int) -> str:
    return _on_host(options, _channel(number))


def _on_host(options: gpus.ContainerOptions, path: str) -> str:
    return (options.dev_root or options.driver_root).rstrip("/") + path


def _spec(options: gpus.ContainerOptions, path: str) -> advertised.DeviceSpec:
    return advertised.DeviceSpec(
        host_path=_on_host(options, path), container_path=path, permissions="rw"
    )
