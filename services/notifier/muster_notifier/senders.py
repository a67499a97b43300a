"""Door to every way of reaching somebody: a receiver's settings become what sends to it."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from muster_notifier import (
    addresses,
    alertmanager,
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

    `at_once` is 1 where a receiver cannot drop a repeat: a crash then repeats one message at most.
    """

    send: receivers.Send
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
    try:
        send, rate = _make(receiver, templates, settings)
    except (files.NoSecret, cluster.NoCluster, ValueError) as error:
        raise Unusable(f"receiver {receiver.name}: {error}") from None
    repeats = receiver.slack or receiver.email or receiver.teams or receiver.apprise
    at_once = 1 if repeats is not None else desk.SENDING_MAX
    return Sender(send, rate, at_once, tuple(message.problems_of(templates)))


def site(found: addresses.Address) -> posting.Site:
    """Return where an address leads. Raises NoSecret and ValueError."""
    url = found.url
    if url is None:
        assert found.url_from is not None, "an address has one of the two"
        url = files.secret(found.url_from)
    return posting.Site(url, timeout_s=found.timeout_s, reach=found.reach)


def _make(  # noqa: PLR0911  # one line for each way
    receiver: addresses.Receiver, templates: addresses.Templates, settings: config.Settings
) -> tuple[receivers.Send, float]:
    match receiver:
        case addresses.Receiver(webhook=addresses.Webhook() as found):
            return _webhook(found, templates).send, _MANY
        case addresses.Receiver(slack=addresses.Slack() as found):
            return _slack(found, templates), _SLACK
        case addresses.Receiver(pagerduty=addresses.PagerDuty() as found):
            where = posting.Site(found.url, timeout_s=found.timeout_s, reach=found.reach)
            key = files.secret(found.routing_key_from)
            service = pagerduty.Service(where, routing_key=key, templates=templates)
            return service.send, _PAGERDUTY
        case addresses.Receiver(email=addresses.Email() as found):
            password = files.secret(found.password_from) if found.password_from else ""
            return smtp.Relay(found, password=password, templates=templates).send, _MAIL
        case addresses.Receiver(teams=addresses.Teams() as found):
            return teams.Workflow(site(found), templates).send, _TEAMS
        case addresses.Receiver(alertmanager=addresses.Alertmanager() as found):
            bearer = files.secret(found.bearer_from) if found.bearer_from else ""
            push = alertmanager.Push(site(found), bearer=bearer, believed_for=_believed(settings))
            return push.send, _MANY
        case addresses.Receiver(kubernetes=addresses.KubernetesEvents() as found):
            return cluster.Events(cluster.Cluster(settings.kubernetes), found).send, _EVENTS
        case addresses.Receiver(apprise=addresses.Apprise() as found):
            url = files.secret(found.url_from)
            others = breadth.Apprise(url, timeout_s=found.timeout_s, templates=templates)
            return others.send, _SLACK
        case addresses.Receiver(file=addresses.File(path=path)):
            return files.File(path, templates).send, _MANY
        case _:
            return console.Console(templates).send, _MANY


def _webhook(found: addresses.Webhook, templates: addresses.Templates) -> webhook.Webhook:
    return webhook.Webhook(
        site(found),
        layout=found.format,
        alerts_max=found.max_alerts,
        keys=[signature.key_of(files.secret(one)) for one in found.secrets],
        bearer=files.secret(found.bearer_from) if found.bearer_from else "",
        templates=templates,
    )


def _slack(found: addresses.Slack, templates: addresses.Templates) -> receivers.Send:
    if found.webhook_from is not None:
        url = files.secret(found.webhook_from)
        hook = posting.Site(url, timeout_s=found.timeout_s, reach=found.reach)
        return slack.Incoming(hook, templates).send
    assert found.token_from is not None, "a channel has one of the two"
    where = posting.Site(found.url, timeout_s=found.timeout_s, reach=found.reach)
    token = files.secret(found.token_from)
    return slack.Channel(where, token=token, channel=found.channel, templates=templates).send


def _believed(settings: config.Settings) -> timedelta:
    """Return for how long an alert is believed without being pushed again: two reminders."""
    longest = max(r.timing.repeat_interval_s for r in tree.root(settings).walk())
    return timedelta(seconds=2 * longest)
