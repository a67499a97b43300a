"""Adapter for the Kubernetes API: reads which resource the webhook replaces in a namespace.

A namespace is read when a new pod in it may request that resource, and the answer is cached for one
second: a Job with a thousand pods costs one request per second. The webhook needs neither a watch
nor permission to list namespaces.
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
    """The namespace has never been read successfully; the message gives the reason."""


class _Namespace:
    """The cached state of a namespace."""

    def __init__(self) -> None:
        self.reading = asyncio.Lock()
        self.read_at = float("-inf")
        self.replace: str | None = None
        self.problem = ""


class Namespaces:
    """A cache of the cluster's namespaces; the least recently used are evicted."""

    def __init__(self, api: kubernetes_api.Api, *, timeout_s: float) -> None:
        self._api = api
        self._timeout_s = timeout_s
        self._cached: OrderedDict[str, _Namespace] = OrderedDict()

    async def replace(self, name: str) -> str:
        """Return the resource in the namespace's annotation; empty if there is no annotation.

        If the API server does not answer, the cached answer is used. Raises Unavailable.
        """
        cached = self._cached.setdefault(name, _Namespace())
        self._cached.move_to_end(name)
        if len(self._cached) > _NAMESPACES_MAX:
            self._cached.popitem(last=False)
        async with cached.reading:
            if asyncio.get_running_loop().time() - cached.read_at >= _FRESH_S:
                await self._read(name, cached)
        if cached.replace is None:
            raise Unavailable(cached.problem)
        return cached.replace

    async def _read(self, name: str, cached: _Namespace) -> None:
        answer = await self._api.request(
            "GET", f"/api/v1/namespaces/{name}", timeout_s=self._timeout_s
        )
        cached.problem = answer.problem
        if answer.is_ok:
            try:
                namespace = msgspec.json.decode(answer.body, type=objects.HasMetadata)
            except kubernetes_api.UNREADABLE as error:
                cached.problem = f"{answer.what}: unreadable: {error}"
            else:
                cached.replace = namespace.annotations.get(pod_patch.REPLACE, "")
        # all waiting requests share this answer, even if it is a failure
        cached.read_at = asyncio.get_running_loop().time()
