"""Adapter: PagerDuty, Events API v2: one incident per group.

Triggers with one `dedup_key` are one incident, so a repeat does no harm. What somebody silenced is
acknowledged: PagerDuty escalates it no further.
"""

from typing import Final

import msgspec

from muster import vocabulary
from muster_notifier.receivers import message, webhook
from muster_notifier.routing import notifications

BODY_BYTES_MAX: Final = 500 * 1000
"""PagerDuty accepts 512 KB."""

_SUMMARY_MAX: Final = 1024
_KEY_MAX: Final = 255
_SEVERITIES: Final = {
    vocabulary.Severity.CRITICAL: "critical",
    vocabulary.Severity.WARNING: "warning",
    vocabulary.Severity.INFO: "info",
}

Json = dict[str, object]


def event(
    notification: notifications.Notification, text: message.Message, *, routing_key: str
) -> bytes:
    """Return the body of a trigger, an acknowledge or a resolve, with as many alerts as fit."""
    alerts = (*notification.firing, *notification.notified_resolved)

    def encode(count: int) -> bytes:
        shown = alerts[:count]
        details: Json = {
            "text": message.cut(text.text, 10_000),
            "group": notification.labels,
            "alerts": [
                msgspec.to_builtins(webhook.alert_of(notification, alert)) for alert in shown
            ],
            "truncated_alerts": notification.notified_total - len(shown),
        }
        return msgspec.json.encode(_event(notification, text, routing_key, details))

    return webhook.encode_fitting(encode, len(alerts), BODY_BYTES_MAX)


def key_of(group: str) -> str:
    """Return a group's `dedup_key`."""
    return group if len(group) <= _KEY_MAX else notifications.token(group)


def _event(
    notification: notifications.Notification,
    text: message.Message,
    routing_key: str,
    details: Json,
) -> Json:
    action = "trigger" if notification.firing_ids else "resolve"
    if notification.reason is vocabulary.NotificationReason.ACKNOWLEDGED:
        action = "acknowledge"
    body: Json = {
        "routing_key": routing_key,
        "event_action": action,
        "dedup_key": key_of(notification.group),
    }
    if action != "trigger":
        return body
    order = tuple(vocabulary.Severity)
    severity = min((alert.severity for alert in notification.firing), key=order.index)
    first = notification.firing[0]
    links = [{"href": link, "text": "what to do"} for link in message.runbooks(notification)]
    return body | {
        "payload": {
            "summary": message.cut(text.title, _SUMMARY_MAX),
            "source": message.node_name(first.node),
            "severity": _SEVERITIES[severity],
            "timestamp": first.starts_at.isoformat(),
            "component": first.plugin,
            "class": str(first.kind),
            "custom_details": details,
        },
        "links": [link for link in links if link["href"].startswith("https://")],
        "client": "muster",
    }
