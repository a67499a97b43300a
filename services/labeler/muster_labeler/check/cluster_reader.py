"""Adapter: the Kubernetes API: reads all that a check looks at, as far as rights and time allow."""

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from http import HTTPStatus
from typing import Final, TypeVar

import msgspec

from muster.kubernetes import api, objects
from muster_labeler import model
from muster_labeler.check import findings
from muster_labeler.kubernetes import cluster_api, projection
from muster_labeler.naming import sources

Raw = TypeVar("Raw")
Found = TypeVar("Found")

NODES: Final = "/api/v1/nodes"

_SLICES: Final = tuple(f"/apis/resource.k8s.io/{v}/resourceslices" for v in ("v1", "v1beta1"))
_GPU_DRIVERS: Final = frozenset({"gpu.nvidia.com", "gpu.amd.com"})
_STATUS: Final = "/api/v1/namespaces/kube-system/configmaps/cluster-autoscaler-status"
_DEPLOYMENTS: Final = "/apis/apps/v1/deployments"
_OVERLAYS: Final = "/apis/karpenter.sh/v1alpha1/nodeoverlays"
_AUTOSCALER: Final = re.compile(r"(^|.*[-/])cluster-autoscaler([-:@].*)?$")
_EVENT_REASONS: Final = ("NotTriggerScaleUp", "FailedMount")
_GROUP_NAMES: Final = re.compile(r"^\s*(?:- )?[Nn]ame:\s+(\S+)\s*$", re.MULTILINE)
_RENEWED: Final = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)")
_NODES_FLAG: Final = re.compile(r"--nodes=\d+:\d+:(\S+)")

GPU: Final = (cluster_api.Right("list", "nodes"),)
FUSE: Final = (*GPU, cluster_api.Right("list", "pods"), cluster_api.Right("list", "events"))
AUTOSCALER: Final = (*FUSE, cluster_api.Right("list", "deployments", "apps"))


class Unreachable(Exception):
    """The API does not answer, or does not know us."""


class _OverlaySpec(msgspec.Struct, frozen=True):
    capacity: dict[str, str] | None = None


class _Overlay(msgspec.Struct, frozen=True):
    spec: _OverlaySpec = _OverlaySpec()


