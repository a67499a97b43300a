"""Adapter for gRPC and the Kubernetes API: runs a kubelet without containers.

`device_manager` makes the decisions. This module runs the kubelet (a restart ends one run and
starts the next) and stores its pods. `python -m muster.local.kubelet` runs it as a process.
"""

import asyncio
import collections
import contextlib
import pathlib
from collections.abc import Callable, Coroutine, Mapping
from types import TracebackType
from typing import Self

import msgspec

from muster.local.kubelet import device_manager, node_status, plugins, pods, rules, sockets
from muster.pb import deviceplugin_pb2 as dp
from muster.pb import rpc

STATUS_PERIOD_S = 10.0
_SOCKET = "kubelet.sock"


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of one resource that are allocated to one container."""

    namespace: str
    pod: str
    container: str
    ids: tuple[str, ...]


class Resource(msgspec.Struct, frozen=True, kw_only=True):
    """One resource name; `registered` counts registrations since the kubelet started."""

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
    """The state of the kubelet; `restarts` counts its restarts since the process started."""

    node: str
    uptime_s: float
    restarts: int
    accepts_registrations: bool
    resources: dict[str, Resource]
    pods: tuple[str, ...]


class Allocated(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of one resource that one container has, and the plugin's answer."""

    container: str
    resource: str
    ids: tuple[str, ...]
    answer: dp.ContainerAllocateResponse


def _no_log(event: str, **facts: object) -> None:
    pass


