"""Adapter for the Kubernetes API: reports the Node and its Lease as a kubelet does."""

import asyncio
import contextlib
import os
import platform
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Protocol

import aiohttp
import msgspec
import orjson

from muster.local import httpd
from muster.local.kubelet import device_manager, rules

MERGE_PATCH = "application/merge-patch+json"
# Lists such as a node's conditions are merged by key, because others also write them.
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
_REQUEST_TIMEOUT_S = 10.0
_WATCH_TIMEOUT_S = 60
_BODY_BYTES_MAX = 4 * 1024 * 1024
LEASE_DURATION_S = 40
Json = dict[str, object]
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
LEASE_PERIOD_S = 10.0
# The delay of the first node status; a plugin that registers before it never shows 0.
_FIRST_STATUS_S = 0.1
NOT_FOUND = 404
_CONFLICT = 409


class ApiUnavailable(Exception):
    """The API did not answer, or answered unexpectedly; try again later."""


class Gone(Exception):
    """The resource version of the watch is too old, so objects must be listed again."""


class Log(Protocol):
    """A function that writes one log line."""

    def __call__(self, event: str, **facts: object) -> None:
        """Write the event and its facts."""


class Api:
    """A client of one API server; the caller must close it."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._session = aiohttp.ClientSession(
            read_bufsize=_BODY_BYTES_MAX, timeout=aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()

    async def send(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        params: Mapping[str, str] | None = None,
        kind: str = "application/json",
    ) -> tuple[int, object]:
        """Send a request of content type `kind`; return status and body. Raises ApiUnavailable."""
        data = None if body is None else orjson.dumps(body)
        headers = {"Accept": "application/json"} | ({"Content-Type": kind} if data else {})
        try:
            async with self._session.request(
                method, self._url + path, params=params, data=data, headers=headers
            ) as answer:
                return answer.status, orjson.loads(await answer.read() or b"null")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ApiUnavailable(f"{method} {path}: {error!r}") from error

    async def watch(self, path: str, params: Mapping[str, str]) -> AsyncIterator[object]:
        """Yield watch events until the server ends the watch. Raises Gone, ApiUnavailable."""
        query = {**params, "watch": "1", "timeoutSeconds": str(_WATCH_TIMEOUT_S)}
        limit = aiohttp.ClientTimeout(total=_WATCH_TIMEOUT_S + _REQUEST_TIMEOUT_S)
        try:
            async with self._session.get(self._url + path, params=query, timeout=limit) as answer:
                if answer.status == 410:  # noqa: PLR2004 (HTTP's Gone)
                    raise Gone
                if answer.status >= 400:  # noqa: PLR2004 (HTTP's errors)
                    raise ApiUnavailable(f"GET {path}: {answer.status}")
                async for line in answer.content:
                    if line.strip():
                        yield orjson.loads(line)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ApiUnavailable(f"watch {path}: {error!r}") from error


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """A machine's CPU and memory as quantities, its kernel, architecture and kubelet version."""

    cpu: str
    memory: str
    kernel: str
    architecture: str
    kubelet: str


def node_object(name: str, usage: Usage) -> Json:
    """Return the Node that a kubelet creates if there is none."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
                "kubernetes.io/arch": usage.architecture,
            },
        },
    }


def node_status(
    status: device_manager.Status, usage: Usage, *, started: str, now: str, zero: frozenset[str]
) -> Json:
    """Return a node status update; resources in `zero` are 0 unless `status` counts them."""
    base = {"cpu": usage.cpu, "memory": usage.memory, "pods": "110"}
    none = dict.fromkeys(zero, "0")
    return {
        "status": {
            "capacity": base | none | _quantities(status.capacity),
            "allocatable": base | none | _quantities(status.allocatable),
            "conditions": [
                {
                    "type": "Ready",
                    "status": "True",
                    "reason": "KubeletReady",
                    "message": "kubelet is posting ready status",
                    "lastHeartbeatTime": now,
                    "lastTransitionTime": started,
                }
            ],
            "nodeInfo": {
                "kubeletVersion": f"v{usage.kubelet}.2+muster-local",
                "kernelVersion": usage.kernel,
                "architecture": usage.architecture,
                "operatingSystem": "linux",
                "osImage": "muster local stand-in",
                "containerRuntimeVersion": "none://0",
            },
        }
    }


def extended_resources(node: object) -> frozenset[str]:
    """Return the names of the extended resources in a Node that an earlier kubelet wrote."""
    capacity = msgspec.convert(node, _Node).status.capacity
    return frozenset(name for name in capacity if rules.is_extended_resource(name))


def new_lease(node: str, now: str) -> Json:
    """Return the node's Lease, renewed now."""
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": node, "namespace": "kube-node-lease"},
        "spec": {
            "holderIdentity": node,
            "leaseDurationSeconds": LEASE_DURATION_S,
            "renewTime": now,
        },
    }


