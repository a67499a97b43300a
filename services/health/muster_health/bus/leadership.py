"""Adapter: the log and to Prometheus: this process begins to lead, and ends."""

from typing import Final

import prometheus_client

from muster.leadership import Leadership
from muster.service import logs

_LEADS: Final = prometheus_client.Gauge(
    "muster_health_leads", "1 while this process may tell what it concludes."
)
_CHANGES: Final = prometheus_client.Counter(
    "muster_health_leadership_total", "Leadership, by what became of it.", ["change"]
)


def told(was: Leadership, now: Leadership) -> None:
    """Tell of a change, unless it is only of who leads instead of us."""
    if now.term == was.term:
        return
    _LEADS.set(now.term is not None)
    if was.term is not None:
        _CHANGES.labels("lost").inc()
        logs.logger().warning("leadership_lost", revision=was.term, holder=now.leader)
    if now.term is not None:
        _CHANGES.labels("won").inc()
        logs.logger().info("leadership_won", revision=now.term)
