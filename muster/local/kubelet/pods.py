"""Adapter for the Kubernetes API: reads the pods of a node, admits and releases them."""

import asyncio
import enum
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping

import msgspec

from muster.local import httpd
from muster.local.kubelet import device_manager, node_status, rules

_LOCAL_SEPARATOR = "/"

Json = dict[str, object]
_BACKOFF_S = 0.2
_BACKOFF_MAX_S = 5.0
_PODS = "/api/v1/pods"


class Role(enum.StrEnum):
    """The role of a container, which determines what happens to its devices."""

    INIT = "init"  # an init container, which ends and leaves its devices to the next container
    SIDECAR = "sidecar"  # a restartable init container, which keeps its devices
    APP = "app"


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """A container and its limits of extended resources."""

    name: str
    limits: dict[str, int]
    role: Role = Role.APP
    image: str = ""


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a pod that matters for device allocation; init containers first."""

    uid: str
    namespace: str
    name: str
    containers: tuple[Container, ...]
    phase: str = "Pending"
    is_deleting: bool = False

    @property
    def has_ended(self) -> bool:
        """Return whether the pod has ended, so that its devices are free."""
        return self.phase in {"Succeeded", "Failed"}


class _Resources(msgspec.Struct):
    limits: dict[str, str | int] = {}


class _Container(msgspec.Struct, rename="camel"):
    name: str
    image: str = ""
    restart_policy: str = ""
    resources: _Resources = msgspec.field(default_factory=_Resources)


class _Spec(msgspec.Struct, rename="camel"):
    containers: list[_Container] = []
    init_containers: list[_Container] = []


class _PodMetadata(msgspec.Struct, rename="camel"):
    name: str
    uid: str
    namespace: str = "default"
    deletion_timestamp: str = ""


class _Status(msgspec.Struct):
    phase: str = "Pending"


class _Pod(msgspec.Struct):
    metadata: _PodMetadata
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)


def read_pod(raw: object) -> Pod:
    """Read a Pod object. Raises msgspec.ValidationError and ValueError."""
    parsed = msgspec.convert(raw, _Pod)
    return Pod(
        uid=parsed.metadata.uid,
        namespace=parsed.metadata.namespace,
        name=parsed.metadata.name,
        containers=(
            *(_container(c, Role.INIT) for c in parsed.spec.init_containers),
            *(_container(c, Role.APP) for c in parsed.spec.containers),
        ),
        phase=parsed.status.phase,
        is_deleting=bool(parsed.metadata.deletion_timestamp),
    )


def local_pod(namespace: str, name: str, limits: Mapping[str, int]) -> Pod:
    """Return a one-container pod without an API object; its uid is `namespace/name`."""
    return Pod(
        uid=f"{namespace}{_LOCAL_SEPARATOR}{name}",
        namespace=namespace,
        name=name,
        containers=(Container(name="main", limits=dict(limits)),),
        phase="Running",
    )


def is_local(uid: str) -> bool:
    """Return whether `local_pod` created the pod; uids from the API contain no slash."""
    return _LOCAL_SEPARATOR in uid


def restored_pods(grants: Iterable[device_manager.Grant]) -> dict[str, Pod]:
    """Return the pods of a checkpoint's grants; the API supplies their details later."""
    containers: dict[str, dict[str, Container]] = {}
    for grant in grants:
        container = Container(name=grant.container, limits={})
        containers.setdefault(grant.pod, {})[grant.container] = container
    pods: dict[str, Pod] = {}
    for uid, by_name in containers.items():
        namespace, _, name = uid.rpartition(_LOCAL_SEPARATOR)
        pods[uid] = Pod(
            uid=uid,
            namespace=namespace,
            name=name,
            containers=tuple(by_name.values()),
            phase="Running",
        )
    return pods


def pod_running(admitted: Pod, now: str) -> Json:
    """Return the status of a running pod, whose init containers have completed."""
    apps = [c for c in admitted.containers if c.role is Role.APP]
    inits = [c for c in admitted.containers if c.role is not Role.APP]
    return {
        "status": {
            "phase": "Running",
            "startTime": now,
            "conditions": [
                {"type": kind, "status": "True", "lastTransitionTime": now}
                for kind in ("Initialized", "Ready", "ContainersReady", "PodScheduled")
            ],
            "containerStatuses": [_running(container, now) for container in apps],
            "initContainerStatuses": [_running(container, now) for container in inits],
        }
    }


def pod_failed(reason: str) -> Json:
    """Return the status of a pod whose allocation failed.

    Source: pkg/kubelet/kubelet.go, rejectPod.
    """
    return {
        "status": {
            "phase": "Failed",
            "reason": "UnexpectedAdmissionError",
            "message": f"Pod was rejected: {rules.admission_error(reason)}",
        }
    }


def admission_event(refused: Pod, reason: str, *, node: str, now: str, suffix: str) -> Json:
    """Return the Event that `kubectl describe pod` shows for `pod_failed`."""
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{refused.name}.{suffix}", "namespace": refused.namespace},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "namespace": refused.namespace,
            "name": refused.name,
            "uid": refused.uid,
        },
        "type": "Warning",
        "reason": "UnexpectedAdmissionError",
        "message": rules.admission_error(reason),
        "source": {"component": "kubelet", "host": node},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }


def _container(raw: _Container, role: Role) -> Container:
    limits = {
        name: rules.count(str(value))
        for name, value in raw.resources.limits.items()
        if rules.is_extended_resource(name)
    }
    is_sidecar = role is Role.INIT and raw.restart_policy == "Always"
    return Container(
        name=raw.name,
        limits=limits,
        role=Role.SIDECAR if is_sidecar else role,
        image=raw.image,
    )


def _running(container: Container, now: str) -> Json:
    is_done = container.role is Role.INIT
    ran = {"exitCode": 0, "reason": "Completed", "startedAt": now, "finishedAt": now}
    return {
        "name": container.name,
        "image": container.image,
        "imageID": container.image,
        "ready": True,
        "started": not is_done,
        "restartCount": 0,
        "state": {"terminated": ran} if is_done else {"running": {"startedAt": now}},
    }


class _ListedMetadata(msgspec.Struct, rename="camel"):
    resource_version: str = ""


class _Versioned(msgspec.Struct):
    metadata: _ListedMetadata = msgspec.field(default_factory=_ListedMetadata)


class _List(msgspec.Struct):
    metadata: _ListedMetadata
    items: list[dict[str, object]] = []


_Json = dict[str, object]  # defined outside the class whose field `object` would hide the type


class _Event(msgspec.Struct):
    type: str
    object: _Json


class PodLoop:
    """Follows the pods bound to a node.

    `admit` allocates a pod's devices (or raises AllocationError), `adopt` takes over a running pod,
    and `release` frees the devices of a pod that has ended. `current_pods` returns all pods by uid.
    """

    def __init__(
        self,
        api: node_status.Api,
        node: str,
        *,
        admit: Callable[[Pod], Awaitable[object]],
        adopt: Callable[[Pod], None],
        release: Callable[[str], None],
        current_pods: Callable[[], Mapping[str, Pod]],
        log: node_status.Log,
    ) -> None:
        self._api = api
        self._node = node
        self._admit = admit
        self._adopt = adopt
        self._release = release
        self._current_pods = current_pods
        self._log = log

    async def run(self) -> None:
        """List and watch forever; after a failure, log it once and try again."""
        delay_s = _BACKOFF_S
        is_unavailable = False
        while True:
            try:
                version = await self._list()
                if is_unavailable:
                    self._log("pods followed again", node=self._node)
                is_unavailable, delay_s = False, _BACKOFF_S
                await self._watch(version)
            except node_status.Gone:
                continue
            except (node_status.ApiUnavailable, msgspec.ValidationError) as error:
                if not is_unavailable:
                    self._log("pods not followed", node=self._node, error=str(error))
                is_unavailable = True
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, _BACKOFF_MAX_S)

    async def _list(self) -> str:
        code, answer = await self._api.send("GET", _PODS, params=self._selector())
        node_status.expect_success(code, answer, f"list {_PODS}")
        listed = msgspec.convert(answer, _List)
        uids = {uid for item in listed.items if (uid := await self._reconcile(item)) is not None}
        for uid in [*self._current_pods()]:
            if uid not in uids and not is_local(uid):
                self._release(uid)
        return listed.metadata.resource_version

    async def _watch(self, version: str) -> None:
        while True:
            params = {**self._selector(), "resourceVersion": version, "allowWatchBookmarks": "true"}
            async for raw in self._api.watch(_PODS, params):
                event = msgspec.convert(raw, _Event)
                if event.type == "ERROR":
                    raise node_status.Gone
                versioned = msgspec.convert(event.object, _Versioned)
                version = versioned.metadata.resource_version or version
                if event.type != "BOOKMARK":
                    await self._reconcile(event.object, is_deleted=event.type == "DELETED")

    async def _reconcile(self, raw: dict[str, object], *, is_deleted: bool = False) -> str | None:
        """Admit, adopt or release one pod; return its uid, or None if it cannot be read."""
        try:
            pod = read_pod(raw)
        except (msgspec.ValidationError, ValueError) as error:
            self._log("pod unreadable", node=self._node, error=str(error))
            return None
        if is_deleted or pod.has_ended:
            self._release(pod.uid)
        elif pod.is_deleting:
            self._release(pod.uid)
            await self._api.send("DELETE", _path(pod), {"gracePeriodSeconds": 0})
        elif pod.phase == "Pending":
            await self._start(pod)
        else:
            self._adopt(pod)
        return pod.uid

    async def _start(self, pod: Pod) -> None:
        now = httpd.timestamp()
        try:
            await self._admit(pod)
        except device_manager.AllocationError as refused:
            self._log("pod refused", pod=f"{pod.namespace}/{pod.name}", reason=str(refused))
            event = admission_event(
                pod, str(refused), node=self._node, now=now, suffix=uuid.uuid4().hex[:16]
            )
            await self._api.send("POST", f"/api/v1/namespaces/{pod.namespace}/events", event)
            status = pod_failed(str(refused))
        else:
            status = pod_running(pod, now)
        code, answer = await self._api.send(
            "PATCH", f"{_path(pod)}/status", status, kind=node_status.MERGE_PATCH
        )
        # A pod that is already gone is freed by its DELETED event.
        if code != node_status.NOT_FOUND:
            node_status.expect_success(code, answer, f"patch {_path(pod)}/status")

    def _selector(self) -> dict[str, str]:
        return {"fieldSelector": f"spec.nodeName={self._node}"}


def _path(pod: Pod) -> str:
    return f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"
