"""Adapter: an Alertmanager: pushes alerts to its API v2, for people who already run one.

Alertmanager resolves an alert `resolve_timeout` (five minutes) after it was last pushed, unless the
alert says when it ends. So the end of an alert that fires lies in the future, later than the next
reminder (api/v2/openapi.yaml, postableAlerts).
"""

from collections.abc import Mapping
from datetime import timedelta

import msgspec

from muster_notifier.receivers import endpoint, results, webhook
from muster_notifier.routing import notifications


class _Postable(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    labels: dict[str, str]
    annotations: dict[str, str]
    starts_at: str
    ends_at: str


def alerts(notification: notifications.Notification, *, lifetime: timedelta) -> bytes:
    """Return the request's body."""
    until = (notification.at + lifetime).isoformat()
    postable = []
    for alert in (*notification.firing, *notification.resolved):
        view = webhook.alert_of(notification, alert)
        ends_at = alert.ends_at.isoformat() if alert.ends_at is not None else until
        postable.append(
            _Postable(
                labels=view.labels | ({"test": "true"} if notification.is_test else {}),
                annotations=view.annotations,
                starts_at=view.starts_at,
                ends_at=ends_at,
            )
        )
    return msgspec.json.encode(postable)


class Push:
    """Pushes to one Alertmanager, by its base address."""

    def __init__(self, to: endpoint.Endpoint, *, bearer: str, lifetime: timedelta) -> None:
        self._endpoint = to
        self._headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
        self._lifetime = lifetime

    async def send(
        self, notification: notifications.Notification, _: Mapping[str, str]
    ) -> results.Result:
        """Push the alerts of a group."""
        body = alerts(notification, lifetime=self._lifetime)
        return await self._endpoint.post_json(body, below="/api/v2/alerts", headers=self._headers)
