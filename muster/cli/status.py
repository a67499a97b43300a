"""Pure: the fleet as the health service sees it: decodes and shows its `/state`.

The command does not import services, so it defines its own structs. Missing keys have defaults and
unknown keys are ignored, so that an older command can read the state of a newer service.
"""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Final

import msgspec

from muster import vocabulary, wording
from muster.cli import texts

_WELL: Final = frozenset({vocabulary.Verdict.HEALTHY.value, vocabulary.Verdict.MAINTENANCE.value})
UNKNOWN: Final = "UNKNOWN"
"""Shown for a plugin that has no verdict yet."""

_SHOWN_MAX: Final = 200
_ADVISORIES_FINE: Final = frozenset({"", "they come", "received"})
_RANK: Final = {severity.value: rank for rank, severity in enumerate(vocabulary.Severity)}


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One observation and its source."""

    source: str = ""
    observed: str = ""


class Alert(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One firing alert."""

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
    """A faulty device."""

    kind: str = ""
    resource: str = ""
    device: str = ""
    why: str = ""


class Plugin(msgspec.Struct, frozen=True, kw_only=True):
    """One plugin on one node; ages are in seconds on health's clock."""

    node: str
    plugin: str
    state: str = ""
    verdict: str | None = None
    since: datetime | None = None
    rule: str = ""
    evidence: tuple[Evidence, ...] = ()
    evidence_age_s: float | None = None
    instance: str = ""
    interval_s: float = 0.0
    beat_age_s: float | None = None
    clock_skew_s: float = 0.0
    is_expected: bool = msgspec.field(default=False, name="expected")
    is_suspended: bool = msgspec.field(default=False, name="frozen")
    resources: tuple[str, ...] = ()
    devices: dict[str, int] = msgspec.field(default_factory=dict)
    allocatable: dict[str, int] = msgspec.field(default_factory=dict)
    """How many of the devices pods may use, according to the node's status."""
    unhealthy: tuple[Device, ...] = ()
    mounts: int = 0
    """The number of FUSE mounts in its inventory."""
    problems: tuple[str, ...] = ()
    alerts: tuple[Alert, ...] = ()
    watched: str = ""
    """The resource or driver of a watched plugin; the next fields are set only for watched plugins.
    """
    agent: str = ""
    """The plugin that observes the watched plugin."""
    is_observed: bool = msgspec.field(default=True, name="observed")
    finding: str = ""
    text: str = ""
    socket: str = ""
    expected_devices: int | None = None
    allocated: int | None = None
    process: str = ""

    @property
    def name(self) -> str:
        """Return the name for people; for a watched plugin, its resource or driver."""
        return f"{self.watched} (watched)" if self.watched else self.plugin

    def is_named(self, name: str) -> bool:
        """Return whether `name` is the name of the plugin or of one of its resources."""
        return name in {self.plugin, self.watched, *self.resources}

    def count(self, resource: str) -> str:
        """Return how many devices of a resource there are; `0 of 20` if pods may not use all."""
        count = self.devices[resource]
        usable = self.allocatable.get(resource, count)
        return f"{usable} of {count}" if usable < count else str(count)

    @property
    def is_well(self) -> bool:
        """Whether the plugin has no problem to show."""
        return self.verdict in _WELL and not (self.alerts or self.is_suspended or self.problems)


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the whole fleet; alerts about `held` plugins are delayed by the rate limit."""

    alerts: tuple[Alert, ...] = ()
    mass_failures: int = msgspec.field(default=0, name="storms")
    suspects: int = 0
    held: int = 0


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """The health service itself; `revision` is its term if it leads."""

    revision: int | None = msgspec.field(default=None, name="leads")
    leader: str | None = None
    is_disconnected: bool = msgspec.field(default=False, name="blind")
    advisories: str = ""
    publishing_problem: str = msgspec.field(default="", name="telling")
    notified: str = ""
    """Why alerts may reach nobody."""
    notifier_alerts: tuple[Alert, ...] = ()
    """The alerts that the notifier itself raises."""
    cluster: str | dict[str, str] = ""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `/state`."""

    plugins: tuple[Plugin, ...]
    fleet: Fleet
    service: Service

    @property
    def alerts(self) -> list[Alert]:
        """Return all firing alerts, the most urgent first, then the oldest."""
        of_plugins = (alert for plugin in self.plugins for alert in plugin.alerts)
        return sorted(
            [*self.fleet.alerts, *self.service.notifier_alerts, *of_plugins], key=_urgency
        )


def decode(body: bytes) -> State:
    """Decode `/state`. Raises ValueError if it is invalid."""
    try:
        return msgspec.json.decode(body, type=State)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None


def at(time: datetime | None) -> str:
    """Return a time in the local time zone."""
    return "-" if time is None else f"{time.astimezone():%Y-%m-%d %H:%M:%S}"