class _NodeStatus(msgspec.Struct):
    capacity: dict[str, object] = {}


class _Node(msgspec.Struct):
    status: _NodeStatus = msgspec.field(default_factory=_NodeStatus)


def _quantities(counts: dict[str, int]) -> dict[str, str]:
    return {name: rules.quantity(count) for name, count in counts.items()}


class Node:
    """The Node and the Lease of one kubelet; `report` and `renew` raise ApiUnavailable."""

    def __init__(self, api: Api, name: str, version: str) -> None:
        self._api = api
        self._name = name
        self._path = f"/api/v1/nodes/{name}"
        self._usage = _usage(version)
        self._started = httpd.timestamp()
        self._is_registered = False
        self._zero: frozenset[str] = frozenset()

    async def report(self, status: device_manager.Status) -> None:
        """Write the node status; create the Node if there is none.

        A removed resource is written as 0 until a write has succeeded.
        """
        self._zero = (self._zero | status.removed) - status.capacity.keys()
        if not self._is_registered:
            await self._register()
        body = node_status(
            status, self._usage, started=self._started, now=httpd.timestamp(), zero=self._zero
        )
        code, answer = await self._api.send(
            "PATCH", f"{self._path}/status", body, kind=STRATEGIC_PATCH
        )
        self._is_registered = code != NOT_FOUND
        expect_success(code, answer, f"patch {self._path}/status")
        self._zero = frozenset()

    async def renew(self) -> None:
        """Renew the node's Lease; create it if there is none."""
        lease = new_lease(self._name, httpd.timestamp(fraction=True))
        path = f"{_LEASES}/{self._name}"
        code, answer = await self._api.send("PATCH", path, lease, kind=MERGE_PATCH)
        if code == NOT_FOUND:
            code, answer = await self._api.send("POST", _LEASES, lease)
        expect_success(code, answer, f"renew {path}")

    async def renew_forever(self, period_s: float) -> None:
        """Renew the Lease periodically; the status loop logs when the API is unavailable."""
        while True:
            with contextlib.suppress(ApiUnavailable):
                await self.renew()
            await asyncio.sleep(period_s)

    async def _register(self) -> None:
        code, node = await self._api.send("GET", self._path)
        if code == NOT_FOUND:
            body = node_object(self._name, self._usage)
            code, node = await self._api.send("POST", "/api/v1/nodes", body)
            if code == _CONFLICT:
                raise ApiUnavailable(f"{self._path} was just created by another client")
        expect_success(code, node, f"register {self._path}")
        # A kubelet that registers takes over the Node with its device resources at 0
        # (kubelet_node_status.go, zero extended resources).
        self._zero |= extended_resources(node)


class Report:
    """The status loop: reports periodically, as in the kubelet, not after every change.

    Computing a status also forgets the devices of a plugin that stopped long ago, so the loop runs
    even if there is no API to report to.
    """

    def __init__(
        self, status: Callable[[], device_manager.Status], *, period_s: float, log: Log
    ) -> None:
        self._status = status
        self._period_s = period_s
        self._log = log
        self._is_unavailable = False

    async def run(self, node: Node | None) -> None:
        """Report periodically until cancelled; log a failure once, and retry in the next period."""
        await asyncio.sleep(_FIRST_STATUS_S)
        while True:
            status = self._status()
            if node is not None:
                await self._write(node, status)
            await asyncio.sleep(self._period_s)

    async def _write(self, node: Node, status: device_manager.Status) -> None:
        try:
            await node.report(status)
        except ApiUnavailable as error:
            if not self._is_unavailable:
                self._log("node status not written", error=str(error))
            self._is_unavailable = True
        else:
            if self._is_unavailable:
                self._log("node status written again")
            self._is_unavailable = False


def _usage(version: str) -> Usage:
    memory_kib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 1024
    machine = platform.machine()
    return Usage(
        cpu=str(os.cpu_count() or 1),
        memory=f"{memory_kib}Ki",
        kernel=platform.release(),
        architecture={"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine),
        kubelet=version,
    )


def expect_success(code: int, answer: object, what: str) -> None:
    """Raise ApiUnavailable unless the request succeeded."""
    if code >= 400:  # noqa: PLR2004 (HTTP's errors)
        raise ApiUnavailable(f"{what}: {code} {answer}")
