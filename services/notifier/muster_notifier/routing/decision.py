"""Pure: decides whether a flush notifies (first, changed, resolved, repeat), as in Alertmanager.

| # | condition | answer |
|---|---|---|
| 1 | no last notification, or it listed no firing alerts | FIRST if an alert fires, else nothing |
| 2 | a firing alert was not firing in the last notification | FIRST if none was, else NEW_ALERTS |
| 3 | no alert fires | ALL_RESOLVED if an alert fired in the last notification, else nothing |
| 4 | `send_resolved`, and a resolved alert was not yet reported as resolved | NEW_RESOLVED |
| 5 | a firing alert has an aspect that was never in a notification | CHANGED |
| 6 | the last notification is older than `repeat_interval_s` | REPEAT |
| 7 | otherwise | nothing |

Source: prometheus/alertmanager notify/dedup_stage.go, needsUpdate (August 2026), except row 5:
`notifications.aspects_of` defines aspects. Row 3 ignores `send_resolved` on purpose: the last
notification's firing alerts must be forgotten, even if nothing is sent.
"""

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from datetime import datetime

from muster import matching, vocabulary
from muster_notifier.routing import groups, muting, notifications


def reason_to_notify(
    notified: groups.Notified | None,
    *,
    firing: AbstractSet[str],
    resolved: AbstractSet[str],
    send_resolved: bool,
    repeat_interval_s: float,
    now: float,
    has_changed: bool = False,
) -> vocabulary.NotificationReason | None:
    """Return why the receiver must be notified of the group now, or None if nothing is due."""
    if notified is None:
        return vocabulary.NotificationReason.FIRST if firing else None
    if not firing <= notified.firing:
        return (
            vocabulary.NotificationReason.NEW_ALERTS
            if notified.firing
            else vocabulary.NotificationReason.FIRST
        )
    if not firing:
        return vocabulary.NotificationReason.ALL_RESOLVED if notified.firing else None
    if send_resolved and not resolved <= notified.resolved:
        return vocabulary.NotificationReason.NEW_RESOLVED
    if has_changed:
        return vocabulary.NotificationReason.CHANGED
    is_due = now - notified.at >= repeat_interval_s
    return vocabulary.NotificationReason.REPEAT if is_due else None


def is_acknowledged_now(notified: groups.Notified | None, *, silenced: AbstractSet[str]) -> bool:
    """Return whether all alerts that the last notification lists as firing are now silenced.

    Return False if it lists none, or if the receiver was already notified that they are silenced.
    The module's table does not cover this case, because the table ignores silenced alerts.
    """
    if notified is None or not notified.firing or notified.is_acknowledged:
        return False
    return notified.firing <= silenced


class NotificationBuilder:
    """Builds the notifications that are due, by the rules in the module's docstring."""

    def __init__(
        self,
        receivers: Mapping[str, bool],
        *,
        acknowledging: Collection[str],
        muted_by: muting.Muting,
    ) -> None:
        """Create a builder; `receivers` maps the name of each receiver to its `send_resolved`.

        Receivers in `acknowledging` are also notified when a whole group is silenced.
        """
        self._receivers = dict(receivers)
        self._acknowledging = frozenset(acknowledging)
        self._muting = muted_by

    def build(
        self, group: groups.Group, *, at: datetime, now: float
    ) -> notifications.Notification | None:
        """Return the group's notification; None if none is due. `at` is the time of day at `now`.

        Resolved alerts that need no notification are dropped from the group.
        """
        receiver, name = group.key
        muted = self._muting.route_muted_by(group.route, at)
        if muted is not None:
            group.muted = dict.fromkeys(group.alerts, muted)
            group.forget_resolved(also_notified=False)
            return None
        firing, resolved = self._unmuted(group, at)
        reason = reason_to_notify(
            group.notified,
            firing={alert.fingerprint for alert in firing},
            resolved={alert.fingerprint for alert in resolved},
            send_resolved=self._receivers[receiver],
            repeat_interval_s=group.route.timing.repeat_interval_s,
            now=now,
            has_changed=group.notified is not None
            and notifications.has_new_aspect(firing, group.notified.aspects),
        )
        if not (firing or resolved) and self._is_acknowledged(group):
            reason = vocabulary.NotificationReason.ACKNOWLEDGED
            firing = [alert for alert in group.firing() if group.was_notified_of(alert.fingerprint)]
        if reason is None or not (firing or resolved):
            group.forget_resolved(also_notified=group.in_flight is None)
            return None
        return notifications.create(
            # the notification in flight may have been delivered
            after=group.in_flight.id if group.in_flight else group.last_id,
            receiver=receiver,
            group=name,
            labels=group.labels,
            reason=reason,
            firing=firing,
            resolved=resolved,
            send_resolved=self._receivers[receiver],
            at=at,
            why=group.route.why,
            before=group.notified.aspects if group.notified else {},
        )

    def _unmuted(
        self, group: groups.Group, at: datetime
    ) -> tuple[list[vocabulary.AlertChanged], list[vocabulary.AlertChanged]]:
        """Return the firing and the resolved alerts that are not muted; record muted firing alerts.

        A resolved alert is not muted if the receiver was notified of it. Other resolved alerts that
        are muted are dropped.
        """
        group.muted = {}
        firing: list[vocabulary.AlertChanged] = []
        resolved: list[vocabulary.AlertChanged] = []
        for alert in list(group.alerts.values()):
            fires = alert.state is vocabulary.AlertState.FIRING
            muted = self._muting.muted_by(matching.labels_of(alert), at)
            if muted is None or (not fires and group.was_notified_of(alert.fingerprint)):
                (firing if fires else resolved).append(alert)
            elif fires:
                group.muted[alert.fingerprint] = muted
            else:
                del group.alerts[alert.fingerprint]
        return firing, resolved

    def _is_acknowledged(self, group: groups.Group) -> bool:
        return group.key[0] in self._acknowledging and is_acknowledged_now(
            group.notified,
            silenced={name for name, by in group.muted.items() if by.cause in muting.BY_PEOPLE},
        )
