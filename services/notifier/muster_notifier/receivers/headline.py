"""Pure: writes a notification's title, for a lock screen: the problem, the place, the impact.

These three are in the first 100 characters of a firing alert's title. The reason is in the body:
what health concluded, or what a plugin or driver reported.
"""

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from muster import vocabulary, wording
from muster.vocabulary import AlertKind, NotificationReason
from muster_notifier.routing import notifications

TITLE_MAX: Final = 100
"""The maximum length of problem, place and impact, in characters; long names may exceed it."""
LINE_MAX: Final = 400

_NEW_PODS_FAIL: Final = ("{hold} devices, new pods fail", "new pods fail")
_IMPACTS: Final = {
    AlertKind.PLUGIN_DOWN: _NEW_PODS_FAIL,
    AlertKind.STUCK: _NEW_PODS_FAIL,
    AlertKind.MISMATCH: ("{hold} devices, new pods may fail", "new pods may fail"),
    AlertKind.MISSING: _NEW_PODS_FAIL,
    AlertKind.MAINTENANCE_OVERDUE: _NEW_PODS_FAIL,
    AlertKind.DEREGISTERED: _NEW_PODS_FAIL,
    AlertKind.FLAPPING: ("{hold} devices, new pods may fail", "new pods may fail"),
    AlertKind.NODE_DOWN: ("{hold} its devices", "its devices cannot be used"),
    AlertKind.UNREACHABLE: ("pods still get devices",) * 2,
    AlertKind.DEGRADED: ("pods still get devices",) * 2,
    AlertKind.SPLIT_BRAIN: ("a device may be allocated twice",) * 2,
    AlertKind.DEVICE_UNHEALTHY: ("{hold} {it}, new pods do not get {it}", "no new pod gets {it}"),
    AlertKind.DEVICE_DEGRADED: ("{hold} {it}, new pods get {it} too", "pods still get {it}"),
    AlertKind.DEVICE_UNMONITORED: ("{hold} {it}, faults go unnoticed", "faults go unnoticed"),
    AlertKind.DEVICES_SHORT: ("fewer pods fit on the node",) * 2,
    AlertKind.FUSE_MOUNT_HUNG: ("{pods} may hang", "programs that use it hang"),
    AlertKind.FUSE_DAEMON_DIED: ("{pods} cannot read its files", "its files cannot be read"),
    AlertKind.FUSE_POD_TERMINATING: ("{pods} cannot terminate", "its pod cannot terminate"),
    AlertKind.CONFIGURATION_REFUSED: ("the previous file applies until a restart",) * 2,
    AlertKind.CLOCK_SKEW: ("times in alerts may be wrong",) * 2,
    AlertKind.NOISY_NODE: ("some of its reports are ignored",) * 2,
    AlertKind.STORM: ("individual plugins are not diagnosed until it ends",) * 2,
    AlertKind.EVICTIONS: ("reports and alerts may be lost",) * 2,
    AlertKind.MORE_ALERTS: ("they have no notifications of their own",) * 2,
    AlertKind.HEALTH_SILENT: ("failures of plugins are not detected",) * 2,
    AlertKind.DEAD_LETTERS: ("somebody was not notified of a problem",) * 2,
}
"""For each kind of alert, the impact if pods hold the devices, and the impact otherwise."""
_RESOURCE: Final = re.compile(r" \([^() /]+/[^() ]+\)")
"""Matches the resource in a summary, in parentheses after the plugin."""
_ID_MAX: Final = 13
_UUID: Final = re.compile(r"\b((?:GPU|MIG)-[0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f-]{4,}")
"""Matches the UUID of a GPU; a title shows only the first part of the UUID."""
_WHAT_MIN: Final = 40
_MINUTE_S: Final = 60
_HOUR_S: Final = 3600
_DAY_S: Final = 86_400


def title(notification: notifications.Notification) -> str:
    """Return the title, with a prefix if the alerts are resolved or silenced."""
    shown = notification.firing or notification.resolved
    count = len(notification.firing_ids)
    ended = notification.notified_total - count
    if not shown:
        counts = [f"{count} firing"] if count else []
        counts += [f"{ended} resolved"] if ended else []
        return line(f"{notification.group}: {', '.join(counts) or 'nothing fires'}")
    if is_test(notification) and count:
        return line(shown[0].summary)
    if not count:
        return line(f"Resolved after {lasted(notification)}: {_what(shown, ended)}")
    text = _fitting(shown, count, _impact(notification))
    if notification.reason is NotificationReason.ACKNOWLEDGED:
        text = f"Silenced: {text}"
    if notification.reason is NotificationReason.REPEAT:
        text += f" (for {lasted(notification)})"
    if notification.reason is NotificationReason.CHANGED:
        text += " (changed)"
    return line(f"{text} ({ended} resolved)" if ended else text)


