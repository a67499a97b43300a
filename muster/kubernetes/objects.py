"""Pure: defines the objects and fields of the Kubernetes API that muster reads.

A field may be absent or null; properties are then empty or None. Times are parsed on demand.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Final

import msgspec

Labels = Mapping[str, str]
_NOTHING: Final[Labels] = {}


class Object(msgspec.Struct, frozen=True, rename="camel"):
    """Base of all objects; field names are in camel case in JSON, as the API writes them."""


class ManagedFields(Object, frozen=True):
    """The fields that a manager owns, and when it last changed them."""

    manager: str = ""
    time: str | None = None
    fields_v1: msgspec.Raw = msgspec.field(name="fieldsV1", default=msgspec.Raw(b"null"))

    def owns(self, field: str) -> bool:
        """Return whether a field of this name, at any depth, is among the owned fields."""
        return f'"f:{field}"'.encode() in bytes(self.fields_v1)


class Metadata(Object, frozen=True):
    """The metadata of an object; times are the API server's."""

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
        """Return when the object was created; None if unknown."""
        return parse_time(self.creation_timestamp)

    @property
    def is_being_deleted(self) -> bool:
        """Return whether the object is being deleted."""
        return self.deletion_timestamp is not None


class HasMetadata(Object, frozen=True):
    """Any object, reduced to its metadata."""

    metadata: Metadata = Metadata()

    @property
    def labels(self) -> Labels:
        """Return the object's labels."""
        return self.metadata.labels or _NOTHING

    @property
    def annotations(self) -> Labels:
        """Return the object's annotations."""
        return self.metadata.annotations or _NOTHING


class Condition(Object, frozen=True):
    """A condition of a node or a pod; `status` is True, False or Unknown."""

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None


class Requirement(Object, frozen=True):
    """One requirement of a selector: a key, an operator and values."""

    key: str = ""
    operator: str = ""
    values: tuple[str, ...] | None = None


class LabelSelector(Object, frozen=True):
    """A label selector; all its requirements must match."""

    match_labels: dict[str, str] | None = None
    match_expressions: tuple[Requirement, ...] | None = None


class NodeSelectorTerm(Object, frozen=True):
    """All requirements of a term must match; any one term is enough."""

    match_expressions: tuple[Requirement, ...] | None = None
    match_fields: tuple[Requirement, ...] | None = None


class NodeSelector(Object, frozen=True):
    """A node selector; one matching term is enough."""

    node_selector_terms: tuple[NodeSelectorTerm, ...] | None = None


class NodeAffinity(Object, frozen=True):
    """The node affinity of a pod: the nodes to which it may be scheduled."""

    required: NodeSelector | None = msgspec.field(
        name="requiredDuringSchedulingIgnoredDuringExecution", default=None
    )


class Affinity(Object, frozen=True):
    """The affinity of a pod, of which only the node affinity is read."""

    node_affinity: NodeAffinity | None = None


class Taint(Object, frozen=True):
    """A taint, which keeps pods that do not tolerate it off a node."""

    key: str = ""
    value: str = ""
    effect: str = ""


class Toleration(Object, frozen=True):
    """A toleration; an empty key matches every key, an empty effect every effect."""

    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""


class NodeSpec(Object, frozen=True):
    """The specification of a node: provider id, taints, and whether it is cordoned."""

    provider_id: str = msgspec.field(name="providerID", default="")
    unschedulable: bool = False
    taints: tuple[Taint, ...] | None = None


class NodeInfo(Object, frozen=True):
    """The versions of a node's software."""

    container_runtime_version: str = ""
    kubelet_version: str = ""
    kernel_version: str = ""


class NodeStatus(Object, frozen=True):
    """The status that the kubelet reports."""

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
        """Return the node's taints."""
        return (self.spec.taints if self.spec else None) or ()

    @property
    def capacity(self) -> Mapping[str, str | int]:
        """Return the node's resources, as quantities."""
        return (self.status.capacity if self.status else None) or {}

    @property
    def allocatable(self) -> Mapping[str, str | int]:
        """Return the resources available to pods, as quantities."""
        return (self.status.allocatable if self.status else None) or {}

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """Return the conditions, empty without a status."""
        return (self.status.conditions if self.status else None) or ()


class ResourceRequirements(Object, frozen=True):
    """The resources that a container requests, and its limits."""

    requests: dict[str, str | int] | None = None
    limits: dict[str, str | int] | None = None


