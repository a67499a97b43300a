"""Pure: A notification as a webhook's body: CloudEvents of ours, or Alertmanager's version 4.

A body stays below `BODY_BYTES_MAX`; what was left out is counted.
"""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Final, Literal

import msgspec

from muster import vocabulary
from muster_notifier import addresses, labels, message
from muster_notifier import notification as notifications

BODY_BYTES_MAX: Final = 200 * 1024
CONTENT_TYPES: Final = {
    addresses.Format.CLOUDEVENTS: "application/cloudevents+json; charset=utf-8",
    addresses.Format.ALERTMANAGER: "application/json",
}

_NEVER: Final = "0001-01-01T00:00:00Z"
"""Go's zero time: Alertmanager's `endsAt` of what fires."""


class _Data(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The CloudEvent's data; `alerts` are as they crossed the bus, firing ones first."""

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
    test: bool = False


class _CloudEvent(msgspec.Struct, frozen=True, kw_only=True):
    specversion: Literal["1.0"] = "1.0"
    id: str
    source: str = "/services/notifier"
    type: str = "dev.muster.notification"
    time: datetime
    datacontenttype: str = "application/json"
    data: _Data


class Alert(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One alert as Alertmanager tells it (notify/webhook, template.Alert)."""

    status: str
    labels: dict[str, str]
    annotations: dict[str, str]
    starts_at: str
    ends_at: str
    generator_url: str = msgspec.field(name="generatorURL", default="")
    fingerprint: str


class _Version4(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """prometheus/alertmanager notify/webhook/webhook.go, Message."""

    version: Literal["4"] = "4"
    group_key: str
    truncated_alerts: int
    status: str
    receiver: str
    group_labels: dict[str, str]
    common_labels: dict[str, str]
    common_annotations: dict[str, str]
    external_url: str = msgspec.field(name="externalURL", default="")
    alerts: list[Alert]


def body(
    notification: notifications.Notification,
    words: message.Message,
    *,
    layout: addresses.Format,
    alerts_max: int = 0,
) -> bytes:
    """Return the body, with as many alerts as fit, and at most `alerts_max` (0: any number)."""
    told = (*notification.firing, *notification.told_resolved)[: alerts_max or None]
    make = _version4 if layout is addresses.Format.ALERTMANAGER else _cloud_event

    def made(count: int) -> bytes:
        return msgspec.json.encode(make(notification, words, told[:count]))

    return fitting(made, len(told), BODY_BYTES_MAX)


def fitting(made: Callable[[int], bytes], count: int, bytes_max: int) -> bytes:
    """Return what is made of as many things as fit."""
    while True:
        encoded = made(count)
        if len(encoded) <= bytes_max or count == 0:
            return encoded
        count //= 2


def alert_of(notification: notifications.Notification, alert: vocabulary.AlertChanged) -> Alert:
    """Return one alert in Alertmanager's words."""
    found = {
        "summary": alert.summary,
        "evidence": "; ".join(f"{seen.source}: {seen.observed}" for seen in alert.evidence),
        "devices": message.devices(alert),
        "pods": message.pods(notification, alert),
        "runbook_url": alert.runbook,
        "advice": alert.advice,
    }
    return Alert(
        status=str(alert.state),
        labels=labels.of(alert),
        annotations={name: message.line(text, 2048) for name, text in found.items() if text},
        starts_at=_time(alert.starts_at),
        ends_at=_time(alert.ends_at) if alert.ends_at else _NEVER,
        fingerprint=alert.fingerprint,
    )


def _cloud_event(
    notification: notifications.Notification,
    words: message.Message,
    shown: Sequence[vocabulary.AlertChanged],
) -> _CloudEvent:
    return _CloudEvent(
        id=notification.id,
        time=notification.at,
        data=_Data(
            status=notification.state,
            reason=notification.reason,
            receiver=notification.receiver,
            group_key=notification.group,
            group_labels=notification.labels,
            title=words.title,
            text=words.text,
            alerts=tuple(shown),
            truncated_alerts=notification.told_total - len(shown),
            truncated_pods=notification.pods_total - sum(len(alert.pods) for alert in shown),
            test=notification.is_test,
        ),
    )


def _version4(
    notification: notifications.Notification,
    _: message.Message,
    shown: Sequence[vocabulary.AlertChanged],
) -> _Version4:
    alerts = [alert_of(notification, alert) for alert in shown]
    return _Version4(
        group_key=notification.group,
        truncated_alerts=notification.told_total - len(shown),
        status=str(notification.state),
        receiver=notification.receiver,
        group_labels=notification.labels,
        common_labels=_common([alert.labels for alert in alerts]),
        common_annotations=_common([alert.annotations for alert in alerts]),
        alerts=alerts,
    )


def _common(found: Sequence[dict[str, str]]) -> dict[str, str]:
    first, rest = (found[0], found[1:]) if found else ({}, ())
    return {k: v for k, v in first.items() if all(other.get(k) == v for other in rest)}


def _time(at: datetime) -> str:
    return at.isoformat().replace("+00:00", "Z")
