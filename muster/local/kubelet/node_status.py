"""Adapter: the Node object and its Lease: what the kubelet tells the API about its node."""

import asyncio
import contextlib
import os
import platform
from collections.abc import Callable

from muster.local.kubelet import api_client, devices, node_objects

_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
LEASE_PERIOD_S = 10.0
# The first node status after a start comes this late; a plugin registered by then never shows 0.
_FIRST_STATUS_S = 0.1
_NOT_FOUND = 404
_CONFLICT = 409


class Node:
    """The Node and the Lease of one kubelet; every call raises ApiAway if the API is away."""

    def __init__(self, api: api_client.Api, name: str) -> None:
        self._api = api
        self._name = name
        self._path = f"/api/v1/nodes/{name}"
        self._usage = _usage()
        self._started = api_client.now()
        self._is_registered = False
        self._zero: frozenset[str] = frozenset()

    async def report(self, status: devices.Status) -> None:
        """Write the node status; makes the Node if there is none.

        A resource that was removed is written as 0 until that has been said once.
        """
        self._zero = (self._zero | status.removed) - status.capacity.keys()
        if not self._is_registered:
            await self._register()
        body = node_objects.node_status(
            status, self._usage, started=self._started, now=api_client.now(), zero=self._zero
        )
        code, answer = await self._api.patch(
            f"{self._path}/status", body, kind=api_client.STRATEGIC_PATCH
        )
        self._is_registered = code != _NOT_FOUND
        _expect_success(code, answer, f"patch {self._path}/status")
        self._zero = frozenset()

    async def renew(self) -> None:
        """Renew the node's Lease; makes it if there is none."""
        lease = node_objects.lease(self._name, api_client.now(fraction=True))
        path = f"{_LEASES}/{self._name}"
        code, answer = await self._api.patch(path, lease, kind=api_client.MERGE_PATCH)
        if code == _NOT_FOUND:
            code, answer = await self._api.post(_LEASES, lease)
        _expect_success(code, answer, f"renew {path}")

    async def renew_forever(self, period_s: float) -> None:
        """Renew the Lease on its period; the status loop tells when the API is away."""
        while True:
            with contextlib.suppress(api_client.ApiAway):
                await self.renew()
            await asyncio.sleep(period_s)

    async def _register(self) -> None:
        code, node = await self._api.get(self._path)
        if code == _NOT_FOUND:
            body = node_objects.node_object(self._name, self._usage)
            code, node = await self._api.post("/api/v1/nodes", body)
            if code == _CONFLICT:
                raise api_client.ApiAway(f"{self._path} was made by somebody else just now")
        _expect_success(code, node, f"register {self._path}")
        # A kubelet that registers takes over the Node with its device resources at 0
        # (kubelet_node_status.go, zero extended resources).
        self._zero |= node_objects.extended_resources(node)


class Report:
    """The status loop: not after every change of a device, but on its period, as in the kubelet.

    Computing a status is also what lets devices of a stopped plugin be forgotten, so the loop runs
    without a node too.
    """

    def __init__(
        self, status: Callable[[], devices.Status], *, period_s: float, log: api_client.Log
    ) -> None:
        self._status = status
        self._period_s = period_s
        self._log = log
        self._is_away = False

    async def run(self, node: Node | None) -> None:
        """Report for ever; an absent API is told once and tried again every period."""
        await asyncio.sleep(_FIRST_STATUS_S)
        while True:
            status = self._status()
            if node is not None:
                await self._tell(node, status)
            await asyncio.sleep(self._period_s)

    async def _tell(self, node: Node, status: devices.Status) -> None:
        try:
            await node.report(status)
        except api_client.ApiAway as error:
            if not self._is_away:
                self._log("node status not written", error=str(error))
            self._is_away = True
        else:
            if self._is_away:
                self._log("node status written again")
            self._is_away = False


def _usage() -> node_objects.Usage:
    memory_kib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 1024
    machine = platform.machine()
    return node_objects.Usage(
        cpu=str(os.cpu_count() or 1),
        memory=f"{memory_kib}Ki",
        kernel=platform.release(),
        architecture={"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine),
    )


def _expect_success(code: int, answer: object, what: str) -> None:
    if code >= 400:  # noqa: PLR2004 (HTTP's errors)
        raise api_client.ApiAway(f"{what}: {code} {answer}")
