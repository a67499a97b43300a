"""Pure: decodes NVML's numbers: return codes, field values, MIG profiles, bus ids, capabilities.

Numbers are those of nvml.h 13.3. MIG profiles are named as NVIDIA's tools name them (go-nvlib
pkg/nvlib/device/mig_profile.go).
"""

import enum
import math
import re
from collections.abc import Collection, Mapping
from typing import Final

from muster_plugin.model import gpu


class Code(enum.IntEnum):
    """The values of nvmlReturn_t that nvml.h names."""

    SUCCESS = 0
    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    ALREADY_INITIALIZED = 5
    NOT_FOUND = 6
    INSUFFICIENT_SIZE = 7
    INSUFFICIENT_POWER = 8
    DRIVER_NOT_LOADED = 9
    TIMEOUT = 10
    IRQ_ISSUE = 11
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    CORRUPTED_INFOROM = 14
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    OPERATING_SYSTEM = 17
    LIB_RM_VERSION_MISMATCH = 18
    IN_USE = 19
    MEMORY = 20
    NO_DATA = 21
    VGPU_ECC_NOT_SUPPORTED = 22
    INSUFFICIENT_RESOURCES = 23
    FREQ_NOT_SUPPORTED = 24
    ARGUMENT_VERSION_MISMATCH = 25
    DEPRECATED = 26
    NOT_READY = 27
    GPU_NOT_FOUND = 28
    INVALID_STATE = 29
    RESET_TYPE_NOT_SUPPORTED = 30
    UNKNOWN = 999


UNSUPPORTED: Final = frozenset(
    {
        Code.NOT_SUPPORTED,
        Code.NO_PERMISSION,
        Code.FUNCTION_NOT_FOUND,
        Code.NO_DATA,
        Code.VGPU_ECC_NOT_SUPPORTED,
        Code.ARGUMENT_VERSION_MISMATCH,
        Code.DEPRECATED,
    }
)
"""The codes of calls that the product, driver or permissions do not allow; not signs of a fault."""
LOST: Final = frozenset({Code.GPU_IS_LOST, Code.RESET_REQUIRED})
"""The codes that mean that a GPU cannot be queried."""
SESSION_ENDED: Final = frozenset(
    {Code.UNINITIALIZED, Code.DRIVER_NOT_LOADED, Code.LIB_RM_VERSION_MISMATCH, Code.GPU_NOT_FOUND}
)
"""The codes after which NVML has to be initialised again if it cannot even count the GPUs."""
ABSENT: Final = frozenset({Code.NOT_FOUND, Code.INVALID_ARGUMENT})
"""The codes that mean that there is no such MIG device, MIG profile or NVLink (any more)."""

LIBRARY: Final = "libnvidia-ml.so.1"
MOUNTED_DRIVER_ROOT: Final = "/driver-root"
"""Where NVIDIA's manifests mount the driver root (k8s-device-plugin, DRIVER_ROOT_CTR_PATH)."""
_FOLDERS: Final = (
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
)


def error_name(code: int) -> str:
    """Return NVML's name for a return code, or the number if it has none."""
    return Code(code).name if code in set(Code) else str(code)


def library_paths(library: str, driver_root: str) -> tuple[str, ...]:
    """Return the paths to try, in order; `library` alone if it is set.

    If it is not set, the caller tries these paths before the dynamic loader's search.
    """
    if library:
        return (library,)
    return tuple(
        f"{root}/{folder}/{LIBRARY}" for root in _roots(driver_root) for folder in _FOLDERS
    )


def _roots(driver_root: str) -> tuple[str, ...]:
    """Return the driver's possible roots without `/`, which only the dynamic loader searches."""
    configured = driver_root.rstrip("/")
    return tuple(dict.fromkeys(filter(None, (configured, MOUNTED_DRIVER_ROOT))))


def library_problem(library: str, driver_root: str, why: str) -> str:
    """Return a text: where the library was searched for, why that failed, and what to do."""
    if library:
        return f"{why}; only this path was tried; correct or remove gpus.library, which sets it"
    roots = " or ".join(_roots(driver_root))
    return (
        f"{LIBRARY} is neither below {roots} ({', '.join(_FOLDERS)}) "
        f"nor found by the loader ({why}); install NVIDIA's driver, mount it into this container, "
        "or set gpus.library"
    )


