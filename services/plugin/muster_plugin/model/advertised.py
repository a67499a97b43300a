"""Pure: an advertised device, and the response for a container that gets some."""

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
    """One device of the kubelet, with an id. All replicas of one device have the same `physical`.

    `identity` names the device of each entry of the group, by the entry's number; the numbers may
    change with the configuration.
    """

    id: vocabulary.DeviceId
    physical: str
    identity: Mapping[int, str]
    devices: tuple[DeviceSpec, ...] = ()
    mounts: tuple[Mount, ...] = ()
    nodes: tuple[str, ...] = ()
    """The host's paths of the device specs, with links resolved."""
    numa: int | None = None
    gpu: "gpu.Device | None" = None
    """The GPU or MIG device of this replica; None for device nodes."""

    def is_same(self, other: "Unit") -> bool:
        """Return whether both are the same devices, except for one optional device."""
        ours, theirs = {*self.identity.values()}, {*other.identity.values()}
        return ours <= theirs or theirs <= ours


class AllocationError(Exception):
    """A request that cannot or must not be allocated; the pod's event shows the text."""


class ContainerResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The response for one container; `cdi_devices` are names that CDI specs resolve."""

    devices: tuple[DeviceSpec, ...] = ()
    mounts: tuple[Mount, ...] = ()
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    annotations: dict[str, str] = msgspec.field(default_factory=dict)
    cdi_devices: tuple[str, ...] = ()
