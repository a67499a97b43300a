"""Pure: simulates the kubelet's device manager, including its surprising behaviour.

It has separate maps, as in the kubelet: the clients of each resource name (its registrations), the
endpoint that is called, and the advertised lists. So a list is used no matter which stream it
arrived on, even if another plugin is called for its devices.

Up to 1.36 a name has one client, the newest, and the end of any stream disconnects that client
(k/k#121994). Since 1.37 a name has a client for each socket (`per_socket`, k/k#135437): the end of
a stream disconnects its own client, and one of the others is called from then on, with the list
unchanged. A socket that registers while it is connected is refused and forgotten, so that the end
of its stream is not noticed.

There is no NUMA alignment: the kubelet's default topology policy is `none`.
Source: pkg/kubelet/cm/devicemanager/manager.go and plugin/v1beta1/{server,handler,client}.go.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping

import msgspec

STOP_GRACE_S = 300.0
_NO_NODE = -1
HEALTHY = "Healthy"
UNHEALTHY = "Unhealthy"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """A plugin's answer to GetDevicePluginOptions."""

    pre_start_required: bool = False
    preferred_allocation: bool = False


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device in a ListAndWatch message."""

    id: str
    health: str = HEALTHY
    numa_nodes: tuple[int, ...] = ()


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """One registration of a resource; `number` is unique."""

    resource: str
    socket: str
    number: int


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The plugin behind a resource; `client` is None after a kubelet restart."""

    client: Client | None
    options: Options
    stopped_at_s: float | None


class Lists(msgspec.Struct, frozen=True, kw_only=True):
    """The last message for a resource; an id sent with both health values is in both sets."""

    healthy: frozenset[str] = frozenset()
    unhealthy: frozenset[str] = frozenset()
    numa_nodes: dict[str, tuple[int, ...]] = {}


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A container's request for `count` devices of a resource; `pod` is the pod's uid."""

    pod: str
    container: str
    resource: str
    count: int


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The ids that can serve a request: ids of the pod's init containers, and free ids."""

    request: Request
    reused: frozenset[str]
    available: frozenset[str]

    @property
    def needed(self) -> int:
        """How many ids must still be chosen from the available ids."""
        return self.request.count - len(self.reused)


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """A container's devices of a resource, by NUMA node (-1: none), and the plugin's answer."""

    pod: str = msgspec.field(name="PodUID")
    container: str = msgspec.field(name="ContainerName")
    resource: str = msgspec.field(name="ResourceName")
    ids_by_node: dict[int, tuple[str, ...]] = msgspec.field(name="DeviceIDs")
    answer: bytes = msgspec.field(name="AllocResp")

    @property
    def ids(self) -> frozenset[str]:
        """Every id in the grant, once."""
        return frozenset(id_ for ids in self.ids_by_node.values() for id_ in ids)


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The state that survives a kubelet restart, with the keys of the kubelet's own file."""

    grants: tuple[Grant, ...] = msgspec.field(name="PodDeviceEntries", default=())
    healthy: dict[str, tuple[str, ...]] = msgspec.field(
        name="RegisteredDevices", default_factory=dict
    )


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The content of one node status update, which sets the `removed` resources to 0."""

    capacity: dict[str, int]
    allocatable: dict[str, int]
    removed: frozenset[str]


class AlreadyConnected(Exception):
    """The registered socket already has a connection."""


class AllocationError(Exception):
    """A container does not get its devices; the text is the kubelet's error."""


