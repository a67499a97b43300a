"""Pure: the text of a notification: short lines that say what to do.

Every message says in one line what is wrong, and then where, since when, which sources confirm it,
which pods use the devices, what to do, and one command for details. Line breaks in alerts are
removed, and left-out parts are counted. The operator's templates replace these texts; an unusable
template is ignored, and the message says so.
"""

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import msgspec

from muster import vocabulary
from muster_notifier.config import receiver_settings
from muster_notifier.routing import notifications

LINE_MAX: Final = 400
TEXT_MAX: Final = 20_000
TEST: Final = "TEST, nothing is wrong: "

_MARKUP: Final = re.compile(
    # links, images, references and HTML of Markdown; `{{DATE(...)}}` of cards; mentions
    r"(?<=\])(?=[(\[:])|(?<=!)(?=\[)|(?<=<)(?=[^\s=<])|(?<=\{)(?=\{)|(?<=@)(?=\w)"
)
_LINE_ALERTS_MAX: Final = 20
_LINE_PODS_MAX: Final = 10
_NOTHING: Final = receiver_settings.Templates()

ALERT_NAMES: Final = (
    *("state", "severity", "kind", "node", "plugin", "resource", "devices", "summary", "since"),
    *("until", "evidence", "pods", "runbook", "advice"),
)
"""The variables (`$name`) in the template of one alert."""
NAMES: Final = (
    *("state", "reason", "receiver", "group", "node", "kind", "severity", "summary", "firing"),
    *("resolved", "title", "alerts", "runbooks", "look_closer"),
)
"""The variables (`$name`) in the other templates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """The text for people."""

    title: str
    text: str


def compose(
    notification: notifications.Notification, templates: receiver_settings.Templates = _NOTHING
) -> Message:
    """Return the message."""
    problems: list[str] = []
    built_in = title(notification)
    facts = {**_facts(notification), "title": built_in, "alerts": ""}
    head = line(_filled("title", templates.title, facts, problems) or built_in)
    head = head if not notification.is_test else line(TEST + head)
    facts |= {"title": head, "alerts": "\n".join(_alerts(notification, templates, problems))}
    body = _filled("text", templates.text, facts, problems)
    if body is None:
        body = "\n".join((head, *_lines(notification, facts["alerts"])))
    if problems:
        body += f"\n  (a template could not be used: {line('; '.join(problems))})"
    return Message(title=head, text=cut(body, TEXT_MAX))


def inert(notification: notifications.Notification) -> notifications.Notification:
    """Return a notification with spaces added to its texts, so that Markdown shows no links.

    Not every client reads backslashes, and the operator's templates may contain links.
    """
    return msgspec.structs.replace(
        notification,
        group=_inert(notification.group),
        labels={name: _inert(value) for name, value in notification.labels.items()},
        why=_inert(notification.why),
        firing=tuple(map(_inert_alert, notification.firing)),
        resolved=tuple(map(_inert_alert, notification.resolved)),
    )


def title(notification: notifications.Notification) -> str:
    """Return one line that says what is wrong or resolved."""
    count, ended = len(notification.firing_ids), notification.notified_total
    ended -= count
    counts = [f"{count} firing"] if count else []
    counts += [f"{ended} resolved"] if ended else []
    shown = (*notification.firing, *notification.resolved)
    state = notification.state.upper()
    if not shown:
        return line(f"[{state}] {notification.group}: {', '.join(counts) or 'nothing fires'}")
    nodes = {alert.node for alert in shown}
    place = node_name(shown[0].node) if len(nodes) == 1 else f"{len(nodes)} nodes"
    head = f"[{state}] {shown[0].kind} on {place}: {shown[0].summary}"
    if count + ended > 1:
        head += f" ({', '.join(counts)})"
    return line(head)


def line(text: str, longest: int = LINE_MAX) -> str:
    """Return the text on one line; alerts contain texts from drivers and kubelets."""
    indent = text[: len(text) - len(text.lstrip(" "))]
    shown = indent + " ".join(
        "".join(character if character.isprintable() else " " for character in text).split()
    )
    return cut(shown, longest)


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
    return _MARKUP.sub(" ", line(text, len(text)))


def cut(text: str, longest: int) -> str:
    """Return the text, cut if it is too long."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def node_name(name: str) -> str:
    """Return a node's name as shown to people."""
    return "the fleet" if name == vocabulary.FLEET else name


