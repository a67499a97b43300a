"""Pure: writes the text of a notification: short lines with facts, advice and commands.

The title (`headline`) names the problem, its place, and its effect on pods. The body adds the time,
the reason, the pods that use the devices, the observations (the most trustworthy first), the
advice, and the commands that show or silence the alert. Links are separate, because each receiver
has its own form for them. Line breaks in alerts are removed, and left-out parts are counted. The
operator's templates replace these texts; an unusable template is ignored, and the message reports
that.
"""

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from muster import matching, vocabulary, wording
from muster_notifier.config import receiver_settings
from muster_notifier.receivers import console_links, headline
from muster_notifier.routing import notifications

TEXT_MAX: Final = 20_000
TEST: Final = "TEST, nothing is wrong: "

_MARKUP: Final = re.compile(
    # links, images, references and HTML of Markdown; `{{DATE(...)}}` of cards; mentions
    r"(?<=\])(?=[(\[:])|(?<=!)(?=\[)|(?<=<)(?=[^\s=<])|(?<=\{)(?=\{)|(?<=@)(?=\w)"
)
_LINE_ALERTS_MAX: Final = 20
_LINE_PODS_MAX: Final = 10
_LINKS_MAX: Final = 5
_BODY_MAX: Final = TEXT_MAX - _LINKS_MAX * (headline.LINE_MAX + 20)
_ALL: Final = 10_000
_NO_TEMPLATES: Final = receiver_settings.Templates()
_LINK: Final = re.compile(r"https?://[^\s<>|\"']+")
_IN_CLUSTER: Final = "muster --context CONTEXT "
_COMMAND: Final = re.compile(r"\bmuster (?=(?:dlq|doctor|events|silence|status|why)\b)")
_LABEL_VALUE: Final = re.compile(r"[A-Za-z0-9/][-A-Za-z0-9_./]*")
_WEIGHTS: Final = {"kubernetes": 0, "probe": 1, "agent": 2, "heartbeat": 3, "health": 9}
_WEIGHT: Final = 5
"""The sort key of sources that are not in `_WEIGHTS`; evidence with the lowest key is first."""

ALERT_NAMES: Final = (
    *("state", "severity", "kind", "node", "plugin", "resource", "devices", "summary", "since"),
    *("until", "evidence", "pods", "runbook", "advice"),
)
"""The variables (`$name`) in the template of one alert."""
NAMES: Final = (
    *("state", "reason", "receiver", "group", "node", "kind", "severity", "summary", "firing"),
    *("resolved", "title", "alerts", "runbooks", "look_closer"),
)
"""The variables (`$name`) in the templates `title` and `text`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A text for people; `links` lead to runbooks, and are not in the body.

    `console_url` is the console's address, and `console` a link to one of its pages; both are empty
    if no address is configured.
    """

    title: str
    body: str
    links: tuple[str, ...] = ()
    console: str = ""
    console_url: str = ""

    @property
    def text(self) -> str:
        """The body, with the links at its end."""
        console = f"console: {self.console}" if self.console else ""
        lines = (self.body, *map(_link_line, self.links), console)
        return "\n".join(line for line in lines if line)


@dataclass(frozen=True, slots=True, kw_only=True)
class Composer:
    """Writes messages with the operator's templates, and with links to the console.

    If the notifier runs in a cluster (`in_cluster`), commands get `--context CONTEXT`.
    """

    templates: receiver_settings.Templates = _NO_TEMPLATES
    in_cluster: bool = False
    console_url: str = ""

    def compose(self, notification: notifications.Notification) -> Message:
        """Return the texts of a notification."""
        notification = self.localized(notification)
        templates = self.templates
        problems: list[str] = []
        look = self._command(look_closer(notification))
        built_in = headline.title(notification)
        facts = {**_facts(notification), "look_closer": look, "title": built_in, "alerts": ""}
        head = headline.line(_filled("title", templates.title, facts, problems) or built_in)
        head = headline.line(TEST + head) if headline.is_test(notification) else head
        facts |= {"title": head, "alerts": "\n".join(_alerts(notification, templates, problems))}
        body = _filled("text", templates.text, facts, problems)
        links: tuple[str, ...] = ()
        if body is None:
            commands = {"look closer": look, "silence": self._command(silence(notification))}
            body = "\n".join(_lines(notification, facts["alerts"], commands))
            links = tuple(headline.line(link) for link in runbooks(notification)[:_LINKS_MAX])
        if problems:
            body += f"\n(a template could not be used: {headline.line('; '.join(problems))})"
        console = console_links.of_notification(self.console_url, notification)
        return Message(
            title=head,
            body=headline.cut(body, _BODY_MAX - len(console)),
            links=links,
            console=console,
            console_url=self.console_url,
        )

    def localized(self, notification: notifications.Notification) -> notifications.Notification:
        """Return the notification; in a cluster, commands in its advice get `--context CONTEXT`."""
        if not self.in_cluster:
            return notification
        return msgspec.structs.replace(
            notification,
            firing=tuple(map(self._localized, notification.firing)),
            resolved=tuple(map(self._localized, notification.resolved)),
        )

    def _localized(self, alert: vocabulary.AlertChanged) -> vocabulary.AlertChanged:
        advice = self._command(alert.advice)
        return alert if advice == alert.advice else msgspec.structs.replace(alert, advice=advice)

    def _command(self, text: str) -> str:
        return _COMMAND.sub(_IN_CLUSTER, text) if self.in_cluster else text