def is_test(notification: notifications.Notification) -> bool:
    """Return whether the notification is only a test, by a person or by `helm test`."""
    shown = notification.firing or notification.resolved
    return notification.is_test or (
        bool(shown) and all(alert.plugin == vocabulary.TEST_PLUGIN for alert in shown)
    )


def what_and_reason(alert: vocabulary.AlertChanged) -> tuple[str, str]:
    """Return two parts of the summary: what is wrong and where, and the reason (or empty)."""
    summary = line(alert.summary, len(alert.summary))
    what, reason = summary, ""
    if alert.kind is not AlertKind.DEVICES_SHORT:
        ends = [at for at in (summary.find(": "), summary.find("; ")) if at > 0]
        if ends:
            what, reason = summary[: min(ends)], summary[min(ends) + 2 :]
    if alert.node != vocabulary.FLEET and alert.node not in what:
        what = f"{alert.node}: {what}"
    return what, reason


def impact(alert: vocabulary.AlertChanged, pods: int) -> str:
    """Return an alert's impact on pods; `pods` is the number of pods that hold the devices."""
    with_pods, without = _IMPACTS[alert.kind]
    hold = f"{pods} pods hold" if pods > 1 else "1 pod holds"
    it = "them" if alert.devices_total > 1 else "it"
    template = with_pods if pods else without
    return template.format(hold=hold, it=it, pods=wording.counted(pods, "pod"))


def lasted(notification: notifications.Notification) -> str:
    """Return how long the alerts have been firing, or were firing until the last one ended."""
    shown = notification.firing or notification.resolved
    ends = [alert.ends_at or notification.at for alert in shown]
    until = notification.at if notification.firing else max(ends, default=notification.at)
    return span(until - min((alert.starts_at for alert in shown), default=notification.at))


def lasted_alert(alert: vocabulary.AlertChanged) -> str:
    """Return how long a resolved alert was firing."""
    return span((alert.ends_at or alert.at) - alert.starts_at)


def span(time: timedelta) -> str:
    """Return a duration in at most two units: `45 s`, `12 min`, `3 h 5 min`, `2 d 4 h`."""
    seconds = max(0, round(time.total_seconds()))
    days, hours, minutes = seconds // _DAY_S, seconds // _HOUR_S % 24, seconds // _MINUTE_S % 60
    if days:
        return f"{days} d {hours} h" if hours else f"{days} d"
    if hours:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{minutes} min" if minutes else f"{seconds} s"


def line(text: str, longest: int = LINE_MAX) -> str:
    """Return the text on one line without control characters, cut to `longest` characters."""
    indent = text[: len(text) - len(text.lstrip(" "))]
    shown = indent + " ".join(
        "".join(character if character.isprintable() else " " for character in text).split()
    )
    return cut(shown, longest)


def cut(text: str, longest: int) -> str:
    """Return the text, cut if it is too long."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def node_name(name: str) -> str:
    """Return a node's name as shown to people."""
    return "the fleet" if name == vocabulary.FLEET else name


def format_time(at: datetime) -> str:
    """Return a time as shown to people."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def affected(notification: notifications.Notification, alert: vocabulary.AlertChanged) -> int:
    """Return the number of pods that an alert affects; the alert may name only the first ones."""
    return notification.pods_of.get(alert.fingerprint, len(alert.pods))


def _impact(notification: notifications.Notification) -> str:
    firing = notification.firing
    pods = sum(affected(notification, alert) for alert in firing)
    if not notification.resolved_ids:
        pods = max(pods, notification.pods_total)
    return impact(firing[0], pods)


def _fitting(shown: Sequence[vocabulary.AlertChanged], count: int, effect: str) -> str:
    """Return problem and impact; if they are too long, shorten the names or cut the problem."""
    what, first = _what(shown, count), shown[0]
    space = max(_WHAT_MIN, TITLE_MAX - len(effect) - 2)
    for device in first.devices:
        if len(what) > space and len(device) > _ID_MAX:
            what = what.replace(device, cut(device, _ID_MAX))
    if len(what) > space:
        what = what.replace(first.node, first.node.partition(".")[0])
    if len(what) > space:
        what = _RESOURCE.sub("", what)
    return f"{cut(what, space)}; {effect}"


def _what(shown: Sequence[vocabulary.AlertChanged], count: int) -> str:
    """Return what is wrong, and where; for several alerts, their kind and number."""
    if count == 1:
        return _UUID.sub(r"\1…", what_and_reason(shown[0])[0])
    kinds = sorted({alert.kind.replace("_", " ") for alert in shown})
    named = (
        kinds[0]
        if len(kinds) == 1
        else f"{kinds[0]} and {wording.counted(len(kinds) - 1, 'more kind')}"
    )
    nodes = sorted({node_name(alert.node) for alert in shown})
    least = "at least " if count > len(shown) else ""
    place = nodes[0] if len(nodes) == 1 else f"{least}{len(nodes)} nodes"
    return f"{named} on {place} ({count} alerts)"