class EnvVar(Object, frozen=True):
    """An environment variable of a container."""

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
    """The specification of a pod, also in a pod template."""

    node_name: str = ""
    node_selector: dict[str, str] | None = None
    affinity: Affinity | None = None
    tolerations: tuple[Toleration, ...] | None = None
    host_network: bool = False
    containers: tuple[Container, ...] | None = None
    init_containers: tuple[Container, ...] | None = None


class ContainerStateDetail(Object, frozen=True):
    """Details of one container state: why it is waiting, when it started, or how it ended."""

    reason: str = ""
    message: str = ""
    started_at: str | None = None
    finished_at: str | None = None
    exit_code: int | None = None


class ContainerState(Object, frozen=True):
    """The state of a container: waiting, running or terminated."""

    waiting: ContainerStateDetail | None = None
    running: ContainerStateDetail | None = None
    terminated: ContainerStateDetail | None = None


class VolumeMountStatus(Object, frozen=True):
    """How a volume is mounted; kubelets before 1.31 do not report it."""

    mount_path: str = ""
    recursive_read_only: str = ""


class ContainerStatus(Object, frozen=True):
    """The status of a container."""

    name: str = ""
    ready: bool = False
    restart_count: int = 0
    state: ContainerState | None = None
    last_state: ContainerState | None = None
    volume_mounts: tuple[VolumeMountStatus, ...] | None = None


class PodStatus(Object, frozen=True):
    """The status that the kubelet reports."""

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
        """Return the node that the pod is bound to; empty if it is not bound."""
        return self.spec.node_name if self.spec else ""

    @property
    def phase(self) -> str:
        """Return the pod's phase; empty without a status."""
        return self.status.phase if self.status else ""

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """Return the conditions, empty without a status."""
        return (self.status.conditions if self.status else None) or ()

    @property
    def container_statuses(self) -> tuple[ContainerStatus, ...]:
        """Return the statuses of the pod's containers, without init containers."""
        return (self.status.container_statuses if self.status else None) or ()


class PodTemplate(HasMetadata, frozen=True):
    """The template of a workload's pods."""

    spec: PodSpec | None = None


class WorkloadSpec(Object, frozen=True):
    """The specification of a DaemonSet or a Deployment."""

    selector: LabelSelector | None = None
    template: PodTemplate | None = None


class Workload(HasMetadata, frozen=True):
    """A DaemonSet or a Deployment."""

    spec: WorkloadSpec | None = None

    @property
    def pod_spec(self) -> PodSpec:
        """Return the specification of the workload's pods."""
        template = self.spec.template if self.spec else None
        return (template.spec if template else None) or PodSpec()


DaemonSet = Workload
Deployment = Workload


class ConfigMap(HasMetadata, frozen=True):
    """A ConfigMap; without data it represents any object of which only the metadata matters."""

    data: dict[str, str] | None = None


class ObjectReference(Object, frozen=True):
    """The object to which an Event refers."""

    kind: str = ""
    namespace: str = ""
    name: str = ""


class Event(Object, frozen=True):
    """A Kubernetes Event."""

    involved_object: ObjectReference | None = None
    reason: str = ""
    message: str = ""


class LeaseSpec(Object, frozen=True):
    """The holder of a Lease, and how often it changed; `renew_time` is by the holder's clock."""

    holder_identity: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class Lease(HasMetadata, frozen=True):
    """A Lease."""

    spec: LeaseSpec | None = None

    @property
    def holder(self) -> str:
        """Return the holder of the Lease; empty if there is none."""
        return (self.spec.holder_identity if self.spec else None) or ""

    @property
    def renewed_at(self) -> datetime | None:
        """Return when the Lease was last renewed, if known; by the API server's clock if possible.

        `renewTime` is by the holder's clock, which may be wrong. The API server also records when
        that field last changed (apimachinery util/managedfields, managedfieldsupdater).
        """
        owners = (entry for entry in self.metadata.managed_fields or () if entry.owns("renewTime"))
        by_server = max(filter(None, (parse_time(o.time) for o in owners)), default=None)
        return by_server or parse_time(self.spec.renew_time if self.spec else None)


def condition(conditions: Iterable[Condition], kind: str) -> Condition | None:
    """Return the condition of this type, such as `Ready`; None if there is none."""
    return next((entry for entry in conditions if entry.type == kind), None)


def is_true(conditions: Iterable[Condition], kind: str) -> bool:
    """Return whether a condition exists and is True."""
    return (entry := condition(conditions, kind)) is not None and entry.status == "True"


def parse_time(text: str | None) -> datetime | None:
    """Parse a time of the API (RFC 3339) and return it in UTC; None if it is invalid."""
    try:
        time = datetime.fromisoformat(text or "")
        return time.astimezone(UTC) if time.tzinfo else None
    except (ValueError, OverflowError):
        return None