def init_failure(code: int) -> tuple[gpu.Driver, str]:
    """Return the driver's state, and a text: why NVML cannot be initialised, and what to do."""
    driver, explanation = _CANNOT_INIT.get(code, (gpu.Driver.FAILED, "muster will try again"))
    return driver, f"nvmlInit failed with {error_name(code)}: {explanation}"


def scan_failure(code: int) -> tuple[gpu.Driver, str]:
    """Return the driver's state, and a text: why initialised NVML cannot list GPUs."""
    driver, _ = _CANNOT_INIT.get(code, (gpu.Driver.FAILED, ""))
    return driver, f"NVML is initialised, but cannot list the GPUs: {error_name(code)}"


_NODES: Final = "let this container open /dev/nvidiactl and /dev/nvidia<minor>"
_CANNOT_INIT: Final[Mapping[int, tuple[gpu.Driver, str]]] = {
    Code.DRIVER_NOT_LOADED: (
        gpu.Driver.NOT_LOADED,
        (
            "the kernel module is not loaded, or its device nodes are not visible here; "
            "load the driver (modprobe nvidia)"
        ),
    ),
    Code.FUNCTION_NOT_FOUND: (
        gpu.Driver.TOO_OLD,
        "the driver lacks a function that muster needs; upgrade the driver",
    ),
    Code.NO_PERMISSION: (gpu.Driver.NO_PERMISSION, f"not permitted; {_NODES}"),
    Code.OPERATING_SYSTEM: (
        gpu.Driver.NO_PERMISSION,
        f"the operating system denies access (a cgroup or user id); {_NODES}",
    ),
    Code.LIB_RM_VERSION_MISMATCH: (
        gpu.Driver.REPLACED,
        (
            "the loaded driver and the library have different versions; "
            "restart this process, or reboot the node to finish the upgrade"
        ),
    ),
    Code.UNKNOWN: (
        gpu.Driver.FAILED,
        (
            "a frequent cause is that `systemctl daemon-reload` rewrote the container's device "
            "cgroup; muster will initialise NVML again; if that fails, restart the container"
        ),
    ),
}


def cuda_version(number: int) -> str:
    """Return a CUDA version as text: `12.8` for 12080 (nvmlSystemGetCudaDriverVersion)."""
    return f"{number // 1000}.{number % 1000 // 10}"


def sysfs_name(bus_id: str) -> str:
    """Return the kernel's name of a PCI device: `0000:1a:00.0` for `00000000:1A:00.0`.

    A domain that needs more than four digits keeps all eight.
    """
    name = bus_id.lower()
    return name[4:] if re.match("0{4}[0-9a-f]{4}:", name) else name


def capabilities(text: str) -> dict[str, int]:
    """Return the minor number of each capability in /proc/driver/nvidia-caps/mig-minors.

    A line is `gpu0/gi3/access 30`; `gpu0` has the number of the GPU's device node.
    """
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}  # noqa: PLR2004  # a name and a number


_FABRIC_STATES: Final = ("not_supported", "not_started", "in_progress", "completed")
_COMPLETED: Final = 3


def fabric(state: int, status: int) -> str | None:
    """Return the state of a GPU's NVLink fabric (nvmlGpuFabricState_t); None if unknown."""
    if state == _COMPLETED and status != Code.SUCCESS:
        return "failed"
    return _FABRIC_STATES[state] if state < len(_FABRIC_STATES) else None


def clique(state: int, status: int, cluster: bytes, clique_id: int) -> str:
    """Return `<cluster uuid>.<clique id>`; empty if the GPU is not in a fabric that is ready."""
    if state != _COMPLETED or status != Code.SUCCESS or not any(cluster):
        return ""
    digits = cluster.hex()
    uuid = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
    return f"{uuid}.{clique_id}"


_SLOWDOWNS: Final[Mapping[int, str]] = {
    0x08: "HW_SLOWDOWN",
    0x20: "SW_THERMAL",
    0x40: "HW_THERMAL",
    0x80: "POWER_BRAKE",
}


def links_down(links: Mapping[int, bool | None]) -> tuple[int, ...] | None:
    """Return the NVLinks that are down; None if none is down, but the state of one is unknown."""
    down = tuple(link for link, is_up in links.items() if is_up is False)
    return None if not down and None in links.values() else down


