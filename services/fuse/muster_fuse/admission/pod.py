"""Pure: defines the parts of a pod that the webhook reads.

Absent and null fields are treated alike. Other fields are ignored and never written back, because
the answer to the API server is a patch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from muster.kubernetes import objects

CONTAINERS = ("initContainers", "containers", "ephemeralContainers")
"""The JSON names of a pod's container lists; the first includes native sidecars."""

Quantity = str | int | float


class Mount(objects.Object, frozen=True):
    """A mount of one of the pod's volumes in a container."""

    name: str = ""
    mount_path: str = ""
    sub_path: str | None = None
    sub_path_expr: str | None = None
    read_only: bool | None = None


class BlockDevice(objects.Object, frozen=True):
    """A raw block device in a container."""

    device_path: str = ""


class Capabilities(objects.Object, frozen=True):
    """The capabilities that a container adds to the runtime's defaults."""

    add: tuple[str, ...] | None = None


class SecurityContext(objects.Object, frozen=True):
    """The privileges of a container."""

    privileged: bool | None = None
    capabilities: Capabilities | None = None


class Resources(objects.Object, frozen=True):
    """The resources of a container."""

    requests: dict[str, Quantity] | None = None
    limits: dict[str, Quantity] | None = None

    def of(self, resource: str) -> dict[str, Quantity]:
        """Return the quantities of a resource by field: `requests`, `limits`, or both."""
        fields = {"requests": self.requests or {}, "limits": self.limits or {}}
        return {name: field[resource] for name, field in fields.items() if resource in field}

    @property
    def names(self) -> Iterator[str]:
        """Yield the name of every resource, twice if it has both requests and limits."""
        yield from self.requests or ()
        yield from self.limits or ()


class Container(objects.Object, frozen=True):
    """A container of any kind."""

    name: str = ""
    resources: Resources | None = None
    security_context: SecurityContext | None = None
    volume_mounts: tuple[Mount, ...] | None = None
    volume_devices: tuple[BlockDevice, ...] | None = None

    @property
    def added_capabilities(self) -> tuple[str, ...]:
        """Return the capabilities that the container adds."""
        context = self.security_context or SecurityContext()
        return (context.capabilities or Capabilities()).add or ()

    @property
    def is_privileged(self) -> bool:
        """Return whether the container has all capabilities and all devices of the node."""
        return bool((self.security_context or SecurityContext()).privileged)


class InlineDriver(objects.Object, frozen=True):
    """The CSI driver of an inline volume."""

    driver: str = ""


class EmptyDir(objects.Object, frozen=True):
    """An emptyDir volume; its settings are ignored."""


class Volume(objects.Object, frozen=True):
    """A volume of the pod; only inline CSI volumes and emptyDir volumes are decoded."""

    name: str = ""
    csi: InlineDriver | None = None
    empty_dir: EmptyDir | None = None


class OperatingSystem(objects.Object, frozen=True):
    """The operating system of the pod's nodes."""

    name: str = ""


class Spec(objects.Object, frozen=True):
    """The specification of a pod."""

    init_containers: tuple[Container, ...] | None = None
    containers: tuple[Container, ...] | None = None
    ephemeral_containers: tuple[Container, ...] | None = None
    volumes: tuple[Volume, ...] | None = None
    os: OperatingSystem | None = None


class Owner(objects.Object, frozen=True):
    """A reference to an object that owns the pod."""

    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool | None = None


class Metadata(objects.Object, frozen=True):
    """The metadata of a pod that does not exist yet: it may have no name."""

    name: str = ""
    annotations: dict[str, str] | None = None
    owner_references: tuple[Owner, ...] | None = None

    @property
    def controller(self) -> Owner | None:
        """Return the owner that controls the pod, such as its Job; None if there is none."""
        return next((owner for owner in self.owner_references or () if owner.controller), None)


class Pod(objects.Object, frozen=True):
    """A pod; decoding fails without metadata or a specification."""

    metadata: Metadata
    spec: Spec

    @property
    def annotations(self) -> Mapping[str, str]:
        """Return the pod's annotations."""
        return self.metadata.annotations or {}

    @property
    def volumes(self) -> tuple[Volume, ...]:
        """Return the pod's volumes."""
        return self.spec.volumes or ()

    @property
    def containers(self) -> tuple[tuple[Container, ...], ...]:
        """Return the pod's lists of containers, in the order of `CONTAINERS`."""
        spec = self.spec
        lists = (spec.init_containers, spec.containers, spec.ephemeral_containers)
        return tuple(containers or () for containers in lists)


@dataclass(frozen=True, slots=True)
class Placed:
    """A container, and a JSON pointer to its place in the pod."""

    container: Container
    pointer: str
    is_ephemeral: bool


def placed(pod: Pod) -> Iterator[Placed]:
    """Yield every container of a pod."""
    for field, containers in zip(CONTAINERS, pod.containers, strict=True):
        for index, container in enumerate(containers):
            yield Placed(container, f"/spec/{field}/{index}", field == CONTAINERS[-1])
