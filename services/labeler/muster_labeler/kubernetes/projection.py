"""Pure: Nodes from the API's JSON, as they matter here.

Everything may be absent or null: a node without status. Of ten thousand nodes only the labels that
say something about accelerators are kept, and what they have alike is kept once.
"""

import contextlib
import functools
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Final, TypeVar

import msgspec

from muster_labeler import model
from muster_labeler.naming import schemes, sources

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
_READY: Final = "Ready"
_LONG_AGO: Final = datetime.fromtimestamp(0, UTC)


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
_UNREADABLE_CAPACITY: Final[Mapping[str, int]] = {"nvidia.com/gpu": 0}


def node(raw: RawNode, selector: Mapping[str, str] | None = None) -> model.Node:
    """Return a node as it matters here."""
    status = raw.status or _NodeStatus()
    labels = raw.metadata.labels or {}
    managed = raw.metadata.managed_fields or ()
    return model.Node(
        name=raw.metadata.name,
        uid=raw.metadata.uid,
        version=raw.metadata.resource_version,
        labels=_words(tuple((key, labels[key]) for key in labels if _matters(key))),
        owners=_managers(tuple(_owners(managed, labels).items())),
        ours=_words(tuple(_ours(managed, labels).items())),
        told_of=_told_of((raw.metadata.annotations or {}).get(model.PROVENANCE)),
        created=model.moment(raw.metadata.creation_timestamp),
        has_condition=any(c.type == model.CONDITION for c in status.conditions or ()),
        is_selected=not selector or selector.items() <= labels.items(),
        capacity=_numbers(tuple(_counts(status.capacity).items())),
        allocatable=_numbers(tuple(_counts(status.allocatable).items())),
        ready_since=_ready_since(status.conditions),
        runtime=_RUNTIMES(status.node_info.container_runtime_version) if status.node_info else "",
        provider_id=raw.spec.provider_id if raw.spec else "",
    )


def read_node(raw: msgspec.Raw, selector: Mapping[str, str] | None = None) -> model.Node:
    """Return a node from the API's JSON, also one of which only the name can be read.

    That one counts as one with GPUs: nobody may forget it who labels all or none. Raises what
    msgspec does for what has no name.
    """
    with contextlib.suppress(msgspec.ValidationError, UnicodeDecodeError, RecursionError):
        found = node(_RAW_NODE.decode(raw), selector)
        if found.name:
            return found
    metadata = _NAMED.decode(raw).metadata
    return model.Node(
        name=metadata.name,
        uid=metadata.uid,
        version=metadata.resource_version,
        is_selected=False,
        capacity=_UNREADABLE_CAPACITY,
    )


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


def _matters(key: str) -> bool:
    return key in schemes.KEYS or key in _WHERE or model.is_pci_label(key)


