"""Pure: defines objects that show whether plugins and DRA drivers work: pods, events, claims.

They have more fields than those in `objects`, which services keep for every pod. Sources:
kubernetes/api core/v1 and resource/v1 (1.36).
"""

from datetime import datetime
from typing import Final

import msgspec

from muster.kubernetes import objects, scheduling

UNHEALTHY: Final = "Unhealthy"


class Metadata(objects.Metadata, frozen=True):
    """The metadata of an object, including what may delay its deletion."""

    generation: int = 0
    finalizers: tuple[str, ...] | None = None

    @property
    def deleted_at(self) -> datetime | None:
        """Return when the object's grace period ends or ended; None if it is not being deleted."""
        return objects.parse_time(self.deletion_timestamp)

    @property
    def changed_at(self) -> datetime | None:
        """Return when the object was last changed or created; None if unknown."""
        times = (objects.parse_time(entry.time) for entry in self.managed_fields or ())
        return max((time for time in (*times, self.created_at) if time), default=None)


class AllocatedDevice(objects.Object, frozen=True):
    """A container's device, and its health as last reported to the kubelet (KEP-4680)."""

    resource_id: str = msgspec.field(name="resourceID", default="")
    health: str = ""
    message: str = ""


class AllocatedResource(objects.Object, frozen=True):
    """The devices of a resource, or of a claim if the name begins with `claim:`."""

    name: str = ""
    resources: tuple[AllocatedDevice, ...] | None = None


class ContainerStatus(objects.ContainerStatus, frozen=True):
    """The status of a container, with its devices."""

    allocated_resources_status: tuple[AllocatedResource, ...] | None = None


class PodStatus(objects.PodStatus, frozen=True):
    """The status of a pod, and why it was rejected."""

    reason: str = ""
    message: str = ""
    container_statuses: tuple[ContainerStatus, ...] | None = None
    extended_resource_claim_status: objects.Object | None = None


class PodClaim(objects.Object, frozen=True):
    """A pod's claim, by its name within the pod."""

    name: str = ""


class PodSpec(objects.PodSpec, frozen=True):
    """The specification of a pod, with its claims."""

    resource_claims: tuple[PodClaim, ...] | None = None


class Pod(objects.Pod, frozen=True):
    """A pod with its devices and claims."""

    metadata: Metadata = Metadata()
    spec: PodSpec | None = None
    status: PodStatus | None = None

    @property
    def full_name(self) -> str:
        """Return `namespace/name`."""
        return f"{self.metadata.namespace}/{self.metadata.name}"

    @property
    def containers(self) -> tuple[ContainerStatus, ...]:
        """Return the statuses of the pod's containers, without init containers."""
        return (self.status.container_statuses if self.status else None) or ()

    @property
    def has_claims(self) -> bool:
        """Return whether the pod has claims, in its spec or created for an extended resource."""
        extended = self.status and self.status.extended_resource_claim_status
        return bool(self.spec and self.spec.resource_claims) or extended is not None

    @property
    def rejection(self) -> str:
        """Return why the kubelet refused the pod's devices; empty if it did not refuse them."""
        if not self.status or self.status.reason != "UnexpectedAdmissionError":
            return ""
        return self.status.message or self.status.reason

    def requested(self) -> frozenset[str]:
        """Return the extended resources that the pod's containers request."""
        spec = self.spec or PodSpec()
        return frozenset(
            name
            for container in (*(spec.init_containers or ()), *(spec.containers or ()))
            if container.resources is not None
            for part in (container.resources.limits, container.resources.requests)
            for name, amount in (part or {}).items()
            if scheduling.is_extended(name) and str(amount) != "0"
        )


class EventSeries(objects.Object, frozen=True):
    """When a repeated event last occurred."""

    last_observed_time: str | None = None


class Event(objects.HasMetadata, frozen=True):
    """A Kubernetes Event with its time."""

    involved_object: objects.ObjectReference | None = None
    reason: str = ""
    message: str = ""
    last_timestamp: str | None = None
    event_time: str | None = None
    series: EventSeries | None = None

    @property
    def last_at(self) -> datetime | None:
        """Return when the event last occurred; None if unknown."""
        series = self.series.last_observed_time if self.series else None
        texts = (series, self.last_timestamp, self.event_time, self.metadata.creation_timestamp)
        return next((time for text in texts if (time := objects.parse_time(text))), None)


class DaemonSetStatus(objects.Object, frozen=True):
    """The progress of a DaemonSet's rollout."""

    observed_generation: int = 0
    desired_number_scheduled: int = 0
    updated_number_scheduled: int = 0
    number_available: int = 0


class DaemonSet(objects.Workload, frozen=True):
    """A DaemonSet with its progress."""

    metadata: Metadata = Metadata()
    status: DaemonSetStatus = DaemonSetStatus()

    @property
    def is_rolling(self) -> bool:
        """Return whether some of its pods are unavailable or do not have its newest template."""
        status = self.status
        return (
            status.observed_generation < self.metadata.generation
            or status.updated_number_scheduled < status.desired_number_scheduled
            or status.number_available < status.desired_number_scheduled
        )


class SlicePool(objects.Object, frozen=True):
    """The pool of a ResourceSlice; only slices of the highest generation count."""

    name: str = ""
    generation: int = 0
    resource_slice_count: int = 0


class SliceSpec(scheduling.ResourceSliceSpec, frozen=True):
    """The devices of a ResourceSlice and their pool; an empty `node_name` means several nodes."""

    pool: SlicePool = SlicePool()


class ResourceSlice(objects.HasMetadata, frozen=True):
    """A ResourceSlice with its pool."""

    metadata: Metadata = Metadata()
    spec: SliceSpec = SliceSpec()

    @property
    def uuids(self) -> set[str]:
        """The UUIDs of the devices, as GPU drivers publish them."""
        attributes = [(each.attributes or {}).get("uuid") for each in self.spec.devices or ()]
        return {each.string for each in attributes if each and each.string}


class AllocatedRequest(objects.Object, frozen=True):
    """A device that was allocated for one of a claim's requests."""

    driver: str = ""
    pool: str = ""
    device: str = ""


class ClaimDevices(objects.Object, frozen=True):
    """The devices of an allocated claim."""

    results: tuple[AllocatedRequest, ...] | None = None


class ClaimAllocation(objects.Object, frozen=True):
    """The allocation of a claim."""

    devices: ClaimDevices = ClaimDevices()


class ClaimConsumer(objects.Object, frozen=True):
    """An object that may use a claim, such as a pod."""

    resource: str = ""
    name: str = ""
    uid: str = ""


class ClaimStatus(objects.Object, frozen=True):
    """A claim's devices, and the objects, such as pods, that may use them."""

    allocation: ClaimAllocation | None = None
    reserved_for: tuple[ClaimConsumer, ...] | None = None


class ResourceClaim(objects.HasMetadata, frozen=True):
    """A ResourceClaim."""

    status: ClaimStatus = ClaimStatus()

    @property
    def drivers(self) -> frozenset[str]:
        """Return the drivers of the claim's devices; empty if it has none."""
        allocation = self.status.allocation
        results = allocation.devices.results if allocation else None
        return frozenset(result.driver for result in results or ())

    @property
    def pods(self) -> frozenset[str]:
        """Return the uids of the pods that may use the claim."""
        consumers = self.status.reserved_for or ()
        return frozenset(each.uid for each in consumers if each.resource == "pods")


class CelSelector(objects.Object, frozen=True):
    """A condition on devices in CEL."""

    expression: str = ""


class DeviceSelector(objects.Object, frozen=True):
    """A selector of devices."""

    cel: CelSelector = CelSelector()


class DeviceClassSpec(objects.Object, frozen=True):
    """Which devices belong to a class, and the extended resource by which pods may request them."""

    selectors: tuple[DeviceSelector, ...] | None = None
    extended_resource_name: str = ""


class DeviceClass(objects.HasMetadata, frozen=True):
    """A DeviceClass."""

    spec: DeviceClassSpec = DeviceClassSpec()
