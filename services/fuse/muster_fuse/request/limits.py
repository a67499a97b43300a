"""Pure: limits the rate of a pod's requests, and the number of mounts per pod and node.

A mount in progress already counts, so that concurrent requests cannot exceed a limit together.
`now` is in monotonic seconds.
"""

import contextlib
import errno
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from muster import pacing
from muster_fuse import config
from muster_fuse.request import decision

_PODS_MAX: Final = 4096
"""The maximum number of tracked pods, more than a node ever has."""


class Limiter:
    """Limits the requests and mounts of all pods of a node."""

    def __init__(self, limits: config.Limits) -> None:
        self._limits = limits
        self._buckets = pacing.KeyedBuckets[str](
            per_s=limits.requests_per_minute / 60.0,
            burst=limits.requests_burst,
            keys_max=_PODS_MAX,
        )
        self._being_made: Counter[str] = Counter()

    def take(self, pod_uid: str, *, now: float) -> None:
        """Count a request. Raises Refusal if the pod exceeds its rate."""
        if not self._buckets.try_take(pod_uid, now):
            per_minute = self._limits.requests_per_minute
            text = f"this pod may make {per_minute:g} requests a minute; wait, then try again"
            raise decision.Refusal(decision.Reason.TOO_FAST, errno.EAGAIN, text)

    @contextlib.contextmanager
    def making(self, pod_uid: str, mounts: Mapping[str, int]) -> Iterator[None]:
        """Count a mount while it is being made; `mounts` is the number of each pod's mounts.

        Raises Refusal if the mount would exceed a limit.
        """
        limits = self._limits
        if mounts.get(pod_uid, 0) + self._being_made[pod_uid] >= limits.mounts_per_pod:
            text = f"this pod has {limits.mounts_per_pod} FUSE mounts, the maximum"
            raise decision.Refusal(decision.Reason.TOO_MANY_IN_POD, errno.ENOSPC, text)
        if sum(mounts.values()) + self._being_made.total() >= limits.mounts_per_node:
            text = f"this node has {limits.mounts_per_node} FUSE mounts, the maximum"
            raise decision.Refusal(decision.Reason.TOO_MANY_ON_NODE, errno.ENOSPC, text)
        self._being_made[pod_uid] += 1
        try:
            yield
        finally:
            self._being_made[pod_uid] -= 1
            if not self._being_made[pod_uid]:
                del self._being_made[pod_uid]