PLAIN: Final = Composer()


def inert(notification: notifications.Notification) -> notifications.Notification:
    """Return a notification with spaces inserted into its texts, so that Markdown shows no links.

    Not every client supports backslash escapes. The operator's templates may contain links, so only
    the texts of alerts and groups are changed.
    """
    return msgspec.structs.replace(
        notification,
        group=_inert(notification.group),
        labels={name: _inert(value) for name, value in notification.labels.items()},
        why=_inert(notification.why),
        firing=tuple(map(_inert_alert, notification.firing)),
        resolved=tuple(map(_inert_alert, notification.resolved)),
    )


def _inert_alert(alert: vocabulary.AlertChanged) -> vocabulary.AlertChanged:
    return msgspec.structs.replace(
        alert,
        summary=_inert(alert.summary),
        resource=_inert(alert.resource),
        devices=tuple(map(_inert, alert.devices)),
        pods=tuple(map(_inert, alert.pods)),
        evidence=tuple(
            vocabulary.Evidence(source=_inert(item.source), observed=_inert(item.observed))
            for item in alert.evidence
        ),
        advice=_inert(alert.advice),
        runbook=_inert(alert.runbook),
    )


def _inert(text: str) -> str:
    return _MARKUP.sub(" ", headline.line(text, len(text)))


def runbooks(notification: notifications.Notification) -> list[str]:
    """Return the runbooks of the firing alerts."""
    return sorted({alert.runbook for alert in notification.firing if alert.runbook})


def look_closer(notification: notifications.Notification) -> str:
    """Return the command that shows more details; empty if there is no such command."""
    nodes = sorted({alert.node for alert in notification.firing} - {vocabulary.FLEET})
    if headline.is_test(notification) or not nodes:
        return ""
    return f"muster why {nodes[0]}"


def problems_of(templates: receiver_settings.Templates) -> list[str]:
    """Return the problems in templates: unknown variables, or a dollar sign without a name."""
    all_problems = []
    for name, text, names in (
        ("title", templates.title, NAMES),
        ("text", templates.text, NAMES),
        ("alert", templates.alert, ALERT_NAMES),
    ):
        problems: list[str] = []
        _filled(name, text, dict.fromkeys(names, ""), problems)
        all_problems += problems
    return all_problems


def silence(notification: notifications.Notification) -> str:
    """Return the command that silences the group; empty if none exists, or if it needs quotes.

    If all alerts are about the same single device, other devices are not silenced.
    """
    labels = notification.labels | _device(notification)
    if not (notification.firing and labels) or labels.get("node") == vocabulary.FLEET:
        return ""
    if headline.is_test(notification):
        return ""
    if not all(map(_LABEL_VALUE.fullmatch, labels.values())):
        return ""
    matchers = " ".join(f"{name}={value}" for name, value in sorted(labels.items()))
    return f"muster silence add {matchers} --duration 2h --comment WHY"


def _device(notification: notifications.Notification) -> dict[str, str]:
    """Return the label `device` if all firing alerts have the same one; otherwise no label."""
    if len(notification.firing) < len(notification.firing_ids):
        return {}
    devices = {matching.labels_of(alert).get("device", "") for alert in notification.firing}
    return {"device": device} if len(devices) == 1 and (device := devices.pop()) else {}


def is_link(text: str) -> bool:
    """Return whether a runbook is a link that can be opened, and not a path in the source tree."""
    return _LINK.fullmatch(text) is not None


def _alerts(
    notification: notifications.Notification,
    templates: receiver_settings.Templates,
    problems: list[str],
) -> list[str]:
    alerts = (*notification.firing, *notification.notified_resolved)
    lines: list[str] = []
    for alert in alerts[:_LINE_ALERTS_MAX]:
        own = _filled("alert", templates.alert, _alert_facts(notification, alert), problems)
        lines += (
            [headline.line(text) for text in own.split("\n")]
            if own is not None
            else alert_lines(notification, alert)
        )
    more = notification.notified_total - min(len(alerts), _LINE_ALERTS_MAX)
    return [*lines, f"and {wording.counted(more, 'more alert')}"] if more > 0 else lines


