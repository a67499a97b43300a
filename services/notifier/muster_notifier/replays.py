"""Pure: A dead letter that is sent again is told as it is now: what it says may be over by then."""

from collections.abc import Collection
from collections.abc import Set as AbstractSet

import msgspec

from muster import vocabulary
from muster_notifier import notification as notifications


def as_now(
    notification: notifications.Notification,
    *,
    fires: AbstractSet[str],
    told: Collection[str],
) -> notifications.Notification | None:
    """Return what to say instead of a letter that had died; None if that is known, or untrue.

    `fires` are its alerts that fire now, `told` those that the receiver believes to fire.
    """
    if not notification.firing_ids:
        return None if told else notification
    still = fires & set(notification.firing_ids)
    if still:
        return None if still <= set(told) else notification
    over = tuple(
        msgspec.structs.replace(
            alert, state=vocabulary.AlertState.RESOLVED, ends_at=notification.at
        )
        for alert in notification.firing
    )
    began = tuple(alert.starts_at for alert in notification.firing)
    # a letter names more alerts than it shows
    began += (notification.at,) * (len(notification.firing_ids) - len(began))
    return msgspec.structs.replace(
        notification,
        reason=vocabulary.NotificationReason.ALL_RESOLVED,
        firing=(),
        resolved=(*over, *notification.resolved),
        firing_ids=(),
        resolved_ids=(*notification.firing_ids, *notification.resolved_ids),
        episodes=(*began, *notification.episodes),
    )
