"""Adapter for the Kubernetes API: writes an Event when a pod requests FUSE but cannot get it.

The pod does not exist yet, may have no name, and never has a uid. So the Event refers to the pod's
owner (`kubectl describe job`), or else to the pod by its name (`kubectl events --for pod/NAME`). A
pod without owner and name was created by hand: its author sees the warning of the webhook.

The API server does not authenticate itself, so anyone who reaches the port can cause an Event. So
an owner must be of a kind whose controller in Kubernetes creates pods; if it is of another kind,
and the pod has no name, the Event refers to the namespace. Each namespace has its own budget of
Events, so that a single sender cannot use up the budget of all namespaces.
"""

import asyncio
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from muster import escaping, pacing
from muster.kubernetes import api as kubernetes_api
from muster.service import logs, metrics
from muster_fuse.admission import pod as pods

REASON: Final = "FuseNotMounted"
_COMPONENT: Final = "muster-fuse-webhook"
PREFIX: Final = "About a requested pod (the requester is not authenticated): "
_MESSAGE_MAX: Final = 1000
_OWNERS: Final = frozenset(
    {
        ("apps/v1", "DaemonSet"),
        ("apps/v1", "ReplicaSet"),
        ("apps/v1", "StatefulSet"),
        ("batch/v1", "Job"),
        ("v1", "ReplicationController"),
    }
)
"""The kinds of objects whose controllers in Kubernetes create pods."""
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_UID: Final = re.compile(r"[0-9a-f-]{1,63}")
_QUEUE_MAX: Final = 100
_PER_S: Final = 1.0
_BURST: Final = 100
_PER_S_IN_NAMESPACE: Final = 1 / 60
_BURST_IN_NAMESPACE: Final = 10
_NAMESPACES_MAX: Final = 1000
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

    def __init__(
        self,
        api: kubernetes_api.Api,
        *,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._timeout_s = timeout_s
        self._clock = clock
        self._queue: asyncio.Queue[tuple[str, dict[str, object]]] = asyncio.Queue(_QUEUE_MAX)
        self._objects = pacing.KeyedBuckets[tuple[str, str, str]](
            per_s=1 / _PERIOD_S, burst=1, keys_max=_OBJECTS_MAX
        )
        self._namespaces = pacing.KeyedBuckets[str](
            per_s=_PER_S_IN_NAMESPACE, burst=_BURST_IN_NAMESPACE, keys_max=_NAMESPACES_MAX
        )
        self._pace = pacing.TokenBucket(per_s=_PER_S, burst=_BURST, now=clock())

    def report(self, namespace: str, metadata: pods.Metadata, text: str) -> None:
        """Report why a pod was left unchanged."""
        about = _about(namespace, metadata)
        now = self._clock()
        key = (namespace, about["kind"], about["name"])
        if not self._objects.has_token(key, now):
            EVENTS.labels("repeated").inc()
        elif not self._has_room(namespace, now):
            # nothing is taken, so the same pod can be reported as soon as there is room
            EVENTS.labels("too_many").inc()
        else:
            self._objects.try_take(key, now)
            self._namespaces.try_take(namespace, now)
            self._pace.take(now)
            log = logs.logger()
            log.warning("pod_left_unchanged", namespace=namespace, object=about, reason=text)
            if about["name"]:
                self._queue.put_nowait((namespace, _event(namespace, about, text)))
            else:
                EVENTS.labels("nameless").inc()

    def _has_room(self, namespace: str, now: float) -> bool:
        return (
            self._namespaces.has_token(namespace, now)
            and self._pace.has_token(now)
            and not self._queue.full()
        )

    async def run(self) -> None:
        """Write Events until cancelled; count those that cannot be written."""
        while True:
            namespace, event = await self._queue.get()
            path = f"/api/v1/namespaces/{namespace}/events"
            problem = await self._api.post(path, event, timeout_s=self._timeout_s)
            EVENTS.labels("failed" if problem else "written").inc()
            if problem:
                logs.logger().warning("event_not_written", error=problem)


def _about(namespace: str, metadata: pods.Metadata) -> dict[str, str]:
    """Return the object that the Event refers to; its name is empty if there is none."""
    owner = metadata.controller
    if (
        owner is not None
        and (owner.api_version, owner.kind) in _OWNERS
        and _NAME.fullmatch(owner.name)
        and _UID.fullmatch(owner.uid)
    ):
        named = {"apiVersion": owner.api_version, "kind": owner.kind, "name": owner.name}
        return {**named, "uid": owner.uid}
    if _NAME.fullmatch(metadata.name):
        return {"apiVersion": "v1", "kind": "Pod", "name": metadata.name}
    if owner is not None:
        return {"apiVersion": "v1", "kind": "Namespace", "name": namespace}
    return {"apiVersion": "v1", "kind": "Pod", "name": ""}


def _event(namespace: str, about: dict[str, str], text: str) -> dict[str, object]:
    at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{_COMPONENT}.", "namespace": namespace},
        "involvedObject": {**about, "namespace": namespace},
        "type": "Warning",
        "reason": REASON,
        "message": escaping.plain(f"{PREFIX}{text}"[:_MESSAGE_MAX]),
        "source": {"component": _COMPONENT},
        "reportingComponent": _COMPONENT,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }
