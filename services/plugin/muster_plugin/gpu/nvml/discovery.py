"""Adapter: discovers the GPUs, their MIG devices and their connections through NVML.

It runs in threads. A GPU that cannot be read is reported as lost or unreadable and does not
affect the others.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from muster import vocabulary
from muster_plugin.gpu.nvml import decode, library
from muster_plugin.model import gpu

Answer = TypeVar("Answer")

_GPUS_MAX: Final = 256
_MIB: Final = 1 << 20
_NVIDIA: Final = "0x10de"
_MIG_DEVICES_MAX: Final = 64
_UNKNOWN_PROFILE: Final = "unknown"
_MIG_ATTRIBUTES: Final = (
    ("multiprocessors", "multiprocessorCount"),
    ("gi_slices", "gpuInstanceSliceCount"),
    ("ci_slices", "computeInstanceSliceCount"),
    ("copy_engines", "sharedCopyEngineCount"),
    ("decoders", "sharedDecoderCount"),
    ("encoders", "sharedEncoderCount"),
    ("jpeg_engines", "sharedJpegCount"),
    ("ofa_engines", "sharedOfaCount"),
    ("memory_mib", "memorySizeMB"),
)


class KernelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Reads the kernel's files about GPUs."""

    sysfs: Path = Path("/sys")
    proc: Path = Path("/proc")

    def machine(self) -> str | None:
        """Return the product name of the machine; None if unknown."""
        return _text(self.sysfs / "class/dmi/id/product_name")

    def on_bus(self) -> int:
        """Count NVIDIA's display and 3D controllers on the PCI bus, with or without a driver."""
        try:
            entries = [*(self.sysfs / "bus/pci/devices").iterdir()]
        except OSError:
            return 0
        return sum(
            _text(entry / "vendor") == _NVIDIA and (_text(entry / "class") or "")[:4] == "0x03"
            for entry in entries
        )

    def capabilities(self) -> dict[str, int]:
        """Return the minor number of each MIG capability; empty if MIG is not supported."""
        return decode.capabilities(_text(self.proc / "driver/nvidia-caps/mig-minors") or "")

    def kernel_gpus(self) -> frozenset[str]:
        """Return the bus ids of the GPUs that the kernel's driver currently manages."""
        try:
            return frozenset(entry.name for entry in (self.proc / "driver/nvidia/gpus").iterdir())
        except OSError:
            return frozenset()

    def pci(self, bus_id: str, attribute: str) -> str | None:
        """Return an attribute of a PCI device; None if it is empty or cannot be read."""
        return _text(self.sysfs / "bus/pci/devices" / decode.sysfs_name(bus_id) / attribute)


