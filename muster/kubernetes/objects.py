"""Pure: the objects of the Kubernetes API, as far as muster reads them.

Every field may be absent or null, every other field is skipped while decoding, and times stay text
until somebody asks for them: one odd value must not cost the object. Properties give what is absent
as empty. A service decodes these and keeps only what it projects out of them.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Final

import msgspec

Labels = Mapping[str, str]

_NOTHING: Final[Labels] = {}


class Object(msgspec.Struct, frozen=True, rename="camel"):
    """Camel case, as the API writes it."""


class ManagedFields(Object, frozen=True):
    """Which manager owns which fields, and since when."""

    manager: str = ""
    time: str | None = None
    fields_v1: msgspec.Raw = msgspec.field(name="fieldsV1", default=msgspec.Raw(b"null"))

    def owns(self, field: str) -> bool:
        """Return whether a field of this name is among them, wherever it stands."""
        return f'"f:{field}"'.encode() in bytes(self.fields_v1)


class Metadata(Object, frozen=True):
    """What every object has; times are the API server's."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    managed_fields: tuple[ManagedFields, ...] | None = None

    @property
    def created_at(self) -> datetime | None:
        """Return when it was created."""
        return parse_time(self.creation_timestamp)

    @property
    def is_being_deleted(self) -> bool:
        """Return whether somebody has deleted it and it only waits for its finalizers."""
        return self.deletion_timestamp is not None


class HasMetadata(Object, frozen=True):
    """Anything with metadata."""

    metadata: Metadata = Metadata()

    @property
    def labels(self) -> Labels:
        """Return its labels."""
        return self.metadata.labels or _NOTHING

    @property
    def annotations(self) -> Labels:
        """Return its annotations."""
        return self.metadata.annotations or _NOTHING


class Condition(Object, frozen=True):
    """Of a node or a pod; `status` is True, False or Unknown."""

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None


class Requirement(Object, frozen=True):
    """One requirement of a selector: a key, an operator, its values."""

    key: str = ""
    operator: str = ""
    values: tuple[str, ...] | None = None


class LabelSelector(Object, frozen=True):
    """Everything in it must hold."""

    match_labels: dict[str, str] | None = None
    match_expressions: tuple[Requirement, ...] | None = None


class NodeSelectorTerm(Object, frozen=True):
    """Everything in it must hold; of several terms, one."""

    match_expressions: tuple[Requirement, ...] | None = None
    match_fields: tuple[Requirement, ...] | None = None


class NodeSelector(Object, frozen=True):
    """Several terms, of which one must hold."""

    node_selector_terms: tuple[NodeSelectorTerm, ...] | None = None


class NodeAffinity(Object, frozen=True):
    """Which nodes a pod may be scheduled to."""

    required: NodeSelector | None = msgspec.field(
        name="requiredDuringSchedulingIgnoredDuringExecution", default=None
    )


class Affinity(Object, frozen=True):
    """Of these only the nodes'."""

    node_affinity: NodeAffinity | None = None


class Taint(Object, frozen=True):
    """Keeps pods off a node that do not tolerate it."""

    key: str = ""
    value: str = ""
    effect: str = ""


class Toleration(Object, frozen=True):
    """What a pod tolerates; an empty key or effect is any."""

    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""


class NodeSpec(Object, frozen=True):
    """What others say about a node."""

    provider_id: str = msgspec.field(name="providerID", default="")
    unschedulable: bool = False
    taints: tuple[Taint, ...] | None = None


class NodeInfo(Object, frozen=True):
    """What runs on a node."""

    container_runtime_version: str = ""


class NodeStatus(Object, frozen=True):
    """What the kubelet reports."""

    capacity: dict[str, str | int] | None = None
    allocatable: dict[str, str | int] | None = None
    conditions: tuple[Condition, ...] | None = None
    node_info: NodeInfo | None = None


class Node(HasMetadata, frozen=True):
    """A node."""

    spec: NodeSpec | None = None
    status: NodeStatus | None = None

    @property
    def taints(self) -> tuple[Taint, ...]:
        """Return its taints."""
        return (self.spec.taints if self.spec else None) or ()

    @property
    def capacity(self) -> Mapping[str, str | int]:
        """Return its resources, as quantities."""
        return (self.status.capacity if self.status else None) or {}

    @property
    def allocatable(self) -> Mapping[str, str | int]:
        """Return the resources that pods can have, as quantities."""
        return (self.status.allocatable if self.status else None) or {}

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """Return its conditions."""
        return (self.status.conditions if self.status else None) or ()


class ResourceRequirements(Object, frozen=True):
    """What a container asks for."""

    requests: dict[str, str | int] | None = None
    limits: dict[str, str | int] | None = None


class EnvVar(Object, frozen=True):
    """A variable of a container's environment."""

    name: str = ""
    value: str = ""


