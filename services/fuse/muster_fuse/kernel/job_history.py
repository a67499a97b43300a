"""Adapter: the event loop: how a pod's jobs went, and how many it may have at once when slow."""

import asyncio
import math
from typing import Final

_QUICK_S: Final = 0.5
"""How long a job may take before its pod counts as slow; a mount takes some 10 ms."""
_QUICK_WAITING_S: Final = 2.0
"""The same for a mount that waits for its daemon, and an unmount that waits for its users."""
_SLOW_MIN_S: Final = 30.0
"""How long a pod counts as slow after a job that was not quick.

Each further such job doubles it, until the pod has been quick for `_SLOW_MAX_S`.
"""
_SLOW_MAX_S: Final = 600.0
_SLOW_JOBS_MAX: Final = 2
"""How many slots for jobs of slow pods one pod may take."""


class JobHistory:
    """How the jobs of one pod went. After a slow job, they wait only for jobs of other slow pods.

    So pods that make their jobs slow, or let them wait for what never comes, delay others only
    until they count as slow.
    """

    def __init__(self, *, can_be_slow: bool = True) -> None:
        self.stuck: set[int] = set()
        """The numbers of this pod's jobs that got stuck, some of which may have ended."""
        self.slow_jobs = asyncio.Semaphore(_SLOW_JOBS_MAX)
        self._can_be_slow = can_be_slow
        self._slow_s = _SLOW_MIN_S
        self._slow_until = -math.inf

    def is_slow(self, now: float) -> bool:
        """Return whether a recent job of this pod was slow; `now` is on the loop's clock."""
        return self._can_be_slow and now < self._slow_until

    def record(self, *, took_s: float, is_waiting: bool, now: float) -> None:
        """Record how long the mounter took for a job."""
        if took_s > (_QUICK_WAITING_S if is_waiting else _QUICK_S):
            was_quick = now - self._slow_until > _SLOW_MAX_S
            self._slow_s = _SLOW_MIN_S if was_quick else min(2 * self._slow_s, _SLOW_MAX_S)
            self._slow_until = now + self._slow_s
