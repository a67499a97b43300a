"""Pure: A notification as Alertmanager's API v2 takes alerts (api/v2/openapi.yaml, postableAlerts).

The end of an alert that fires lies in the future: Alertmanager would resolve it by itself after its
own `resolve_timeout` (five minutes) otherwise.
"""

from datetime import timedelta

import msgspec

from muster_notifier import bodies
from muster_notifier import notification as notifications


class _Postable(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    labels: dict[str, str]
    annotations: dict[str, str]
    starts_at: str
    ends_at: str


def alerts(notification: notifications.Notification, *, believed_for: timedelta) -> bytes:
    """Return the body."""
    until = (notification.at + believed_for).isoformat()
    found = []
    for alert in (*notification.firing, *notification.resolved):
        told = bodies.alert_of(notification, alert)
        ends_at = alert.ends_at.isoformat() if alert.ends_at is not None else until
        found.append(
            _Postable(
                labels=told.labels | ({"test": "true"} if notification.is_test else {}),
                annotations=told.annotations,
                starts_at=told.starts_at,
                ends_at=ends_at,
            )
        )
    return msgspec.json.encode(found)
