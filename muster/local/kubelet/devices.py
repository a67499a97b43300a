"""Pure: What the kubelet's device manager remembers, as values: devices, lists, offers, grants."""

import msgspec

HEALTHY = "Healthy"
UNHEALTHY = "Unhealthy"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a plugin answered to GetDevicePluginOptions."""

    pre_start_required: bool = False
    preferred_allocation: bool = False


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a ListAndWatch message."""

    id: str
    health: str = HEALTHY
    numa_nodes: tuple[int, ...] = ()


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """One registration of a resource; `number` tells it from every other."""

    resource: str
    socket: str
    number: int


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Who answers for a resource; after a kubelet restart nobody (`client` is None)."""

    client: Client | None
    options: Options
    stopped_at_s: float | None


class Lists(msgspec.Struct, frozen=True, kw_only=True):
    """The last message of a resource. An id sent with both healths stands in both sets."""

    healthy: frozenset[str] = frozenset()
    unhealthy: frozenset[str] = frozenset()
    numa_nodes: dict[str, tuple[int, ...]] = {}


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One container wants `count` devices of a resource; `pod` is the pod's uid."""

    pod: str
    container: str
    resource: str
    count: int


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What a request can be served from: ids of the pod's own init containers, and free ones."""

    request: Request
    reused: frozenset[str]
    available: frozenset[str]

    @property
    def needed(self) -> int:
        """How many ids are still to be chosen among the available."""
        return self.request.count - len(self.reused)


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """Devices of one container, by NUMA node (-1: none), and the plugin's serialized answer."""

    pod: str = msgspec.field(name="PodUID")
    container: str = msgspec.field(name="ContainerName")
    resource: str = msgspec.field(name="ResourceName")
    ids_by_node: dict[int, tuple[str, ...]] = msgspec.field(name="DeviceIDs")
    answer: bytes = msgspec.field(name="AllocResp")

    @property
    def ids(self) -> frozenset[str]:
        """Every id of the grant, once."""
        return frozenset(id_ for ids in self.ids_by_node.values() for id_ in ids)


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What survives a kubelet restart, with the key names of the kubelet's own file."""

    grants: tuple[Grant, ...] = msgspec.field(name="PodDeviceEntries", default=())
    healthy: dict[str, tuple[str, ...]] = msgspec.field(
        name="RegisteredDevices", default_factory=dict
    )


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What one node status update writes; `removed` resources are set to 0 in it, once."""

    capacity: dict[str, int]
    allocatable: dict[str, int]
    removed: frozenset[str]
