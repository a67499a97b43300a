"""Adapter: sends alerts as JSON to webhooks, to an Alertmanager's API, and to PagerDuty.

A webhook gets one POST for each notification. Its body is a CloudEvent, or version 4 of
Alertmanager's webhook. It stays below `BODY_BYTES_MAX`; left-out alerts are counted. Signatures
follow Standard Webhooks 1.0.0: HMAC-SHA256 over id, time and body. While one secret replaces
another, both are active: both signatures are sent, and the receiver accepts either of them.

Alerts are pushed to the API v2 of an Alertmanager. It resolves an alert `resolve_timeout` (five
minutes) after the last push, unless the alert contains its end. So a firing alert has an end in the
future, later than the next reminder (api/v2/openapi.yaml, postableAlerts).

PagerDuty (Events API v2) gets one incident per group. Triggers with the same `dedup_key` are one
incident, so a repeat does no harm. A silenced incident is acknowledged, and PagerDuty no longer
escalates it.
"""

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final, Literal

import msgspec

from muster import http, vocabulary
from muster_notifier.config import receiver_settings
from muster_notifier.receivers import endpoint, headline, message, results
from muster_notifier.routing import notifications, routes

BODY_BYTES_MAX: Final = 200 * 1024
CONTENT_TYPES: Final = {
    receiver_settings.Format.CLOUDEVENTS: "application/cloudevents+json; charset=utf-8",
    receiver_settings.Format.ALERTMANAGER: "application/json",
}

_NEVER: Final = "0001-01-01T00:00:00Z"
"""Go's zero time, which Alertmanager uses as `endsAt` of firing alerts."""
_PREFIX: Final = "whsec_"
_KEY_BYTES: Final = (24, 64)


