"""Pure: one device as it is advertised, and what a container gets with its devices."""

from collections.abc import Mapping

import msgspec

from muster import vocabulary
from muster_plugin.model import gpu


class DeviceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A device node of the host, and where a container sees it."""

    host_path: str
    container_path: str
    permissions: str


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """A file or directory of the host, and where a container sees it."""

    host_path: str
    container_path: str
    read_only: bool


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """One schedulable thing. All replicas of one thing have the same `physical`.

    `identity` tells for each entry of the group (by its number) which device it is; the numbers
    may change with the configuration.
    """

    id: vocabulary.DeviceId
    physical: str
    identity: Mapping[int, str]
    devices: tuple[DeviceSpec, ...] = ()
    mounts: tuple[Mount, ...] = ()
    nodes: tuple[str, ...] = ()
    """The host's paths behind the device specs, once links are followed."""
    numa: int | None = None
    gpu: "gpu.Device | None" = None
    """The GPU or MIG device that this is a replica of; None for device nodes."""

    def is_same(self, other: "Unit") -> bool:
        """Say whether both are the same devices; one of them may have an optional part more."""
        ours, theirs = {*self.identity.values()}, {*other.identity.values()}
        return ours <= theirs or theirs <= ours


class AllocationError(Exception):
    """A request for what we do not have or may not give; the text ends up in the pod's event."""


class ContainerResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What one container is given; `cdi_devices` name what a CDI spec says in its place."""

    devices: tuple[DeviceSpec, ...] = ()
    mounts: tuple[Mount, ...] = ()
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    annotations: dict[str, str] = msgspec.field(default_factory=dict)
    cdi_devices: tuple[str, ...] = ()
