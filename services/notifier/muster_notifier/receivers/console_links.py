"""Pure: writes links to the console: to the page of a node, or to the alerts with some labels.

| subject                                   | page                            |
|-------------------------------------------|---------------------------------|
| alerts of one node                        | `node/NODE`                     |
| other alerts                              | `alerts?LABEL=VALUE&...`        |
| a test, or alerts of the notifier itself  | `alerts`                        |

The labels are those of the group, so that the link stays valid when the alerts of the group change.
All links are empty without the setting `console_url`.
"""

from collections.abc import Mapping
from typing import Final

from muster import vocabulary
from muster_notifier.receivers import headline
from muster_notifier.routing import notifications

_ALERTS: Final = "alerts"
_OWN: Final = frozenset({vocabulary.AlertKind.DEAD_LETTERS, vocabulary.AlertKind.HEALTH_SILENT})
"""The kinds of alerts that the notifier itself raises."""
_UNRESERVED: Final = frozenset(
    b"-.0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz~"
)
"""The characters that need no percent-encoding (RFC 3986 section 2.3)."""


def of_notification(console_url: str, notification: notifications.Notification) -> str:
    """Return the link to the page about a notification."""
    alerts = (*notification.firing, *notification.notified_resolved)
    is_own = bool(alerts) and all(alert.kind in _OWN for alert in alerts)
    if is_own or headline.is_test(notification):
        return _link(console_url, _ALERTS)
    # of many alerts, only the first ones are known; their common node is a label of the group
    is_whole = bool(alerts) and len(alerts) == notification.notified_total
    nodes = {alert.node for alert in alerts} if is_whole else {notification.node}
    if len(nodes) == 1 and vocabulary.FLEET not in nodes:
        return _link(console_url, f"node/{quoted(*nodes)}")
    return _link(console_url, _with(notification.labels))


def of_alert(console_url: str, alert: vocabulary.AlertChanged) -> str:
    """Return the link to the page about one alert."""
    if alert.plugin == vocabulary.TEST_PLUGIN or alert.kind in _OWN:
        return _link(console_url, _ALERTS)
    if alert.node != vocabulary.FLEET:
        return _link(console_url, f"node/{quoted(alert.node)}")
    return _link(console_url, _with({"kind": alert.kind, "node": alert.node}))


def _with(labels: Mapping[str, str]) -> str:
    """Return the page of the alerts that have these labels."""
    query = "&".join(f"{quoted(name)}={quoted(value)}" for name, value in sorted(labels.items()))
    return f"{_ALERTS}?{query}" if query else _ALERTS


def quoted(text: str) -> str:
    """Return the text with percent-encoding, for any part of a link."""
    encoded = text.encode(errors="replace")
    return "".join(chr(byte) if byte in _UNRESERVED else f"%{byte:02X}" for byte in encoded)


def _link(console_url: str, page: str) -> str:
    """Return a link to a page, or to all alerts if it is too long; empty without a console."""
    if not console_url:
        return ""
    base = console_url.rstrip("/")
    link = f"{base}/{page}"
    return link if len(link) <= headline.LINE_MAX else f"{base}/{_ALERTS}"
