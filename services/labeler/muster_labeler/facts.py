"""Pure. What the Kubernetes API says of nodes, pods and events, as far as it matters here.

Everything may be absent or null: a node without status, a pod without containers. Of ten thousand
nodes only the labels that say something about accelerators are kept.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

import msgspec

from muster_labeler import schemes

MANAGER: Final = "muster-labeler"
"""Our field manager, the service's and the commands': what it owns, either may change."""
PROVENANCE: Final = "muster.dev/label-provenance"
CONDITION: Final = "DevicePluginHealthy"
FUSE_ANNOTATION: Final = "muster.dev/fuse"

_ACCELERATORS: Final = re.compile(
    r"nvidia\.com/(gpu(\.shared)?|mig-[-a-z0-9.]+)|amd\.com/gpu|gpu\.intel\.com/(i915|xe)"
    r"|habana\.ai/gaudi|google\.com/tpu"
)
"""Resources that make a node one with accelerators; `*_monitoring` is not for computing."""
_PARTS: Final = "nvidia.com/mig-"
_PCI: Final = re.compile(
    r"feature\.node\.kubernetes\.io/pci-((03|12|0b40)[0-9a-f]*_)?(10de|1002)\.present"
)
"""NVIDIA or AMD, by PCI class or without one (node-feature-discovery, deviceLabelFields)."""
_FUSE: Final = re.compile(r"[-a-z0-9.]+/fuse([-_.][-A-Za-z0-9_.]*)?")
_WHERE: Final = frozenset(
    {
        "cloud.google.com/gke-nodepool",
        "eks.amazonaws.com/nodegroup",
        "karpenter.sh/nodepool",
        "kubernetes.azure.com/agentpool",
        "node.kubernetes.io/instance-type",
    }
)
_SHARED_MAX: Final = 4096
_RUNTIMES: Final = functools.lru_cache(maxsize=64)(str)
_NUMBER: Final = re.compile(r"([0-9]{1,15})([kMGTPE]i?)?")
_UNITS: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_READY: Final = "Ready"
_LONG_AGO: Final = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node: what it is labelled, who labelled it, what it has and offers.

    `owners` are the field managers of each label that names a model; `ours` are all labels that we
    own, `told_of` the source and the product that the newest came from. `ready_since` is None while
    it is not Ready. `is_selected` if a selector took it.
    """

    name: str
    uid: str = ""
    version: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    owners: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ours: Mapping[str, str] = field(default_factory=dict)
    told_of: tuple[str, str] = ("", "")
    created: datetime | None = None
    has_condition: bool = False
    is_selected: bool = True
    capacity: Mapping[str, int] = field(default_factory=dict)
    allocatable: Mapping[str, int] = field(default_factory=dict)
    ready_since: datetime | None = None
    runtime: str = ""
    provider_id: str = ""

    @property
    def accelerators(self) -> frozenset[str]:
        """Return the accelerator resources it names, whatever their count."""
        names = self.capacity.keys() | self.allocatable.keys()
        return frozenset(name for name in names if _ACCELERATORS.fullmatch(name))

    @property
    def fuse(self) -> dict[str, int]:
        """Return the fuse resources it names, and how many of each can be had."""
        names = self.capacity.keys() | self.allocatable.keys()
        return {name: self.allocatable.get(name, 0) for name in sorted(names) if is_fuse(name)}

    @property
    def has_accelerators(self) -> bool:
        """Tell whether resources or PCI labels say that it has accelerators."""
        return bool(self.accelerators) or any(_PCI.fullmatch(key) for key in self.labels)

    @property
    def has_partitions(self) -> bool:
        """Tell whether it offers parts of GPUs (MIG, strategy mixed)."""
        return any(count and name.startswith(_PARTS) for name, count in self.capacity.items())

    @property
    def is_virtual(self) -> bool:
        """Tell whether GPU feature discovery says that its GPUs are virtual."""
        return self.labels.get(schemes.VGPU) == "true"

    def is_ours_alone(self, key: str) -> bool:
        """Tell whether we own a label, and nobody else does."""
        return key in self.ours and self.owners.get(key) == (MANAGER,)

    @property
    def usable(self) -> int:
        """Return how many accelerators can be had."""
        return sum(self.allocatable.get(name, 0) for name in self.accelerators)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod that has to do with fuse, or one of muster's own.

    `told` are the words its containers ended with or wait for.
    """

    namespace: str
    name: str
    node: str
    phase: str
    annotations: Mapping[str, str]
    requests: tuple[str, ...]
    is_agent: bool
    is_ready: bool
    started: datetime | None
    told: tuple[str, ...]

    @property
    def is_annotated(self) -> bool:
        """Tell whether it asks for fuse by annotation."""
        return any(
            (key == FUSE_ANNOTATION or key.startswith(f"{FUSE_ANNOTATION}.container."))
            and value == "true"
            for key, value in self.annotations.items()
        )


@dataclass(frozen=True, slots=True)
class Told:
    """A Kubernetes Event: about what, why, and its text."""

    kind: str
    namespace: str
    name: str
    reason: str
    text: str


@dataclass(frozen=True, slots=True)
class Slice:
    """The devices of a DRA ResourceSlice: product, memory, and whether it is a part of a GPU."""

    node: str
    driver: str
    is_all_nodes: bool
    products: tuple[tuple[str, int | None, bool], ...]
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sink:
    """Who wants to know of nodes: of all at once, of one that is new or changed, of one gone."""

    replace: Callable[[list[Node]], None]
    put: Callable[[Node], None]
    drop: Callable[[str], None]


class _Shape(msgspec.Struct, frozen=True, rename="camel"):
    """Camel case, unknown fields ignored, as the API writes them."""


class ManagedFields(_Shape, frozen=True):
    """Who owns which fields."""

    manager: str = ""
    fields_v1: msgspec.Raw = msgspec.field(name="fieldsV1", default=msgspec.Raw(b"null"))


class _FieldsOfMetadata(msgspec.Struct, frozen=True):
    labels: dict[str, object] = msgspec.field(name="f:labels", default_factory=dict)


class _Fields(msgspec.Struct, frozen=True):
    metadata: _FieldsOfMetadata = msgspec.field(
        name="f:metadata", default_factory=_FieldsOfMetadata
    )


class Metadata(_Shape, frozen=True):
    """What every object has."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    managed_fields: list[ManagedFields] | None = None
    creation_timestamp: str | None = None


