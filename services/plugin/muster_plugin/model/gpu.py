"""Pure: defines observations of the node's GPUs, and the selectors that name GPUs in settings.

The source, NVML or a simulation, reports a scan of all GPUs and later events; other modules
interpret them. A GPU is named by its uuid, because index and device number may change at a boot.

The selectors `0`, `"0"`, `"0:1"`, `GPU-<uuid>`, `MIG-<uuid>` and `MIG-GPU-<uuid>/<gi>/<ci>` are
those of NVIDIA's plugin (api/config/v1/replicas.go, v0.20). A selector of a GPU selects all its MIG
devices too.
"""

import enum
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Final, TypeAlias, assert_never

import msgspec

from muster import vocabulary
from muster_plugin.model import errors

_NO_LINKS: Final[Mapping[tuple[str, str], "Link"]] = {}
_NO_CAPS: Final[Mapping[str, int]] = {}
ANYTHING: Final = "*"
INDEX_MAX: Final = 1023
_UUID: Final = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_INDEX = re.compile(r"([0-9]{1,4})(?::([0-9]{1,4}))?")
_WHOLE = re.compile(rf"(?:GPU|MIG)-{_UUID}", re.IGNORECASE)
_INSTANCE = re.compile(rf"MIG-(GPU-{_UUID})/([0-9]{{1,4}})/([0-9]{{1,4}})", re.IGNORECASE)
_LOOKS_LIKE_ONE = re.compile(r"[-+.:0-9]*|(?:GPU|MIG)-.*", re.IGNORECASE | re.DOTALL)
_FORMS: Final = '0, "0:1", GPU-<uuid>, MIG-<uuid> or MIG-GPU-<uuid>/<gi>/<ci>'


class Driver(enum.StrEnum):
    """Whether the driver is available, and if not, why."""

    READY = "ready"
    NO_LIBRARY = "no_library"
    NOT_LOADED = "not_loaded"
    TOO_OLD = "too_old"
    NO_PERMISSION = "no_permission"
    REPLACED = "replaced"
    """The versions of the kernel's driver and of the loaded library differ: a new process is
    needed.
    """
    SILENT = "silent"
    """A call has not returned in time."""
    FAILED = "failed"


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A whole GPU, one GPU instance of it (`gi`), or one MIG device (`gi` and `ci`)."""

    gpu: str
    gi: int | None = None
    ci: int | None = None

    def covers(self, other: "Part") -> bool:
        """Return whether a fault of this part affects the other part.

        A fault of an instance affects the whole GPU, which is allocated as one unit.
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
    """How two GPUs are connected; `nvlinks` counts direct links, not links to a switch."""

    level: TopologyLevel = TopologyLevel.SYSTEM
    nvlinks: int = 0


class UnreadableGpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU that NVML counts but cannot read; `uuid` is empty if unknown.

    `error` is NVML's name for the error, such as GPU_IS_LOST.
    """

    index: int
    error: str
    uuid: str = ""


class Poll(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one GPU; a value that is None is unknown.

    `error` is NVML's name for the error if the GPU did not answer, such as GPU_IS_LOST.
    """

    gpu: str
    at: datetime
    error: str = ""
    recovery_action: int | None = None
    """NVML's field 230: 0 none, 1 reset, 2 reboot, 3 drain P2P, 4 drain and reset; see nvml.h."""
    ecc_uncorrected: int | None = None
    """Uncorrected errors since the driver was loaded."""
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    retired_pending: bool | None = None
    slowdowns: tuple[str, ...] | None = None
    """The active slowdowns, out of HW_SLOWDOWN, SW_THERMAL, HW_THERMAL and POWER_BRAKE."""
    temperature_c: int | None = None
    slowdown_c: int | None = None
    """The temperature in °C at which the GPU slows down."""
    nvlinks_down: tuple[int, ...] | None = None
    fabric: str | None = None
    """The NVLink fabric's state: not_supported, not_started, in_progress, completed or failed."""


class Xid(msgspec.Struct, frozen=True, kw_only=True):
    """The driver reported an XID on a part of a GPU."""

    part: Part
    xid: int
    at: datetime


