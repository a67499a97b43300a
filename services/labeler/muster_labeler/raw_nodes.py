"""Pure: Nodes from the API's JSON, as they matter here.

Everything may be absent or null: a node without status. Of ten thousand nodes only the labels that
say something about accelerators are kept, and what they have alike is kept once.
"""

import contextlib
import functools
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Final

import msgspec

from muster_labeler import facts, schemes

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
_UNREADABLE: Final[Mapping[str, int]] = {"nvidia.com/gpu": 0}


def node(raw: RawNode, selector: Mapping[str, str] | None = None) -> facts.Node:
    """Return a node as it matters here."""
    status = raw.status or _NodeStatus()
    labels = raw.metadata.labels or {}
    managed = raw.metadata.managed_fields or ()
    return facts.Node(
        name=raw.metadata.name,
        uid=raw.metadata.uid,
        version=raw.metadata.resource_version,
        labels=_words(tuple((key, labels[key]) for key in labels if _matters(key))),
        owners=_managers(tuple(_owners(managed, labels).items())),
        ours=_words(tuple(_ours(managed, labels).items())),
        told_of=_told_of((raw.metadata.annotations or {}).get(facts.PROVENANCE)),
        created=facts.moment(raw.metadata.creation_timestamp),
        has_condition=any(c.type == facts.CONDITION for c in status.conditions or ()),
        is_selected=not selector or selector.items() <= labels.items(),
        capacity=_numbers(tuple(_counts(status.capacity).items())),
        allocatable=_numbers(tuple(_counts(status.allocatable).items())),
        ready_since=_ready_since(status.conditions),
        runtime=_RUNTIMES(status.node_info.container_runtime_version) if status.node_info else "",
        provider_id=raw.spec.provider_id if raw.spec else "",
    )


def read(raw: msgspec.Raw, selector: Mapping[str, str] | None = None) -> facts.Node:
    """Return a node from the API's JSON, also one of which only the name can be read.

    That one counts as one with GPUs: nobody may forget it who labels all or none. Raises what
    msgspec does for what has no name.
    """
    with contextlib.suppress(msgspec.ValidationError, UnicodeDecodeError, RecursionError):
        found = node(_RAW_NODE.decode(raw), selector)
        if found.name:
            return found
    metadata = _NAMED.decode(raw).metadata
    return facts.Node(
        name=metadata.name,
        uid=metadata.uid,
        version=metadata.resource_version,
        is_selected=False,
        capacity=_UNREADABLE,
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
    return key in schemes.KEYS or key in _WHERE or facts.is_pci_label(key)


def _counts(written: Mapping[str, str | int] | None) -> dict[str, int]:
    return {
        name: facts.quantity(value)
        for name, value in (written or {}).items()
        if "/" in name
        and (facts.is_accelerator(name) or facts.is_fuse(name) or name == facts.DIRECTX)
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
    return (facts.moment(ready.last_transition_time) or _LONG_AGO) if ready and is_ready else None


def _ours(managed: Iterable[ManagedFields], labels: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in managed:
        if entry.manager == facts.MANAGER and b'"f:labels"' in bytes(entry.fields_v1):
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
