"""Adapter: reads the objects that a check needs from the Kubernetes API, within a time limit."""

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from typing import Final, TypeVar

import msgspec

from muster.kubernetes import api, objects, plugin_facts, plugin_objects, scheduling
from muster_labeler import model
from muster_labeler.check import findings
from muster_labeler.kubernetes import cluster_api, projection
from muster_labeler.naming import sources

Raw = TypeVar("Raw")
Kept = TypeVar("Kept")

NODES: Final = "/api/v1/nodes"

_SLICES: Final = tuple(f"/apis/resource.k8s.io/{v}/resourceslices" for v in ("v1", "v1beta1"))
_GPU_DRIVERS: Final = frozenset({"gpu.nvidia.com", "gpu.amd.com"})
_STATUS: Final = "/api/v1/namespaces/kube-system/configmaps/cluster-autoscaler-status"
_DEPLOYMENTS: Final = "/apis/apps/v1/deployments"
_OVERLAYS: Final = "/apis/karpenter.sh/v1alpha1/nodeoverlays"
_AUTOSCALER: Final = re.compile(r"(^|.*[-/])cluster-autoscaler([-:@].*)?$")
_FUSE_SUPPORT: Final = (
    "/apis/storage.k8s.io/v1/csidrivers/fuse.muster.dev",
    "/apis/resource.k8s.io/v1/deviceclasses/fuse.muster.dev",
    "/apis/resource.k8s.io/v1",
)
_PART: Final = "app.kubernetes.io/part-of=muster"
_EVENTS: Final = (
    "reason=NotTriggerScaleUp",
    "reason=FailedScheduling,reportingComponent=karpenter",
    "reason=FailedMount",
)
"""Field selectors of the events to read; the scheduler's FailedScheduling is excluded."""
_GROUP_NAMES: Final = re.compile(r"^\s*(?:- )?[Nn]ame:\s+(\S+)\s*$", re.MULTILINE)
_TIMESTAMP: Final = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)")
_NODES_FLAG: Final = re.compile(r"--nodes=\d+:\d+:(\S+)")

GPU: Final = (cluster_api.Permission("list", "nodes"),)
FUSE: Final = (
    *GPU,
    cluster_api.Permission("list", "pods"),
    cluster_api.Permission("list", "events"),
)
PLUGINS: Final = FUSE
AUTOSCALER: Final = (*FUSE, cluster_api.Permission("list", "deployments", "apps"))


class Unreachable(Exception):
    """The API does not answer or rejects the credentials."""


class _OverlaySpec(msgspec.Struct, frozen=True):
    capacity: dict[str, str] | None = None


class _Overlay(msgspec.Struct, frozen=True):
    spec: _OverlaySpec = _OverlaySpec()


@dataclass(frozen=True, slots=True)
class FullNode:
    """A node in two forms: reduced to the labeler's model, and trimmed for the plugin check."""

    node: model.Node
    raw: objects.Node


@dataclass(frozen=True, slots=True)
class FullPod:
    """A pod as the fuse check (`pod`) and the plugin check (`raw`) need it; None if not needed."""

    pod: model.Pod | None
    raw: plugin_objects.Pod | None