class DiscoveredGpus(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs that answered, and those that did not.

    `handles` are keyed by uuid. `lost` has the GPUs of an earlier scan that have no handle now, by
    uuid, with NVML's name for the error; `gpus` includes these GPUs. `unreadable` lists the GPUs
    that were never read. `count` is the number of GPUs that NVML reports.
    """

    gpus: tuple[vocabulary.Gpu, ...] = ()
    handles: Mapping[str, library.Handle] = {}
    lost: Mapping[str, str] = {}
    unreadable: tuple[gpu.UnreadableGpu, ...] = ()
    problems: tuple[str, ...] = ()
    count: int = 0


def discover_gpus(
    nvml: library.Binding, files: KernelFiles, previous: Sequence[vocabulary.Gpu]
) -> DiscoveredGpus:
    """Read every GPU; a GPU that cannot be read now is taken from `previous`, the last scan.

    Raises NVMLError if NVML cannot even count the GPUs, or has to be initialised again.
    """
    by_uuid = {device.uuid: device for device in previous}
    gpus: dict[str, vocabulary.Gpu] = {}
    handles: dict[str, library.Handle] = {}
    failed: list[gpu.UnreadableGpu] = []
    problems: list[str] = []
    count = nvml.nvmlDeviceGetCount()
    for index in range(min(count, _GPUS_MAX)):
        uuid = ""
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = nvml.nvmlDeviceGetUUID(handle)
            if uuid in handles:
                other = f"its uuid {uuid} is also that of GPU {gpus[uuid].index}"
                problems.append(f"GPU {index} is left out: {other}")
                continue
            gpus[uuid] = _gpu(nvml, handle, files, uuid=uuid, index=index, problems=problems)
        except (nvml.NVMLError, UnicodeDecodeError) as error:
            is_text = isinstance(error, UnicodeDecodeError)
            name = "not UTF-8" if is_text else library.raise_if_ended(nvml, error)
            if uuid not in by_uuid:
                failed.append(gpu.UnreadableGpu(index=index, error=name, uuid=uuid))
                continue
            gpus[uuid] = msgspec.structs.replace(by_uuid[uuid], index=index)
        handles[uuid] = handle
    lost, unreadable = _split_failed(failed, previous, read=gpus.keys())
    every = [*gpus.values(), *(by_uuid[uuid] for uuid in lost)]
    return DiscoveredGpus(
        gpus=tuple(sorted(every, key=lambda device: (device.index or 0, device.uuid))),
        handles=handles,
        lost=lost,
        unreadable=unreadable,
        problems=tuple(problems),
        count=count,
    )


def discover_links(
    nvml: library.Binding, discovered: DiscoveredGpus
) -> tuple[dict[tuple[str, str], gpu.Link], dict[str, frozenset[int]]]:
    """Return the link of each pair of GPUs with handles, and the NVLinks that are up, by uuid."""
    handles = discovered.handles
    active = {uuid: _active_nvlinks(nvml, handle) for uuid, handle in handles.items()}
    names = {
        device.uuid: decode.sysfs_name(device.pci_bus_id)
        for device in discovered.gpus
        if device.pci_bus_id
    }
    links = {
        (first, second): gpu.Link(
            level=_level(nvml, handles[first], handles[second]),
            # a link counts only if both ends report it as up
            nvlinks=min(
                sum(peer == names.get(second) for peer in active[first].values()),
                sum(peer == names.get(first) for peer in active[second].values()),
            ),
        )
        for first, second in itertools.combinations(sorted(handles), 2)
    }
    return links, {uuid: frozenset(peers) for uuid, peers in active.items()}


def _split_failed(
    failed: Iterable[gpu.UnreadableGpu],
    previous: Iterable[vocabulary.Gpu],
    *,
    read: Collection[str],
) -> tuple[dict[str, str], tuple[gpu.UnreadableGpu, ...]]:
    """Return the errors of failed GPUs that an earlier scan read, and all other failed GPUs."""
    by_index = {device.index: device.uuid for device in previous if device.uuid not in read}
    lost = {by_index[device.index]: device.error for device in failed if device.index in by_index}
    return lost, tuple(device for device in failed if device.index not in by_index)


def _gpu(
    nvml: library.Binding,
    handle: library.Handle,
    files: KernelFiles,
    *,
    uuid: str,
    index: int,
    problems: list[str],
) -> vocabulary.Gpu:
    """Read the properties of a GPU; None stands for an unknown property.

    Raises NVMLError if the GPU is lost, if its name, MIG mode or MIG devices cannot be read, or if
    NVML has to be initialised again; UnicodeDecodeError if its name is not UTF-8.
    """

    def ask(call: Callable[..., Answer], *arguments: object) -> Answer | None:
        try:
            return library.call_if_supported(nvml, call, *arguments)
        except nvml.NVMLError as error:
            if error.value in decode.LOST:
                raise
            name = library.raise_if_ended(nvml, error)
            problems.append(f"GPU {index}: {call.__name__}: {name}")
            return None

    memory = ask(nvml.nvmlDeviceGetMemoryInfo, handle)
    total = memory.total if memory else 0
    compute = ask(nvml.nvmlDeviceGetCudaComputeCapability, handle)
    pci = ask(nvml.nvmlDeviceGetPciInfo, handle)
    bus_id = pci.busId if pci else ""
    mode = ask(nvml.nvmlDeviceGetVirtualizationMode, handle)
    mig_enabled = is_mig_enabled(nvml, handle)
    reader = MigReader(nvml, handle, total_bytes=total)
    numa = files.pci(bus_id, "numa_node") or "" if bus_id else ""
    fabric = ask(library.fabric_info, nvml, handle)
    physical = vocabulary.Gpu(
        uuid=uuid,
        product=nvml.nvmlDeviceGetName(handle),
        memory_mib=total // _MIB or None,
        index=index,
        minor=ask(nvml.nvmlDeviceGetMinorNumber, handle),
        serial=ask(nvml.nvmlDeviceGetSerial, handle),
        compute_capability=f"{compute[0]}.{compute[1]}" if compute else None,
        pci_bus_id=bus_id or None,
        pci_class=files.pci(bus_id, "class") if bus_id else None,
        numa_node=int(numa) if numa.isdecimal() else None,
        mig_enabled=mig_enabled,
        mig=tuple(reader.devices()) if mig_enabled else (),
        clique=decode.clique(
            fabric.state, fabric.status, bytes(fabric.clusterUuid), fabric.cliqueId
        )
        if fabric
        else "",
        vgpu=None if mode is None else mode == nvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU,
    )
    problems.extend(f"GPU {index}: {problem}" for problem in reader.problems)
    return physical


def _active_nvlinks(nvml: library.Binding, handle: library.Handle) -> dict[int, str]:
    """Return the links that are up, each with the bus id of its other end as sysfs writes it.

    A bus id is empty if it is unknown.
    """
    active: dict[int, str] = {}
    try:
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            state = library.nvlink_is_up(nvml, handle, link)
            if state is None:
                break
            if state:
                call = nvml.nvmlDeviceGetNvLinkRemotePciInfo
                peer = library.call_if_supported(nvml, call, handle, link)
                active[link] = decode.sysfs_name(peer.busId) if peer else ""
    except nvml.NVMLError as error:
        library.raise_if_ended(nvml, error)
    return active


def _level(
    nvml: library.Binding, first: library.Handle, second: library.Handle
) -> gpu.TopologyLevel:
    call = nvml.nvmlDeviceGetTopologyCommonAncestor
    try:
        level = library.call_if_supported(nvml, call, first, second)
    except nvml.NVMLError as error:
        library.raise_if_ended(nvml, error)
        level = None
    return gpu.TopologyLevel.SYSTEM if level is None else decode.topology_level(level)


def _text(path: Path) -> str | None:
    try:
        return path.read_text("utf-8", errors="replace").strip() or None
    except OSError:
        return None


def is_mig_enabled(nvml: library.Binding, handle: library.Handle) -> bool | None:
    """Return whether MIG mode is on; None if it is not supported."""
    mode = library.call_if_supported(nvml, nvml.nvmlDeviceGetMigMode, handle)
    return None if mode is None else bool(mode[0])


def mig_uuids(nvml: library.Binding, handle: library.Handle) -> tuple[str, ...] | None:
    """Return the uuids of a GPU's MIG devices; None if MIG is off or not supported."""
    if not is_mig_enabled(nvml, handle):
        return None
    return tuple(nvml.nvmlDeviceGetUUID(device) for _, device in _mig_handles(nvml, handle))


class MigReader:
    """Reads the MIG devices of one GPU; `problems` name unreadable devices."""

    def __init__(self, nvml: library.Binding, handle: library.Handle, *, total_bytes: int) -> None:
        self._nvml = nvml
        self._handle = handle
        self._total_bytes = total_bytes
        self._gi_profiles: dict[int, tuple[int, int]] | None = None
        self.problems: list[str] = []

    def devices(self) -> Iterator[vocabulary.MigDevice]:
        """Yield every MIG device that exists and can be read."""
        for index, device in _mig_handles(self._nvml, self._handle):
            try:
                yield self._device(index, device)
            except self._nvml.NVMLError as error:
                if error.value in decode.LOST:
                    raise
                name = library.raise_if_ended(self._nvml, error)
                if error.value not in decode.ABSENT:
                    self.problems.append(f"MIG device {index} cannot be read: {name}")

    def _device(self, index: int, device: library.Handle) -> vocabulary.MigDevice:
        nvml = self._nvml
        gi = nvml.nvmlDeviceGetGpuInstanceId(device)
        ci = nvml.nvmlDeviceGetComputeInstanceId(device)
        attributes = library.call_if_supported(nvml, nvml.nvmlDeviceGetAttributes, device)
        return vocabulary.MigDevice(
            uuid=nvml.nvmlDeviceGetUUID(device),
            index=index,
            profile=self._profile(device, gi, ci),
            gi=gi,
            ci=ci,
            **{
                ours: int(getattr(attributes, theirs))
                for ours, theirs in _MIG_ATTRIBUTES
                if attributes
            },
        )

    def _profile(self, device: library.Handle, gi: int, ci: int) -> str:
        """Return the profile as NVIDIA's tools derive it, or that in the name, or `unknown`."""
        nvml = self._nvml
        ask = functools.partial(library.call_if_supported, nvml)
        instance = ask(nvml.nvmlDeviceGetGpuInstanceById, self._handle, gi)
        compute = instance and ask(nvml.nvmlGpuInstanceGetComputeInstanceById, instance, ci)
        if instance and compute and self._total_bytes:
            gi_id = nvml.nvmlGpuInstanceGetInfo(instance).profileId
            ci_id = nvml.nvmlComputeInstanceGetInfo(compute).profileId
            gi_profile = self._profiles_by_id().get(gi_id)
            ci_profile = self._ci_profile(instance, ci_id)
            if gi_profile is not None and ci_profile is not None:
                return decode.profile(
                    gi_profile[0],
                    ci_profile,
                    memory_mib=gi_profile[1],
                    total_bytes=self._total_bytes,
                )
        return decode.named_profile(ask(nvml.nvmlDeviceGetName, device) or "") or _UNKNOWN_PROFILE

    def _profiles_by_id(self) -> dict[int, tuple[int, int]]:
        """Return the number and memory (MiB) of each GPU instance profile, by the profile's id."""
        if self._gi_profiles is None:
            nvml = self._nvml
            profiles: dict[int, tuple[int, int]] = {}
            for number in range(decode.GI_PROFILES):
                info = _profile_info(
                    nvml, nvml.nvmlDeviceGetGpuInstanceProfileInfo, self._handle, number, 1
                )
                if info is not None:
                    profiles.setdefault(info.id, (number, info.memorySizeMB))
            self._gi_profiles = profiles
        return self._gi_profiles

    def _ci_profile(self, instance: library.Handle, profile_id: int) -> int | None:
        nvml = self._nvml
        for number in range(decode.CI_PROFILES):
            info = _profile_info(
                nvml, nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo, instance, number, 0, 1
            )
            if info is not None and info.id == profile_id:
                return number
        return None


def _profile_info(
    nvml: library.Binding, call: Callable[..., Answer], *arguments: object
) -> Answer | None:
    """Return a MIG profile; None if the product or the driver does not support it."""
    try:
        return library.call_if_supported(nvml, call, *arguments)
    except nvml.NVMLError as error:
        if error.value in decode.ABSENT:
            return None
        raise


def _mig_handles(
    nvml: library.Binding, handle: library.Handle
) -> Iterator[tuple[int, library.Handle]]:
    count = library.call_if_supported(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
    for index in range(min(count, _MIG_DEVICES_MAX)):
        try:
            device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError as error:
            if error.value not in decode.ABSENT:
                raise
        else:
            yield index, device
