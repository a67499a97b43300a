"""Pure: What we read of Kubernetes' objects, and what it means in our words.

Every field may be absent, and everything else in an object is skipped while it is read, so that a
node costs what we keep of it and not what it says.
"""

import re
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from fractions import Fraction
from typing import Final

import msgspec

from muster_health.model import facts

TEMPLATE_GENERATION: Final = "pod-template-generation"
REVISION: Final = "controller-revision-hash"
"""Labels that the DaemonSet controller puts on its pods (daemon/util/daemonset_util.go, 1.36)."""

_GENERATION_OF: Final = "deprecated.daemonset.template.generation"
_LEAVING: Final = frozenset(
    {
        "ToBeDeletedByClusterAutoscaler",
        "karpenter.sh/disrupted",
        "karpenter.sh/disruption",
        "node.kubernetes.io/out-of-service",
    }
)
_OFFERS_MAX: Final = 64
_SUFFIXES: Final[Mapping[str, Fraction]] = {
    "": Fraction(1),
    **{name: Fraction(1000) ** power for power, name in enumerate(("n", "u", "m"), -3)},
    **{name: Fraction(1000) ** power for power, name in enumerate("kMGTPE", 1)},
    **{f"{name}i": Fraction(1024) ** power for power, name in enumerate("KMGTPE", 1)},
}
_QUANTITY: Final = re.compile(
    r"([+-]?[0-9]{1,24}(?:\.[0-9]{0,24})?)(?:[eE]([+-]?[0-9]{1,2})|(\w{0,2}))"
)

Labels = Mapping[str, str]


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """Of any object. Times are the API server's."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None
    labels: dict[str, str] | None = None


class Taint(msgspec.Struct, frozen=True):
    """Keeps pods off a node that do not tolerate it."""

    key: str = ""
    value: str = ""
    effect: str = ""


class Condition(msgspec.Struct, frozen=True):
    """Of a node or a pod."""

    type: str = ""
    status: str = ""


class _NodeSpec(msgspec.Struct, frozen=True):
    unschedulable: bool = False
    taints: tuple[Taint, ...] | None = None


class _NodeStatus(msgspec.Struct, frozen=True):
    capacity: dict[str, str] | None = None
    allocatable: dict[str, str] | None = None
    conditions: tuple[Condition, ...] | None = None


class Node(msgspec.Struct, frozen=True):
    """A node, as it is read."""

    metadata: Metadata = Metadata()
    spec: _NodeSpec = _NodeSpec()
    status: _NodeStatus = _NodeStatus()

    @property
    def ready(self) -> bool | None:
        """Tell whether it says it is Ready; `Unknown` is what others say of one that is silent."""
        found = [c.status for c in self.status.conditions or () if c.type == "Ready"]
        return found[0] == "True" if found else None

    @property
    def planned(self) -> tuple[facts.Planned, ...]:
        """Return what shows that it is meant to go."""
        found = []
        if self.spec.unschedulable:
            found.append(facts.Planned.UNSCHEDULABLE)
        leaves = any(taint.key in _LEAVING for taint in self.spec.taints or ())
        if leaves or self.metadata.deletion_timestamp is not None:
            found.append(facts.Planned.TO_BE_DELETED)
        return tuple(found)

    @property
    def offers(self) -> dict[str, facts.Offer]:
        """Return what it offers of extended resources; an amount that cannot be read is 0."""
        capacity, allocatable = self.status.capacity or {}, self.status.allocatable or {}
        names = sorted(filter(_is_extended, capacity.keys() | allocatable.keys()))[:_OFFERS_MAX]
        return {
            name: facts.Offer(
                capacity=amount(capacity.get(name, "0")) or 0,
                allocatable=amount(allocatable.get(name, "0")) or 0,
            )
            for name in names
        }


class _LeaseSpec(msgspec.Struct, frozen=True, rename="camel"):
    renew_time: datetime | None = None


class _Managed(msgspec.Struct, frozen=True, rename="camel"):
    time: datetime | None = None
    fields_v1: msgspec.Raw = msgspec.Raw()


class _LeaseMetadata(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""
    managed_fields: tuple[_Managed, ...] | None = None


class Lease(msgspec.Struct, frozen=True):
    """A node's lease."""

    metadata: _LeaseMetadata = _LeaseMetadata()
    spec: _LeaseSpec = _LeaseSpec()

    @property
    def renewed_at(self) -> datetime | None:
        """Return when it was last renewed, by the API server's clock wherever that is known.

        `renewTime` is the kubelet's word, by a clock that may be wrong. The API server notes beside
        it when that field was last changed (apimachinery util/managedfields, managedfieldsupdater).
        """
        noted = [
            managed.time
            for managed in self.metadata.managed_fields or ()
            if managed.time is not None and b'"f:renewTime"' in bytes(managed.fields_v1)
        ]
        return max(noted, default=None) or self.spec.renew_time