class ClusterReader:
    """Reads a cluster once, within `timeout_s`; `unread` lists the unreadable objects."""

    def __init__(self, api: api.Api, *, timeout_s: float, progress: Callable[[str], None]) -> None:
        self.unread: list[findings.Unread] = []
        self._api = api
        self._clock = asyncio.get_running_loop().time
        self._deadline = self._clock() + timeout_s
        self._progress = progress
        self._missing: frozenset[cluster_api.Permission] = frozenset()

    async def check_access(self, permissions: Sequence[cluster_api.Permission]) -> None:
        """Add the missing permissions to `unread`. Raises Unreachable."""
        answer = await self._api.request("GET", "/version", timeout_s=self._left_s(), attempts=2)
        if not answer.status or answer.status == HTTPStatus.UNAUTHORIZED:
            raise Unreachable(answer.problem)
        missing = await cluster_api.missing_permissions(
            self._api, permissions, timeout_s=self._left_s()
        )
        self._missing = frozenset(missing)
        self.unread.extend(
            findings.Unread(permission.resource, f"not allowed to {permission}", is_forbidden=True)
            for permission in missing
        )

    async def nodes(self) -> list[model.Node] | None:
        """Return all nodes; None if they cannot be read."""
        return await self._all(NODES, objects.Node, projection.node, permission=GPU[0])

    async def full_nodes(self) -> list[FullNode] | None:
        """Return all nodes, each in both forms; None if they cannot be read."""
        return await self._all(NODES, objects.Node, _node, permission=GPU[0])

    async def pods(self) -> list[FullPod] | None:
        """Return the pods that use fuse or are needed to check plugins; None if unreadable."""
        return await self._all(
            "/api/v1/pods",
            plugin_objects.Pod,
            _pod,
            permission=cluster_api.Permission("list", "pods"),
        )

    async def plugin_events(self) -> list[plugin_objects.Event]:
        """Return the Events about claims that drivers could not prepare; none if unreadable."""
        return (
            await self._all(
                "/api/v1/events",
                plugin_objects.Event,
                lambda raw: raw,
                permission=cluster_api.Permission("list", "events"),
                query={"fieldSelector": "reason=FailedPrepareDynamicResources"},
            )
            or []
        )

    async def plugin_objects(self, path: str, shape: type[Raw]) -> list[Raw] | None:
        """Return all objects of a kind that the API may not serve or show; None if unreadable."""
        return await self._all(path, shape, lambda raw: raw, is_optional=True)

    async def own_pods(self, namespace: str) -> list[objects.Pod]:
        """Return muster's own pods; none if they cannot be read."""
        return (
            await self._all(
                f"/api/v1/namespaces/{namespace}/pods",
                objects.Pod,
                lambda raw: raw,
                permission=cluster_api.Permission("list", "pods"),
                query={"labelSelector": _PART},
            )
            or []
        )

    async def own_claims(self, namespace: str) -> list[scheduling.VolumeClaim]:
        """Return the volume claims in muster's namespace; none if they cannot be read."""
        path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims"
        claim = scheduling.VolumeClaim
        return await self._all(path, claim, lambda raw: raw, is_optional=True) or []

    async def events(self) -> list[model.KubernetesEvent] | None:
        """Return the Kubernetes Events that may concern fuse; None if they cannot be read."""
        permission = cluster_api.Permission("list", "events")
        events: list[model.KubernetesEvent] = []
        for selector in _EVENTS:
            page = await self._all(
                "/api/v1/events",
                objects.Event,
                projection.event,
                permission=permission,
                query={"fieldSelector": selector},
            )
            if page is None:
                return None
            events.extend(page)
        return events

    async def namespaces(self, *, is_optional: bool) -> Mapping[str, Mapping[str, str]] | None:
        """Return the labels of each namespace; None if they cannot be read."""
        metadata = await self._all(
            "/api/v1/namespaces",
            objects.ConfigMap,
            lambda raw: raw.metadata,
            is_optional=is_optional,
        )
        return None if metadata is None else {entry.name: entry.labels or {} for entry in metadata}

    async def slices(self) -> list[model.ResourceSlice]:
        """Return the ResourceSlices of DRA; empty without DRA or permission."""
        for path in _SLICES:
            slices = await self._all(
                path, scheduling.ResourceSlice, projection.slice_of, is_optional=True
            )
            if slices is not None or any(entry.what == path for entry in self.unread):
                return slices or []
        return []

    async def reports(self, namespace: str) -> tuple[dict[str, sources.Kinds], frozenset[str]]:
        """Return the GPUs by node, and the simulated nodes, from the labeler's ConfigMap.

        Both are empty if it cannot be read.
        """
        path = f"/api/v1/namespaces/{namespace}/configmaps/{projection.INVENTORY_CONFIG_MAP}"
        answer = await self._api.request("GET", path, timeout_s=self._left_s())
        if not answer.is_ok:
            self._note(path, answer, is_optional=True)
            return {}, frozenset()
        try:
            config_map = msgspec.json.decode(answer.body, type=objects.ConfigMap)
            return projection.decode_inventory(
                (config_map.data or {}).get(projection.INVENTORY_KEY, "")
            )
        except (*api.UNREADABLE, projection.UnreadableInventory) as error:
            self.unread.append(findings.Unread(path, f"the inventory cannot be decoded: {error}"))
            return {}, frozenset()

    async def fuse_support(self) -> findings.FuseSupport:
        """Return which of muster's FUSE components are installed, and whether DRA is served."""
        driver, device_class, dra = [await self._exists(path) for path in _FUSE_SUPPORT]
        return findings.FuseSupport(has_driver=driver, has_class=device_class, has_dra=dra)

    async def autoscalers(
        self, *, is_optional: bool
    ) -> tuple[findings.ClusterAutoscaler | None, findings.Karpenter | None]:
        """Return the Cluster Autoscaler and Karpenter, each None if it is not visible."""
        permission = AUTOSCALER[-1]
        deployments = await self._all(
            _DEPLOYMENTS,
            objects.Deployment,
            lambda raw: raw if _is_autoscaler(raw) else None,
            permission=permission,
            is_optional=is_optional,
        )
        status = await self._api.request("GET", _STATUS, timeout_s=self._left_s())
        self._note(_STATUS, status, is_optional=True)
        text, renewed = _status(status.body) if status.is_ok else ("", None)
        ours = [d for d in deployments or () if "karpenter" not in _image(d)]
        karpenters = [d for d in deployments or () if "karpenter" in _image(d)]
        overlays = await self._all(_OVERLAYS, _Overlay, lambda raw: raw, is_optional=True)
        scaler = None
        if ours or status.is_ok:
            arguments = _arguments(ours[0]) if ours else ()
            flagged = _NODES_FLAG.findall(" ".join(arguments))
            named = [name for name in _GROUP_NAMES.findall(text) if name not in flagged]
            scaler = findings.ClusterAutoscaler(
                arguments=arguments,
                groups=tuple(dict.fromkeys([*flagged, *named])),
                renewed=renewed,
            )
        karpenter = None
        if karpenters or overlays:
            overlaid = {name for overlay in overlays or () for name in overlay.spec.capacity or {}}
            karpenter = findings.Karpenter(
                namespace=karpenters[0].metadata.namespace if karpenters else "",
                name=karpenters[0].metadata.name if karpenters else "",
                gates=_gates(karpenters[0]) if karpenters else "",
                overlays=tuple(sorted(overlaid)),
            )
        return scaler, karpenter

    async def _all(
        self,
        path: str,
        shape: type[Raw],
        read: Callable[[Raw], Kept | None],
        *,
        permission: cluster_api.Permission | None = None,
        query: Mapping[str, str] | None = None,
        is_optional: bool = False,
    ) -> list[Kept] | None:
        """Return the objects of a kind that `read` keeps; None if they cannot be read.

        The reason is added to `unread`, unless the kind is optional and the cluster lacks it.
        """
        if permission in self._missing:
            return None
        decoder = msgspec.json.Decoder(shape)
        for _ in range(3):
            kept: list[Kept] = []
            bad = 0
            try:
                pages = self._api.pages(path, query=query, timeout_s=self._left_s())
                async for page in pages:
                    for item in page.items:
                        try:
                            item_kept = read(decoder.decode(item))
                        except api.UNREADABLE:
                            bad += 1
                            continue
                        if item_kept is not None:
                            kept.append(item_kept)
                    self._progress(f"{path.rpartition('/')[2]}: {len(kept)}")
            except api.Refused as error:
                if error.answer.status == HTTPStatus.GONE:
                    continue
                self._note(path, error.answer, is_optional=is_optional)
                return None
            if bad:
                self.unread.append(findings.Unread(path, f"{bad} of the objects cannot be decoded"))
            return kept
        self.unread.append(findings.Unread(path, "the list expired repeatedly"))
        return None

    async def _exists(self, path: str) -> bool | None:
        """Return whether an object or an API exists; None if that cannot be read."""
        answer = await self._api.request("GET", path, timeout_s=self._left_s())
        self._note(path, answer, is_optional=True)
        return answer.is_ok if answer.is_ok or answer.status == HTTPStatus.NOT_FOUND else None

    def _note(self, path: str, answer: api.Answer, *, is_optional: bool) -> None:
        if answer.is_ok or (is_optional and answer.status == HTTPStatus.NOT_FOUND):
            return
        self.unread.append(
            findings.Unread(
                path,
                answer.problem,
                is_forbidden=answer.is_forbidden,
                is_needed=not is_optional,
            )
        )

    def _left_s(self) -> float:
        return max(0.001, self._deadline - self._clock())