class Survey:
    """One reading of a cluster, within `timeout_s` in all."""

    def __init__(self, api: api.Api, *, timeout_s: float, say: Callable[[str], None]) -> None:
        self.unread: list[findings.Unread] = []
        self._api = api
        self._clock = asyncio.get_running_loop().time
        self._deadline = self._clock() + timeout_s
        self._say = say
        self._missing: frozenset[cluster_api.Right] = frozenset()

    async def begin(self, rights: Sequence[cluster_api.Right]) -> None:
        """Ask which rights are missing. Raises Unreachable."""
        answer = await self._api.ask("GET", "/version", timeout_s=self._left_s(), attempts=2)
        if not answer.status or answer.status == HTTPStatus.UNAUTHORIZED:
            raise Unreachable(answer.problem)
        lacking = await cluster_api.missing_rights(self._api, rights, timeout_s=self._left_s())
        self._missing = frozenset(lacking)
        self.unread.extend(
            findings.Unread(right.resource, f"no right to {right}", is_forbidden=True)
            for right in lacking
        )

    async def nodes(self) -> list[model.Node] | None:
        """Return all nodes."""
        return await self._all(NODES, objects.Node, projection.node, right=GPU[0])

    async def pods(self) -> list[model.Pod] | None:
        """Return the pods that have to do with fuse."""
        right = cluster_api.Right("list", "pods")
        return await self._all("/api/v1/pods", objects.Pod, projection.pod, right=right)

    async def events(self) -> list[model.Told] | None:
        """Return the Kubernetes Events that may tell of fuse."""
        right = cluster_api.Right("list", "events")
        found: list[model.Told] = []
        for reason in _EVENT_REASONS:
            query = {"fieldSelector": f"reason={reason}"}
            some = await self._all(
                "/api/v1/events", objects.Event, projection.event, right=right, query=query
            )
            if some is None:
                return None
            found.extend(some)
        return found

    async def namespaces(self) -> Mapping[str, Mapping[str, str]] | None:
        """Return the namespaces' labels."""
        found = await self._all("/api/v1/namespaces", objects.ConfigMap, lambda raw: raw.metadata)
        return None if found is None else {one.name: one.labels or {} for one in found}

    async def slices(self) -> list[model.Slice]:
        """Return DRA's devices; none where there is no DRA or no right."""
        known = len(self.unread)
        for path in _SLICES:
            found = await self._all(
                path, objects.ResourceSlice, projection.slice_of, is_optional=True
            )
            if found is not None or len(self.unread) > known:
                return found or []
        return []

    async def reports(self, namespace: str) -> tuple[dict[str, sources.Kinds], frozenset[str]]:
        """Return what agents reported, as the labeler wrote it down; nothing without one."""
        path = f"/api/v1/namespaces/{namespace}/configmaps/{projection.INVENTORY_CONFIG_MAP}"
        answer = await self._api.ask("GET", path, timeout_s=self._left_s())
        if not answer.is_ok:
            self._note(path, answer, is_optional=True)
            return {}, frozenset()
        try:
            found = msgspec.json.decode(answer.body, type=objects.ConfigMap)
            return projection.decode_inventory((found.data or {}).get(projection.INVENTORY_KEY, ""))
        except (*api.UNREADABLE, projection.UnreadableInventory) as error:
            self.unread.append(findings.Unread(path, f"unreadable: {error}"))
            return {}, frozenset()

    async def autoscalers(
        self,
    ) -> tuple[findings.ClusterAutoscaler | None, findings.Karpenter | None]:
        """Return the autoscalers that run here, as far as they can be seen."""
        right = AUTOSCALER[-1]
        deployments = await self._all(
            _DEPLOYMENTS,
            objects.Deployment,
            lambda raw: raw if _is_autoscaler(raw) else None,
            right=right,
        )
        status = await self._api.ask("GET", _STATUS, timeout_s=self._left_s())
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
                image=_image(ours[0]) if ours else "",
                arguments=arguments,
                groups=tuple(dict.fromkeys([*flagged, *named])),
                renewed=renewed,
            )
        karpenter = None
        if karpenters or overlays:
            given = {name for one in overlays or () for name in one.spec.capacity or {}}
            karpenter = findings.Karpenter(
                namespace=karpenters[0].metadata.namespace if karpenters else "",
                name=karpenters[0].metadata.name if karpenters else "",
                gates=_gates(karpenters[0]) if karpenters else "",
                overlays=tuple(sorted(given)),
            )
        return scaler, karpenter

    async def _all(
        self,
        path: str,
        shape: type[Raw],
        read: Callable[[Raw], Found | None],
        *,
        right: cluster_api.Right | None = None,
        query: Mapping[str, str] | None = None,
        is_optional: bool = False,
    ) -> list[Found] | None:
        """Return what there is of a kind; None if that cannot be known, which is noted."""
        if right in self._missing:
            return None
        decoder = msgspec.json.Decoder(shape)
        for _ in range(3):
            found: list[Found] = []
            bad = 0
            try:
                pages = self._api.pages(path, query=query, timeout_s=self._left_s())
                async for page in pages:
                    for item in page.items:
                        try:
                            one = read(decoder.decode(item))
                        except api.UNREADABLE:
                            bad += 1
                            continue
                        if one is not None:
                            found.append(one)
                    self._say(f"{path.rpartition('/')[2]}: {len(found)}")
            except api.Refused as error:
                if error.answer.status == HTTPStatus.GONE:
                    continue
                self._note(path, error.answer, is_optional=is_optional)
                return None
            if bad:
                self.unread.append(findings.Unread(path, f"{bad} unreadable"))
            return found
        self.unread.append(findings.Unread(path, "the list expired again and again"))
        return None

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


def of_slices(slices: Sequence[model.Slice]) -> dict[str, sources.Kinds]:
    """Return the GPUs of each node as DRA's drivers tell of them."""
    found: dict[str, Counter[sources.Product]] = {}
    for one in slices:
        if one.node and one.driver in _GPU_DRIVERS and one.products:
            kinds = [sources.Product(*product) for product in one.products]
            found.setdefault(one.node, Counter()).update(kinds)
    return dict(found)


def _is_autoscaler(found: objects.Deployment) -> bool:
    image = _image(found)
    return _AUTOSCALER.match(image) is not None or "karpenter/controller" in image


def _image(found: objects.Deployment) -> str:
    return _container(found).image


def _container(found: objects.Deployment) -> objects.Container:
    return next(iter(found.pod_spec.containers or ()), objects.Container())


def _arguments(found: objects.Deployment) -> tuple[str, ...]:
    container = _container(found)
    return (*(container.command or ()), *(container.args or ()))


def _gates(found: objects.Deployment) -> str:
    variables = _container(found).env or ()
    return next((v.value for v in variables if v.name == "FEATURE_GATES"), "")


def _status(body: bytes) -> tuple[str, datetime | None]:
    """Return the autoscaler's status and when it was written, by its annotation or its text."""
    try:
        found = msgspec.json.decode(body, type=objects.ConfigMap)
    except api.UNREADABLE:
        return "", None
    text = (found.data or {}).get("status", "")
    said = (found.metadata.annotations or {}).get("cluster-autoscaler.kubernetes.io/last-updated")
    when = _RENEWED.search(said or text)
    return text, objects.parse_time(f"{when[1]}T{when[2]}+00:00") if when else None