class _Waiting(msgspec.Struct, frozen=True):
    reason: str = ""


class _State(msgspec.Struct, frozen=True):
    waiting: _Waiting | None = None


class _Container(msgspec.Struct, frozen=True, rename="camel"):
    restart_count: int = 0
    state: _State | None = None


class _PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    node_name: str = ""


class _PodStatus(msgspec.Struct, frozen=True, rename="camel"):
    phase: str = ""
    conditions: tuple[Condition, ...] | None = None
    container_statuses: tuple[_Container, ...] | None = None


class Pod(msgspec.Struct, frozen=True):
    """A pod of the plugin, as it is read."""

    metadata: Metadata = Metadata()
    spec: _PodSpec = _PodSpec()
    status: _PodStatus = _PodStatus()

    def in_our_words(self, current: str) -> facts.Pod:
        """Return it as the detector knows pods; `current` is its DaemonSet's newest revision."""
        containers = self.status.container_statuses or ()
        waiting = [c.state.waiting.reason for c in containers if c.state and c.state.waiting]
        return facts.Pod(
            name=f"{self.metadata.namespace}/{self.metadata.name}",
            uid=self.metadata.uid,
            phase=self.status.phase,
            ready=any(c == Condition("Ready", "True") for c in self.status.conditions or ()),
            restarts=sum(container.restart_count for container in containers),
            deleting=self.metadata.deletion_timestamp is not None,
            waiting=waiting[0] if waiting else "",
            revision=(self.metadata.labels or {}).get(REVISION, ""),
            current=current,
        )


class Requirement(msgspec.Struct, frozen=True):
    """One requirement of a selector: a key, an operator, its values."""

    key: str = ""
    operator: str = ""
    values: tuple[str, ...] | None = None


class _LabelSelector(msgspec.Struct, frozen=True, rename="camel"):
    match_labels: dict[str, str] | None = None
    match_expressions: tuple[Requirement, ...] | None = None


class Term(msgspec.Struct, frozen=True, rename="camel"):
    """One of several sets of requirements, of which one must hold."""

    match_expressions: tuple[Requirement, ...] | None = None
    match_fields: tuple[Requirement, ...] | None = None


class _NodeSelector(msgspec.Struct, frozen=True, rename="camel"):
    node_selector_terms: tuple[Term, ...] | None = None


class _NodeAffinity(msgspec.Struct, frozen=True):
    required: _NodeSelector | None = msgspec.field(
        name="requiredDuringSchedulingIgnoredDuringExecution", default=None
    )


class _Affinity(msgspec.Struct, frozen=True, rename="camel"):
    node_affinity: _NodeAffinity | None = None


class Toleration(msgspec.Struct, frozen=True):
    """What a pod puts up with; an empty key or effect is any."""

    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""


class TemplateSpec(msgspec.Struct, frozen=True, rename="camel"):
    """What decides where a DaemonSet's pods run."""

    node_selector: dict[str, str] | None = None
    affinity: _Affinity | None = None
    tolerations: tuple[Toleration, ...] | None = None
    host_network: bool = False


class _Template(msgspec.Struct, frozen=True):
    spec: TemplateSpec = TemplateSpec()


class _DaemonSetSpec(msgspec.Struct, frozen=True):
    selector: _LabelSelector = _LabelSelector()
    template: _Template = _Template()


class _DaemonSetMetadata(Metadata, frozen=True, rename="camel"):
    annotations: dict[str, str] | None = None


