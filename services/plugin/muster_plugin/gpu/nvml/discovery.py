"""Adapter: NVML's devices: what GPUs and MIG devices there are, and how they are joined.

Runs in threads. A GPU that cannot be read is told as such and never disturbs the others.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from muster import vocabulary
from muster_plugin.gpu.nvml import decode, library
from muster_plugin.gpu.nvml import mig as nvml_mig
from muster_plugin.model import gpu

Answer = TypeVar("Answer")

_GPUS_MAX: Final = 256
_MIB: Final = 1 << 20
_MACHINE: Final = "class/dmi/id/product_name"
_PCI: Final = "bus/pci/devices"
_NVIDIA: Final = "0x10de"
_CAPABILITIES: Final = "driver/nvidia-caps/mig-minors"
_KERNEL_GPUS: Final = "driver/nvidia/gpus"


class KernelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Where the kernel tells of GPUs."""

    sysfs: Path = Path("/sys")
    proc: Path = Path("/proc")

    def machine(self) -> str | None:
        """Return what the machine calls itself."""
        return _text(self.sysfs / _MACHINE)

    def on_bus(self) -> int:
        """Count NVIDIA's display and 3D controllers on the PCI bus, driver or not."""
        try:
            entries = [*(self.sysfs / _PCI).iterdir()]
        except OSError:
            return 0
        return sum(
            _text(device / "vendor") == _NVIDIA and (_text(device / "class") or "")[:4] == "0x03"
            for device in entries
        )

    def capabilities(self) -> dict[str, int]:
        """Return the minor numbers of MIG's capability nodes; none where MIG cannot be."""
        return decode.capabilities(_text(self.proc / _CAPABILITIES) or "")

    def kernel_gpus(self) -> frozenset[str]:
        """Return the bus ids of the GPUs that the kernel's driver has now."""
        try:
            return frozenset(entry.name for entry in (self.proc / _KERNEL_GPUS).iterdir())
        except OSError:
            return frozenset()

    def pci(self, bus_id: str, fact: str) -> str | None:
        """Return what the kernel says of a PCI device."""
        return _text(self.sysfs / "bus/pci/devices" / decode.sysfs_name(bus_id) / fact)


class DiscoveredGpus(msgspec.Struct, frozen=True, kw_only=True):
    """What answered, and what did not.

    `handles` are by uuid. A GPU that is known and has no handle is in `silent`, with NVML's name
    of the reason; one that is not known is in `unreadable`.
    """

    gpus: tuple[vocabulary.Gpu, ...] = ()
    handles: Mapping[str, library.Handle] = {}
    lost: Mapping[str, str] = {}
    unreadable: tuple[gpu.UnreadableGpu, ...] = ()
    problems: tuple[str, ...] = ()
    count: int = 0
    """How many NVML said there are."""


def discover_gpus(
    nvml: library.Binding, files: KernelFiles, *, previous_gpus: Sequence[vocabulary.Gpu]
) -> DiscoveredGpus:
    """Look at every GPU. `previous_gpus` are those of an earlier look: what a lost one no longer tells.

    Raises NVMLError if NVML cannot even count them, or has to be initialised again.
    """
    previous = {device.uuid: device for device in previous_gpus}
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
                problems.append(
                    f"GPU {index}: its uuid {uuid} is that of GPU {gpus[uuid].index} too; "
                    "it is left out"
                )
                continue
            gpus[uuid] = _gpu(nvml, handle, files, uuid=uuid, index=index, problems=problems)
        except (nvml.NVMLError, UnicodeDecodeError) as error:
            name = _name(nvml, error)
            if uuid not in previous:
                failed.append(gpu.UnreadableGpu(index=index, error=name, uuid=uuid))
                continue
            gpus[uuid] = msgspec.structs.replace(previous[uuid], index=index)
        handles[uuid] = handle
    silent, unreadable = _recognised(failed, previous_gpus, read_uuids=gpus.keys())
    return DiscoveredGpus(
        gpus=tuple(
            sorted(
                (*gpus.values(), *(previous[uuid] for uuid in silent)),
                key=lambda device: (device.index or 0, device.uuid),
            )
        ),
        handles=handles,
        lost=silent,
        unreadable=unreadable,
        problems=tuple(problems),
        count=count,
    )


def _name(nvml: library.Binding, error: Exception) -> str:
    """Return what went wrong with one GPU. Raises it if it is about all of them."""
    code = getattr(error, "value", None)
    if code is not None and library.is_session_ended(nvml, code):
        raise error
    return "no UTF-8" if code is None else decode.error_name(code)


