"""Adapter: log and metrics: reports what a service refused because of a limit.

Each refusal is counted; of each reason at most one is logged a minute, so that whoever causes
refusals cannot fill the log.
"""

from typing import Final

import prometheus_client

from muster import pacing
from muster.service import logs

_LOGGED_EVERY_S: Final = 60.0
_REASONS_MAX: Final = 64


class Refusals:
    """Counts refusals by reason in a metric with the label `reason`, and logs some of them."""

    def __init__(self, counter: prometheus_client.Counter) -> None:
        self._counter = counter
        self._lines: pacing.KeyedBuckets[str] = pacing.KeyedBuckets(
            per_s=1 / _LOGGED_EVERY_S, burst=1, keys_max=_REASONS_MAX
        )

    def note(self, reason: str, now: float, **facts: object) -> None:
        """Count a refusal; log it with `facts` unless one of this reason was just logged."""
        self._counter.labels(reason).inc()
        if self._lines.try_take(reason, now):
            logs.logger().warning("refused", reason=reason, **facts)
