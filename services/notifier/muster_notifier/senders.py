"""Adapter: every way of reaching somebody: a receiver's settings become what sends to it."""

import dataclasses
import functools
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
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
_SECRET_MIN: Final = 6
"""What is shorter stands in many texts by chance."""


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
    secrets = _Secrets()
    try:
        send, rate = _make(receiver, templates, settings, secrets)
    except (files.NoSecret, cluster.NoCluster, ValueError) as error:
        raise Unusable(f"receiver {receiver.name}: {error}") from None
    repeats = receiver.slack or receiver.email or receiver.teams or receiver.apprise
    at_once = 1 if repeats is not None else desk.SENDING_MAX
    problems = tuple(message.problems_of(templates))
    mask = functools.partial(_without, tuple(secrets.hidden()))
    return Sender(_masking(send, mask), mask, rate, at_once, problems)


class _Secrets:
    """Reads secrets, and knows what must not be told."""

    def __init__(self) -> None:
        self._read: list[str] = []

    def read(self, where: addresses.Secret) -> str:
        """Return a secret. Raises NoSecret."""
        found = files.secret(where)
        self._read.append(found)
        return found

    def hidden(self) -> list[str]:
        """Return what must not be told, the longest first; of a URL also what is after its host."""
        paths = [found.partition("://")[2].partition("/")[2] for found in self._read]
        decoded = [urllib.parse.unquote(found) for found in paths]
        hidden = {*self._read, *paths, *decoded}
        return sorted((one for one in hidden if len(one) >= _SECRET_MIN), key=len, reverse=True)


def _without(hidden: Iterable[str], text: str) -> str:
    for secret in hidden:
        text = text.replace(secret, "(secret)")
    return text


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
    return _site(found, _Secrets())


def _site(found: addresses.Address, secrets: _Secrets) -> posting.Site:
    url = found.url
    if url is None:
        assert found.url_from is not None, "an address has one of the two"
        url = secrets.read(found.url_from)
    return posting.Site(url, timeout_s=found.timeout_s, reach=found.reach)


def _make(  # noqa: C901, PLR0911  # one line for each way
    receiver: addresses.Receiver,
    templates: addresses.Templates,
    settings: config.Settings,
    secrets: _Secrets,
) -> tuple[receivers.Send, float]:
    def pace(default: float) -> float:
        return 1 / (receiver.limits.rate_per_s or default)

    match receiver:
        case addresses.Receiver(webhook=addresses.Webhook() as found):
            return _webhook(found, templates, secrets).send, _MANY
        case addresses.Receiver(slack=addresses.Slack() as found):
            return _slack(found, templates, secrets, pace_s=pace(_SLACK)), _SLACK
        case addresses.Receiver(pagerduty=addresses.PagerDuty() as found):
            where = posting.Site(found.url, timeout_s=found.timeout_s, reach=found.reach)
            key = secrets.read(found.routing_key_from)
            service = pagerduty.Service(where, routing_key=key, templates=templates)
            return service.send, _PAGERDUTY
        case addresses.Receiver(email=addresses.Email() as found):
            password = secrets.read(found.password_from) if found.password_from else ""
            return smtp.Relay(found, password=password, templates=templates).send, _MAIL
        case addresses.Receiver(teams=addresses.Teams() as found):
            return teams.Workflow(_site(found, secrets), templates).send, _TEAMS
        case addresses.Receiver(alertmanager=addresses.Alertmanager() as found):
            bearer = secrets.read(found.bearer_from) if found.bearer_from else ""
            push = alertmanager.Push(
                _site(found, secrets), bearer=bearer, believed_for=_believed(settings)
            )
            return push.send, _MANY
        case addresses.Receiver(kubernetes=addresses.KubernetesEvents() as found):
            api = cluster.Cluster(settings.kubernetes)
            return cluster.Events(api, found, pace_s=pace(_EVENTS)).send, _EVENTS
        case addresses.Receiver(apprise=addresses.Apprise() as found):
            url = secrets.read(found.url_from)
            others = breadth.Apprise(url, timeout_s=found.timeout_s, templates=templates)
            return others.send, _SLACK
        case addresses.Receiver(file=addresses.File(path=path)):
            return files.File(path, templates).send, _MANY
        case _:
            return console.Console(templates).send, _MANY


def _webhook(
    found: addresses.Webhook, templates: addresses.Templates, secrets: _Secrets
) -> webhook.Webhook:
    return webhook.Webhook(
        _site(found, secrets),
        layout=found.format,
        alerts_max=found.max_alerts,
        keys=[signature.key_of(secrets.read(one)) for one in found.secrets],
        bearer=secrets.read(found.bearer_from) if found.bearer_from else "",
        templates=templates,
    )


def _slack(
    found: addresses.Slack,
    templates: addresses.Templates,
    secrets: _Secrets,
    *,
    pace_s: float,
) -> receivers.Send:
    if found.webhook_from is not None:
        url = secrets.read(found.webhook_from)
        hook = posting.Site(url, timeout_s=found.timeout_s, reach=found.reach)
        return slack.Incoming(hook, templates).send
    assert found.token_from is not None, "a channel has one of the two"
    where = posting.Site(found.url, timeout_s=found.timeout_s, reach=found.reach)
    token = secrets.read(found.token_from)
    return slack.Channel(
        where, token=token, channel=found.channel, templates=templates, pace_s=pace_s
    ).send


def _believed(settings: config.Settings) -> timedelta:
    """Return for how long an alert is believed without being pushed again: two reminders."""
    longest = max(r.timing.repeat_interval_s for r in tree.root(settings).walk())
    return timedelta(seconds=2 * longest)