def discover_links(
    nvml: library.Binding, discovered: DiscoveredGpus
) -> tuple[dict[tuple[str, str], gpu.Link], dict[str, frozenset[int]]]:
    """Return what joins each two GPUs, and the NVLinks that are up, by uuid."""
    active = {uuid: _nvlinks(nvml, handle) for uuid, handle in discovered.handles.items()}
    names = {
        first.uuid: decode.sysfs_name(first.pci_bus_id)
        for first in discovered.gpus
        if first.pci_bus_id
    }
    joined = {
        (first, second): gpu.Link(
            level=_level(nvml, discovered.handles[first], discovered.handles[second]),
            # a link that one side calls down is none
            nvlinks=min(
                sum(peer == names.get(second) for peer in active[first].values()),
                sum(peer == names.get(first) for peer in active[second].values()),
            ),
        )
        for first, second in itertools.combinations(sorted(discovered.handles), 2)
    }
    return joined, {uuid: frozenset(links) for uuid, links in active.items()}


def _recognised(
    failed: Iterable[gpu.UnreadableGpu],
    previous_gpus: Iterable[vocabulary.Gpu],
    *,
    read_uuids: Collection[str],
) -> tuple[dict[str, str], tuple[gpu.UnreadableGpu, ...]]:
    """Tell those of the failed that were known by their index from those that never were."""
    by_index = {
        device.index: device.uuid for device in previous_gpus if device.uuid not in read_uuids
    }
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
    """Ask for the facts of a GPU; what cannot be known is None.

    Raises NVMLError if the GPU is lost, or if it is not known what it is: its name, MIG or not.
    """

    def ask(call: Callable[..., Answer], *arguments: object) -> Answer | None:
        try:
            return library.call_if_supported(nvml, call, *arguments)
        except nvml.NVMLError as error:
            if error.value in decode.LOST or library.is_session_ended(nvml, error.value):
                raise
            name = decode.error_name(error.value)
            problems.append(f"GPU {index}: {call.__name__}: {name}")
            return None

    memory = ask(nvml.nvmlDeviceGetMemoryInfo, handle)
    total = memory.total if memory else 0
    compute = ask(nvml.nvmlDeviceGetCudaComputeCapability, handle)
    pci = ask(nvml.nvmlDeviceGetPciInfo, handle)
    bus_id = pci.busId if pci else ""
    mode = ask(nvml.nvmlDeviceGetVirtualizationMode, handle)
    mig = nvml_mig.is_enabled(nvml, handle)
    read = nvml_mig.MigReader(nvml, handle, total_bytes=total)
    numa = files.pci(bus_id, "numa_node") or "" if bus_id else ""
    fabric = ask(fabric_info, nvml, handle)
    device = vocabulary.Gpu(
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
        mig_enabled=mig,
        mig=tuple(read.devices()) if mig else (),
        clique=decode.clique(
            fabric.state, fabric.status, bytes(fabric.clusterUuid), fabric.cliqueId
        )
        if fabric
        else "",
        vgpu=None if mode is None else mode == nvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU,
    )
    problems.extend(f"GPU {index}: {problem}" for problem in read.problems)
    return device


def fabric_info(nvml: library.Binding, handle: library.Handle) -> Any | None:
    """Return NVML's structure about a GPU's NVLink fabric, where driver and product know it."""
    import ctypes  # noqa: PLC0415  # loaded with the library

    info = nvml.c_nvmlGpuFabricInfoV_t()
    answered = library.call_if_supported(
        nvml, nvml.nvmlDeviceGetGpuFabricInfoV, handle, ctypes.byref(info)
    )
    return None if answered is None else info


def nvlink_is_up(nvml: library.Binding, handle: library.Handle, link: int) -> bool | None:
    """Say whether a link is up; None where there is no such link."""
    try:
        state = library.call_if_supported(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link)
    except nvml.NVMLError as error:
        if error.value in decode.ABSENT:
            return None
        raise
    return None if state is None else bool(state)


def _nvlinks(nvml: library.Binding, handle: library.Handle) -> dict[int, str]:
    """Return the links that are up, with the bus id at their other end as sysfs writes it."""
    up: dict[int, str] = {}
    try:
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            state = nvlink_is_up(nvml, handle, link)
            if state is None:
                break
            if state:
                peer = library.call_if_supported(
                    nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link
                )
                up[link] = decode.sysfs_name(peer.busId) if peer else ""
    except nvml.NVMLError as error:
        if library.is_session_ended(nvml, error.value):
            raise
    return up


def _level(
    nvml: library.Binding, first: library.Handle, second: library.Handle
) -> gpu.TopologyLevel:
    try:
        level = library.call_if_supported(
            nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, first, second
        )
    except nvml.NVMLError as error:
        if library.is_session_ended(nvml, error.value):
            raise
        return gpu.TopologyLevel.SYSTEM
    return gpu.TopologyLevel.SYSTEM if level is None else decode.topology_level(level)


def _text(path: Path) -> str | None:
    try:
        return path.read_text("utf-8", errors="replace").strip() or None
    except OSError:
        return None
