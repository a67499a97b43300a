"""Adapter: the log: one line for each verdict, alert or remediation."""

from typing import assert_never

from muster import vocabulary
from muster.service import logs


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