@dataclasses.dataclass(kw_only=True)
class DeviceManager:
    """Clients, endpoints, lists and grants of one node."""

    stop_grace_s: float = STOP_GRACE_S
    per_socket: bool = True
    _registrations: int = 0
    _clients: dict[str, tuple[Client, ...]] = dataclasses.field(default_factory=dict)
    _connected: dict[str, dict[str, Endpoint]] = dataclasses.field(default_factory=dict)
    _endpoints: dict[str, Endpoint] = dataclasses.field(default_factory=dict)
    _lists: dict[str, Lists] = dataclasses.field(default_factory=dict)
    _grants: dict[tuple[str, str, str], Grant] = dataclasses.field(default_factory=dict)
    _reserved: dict[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    _gone: set[str] = dataclasses.field(default_factory=set)

    def restore(self, checkpoint: Checkpoint, now: float) -> None:
        """Start from a checkpoint, as a restarted kubelet does.

        Resources are known and empty, so the node shows 0 until their plugins register; their
        endpoints count as stopped from `now` on.
        """
        stopped = Endpoint(client=None, options=Options(), stopped_at_s=now)
        self._lists = {resource: Lists() for resource in checkpoint.healthy}
        self._endpoints = dict.fromkeys(checkpoint.healthy, stopped)
        self._grants = {(g.pod, g.container, g.resource): g for g in checkpoint.grants}

    def checkpoint(self) -> Checkpoint:
        """Return the state that `restore` needs after a restart."""
        return Checkpoint(
            grants=tuple(self._grants.values()),
            healthy={name: tuple(sorted(of.healthy)) for name, of in self._lists.items()},
        )

    # Registrations and streams

    def connecting(self, resource: str, socket: str) -> Client:
        """Record a registration as a client before its socket is dialled; return the client."""
        self._registrations += 1
        client = Client(resource=resource, socket=socket, number=self._registrations)
        others = self._clients.get(resource, ()) if self.per_socket else ()
        self._clients[resource] = (*others, client)
        return client

    def forget(self, client: Client) -> Client | None:
        """Remove and return the client that `stream_ended` disconnects for this one, if any."""
        known = self._clients.pop(client.resource, ())
        kept = tuple(c for c in known if c.socket != client.socket) if self.per_socket else ()
        if kept:
            self._clients[client.resource] = kept
        return next((c for c in known if c not in kept), None)

    def connected(self, client: Client, options: Options) -> None:
        """Replace the resource's endpoint; its lists stay until the first message.

        Raises AlreadyConnected.
        """
        endpoint = Endpoint(client=client, options=options, stopped_at_s=None)
        if self.per_socket:
            connected = self._connected.setdefault(client.resource, {})
            if client.socket in connected:
                raise AlreadyConnected(f"device plugin already connected: {client.socket}")
            connected[client.socket] = endpoint
        self._gone.discard(client.resource)
        self._endpoints[client.resource] = endpoint

    def listed(self, resource: str, message: Collection[Device]) -> None:
        """Replace the lists of a resource, no matter on which stream the message arrived."""
        self._gone.discard(resource)
        self._lists[resource] = Lists(
            healthy=frozenset(d.id for d in message if d.health == HEALTHY),
            unhealthy=frozenset(d.id for d in message if d.health != HEALTHY),
            numa_nodes={d.id: d.numa_nodes for d in message},
        )

    def stream_ended(self, client: Client, now: float) -> Client | None:
        """Disconnect the client that the kubelet disconnects when this one's stream ends.

        Up to 1.36 that is the resource's newest client; later, the one with the same socket.
        Returns that client, to be closed; without one, returns None and keeps the device lists.
        """
        disconnected = self.forget(client)
        if disconnected is None:
            return None
        connected = self._connected.get(client.resource, {})
        if self.per_socket and connected.pop(client.socket, None) is None:
            return disconnected
        if connected:
            self._endpoints[client.resource] = next(iter(connected.values()))
        else:
            self._stop(client.resource, now)
        return disconnected

    def _stop(self, resource: str, now: float) -> None:
        if (endpoint := self._endpoints.get(resource)) is None:
            return
        lists = self._lists.get(resource, Lists())
        self._lists[resource] = msgspec.structs.replace(
            lists, healthy=frozenset(), unhealthy=lists.unhealthy | lists.healthy
        )
        self._endpoints[resource] = msgspec.structs.replace(endpoint, stopped_at_s=now)

    # The node status

    def status(self, now: float) -> Status:
        """Compute one status update; drop the resources whose grace period has ended."""
        removed = frozenset(
            resource for resource in self._lists if self._has_expired(resource, now)
        )
        for resource in removed:
            del self._lists[resource]
            self._endpoints.pop(resource, None)
        self._gone |= removed
        capacity = {name: _capacity(lists) for name, lists in self._lists.items()}
        allocatable = {name: len(lists.healthy) for name, lists in self._lists.items()}
        return Status(capacity=capacity, allocatable=allocatable, removed=removed)

    def capacity(self) -> dict[str, int]:
        """Return the number of devices by resource, healthy or not; 0 for a removed resource."""
        return dict.fromkeys(self._gone, 0) | {n: _capacity(of) for n, of in self._lists.items()}

    def allocatable(self) -> dict[str, int]:
        """Return the number of Healthy devices by resource, allocated or not; 0 if removed."""
        return dict.fromkeys(self._gone, 0) | {n: len(of.healthy) for n, of in self._lists.items()}

    def lists(self) -> Mapping[str, Lists]:
        """Return the last list of each resource."""
        return self._lists

    def endpoint(self, resource: str) -> Endpoint | None:
        """Return the endpoint of a resource, stopped or not; None if it has none."""
        return self._endpoints.get(resource)

    def client(self, resource: str) -> Client | None:
        """Return the newest client of a resource; None if it has none."""
        return next(reversed(self._clients.get(resource, ())), None)

    def knows(self, resource: str) -> bool:
        """Return whether a resource of this name is listed, or its devices are allocated."""
        held = any(grant.resource == resource for grant in self._grants.values())
        return held or resource in self._lists

    def grants(self) -> Collection[Grant]:
        """Return all grants, including grants of ids that are no longer listed."""
        return self._grants.values()

    # Allocation: offer, take, then grant or abandon; one request at a time

    def offer(self, request: Request, *, reusable: Collection[str] = frozenset()) -> Offer | None:
        """Return the ids that can serve a request; None if it needs none. Raises AllocationError.

        Registration and health are checked even if the container already has its devices, because
        a pod may be admitted again before the plugin is back (manager.go, devicesToAllocate).
        """
        resource = request.resource
        held = self._held(request)
        lists = self._lists.get(resource)
        if lists is None:
            raise AllocationError(f"cannot allocate unregistered device {resource}")
        if not lists.healthy:
            raise AllocationError(
                f"no healthy devices present; cannot allocate unhealthy devices {resource}"
            )
        if not held <= lists.healthy:
            raise AllocationError(
                "previously allocated devices are no longer healthy; "
                f"cannot allocate unhealthy devices {resource}"
            )
        if held or request.count == 0:
            return None
        reused = frozenset(sorted(reusable)[: request.count])
        available = lists.healthy - self._in_use(resource)
        needed = request.count - len(reused)
        if len(available) < needed:
            raise AllocationError(
                f"requested number of devices unavailable for {resource}. "
                f"Requested: {needed}, Available: {len(available)}"
            )
        return Offer(request=request, reused=reused, available=available)

    def wants_preference(self, offer: Offer) -> bool:
        """Return whether to request preferred ids from the plugin. Raises AllocationError."""
        if offer.needed == 0:
            return False
        resource = offer.request.resource
        endpoint = self._endpoints.get(resource)
        if endpoint is None:
            raise AllocationError(
                f"endpoint not found in cache for a registered resource: {resource}"
            )
        if not endpoint.options.preferred_allocation:
            return False
        if endpoint.stopped_at_s is not None:
            raise preference_error(_stopped(resource))
        return True

    def take(self, offer: Offer, preferred: Collection[str] = ()) -> frozenset[str]:
        """Choose and reserve the ids: reused ids, then preferred free ids, then other free ids."""
        wanted = offer.available & frozenset(preferred)
        ranked = [*sorted(wanted), *sorted(offer.available - wanted)]
        chosen = offer.reused | frozenset(ranked[: offer.needed])
        self._reserved[offer.request.resource] = chosen
        return chosen

    def callee(self, resource: str) -> Client:
        """Return the client to call. Raises AllocationError if no plugin is connected."""
        endpoint = self._endpoints.get(resource)
        if endpoint is None:
            raise AllocationError(f"unknown Device Plugin {resource}")
        if endpoint.client is None or endpoint.stopped_at_s is not None:
            raise AllocationError(_stopped(resource))
        return endpoint.client

    def grant(self, request: Request, ids: Collection[str], answer: bytes) -> Grant:
        """Assign the ids to the container until its pod is released."""
        lists = self._lists.get(request.resource, Lists())
        by_node: dict[int, tuple[str, ...]] = {}
        for id_ in sorted(ids):
            for node in lists.numa_nodes.get(id_) or (_NO_NODE,):
                by_node[node] = (*by_node.get(node, ()), id_)
        grant = Grant(
            pod=request.pod,
            container=request.container,
            resource=request.resource,
            ids_by_node=by_node,
            answer=answer,
        )
        self._grants[request.pod, request.container, request.resource] = grant
        self._reserved.pop(request.resource, None)
        return grant

    def abandon(self, resource: str) -> None:
        """Free the ids that `take` reserved, because the plugin did not allocate them."""
        self._reserved.pop(resource, None)

    def release(self, pod: str) -> None:
        """Free all devices of a pod that has ended."""
        self._grants = {key: grant for key, grant in self._grants.items() if grant.pod != pod}

    def _held(self, request: Request) -> frozenset[str]:
        grant = self._grants.get((request.pod, request.container, request.resource))
        if grant is None:
            return frozenset()
        if len(grant.ids) != request.count:
            raise AllocationError(
                f'pod "{request.pod}" container "{request.container}" changed request for '
                f'resource "{request.resource}" from {len(grant.ids)} to {request.count}'
            )
        return grant.ids

    def _in_use(self, resource: str) -> frozenset[str]:
        granted = (grant.ids for grant in self._grants.values() if grant.resource == resource)
        return self._reserved.get(resource, frozenset()).union(*granted)

    def _has_expired(self, resource: str, now: float) -> bool:
        endpoint = self._endpoints.get(resource)
        stopped_at_s = endpoint.stopped_at_s if endpoint else -math.inf
        return stopped_at_s is not None and now - stopped_at_s > self.stop_grace_s


def preference_error(reason: str) -> AllocationError:
    """Return the error of a failed GetPreferredAllocation, which also makes the pod fail."""
    return AllocationError(f"device plugin GetPreferredAllocation rpc failed with err: {reason}")


def _capacity(lists: Lists) -> int:
    return len(lists.healthy) + len(lists.unhealthy)


def _stopped(resource: str) -> str:
    # The kubelet prints a pointer's contents here; the resource name is more useful.
    return f"endpoint {resource} has been stopped"
