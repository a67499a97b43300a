"""Pure: reduces Kubernetes objects to the labeler's model; encodes and decodes the inventory.

To hold ten thousand nodes, only labels that the labeler uses are kept, and equal mappings are
shared.

The inventory is stored in a ConfigMap because the commands do not use the bus. Products are written
once and referred to by number, so that ten thousand nodes take about 300 kB of its 1 MiB.
"""

import contextlib
import functools
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import msgspec

from muster import codec, escaping
from muster.kubernetes import objects, scheduling
from muster_labeler import model
from muster_labeler.naming import accelerators, sources

INVENTORY_CONFIG_MAP: Final = "muster-inventory"
MUSTER_NAMESPACE: Final = "muster"
INVENTORY_KEY: Final = "inventory.json"
INVENTORY_BYTES_MAX: Final = 900_000
_KINDS_MAX: Final = 32
_NAME_MAX: Final = 300

Value = TypeVar("Value")

_NODE_GROUP_LABELS: Final = frozenset(
    {
        "cloud.google.com/gke-nodepool",
        "eks.amazonaws.com/nodegroup",
        "karpenter.sh/nodepool",
        "kubernetes.azure.com/agentpool",
        "node.kubernetes.io/instance-type",
    }
)
_NRI: Final = "muster-fuse-nri"
_AGENTS: Final = frozenset({"muster-plugin", "muster"})
_PLUGIN_NAMES: Final = re.compile(
    r"(smarter|generic|fuse)-device-(manager|plugin).*|muster-plugin.*"
)
_FUSE_ANNOTATIONS: Final = (model.FUSE_ANNOTATION, "required-plugins.noderesource.dev")
_MESSAGES_MAX: Final = 8
_MIB: Final = 2**20
_SHARED_MAX: Final = 4096
_LONG_AGO: Final = datetime.fromtimestamp(0, UTC)
_UNREADABLE_CAPACITY: Final[Mapping[str, int]] = {"nvidia.com/gpu": 1}

_shared_text: Final = functools.lru_cache(maxsize=64)(str)


class _LabelFields(msgspec.Struct, frozen=True):
    labels: dict[str, object] = msgspec.field(name="f:labels", default_factory=dict)


class _OwnedFields(msgspec.Struct, frozen=True):
    metadata: _LabelFields = msgspec.field(name="f:metadata", default_factory=_LabelFields)


class _Provenance(msgspec.Struct, frozen=True):
    source: str = ""
    product: str = ""


