"""Pure: the page of alerts: firing alerts by notification group, resolved alerts and silences."""

import shlex
from collections.abc import Container, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

import msgspec

from muster import matching, vocabulary
from muster.fleet import health_state, model
from muster.service import validation
from muster_console import alert_history

ALERTS_MAX: Final = 200
"""The maximum number of firing alerts that the page shows."""
RESOLVED_MAX: Final = 50
SILENCES_MAX: Final = 50
_LABELS_MAX: Final = 16
_WORDS_MAX: Final = 8
_SHOWN_MAX: Final = 40
_DELIVERIES_MAX: Final = 20
_STILL_MAX: Final = 3
_LONG: Final = timedelta(days=1)
_DONE: Final = {
    "silenced": "The silence is stored.",
    "expired": "The silence has expired.",
    "sent": "The notification is back in the outbox; the notifier sends its present state.",
}
"""The message that the page shows after each kind of act."""
_OF_SEVERITY: Final = {
    vocabulary.Severity.CRITICAL.value: model.Level.CRITICAL,
    vocabulary.Severity.WARNING.value: model.Level.WARNING,
    vocabulary.Severity.INFO.value: model.Level.NOTICE,
}


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """The filter in the page's address: labels (as in the links in notifications), and words."""

    labels: tuple[tuple[str, str], ...] = ()
    words: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    """Messages about parameters that are unknown, or whose value cannot match any alert."""

    @property
    def is_empty(self) -> bool:
        """Whether every alert is shown."""
        return not (self.labels or self.words)

    def has(self, labels: Mapping[str, str], *texts: str) -> bool:
        """Return whether an alert with these labels and texts is to be shown."""
        if any(labels.get(name, "") != value for name, value in self.labels):
            return False
        text = " ".join((*labels.values(), *texts)).lower()
        return all(word in text for word in self.words)


class ShownAlert(msgspec.Struct, frozen=True, kw_only=True):
    """One firing alert, the silence that mutes it, if any, and the command that silences it."""

    alert: health_state.Alert
    level: model.Level
    silence: matching.Silence | None
    matchers: tuple[str, ...]
    """The matchers that the page suggests for a silence of this alert."""
    silence_command: str
    key: str
    """The unique key of the alert on the page."""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Alerts that share notifications; `name` is empty for alerts without a notification."""

    name: str
    title: str
    """The labels that the alerts have in common."""
    alerts: tuple[ShownAlert, ...]
    deliveries: tuple[alert_history.Delivery, ...]
    """The newest notifications about these alerts, with repeated ones counted; newest first."""
    deliveries_total: int


class AlertsPage(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the page of alerts shows."""

    groups: tuple[Group, ...]
    firing: int
    matched: int
    silenced: int
    silences: tuple[matching.Silence, ...]
    """The silences that have not expired, the first to expire first."""
    silences_total: int
    resolved: tuple[alert_history.Resolved, ...]
    resolved_total: int
    dead_letters: alert_history.DeadLetters
    is_cut: bool


def filter_of(query: Iterable[tuple[str, str]], *, others: Container[str] = ()) -> Filter:
    """Return the filter in an address's parameters; the parameters in `others` are ignored."""
    labels, words, problems = [], list[str](), []
    for name, value in query:
        if name == "q":
            words += value.lower().split()
        elif name in matching.LABELS:
            wanted = matching.Matcher(name, matching.Operator.EQUAL, value)
            labels.append((name, value))
            problems += [doubt] if (doubt := matching.doubt(wanted)) else []
        elif name not in others:
            near = validation.near(name, ("q", *matching.LABELS))
            problem = f"this page has no filter {name[:_SHOWN_MAX]}"
            problems.append(f"{problem}; {near}" if near else problem)
    return Filter(
        labels=tuple(labels[:_LABELS_MAX]),
        words=tuple(words[:_WORDS_MAX]),
        problems=tuple(problems[:_LABELS_MAX]),
    )


def page(
    fleet: model.FleetModel,
    history: alert_history.AlertHistory,
    *,
    at: datetime,
    wanted: Filter | None = None,
) -> AlertsPage:
    """Return the page of alerts."""
    wanted = wanted or Filter()
    every = fleet.alerts
    # building the labels of ten thousand alerts takes long
    matched = [
        each
        for each in every
        if wanted.is_empty or wanted.has(each.labels, each.summary, *each.pods)
    ]
    shown = [show(alert, fleet, at) for alert in matched[:ALERTS_MAX]]
    deliveries = history.deliveries(at)
    resolved = [each for each in history.resolved(at) if wanted.has(each.labels, each.summary)]
    silences = sorted(
        (each for each in fleet.silences.values() if at < each.ends_at),
        key=lambda each: (each.ends_at, each.id),
    )
    return AlertsPage(
        groups=tuple(_groups(shown, deliveries)),
        firing=len(every),
        matched=len(matched),
        silenced=sum(each.silence is not None for each in shown),
        silences=tuple(silences[:SILENCES_MAX]),
        silences_total=len(silences),
        resolved=tuple(resolved[:RESOLVED_MAX]),
        resolved_total=len(resolved),
        dead_letters=history.dead_letters,
        is_cut=history.is_cut,
    )