def _counts(written: Mapping[str, str | int] | None) -> dict[str, int]:
    return {
        name: model.quantity(value)
        for name, value in (written or {}).items()
        if "/" in name
        and (model.is_accelerator(name) or model.is_fuse(name) or name == model.DIRECTX)
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
    return (model.moment(ready.last_transition_time) or _LONG_AGO) if ready and is_ready else None


def _ours(managed: Iterable[ManagedFields], labels: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in managed:
        if entry.manager == model.MANAGER and b'"f:labels"' in bytes(entry.fields_v1):
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


Held = TypeVar("Held")

_AGENTS: Final = frozenset({"muster-plugin", "muster"})
_PLUGIN_NAMES: Final = re.compile(
    r"(smarter|generic|fuse)-device-(manager|plugin).*|muster-plugin.*"
)
_TOLD_MAX: Final = 8
_MIB: Final = 2**20


class _PodShape(msgspec.Struct, frozen=True, rename="camel"):
    """Camel case, unknown fields ignored, as the API writes them."""


class _Requirements(_PodShape, frozen=True):
    requests: dict[str, str | int] | None = None
    limits: dict[str, str | int] | None = None


class _Container(_PodShape, frozen=True):
    resources: _Requirements | None = None


class _Said(_PodShape, frozen=True):
    """Why a container waits, or how it ended."""

    reason: str = ""
    message: str = ""
    started_at: datetime | None = None


class _Moment(_PodShape, frozen=True):
    waiting: _Said | None = None
    terminated: _Said | None = None
    running: _Said | None = None


class _ContainerStatus(_PodShape, frozen=True):
    ready: bool = False
    state: _Moment | None = None
    last_state: _Moment | None = None


class _PodCondition(_PodShape, frozen=True):
    type: str = ""
    status: str = ""
    message: str = ""


class _PodSpec(_PodShape, frozen=True):
    node_name: str = ""
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None


class _PodStatus(_PodShape, frozen=True):
    phase: str = ""
    start_time: datetime | None = None
    conditions: list[_PodCondition] | None = None
    container_statuses: list[_ContainerStatus] | None = None
    init_container_statuses: list[_ContainerStatus] | None = None


class RawPod(_PodShape, frozen=True):
    """A pod as the API writes it."""

    metadata: Metadata
    spec: _PodSpec | None = None
    status: _PodStatus | None = None


class _Reference(_PodShape, frozen=True):
    kind: str = ""
    namespace: str = ""
    name: str = ""


class RawEvent(_PodShape, frozen=True):
    """A Kubernetes Event as the API writes it."""

    involved_object: _Reference | None = None
    reason: str = ""
    message: str = ""


class _Attribute(_PodShape, frozen=True):
    string: str | None = None


class _Capacity(_PodShape, frozen=True):
    value: str = ""


class _Device(_PodShape, frozen=True):
    name: str = ""
    attributes: dict[str, _Attribute] | None = None
    capacity: dict[str, _Capacity] | None = None
    basic: "_Device | None" = None
    """Where v1beta1 keeps both."""


class _SliceSpec(_PodShape, frozen=True):
    driver: str = ""
    node_name: str = ""
    all_nodes: bool = False
    devices: list[_Device] | None = None


class RawSlice(_PodShape, frozen=True):
    """A ResourceSlice as the API writes it."""

    spec: _SliceSpec


def pod(raw: RawPod) -> model.Pod | None:
    """Return a pod that has to do with fuse, or None."""
    spec, status = raw.spec or _PodSpec(), raw.status or _PodStatus()
    labels, annotations = raw.metadata.labels or {}, raw.metadata.annotations or {}
    containers = [*(spec.init_containers or ()), *(spec.containers or ())]
    requests = sorted({name for container in containers for name in _asked(container)})
    statuses = [*(status.init_container_statuses or ()), *(status.container_statuses or ())]
    told = tuple(_pod_messages(statuses, status.conditions or ()))
    is_agent = (
        labels.get("app.kubernetes.io/name") in _AGENTS
        or _PLUGIN_NAMES.fullmatch(raw.metadata.name) is not None
    )
    found = model.Pod(
        namespace=raw.metadata.namespace,
        name=raw.metadata.name,
        node=spec.node_name,
        phase=status.phase,
        annotations={k: v for k, v in annotations.items() if _is_fuse_annotation(k)},
        requests=tuple(name for name in requests if model.is_fuse(name)),
        is_agent=is_agent,
        is_ready=bool(statuses) and all(s.ready for s in status.container_statuses or ()),
        started=_started(statuses) or status.start_time,
        told=tuple(text for text in told if "fuse" in text.lower())[:_TOLD_MAX],
    )
    matters = is_agent or found.requests or found.told or found.is_annotated
    return found if matters else None


def event(raw: RawEvent) -> model.Told:
    """Return a Kubernetes Event."""
    about = raw.involved_object or _Reference()
    return model.Told(about.kind, about.namespace, about.name, raw.reason, raw.message)


def slice_of(raw: RawSlice) -> model.Slice:
    """Return a ResourceSlice."""
    devices = raw.spec.devices or []
    products = [_product(device.basic or device) for device in devices]
    return model.Slice(
        node=raw.spec.node_name,
        driver=raw.spec.driver,
        is_all_nodes=raw.spec.all_nodes,
        products=tuple(product for product in products if product is not None),
        devices=tuple(device.name for device in devices),
    )


def _asked(container: _Container) -> Iterable[str]:
    wanted = container.resources or _Requirements()
    return (wanted.requests or {}).keys() | (wanted.limits or {}).keys()


def _pod_messages(
    statuses: Iterable[_ContainerStatus], conditions: Iterable[_PodCondition]
) -> Iterable[str]:
    for condition in conditions:
        if condition.status != "True" and condition.message:
            yield condition.message
    for status in statuses:
        for moment in (status.state, status.last_state):
            for said in (moment.waiting, moment.terminated) if moment else ():
                if said and said.message:
                    yield said.message


def _started(statuses: Iterable[_ContainerStatus]) -> datetime | None:
    times = [
        status.state.running.started_at
        for status in statuses
        if status.state and status.state.running and status.state.running.started_at
    ]
    return min(times, default=None)


def _is_fuse_annotation(annotation: str) -> bool:
    return annotation.startswith((model.FUSE_ANNOTATION, "required-plugins.noderesource.dev"))


def _product(device: _Device) -> tuple[str, int | None, bool] | None:
    """Return product, memory and whether it is a part (k8s-dra-driver-gpu, deviceinfo.go)."""
    attributes = _bare(device.attributes or {})
    found = attributes.get("productName")
    if found is None or not found.string:
        return None
    memory = _bare(device.capacity or {}).get("memory")
    memory_mib = model.quantity(memory.value) // _MIB if memory else 0
    kind = attributes.get("type")
    is_part = (kind is not None and kind.string not in {None, "gpu"}) or "profile" in attributes
    return found.string, memory_mib or None, is_part


def _bare(values: Mapping[str, Held]) -> dict[str, Held]:
    """Return attributes by their name without a domain."""
    return {key.rpartition("/")[2]: value for key, value in values.items()}


INVENTORY_CONFIG_MAP: Final = "muster-inventory"
MUSTER_NAMESPACE: Final = "muster"
INVENTORY_KEY: Final = "inventory.json"
INVENTORY_BYTES_MAX: Final = 900_000
_KINDS_MAX: Final = 32
_NAME_MAX: Final = 300


class UnreadableInventory(ValueError):
    """What stands there is no inventory of ours."""


class _ReportedProduct(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True):
    name: str
    memory_mib: int | None = None
    is_mig: bool = False
    is_vgpu: bool = False


class _ReportedInventory(msgspec.Struct, frozen=True):
    products: list[_ReportedProduct]
    nodes: dict[str, dict[str, int]]
    """How many of which product, by its number."""
    simulated: list[str] = []


def encode_inventory(
    nodes: Mapping[str, sources.Kinds], simulated: frozenset[str] = frozenset()
) -> str:
    """Return the nodes' kinds of GPU as text; the same nodes, always the same text.

    What one node says in too many words is left out, and what does not fit: of a node that is not
    there nothing is claimed. So no node can keep the others' from being written.
    """
    modest = {name: kinds for name, kinds in nodes.items() if _is_modest(kinds)}
    text = _encoded(modest, simulated)
    while len(text.encode()) > INVENTORY_BYTES_MAX:
        modest = dict(sorted(modest.items())[: len(modest) * 9 // 10])
        text = _encoded(modest, simulated)
    return text


def _is_modest(kinds: sources.Kinds) -> bool:
    return len(kinds) <= _KINDS_MAX and all(len(kind.name) <= _NAME_MAX for kind in kinds)


def _encoded(nodes: Mapping[str, sources.Kinds], simulated: frozenset[str]) -> str:
    kinds = sorted({p for found in nodes.values() for p in found}, key=repr)
    number = {product: index for index, product in enumerate(kinds)}
    written = _ReportedInventory(
        [_ReportedProduct(p.name, p.memory_mib, p.is_mig, p.is_vgpu) for p in kinds],
        {
            name: {str(number[p]): count for p, count in sorted(nodes[name].items(), key=repr)}
            for name in sorted(nodes)
        },
        sorted(simulated & nodes.keys()),
    )
    return msgspec.json.encode(written).decode()


def _index(number: str) -> int:
    if not (number.isascii() and number.isdecimal()):
        raise ValueError(f"{number!r} is no number of a product")
    return int(number)


def decode_inventory(text: str) -> tuple[dict[str, sources.Kinds], frozenset[str]]:
    """Return the GPUs by node, and which nodes are simulated. Raises Unreadable."""
    try:
        found = msgspec.json.decode(text, type=_ReportedInventory)
        kinds = [sources.Product(p.name, p.memory_mib, p.is_mig, p.is_vgpu) for p in found.products]
        nodes: dict[str, sources.Kinds] = {
            name: {kinds[_index(number)]: count for number, count in counts.items()}
            for name, counts in found.nodes.items()
        }
    except (msgspec.MsgspecError, IndexError, ValueError) as error:
        raise UnreadableInventory(str(error)) from None
    return nodes, frozenset(found.simulated)
