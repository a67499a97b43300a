"""Adapter: sends alerts as JSON to webhooks, and to an Alertmanager's API.

A webhook gets one POST for each notification. Its body is a CloudEvent, or version 4 of
Alertmanager's webhook. It stays below `BODY_BYTES_MAX`; left-out alerts are counted. Signatures
follow Standard Webhooks 1.0.0: HMAC-SHA256 over id, time and body. While one secret replaces
another, both are active: both signatures are sent, and the receiver accepts either of them.

Alerts are pushed to the API v2 of an Alertmanager. It resolves an alert `resolve_timeout` (five
minutes) after the last push, unless the alert contains an end time. So firing alerts are pushed
with an end time after the next reminder (api/v2/openapi.yaml, postableAlerts).
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

from muster import http, matching, vocabulary
from muster_notifier.config import receiver_settings
from muster_notifier.receivers import console_links, endpoint, headline, message, results
from muster_notifier.routing import notifications

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
    console: str | msgspec.UnsetType = msgspec.UNSET
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
    """Return the body with at most `alerts_max` alerts (0: all), or fewer if they do not fit."""
    alerts = (*notification.firing, *notification.notified_resolved)[: alerts_max or None]
    make = _version4 if format_ is receiver_settings.Format.ALERTMANAGER else _cloud_event

    def encode(count: int) -> bytes:
        return msgspec.json.encode(make(notification, text, alerts[:count]))

    return encode_fitting(encode, len(alerts), BODY_BYTES_MAX)


def encode_fitting(encode: Callable[[int], bytes], count: int, bytes_max: int) -> bytes:
    """Return the encoded body; `count`, the number of items, is halved until the body fits."""
    while True:
        encoded = encode(count)
        if len(encoded) <= bytes_max or count == 0:
            return encoded
        count //= 2


def alert_of(
    notification: notifications.Notification,
    alert: vocabulary.AlertChanged,
    *,
    console_url: str = "",
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
        labels=shown_labels(matching.labels_of(alert)),
        annotations={name: headline.line(text, 2048) for name, text in annotations.items() if text},
        starts_at=_time(alert.starts_at),
        ends_at=_time(alert.ends_at) if alert.ends_at else _NEVER,
        generator_url=console_links.of_alert(console_url, alert),
        fingerprint=alert.fingerprint,
    )


def shown_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return labels with each value on one line, cut if it is too long."""
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
            console=text.console or msgspec.UNSET,
            alerts=tuple(shown),
            truncated_alerts=notification.notified_total - len(shown),
            truncated_pods=notification.pods_total - sum(len(alert.pods) for alert in shown),
            test=headline.is_test(notification),
        ),
    )


def _version4(
    notification: notifications.Notification,
    text: message.Message,
    shown: Sequence[vocabulary.AlertChanged],
) -> _Version4:
    alerts = [alert_of(notification, alert, console_url=text.console_url) for alert in shown]
    return _Version4(
        group_key=notification.group,
        truncated_alerts=notification.notified_total - len(shown),
        status=str(notification.state),
        receiver=notification.receiver,
        group_labels=shown_labels(notification.labels),
        common_labels=_common([alert.labels for alert in alerts]),
        common_annotations=_common([alert.annotations for alert in alerts]),
        external_url=text.console_url.rstrip("/"),
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
        raise ValueError(
            "a signing secret must be base64, after an optional prefix whsec_"
        ) from None
    if not _KEY_BYTES[0] <= len(key) <= _KEY_BYTES[1]:
        raise ValueError(
            f"a signing secret must have {_KEY_BYTES[0]} to {_KEY_BYTES[1]} bytes, not {len(key)}"
        )
    return key


def signature_headers(keys: Sequence[bytes], *, key: str, at_s: int, body: bytes) -> dict[str, str]:
    """Return the signature's headers; `key` is the message's id, and `at_s` the Unix time."""
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
        composer: message.Composer = message.PLAIN,
    ) -> None:
        self._endpoint = to
        self._format = format_
        self._alerts_max = alerts_max
        self._keys = tuple(keys)
        self._bearer = bearer
        self._composer = composer

    async def send(
        self, notification: notifications.Notification, _: Mapping[str, str]
    ) -> results.Result:
        """Post one message and return the result.

        After a timeout, it is unknown whether the message has arrived. It is retried with the same
        `Idempotency-Key` and `webhook-id`, so that the receiver can drop a repeat.
        """
        text = self._composer.compose(notification)
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
    generator_url: str | msgspec.UnsetType = msgspec.field(
        name="generatorURL", default=msgspec.UNSET
    )


def encode_alerts(
    notification: notifications.Notification, *, lifetime: timedelta, console_url: str = ""
) -> bytes:
    """Return the body for Alertmanager's API; firing alerts end after `lifetime`."""
    until = (notification.at + lifetime).isoformat()
    postable = []
    for alert in (*notification.firing, *notification.resolved):
        view = alert_of(notification, alert, console_url=console_url)
        ends_at = alert.ends_at.isoformat() if alert.ends_at is not None else until
        postable.append(
            _Postable(
                labels=view.labels | ({"test": "true"} if headline.is_test(notification) else {}),
                annotations=view.annotations,
                starts_at=view.starts_at,
                ends_at=ends_at,
                generator_url=view.generator_url or msgspec.UNSET,
            )
        )
    return msgspec.json.encode(postable)


class AlertmanagerPush:
    """Pushes alerts to the API of one Alertmanager."""

    def __init__(
        self, to: endpoint.Endpoint, *, bearer: str, lifetime: timedelta, console_url: str
    ) -> None:
        self._endpoint = to
        self._headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
        self._lifetime = lifetime
        self._console_url = console_url

    async def send(
        self, notification: notifications.Notification, _: Mapping[str, str]
    ) -> results.Result:
        """Push the alerts of a group."""
        body = encode_alerts(notification, lifetime=self._lifetime, console_url=self._console_url)
        return await self._endpoint.post_json(body, below="/api/v2/alerts", headers=self._headers)
