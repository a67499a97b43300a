"""Pure: Whether a group of alerts is told to a receiver now, and why: Alertmanager's table.

| # | condition | answer |
|---|---|---|
| 1 | nothing was told yet | FIRST if anything fires, else nothing |
| 2 | something fires that was not told | FIRST if nothing told still fired, else NEW_ALERTS |
| 3 | nothing fires | ALL_RESOLVED if something told still fired, else nothing |
| 4 | the receiver hears resolves, and one was not told | NEW_RESOLVED |
| 5 | what was told is older than `repeat_interval_s` | REPEAT |
| 6 | otherwise | nothing |

Source: prometheus/alertmanager notify/dedup_stage.go, needsUpdate (August 2026). Row 3 ignores
`send_resolved` on purpose: what was told must be forgotten, even if the receiver hears nothing.
"""

from collections.abc import Set as AbstractSet

from muster import vocabulary
from muster_notifier import group as groups


def reason_to_notify(
    told: groups.Told | None,
    *,
    firing: AbstractSet[str],
    resolved: AbstractSet[str],
    send_resolved: bool,
    repeat_interval_s: float,
    now: float,
) -> vocabulary.NotificationReason | None:
    """Return why the group must be told now, or None."""
    if told is None:
        return vocabulary.NotificationReason.FIRST if firing else None
    if not firing <= told.firing:
        return (
            vocabulary.NotificationReason.NEW_ALERTS
            if told.firing
            else vocabulary.NotificationReason.FIRST
        )
    if not firing:
        return vocabulary.NotificationReason.ALL_RESOLVED if told.firing else None
    if send_resolved and not resolved <= told.resolved:
        return vocabulary.NotificationReason.NEW_RESOLVED
    if now - told.at >= repeat_interval_s:
        return vocabulary.NotificationReason.REPEAT
    return None


def is_acknowledged_now(told: groups.Told | None, *, silenced: AbstractSet[str]) -> bool:
    """Tell whether somebody has silenced all that was told, and the receiver has not heard so.

    This is asked where the table above has no answer: while something is silenced, it is quiet.
    """
    if told is None or not told.firing or told.is_acknowledged:
        return False
    return told.firing <= silenced