class _Data(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The CloudEvent's data; `alerts` have the same format as on NATS, firing alerts first."""

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


class AlertmanagerAlert(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One alert in Alertmanager's format (notify/webhook, template.Alert)."""

    status: str
    labels: dict[str, str]
    annotations: dict[str, str]
    starts_at: str
    ends_at: str
    generator_url: str = msgspec.field(name="generatorURL", default="")
    fingerprint: str


class _Version4(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A message in Alertmanager's format: prometheus/alertmanager notify/webhook/webhook.go."""

    version: Literal["4"] = "4"
    group_key: str
    truncated_alerts: int
    status: str
    receiver: str
    group_labels: dict[str, str]
    common_labels: dict[str, str]
    common_annotations: dict[str, str]
    external_url: str = msgspec.field(name="externalURL", default="")
    alerts: list[AlertmanagerAlert]


def encode_body(
    notification: notifications.Notification,
    text: message.Message,
    *,
    format_: receiver_settings.Format,
    alerts_max: int = 0,
) -> bytes:
    """Return the body with as many alerts as fit, at most `alerts_max` (0: no limit)."""
    alerts = (*notification.firing, *notification.notified_resolved)[: alerts_max or None]
    make = _version4 if format_ is receiver_settings.Format.ALERTMANAGER else _cloud_event

    def encode(count: int) -> bytes:
        return msgspec.json.encode(make(notification, text, alerts[:count]))

    return encode_fitting(encode, len(alerts), BODY_BYTES_MAX)


def encode_fitting(encode: Callable[[int], bytes], count: int, bytes_max: int) -> bytes:
    """Return `encode` of the largest count that fits, found by halving `count`."""
    while True:
        encoded = encode(count)
        if len(encoded) <= bytes_max or count == 0:
            return encoded
        count //= 2


def alert_of(
    notification: notifications.Notification, alert: vocabulary.AlertChanged
) -> AlertmanagerAlert:
    """Return one alert in Alertmanager's format."""
    annotations = {
        "summary": alert.summary,
        "evidence": "; ".join(
            f"{evidence.source}: {evidence.observed}" for evidence in alert.evidence
        ),
        "devices": message.devices(alert),
        "pods": message.pods(notification, alert),
        "runbook_url": alert.runbook,
        "advice": alert.advice,
    }
    return AlertmanagerAlert(
        status=str(alert.state),
        labels=_shown(routes.labels_of(alert)),
        annotations={name: headline.line(text, 2048) for name, text in annotations.items() if text},
        starts_at=_time(alert.starts_at),
        ends_at=_time(alert.ends_at) if alert.ends_at else _NEVER,
        fingerprint=alert.fingerprint,
    )


def _shown(labels: Mapping[str, str]) -> dict[str, str]:
    return {name: headline.line(value, 2048) for name, value in labels.items()}


def _cloud_event(
    notification: notifications.Notification,
    text: message.Message,
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
            title=text.title,
            text=text.text,
            alerts=tuple(shown),
            truncated_alerts=notification.notified_total - len(shown),
            truncated_pods=notification.pods_total - sum(len(alert.pods) for alert in shown),
            test=headline.is_test(notification),
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
        truncated_alerts=notification.notified_total - len(shown),
        status=str(notification.state),
        receiver=notification.receiver,
        group_labels=_shown(notification.labels),
        common_labels=_common([alert.labels for alert in alerts]),
        common_annotations=_common([alert.annotations for alert in alerts]),
        alerts=alerts,
    )


def _common(mappings: Sequence[dict[str, str]]) -> dict[str, str]:
    first, rest = (mappings[0], mappings[1:]) if mappings else ({}, ())
    return {k: v for k, v in first.items() if all(other.get(k) == v for other in rest)}


def _time(at: datetime) -> str:
    return at.isoformat().replace("+00:00", "Z")


def signing_key(secret: str) -> bytes:
    """Return the key in a secret such as `whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw`.

    Raises ValueError, whose text does not contain the secret.
    """
    try:
        key = base64.b64decode(secret.strip().removeprefix(_PREFIX), validate=True)
    except binascii.Error:
        raise ValueError("a signing secret is base64, after the prefix whsec_") from None
    if not _KEY_BYTES[0] <= len(key) <= _KEY_BYTES[1]:
        raise ValueError(
            f"a signing secret has {_KEY_BYTES[0]} to {_KEY_BYTES[1]} bytes, not {len(key)}"
        )
    return key


def signature_headers(keys: Sequence[bytes], *, key: str, at_s: int, body: bytes) -> dict[str, str]:
    """Return the three headers; `at_s` is Unix time; all attempts share `key`."""
    signed = f"{key}.{at_s}.".encode() + body
    signatures = [base64.b64encode(hmac.digest(secret, signed, hashlib.sha256)) for secret in keys]
    return {
        "webhook-id": key,
        "webhook-timestamp": str(at_s),
        "webhook-signature": " ".join(f"v1,{signature.decode()}" for signature in signatures),
    }


class Webhook:
    """One URL that notifications are posted to."""

    def __init__(
        self,
        to: endpoint.Endpoint,
        *,
        format_: receiver_settings.Format = receiver_settings.Format.CLOUDEVENTS,
        alerts_max: int = 0,
        keys: Sequence[bytes] = (),
        bearer: str = "",
        templates: receiver_settings.Templates | None = None,
    ) -> None:
        self._endpoint = to
        self._format = format_
        self._alerts_max = alerts_max
        self._keys = tuple(keys)
        self._bearer = bearer
        self._templates = templates or receiver_settings.Templates()

    async def send(
        self, notification: notifications.Notification, _: Mapping[str, str]
    ) -> results.Result:
        """Post one message and return the result.

        After a timeout, it is unknown whether the message has arrived. It is retried with the same
        `Idempotency-Key` and `webhook-id`, so that the receiver can drop a repeat.
        """
        text = message.compose(notification, self._templates)
        body = encode_body(notification, text, format_=self._format, alerts_max=self._alerts_max)
        headers = {
            "Content-Type": CONTENT_TYPES[self._format],
            "Idempotency-Key": notification.id,
        }
        if self._keys:
            at_s = int(time.time())
            headers |= signature_headers(self._keys, key=notification.id, at_s=at_s, body=body)
        if self._bearer:
            headers["Authorization"] = f"Bearer {self._bearer}"
        answer = await self._endpoint.request(
            "POST", headers=headers, body=body, read=http.Read.NOTHING
        )
        if isinstance(answer, http.Response):
            return results.of_status(answer.status, answer.headers)
        return answer


class _Postable(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    labels: dict[str, str]
    annotations: dict[str, str]
    starts_at: str
    ends_at: str


def encode_alerts(notification: notifications.Notification, *, lifetime: timedelta) -> bytes:
    """Return the request's body."""
    until = (notification.at + lifetime).isoformat()
    postable = []
    for alert in (*notification.firing, *notification.resolved):
        view = alert_of(notification, alert)
        ends_at = alert.ends_at.isoformat() if alert.ends_at is not None else until
        postable.append(
            _Postable(
                labels=view.labels | ({"test": "true"} if headline.is_test(notification) else {}),
                annotations=view.annotations,
                starts_at=view.starts_at,
                ends_at=ends_at,
            )
        )
    return msgspec.json.encode(postable)


class AlertmanagerPush:
    """Pushes to one Alertmanager, by its base address."""

    def __init__(self, to: endpoint.Endpoint, *, bearer: str, lifetime: timedelta) -> None:
        self._endpoint = to
        self._headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
        self._lifetime = lifetime

    async def send(
        self, notification: notifications.Notification, _: Mapping[str, str]
    ) -> results.Result:
        """Push the alerts of a group."""
        body = encode_alerts(notification, lifetime=self._lifetime)
        return await self._endpoint.post_json(body, below="/api/v2/alerts", headers=self._headers)


PAGERDUTY_BYTES_MAX: Final = 500 * 1000
"""PagerDuty accepts 512 KB."""

_SUMMARY_MAX: Final = 1024
_KEY_MAX: Final = 255

Json = dict[str, object]


def encode_pagerduty(
    notification: notifications.Notification, text: message.Message, *, routing_key: str
) -> bytes:
    """Return the body to trigger, acknowledge or resolve, with as many alerts as fit."""
    alerts = (*notification.firing, *notification.notified_resolved)

    def encode(count: int) -> bytes:
        shown = alerts[:count]
        details: Json = {
            "text": headline.cut(text.text, 10_000),
            "group": _shown(notification.labels),
            "alerts": [msgspec.to_builtins(alert_of(notification, alert)) for alert in shown],
            "truncated_alerts": notification.notified_total - len(shown),
        }
        return msgspec.json.encode(_pagerduty_event(notification, text, routing_key, details))

    return encode_fitting(encode, len(alerts), PAGERDUTY_BYTES_MAX)


def dedup_key(group: str) -> str:
    """Return a group's `dedup_key`."""
    is_fit = len(group) <= _KEY_MAX and group.isprintable()
    return group if is_fit else notifications.token(group)


def _pagerduty_event(
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

    With many thousands of alerts, their ids fill the notification and leave no space for an alert.
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
