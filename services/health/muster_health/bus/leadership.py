"""Adapter: the log and to Prometheus: this process begins to lead, and ends."""

from typing import Final

import prometheus_client

from muster.nats import lock
from muster.service import logs

_LEADS: Final = prometheus_client.Gauge(
    "muster_health_leads", "1 while this process may tell what it concludes."
)
_CHANGES: Final = prometheus_client.Counter(
    "muster_health_leadership_total", "Leadership, by what became of it.", ["change"]
)


def told(was: lock.Standing, now: lock.Standing) -> None:
    """Tell of a change, unless it is only of who leads instead of us."""
    if now.revision == was.revision:
        return
    _LEADS.set(now.revision is not None)
    if was.revision is not None:
        _CHANGES.labels("lost").inc()
        logs.logger().warning("leadership_lost", revision=was.revision, holder=now.holder)
    if now.revision is not None:
        _CHANGES.labels("won").inc()
        logs.logger().info("leadership_won", revision=now.revision)
