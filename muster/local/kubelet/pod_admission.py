"""Adapter: the node's pods at the Kubernetes API: admits new ones, frees ended ones, one by one."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from muster.local import httpd
from muster.local.kubelet import device_manager, node_status, pods

_BACKOFF_S = 0.2
_BACKOFF_MAX_S = 5.0
_PODS = "/api/v1/pods"


class _Metadata(msgspec.Struct, rename="camel"):
    resource_version: str = ""


class _Versioned(msgspec.Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)


class _List(msgspec.Struct):
    metadata: _Metadata
    items: list[dict[str, object]] = []


class _Event(msgspec.Struct):
    type: str
    object: dict[str, object]


class PodLoop:
    """Follows the pods bound to a node.

    `admit` gets a pod its devices (or raises AllocationError), `adopt` keeps one that runs already,
    `release` frees the devices of a pod that has ended; `current_pods` returns all by uid.
    """

    def __init__(
        self,
        api: node_status.Api,
        node: str,
        *,
        admit: Callable[[pods.Pod], Awaitable[object]],
        adopt: Callable[[pods.Pod], None],
        release: Callable[[str], None],
        current_pods: Callable[[], Mapping[str, pods.Pod]],
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
        """List and watch for ever; a failure is logged once and tried again."""
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
        code, answer = await self._api.get(_PODS, self._selector())
        if code >= 400:  # noqa: PLR2004 (HTTP's errors)
            raise node_status.ApiUnavailable(f"list {_PODS}: {code} {answer}")
        listed = msgspec.convert(answer, _List)
        uids = {uid for item in listed.items if (uid := await self._reconcile(item)) is not None}
        for uid in [*self._current_pods()]:
            if uid not in uids and not pods.is_local(uid):
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
            pod = pods.read_pod(raw)
        except (msgspec.ValidationError, ValueError) as error:
            self._log("pod not understood", node=self._node, error=str(error))
            return None
        if is_deleted or pod.has_ended:
            self._release(pod.uid)
        elif pod.is_deleting:
            self._release(pod.uid)
            await self._api.delete(_path(pod), {"gracePeriodSeconds": 0})
        elif pod.phase == "Pending":
            await self._start(pod)
        else:
            self._adopt(pod)
        return pod.uid

    async def _start(self, pod: pods.Pod) -> None:
        now = httpd.timestamp()
        try:
            await self._admit(pod)
        except device_manager.AllocationError as refused:
            self._log("pod refused", pod=f"{pod.namespace}/{pod.name}", reason=str(refused))
            event = pods.admission_event(
                pod, str(refused), node=self._node, now=now, suffix=uuid.uuid4().hex[:16]
            )
            await self._api.post(f"/api/v1/namespaces/{pod.namespace}/events", event)
            status = pods.pod_failed(str(refused))
        else:
            status = pods.pod_running(pod, now)
        code, answer = await self._api.patch(
            f"{_path(pod)}/status", status, kind=node_status.MERGE_PATCH
        )
        # A pod that is gone by now is freed by its DELETED event.
        if code >= 400 and code != 404:  # noqa: PLR2004 (HTTP's errors)
            raise node_status.ApiUnavailable(f"patch {_path(pod)}/status: {code} {answer}")

    def _selector(self) -> dict[str, str]:
        return {"fieldSelector": f"spec.nodeName={self._node}"}


def _path(pod: pods.Pod) -> str:
    return f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"
