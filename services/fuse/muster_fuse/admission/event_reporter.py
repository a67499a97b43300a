"""Adapter: the Kubernetes API: writes an Event when a pod requests FUSE but cannot get it.

The pod does not exist yet, may have no name, and never has a uid. So the Event refers to the pod's
owner (`kubectl describe job`), or else to the pod by its name (`kubectl events --for pod/NAME`). A
pod without owner and name was created by hand: its author sees the warning at once.
"""

import asyncio
from datetime import UTC, datetime
from typing import Final

from muster import escaping, pacing
from muster.kubernetes import api as kubernetes_api
from muster.service import logs, metrics
from muster_fuse.admission import pod as pods

REASON: Final = "FuseNotMounted"
_COMPONENT: Final = "muster-fuse-webhook"
_MESSAGE_MAX: Final = 1000
_QUEUE_MAX: Final = 100
_PER_S: Final = 1.0
_BURST: Final = 20
_PERIOD_S: Final = 600.0
"""The minimum time between two Events about the same object."""
_OBJECTS_MAX: Final = 1000

EVENTS: Final = metrics.counter(
    "muster_fuse_webhook_events_total",
    "Events about pods that were left unchanged.",
    "outcome",
    ("written", "failed", "repeated", "nameless", "too_many"),
)


class EventReporter:
    """Writes Events in the background, in order and at a limited rate."""

    def __init__(self, api: kubernetes_api.Api, *, timeout_s: float) -> None:
        self._api = api
        self._timeout_s = timeout_s
        self._queue: asyncio.Queue[tuple[str, dict[str, object]]] = asyncio.Queue(_QUEUE_MAX)
        self._objects = pacing.KeyedBuckets[tuple[str, str, str]](
            per_s=1 / _PERIOD_S, burst=1, keys_max=_OBJECTS_MAX
        )
        self._pace = pacing.TokenBucket(
            per_s=_PER_S, burst=_BURST, now=asyncio.get_running_loop().time()
        )

    def report(self, namespace: str, metadata: pods.Metadata, text: str) -> None:
        """Report why a pod was left unchanged."""
        owner = metadata.controller
        about = (
            {"apiVersion": "v1", "kind": "Pod", "name": metadata.name}
            if owner is None
            else {
                "apiVersion": owner.api_version,
                "kind": owner.kind,
                "name": owner.name,
                "uid": owner.uid,
            }
        )
        now = asyncio.get_running_loop().time()
        if not self._objects.try_take((namespace, about["kind"], about["name"]), now):
            EVENTS.labels("repeated").inc()
            return
        logs.logger().warning("pod_left_unchanged", namespace=namespace, object=about, reason=text)
        if not about["name"]:
            EVENTS.labels("nameless").inc()
        elif self._queue.full() or not self._pace.try_take(now):
            EVENTS.labels("too_many").inc()
        else:
            self._queue.put_nowait((namespace, _event(namespace, about, text)))

    async def run(self) -> None:
        """Write Events until cancelled; count those that cannot be written."""
        while True:
            namespace, event = await self._queue.get()
            path = f"/api/v1/namespaces/{namespace}/events"
            problem = await self._api.post(path, event, timeout_s=self._timeout_s)
            EVENTS.labels("failed" if problem else "written").inc()
            if problem:
                logs.logger().warning("event_not_written", error=problem)


def _event(namespace: str, about: dict[str, str], text: str) -> dict[str, object]:
    at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{_COMPONENT}.", "namespace": namespace},
        "involvedObject": {**about, "namespace": namespace},
        "type": "Warning",
        "reason": REASON,
        "message": escaping.plain(text[:_MESSAGE_MAX]),
        "source": {"component": _COMPONENT},
        "reportingComponent": _COMPONENT,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }
