"""Adapter: makes what sends to a receiver from the receiver's settings."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from muster_notifier.config import receiver_settings, schema, secrets
from muster_notifier.delivery import queue, worker
from muster_notifier.receivers import (
    alertmanager,
    apprise,
    email,
    endpoint,
    kubernetes_events,
    local,
    message,
    pagerduty,
    result,
    slack,
    teams,
    webhook,
)
from muster_notifier.routing import notifications

_MANY: Final = 1_000.0
_SLACK: Final = 1.0
_PAGERDUTY: Final = 2.0
_TEAMS: Final = 4.0
_MAIL: Final = 1.0
_EVENTS: Final = 5.0


class Unusable(Exception):
    """A receiver's settings cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class Sender:
    """What sends, how often it may by default, and what of its templates cannot be used.

    `mask` takes its secrets out of a text.

    `at_once` is 1 where a receiver cannot drop a repeat: a crash then repeats one message at most.
    """

    send: worker.Send
    mask: Callable[[str], str]
    rate_per_s: float
    at_once: int
    problems: tuple[str, ...] = ()


def make(receiver: receiver_settings.Receiver, settings: schema.Settings) -> Sender:
    """Return what sends to a receiver. Raises Unusable."""
    own, shared = receiver.templates, settings.templates
    templates = receiver_settings.Templates(
        title=own.title or shared.title,
        text=own.text or shared.text,
        alert=own.alert or shared.alert,
    )
    reader = secrets.SecretReader()
    try:
        send, rate = _make(receiver, templates, settings, reader)
    except (secrets.NoSecret, kubernetes_events.NoCluster, ValueError) as error:
        raise Unusable(f"receiver {receiver.name}: {error}") from None
    repeats = receiver.slack or receiver.email or receiver.teams or receiver.apprise
    at_once = 1 if repeats is not None else queue.SENDING_MAX
    problems = tuple(message.problems_of(templates))
    return Sender(_masking(send, reader.mask), reader.mask, rate, at_once, problems)


def _masking(send: worker.Send, mask: Callable[[str], str]) -> worker.Send:
    """Return it without secrets in its answers: some servers say what they were sent."""

    async def masked(
        notification: notifications.Notification, known: Mapping[str, str]
    ) -> result.Result:
        answer = await send(notification, known)
        return dataclasses.replace(answer, detail=mask(answer.detail))

    return masked


def site(found: receiver_settings.Address) -> endpoint.Endpoint:
    """Return where an address leads. Raises NoSecret and ValueError."""
    return _site(found, secrets.SecretReader())


def _site(found: receiver_settings.Address, reader: secrets.SecretReader) -> endpoint.Endpoint:
    url = found.url
    if url is None:
        assert found.url_from is not None, "an address has one of the two"
        url = reader.read(found.url_from)
    return endpoint.Endpoint(url, timeout_s=found.timeout_s, reach=found.reach)


def _make(  # noqa: C901, PLR0911  # one line for each way
    receiver: receiver_settings.Receiver,
    templates: receiver_settings.Templates,
    settings: schema.Settings,
    reader: secrets.SecretReader,
) -> tuple[worker.Send, float]:
    def pace(default: float) -> float:
        return 1 / (receiver.limits.rate_per_s or default)

    match receiver:
        case receiver_settings.Receiver(webhook=receiver_settings.Webhook() as found):
            return _webhook(found, templates, reader).send, _MANY
        case receiver_settings.Receiver(slack=receiver_settings.Slack() as found):
            return _slack(found, templates, reader, pace_s=pace(_SLACK)), _SLACK
        case receiver_settings.Receiver(pagerduty=receiver_settings.PagerDuty() as found):
            where = endpoint.Endpoint(found.url, timeout_s=found.timeout_s, reach=found.reach)
            key = reader.read(found.routing_key_from)
            service = pagerduty.Service(where, routing_key=key, templates=templates)
            return service.send, _PAGERDUTY
        case receiver_settings.Receiver(email=receiver_settings.Email() as found):
            password = reader.read(found.password_from) if found.password_from else ""
            return email.Email(found, password=password, templates=templates).send, _MAIL
        case receiver_settings.Receiver(teams=receiver_settings.Teams() as found):
            return teams.Workflow(_site(found, reader), templates).send, _TEAMS
        case receiver_settings.Receiver(alertmanager=receiver_settings.Alertmanager() as found):
            bearer = reader.read(found.bearer_from) if found.bearer_from else ""
            push = alertmanager.Push(
                _site(found, reader), bearer=bearer, believed_for=_believed(settings)
            )
            return push.send, _MANY
        case receiver_settings.Receiver(kubernetes=receiver_settings.KubernetesEvents() as found):
            api = kubernetes_events.Cluster(settings.kubernetes)
            return kubernetes_events.Events(api, found, pace_s=pace(_EVENTS)).send, _EVENTS
        case receiver_settings.Receiver(apprise=receiver_settings.Apprise() as found):
            url = reader.read(found.url_from)
            others = apprise.Apprise(url, timeout_s=found.timeout_s, templates=templates)
            return others.send, _SLACK
        case receiver_settings.Receiver(file=receiver_settings.File(path=path)):
            return local.File(path, templates).send, _MANY
        case _:
            return local.Console(templates).send, _MANY


def _webhook(
    found: receiver_settings.Webhook,
    templates: receiver_settings.Templates,
    reader: secrets.SecretReader,
) -> webhook.Webhook:
    return webhook.Webhook(
        _site(found, reader),
        layout=found.format,
        alerts_max=found.max_alerts,
        keys=[webhook.signing_key(reader.read(one)) for one in found.secrets],
        bearer=reader.read(found.bearer_from) if found.bearer_from else "",
        templates=templates,
    )


def _slack(
    found: receiver_settings.Slack,
    templates: receiver_settings.Templates,
    reader: secrets.SecretReader,
    *,
    pace_s: float,
) -> worker.Send:
    if found.webhook_from is not None:
        url = reader.read(found.webhook_from)
        hook = endpoint.Endpoint(url, timeout_s=found.timeout_s, reach=found.reach)
        return slack.Incoming(hook, templates).send
    assert found.token_from is not None, "a channel has one of the two"
    where = endpoint.Endpoint(found.url, timeout_s=found.timeout_s, reach=found.reach)
    token = reader.read(found.token_from)
    return slack.Channel(
        where, token=token, channel=found.channel, templates=templates, pace_s=pace_s
    ).send


def _believed(settings: schema.Settings) -> timedelta:
    """Return for how long an alert is believed without being pushed again: two reminders."""
    longest = max(r.timing.repeat_interval_s for r in schema.route_tree(settings).walk())
    return timedelta(seconds=2 * longest)