def caveats(state: State) -> list[str]:
    """Return the reasons why the state is incomplete or out of date."""
    service = state.service
    notes = []
    if service.is_disconnected:
        notes.append("health is disconnected from NATS; this is what it last received")
    if service.revision is None:
        leader = service.leader or "unknown"
        notes.append(f"this health service is not the leader ({leader}); alerts are the leader's")
    if state.fleet.mass_failures:
        notes.append("mass failure: many plugins went silent together; verdicts are suspended")
    notes += [service.publishing_problem] if service.publishing_problem else []
    notes += [service.notified] if service.notified else []
    if service.advisories not in _ADVISORIES_FINE:
        notes.append(f"connections: {service.advisories}")
    if isinstance(service.cluster, str):
        notes += [f"Kubernetes: {service.cluster}"] if service.cluster else []
    else:
        notes += [f"Kubernetes: {what}: {why}" for what, why in sorted(service.cluster.items())]
    return [texts.plain(note) for note in notes]


def summary(state: State, *, source: str, everything: bool) -> dict[str, object]:
    """Return the state as one object for programs; healthy plugins only with `everything`."""
    shown = [plugin for plugin in state.plugins if everything or not plugin.is_well]
    return {
        "health": source,
        "service": state.service,
        "plugins_total": len(state.plugins),
        "nodes_total": len({plugin.node for plugin in state.plugins}),
        "verdicts": dict(_verdicts(state)),
        "suspects": state.fleet.suspects,
        "storms": state.fleet.mass_failures,
        "held": state.fleet.held,
        "alerts": state.alerts,
        "plugins": sorted(shown, key=_position),
    }


def lines(state: State, *, source: str, everything: bool) -> list[str]:
    """Return the state for people."""
    most = None if everything else _SHOWN_MAX
    shown = sorted((p for p in state.plugins if everything or not p.is_well), key=_position)
    text = _overview(state, source)
    if shown:
        names = ("NODE", "PLUGIN", "VERDICT", "SINCE", "DEVICES", "ALERTS")
        text += _table(names, [_row(plugin) for plugin in shown], most)
    elif state.plugins and all(p.verdict == vocabulary.Verdict.HEALTHY for p in state.plugins):
        count = len(state.plugins)
        healthy = f"all {count} plugins are" if count > 1 else "the only plugin is"
        text += ["", f"{healthy} HEALTHY; --all lists {'them' if count > 1 else 'it'}"]
    reported = [(p.node, p.name, problem) for p in shown for problem in p.problems]
    if reported:
        text += _table(("NODE", "PLUGIN", "PROBLEM"), reported, most)
    if state.alerts:
        alerts = [(at(a.starts_at), a.severity, a.kind, a.summary) for a in state.alerts]
        text += _table(("FIRING SINCE", "SEVERITY", "KIND", "SUMMARY"), alerts, most)
    return text


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], most: int | None) -> list[str]:
    """Return an empty line and at most `most` aligned rows, then the number of omitted rows."""
    left = len(rows) - len(rows[:most])
    more = [f"and {left} more; --all shows them"] if left else []
    return ["", *texts.aligned([names, *rows[:most]]), *more]


def _overview(state: State, source: str) -> list[str]:
    nodes = wording.counted(len({plugin.node for plugin in state.plugins}), "node")
    counted = ", ".join(f"{count} {verdict}" for verdict, count in _verdicts(state)) or "none"
    fleet = state.fleet
    held = (
        f"; the rate limit holds back alerts about {wording.counted(fleet.held, 'plugin')}"
        if fleet.held
        else ""
    )
    failures = wording.counted(fleet.mass_failures, "mass failure")
    return [
        f"health    {texts.plain(source)}",
        *(f"  note    {note}" for note in caveats(state)),
        f"plugins   {len(state.plugins)} on {nodes}: {counted}",
        f"suspects  {fleet.suspects} silent, {failures}",
        f"alerts    {len(state.alerts)} firing{held}",
    ]


def _verdicts(state: State) -> list[tuple[str, int]]:
    names = sorted(texts.plain(plugin.verdict or UNKNOWN) for plugin in state.plugins)
    return Counter(names).most_common()


def _row(plugin: Plugin) -> tuple[str, str, str, str, str, str]:
    devices = ", ".join(f"{name} {plugin.count(name)}" for name in sorted(plugin.devices))
    if plugin.mounts:
        counted = f"{plugin.mounts} FUSE mount{'s' if plugin.mounts > 1 else ''}"
        devices = f"{devices}, {counted}" if devices else counted
    faulty = f"; {len(plugin.unhealthy)} faulty" if plugin.unhealthy else ""
    verdict = f"{plugin.verdict or UNKNOWN}{' (suspended)' if plugin.is_suspended else ''}"
    verdict += "" if plugin.is_observed else " (not observed)"
    kinds = ", ".join(sorted({alert.kind for alert in plugin.alerts})) or "-"
    devices = f"{devices or '-'}{faulty}"
    return (plugin.node, plugin.name, verdict, at(plugin.since), devices, kinds)


def _position(plugin: Plugin) -> tuple[bool, str, str]:
    return (plugin.is_well, plugin.node, plugin.plugin)


def _urgency(alert: Alert) -> tuple[int, str, str, str]:
    started = alert.starts_at.isoformat() if alert.starts_at else ""
    return (_RANK.get(alert.severity, len(_RANK)), started, alert.node, alert.kind)