def muted(
    matchers: Sequence[matching.Matcher], alerts: Iterable[health_state.Alert]
) -> list[health_state.Alert]:
    """Return the alerts that match all of the matchers."""
    return [each for each in alerts if matching.all_hold(matchers, each.labels)]


def why_confirm(
    silence: matching.Silence, nodes: Iterable[str], alerts: Sequence[health_state.Alert]
) -> str:
    """Return why a person must confirm a silence; empty if that is not needed.

    A silence must be confirmed if it matches no firing alert. A silence that names neither a node
    nor a device must also be confirmed if it matches all firing alerts, or if it lasts longer than
    a day and its matchers match more than half of `nodes`, or `nodes` is empty.
    """
    parsed = matching.parse_all(silence.matchers)
    if not (matched := len(muted(parsed, alerts))):
        none = f"None of the {len(alerts):,} firing alerts matches" if alerts else "No alert fires"
        return f"{none} now. Confirm that below if you expect alerts that match."
    if any(matching.values_of(parsed, name) for name in ("node", "device")):
        return ""
    if matched == len(alerts):
        every = f"all {matched:,} alerts that fire" if matched > 1 else "the only alert that fires"
        return f"This silences {every} now. Confirm that below, or name a node or device."
    if silence.ends_at - silence.starts_at <= _LONG:
        return ""
    conditions = [each for each in parsed if each.name == "node"]
    known = [*nodes]
    matched = sum(matching.all_hold(conditions, {"node": name}) for name in known)
    if known and matched * 2 <= len(known):
        return ""
    about = "every node" if matched == len(known) else f"{matched:,} of {len(known):,} nodes"
    return (
        f"This silences alerts of {about} for longer than a day. Confirm that below, or name "
        "nodes, or choose at most 1d."
    )


def done(query: Mapping[str, str], fleet: model.FleetModel, at: datetime) -> str:
    """Return the message about the act that led to this page; empty if none did.

    After a silence was ended, the message also names up to three other silences that mute its
    firing alerts.
    """
    message = _DONE.get(query.get("done", ""), "")
    over = fleet.silences.get(query.get("silence", ""))
    if query.get("done") != "expired" or over is None:
        return message
    matched = muted(matching.parse_all(over.matchers), fleet.alerts)
    others = [each for alert in matched if (each := fleet.silence_of(alert, at))]
    if not others:
        return message
    texts = dict.fromkeys(f"{' '.join(each.matchers)} ({each.text()})" for each in others)
    more = " and others" if len(texts) > _STILL_MAX else ""
    names = ", ".join([*texts][:_STILL_MAX])
    return f"{message} Others still silence {len(others)} of its firing alerts: {names}{more}."


def show(alert: health_state.Alert, fleet: model.FleetModel, at: datetime) -> ShownAlert:
    """Return an alert as the page shows it, with its silence, if any."""
    return ShownAlert(
        alert=alert,
        level=level_of(alert.severity),
        silence=fleet.silence_of(alert, at),
        matchers=matchers_of(alert),
        silence_command=silence_command(alert),
        key=alert.fingerprint or f"{alert.node}-{alert.plugin}-{alert.kind}-{alert.resource}",
    )


def level_of(severity: str) -> model.Level:
    """Return the level of a severity; an unknown severity is a warning."""
    return _OF_SEVERITY.get(severity, model.Level.WARNING)


def matchers_of(alert: health_state.Alert) -> tuple[str, ...]:
    """Return the matchers that a person usually needs to silence an alert."""
    names = ("kind", "node", "resource", "device")
    labels = {name: alert.labels.get(name, "") for name in names}
    return tuple(
        str(matching.Matcher(name, matching.Operator.EQUAL, value))
        for name, value in labels.items()
        if value
    )


def silence_command(alert: health_state.Alert) -> str:
    """Return the command that silences an alert for two hours."""
    about = ["--duration", "2h", "--comment", "WHY"]
    return shlex.join(["muster", "silence", "add", *matchers_of(alert), *about])


def _groups(
    shown: Sequence[ShownAlert], deliveries: Sequence[alert_history.Delivery]
) -> list[Group]:
    """Group alerts by the group of their newest notification; alerts without one come last."""
    starts = {each.alert.fingerprint: each.alert.starts_at for each in shown}
    newest: dict[str, str] = {}
    reported = []
    for delivery in deliveries:
        fingerprints = alert_history.still_firing(delivery, starts)
        newest |= dict.fromkeys(fingerprints - newest.keys(), delivery.group)
        if fingerprints:
            reported.append((delivery, fingerprints))
    alerts: dict[str, list[ShownAlert]] = {}
    for each in shown:
        alerts.setdefault(newest.get(each.alert.fingerprint, ""), []).append(each)
    # deliveries times groups would be too many sets to build
    about: dict[str, list[alert_history.Delivery]] = {name: [] for name in alerts}
    for delivery, fingerprints in reported:
        for name in {newest[each] for each in fingerprints} - {""}:
            about[name].append(delivery)
    return [
        Group(
            name=name,
            title=alert_history.title(name),
            alerts=tuple(alerts[name]),
            deliveries=alert_history.outcomes(about[name], most=_DELIVERIES_MAX),
            deliveries_total=len(about[name]),
        )
        for name in sorted(alerts, key=lambda each: not each)
    ]