class _Identity(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    uid: str = ""
    resource_version: str = ""


class _Identified(msgspec.Struct, frozen=True):
    metadata: _Identity


_NODE: Final = msgspec.json.Decoder(objects.Node)
_IDENTIFIED: Final = msgspec.json.Decoder(_Identified)


class UnreadableInventory(ValueError):
    """The ConfigMap does not contain an inventory that muster wrote."""


class _ReportedInventory(msgspec.Struct, frozen=True):
    products: list[sources.Product]
    nodes: dict[str, dict[str, int]]
    """For each node, the number of GPUs of each product, by the product's index in `products`."""
    simulated: list[str] = []


def node(raw: objects.Node, selector: Mapping[str, str] | None = None) -> model.Node:
    """Reduce a node to the model; `selector` has the labels of the nodes to be labelled."""
    labels = raw.labels
    managed = raw.metadata.managed_fields or ()
    info = raw.status.node_info if raw.status else None
    return model.Node(
        name=raw.metadata.name,
        uid=raw.metadata.uid,
        version=raw.metadata.resource_version,
        labels=_shared(tuple((key, labels[key]) for key in labels if _matters(key))),
        owners=_shared(tuple(_owners(managed, labels).items())),
        our_labels=_shared(tuple(_ours(managed, labels).items())),
        labelled_from=_labelled_from(raw.annotations.get(model.PROVENANCE)),
        created=raw.metadata.created_at,
        has_condition=objects.condition(raw.conditions, model.CONDITION) is not None,
        is_selected=not selector or selector.items() <= labels.items(),
        capacity=_shared(tuple(_counts(raw.capacity).items())),
        allocatable=_shared(tuple(_counts(raw.allocatable).items())),
        ready_since=_ready_since(raw.conditions),
        runtime=_shared_text(info.container_runtime_version) if info else "",
        kubelet=_shared_text(info.kubelet_version) if info else "",
        kernel=_shared_text(info.kernel_version) if info else "",
        provider_id=raw.spec.provider_id if raw.spec else "",
    )


def read_node(raw: msgspec.Raw, selector: Mapping[str, str] | None = None) -> model.Node:
    """Return a node from the API's JSON, even if only its name can be read.

    A node of which only the name can be read counts as a node with GPUs: labels are written to
    all GPU nodes or to none, so no node may be missing. Raises msgspec's errors if not even the
    name can be read.
    """
    with contextlib.suppress(msgspec.ValidationError, UnicodeDecodeError, RecursionError):
        readable = node(_NODE.decode(raw), selector)
        if readable.name:
            return readable
    metadata = _IDENTIFIED.decode(raw).metadata
    return model.Node(
        name=metadata.name,
        uid=metadata.uid,
        version=metadata.resource_version,
        is_selected=False,
        capacity=_UNREADABLE_CAPACITY,
    )


def pod(raw: objects.Pod) -> model.Pod | None:
    """Reduce a pod that concerns fuse or device plugins to the model; return None for others."""
    spec = raw.spec or objects.PodSpec()
    status = raw.status or objects.PodStatus()
    containers = [*(spec.init_containers or ()), *(spec.containers or ())]
    requests = sorted({name for container in containers for name in _requested(container)})
    statuses = [*(status.init_container_statuses or ()), *raw.container_statuses]
    messages = _messages(statuses, raw.conditions)
    is_agent = (
        raw.labels.get("app.kubernetes.io/name") in _AGENTS
        or _PLUGIN_NAMES.fullmatch(raw.metadata.name) is not None
    )
    kept = model.Pod(
        namespace=raw.metadata.namespace,
        name=raw.metadata.name,
        node=raw.node_name,
        phase=raw.phase,
        annotations={k: v for k, v in raw.annotations.items() if k.startswith(_FUSE_ANNOTATIONS)},
        requests=tuple(name for name in requests if model.is_fuse(name)),
        is_agent=is_agent,
        is_nri=raw.labels.get("app.kubernetes.io/name") == _NRI,
        is_ready=bool(statuses) and all(entry.ready for entry in raw.container_statuses),
        started=_started(statuses) or objects.parse_time(status.start_time),
        messages=tuple(text for text in messages if "fuse" in text.lower())[:_MESSAGES_MAX],
    )
    matters = is_agent or kept.is_nri or kept.requests or kept.messages or kept.is_annotated
    return kept if matters else None


def event(raw: objects.Event) -> model.KubernetesEvent:
    """Reduce a Kubernetes Event to the model."""
    about = raw.involved_object or objects.ObjectReference()
    return model.KubernetesEvent(about.kind, about.namespace, about.name, raw.reason, raw.message)


def slice_of(raw: scheduling.ResourceSlice) -> model.ResourceSlice:
    """Reduce a ResourceSlice to the model."""
    spec = raw.spec or scheduling.ResourceSliceSpec()
    devices = spec.devices or ()
    products = [_product(device.basic or device) for device in devices]
    return model.ResourceSlice(
        node=spec.node_name,
        driver=spec.driver,
        products=tuple(product for product in products if product is not None),
        devices=tuple(device.name for device in devices),
    )


def encode_inventory(
    nodes: Mapping[str, sources.Kinds], simulated: frozenset[str] = frozenset()
) -> str:
    """Encode the kinds of GPU by node as text; equal arguments always produce equal text.

    A node that reports too much is left out, and so are nodes that do not fit, so that one node
    cannot prevent the others from being written.
    """
    bounded = {name: kinds for name, kinds in nodes.items() if is_bounded(kinds)}
    text = _encoded(bounded, simulated)
    while len(text.encode()) > INVENTORY_BYTES_MAX:
        bounded = dict(sorted(bounded.items())[: len(bounded) * 9 // 10])
        text = _encoded(bounded, simulated)
    return text


def decode_inventory(text: str) -> tuple[dict[str, sources.Kinds], frozenset[str]]:
    """Return the GPUs by node, and which nodes are simulated. Raises UnreadableInventory."""
    try:
        decoded = msgspec.json.decode(text, type=_ReportedInventory)
        nodes: dict[str, sources.Kinds] = {
            name: {decoded.products[_index(number)]: count for number, count in counts.items()}
            for name, counts in decoded.nodes.items()
        }
    except (*codec.UNREADABLE, IndexError, ValueError) as error:
        raise UnreadableInventory(str(error)) from None
    return nodes, frozenset(decoded.simulated)


def is_bounded(kinds: sources.Kinds) -> bool:
    """Return whether a node's kinds of GPU, and their names, are within the inventory's limits."""
    return len(kinds) <= _KINDS_MAX and all(len(kind.name) <= _NAME_MAX for kind in kinds)


# most of ten thousand nodes have equal values, and share one mapping


@functools.lru_cache(maxsize=3 * _SHARED_MAX)
def _shared(items: tuple[tuple[str, Any], ...]) -> Mapping[str, Any]:
    return dict(items)


def _matters(key: str) -> bool:
    return key in accelerators.KEYS or key in _NODE_GROUP_LABELS or model.is_pci_label(key)


def _counts(resources: Mapping[str, str | int]) -> dict[str, int]:
    return {
        name: scheduling.quantity_count(value)
        for name, value in resources.items()
        if "/" in name
        and (model.is_accelerator(name) or model.is_fuse(name) or name == model.DIRECTX)
    }


@functools.lru_cache(maxsize=_SHARED_MAX)
def _shared_pair(source: str, product: str) -> tuple[str, str]:
    return source, product


def _labelled_from(provenance: str | None) -> tuple[str, str]:
    if provenance is None:
        return _shared_pair("", "")
    try:
        decoded = msgspec.json.decode(provenance, type=_Provenance)
    except (msgspec.MsgspecError, RecursionError):
        return _shared_pair("", "")
    return _shared_pair(decoded.source, decoded.product)


def _ready_since(conditions: Iterable[objects.Condition]) -> datetime | None:
    ready = objects.condition(conditions, "Ready")
    if ready is None or ready.status != "True":
        return None
    return objects.parse_time(ready.last_transition_time) or _LONG_AGO


def _ours(managed: Iterable[objects.ManagedFields], labels: Mapping[str, str]) -> dict[str, str]:
    ours: dict[str, str] = {}
    for entry in managed:
        if entry.manager == model.FIELD_MANAGER and entry.owns("labels"):
            fields = msgspec.json.decode(entry.fields_v1, type=_OwnedFields).metadata.labels
            keys = (field.removeprefix("f:") for field in fields)
            ours.update((key, labels[key]) for key in keys if key in labels)
    return ours


def _owners(
    managed: Iterable[objects.ManagedFields], labels: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    # decoding the fields of every manager of ten thousand nodes would cost seconds
    return {
        key: tuple(entry.manager for entry in managed if entry.owns(key))
        for key in accelerators.OWNED & labels.keys()
    }


def _requested(container: objects.Container) -> Iterable[str]:
    wanted = container.resources or objects.ResourceRequirements()
    return (wanted.requests or {}).keys() | (wanted.limits or {}).keys()


def _messages(
    statuses: Iterable[objects.ContainerStatus], conditions: Iterable[objects.Condition]
) -> Iterable[str]:
    for condition in conditions:
        if condition.status != "True" and condition.message:
            yield condition.message
    for status in statuses:
        for state in (status.state, status.last_state):
            for detail in (state.waiting, state.terminated) if state else ():
                if detail and detail.message:
                    yield detail.message


def _started(statuses: Iterable[objects.ContainerStatus]) -> datetime | None:
    times = (
        objects.parse_time(status.state.running.started_at)
        for status in statuses
        if status.state and status.state.running
    )
    return min(filter(None, times), default=None)


def _product(device: scheduling.SliceDevice) -> tuple[str, int | None, bool] | None:
    """Return a DRA device's product, memory, and whether it is part of a GPU; None if unnamed."""
    attributes = _without_domain(device.attributes or {})
    product = attributes.get("productName")
    if product is None or not product.string:
        return None
    memory = _without_domain(device.capacity or {}).get("memory")
    memory_mib = scheduling.quantity_count(memory.value) // _MIB if memory else 0
    kind = attributes.get("type")
    is_part = (kind is not None and kind.string not in {None, "gpu"}) or "profile" in attributes
    return product.string, memory_mib or None, is_part


def _without_domain(values: Mapping[str, Value]) -> dict[str, Value]:
    return {key.rpartition("/")[2]: value for key, value in values.items()}


def _encoded(nodes: Mapping[str, sources.Kinds], simulated: frozenset[str]) -> str:
    kinds = sorted({p for kinds_of_node in nodes.values() for p in kinds_of_node}, key=repr)
    number = {product: index for index, product in enumerate(kinds)}
    written = _ReportedInventory(
        kinds,
        {
            name: {str(number[p]): count for p, count in sorted(nodes[name].items(), key=repr)}
            for name in sorted(nodes)
        },
        sorted(simulated & nodes.keys()),
    )
    return escaping.json_of(written)


def _index(number: str) -> int:
    if not (number.isascii() and number.isdecimal()):
        raise ValueError(f"{number!r} is not a product number")
    return int(number)
