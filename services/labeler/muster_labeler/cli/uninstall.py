"""Adapter for the command line: `muster uninstall` removes muster from a cluster, nodes included.

It first ends the workloads (NATS last) and removes the namespace, so that no labeler is left to
label a node again. Next it removes muster's labels, annotations and conditions from nodes, and
finally muster's objects outside the namespace. Each step can be repeated.
"""

import asyncio
import functools
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, TypeVar

import msgspec

from muster import RUNBOOKS_URL, wording
from muster.cli import output
from muster.kubernetes import api as kubernetes_api
from muster.kubernetes import objects
from muster_labeler.check import cluster_reader
from muster_labeler.check.findings import Exit
from muster_labeler.cli import label_gpus, options
from muster_labeler.kubernetes.cluster_api import Permission

_COMMAND: Final = "uninstall"
_PART: Final = ("app.kubernetes.io/part-of", "muster")
_RBAC: Final = "rbac.authorization.k8s.io"
_ADMISSION: Final = "admissionregistration.k8s.io"
_DRA: Final = "resource.k8s.io"
_KINDS: Final = (
    (_RBAC, "rolebindings"),
    (_RBAC, "roles"),
    (_RBAC, "clusterrolebindings"),
    (_RBAC, "clusterroles"),
    (_ADMISSION, "validatingadmissionpolicybindings"),
    (_ADMISSION, "validatingadmissionpolicies"),
    (_ADMISSION, "mutatingwebhookconfigurations"),
    ("storage.k8s.io", "csidrivers"),
    (_DRA, "deviceclasses"),
    (_DRA, "resourceslices"),
    ("security.openshift.io", "securitycontextconstraints"),
)
"""API group and plural name of each kind of object that muster has outside its namespace."""
_APPS: Final = "apps"
_CLAIMS: Final = "persistentvolumeclaims"
_WORKLOADS: Final = (
    (("daemonsets", "deployments"), "app.kubernetes.io/name!=muster-nats"),
    (("statefulsets",), ""),
)
"""Groups of workloads in the order in which they end, each with a selector of its pods.

The workloads of a group end together. NATS is last: while it has clients, it waits for its
lame-duck time.
"""
_READING: Final = (
    Permission("list", "nodes"),
    Permission("get", "namespaces"),
    *(Permission("list", plural, group) for group, plural in _KINDS),
)
_WRITING: Final = (
    *_READING,
    Permission("patch", "nodes"),
    Permission("patch", "nodes/status"),
    Permission("delete", "namespaces"),
    *(Permission("list", plural) for plural in ("pods", _CLAIMS)),
    Permission("deletecollection", _CLAIMS),
    *(
        Permission("deletecollection", plural, _APPS)
        for plurals, _ in _WORKLOADS
        for plural in plurals
    ),
    *(Permission("delete", plural, group) for group, plural in _KINDS),
)
_PART_ENDS_S: Final = 60.0
"""How long to wait until pods or volume claims are gone; a pod on a lost node never ends."""
_ENDS_S: Final = 180.0
"""How long to wait for the namespace's deletion; NATS alone may take a minute to stop."""
_LOOK_S: Final = 0.5
_ENDED: Final = {"Succeeded", "Failed"}
_NODES_KEEP: Final = (
    "remains: nodes may still list muster's resources with 0 devices; see "
    f"{RUNBOOKS_URL.removesuffix('runbooks/')}upgrade.html"
)

