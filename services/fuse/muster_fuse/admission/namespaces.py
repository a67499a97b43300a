"""Adapter: the Kubernetes API: which resource a namespace wants to have replaced.

A namespace is read when a pod that this matters for is made in it, and the answer is used for a
second: a Job of a thousand pods costs one request each second. No watch, and no right to list
namespaces, is needed.
"""

import asyncio
from collections import OrderedDict
from typing import Final

import msgspec

from muster.kubernetes import api as kubernetes_api
from muster.kubernetes import objects
from muster_fuse.admission import pod_patch

_FRESH_S: Final = 1.0
_NAMESPACES_MAX: Final = 1000


class Unavailable(Exception):
    """The namespace cannot be read, and never could be; the text says why."""


class _Namespace:
    """What is known of a namespace."""

    def __init__(self) -> None:
        self.reading = asyncio.Lock()
        self.read_at = float("-inf")
        self.replace: str | None = None
        self.problem = ""


class Namespaces:
    """The namespaces of a cluster; the least recently used are forgotten."""

    def __init__(self, api: kubernetes_api.Api, *, timeout_s: float) -> None:
        self._api = api
        self._timeout_s = timeout_s
        self._known: OrderedDict[str, _Namespace] = OrderedDict()

    async def replace(self, name: str) -> str:
        """Return the resource that the namespace's annotation names; empty without one.

        If the API server does not answer, the last answer is used. Raises Unavailable.
        """
        known = self._known.setdefault(name, _Namespace())
        self._known.move_to_end(name)
        if len(self._known) > _NAMESPACES_MAX:
            self._known.popitem(last=False)
        async with known.reading:
            if asyncio.get_running_loop().time() - known.read_at >= _FRESH_S:
                await self._read(name, known)
        if known.replace is None:
            raise Unavailable(known.problem)
        return known.replace

    async def _read(self, name: str, known: _Namespace) -> None:
        answer = await self._api.request(
            "GET", f"/api/v1/namespaces/{name}", timeout_s=self._timeout_s
        )
        known.problem = answer.problem
        if answer.is_ok:
            try:
                namespace = msgspec.json.decode(answer.body, type=objects.HasMetadata)
            except kubernetes_api.UNREADABLE as error:
                known.problem = f"{answer.what}: unreadable: {error}"
            else:
                known.replace = namespace.annotations.get(pod_patch.REPLACE, "")
        # a failure, too, is the answer for all who wait
        known.read_at = asyncio.get_running_loop().time()
