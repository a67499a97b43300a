"""Adapter: builds the sender for a receiver from its settings."""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from muster_notifier.config import files, receiver_settings, schema
from muster_notifier.receivers import (
    chat,
    email,
    endpoint,
    kubernetes_api,
    local,
    message,
    pagerduty,
    results,
    webhook,
)
from muster_notifier.routing import notifications

_POD_MARK: Final = "KUBERNETES_SERVICE_HOST"
"""An environment variable that the kubelet sets in every container."""
_UNLIMITED_PER_S: Final = 1_000.0
_SLACK_PER_S: Final = 1.0
_PAGERDUTY_PER_S: Final = 2.0
_TEAMS_PER_S: Final = 4.0
_EMAIL_PER_S: Final = 1.0
_EVENTS_PER_S: Final = 5.0


class Unusable(Exception):
    """A receiver's settings cannot be used; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Sender:
    """The function that sends to a receiver, its default rate, and problems in its templates.

    `composer` writes the texts. `mask` removes the receiver's secrets from a text. With
    `shows_repeats`, the receiver cannot drop repeated messages, so messages are sent one at a time,
    and a crash repeats at most one of them.
    """

    send: results.Send
    composer: message.Composer
    mask: Callable[[str], str]
    rate_per_s: float
    shows_repeats: bool
    problems: tuple[str, ...] = ()


def make(receiver: receiver_settings.Receiver, settings: schema.Settings) -> Sender:
    """Return the sender for a receiver. Raises Unusable."""
    own, shared = receiver.templates, settings.templates
    templates = receiver_settings.Templates(
        title=own.title or shared.title,
        text=own.text or shared.text,
        alert=own.alert or shared.alert,
    )
    composer = message.Composer(
        templates=templates, in_cluster=_POD_MARK in os.environ, console_url=settings.console_url
    )
    reader = files.SecretReader()
    try:
        send, rate = _make(receiver, composer, settings, reader)
    except (files.NoSecret, kubernetes_api.NoKubernetes, ValueError) as error:
        raise Unusable(f"receiver {receiver.name}: {error}") from None
    one_by_one = receiver.slack or receiver.email or receiver.teams or receiver.apprise
    problems = tuple(message.problems_of(templates))
    prepared = _prepared(send, composer, reader.mask)
    return Sender(prepared, composer, reader.mask, rate, one_by_one is not None, problems)


def _prepared(
    send: results.Send, composer: message.Composer, mask: Callable[[str], str]
) -> results.Send:
    """Return a sender that adds `--context` to commands if needed, and masks secrets in results.

    The commands are changed in the alerts themselves, not only in the text, because some receivers
    get alerts as data. Results are masked, because some servers repeat the request, with its
    secrets, in their answer.
    """

    async def prepared(
        notification: notifications.Notification, data: Mapping[str, str]
    ) -> results.Result:
        result = await send(composer.localized(notification), data)
        return dataclasses.replace(result, detail=mask(result.detail))

    return prepared


def make_endpoint(address: receiver_settings.Address) -> endpoint.Endpoint:
    """Return the endpoint for an address. Raises NoSecret and ValueError."""
    return _endpoint(address, files.SecretReader())


def _endpoint(address: receiver_settings.Address, reader: files.SecretReader) -> endpoint.Endpoint:
    if address.url is not None:
        return endpoint.Endpoint(address.url, timeout_s=address.timeout_s, reach=address.reach)
    assert address.url_from is not None, "an address has url or url_from"
    return _secret_endpoint(
        address.url_from, reader, timeout_s=address.timeout_s, reach=address.reach
    )


def _secret_endpoint(
    where: receiver_settings.Secret,
    reader: files.SecretReader,
    *,
    timeout_s: float,
    reach: receiver_settings.Reach,
) -> endpoint.Endpoint:
    """Return the endpoint for a secret URL. Raises NoSecret and ValueError with its location."""
    url = reader.read(where)
    try:
        return endpoint.Endpoint(url, timeout_s=timeout_s, reach=reach)
    except ValueError as error:
        raise ValueError(f"{files.place(where)}: {error}") from None


def _make(  # noqa: C901, PLR0911  # one case for each way
    receiver: receiver_settings.Receiver,
    composer: message.Composer,
    settings: schema.Settings,
    reader: files.SecretReader,
) -> tuple[results.Send, float]:
    def pace(default: float) -> float:
        return 1 / (receiver.limits.rate_per_s or default)

    match receiver:
        case receiver_settings.Receiver(webhook=receiver_settings.Webhook() as way):
            return _webhook(way, composer, reader).send, _UNLIMITED_PER_S
        case receiver_settings.Receiver(slack=receiver_settings.Slack() as way):
            return _slack(way, composer, reader, pace_s=pace(_SLACK_PER_S)), _SLACK_PER_S
        case receiver_settings.Receiver(pagerduty=receiver_settings.PagerDuty() as way):
            where = endpoint.Endpoint(way.url, timeout_s=way.timeout_s, reach=way.reach)
            key = reader.read(way.routing_key_from)
            encode = functools.partial(pagerduty.encode, routing_key=key)
            return endpoint.JsonReceiver(where, composer, encode).send, _PAGERDUTY_PER_S
        case receiver_settings.Receiver(email=receiver_settings.Email() as way):
            password = reader.read(way.password_from) if way.password_from else ""
            return email.Email(way, password=password, composer=composer).send, _EMAIL_PER_S
        case receiver_settings.Receiver(teams=receiver_settings.Teams() as way):
            workflow = endpoint.JsonReceiver(
                _endpoint(way, reader), composer, chat.teams_card, prepare=message.inert
            )
            return workflow.send, _TEAMS_PER_S
        case receiver_settings.Receiver(alertmanager=receiver_settings.Alertmanager() as way):
            bearer = reader.read(way.bearer_from) if way.bearer_from else ""
            push = webhook.AlertmanagerPush(
                _endpoint(way, reader),
                bearer=bearer,
                lifetime=_alert_lifetime(settings),
                console_url=composer.console_url,
            )
            return push.send, _UNLIMITED_PER_S
        case receiver_settings.Receiver(kubernetes=receiver_settings.KubernetesEvents() as way):
            api = kubernetes_api.KubernetesApi(settings.kubernetes)
            events = kubernetes_api.KubernetesEvents(
                api, way, pace_s=pace(_EVENTS_PER_S), console_url=composer.console_url
            )
            return events.send, _EVENTS_PER_S
        case receiver_settings.Receiver(apprise=receiver_settings.Apprise() as way):
            url = reader.read(way.url_from)
            others = chat.Apprise(url, timeout_s=way.timeout_s, composer=composer)
            return others.send, _SLACK_PER_S
        case receiver_settings.Receiver(file=receiver_settings.File(path=path)):
            return local.File(path, composer).send, _UNLIMITED_PER_S
        case receiver_settings.Receiver(console=receiver_settings.Console()):
            return local.Console(composer).send, _UNLIMITED_PER_S
        case _:
            raise AssertionError(f"no sender for the kind {receiver.way}")


def _webhook(
    settings: receiver_settings.Webhook,
    composer: message.Composer,
    reader: files.SecretReader,
) -> webhook.Webhook:
    return webhook.Webhook(
        _endpoint(settings, reader),
        format_=settings.format,
        alerts_max=settings.max_alerts,
        keys=[webhook.signing_key(reader.read(where)) for where in settings.secrets],
        bearer=reader.read(settings.bearer_from) if settings.bearer_from else "",
        composer=composer,
    )


def _slack(
    settings: receiver_settings.Slack,
    composer: message.Composer,
    reader: files.SecretReader,
    *,
    pace_s: float,
) -> results.Send:
    if settings.webhook_from is not None:
        hook = _secret_endpoint(
            settings.webhook_from, reader, timeout_s=settings.timeout_s, reach=settings.reach
        )
        return endpoint.JsonReceiver(hook, composer, chat.encode_slack).send
    assert settings.token_from is not None, "a channel has token_from or webhook_from"
    where = endpoint.Endpoint(settings.url, timeout_s=settings.timeout_s, reach=settings.reach)
    token = reader.read(settings.token_from)
    return chat.SlackChannel(
        where, token=token, channel=settings.channel, composer=composer, pace_s=pace_s
    ).send


def _alert_lifetime(settings: schema.Settings) -> timedelta:
    """Return how long an alert fires without another push: twice the longest reminder interval."""
    longest = max(r.timing.repeat_interval_s for r in schema.route_tree(settings).walk())
    return timedelta(seconds=2 * longest)
