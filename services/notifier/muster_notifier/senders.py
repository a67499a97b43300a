"""Adapter: every way of reaching somebody: a receiver's settings become what sends to it."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from muster_notifier import (
    addresses,
    alertmanager,
    answers,
    breadth,
    cluster,
    config,
    console,
    desk,
    files,
    message,
    pagerduty,
    posting,
    receivers,
    secrets,
    signature,
    slack,
    smtp,
    teams,
    tree,
    webhook,
)
from muster_notifier import notification as notifications

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

    send: receivers.Send
    mask: Callable[[str], str]
    rate_per_s: float
    at_once: int
    problems: tuple[str, ...] = ()


def make(receiver: addresses.Receiver, settings: config.Settings) -> Sender:
    """Return what sends to a receiver. Raises Unusable."""
    own, shared = receiver.templates, settings.templates
    templates = addresses.Templates(
        title=own.title or shared.title,
        text=own.text or shared.text,
        alert=own.alert or shared.alert,
    )
    reader = secrets.SecretReader()
    try:
        send, rate = _make(receiver, templates, settings, reader)
    except (secrets.NoSecret, cluster.NoCluster, ValueError) as error:
        raise Unusable(f"receiver {receiver.name}: {error}") from None
    repeats = receiver.slack or receiver.email or receiver.teams or receiver.apprise
    at_once = 1 if repeats is not None else desk.SENDING_MAX
    problems = tuple(message.problems_of(templates))
    return Sender(_masking(send, reader.mask), reader.mask, rate, at_once, problems)


def _masking(send: receivers.Send, mask: Callable[[str], str]) -> receivers.Send:
    """Return it without secrets in its answers: some servers say what they were sent."""

    async def masked(
        notification: notifications.Notification, known: Mapping[str, str]
    ) -> answers.Answer:
        answer = await send(notification, known)
        return dataclasses.replace(answer, detail=mask(answer.detail))

    return masked


def site(found: addresses.Address) -> posting.Site:
    """Return where an address leads. Raises NoSecret and ValueError."""
    return _site(found, secrets.SecretReader())


def _site(found: addresses.Address, reader: secrets.SecretReader) -> posting.Site:
    url = found.url
    if url is None:
        assert found.url_from is not None, "an address has one of the two"
        url = reader.read(found.url_from)
    return posting.Site(url, timeout_s=found.timeout_s, reach=found.reach)


def _make(  # noqa: C901, PLR0911  # one line for each way
    receiver: addresses.Receiver,
    templates: addresses.Templates,
    settings: config.Settings,
    reader: secrets.SecretReader,
) -> tuple[receivers.Send, float]:
    def pace(default: float) -> float:
        return 1 / (receiver.limits.rate_per_s or default)

    match receiver:
        case addresses.Receiver(webhook=addresses.Webhook() as found):
            return _webhook(found, templates, reader).send, _MANY
        case addresses.Receiver(slack=addresses.Slack() as found):
            return _slack(found, templates, reader, pace_s=pace(_SLACK)), _SLACK
        case addresses.Receiver(pagerduty=addresses.PagerDuty() as found):
            where = posting.Site(found.url, timeout_s=found.timeout_s, reach=found.reach)
            key = reader.read(found.routing_key_from)
            service = pagerduty.Service(where, routing_key=key, templates=templates)
            return service.send, _PAGERDUTY
        case addresses.Receiver(email=addresses.Email() as found):
            password = reader.read(found.password_from) if found.password_from else ""
            return smtp.Relay(found, password=password, templates=templates).send, _MAIL
        case addresses.Receiver(teams=addresses.Teams() as found):
            return teams.Workflow(_site(found, reader), templates).send, _TEAMS
        case addresses.Receiver(alertmanager=addresses.Alertmanager() as found):
            bearer = reader.read(found.bearer_from) if found.bearer_from else ""
            push = alertmanager.Push(
                _site(found, reader), bearer=bearer, believed_for=_believed(settings)
            )
            return push.send, _MANY
        case addresses.Receiver(kubernetes=addresses.KubernetesEvents() as found):
            api = cluster.Cluster(settings.kubernetes)
            return cluster.Events(api, found, pace_s=pace(_EVENTS)).send, _EVENTS
        case addresses.Receiver(apprise=addresses.Apprise() as found):
            url = reader.read(found.url_from)
            others = breadth.Apprise(url, timeout_s=found.timeout_s, templates=templates)
            return others.send, _SLACK
        case addresses.Receiver(file=addresses.File(path=path)):
            return files.File(path, templates).send, _MANY
        case _:
            return console.Console(templates).send, _MANY


def _webhook(
    found: addresses.Webhook, templates: addresses.Templates, reader: secrets.SecretReader
) -> webhook.Webhook:
    return webhook.Webhook(
        _site(found, reader),
        layout=found.format,
        alerts_max=found.max_alerts,
        keys=[signature.key_of(reader.read(one)) for one in found.secrets],
        bearer=reader.read(found.bearer_from) if found.bearer_from else "",
        templates=templates,
    )


def _slack(
    found: addresses.Slack,
    templates: addresses.Templates,
    reader: secrets.SecretReader,
    *,
    pace_s: float,
) -> receivers.Send:
    if found.webhook_from is not None:
        url = reader.read(found.webhook_from)
        hook = posting.Site(url, timeout_s=found.timeout_s, reach=found.reach)
        return slack.Incoming(hook, templates).send
    assert found.token_from is not None, "a channel has one of the two"
    where = posting.Site(found.url, timeout_s=found.timeout_s, reach=found.reach)
    token = reader.read(found.token_from)
    return slack.Channel(
        where, token=token, channel=found.channel, templates=templates, pace_s=pace_s
    ).send


def _believed(settings: config.Settings) -> timedelta:
    """Return for how long an alert is believed without being pushed again: two reminders."""
    longest = max(r.timing.repeat_interval_s for r in tree.root(settings).walk())
    return timedelta(seconds=2 * longest)