def slowdowns(reasons: int) -> tuple[str, ...]:
    """Return the names of the involuntary slowdowns in nvmlClocksEventReasons."""
    return tuple(name for bit, name in _SLOWDOWNS.items() if reasons & bit)


def topology_level(number: int) -> gpu.TopologyLevel:
    """Return how close two GPUs are; an unknown level counts as distant."""
    return (
        gpu.TopologyLevel(number) if number in set(gpu.TopologyLevel) else gpu.TopologyLevel.SYSTEM
    )


def value_member(value_type: int) -> str:
    """Return which member of nvmlValue_t holds a field's value (nvmlValueType_t)."""
    members = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
    return members[value_type] if value_type < len(members) else "ullVal"


NO_INSTANCE: Final = 0xFFFFFFFF


def event_part(uuid: str, gi: int, ci: int) -> gpu.Part:
    """Return the part that an event concerns: the whole GPU unless it names an instance."""
    if gi == NO_INSTANCE:
        return gpu.Part(gpu=uuid)
    return gpu.Part(gpu=uuid, gi=gi, ci=None if ci == NO_INSTANCE else ci)


GI_PROFILES: Final = 18
CI_PROFILES: Final = 9
# NVML_GPU_INSTANCE_PROFILE_*: the number of slices, and the suffix of the name
_GI: Final = (
    *((1, ""), (2, ""), (3, ""), (4, ""), (7, ""), (8, ""), (6, "")),
    *((1, "+me"), (2, "+me"), (1, "")),
    *((1, "+gfx"), (2, "+gfx"), (4, "+gfx")),
    *((1, "-me"), (2, "-me"), (1, "+me.all"), (2, "+me.all")),
    (3, "+gfx"),
)
# NVML_COMPUTE_INSTANCE_PROFILE_*
_CI: Final = (1, 2, 3, 4, 7, 8, 6, 1, 7)
_GIB: Final = 1 << 30
_MIB: Final = 1 << 20
_EIGHTHS: Final = 8


def profile(gi: int, ci: int, *, memory_mib: int, total_bytes: int) -> str:
    """Return the name of a MIG profile: `1g.10gb`, `1c.3g.40gb`, `1g.10gb+me`.

    `gi` and `ci` are NVML's numbers of the two profiles; `memory_mib` is the memory of the GPU
    instance.
    """
    slices, suffix = _GI[gi]
    compute = f"{_CI[ci]}c." if _CI[ci] != slices else ""
    return f"{compute}{slices}g.{_gigabytes(memory_mib, total_bytes)}gb{suffix}"


def _gigabytes(memory_mib: int, total_bytes: int) -> int:
    """Return the gigabytes in a MIG profile's name, as go-nvlib calculates them.

    The instance's share is rounded up to eighths, and the GPU's memory to whole GiB.
    """
    share = math.ceil(memory_mib * _MIB / total_bytes * _EIGHTHS) / _EIGHTHS
    return math.floor(share * math.ceil(total_bytes / _GIB) + 0.5)


def named_profile(name: str) -> str:
    """Return the profile at the end of a MIG device's name; empty if there is none.

    Newer drivers use names such as `NVIDIA H100 80GB HBM3 MIG 1g.10gb`.
    """
    _, _, after = name.rpartition(" MIG ")
    return after if re.fullmatch(r"(\d+c\.)?\d+g\.\d+gb([+-][a-z.]+)*", after) else ""


def expected_links(
    active: Mapping[str, Collection[int]],
    products: Mapping[str, str],
    before: Mapping[str, Collection[int]],
) -> dict[str, frozenset[int]]:
    """Return the NVLinks that should be up on each GPU, by uuid.

    These are the links that are up now or were up before, and those that are up on more than half
    of the GPUs of the same product: only a comparison distinguishes a link that was down from the
    start from a link without a cable.
    """
    expected: dict[str, frozenset[int]] = {}
    for uuid, links in active.items():
        alike = [active[other] for other in active if products[other] == products[uuid]]
        common = {
            link
            for link in set().union(*alike)
            if 2 * sum(link in others for others in alike) > len(alike)
        }
        expected[uuid] = frozenset({*links, *common, *before.get(uuid, ())})
    return expected