def _lines(
    notification: notifications.Notification, alerts: str, commands: Mapping[str, str]
) -> list[str]:
    lines = [alerts] if alerts else []
    lines += [f"{name}: {command}" for name, command in commands.items() if command]
    if notification.why:
        lines.append(headline.line(f"why you are notified: {notification.why}"))
    return lines


def _link_line(link: str) -> str:
    return f"runbook: {link}"


def alert_lines(
    notification: notifications.Notification, alert: vocabulary.AlertChanged
) -> list[str]:
    """Return the lines about one alert, without its summary if the title already contains it."""
    plugin = f"{alert.watched} (watched)" if alert.watched else alert.plugin
    # in an alert about the fleet, `plugin` is the service that raised it; the evidence names it
    plugin = "" if alert.node == vocabulary.FLEET else plugin
    where = " ".join((headline.node_name(alert.node), plugin, alert.resource, devices(alert)))
    fires = alert.state is vocabulary.AlertState.FIRING
    span = f"since {headline.format_time(alert.starts_at)}"
    if not fires and alert.ends_at is not None:
        ends = headline.format_time(alert.ends_at)
        span = f"from {headline.format_time(alert.starts_at)} to {ends}"
    what, reason = headline.what_and_reason(alert)
    ordered = sorted(alert.evidence, key=lambda item: _WEIGHTS.get(item.source, _WEIGHT))
    lines = [f"{alert.severity} {span}: {' '.join(where.split())}"]
    if reason and not any(reason in headline.line(item.observed, _ALL) for item in ordered):
        lines.append(f"reason: {reason}")
    if alert.pods:
        lines.append(f"pods that use it: {pods(notification, alert)}")
    if fires or not notification.firing_ids:
        lines += [f"{item.source}: {item.observed}" for item in ordered]
    if fires and alert.advice:
        lines.append(f"what to do: {alert.advice}")
    if notification.notified_total == 1:
        return [headline.line(text) for text in lines]
    head = what if fires else f"resolved after {headline.lasted_alert(alert)}: {what}"
    return [headline.line(f"- {head}"), *(headline.line(f"  {text}") for text in lines)]


def devices(alert: vocabulary.AlertChanged) -> str:
    """Return the alert's device names, and how many more there are; empty if there are none."""
    more = alert.devices_total - len(alert.devices)
    if not alert.devices:
        return f"{more} of them" if more > 0 else ""
    return ",".join(alert.devices) + (f" and {more} more" if more > 0 else "")


def pods(notification: notifications.Notification, alert: vocabulary.AlertChanged) -> str:
    """Return the first pod names, and how many more there are."""
    shown = alert.pods[:_LINE_PODS_MAX]
    more = notification.pods_of.get(alert.fingerprint, len(alert.pods)) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _facts(notification: notifications.Notification) -> dict[str, str]:
    shown = (*notification.firing, *notification.resolved)
    first = shown[0] if shown else None
    return {
        "state": str(notification.state),
        "reason": str(notification.reason),
        "receiver": notification.receiver,
        "group": notification.group,
        "node": headline.node_name(notification.node),
        "kind": str(first.kind) if first else "",
        "severity": str(first.severity) if first else "",
        "summary": headline.line(first.summary) if first else "",
        "firing": str(len(notification.firing_ids)),
        "resolved": str(notification.notified_total - len(notification.firing_ids)),
        "runbooks": " ".join(headline.line(link) for link in runbooks(notification)),
    }


def _alert_facts(
    notification: notifications.Notification, alert: vocabulary.AlertChanged
) -> dict[str, str]:
    facts = {
        "state": alert.state,
        "severity": alert.severity,
        "kind": alert.kind,
        "node": headline.node_name(alert.node),
        "plugin": alert.plugin,
        "resource": alert.resource,
        "devices": devices(alert),
        "summary": alert.summary,
        "since": headline.format_time(alert.starts_at),
        "until": headline.format_time(alert.ends_at) if alert.ends_at else "",
        "evidence": "; ".join(
            f"{evidence.source}: {evidence.observed}" for evidence in alert.evidence
        ),
        "pods": pods(notification, alert),
        "runbook": alert.runbook,
        "advice": alert.advice,
    }
    return {name: headline.line(str(value)) for name, value in facts.items()}


def _filled(
    name: str, template: str | None, facts: Mapping[str, str], problems: list[str]
) -> str | None:
    """Return a template with its variables filled in; None if it is missing or unusable."""
    if template is None:
        return None
    try:
        return string.Template(template).substitute(facts)
    except KeyError as error:
        text = f"{name}: there is no ${error.args[0]}"
    except ValueError as error:
        text = f"{name}: {error}"
    if text not in problems:
        problems.append(text)
    return None