class Container(Object, frozen=True):
    """A container as a pod template describes it."""

    name: str = ""
    image: str = ""
    command: tuple[str, ...] | None = None
    args: tuple[str, ...] | None = None
    env: tuple[EnvVar, ...] | None = None
    resources: ResourceRequirements | None = None


class PodSpec(Object, frozen=True):
    """What a pod is to be, also in a template."""

    node_name: str = ""
    node_selector: dict[str, str] | None = None
    affinity: Affinity | None = None
    tolerations: tuple[Toleration, ...] | None = None
    host_network: bool = False
    containers: tuple[Container, ...] | None = None
    init_containers: tuple[Container, ...] | None = None


class ContainerStateDetail(Object, frozen=True):
    """Why a container waits, since when it runs, or how it ended."""

    reason: str = ""
    message: str = ""
    started_at: str | None = None


class ContainerState(Object, frozen=True):
    """One of the three."""

    waiting: ContainerStateDetail | None = None
    running: ContainerStateDetail | None = None
    terminated: ContainerStateDetail | None = None


class ContainerStatus(Object, frozen=True):
    """How a container is doing."""

    name: str = ""
    ready: bool = False
    restart_count: int = 0
    state: ContainerState | None = None
    last_state: ContainerState | None = None


class PodStatus(Object, frozen=True):
    """What the kubelet reports."""

    phase: str = ""
    start_time: str | None = None
    conditions: tuple[Condition, ...] | None = None
    container_statuses: tuple[ContainerStatus, ...] | None = None
    init_container_statuses: tuple[ContainerStatus, ...] | None = None


class Pod(HasMetadata, frozen=True):
    """A pod."""

    spec: PodSpec | None = None
    status: PodStatus | None = None

    @property
    def node_name(self) -> str:
        """Return the node that it is bound to, empty if it is to none."""
        return self.spec.node_name if self.spec else ""

    @property
    def phase(self) -> str:
        """Return its phase."""
        return self.status.phase if self.status else ""

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """Return its conditions."""
        return (self.status.conditions if self.status else None) or ()

    @property
    def container_statuses(self) -> tuple[ContainerStatus, ...]:
        """Return how its containers are doing, without init containers."""
        return (self.status.container_statuses if self.status else None) or ()


class PodTemplate(HasMetadata, frozen=True):
    """What the pods of a workload look like."""

    spec: PodSpec | None = None


class WorkloadSpec(Object, frozen=True):
    """Of a DaemonSet or a Deployment."""

    selector: LabelSelector | None = None
    template: PodTemplate | None = None


class Workload(HasMetadata, frozen=True):
    """A DaemonSet or a Deployment."""

    spec: WorkloadSpec | None = None

    @property
    def pod_spec(self) -> PodSpec:
        """Return what its pods are to be."""
        template = self.spec.template if self.spec else None
        return (template.spec if template else None) or PodSpec()


DaemonSet = Workload
Deployment = Workload


class ConfigMap(HasMetadata, frozen=True):
    """A ConfigMap; without data it is any object of which only the metadata matters."""

    data: dict[str, str] | None = None


class ObjectReference(Object, frozen=True):
    """Which object an Event is about."""

    kind: str = ""
    namespace: str = ""
    name: str = ""


class Event(Object, frozen=True):
    """A Kubernetes Event."""

    involved_object: ObjectReference | None = None
    reason: str = ""
    message: str = ""


class LeaseSpec(Object, frozen=True):
    """Who holds a Lease; `renew_time` is by the holder's clock."""

    holder_identity: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class Lease(HasMetadata, frozen=True):
    """A Lease."""

    spec: LeaseSpec | None = None

    @property
    def holder(self) -> str:
        """Return who holds it, empty if nobody does."""
        return (self.spec.holder_identity if self.spec else None) or ""

    @property
    def renewed_at(self) -> datetime | None:
        """Return when it was last renewed, by the API server's clock wherever that is known.

        `renewTime` is by the holder's clock, which may be wrong. Beside it the API server keeps
        when that field last changed (apimachinery util/managedfields, managedfieldsupdater).
        """
        owners = (entry for entry in self.metadata.managed_fields or () if entry.owns("renewTime"))
        times = (parse_time(entry.time) for entry in owners)
        by_server = max(filter(None, times), default=None)
        return by_server or parse_time(self.spec.renew_time if self.spec else None)


def condition(conditions: Iterable[Condition], kind: str) -> Condition | None:
    """Return the condition of a type, such as `Ready`; None without one."""
    return next((entry for entry in conditions if entry.type == kind), None)


def is_true(conditions: Iterable[Condition], kind: str) -> bool:
    """Return whether a condition is there, and True."""
    entry = condition(conditions, kind)
    return entry is not None and entry.status == "True"


def parse_time(text: str | None) -> datetime | None:
    """Return a time of the API (RFC 3339); None if there is none or it names no time zone."""
    try:
        time = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return time if time.tzinfo else None
