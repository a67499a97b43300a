"""Pure: What the health service knows of the fleet, read from its `/state`, and shown.

The shapes are the command's own: it knows no room. A key that is not there has its default, a key
that is not known here is left out, so an older command reads what a newer service says.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final

import msgspec

from muster import vocabulary

WELL: Final = frozenset({vocabulary.Verdict.HEALTHY.value, vocabulary.Verdict.MAINTENANCE.value})
UNKNOWN: Final = "UNKNOWN"
"""Shown of a plugin that is known and not judged yet."""

_SHOWN_MAX: Final = 200
_FIRST: Final = {severity.value: rank for rank, severity in enumerate(vocabulary.Severity)}


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One observation: who saw it, and what."""

    source: str = ""
    observed: str = ""


class Alert(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One alert that fires."""

    node: str = ""
    plugin: str = ""
    kind: str = ""
    severity: str = ""
    summary: str = ""
    starts_at: datetime | None = None
    resource: str = ""
    devices: tuple[str, ...] = ()
    devices_total: int = 0
    pods: tuple[str, ...] = ()
    pods_total: int = 0
    evidence: tuple[Evidence, ...] = ()
    advice: str = ""
    runbook: str = ""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A device with something wrong."""

    kind: str = ""
    resource: str = ""
    device: str = ""
    why: str = ""


class Plugin(msgspec.Struct, frozen=True, kw_only=True):
    """One plugin on one node; ages are seconds by health's clock."""

    node: str
    plugin: str
    state: str = ""
    verdict: str | None = None
    since: datetime | None = None
    rule: str = ""
    evidence: tuple[Evidence, ...] = ()
    instance: str = ""
    interval_s: float = 0.0
    beat_age_s: float | None = None
    clock_skew_s: float = 0.0
    expected: bool = False
    frozen: bool = False
    resources: tuple[str, ...] = ()
    devices: dict[str, int] = msgspec.field(default_factory=dict)
    unhealthy: tuple[Device, ...] = ()
    problems: tuple[str, ...] = ()
    alerts: tuple[Alert, ...] = ()

    @property
    def is_well(self) -> bool:
        """Tell whether there is nothing to be seen here."""
        return self.verdict in WELL and not (self.alerts or self.frozen or self.problems)


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """What concerns no single plugin; `held` have an alert that waits for its turn."""

    alerts: tuple[Alert, ...] = ()
    storms: int = 0
    suspects: int = 0
    held: int = 0


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """Health about itself; `leads` is the revision it leads under, if it does."""

    leads: int | None = None
    leader: str | None = None
    blind: bool = False
    advisories: str = ""
    telling: str = ""
    cluster: str | dict[str, str] = ""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """All of `/state`."""

    plugins: tuple[Plugin, ...]
    fleet: Fleet
    service: Service

    @property
    def alerts(self) -> list[Alert]:
        """Return all alerts that fire, the most urgent and the oldest first."""
        found = [*self.fleet.alerts, *(alert for one in self.plugins for alert in one.alerts)]
        return sorted(found, key=_urgency)


def decode(body: bytes) -> State:
    """Read `/state`. Raises ValueError for what is none."""
    try:
        return msgspec.json.decode(body, type=State)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None


def plain(text: str) -> str:
    """Return a text that a plugin may have written, as a terminal may be given it."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def at(time: datetime | None) -> str:
    """Return a time in the local time zone."""
    return "-" if time is None else f"{time.astimezone():%Y-%m-%d %H:%M:%S}"


def caveats(state: State) -> list[str]:
    """Say what makes less true what the service says, or less complete."""
    service = state.service
    found = []
    if service.blind:
        found.append("health is blind: its link to NATS is gone, and this is what it last knew")
    if service.leads is None:
        leader = f"{service.leader} does" if service.leader else "nobody is known to"
        found.append(f"this health service does not lead ({leader}); alerts are the leader's")
    if state.fleet.storms:
        found.append("a storm: many fell silent at once, and nobody of them is judged meanwhile")
    found += [service.telling] if service.telling else []
    found += [f"connections: {service.advisories}"] if _is_amiss(service.advisories) else []
    if isinstance(service.cluster, str):
        found += [f"Kubernetes: {service.cluster}"] if service.cluster else []
    else:
        found += [f"Kubernetes: {what}: {why}" for what, why in sorted(service.cluster.items())]
    return [plain(one) for one in found]


def summary(state: State, *, source: str, everything: bool) -> dict[str, object]:
    """Return the state as one object for programs; plugins that are well only on request."""
    shown = [one for one in state.plugins if everything or not one.is_well]
    return {
        "health": source,
        "service": state.service,
        "plugins_total": len(state.plugins),
        "nodes_total": len({one.node for one in state.plugins}),
        "verdicts": dict(_verdicts(state)),
        "suspects": state.fleet.suspects,
        "storms": state.fleet.storms,
        "held": state.fleet.held,
        "alerts": state.alerts,
        "plugins": sorted(shown, key=_place),
    }


def lines(state: State, *, source: str, everything: bool) -> list[str]:
    """Return the state for people."""
    nodes, most = len({one.node for one in state.plugins}), None if everything else _SHOWN_MAX
    counted = ", ".join(f"{count} {verdict}" for verdict, count in _verdicts(state)) or "none"
    fleet, alerts = state.fleet, state.alerts
    found = [
        f"health   {plain(source)}",
        *(f"  note   {one}" for one in caveats(state)),
        f"plugins  {len(state.plugins)} on {nodes} nodes: {counted}",
        f"doubts   {fleet.suspects} suspected of silence, {fleet.storms} storms",
        f"alerts   {len(alerts)} firing, of {fleet.held} plugins some wait for their turn"
        if fleet.held
        else f"alerts   {len(alerts)} firing",
    ]
    shown = sorted((p for p in state.plugins if everything or not p.is_well), key=_place)
    if shown:
        rows = [("NODE", "PLUGIN", "VERDICT", "SINCE", "DEVICES", "ALERTS")]
        rows += [_row(one) for one in shown[:most]]
        found += ["", *table(rows), *_more(len(shown) + 1 - len(rows))]
    said = [(one.node, one.plugin, problem) for one in shown for problem in one.problems]
    if said:
        problems = [("NODE", "PLUGIN", "PROBLEM"), *said[:most]]
        found += ["", *table(problems), *_more(len(said) + 1 - len(problems))]
    if alerts:
        told = [("FIRING SINCE", "SEVERITY", "KIND", "WHAT")]
        told += [(at(a.starts_at), a.severity, a.kind, a.summary) for a in alerts[:most]]
        found += ["", *table(told), *_more(len(alerts) + 1 - len(told))]
    return found


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns; the last column is as wide as it is."""
    cells = [[plain(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def _is_amiss(advisories: str) -> bool:
    return advisories not in {"", "they come"}


def _verdicts(state: State) -> list[tuple[str, int]]:
    counts = Counter(plain(one.verdict or UNKNOWN) for one in state.plugins)
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _row(one: Plugin) -> tuple[str, str, str, str, str, str]:
    devices = ", ".join(f"{name} {count}" for name, count in sorted(one.devices.items()))
    bad = f"; {len(one.unhealthy)} with something wrong" if one.unhealthy else ""
    verdict = f"{one.verdict or UNKNOWN}{' (in a storm)' if one.frozen else ''}"
    kinds = ", ".join(sorted({alert.kind for alert in one.alerts})) or "-"
    return (one.node, one.plugin, verdict, at(one.since), f"{devices or '-'}{bad}", kinds)


def _more(left: int) -> list[str]:
    return [f"and {left} more; --all shows them"] if left else []


def _place(one: Plugin) -> tuple[bool, str, str]:
    return (one.is_well, one.node, one.plugin)


def _urgency(alert: Alert) -> tuple[int, str, str, str]:
    begun = alert.starts_at.isoformat() if alert.starts_at else ""
    return (_FIRST.get(alert.severity, len(_FIRST)), begun, alert.node, alert.kind)
