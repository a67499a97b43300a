"""Pure: whether a receiver is notified of a group now, and why: Alertmanager's table.

| # | condition | answer |
|---|---|---|
| 1 | the receiver was never notified | FIRST if anything fires, else nothing |
| 2 | an alert fires that was not in the last one | FIRST if none fired in that, else NEW_ALERTS |
| 3 | nothing fires | ALL_RESOLVED if something fired in the last one, else nothing |
| 4 | the receiver wants resolves, and one was not in the last one | NEW_RESOLVED |
| 5 | the last one is older than `repeat_interval_s` | REPEAT |
| 6 | otherwise | nothing |

Source: prometheus/alertmanager notify/dedup_stage.go, needsUpdate (August 2026). Row 3 ignores
`send_resolved` on purpose: the firing alerts must be forgotten, even if nothing is sent.
"""

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from datetime import datetime

from muster import vocabulary
from muster_notifier.routing import groups, muting, notifications, routes


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


class NotificationBuilder:
    """Makes notifications; see the module."""

    def __init__(
        self,
        receivers: Mapping[str, bool],
        *,
        acknowledging: Collection[str],
        muted_by: muting.Muting,
    ) -> None:
        """`receivers` maps each name to whether it hears of resolved alerts."""
        self._receivers = dict(receivers)
        self._acknowledging = frozenset(acknowledging)
        self._muting = muted_by

    def of(
        self, group: groups.Group, *, at: datetime, now: float
    ) -> notifications.Notification | None:
        """Return what the receiver must hear of a group, if anything; `at` is `now`.

        What is over and need not be told is forgotten.
        """
        receiver, name = group.key
        muted = self._muting.mutes_route(group.route, at)
        if muted is not None:
            group.muted = dict.fromkeys(group.alerts, muted)
            group.forget_resolved(told_too=False)
            return None
        firing, resolved = self._audible(group, at)
        reason = reason_to_notify(
            group.told,
            firing={alert.fingerprint for alert in firing},
            resolved={alert.fingerprint for alert in resolved},
            send_resolved=self._receivers[receiver],
            repeat_interval_s=group.route.timing.repeat_interval_s,
            now=now,
        )
        if not (firing or resolved) and self._is_acknowledged(group):
            reason = vocabulary.NotificationReason.ACKNOWLEDGED
            firing = [alert for alert in group.firing() if group.has_told(alert.fingerprint)]
        if reason is None or not (firing or resolved):
            group.forget_resolved(told_too=group.on_its_way is None)
            return None
        return notifications.notify(
            # what is on its way may have been heard
            after=group.on_its_way.id if group.on_its_way else group.heard,
            receiver=receiver,
            group=name,
            labels=group.labels,
            reason=reason,
            firing=firing,
            resolved=resolved,
            send_resolved=self._receivers[receiver],
            at=at,
            why=group.route.why,
        )

    def _audible(
        self, group: groups.Group, at: datetime
    ) -> tuple[list[vocabulary.AlertChanged], list[vocabulary.AlertChanged]]:
        """Return what fires and what is over, without what is muted; that is noted."""
        group.muted = {}
        firing: list[vocabulary.AlertChanged] = []
        resolved: list[vocabulary.AlertChanged] = []
        for alert in list(group.alerts.values()):
            fires = alert.state is vocabulary.AlertState.FIRING
            muted = self._muting.mutes(routes.labels_of(alert), at)
            if muted is None or (not fires and group.has_told(alert.fingerprint)):
                (firing if fires else resolved).append(alert)
            elif fires:
                group.muted[alert.fingerprint] = muted
            else:
                del group.alerts[alert.fingerprint]
        return firing, resolved

    def _is_acknowledged(self, group: groups.Group) -> bool:
        return group.key[0] in self._acknowledging and is_acknowledged_now(
            group.told,
            silenced={name for name, by in group.muted.items() if by.cause in muting.BY_PEOPLE},
        )
