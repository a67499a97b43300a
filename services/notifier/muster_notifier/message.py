"""Pure. A notification in words: lines for people, and a CloudEvents body for programs.

Every message says what is wrong in one line, where, since when, on what evidence, which pods hold
it, what to do, and one command to look closer. Whatever alerts carry, a line stays a line and a
body stays below `BODY_BYTES_MAX`; what was left out is counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal

import msgspec

from muster import vocabulary
from muster_notifier import notification as notifications

BODY_BYTES_MAX: Final = 200 * 1024
CONTENT_TYPE: Final = "application/cloudevents+json"

_ALERTS_MAX: Final = 100
_LINE_ALERTS_MAX: Final = 20
_PODS_MAX: Final = 50
_LINE_PODS_MAX: Final = 10
_LINE_MAX: Final = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What a receiver is sent: `key` names the news, `text` is for people, `body` for programs."""

    key: str
    text: str
    body: bytes


class _Data(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The body's data; `alerts` are as they crossed the bus, firing ones first."""

    version: Literal["1"] = "1"
    status: vocabulary.AlertState
    reason: vocabulary.NotificationReason
    receiver: str
    group_key: str
    group_labels: dict[str, str]
    title: str
    text: str
    alerts: tuple[vocabulary.AlertChanged, ...]
    truncated_alerts: int
    truncated_pods: int


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    specversion: Literal["1.0"] = "1.0"
    id: str
    source: str = "/services/notifier"
    type: str = "dev.muster.notification"
    time: datetime
    datacontenttype: str = "application/json"
    data: _Data


def compose(notification: notifications.Notification, *, at: datetime) -> Message:
    """Return the message; `at` is when it was made."""
    text = "\n".join((title(notification), *_lines(notification)))
    return Message(key=notification.id, text=text, body=_body(notification, text, at))


def title(notification: notifications.Notification) -> str:
    """Return what is wrong, or no longer wrong, in one line."""
    firing, resolved = notification.firing, notification.told_resolved
    counts = [f"{len(firing)} firing"] if firing else []
    counts += [f"{len(resolved)} resolved"] if resolved else []
    first = (*firing, *resolved)[0]
    head = f"[{notification.state.upper()}] {first.kind} on {first.node}: {first.summary}"
    if len(firing) + len(resolved) > 1:
        head += f" ({', '.join(counts)})"
    return _line(head)


def _lines(notification: notifications.Notification) -> list[str]:
    lines = []
    told = (*notification.firing, *notification.told_resolved)
    for alert in told[:_LINE_ALERTS_MAX]:
        lines += _alert_lines(alert)
    if len(told) > _LINE_ALERTS_MAX:
        lines.append(f"  and {len(told) - _LINE_ALERTS_MAX} more alerts")
    runbooks = sorted({alert.runbook for alert in notification.firing if alert.runbook})
    lines += [f"  what to do: {_line(runbook)}" for runbook in runbooks]
    nodes = sorted({alert.node for alert in notification.firing})
    if nodes and nodes[0] != vocabulary.FLEET:
        lines.append(f"  look closer: muster events --node {nodes[0]} --since 1h")
    return lines


def _alert_lines(alert: vocabulary.AlertChanged) -> list[str]:
    where = " ".join((alert.node, alert.plugin, alert.resource, ",".join(alert.devices))).split()
    span = f"since {_moment(alert.starts_at)}"
    if alert.state is vocabulary.AlertState.RESOLVED and alert.ends_at is not None:
        span = f"from {_moment(alert.starts_at)} to {_moment(alert.ends_at)}"
    lines = [
        _line(f"- {alert.state} {alert.severity}: {alert.summary}"),
        _line(f"  where: {' '.join(where)}, {span}"),
    ]
    if alert.state is vocabulary.AlertState.FIRING:
        lines += [_line(f"  {seen.source}: {seen.observed}") for seen in alert.evidence]
    if alert.pods:
        more = len(alert.pods) - _LINE_PODS_MAX
        shown = ", ".join(alert.pods[:_LINE_PODS_MAX]) + (f" and {more} more" if more > 0 else "")
        lines.append(_line(f"  pods that hold it: {shown}"))
    return lines


def _body(notification: notifications.Notification, text: str, at: datetime) -> bytes:
    """Return the CloudEvent, with as many alerts as fit."""
    told = (*notification.firing, *notification.told_resolved)
    count = min(len(told), _ALERTS_MAX)
    while True:
        shown = [_with_fewer_pods(alert) for alert in told[:count]]
        encoded = msgspec.json.encode(
            _Body(
                id=notification.id,
                time=at,
                data=_Data(
                    status=notification.state,
                    reason=notification.reason,
                    receiver=notification.receiver,
                    group_key=notification.group,
                    group_labels=dict(notification.labels),
                    title=title(notification),
                    text=text,
                    alerts=tuple(shown),
                    truncated_alerts=len(told) - count,
                    truncated_pods=_pods(told[:count]) - _pods(shown),
                ),
            )
        )
        if len(encoded) <= BODY_BYTES_MAX or count == 0:
            return encoded
        count //= 2


def _with_fewer_pods(alert: vocabulary.AlertChanged) -> vocabulary.AlertChanged:
    return msgspec.structs.replace(alert, pods=alert.pods[:_PODS_MAX])


def _pods(alerts: Sequence[vocabulary.AlertChanged]) -> int:
    return sum(len(alert.pods) for alert in alerts)


def _moment(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def _line(text: str) -> str:
    """Return the text on one line: alerts carry what drivers and kubelets say, whatever that is."""
    indent = text[: len(text) - len(text.lstrip(" "))]
    shown = indent + " ".join(
        "".join(character if character.isprintable() else " " for character in text).split()
    )
    return shown if len(shown) <= _LINE_MAX else shown[: _LINE_MAX - 1] + "…"