def format_time(at: datetime) -> str:
    """Return a time as shown to people."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def runbooks(notification: notifications.Notification) -> list[str]:
    """Return the runbooks of the firing alerts."""
    return sorted({alert.runbook for alert in notification.firing if alert.runbook})


def look_closer(notification: notifications.Notification) -> str:
    """Return the command that shows more details; empty if there is no such command."""
    nodes = sorted({alert.node for alert in notification.firing} - {vocabulary.FLEET})
    return f"muster why {nodes[0]}" if nodes else ""


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
            [line(text) for text in own.split("\n")]
            if own is not None
            else alert_lines(notification, alert)
        )
    more = notification.notified_total - min(len(alerts), _LINE_ALERTS_MAX)
    return [*lines, f"  and {more} more alerts"] if more > 0 else lines


def _lines(notification: notifications.Notification, alerts: str) -> list[str]:
    lines = [alerts] if alerts else []
    lines += [f"  what to do: {line(runbook)}" for runbook in runbooks(notification)]
    closer = look_closer(notification)
    if closer:
        lines.append(f"  look closer: {closer}")
    if notification.why:
        lines.append(line(f"  why you: {notification.why}"))
    return lines


def alert_lines(
    notification: notifications.Notification, alert: vocabulary.AlertChanged
) -> list[str]:
    """Return the lines that describe one alert."""
    plugin = f"{alert.watched} (watched)" if alert.watched else alert.plugin
    where = " ".join((node_name(alert.node), plugin, alert.resource, devices(alert))).split()
    fires = alert.state is vocabulary.AlertState.FIRING
    span = f"since {format_time(alert.starts_at)}"
    if not fires and alert.ends_at is not None:
        span = f"from {format_time(alert.starts_at)} to {format_time(alert.ends_at)}"
    lines = [
        line(f"- {alert.state} {alert.severity}: {alert.summary}"),
        line(f"  where: {' '.join(where)}, {span}"),
    ]
    if fires and alert.evidence:
        if not notification.is_test:
            lines.append(line(f"  confirmed by: {sources(alert.evidence)}"))
        lines += [line(f"  {evidence.source}: {evidence.observed}") for evidence in alert.evidence]
    if alert.pods:
        lines.append(line(f"  pods that use it: {pods(notification, alert)}"))
    if fires and alert.advice:
        lines.append(line(f"  advice: {alert.advice}"))
    return lines


def sources(evidence: Sequence[vocabulary.Evidence]) -> str:
    """Return the independent sources that confirm an alert, without health itself."""
    names = sorted({item.source for item in evidence})
    names = [source for source in names if source != "health"] or names
    if len(names) == 1:
        return names[0]
    return f"{len(names)} sources: {', '.join(names)}"


def devices(alert: vocabulary.AlertChanged) -> str:
    """Return the device names; only the first ones if there are many."""
    more = alert.devices_total - len(alert.devices)
    if not alert.devices:
        return f"{more} of them" if more > 0 else ""
    return ",".join(alert.devices) + (f" and {more} more" if more > 0 else "")


def pods(notification: notifications.Notification, alert: vocabulary.AlertChanged) -> str:
    """Return the pod names; only the first ones if there are many."""
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
        "node": node_name(notification.node),
        "kind": str(first.kind) if first else "",
        "severity": str(first.severity) if first else "",
        "summary": line(first.summary) if first else "",
        "firing": str(len(notification.firing_ids)),
        "resolved": str(notification.notified_total - len(notification.firing_ids)),
        "runbooks": " ".join(line(link) for link in runbooks(notification)),
        "look_closer": look_closer(notification),
    }


def _alert_facts(
    notification: notifications.Notification, alert: vocabulary.AlertChanged
) -> dict[str, str]:
    facts = {
        "state": alert.state,
        "severity": alert.severity,
        "kind": alert.kind,
        "node": node_name(alert.node),
        "plugin": alert.plugin,
        "resource": alert.resource,
        "devices": devices(alert),
        "summary": alert.summary,
        "since": format_time(alert.starts_at),
        "until": format_time(alert.ends_at) if alert.ends_at else "",
        "evidence": "; ".join(
            f"{evidence.source}: {evidence.observed}" for evidence in alert.evidence
        ),
        "pods": pods(notification, alert),
        "runbook": alert.runbook,
        "advice": alert.advice,
    }
    return {name: line(str(value)) for name, value in facts.items()}


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
