"""Pure: What a receiver must hear of a group now: without what is muted, and with the reason."""

from collections.abc import Collection, Mapping
from datetime import datetime

from muster import vocabulary
from muster_notifier import decision, labels, muting
from muster_notifier import group as groups
from muster_notifier import notification as notifications


class Telling:
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
        reason = decision.reason_to_notify(
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
            muted = self._muting.mutes(labels.of(alert), at)
            if muted is None or (not fires and group.has_told(alert.fingerprint)):
                (firing if fires else resolved).append(alert)
            elif fires:
                group.muted[alert.fingerprint] = muted
            else:
                del group.alerts[alert.fingerprint]
        return firing, resolved

    def _is_acknowledged(self, group: groups.Group) -> bool:
        return group.key[0] in self._acknowledging and decision.is_acknowledged_now(
            group.told,
            silenced={name for name, by in group.muted.items() if by.cause in muting.BY_PEOPLE},
        )
