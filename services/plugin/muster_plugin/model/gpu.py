"""Pure: What was seen of the node's GPUs: one look at all of them, and what is observed later.

NVML, or whoever stands in for it, says these words; what they mean is decided elsewhere. A GPU is
named by its uuid: index and device number change between boots.
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
    """Whether the driver can be asked, and if not, why not."""

    READY = "ready"
    NO_LIBRARY = "no_library"
    NOT_LOADED = "not_loaded"
    TOO_OLD = "too_old"
    NO_PERMISSION = "no_permission"
    REPLACED = "replaced"
    """The kernel's driver is another than our library: only a new process can speak to it."""
    SILENT = "silent"
    """A call did not come back in time."""
    FAILED = "failed"


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A whole GPU, one GPU instance of it (`gi`), or one MIG device (`gi` and `ci`)."""

    gpu: str
    gi: int | None = None
    ci: int | None = None

    def covers(self, other: "Part") -> bool:
        """Say whether what befalls this part befalls the other.

        What befalls an instance befalls the whole GPU that is handed out in one piece.
        """
        if self.gpu != other.gpu:
            return False
        if self.gi is None or other.gi is None:
            return True
        return self.gi == other.gi and (self.ci is None or other.ci in {None, self.ci})


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU or MIG device as it can be handed out.

    `uuid` and `index` ("0", or "0:1" for the second MIG device of the first GPU) are what the
    container runtime may call it; `minor` is the number of its GPU's device node.
    """

    part: Part
    uuid: str
    index: str
    minor: int | None = None


class TopologyLevel(enum.IntEnum):
    """How near two GPUs are on the PCIe bus (nvmlGpuTopologyLevel_t)."""

    SAME_BOARD = 0
    ONE_SWITCH = 10
    SWITCHES = 20
    HOST_BRIDGE = 30
    NODE = 40
    SYSTEM = 50


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """What joins two GPUs; `nvlinks` are the direct ones, not those to a switch."""

    level: TopologyLevel = TopologyLevel.SYSTEM
    nvlinks: int = 0


class UnreadableGpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU that NVML counts and cannot read; `uuid` where an earlier look knew it.

    `error` is NVML's name of it, such as GPU_IS_LOST.
    """

    index: int
    error: str
    uuid: str = ""


class Poll(msgspec.Struct, frozen=True, kw_only=True):
    """What one GPU answered when asked for its state; None is unknown, never bad.

    `error` is NVML's name of why it did not answer, such as GPU_IS_LOST; empty if it did.
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
    """Of HW_SLOWDOWN, SW_THERMAL, HW_THERMAL, POWER_BRAKE those that hold."""
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
    """Whether somebody can see what befalls a GPU; `problem` is empty if so."""

    gpu: str
    at: datetime
    problem: str = ""


class RepairReported(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody says that a GPU was repaired or reset: of one XID, or of all that befell it."""

    gpu: str
    at: datetime
    by: str
    xid: int | None = None


Observation: TypeAlias = Poll | Xid | MonitoringChanged | RepairReported


class Effect(enum.StrEnum):
    """What a finding about a part does to it; only the first takes it from the kubelet."""

    UNHEALTHY = "unhealthy"
    DEGRADED = "degraded"
    UNMONITORED = "unmonitored"


class FaultBegan(msgspec.Struct, frozen=True, kw_only=True):
    """Something holds against a part of a GPU from now on; `gpu_health` concludes it.

    One `code` holds at most once against one part. `policy` says which rule decided, with source.
    """

    part: Part
    effect: Effect
    code: str
    reason: str
    at: datetime
    policy: str = ""
    evidence: tuple[vocabulary.Evidence, ...] = ()


class FaultEnded(msgspec.Struct, frozen=True, kw_only=True):
    """What began under this `code` no longer holds, and why that is believed."""

    part: Part
    effect: Effect
    code: str
    reason: str
    at: datetime
    policy: str = ""
    evidence: tuple[vocabulary.Evidence, ...] = ()


FaultChange: TypeAlias = FaultBegan | FaultEnded


class Scan(msgspec.Struct, frozen=True, kw_only=True):
    """One look at all GPUs. `polls` are of the same moment, so that what is bad begins as bad.

    `links` are keyed by both uuids in sorted order. `caps` are the minor numbers of MIG's
    capability nodes by their name in /proc/driver/nvidia-caps/mig-minors (`gpu0/gi3/access`).
    """

    driver: Driver = Driver.READY
    problem: str = ""
    on_bus: int = 0
    """How many NVIDIA GPUs there are on the PCI bus, where the driver cannot be asked."""
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
    """Return what is to be believed after another look.

    A driver that only fails to answer for now says nothing new: its GPUs stay, and it is said that
    nobody watches them. One that has gone has taken them along.
    """
    if previous is None or current.driver not in {Driver.SILENT, Driver.FAILED}:
        return current
    return previous
