"""Adapter: owners of workloads: asks the Kubernetes API whom a pod's owner wants notified.

The annotation of the pod goes before that of its namespace, and is cached for a minute. Nobody else
waits for this: while Kubernetes does not answer it is asked again and again, so that an owner is
notified late and not never.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Final

import prometheus_client

from muster import backoff, codec, vocabulary
from muster.service import logs
from muster_notifier.receivers import kubernetes_events
from muster_notifier.routing import alert_index

_CACHED_S: Final = 60.0
_CACHE_MAX: Final = 10_000
_PODS_MAX: Final = 1_000
_PARALLEL_MAX: Final = 8
_RETRY_MAX_S: Final = 60.0

_PENDING = prometheus_client.Gauge(
    "muster_notifier_pending_owner_lookups", "Alerts whose pods' owners are not known yet."
)


class Owners:
    """Looks owners up in the background; `report` gets the alerts with their owners."""

    def __init__(
        self,
        api: kubernetes_events.KubernetesApi,
        *,
        annotation: str,
        receivers: Collection[str],
        report: Callable[[alert_index.OwnedAlert], Awaitable[None]],
        retry_s: float = 1.0,
    ) -> None:
        """`retry_s` is how soon Kubernetes is asked again after the first failure."""
        self._api = api
        self._annotation = annotation
        self._receivers = frozenset(receivers)
        self._report = report
        self._backoff = backoff.Backoff(first_s=2 * retry_s, max_s=_RETRY_MAX_S)
        self._cache: OrderedDict[str, tuple[float, str | None]] = OrderedDict()
        self._unknown_receivers: set[str] = set()
        # the newest of each alert
        self._pending: dict[str, codec.CloudEvent] = {}
        self._has_pending = asyncio.Event()
        self._limit = asyncio.Semaphore(_PARALLEL_MAX)
        _PENDING.set_function(lambda: len(self._pending))

    def look_up(self, event: codec.CloudEvent) -> None:
        """Look the owners of an alert's pods up; never waits."""
        alert = event.data
        assert isinstance(alert, vocabulary.AlertChanged), "only alerts have pods"
        self._pending.pop(alert.fingerprint, None)
        if alert.pods and alert.state is vocabulary.AlertState.FIRING:
            self._pending[alert.fingerprint] = event
            self._has_pending.set()

    async def run(self) -> None:
        """Look up all that is pending; for ever."""
        failures = 0
        while True:
            await self._has_pending.wait()
            if not self._pending:
                self._has_pending.clear()
                continue
            name, event = next(iter(self._pending.items()))
            assert isinstance(event.data, vocabulary.AlertChanged), "as above"
            try:
                owners = await self.owners_of(event.data.pods)
            except kubernetes_events.LookupFailed as error:
                failures += 1
                if failures == 1:
                    logs.logger().warning("owner_lookup_failing", error=str(error))
                await asyncio.sleep(self._backoff.delay_s(failures))
                continue
            if failures:
                logs.logger().info("owner_lookup_recovered", attempts=failures + 1)
            failures = 0
            if self._pending.get(name) is event:
                del self._pending[name]
                await self._report(alert_index.OwnedAlert(event, owners))

    async def owners_of(self, pods: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
        """Return the receivers that owners of these pods (`namespace/name`) named, and which pods.

        Raises LookupFailed.
        """
        names = list(dict.fromkeys(pods))
        if len(names) > _PODS_MAX:
            logs.logger().warning("owner_lookup_truncated", pods=len(names))
            del names[_PODS_MAX:]
        texts = await asyncio.gather(
            *(self._named_by(pod) for pod in names), return_exceptions=True
        )
        named: dict[str, tuple[str, ...]] = {}
        for pod, text in zip(names, texts, strict=True):
            if isinstance(text, BaseException):
                raise text
            for name in sorted({part.strip() for part in text.split(",")} - {""}):
                if name in self._receivers:
                    named[name] = (*named.get(name, ()), pod)
                elif (
                    name not in self._unknown_receivers
                    and len(self._unknown_receivers) < _CACHE_MAX
                ):
                    self._unknown_receivers.add(name)
                    logs.logger().warning(
                        "owner_names_unknown_receiver", pod=pod, receiver=name[:100]
                    )
        return named

    async def _named_by(self, pod: str) -> str:
        parts = kubernetes_events.pod_of(pod)
        if parts is None:
            return ""
        namespace, name = parts
        async with self._limit:
            own = await self._annotation_of(f"/api/v1/namespaces/{namespace}/pods/{name}")
            if own is not None:
                return own
            return await self._annotation_of(f"/api/v1/namespaces/{namespace}") or ""

    async def _annotation_of(self, path: str) -> str | None:
        now = asyncio.get_running_loop().time()
        at, value = self._cache.get(path, (-_CACHED_S, None))
        if now - at < _CACHED_S:
            return value
        value = (await self._api.annotations(path)).get(self._annotation)
        self._cache[path] = (now, value)
        self._cache.move_to_end(path)
        if len(self._cache) > _CACHE_MAX:
            self._cache.popitem(last=False)
        return value
