"""Pure: Pods, Kubernetes Events and ResourceSlices from the API's JSON, as they matter here."""

import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Final, TypeVar

import msgspec

from muster_labeler import facts, raw_nodes

Held = TypeVar("Held")

_AGENTS: Final = frozenset({"muster-plugin", "muster"})
_PLUGIN_NAMES: Final = re.compile(
    r"(smarter|generic|fuse)-device-(manager|plugin).*|muster-plugin.*"
)
_TOLD_MAX: Final = 8
_MIB: Final = 2**20


class _Shape(msgspec.Struct, frozen=True, rename="camel"):
    """Camel case, unknown fields ignored, as the API writes them."""


class _Requirements(_Shape, frozen=True):
    requests: dict[str, str | int] | None = None
    limits: dict[str, str | int] | None = None


class _Container(_Shape, frozen=True):
    resources: _Requirements | None = None


class _Said(_Shape, frozen=True):
    """Why a container waits, or how it ended."""

    reason: str = ""
    message: str = ""
    started_at: datetime | None = None


class _Moment(_Shape, frozen=True):
    waiting: _Said | None = None
    terminated: _Said | None = None
    running: _Said | None = None


class _ContainerStatus(_Shape, frozen=True):
    ready: bool = False
    state: _Moment | None = None
    last_state: _Moment | None = None


class _Condition(_Shape, frozen=True):
    type: str = ""
    status: str = ""
    message: str = ""


class _PodSpec(_Shape, frozen=True):
    node_name: str = ""
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None


class _PodStatus(_Shape, frozen=True):
    phase: str = ""
    start_time: datetime | None = None
    conditions: list[_Condition] | None = None
    container_statuses: list[_ContainerStatus] | None = None
    init_container_statuses: list[_ContainerStatus] | None = None


class RawPod(_Shape, frozen=True):
    """A pod as the API writes it."""

    metadata: raw_nodes.Metadata
    spec: _PodSpec | None = None
    status: _PodStatus | None = None


class _Reference(_Shape, frozen=True):
    kind: str = ""
    namespace: str = ""
    name: str = ""


class RawEvent(_Shape, frozen=True):
    """A Kubernetes Event as the API writes it."""

    involved_object: _Reference | None = None
    reason: str = ""
    message: str = ""


class _Attribute(_Shape, frozen=True):
    string: str | None = None


class _Capacity(_Shape, frozen=True):
    value: str = ""


class _Device(_Shape, frozen=True):
    name: str = ""
    attributes: dict[str, _Attribute] | None = None
    capacity: dict[str, _Capacity] | None = None
    basic: "_Device | None" = None
    """Where v1beta1 keeps both."""


class _SliceSpec(_Shape, frozen=True):
    driver: str = ""
    node_name: str = ""
    all_nodes: bool = False
    devices: list[_Device] | None = None


class RawSlice(_Shape, frozen=True):
    """A ResourceSlice as the API writes it."""

    spec: _SliceSpec


def pod(raw: RawPod) -> facts.Pod | None:
    """Return a pod that has to do with fuse, or None."""
    spec, status = raw.spec or _PodSpec(), raw.status or _PodStatus()
    labels, annotations = raw.metadata.labels or {}, raw.metadata.annotations or {}
    containers = [*(spec.init_containers or ()), *(spec.containers or ())]
    requests = sorted({name for container in containers for name in _asked(container)})
    statuses = [*(status.init_container_statuses or ()), *(status.container_statuses or ())]
    told = tuple(_told(statuses, status.conditions or ()))
    is_agent = (
        labels.get("app.kubernetes.io/name") in _AGENTS
        or _PLUGIN_NAMES.fullmatch(raw.metadata.name) is not None
    )
    found = facts.Pod(
        namespace=raw.metadata.namespace,
        name=raw.metadata.name,
        node=spec.node_name,
        phase=status.phase,
        annotations={k: v for k, v in annotations.items() if _matters(k)},
        requests=tuple(name for name in requests if facts.is_fuse(name)),
        is_agent=is_agent,
        is_ready=bool(statuses) and all(s.ready for s in status.container_statuses or ()),
        started=_started(statuses) or status.start_time,
        told=tuple(text for text in told if "fuse" in text.lower())[:_TOLD_MAX],
    )
    matters = is_agent or found.requests or found.told or found.is_annotated
    return found if matters else None


def event(raw: RawEvent) -> facts.Told:
    """Return a Kubernetes Event."""
    about = raw.involved_object or _Reference()
    return facts.Told(about.kind, about.namespace, about.name, raw.reason, raw.message)


def slice_of(raw: RawSlice) -> facts.Slice:
    """Return a ResourceSlice."""
    devices = raw.spec.devices or []
    products = [_product(device.basic or device) for device in devices]
    return facts.Slice(
        node=raw.spec.node_name,
        driver=raw.spec.driver,
        is_all_nodes=raw.spec.all_nodes,
        products=tuple(product for product in products if product is not None),
        devices=tuple(device.name for device in devices),
    )


def _asked(container: _Container) -> Iterable[str]:
    wanted = container.resources or _Requirements()
    return (wanted.requests or {}).keys() | (wanted.limits or {}).keys()


def _told(statuses: Iterable[_ContainerStatus], conditions: Iterable[_Condition]) -> Iterable[str]:
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


def _matters(annotation: str) -> bool:
    return annotation.startswith((facts.FUSE_ANNOTATION, "required-plugins.noderesource.dev"))


def _product(device: _Device) -> tuple[str, int | None, bool] | None:
    """Return product, memory and whether it is a part (k8s-dra-driver-gpu, deviceinfo.go)."""
    attributes = _bare(device.attributes or {})
    found = attributes.get("productName")
    if found is None or not found.string:
        return None
    memory = _bare(device.capacity or {}).get("memory")
    memory_mib = facts.quantity(memory.value) // _MIB if memory else 0
    kind = attributes.get("type")
    is_part = (kind is not None and kind.string not in {None, "gpu"}) or "profile" in attributes
    return found.string, memory_mib or None, is_part


def _bare(values: Mapping[str, Held]) -> dict[str, Held]:
    """Return attributes by their name without a domain."""
    return {key.rpartition("/")[2]: value for key, value in values.items()}
