"""Pure: the state of the kubelet stand-in, for its control surface and for tests."""

from collections.abc import Mapping

import msgspec

from muster.local.kubelet import device_manager, pods


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of one resource that one container holds."""

    namespace: str
    pod: str
    container: str
    ids: tuple[str, ...]


class Resource(msgspec.Struct, frozen=True, kw_only=True):
    """One resource name; `registered` and `streams_open` count since the kubelet started."""

    registered: int = 0
    endpoint: str | None = None
    socket: str | None = None
    is_stopped: bool = False
    streams_open: int = 0
    capacity: int = 0
    allocatable: int = 0
    devices: dict[str, str] = {}
    allocations: tuple[Allocation, ...] = ()


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The whole kubelet; `restarts` counts since the process started."""

    node: str
    uptime_s: float
    restarts: int
    accepts_registrations: bool
    resources: dict[str, Resource]
    pods: tuple[str, ...]


def resources(
    manager: device_manager.DeviceManager,
    *,
    registered: Mapping[str, int],
    streams_open: Mapping[str, int],
    pods: Mapping[str, pods.Pod],
) -> dict[str, Resource]:
    """Return every resource that was ever registered, listed or allocated, by name."""
    capacity, allocatable = manager.capacity(), manager.allocatable()
    grants: dict[str, list[device_manager.Grant]] = {}
    for grant in manager.grants():
        grants.setdefault(grant.resource, []).append(grant)
    by_name: dict[str, Resource] = {}
    for name in sorted({*capacity, *registered, *grants}):
        endpoint = manager.endpoint(name)
        client = endpoint.client if endpoint else None
        by_name[name] = Resource(
            registered=registered.get(name, 0),
            endpoint=client.socket.rpartition("/")[2] if client else None,
            socket=client.socket if client else None,
            is_stopped=endpoint is None or endpoint.stopped_at_s is not None,
            streams_open=streams_open.get(name, 0),
            capacity=capacity.get(name, 0),
            allocatable=allocatable.get(name, 0),
            devices=_healths(manager.lists().get(name, device_manager.Lists())),
            allocations=tuple(_allocation(grant, pods) for grant in grants.get(name, ())),
        )
    return by_name


def _healths(lists: device_manager.Lists) -> dict[str, str]:
    healths = dict.fromkeys(lists.healthy, device_manager.HEALTHY)
    return dict(
        sorted((healths | dict.fromkeys(lists.unhealthy, device_manager.UNHEALTHY)).items())
    )


def _allocation(grant: device_manager.Grant, pods: Mapping[str, pods.Pod]) -> Allocation:
    pod = pods.get(grant.pod)
    return Allocation(
        namespace=pod.namespace if pod else "",
        pod=pod.name if pod else grant.pod,
        container=grant.container,
        ids=tuple(sorted(grant.ids)),
    )