class _Provenance(msgspec.Struct, frozen=True):
    source: str = ""
    product: str = ""


class _Condition(_Shape, frozen=True):
    type: str = ""
    status: str = ""
    last_transition_time: str | None = None


class _NodeInfo(_Shape, frozen=True):
    container_runtime_version: str = ""


class _NodeStatus(_Shape, frozen=True):
    capacity: dict[str, str | int] | None = None
    allocatable: dict[str, str | int] | None = None
    conditions: list[_Condition] | None = None
    node_info: _NodeInfo | None = None


class _NodeSpec(_Shape, frozen=True):
    provider_id: str = msgspec.field(name="providerID", default="")


class RawNode(_Shape, frozen=True):
    """A node as the API writes it."""

    metadata: Metadata
    spec: _NodeSpec | None = None
    status: _NodeStatus | None = None


class _Name(_Shape, frozen=True):
    name: str
    uid: str = ""
    resource_version: str = ""


class _Named(_Shape, frozen=True):
    metadata: _Name


_RAW_NODE: Final = msgspec.json.Decoder(RawNode)
_NAMED: Final = msgspec.json.Decoder(_Named)
_UNREADABLE: Final[Mapping[str, int]] = {"nvidia.com/gpu": 0}


def node(raw: RawNode, selector: Mapping[str, str] | None = None) -> Node:
    """Return a node as it matters here."""
    status = raw.status or _NodeStatus()
    labels = raw.metadata.labels or {}
    managed = raw.metadata.managed_fields or ()
    return Node(
        name=raw.metadata.name,
        uid=raw.metadata.uid,
        version=raw.metadata.resource_version,
        labels=_words(tuple((key, labels[key]) for key in labels if _matters(key))),
        owners=_managers(tuple(_owners(managed, labels).items())),
        ours=_words(tuple(_ours(managed, labels).items())),
        told_of=_told_of((raw.metadata.annotations or {}).get(PROVENANCE)),
        created=moment(raw.metadata.creation_timestamp),
        has_condition=any(c.type == CONDITION for c in status.conditions or ()),
        is_selected=not selector or selector.items() <= labels.items(),
        capacity=_numbers(tuple(_counts(status.capacity).items())),
        allocatable=_numbers(tuple(_counts(status.allocatable).items())),
        ready_since=_ready_since(status.conditions),
        runtime=_RUNTIMES(status.node_info.container_runtime_version) if status.node_info else "",
        provider_id=raw.spec.provider_id if raw.spec else "",
    )


