"""Adapter: the log: one line for each verdict, alert or remediation.

Prometheus counts the changes of leader.
"""

from typing import Final, assert_never

import prometheus_client

from muster import vocabulary
from muster.leadership import Leadership
from muster.service import logs

_IS_LEADER: Final = prometheus_client.Gauge(
    "muster_health_is_leader",
    "1 while this process is the leader and publishes verdicts and alerts.",
)
_CHANGES: Final = prometheus_client.Counter(
    "muster_health_leadership_changes_total", "Leadership won and lost.", ["change"]
)


def log(
    event: vocabulary.VerdictChanged | vocabulary.AlertChanged | vocabulary.RemediationDecided,
) -> None:
    """Log what has been published."""
    match event:
        case vocabulary.VerdictChanged():
            logs.logger().info(
                "verdict_changed",
                node=event.node,
                plugin=event.plugin,
                verdict=event.verdict,
                previous=event.previous,
                rule=event.rule,
                evidence=[evidence.observed for evidence in event.evidence],
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


def count_leadership(was: Leadership, now: Leadership) -> None:
    """Count that this process became the leader or stopped leading, but not who else leads."""
    if now.term == was.term:
        return
    _IS_LEADER.set(now.term is not None)
    if was.term is not None:
        _CHANGES.labels("lost").inc()
    if now.term is not None:
        _CHANGES.labels("won").inc()