def gpus_by_node(slices: Sequence[model.ResourceSlice]) -> dict[str, sources.Kinds]:
    """Return the GPUs of each node as DRA's drivers report them."""
    counts: dict[str, Counter[sources.Product]] = {}
    for entry in slices:
        if entry.node and entry.driver in _GPU_DRIVERS and entry.products:
            kinds = [sources.Product(*product) for product in entry.products]
            counts.setdefault(entry.node, Counter()).update(kinds)
    return dict(counts)


def _node(raw: objects.Node) -> FullNode:
    return FullNode(projection.node(raw), plugin_facts.trimmed_node(raw))


def _pod(raw: plugin_objects.Pod) -> FullPod | None:
    shown = plugin_facts.trimmed_pod(raw) if plugin_facts.is_relevant(raw) else None
    kept = FullPod(projection.pod(raw), shown)
    return kept if kept.pod or kept.raw else None


def _is_autoscaler(deployment: objects.Deployment) -> bool:
    image = _image(deployment)
    return _AUTOSCALER.match(image) is not None or "karpenter/controller" in image


def _image(deployment: objects.Deployment) -> str:
    return _container(deployment).image


def _container(deployment: objects.Deployment) -> objects.Container:
    return next(iter(deployment.pod_spec.containers or ()), objects.Container())


def _arguments(deployment: objects.Deployment) -> tuple[str, ...]:
    container = _container(deployment)
    return (*(container.command or ()), *(container.args or ()))


def _gates(deployment: objects.Deployment) -> str:
    variables = _container(deployment).env or ()
    return next((v.value for v in variables if v.name == "FEATURE_GATES"), "")


def _status(body: bytes) -> tuple[str, datetime | None]:
    """Return the autoscaler's status and its time; None if neither annotation nor text has one."""
    try:
        config_map = msgspec.json.decode(body, type=objects.ConfigMap)
    except api.UNREADABLE:
        return "", None
    text = (config_map.data or {}).get("status", "")
    annotated = (config_map.metadata.annotations or {}).get(
        "cluster-autoscaler.kubernetes.io/last-updated"
    )
    match = _TIMESTAMP.search(annotated or text)
    return text, objects.parse_time(f"{match[1]}T{match[2]}+00:00") if match else None