Shape = TypeVar("Shape")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to remove muster, or to show what would be removed."""

    cluster: options.ClusterOptions
    yes: bool
    is_writing: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Installation:
    """What muster has in a cluster.

    `outside` has the API paths of muster's objects outside its namespace; `kept_volumes` are the
    persistent volumes that are not deleted with their claims.
    """

    has_namespace: bool
    outside: tuple[str, ...]
    kept_volumes: tuple[str, ...]
    nodes: int
    """The number of nodes on which muster wrote something."""


class _PodStatus(objects.Object, frozen=True):
    phase: str = ""


class _Pod(objects.HasMetadata, frozen=True):
    status: _PodStatus = _PodStatus()


class _Claim(objects.Object, frozen=True):
    namespace: str = ""


class _VolumeSpec(objects.Object, frozen=True):
    persistent_volume_reclaim_policy: str = ""
    claim_ref: _Claim | None = None


class _Volume(objects.HasMetadata, frozen=True):
    spec: _VolumeSpec = _VolumeSpec()


class _NamespaceStatus(objects.Object, frozen=True):
    conditions: tuple[objects.Condition, ...] | None = None


class _Namespace(objects.HasMetadata, frozen=True):
    status: _NamespaceStatus = _NamespaceStatus()


class _Refused(Exception):
    """The removal was stopped; the message gives the reason, and `code` is the exit code."""

    def __init__(self, text: str, code: Exit = Exit.PROBLEMS) -> None:
        super().__init__(text)
        self.code = code


def run(request: Request) -> int:
    """Remove muster; return the exit code. Raises UsageError."""
    try:
        return asyncio.run(_run(request))
    except (kubernetes_api.NoCluster, cluster_reader.Unreachable) as error:
        return output.fail(_COMMAND, str(error), code=Exit.UNREACHABLE)
    except kubernetes_api.Refused as error:
        failed = _refusal(error.answer)
        return output.fail(_COMMAND, str(failed), code=failed.code)
    except _Refused as error:
        return output.fail(_COMMAND, str(error), code=error.code)


async def _run(request: Request) -> int:
    namespace = request.cluster.muster_namespace
    async with await options.connect(request.cluster) as api:
        cluster = _Cluster(api, namespace, timeout_s=request.cluster.timeout)
        installation = await cluster.look(_WRITING if request.is_writing else _READING)
        if installation is None:
            output.show(f"muster is not installed in {api.name}")
            return Exit.FINE
        output.show(f"{api.name}:", *_described(installation, namespace))
        if not request.is_writing:
            return Exit.FINE
        if not request.yes and not await label_gpus.is_confirmed(
            _COMMAND, api, "Remove muster from"
        ):
            return Exit.PROBLEMS if sys.stdin.isatty() else Exit.USAGE
        if installation.has_namespace:
            await cluster.end_workloads()
            await cluster.remove_namespace()
        code = await label_gpus.carry_out(_of_nodes(request), {})
        await cluster.remove(installation.outside)
    for volume in installation.kept_volumes:
        output.show(f"remains: volume {volume}; to delete it: kubectl delete pv {volume}")
    output.show(_NODES_KEEP)
    return code


def _of_nodes(request: Request) -> label_gpus.Request:
    return label_gpus.Request(
        command=_COMMAND,
        cluster=request.cluster,
        write=options.WriteOptions(yes=True),
        is_writing=True,
        has_objects=True,
    )


def _described(installation: _Installation, namespace: str) -> list[str]:
    lines = []
    if installation.has_namespace:
        lines.append(f"namespace {namespace} and all objects in it")
    if installation.nodes:
        nodes = wording.counted(installation.nodes, "node")
        lines.append(f"the labels, annotations and conditions that muster wrote on {nodes}")
    return [*lines, *map(_name, installation.outside)]


class _Cluster:
    """The cluster from which muster is removed."""

    def __init__(self, api: kubernetes_api.Api, namespace: str, *, timeout_s: float) -> None:
        self._api = api
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._path = f"/api/v1/namespaces/{namespace}"

    async def look(self, permissions: Sequence[Permission]) -> _Installation | None:
        """Return what muster has in the cluster; None if it has nothing there.

        Raises _Refused, kubernetes_api.Refused and Unreachable.
        """
        progress = output.progress
        reader = cluster_reader.ClusterReader(
            self._api, timeout_s=self._timeout_s, progress=progress
        )
        await reader.check_access(permissions)
        nodes = None if reader.unread else await reader.nodes()
        progress("")
        if nodes is None:
            is_forbidden = any(entry.is_forbidden for entry in reader.unread)
            text = "; ".join(entry.why for entry in reader.unread)
            raise _Refused(text, Exit.NO_PERMISSION if is_forbidden else Exit.UNREACHABLE)
        outside = []
        for group, plural in _KINDS:
            path = f"/apis/{group}/v1"
            async for entry in self._all(f"{path}/{plural}", objects.HasMetadata, "=".join(_PART)):
                place = entry.metadata.namespace
                if place != self._namespace:
                    below = f"/namespaces/{place}" if place else ""
                    outside.append(f"{path}{below}/{plural}/{entry.metadata.name}")
        installation = _Installation(
            has_namespace=await self._namespace_object() is not None,
            outside=tuple(outside),
            kept_volumes=tuple([volume async for volume in self._kept_volumes()]),
            nodes=sum(node.has_condition or node.is_written for node in nodes),
        )
        is_there = installation.has_namespace or installation.outside or installation.nodes
        return installation if is_there else None

    async def end_workloads(self) -> None:
        """Delete the workloads and the volume claims, and wait a limited time until they are gone.

        The namespace controller would otherwise find remaining pods, and retry only after half of
        their grace period. Raises _Refused and kubernetes_api.Refused.
        """
        for plurals, selector in _WORKLOADS:
            for plural in plurals:
                await self._delete(f"/apis/{_APPS}/v1/namespaces/{self._namespace}/{plural}")
            await self._until_none("pod", functools.partial(self._running_pods, selector))
        await self._delete(f"{self._path}/{_CLAIMS}")
        await self._until_none("volume claim", self._claims)

    async def _until_none(self, what: str, count: Callable[[], Awaitable[int]]) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        while (left := await count()) and clock() - began < _PART_ENDS_S:
            listed = wording.counted(left, what)
            output.progress(f"waiting for {listed} to be deleted: {clock() - began:.0f} s")
            await asyncio.sleep(_LOOK_S)
        output.progress("")

    async def remove_namespace(self) -> None:
        """Delete the namespace and wait until it no longer exists. Raises _Refused."""
        await self._delete(self._path)
        progress = output.progress
        clock = asyncio.get_running_loop().time
        began = clock()
        while (namespace := await self._namespace_object()) is not None:
            passed_s = clock() - began
            if passed_s > _ENDS_S:
                waits = [c.message for c in namespace.status.conditions or () if c.status == "True"]
                raise _Refused(
                    f"namespace {self._namespace} still exists after {_ENDS_S:g} s "
                    f"({'; '.join(waits) or 'no reason given'}); nodes and objects outside it are "
                    "unchanged"
                )
            progress(f"waiting for namespace {self._namespace} to be deleted: {passed_s:.0f} s")
            await asyncio.sleep(_LOOK_S)
        progress("")

    async def remove(self, paths: Sequence[str]) -> None:
        """Delete objects outside the namespace. Raises _Refused."""
        for path in paths:
            await self._delete(path)
        output.show(f"{wording.counted(len(paths), 'object')} outside the namespace removed")

    async def _delete(self, path: str) -> None:
        answer = await self._api.request("DELETE", path, timeout_s=self._timeout_s)
        if not answer.is_ok and answer.status not in {HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT}:
            # 409 for a namespace: it is already being deleted
            raise _refusal(answer)

    async def _running_pods(self, selector: str) -> int:
        """Return how many of muster's pods that match `selector` have not ended. Raises Refused."""
        path = f"{self._path}/pods"
        label = ",".join(filter(None, ("=".join(_PART), selector)))
        phases = [pod.status.phase async for pod in self._all(path, _Pod, label)]
        return sum(phase not in _ENDED for phase in phases)

    async def _claims(self) -> int:
        """Return the number of volume claims. Raises kubernetes_api.Refused."""
        listed = self._all(f"{self._path}/{_CLAIMS}", objects.HasMetadata)
        return len([claim async for claim in listed])

    async def _namespace_object(self) -> _Namespace | None:
        """Return muster's namespace, or None. Raises _Refused if unreadable or not muster's."""
        answer = await self._api.request("GET", self._path, timeout_s=self._timeout_s)
        if answer.status == HTTPStatus.NOT_FOUND:
            return None
        if not answer.is_ok:
            raise _refusal(answer)
        namespace = msgspec.json.decode(answer.body, type=_Namespace)
        key, value = _PART
        if namespace.labels.get(key) != value:
            raise _Refused(
                f"namespace {self._namespace} has no label {key}={value}, so it may contain more "
                f"than muster; if it contains only muster, run: kubectl label namespace "
                f"{self._namespace} {key}={value}"
            )
        return namespace

    async def _kept_volumes(self) -> AsyncIterator[str]:
        async for volume in self._all("/api/v1/persistentvolumes", _Volume):
            claim = volume.spec.claim_ref
            is_kept = volume.spec.persistent_volume_reclaim_policy == "Retain"
            if is_kept and claim is not None and claim.namespace == self._namespace:
                yield volume.metadata.name

    async def _all(self, path: str, shape: type[Shape], label: str = "") -> AsyncIterator[Shape]:
        """Yield the objects at a path that `label` selects; none if the path is not served.

        Raises kubernetes_api.Refused.
        """
        query = {"labelSelector": label} if label else {}
        try:
            async for page in self._api.pages(path, query=query, timeout_s=self._timeout_s):
                for item in page.items:
                    yield msgspec.json.decode(item, type=shape)
        except kubernetes_api.Refused as error:
            if error.answer.status != HTTPStatus.NOT_FOUND:
                raise


def _refusal(answer: kubernetes_api.Answer) -> _Refused:
    code = Exit.UNREACHABLE if answer.is_passing else Exit.PROBLEMS
    return _Refused(answer.problem, Exit.NO_PERMISSION if answer.is_forbidden else code)


def _name(path: str) -> str:
    """Return the resource, name and namespace (if any) of the object at a path, as text."""
    *_, before, scope, plural, name = path.split("/")
    return f"{plural}/{name}" + (f" in namespace {scope}" if before == "namespaces" else "")