class MonitoringChanged(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU became monitored or unmonitored, or is now unmonitored for another reason.

    `problem` is the reason; it is empty if the GPU is monitored.
    """

    gpu: str
    at: datetime
    problem: str = ""


class RepairReported(msgspec.Struct, frozen=True, kw_only=True):
    """A person or program (`by`) reports that a GPU was repaired or reset.

    If `xid` is set, the report does not concern the faults of other XIDs.
    """

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
    """The fault of a part with this `code` ended; `reason` and `evidence` explain why."""


FaultChange: TypeAlias = FaultBegan | FaultEnded


class Scan(msgspec.Struct, frozen=True, kw_only=True):
    """The result of scanning all GPUs.

    `polls` has a poll of each GPU, so that a GPU that was faulty before the scan is never
    advertised as Healthy. `links` are keyed by both uuids in sorted order. `caps` are the minor
    numbers of MIG's capability nodes by their name in /proc/driver/nvidia-caps/mig-minors
    (`gpu0/gi3/access`).
    """

    driver: Driver = Driver.READY
    problem: str = ""
    on_bus: int = 0
    """The number of NVIDIA GPUs on the PCI bus; 0 if they were not counted.

    They are counted only if NVML cannot be used.
    """
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
    """Return the scan that is valid after a new scan.

    If the driver did not answer or failed, an earlier scan stays valid, and its GPUs are reported
    as unmonitored. In any other case the new scan is valid.
    """
    if previous is None or current.driver not in {Driver.SILENT, Driver.FAILED}:
        return current
    return previous


class Index(msgspec.Struct, frozen=True):
    """A selector of a GPU by its index, or of a MIG device by two indexes."""

    gpu: int
    mig: int | None = None


class Uuid(msgspec.Struct, frozen=True):
    """A selector of a GPU or MIG device by its uuid, in lower case."""

    uuid: str


class Instance(msgspec.Struct, frozen=True):
    """A selector of a MIG device by its instances and its GPU's uuid, in lower case."""

    gpu: str
    gi: int
    ci: int


class Product(msgspec.Struct, frozen=True):
    """A selector of all GPUs whose product matches a pattern."""

    pattern: str


Selector: TypeAlias = Index | Uuid | Instance | Product


def parse_selector(given: int | str, *, products: bool = False) -> Selector:
    """Parse a selector; product selectors are valid only with `products`.

    Raises ValueError with a message that names the value and the valid forms.
    """
    text = str(given)
    if match := _INDEX.fullmatch(text):
        index = Index(int(match[1]), int(match[2]) if match[2] else None)
        if max(index.gpu, index.mig or 0) > INDEX_MAX:
            raise ValueError(f"{errors.quoted(given)}: an index is at most {INDEX_MAX}")
        return index
    if _WHOLE.fullmatch(text):
        return Uuid(text.lower())
    if match := _INSTANCE.fullmatch(text):
        return Instance(match[1].lower(), int(match[2]), int(match[3]))
    if not products or _LOOKS_LIKE_ONE.fullmatch(text):
        product = ", or the name of a product with * as a wildcard" if products else ""
        raise ValueError(f"{errors.quoted(given)} does not name a device; write {_FORMS}{product}")
    return Product(text)


def selector_problems(texts: Iterable[int | str], *, products: bool = False) -> Iterator[str]:
    """Yield the problems of a list of selectors: invalid and overlapping selectors."""
    selectors: dict[int, Selector] = {}
    for at, text in enumerate(texts):
        try:
            selector = parse_selector(text, products=products)
        except ValueError as error:
            yield f"[{at}]: {error}"
            continue
        for before, other in selectors.items():
            if includes(other, selector) or includes(selector, other):
                yield f"[{at}]: {errors.quoted(text)} is already named by [{before}]"
                break
        selectors[at] = selector


def includes(wide: Selector, narrow: Selector) -> bool:
    """Return whether `wide` certainly selects everything that `narrow` selects."""
    match wide, narrow:
        case Index(gpu=number, mig=None), Index():
            return narrow.gpu == number
        case Uuid(uuid=uuid), Instance():
            return narrow.gpu == uuid
        case Product(pattern=pattern), Product():
            return matches_pattern(pattern, narrow.pattern)
        case _:
            return wide == narrow


def selects(reference: Selector, device: Device, product: str) -> bool:
    """Return whether the selector selects a device whose GPU is of this product."""
    match reference:
        case Index(gpu=number, mig=None):
            return device.index.partition(":")[0] == str(number)
        case Index(gpu=number, mig=within):
            return device.index == f"{number}:{within}"
        case Uuid(uuid=uuid):
            return uuid in {device.uuid.lower(), device.part.gpu.lower()}
        case Instance(gpu=uuid, gi=gi, ci=ci):
            part = device.part
            return (part.gpu.lower(), part.gi, part.ci) == (uuid, gi, ci)
        case Product(pattern=pattern):
            return matches_pattern(pattern, product)
        case _ as never:
            assert_never(never)


def matches_pattern(pattern: str, text: str) -> bool:
    """Return whether the whole text matches; `*` matches anything, other characters are literal.

    The time is linear in the text for each `*`. The text may itself be a pattern: if so, and if it
    matches, `pattern` matches every text that this second pattern matches.
    """
    first, *inner = pattern.split(ANYTHING)
    if not inner:
        return text == pattern
    last = inner.pop()
    if not text.startswith(first) or len(text) < len(first) + len(last):
        return False
    end = len(text) - len(last)
    at = len(first)
    for literal in inner:
        at = text.find(literal, at, end)
        if at < 0:
            return False
        at += len(literal)
    return text.endswith(last)
