"""Door to the owners of workloads: asks the Kubernetes API whom a pod's owner wants to be told.

The annotation of the pod goes before that of its namespace. What was learned is believed for a
minute; what cannot be learned in time is nobody: the alert itself must not wait.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Final

from muster import logs
from muster_notifier import cluster, regarding

_BELIEVED_S: Final = 60.0
_KNOWN_MAX: Final = 10_000
_PODS_MAX: Final = 50


class Owners:
    """What is known of the owners of pods."""

    def __init__(
        self,
        found: cluster.Cluster,
        *,
        annotation: str,
        receivers: Collection[str],
        timeout_s: float,
    ) -> None:
        self._cluster = found
        self._annotation = annotation
        self._receivers = frozenset(receivers)
        self._timeout_s = timeout_s
        self._known: OrderedDict[str, tuple[float, str | None]] = OrderedDict()
        self._unknown: set[str] = set()

    async def of(self, pods: Iterable[str]) -> frozenset[str]:
        """Return the receivers that the owners of these pods (`namespace/name`) named."""
        asked = list(dict.fromkeys(pods))[:_PODS_MAX]
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await asyncio.gather(*(self._of(pod) for pod in asked))
        except TimeoutError:
            logs.logger().warning("owners_unknown", pods=len(asked), timeout_s=self._timeout_s)
            return frozenset()
        named = frozenset(name.strip() for text in found for name in text.split(",")) - {""}
        for name in named - self._receivers - self._unknown:
            self._unknown.add(name)
            logs.logger().warning("owner_names_no_receiver", receiver=name[:100])
        return named & self._receivers

    async def _of(self, pod: str) -> str:
        found = regarding.pod_of(pod)
        if found is None:
            return ""
        namespace, name = found
        own = await self._ask(f"/api/v1/namespaces/{namespace}/pods/{name}")
        if own is not None:
            return own
        return await self._ask(f"/api/v1/namespaces/{namespace}") or ""

    async def _ask(self, path: str) -> str | None:
        now = asyncio.get_running_loop().time()
        at, value = self._known.get(path, (-_BELIEVED_S, None))
        if now - at < _BELIEVED_S:
            return value
        annotations = await self._cluster.annotations(path)
        if annotations is None:
            return None
        value = annotations.get(self._annotation)
        self._known[path] = (now, value)
        self._known.move_to_end(path)
        if len(self._known) > _KNOWN_MAX:
            self._known.popitem(last=False)
        return value
