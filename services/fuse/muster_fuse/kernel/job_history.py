"""Adapter for the event loop: records whether a pod's jobs are slow, and limits slow pods' jobs."""

import asyncio
import math
from typing import Final

_QUICK_S: Final = 0.5
"""How long a job may take before its pod counts as slow; a mount takes about 10 ms."""
_QUICK_WAITING_S: Final = 2.0
"""How long a mount that waits for its daemon, or an unmount that waits for users, may take."""
_SLOW_MIN_S: Final = 30.0
"""How long a pod counts as slow after a first slow job.

Each further slow job doubles this time, unless the pod has not been slow for `_SLOW_MAX_S`.
"""
_SLOW_MAX_S: Final = 600.0
_SLOW_JOBS_MAX: Final = 2
"""The maximum number of the slots for slow pods that one pod may use at the same time."""


class JobHistory:
    """Records whether the jobs of one pod are slow. Slow pods have separate slots for jobs.

    So a pod that makes its jobs slow, for example with a daemon that never answers, delays other
    pods only until it counts as slow.
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
        """Record how long a job took; `is_waiting` means that it waited for the pod's processes."""
        if took_s > (_QUICK_WAITING_S if is_waiting else _QUICK_S):
            was_quick = now - self._slow_until > _SLOW_MAX_S
            self._slow_s = _SLOW_MIN_S if was_quick else min(2 * self._slow_s, _SLOW_MAX_S)
            self._slow_until = now + self._slow_s