class Kubelet:
    """The kubelet of `node`, with its directories under `directory`; `async with` runs it.

    With `api`, the Node, its Lease and its pods are objects of that API; without it, `allocate`
    creates pods.
    """

    def __init__(  # noqa: PLR0913  # all but the place have defaults
        self,
        *,
        directory: pathlib.Path,
        node: str,
        api: str | None = None,
        status_period_s: float = STATUS_PERIOD_S,
        lease_period_s: float = node_status.LEASE_PERIOD_S,
        stop_grace_s: float = device_manager.STOP_GRACE_S,
        dial_timeout_s: float = plugins.DIAL_TIMEOUT_S,
        plugin_watcher: bool = False,
        version: str = rules.VERSIONS[-1],
        log: node_status.Log = _no_log,
    ) -> None:
        self.node = node
        self.plugins_directory = directory.absolute() / "device-plugins"
        self.registry_directory = directory.absolute() / plugins.DIRECTORY
        self.podresources_directory = directory.absolute() / "pod-resources"
        self.socket = self.plugins_directory / _SOCKET
        self.podresources_socket = self.podresources_directory / _SOCKET
        self._api_url = api
        self._status_period_s = status_period_s
        self._lease_period_s = lease_period_s
        self._stop_grace_s = stop_grace_s
        self._dial_timeout_s = dial_timeout_s
        self._has_watcher = plugin_watcher
        self._version = version
        self._log = log
        self._accepts = True
        self._restarts = 0
        self._pods: dict[str, pods.Pod] = {}
        self._manager = device_manager.DeviceManager()
        self._registered: collections.Counter[str] = collections.Counter()
        self._counts: dict[str, tuple[int, int]] = {}
        self._miscounts: dict[str, int] = {}
        self._began_s = 0.0
        self._life = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._change = asyncio.Event()
        self._is_restarting = asyncio.Lock()
        self._pod_loop = asyncio.Lock()
        for directory in (self.plugins_directory, self.podresources_directory):
            sockets.prepare(directory, own_socket=_SOCKET)
        self._tasks = await asyncio.TaskGroup().__aenter__()
        await self._begin()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._life.aclose()
        # A failed task of the kubelet cancelled the block; any other error comes from the block.
        is_ours = isinstance(error, asyncio.CancelledError)
        await self._tasks.__aexit__(*((kind, error, trace) if is_ours else (None, None, None)))

    # Called by tests, the control surface and the pod loop

    def state(self) -> State:
        """Return the state of the kubelet now."""
        return State(
            node=self.node,
            uptime_s=self._now() - self._began_s,
            restarts=self._restarts,
            accepts_registrations=self._accepts,
            resources=_resource_states(
                self._manager,
                registered=self._registered,
                streams_open=self._plugins.streams_open,
                pods=self._pods,
            ),
            pods=tuple(f"{pod.namespace}/{pod.name}" for pod in self._pods.values()),
        )

    async def until(self, holds: Callable[[State], bool]) -> State:
        """Return the first state for which `holds` is true; the caller limits the wait."""
        while not holds(state := self.state()):
            await self._change.wait()
        return state

    def accept_registrations(self, accepts: bool) -> None:  # noqa: FBT001 (a switch has one value)
        """Accept registrations, or refuse every Register with UNAVAILABLE."""
        self._accepts = accepts

    def miscount(self, resource: str, by: int) -> None:
        """Report `by` more allocatable devices than there are, to simulate a kubelet bug."""
        self._miscounts[resource] = by

    async def drop_stream(self, resource: str) -> bool:
        """Close a resource's connection as after a stream error; return False if there is none."""
        return await self._plugins.drop(resource)

    async def restart(self) -> None:
        """Restart as `systemctl restart kubelet` does; pods keep their devices."""
        async with self._is_restarting:
            await self._life.aclose()
            self._restarts += 1
            await self._begin()
        self._log("restarted", node=self.node)

    async def allocate(
        self, *, name: str, namespace: str = "default", resources: Mapping[str, int]
    ) -> tuple[Allocated, ...]:
        """Admit a one-container pod without an API object; return its devices.

        Raises AllocationError.
        """
        return await self._admit(pods.local_pod(namespace, name, resources))

    def release(self, *, name: str, namespace: str = "default") -> bool:
        """Free the devices of a pod; return False if the pod does not exist."""
        uids = [u for u, p in self._pods.items() if (p.namespace, p.name) == (namespace, name)]
        for uid in uids:
            self._release(uid)
        return bool(uids)

    # One run

    async def _begin(self) -> None:
        async with contextlib.AsyncExitStack() as life:
            sockets.wipe(self.plugins_directory)
            self._restore()
            life.push_async_callback(self._plugins.close)
            holdings = sockets.PodResources(self._manager, self._pods)
            listener = plugins.Registration(
                self.plugins_directory, accepts=lambda: self._accepts, connect=self._connect
            )
            for path, handler in (
                (self.podresources_socket, rpc.pod_resources_handler(holdings)),
                (self.socket, rpc.registration_handler(listener)),
            ):
                await life.enter_async_context(sockets.serving(path, handler))
            if self._has_watcher:
                self.registry_directory.mkdir(parents=True, exist_ok=True)
                watcher = plugins.Watcher(
                    self.registry_directory, connect=self._connect, drop=self.drop_stream
                )
                self._spawn(life, watcher.run())
            self._spawn_api(life)
            self._life = life.pop_all()

    def _restore(self) -> None:
        checkpoint = sockets.read_checkpoint(self.plugins_directory)
        self._began_s = self._now()
        self._manager = device_manager.DeviceManager(
            stop_grace_s=self._stop_grace_s, per_socket=rules.is_per_socket(self._version)
        )
        self._manager.restore(checkpoint, self._began_s)
        self._plugins = plugins.Plugins(
            self._manager, dial_timeout_s=self._dial_timeout_s, changed=self._changed
        )
        self._registered = collections.Counter()
        restored = pods.restored_pods(checkpoint.grants)
        self._pods = {uid: self._pods.get(uid, pod) for uid, pod in restored.items()} | self._pods

    def _spawn_api(self, life: contextlib.AsyncExitStack) -> None:
        report = node_status.Report(self._status, period_s=self._status_period_s, log=self._log)
        if self._api_url is None:
            self._spawn(life, report.run(None))
            return
        api = node_status.Api(self._api_url)
        life.push_async_callback(api.close)
        node = node_status.Node(api, self.node, self._version)
        pod_loop = pods.PodLoop(
            api,
            self.node,
            admit=self._admit,
            adopt=self._adopt,
            release=self._release,
            current_pods=lambda: self._pods,
            log=self._log,
        )
        self._spawn(life, report.run(node))
        self._spawn(life, node.renew_forever(self._lease_period_s))
        self._spawn(life, pod_loop.run())

    def _spawn(
        self, life: contextlib.AsyncExitStack, work: Coroutine[object, object, None]
    ) -> None:
        life.push_async_callback(_end, self._tasks.create_task(work))

    def _status(self) -> device_manager.Status:
        status = self._manager.status(self._now())
        if status.removed:
            self._changed()
        for resource, by in self._miscounts.items():
            if resource in status.allocatable:
                status.allocatable[resource] += by
        return status

    async def _connect(self, resource: str, path: str) -> None:
        await self._plugins.connect(resource, path)
        self._registered[resource] += 1
        self._log("registered", resource=resource, socket=path)
        self._changed()

    # Pods

    async def _admit(self, pod: pods.Pod) -> tuple[Allocated, ...]:
        async with self._pod_loop:
            manager = self._manager
            with contextlib.ExitStack() as undo:
                undo.callback(manager.release, pod.uid)
                await self._allocate(pod)
                undo.pop_all()
            self._pods[pod.uid] = pod
            self._changed()
        grants = [grant for grant in manager.grants() if grant.pod == pod.uid]
        return tuple(_allocated(grant) for grant in grants)

    async def _allocate(self, pod: pods.Pod) -> None:
        reusable: dict[str, frozenset[str]] = {}
        for container in pod.containers:
            for resource, count in container.limits.items():
                left = reusable.get(resource, frozenset())
                request = device_manager.Request(
                    pod=pod.uid, container=container.name, resource=resource, count=count
                )
                grant = await self._plugins.allocate(request, reusable=left)
                ids = grant.ids if grant else frozenset()
                is_init = container.role is pods.Role.INIT
                reusable[resource] = left | ids if is_init else left - ids

    def _adopt(self, pod: pods.Pod) -> None:
        self._pods[pod.uid] = pod

    def _release(self, uid: str) -> None:
        if self._pods.pop(uid, None) is not None:
            self._manager.release(uid)
            self._changed()

    def _changed(self) -> None:
        sockets.write_checkpoint(self.plugins_directory, self._manager.checkpoint())
        self._log_counts()
        change, self._change = self._change, asyncio.Event()
        change.set()

    def _log_counts(self) -> None:
        capacity, allocatable = self._manager.capacity(), self._manager.allocatable()
        counts = {name: (capacity[name], allocatable[name]) for name in capacity}
        for name, (total, healthy) in counts.items():
            if self._counts.get(name) != (total, healthy):
                self._log("devices counted", resource=name, capacity=total, allocatable=healthy)
        self._counts = counts

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _resource_states(
    manager: device_manager.DeviceManager,
    *,
    registered: Mapping[str, int],
    streams_open: Mapping[str, int],
    pods: Mapping[str, pods.Pod],
) -> dict[str, Resource]:
    """Return, by name, the resources that were registered or listed, or have devices in use."""
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
            allocations=tuple(_allocation_state(grant, pods) for grant in grants.get(name, ())),
        )
    return by_name


def _healths(lists: device_manager.Lists) -> dict[str, str]:
    healths = dict.fromkeys(lists.healthy, device_manager.HEALTHY)
    return dict(
        sorted((healths | dict.fromkeys(lists.unhealthy, device_manager.UNHEALTHY)).items())
    )


def _allocation_state(grant: device_manager.Grant, pods: Mapping[str, pods.Pod]) -> Allocation:
    pod = pods.get(grant.pod)
    return Allocation(
        namespace=pod.namespace if pod else "",
        pod=pod.name if pod else grant.pod,
        container=grant.container,
        ids=tuple(sorted(grant.ids)),
    )


def _allocated(grant: device_manager.Grant) -> Allocated:
    return Allocated(
        container=grant.container,
        resource=grant.resource,
        ids=tuple(sorted(grant.ids)),
        answer=dp.ContainerAllocateResponse.FromString(grant.answer),
    )


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