def read(raw: msgspec.Raw, selector: Mapping[str, str] | None = None) -> Node:
    """Return a node from the API's JSON, also one of which only the name can be read.

    That one counts as one with GPUs: nobody may forget it who labels all or none. Raises what
    msgspec does for what has no name.
    """
    with contextlib.suppress(msgspec.ValidationError, UnicodeDecodeError, RecursionError):
        found = node(_RAW_NODE.decode(raw), selector)
        if found.name:
            return found
    metadata = _NAMED.decode(raw).metadata
    return Node(
        name=metadata.name,
        uid=metadata.uid,
        version=metadata.resource_version,
        is_selected=False,
        capacity=_UNREADABLE,
    )


def is_fuse(resource: str) -> bool:
    """Tell whether an extended resource stands for /dev/fuse."""
    return _FUSE.fullmatch(resource) is not None


def quantity(written: str | int) -> int:
    """Return a whole quantity as a number; 0 for what is no whole quantity."""
    if isinstance(written, int):
        return max(0, written)
    found = _NUMBER.fullmatch(written)
    return int(found[1]) * _UNITS.get(found[2] or "", 0) if found else 0


# of ten thousand nodes most are alike in each of these, and share one mapping


@functools.lru_cache(maxsize=_SHARED_MAX)
def _words(items: tuple[tuple[str, str], ...]) -> Mapping[str, str]:
    return dict(items)


@functools.lru_cache(maxsize=_SHARED_MAX)
def _numbers(items: tuple[tuple[str, int], ...]) -> Mapping[str, int]:
    return dict(items)


@functools.lru_cache(maxsize=_SHARED_MAX)
def _managers(items: tuple[tuple[str, tuple[str, ...]], ...]) -> Mapping[str, tuple[str, ...]]:
    return dict(items)


def moment(written: str | None) -> datetime | None:
    """Return a time; None for what is none: for that no node is left out."""
    try:
        found = datetime.fromisoformat(written or "")
    except ValueError:
        return None
    return found if found.tzinfo else None


def _matters(key: str) -> bool:
    return key in schemes.KEYS or key in _WHERE or _PCI.fullmatch(key) is not None


def _counts(written: Mapping[str, str | int] | None) -> dict[str, int]:
    return {
        name: quantity(value)
        for name, value in (written or {}).items()
        if "/" in name and (_ACCELERATORS.fullmatch(name) or is_fuse(name))
    }


@functools.lru_cache(maxsize=_SHARED_MAX)
def _told(source: str, product: str) -> tuple[str, str]:
    return source, product


def _told_of(provenance: str | None) -> tuple[str, str]:
    if provenance is None:
        return _told("", "")
    try:
        found = msgspec.json.decode(provenance, type=_Provenance)
    except (msgspec.MsgspecError, RecursionError):
        return _told("", "")
    return _told(found.source, found.product)


def _ready_since(conditions: list[_Condition] | None) -> datetime | None:
    ready = next((c for c in conditions or () if c.type == _READY), None)
    is_ready = ready is not None and ready.status == "True"
    return (moment(ready.last_transition_time) or _LONG_AGO) if ready and is_ready else None


def _ours(managed: Iterable[ManagedFields], labels: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in managed:
        if entry.manager == MANAGER and b'"f:labels"' in bytes(entry.fields_v1):
            fields = msgspec.json.decode(entry.fields_v1, type=_Fields).metadata.labels
            keys = (field.removeprefix("f:") for field in fields)
            found.update((key, labels[key]) for key in keys if key in labels)
    return found


def _owners(
    managed: Iterable[ManagedFields], labels: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for key in schemes.OWNED & labels.keys():
        # decoding the fields of every manager of ten thousand nodes would cost seconds
        mark = f'"f:{key}"'.encode()
        found[key] = [entry.manager for entry in managed if mark in bytes(entry.fields_v1)]
    return {key: tuple(managers) for key, managers in found.items()}
