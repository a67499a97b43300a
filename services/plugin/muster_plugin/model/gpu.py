"""Pure: observations of the node's GPUs: a scan of all of them, and later events.

The source, NVML or a simulation, reports these types; other modules decide what they mean. A GPU
is named by its uuid, because index and device number change between boots.
"""

import enum
from collections.abc import Mapping
from datetime import datetime
from typing import Final, TypeAlias

import msgspec

from muster import vocabulary

_NO_LINKS: Final[Mapping[tuple[str, str], "Link"]] = {}
_NO_CAPS: Final[Mapping[str, int]] = {}


class Driver(enum.StrEnum):
    """Whether the driver is available, and if not, why."""

    READY = "ready"
    NO_LIBRARY = "no_library"
    NOT_LOADED = "not_loaded"
    TOO_OLD = "too_old"
    NO_PERMISSION = "no_permission"
    REPLACED = "replaced"
    """The kernel's driver is not the version of our library: only a new process can use it."""
    SILENT = "silent"
    """A call has not returned in time."""
    FAILED = "failed"


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A whole GPU, one GPU instance of it (`gi`), or one MIG device (`gi` and `ci`)."""

    gpu: str
    gi: int | None = None
    ci: int | None = None

    def covers(self, other: "Part") -> bool:
        """Return whether a fault of this part affects the other.

        A fault of an instance affects the whole GPU, which is allocated in one piece.
        """
        if self.gpu != other.gpu:
            return False
        if self.gi is None or other.gi is None:
            return True
        return self.gi == other.gi and (self.ci is None or other.ci in {None, self.ci})


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU or MIG device that can be allocated.

    `uuid` and `index` ("0", or "0:1" for the second MIG device of the first GPU) are its names for
    the container runtime; `minor` is the number of its GPU's device node.
    """

    part: Part
    uuid: str
    index: str
    minor: int | None = None


class TopologyLevel(enum.IntEnum):
    """How close two GPUs are on the PCIe bus (nvmlGpuTopologyLevel_t)."""

    SAME_BOARD = 0
    ONE_SWITCH = 10
    SWITCHES = 20
    HOST_BRIDGE = 30
    NODE = 40
    SYSTEM = 50


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """How two GPUs are connected; `nvlinks` are the direct ones, not those to a switch."""

    level: TopologyLevel = TopologyLevel.SYSTEM
    nvlinks: int = 0


class UnreadableGpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU that NVML counts and cannot read; `uuid` where it is known.

    `error` is NVML's name of it, such as GPU_IS_LOST.
    """

    index: int
    error: str
    uuid: str = ""


class Poll(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one GPU; None is unknown, never bad.

    `error` is NVML's name of the error if the GPU did not answer, such as GPU_IS_LOST.
    """

    gpu: str
    at: datetime
    error: str = ""
    recovery_action: int | None = None
    """Field 230: 0 none, 1 reset, 2 reboot, 3 drain P2P, 4 drain and reset, 5.. see nvml.h."""
    ecc_uncorrected: int | None = None
    """Uncorrected errors since the driver was loaded."""
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    retired_pending: bool | None = None
    slowdowns: tuple[str, ...] = ()
    """The active ones of HW_SLOWDOWN, SW_THERMAL, HW_THERMAL, POWER_BRAKE."""
    temperature_c: int | None = None
    slowdown_c: int | None = None
    """The temperature at which it slows down."""
    nvlinks_down: tuple[int, ...] = ()
    fabric: str | None = None
    """not_supported, not_started, in_progress, completed or failed."""


class Xid(msgspec.Struct, frozen=True, kw_only=True):
    """The driver reported an XID on a part of a GPU."""

    part: Part
    xid: int
    at: datetime


class MonitoringChanged(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU can be monitored, or no longer; `problem` is empty if it can."""

    gpu: str
    at: datetime
    problem: str = ""


class RepairReported(msgspec.Struct, frozen=True, kw_only=True):
    """A report that a GPU was repaired or reset: after one XID, or after every fault."""

    gpu: str
    at: datetime
    by: str
    xid: int | None = None


Observation: TypeAlias = Poll | Xid | MonitoringChanged | RepairReported


class Effect(enum.StrEnum):
    """The effect of a fault on its part; only UNHEALTHY is reported to the kubelet."""

    UNHEALTHY = "unhealthy"
    DEGRADED = "degraded"
    UNMONITORED = "unmonitored"


class _Fault(msgspec.Struct, frozen=True, kw_only=True):
    part: Part
    effect: Effect
    code: str
    reason: str
    at: datetime
    policy: str = ""
    evidence: tuple[vocabulary.Evidence, ...] = ()


class FaultBegan(_Fault, frozen=True, kw_only=True):
    """A fault of a part of a GPU began.

    A part has at most one fault of each `code`. `policy` is the rule that decided, with its source.
    """


class FaultEnded(_Fault, frozen=True, kw_only=True):
    """The fault with this `code` ended; `reason` and `evidence` say why."""


FaultChange: TypeAlias = FaultBegan | FaultEnded


class Scan(msgspec.Struct, frozen=True, kw_only=True):
    """A scan of all GPUs. Its `polls` make a GPU that is bad from the start Unhealthy at once.

    `links` are keyed by both uuids in sorted order. `caps` are the minor numbers of MIG's
    capability nodes by their name in /proc/driver/nvidia-caps/mig-minors (`gpu0/gi3/access`).
    """

    driver: Driver = Driver.READY
    problem: str = ""
    on_bus: int = 0
    """The number of NVIDIA GPUs on the PCI bus, where the driver is not available."""
    driver_version: str | None = None
    cuda_version: str | None = None
    machine: str | None = None
    gpus: tuple[vocabulary.Gpu, ...] = ()
    unreadable: tuple[UnreadableGpu, ...] = ()
    polls: tuple[Poll, ...] = ()
    links: Mapping[tuple[str, str], Link] = _NO_LINKS
    caps: Mapping[str, int] = _NO_CAPS
    simulated: bool = False


def latest_scan(previous: Scan | None, current: Scan) -> Scan:
    """Return the scan that is valid after another one.

    While a driver fails to answer its GPUs stay, and are reported as unmonitored. When the driver
    is gone, so are its GPUs.
    """
    if previous is None or current.driver not in {Driver.SILENT, Driver.FAILED}:
        return current
    return previous
