"""Adapter: the log: one line for each verdict, alert or remediation, and for each change of leader.

Prometheus counts the changes of leader as well.
"""

from typing import Final, assert_never

import prometheus_client

from muster import vocabulary
from muster.leadership import Leadership
from muster.service import logs


def log(
    event: vocabulary.VerdictChanged | vocabulary.AlertChanged | vocabulary.RemediationDecided,
) -> None:
    """Tell the log of one conclusion."""
    match event:
        case vocabulary.VerdictChanged():
            logs.logger().info(
                "verdict_changed",
                node=event.node,
                plugin=event.plugin,
                verdict=event.verdict,
                previous=event.previous,
                rule=event.rule,
                evidence=[seen.observed for seen in event.evidence],
            )
        case vocabulary.AlertChanged():
            logs.logger().info(
                "alert_changed",
                node=event.node,
                fingerprint=event.fingerprint,
                state=event.state,
                summary=event.summary,
            )
        case vocabulary.RemediationDecided():
            logs.logger().info(
                "remediation_decided",
                node=event.node,
                plugin=event.plugin,
                outcome=event.outcome,
                reason=event.reason,
            )
        case _:
            assert_never(event)


_LEADS: Final = prometheus_client.Gauge(
    "muster_health_leads", "1 while this process may tell what it concludes."
)
_CHANGES: Final = prometheus_client.Counter(
    "muster_health_leadership_total", "Leadership, by what became of it.", ["change"]
)


def log_leadership(was: Leadership, now: Leadership) -> None:
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