class DaemonSet(msgspec.Struct, frozen=True):
    """The DaemonSet of a plugin, as it is read."""

    metadata: _DaemonSetMetadata = _DaemonSetMetadata()
    spec: _DaemonSetSpec = _DaemonSetSpec()

    @property
    def generation(self) -> str:
        """Return which generation of its template it wants; empty if it does not say."""
        return (self.metadata.annotations or {}).get(_GENERATION_OF, "")

    @property
    def pods(self) -> str:
        """Return the label selector of its pods, as a query has it; it never changes."""
        selector = self.spec.selector
        parts = [f"{key}={value}" for key, value in sorted((selector.match_labels or {}).items())]
        for found in selector.match_expressions or ():
            values = ",".join(found.values or ())
            match found.operator:
                case "In" | "NotIn":
                    parts.append(f"{found.key} {found.operator.lower()} ({values})")
                case "DoesNotExist":
                    parts.append(f"!{found.key}")
                case _:
                    parts.append(found.key)
        return ",".join(parts)


def amount(written: str) -> int | None:
    """Return a quantity as Kubernetes writes it, such as `5k`, rounded down; None if it is none."""
    match = _QUANTITY.fullmatch(written)
    if match is None or (match[3] or "") not in _SUFFIXES:
        return None
    scale = Fraction(10) ** int(match[2]) if match[2] else _SUFFIXES[match[3] or ""]
    return int(Fraction(match[1].rstrip(".")) * scale)


def age_s(then: datetime | None, server_now: datetime | None) -> float | None:
    """Return the seconds between two times of the API server, never less than 0."""
    if then is None or server_now is None or then.tzinfo is None:
        return None
    return max(0.0, (server_now - then.astimezone(UTC)).total_seconds())


def _is_extended(resource: str) -> bool:
    domain, slash, _ = resource.partition("/")
    return bool(slash) and domain != "kubernetes.io" and not domain.endswith(".kubernetes.io")


_ENDED: Final = frozenset({"Succeeded", "Failed"})
_NONE: Final = frozenset({b'"0"', b"0"})


class _Resources(msgspec.Struct, frozen=True):
    requests: dict[str, msgspec.Raw] | None = None
    limits: dict[str, msgspec.Raw] | None = None


class _HolderContainer(msgspec.Struct, frozen=True):
    resources: _Resources = _Resources()


class _HolderMetadata(msgspec.Struct, frozen=True):
    name: str = ""
    namespace: str = ""


class _HolderSpec(msgspec.Struct, frozen=True, rename="camel"):
    containers: tuple[_HolderContainer, ...] | None = None
    init_containers: tuple[_HolderContainer, ...] | None = None


class _HolderStatus(msgspec.Struct, frozen=True):
    phase: str = ""


class _Holder(msgspec.Struct, frozen=True):
    metadata: _HolderMetadata = _HolderMetadata()
    spec: _HolderSpec = _HolderSpec()
    status: _HolderStatus = _HolderStatus()


class _HolderList(msgspec.Struct, frozen=True):
    items: tuple[_Holder, ...] | None = None


def holders_of(listed: bytes, resources: Collection[str]) -> tuple[str, ...]:
    """Return who has not ended, and requests one of these: `namespace/name`, sorted.

    Raises what msgspec raises on bytes that are no list of pods.
    """
    pods = msgspec.json.decode(listed, type=_HolderList).items or ()
    held = (pod.metadata for pod in pods if _holds(pod, resources))
    return tuple(sorted(f"{one.namespace}/{one.name}" for one in held))


def _holds(pod: _Holder, resources: Collection[str]) -> bool:
    """Tell whether one of its containers requests one of these; a sidecar is an init container.

    The API server requests what is only limited (core/v1 defaults.go, SetDefaults_Pod, 1.36).
    """
    if pod.status.phase in _ENDED:
        return False
    return any(
        resource in resources and bytes(amount) not in _NONE
        for one in (*(pod.spec.init_containers or ()), *(pod.spec.containers or ()))
        for said in (one.resources.limits, one.resources.requests)
        for resource, amount in (said or {}).items()
    )
