"""Adapter for PagerDuty: writes the bodies of its Events API v2, with one incident per group.

Triggers with the same `dedup_key` are one incident, so a repeat does no harm. A silenced incident
is acknowledged, and PagerDuty no longer escalates it.
"""

from typing import Final

import msgspec

from muster import vocabulary
from muster_notifier.receivers import headline, message, webhook
from muster_notifier.routing import notifications

BYTES_MAX: Final = 500 * 1000
"""The maximum size of a body, in bytes; PagerDuty accepts 512 KB."""

_SUMMARY_MAX: Final = 1024
_KEY_MAX: Final = 255

Json = dict[str, object]


def encode(
    notification: notifications.Notification, text: message.Message, *, routing_key: str
) -> bytes:
    """Return the body of an incident's event; a trigger contains as many alerts as fit."""
    alerts = (*notification.firing, *notification.notified_resolved)

    def encode_first(count: int) -> bytes:
        shown = alerts[:count]
        details: Json = {
            "text": headline.cut(text.text, 10_000),
            "group": webhook.shown_labels(notification.labels),
            "alerts": [
                msgspec.to_builtins(
                    webhook.alert_of(notification, alert, console_url=text.console_url)
                )
                for alert in shown
            ],
            "truncated_alerts": notification.notified_total - len(shown),
        }
        return msgspec.json.encode(_event(notification, text, routing_key, details))

    return webhook.encode_fitting(encode_first, len(alerts), BYTES_MAX)


def dedup_key(group: str) -> str:
    """Return a group's `dedup_key`: its name, or a hash if that is too long or not printable."""
    is_fit = len(group) <= _KEY_MAX and group.isprintable()
    return group if is_fit else notifications.token(group)


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
        "dedup_key": dedup_key(notification.group),
    }
    if action != "trigger":
        return body
    links = [{"href": link, "text": "runbook"} for link in message.runbooks(notification)]
    links.append({"href": text.console, "text": "console"})
    return body | {
        "payload": {
            "summary": headline.cut(text.title, _SUMMARY_MAX),
            **_first(notification),
            "custom_details": details,
        },
        "links": [link for link in links if link["href"].startswith("https://")],
        "client": "muster",
    }


def _first(notification: notifications.Notification) -> Json:
    """Return the part of the payload that is about the most urgent alert.

    If the notification contains no firing alert, because the ids of many thousands of alerts fill
    it, this part describes the group.
    """
    if not notification.firing:
        return {
            "source": headline.node_name(notification.node),
            "severity": str(vocabulary.Severity.CRITICAL),
            "timestamp": notification.at.isoformat(),
        }
    order = tuple(vocabulary.Severity)
    first = notification.firing[0]
    return {
        "source": headline.node_name(first.node),
        "severity": str(min((a.severity for a in notification.firing), key=order.index)),
        "timestamp": first.starts_at.isoformat(),
        "component": first.plugin,
        "class": str(first.kind),
    }
