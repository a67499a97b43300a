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

from muster import codec, vocabulary
from muster.service import logs
from muster_notifier.receivers import kubernetes_events
from muster_notifier.routing import inputs

_BELIEVED_S: Final = 60.0
_KNOWN_MAX: Final = 10_000
_PODS_MAX: Final = 1_000
_AT_ONCE: Final = 8
_AGAIN_MAX_S: Final = 60.0

_UNKNOWN = prometheus_client.Gauge(
    "muster_notifier_owners_unknown", "Alerts whose pods' owners could not be asked for yet."
)


class Owners:
    """Looks owners up beside all else, and gives the alerts to `hear` with what it found."""

    def __init__(
        self,
        found: kubernetes_events.Cluster,
        *,
        annotation: str,
        receivers: Collection[str],
        hear: Callable[[inputs.Owned], Awaitable[None]],
        again_s: float = 1.0,
    ) -> None:
        """`again_s` is how soon Kubernetes is asked again at first, if it does not answer."""
        self._cluster = found
        self._annotation = annotation
        self._receivers = frozenset(receivers)
        self._hear = hear
        self._again_s = again_s
        self._known: OrderedDict[str, tuple[float, str | None]] = OrderedDict()
        self._nobody: set[str] = set()
        # the newest of each alert
        self._asked: dict[str, codec.CloudEvent] = {}
        self._given = asyncio.Event()
        self._gate = asyncio.Semaphore(_AT_ONCE)
        _UNKNOWN.set_function(lambda: len(self._asked))

    def ask(self, event: codec.CloudEvent) -> None:
        """Look the owners of an alert's pods up; never waits."""
        alert = event.data
        assert isinstance(alert, vocabulary.AlertChanged), "only alerts have pods"
        self._asked.pop(alert.fingerprint, None)
        if alert.pods and alert.state is vocabulary.AlertState.FIRING:
            self._asked[alert.fingerprint] = event
            self._given.set()

    async def work(self) -> None:
        """Look up what is asked; for ever."""
        failures = 0
        while True:
            await self._given.wait()
            if not self._asked:
                self._given.clear()
                continue
            name, event = next(iter(self._asked.items()))
            assert isinstance(event.data, vocabulary.AlertChanged), "as above"
            try:
                found = await self.of(event.data.pods)
            except kubernetes_events.Unknown as error:
                failures += 1
                if failures == 1:
                    logs.logger().warning("owners_unknown", error=str(error))
                await asyncio.sleep(min(_AGAIN_MAX_S, self._again_s * 2.0 ** min(failures, 16)))
                continue
            if failures:
                logs.logger().info("owners_known_again", attempts=failures + 1)
            failures = 0
            if self._asked.get(name) is event:
                del self._asked[name]
                await self._hear(inputs.Owned(event, found))

    async def of(self, pods: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
        """Return the receivers that owners of these pods (`namespace/name`) named, and which pods.

        Raises cluster.Unknown.
        """
        asked = list(dict.fromkeys(pods))
        if len(asked) > _PODS_MAX:
            logs.logger().warning("owners_of_the_first_pods_only", pods=len(asked))
            del asked[_PODS_MAX:]
        texts = await asyncio.gather(*(self._of(pod) for pod in asked), return_exceptions=True)
        named: dict[str, tuple[str, ...]] = {}
        for pod, text in zip(asked, texts, strict=True):
            if isinstance(text, BaseException):
                raise text
            for name in sorted({one.strip() for one in text.split(",")} - {""}):
                if name in self._receivers:
                    named[name] = (*named.get(name, ()), pod)
                elif name not in self._nobody and len(self._nobody) < _KNOWN_MAX:
                    self._nobody.add(name)
                    logs.logger().warning("owner_names_no_receiver", pod=pod, receiver=name[:100])
        return named

    async def _of(self, pod: str) -> str:
        found = kubernetes_events.pod_of(pod)
        if found is None:
            return ""
        namespace, name = found
        async with self._gate:
            own = await self._ask(f"/api/v1/namespaces/{namespace}/pods/{name}")
            if own is not None:
                return own
            return await self._ask(f"/api/v1/namespaces/{namespace}") or ""

    async def _ask(self, path: str) -> str | None:
        now = asyncio.get_running_loop().time()
        at, value = self._known.get(path, (-_BELIEVED_S, None))
        if now - at < _BELIEVED_S:
            return value
        value = (await self._cluster.annotations(path)).get(self._annotation)
        self._known[path] = (now, value)
        self._known.move_to_end(path)
        if len(self._known) > _KNOWN_MAX:
            self._known.popitem(last=False)
        return value
