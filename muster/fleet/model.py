"""Pure: the newest known state of a fleet, one summary per node, and what changed, and when.

The only source is health's `/state`, which arrives in pages in the order of the nodes' names, or
for one node. Events change nothing here: an event only makes the reader read its node again. For
each node only a summary and its alerts are kept, because ten thousand nodes in full would take 50
MiB.
"""

import enum
import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import msgspec

from muster import matching, vocabulary
from muster.fleet import health_state, kept_silences, plugin_facts

ALERTS_MAX: Final = 2_000
"""How many alerts are kept in full; others lose evidence, advice, and most pods and devices."""
_REMOVED_MAX: Final = 10_000
_REASON_MAX: Final = 300
PODS_MAX: Final = 16
"""How many of the pods that a node's alerts name are kept in its summary."""
_SILENT_S: Final = 10.0
"""The shown state counts as old if health has not answered for this long."""


class Level(enum.StrEnum):
    """How urgently a person must look at a node; the most urgent level is defined first."""

    CRITICAL = "critical"
    WARNING = "warning"
    UNKNOWN = "unknown"
    NOTICE = "notice"
    """Maintenance, a silenced alert, an alert of severity info, or a doubt about a good verdict."""
    OK = "ok"


_NOWHERE: Final = health_state.Place()
_ORDER: Final = {level: rank for rank, level in enumerate(Level)}
_OF_SEVERITY: Final = {
    vocabulary.Severity.CRITICAL.value: Level.CRITICAL,
    vocabulary.Severity.WARNING.value: Level.WARNING,
    vocabulary.Severity.INFO.value: Level.NOTICE,
}
_OF_VERDICT: Final = {
    vocabulary.Verdict.HEALTHY.value: Level.OK,
    vocabulary.Verdict.MAINTENANCE.value: Level.NOTICE,
}


class NodeSummary(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One line of a list of nodes.

    `plugin` has the worst verdict on the node; among equals, one that hands out no devices is
    preferred. `label` is normally that verdict. It is RECOVERING if the problem has ended,
    SUSPECTED if there is no verdict yet, or the kind of the most urgent alert if the verdict is
    HEALTHY. `since` is the start of the verdict or of that alert. `reason` describes the most
    urgent problem, unescaped, and is empty if there is none. `pods` has the first `PODS_MAX` pods
    that the node's alerts name, those of the most urgent alert first and those of silenced alerts
    last; `pods_total` is the number of all these pods, or the total that one alert reports, if that
    is larger.
    """

    name: str
    level: Level
    verdict: str
    label: str
    plugin: str
    since: datetime | None
    reason: str
    resources: Mapping[str, plugin_facts.Counts]
    alerts: int
    silenced: int
    pods: tuple[str, ...]
    pods_total: int
    pool: str
    zone: str
    revision: int
    """The model's revision at which this summary last changed."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What has changed since a revision; with `is_restart`, everything must be read again."""

    nodes: tuple[NodeSummary, ...] = ()
    removed: tuple[str, ...] = ()
    is_restart: bool = False


class _NodeFacts(msgspec.Struct, frozen=True, gc=False):
    plugins: tuple[plugin_facts.PluginFacts, ...]
    alerts: tuple[health_state.Alert, ...]
    place: health_state.Place


class FleetModel:
    """The state of every node of a fleet."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeSummary] = {}
        """All nodes by name, in the order of their last change."""
        self.revision = 0
        """A number that grows with each change."""
        self.fleet: health_state.Fleet | None = None
        self.service: health_state.Service | None = None
        self.is_complete = False
        """Whether all nodes have been read at least once."""
        self.read_at: float | None = None
        """When health last answered."""
        self._at = datetime.min.replace(tzinfo=UTC)
        """When health last answered, as a date and time."""
        self._failure = ""
        self._began_at: float | None = None
        self._facts: dict[str, _NodeFacts] = {}
        self._removed: dict[str, int] = {}
        self._forgotten = 0
        """Removals up to this revision are no longer known."""
        self._alerts: tuple[int, tuple[health_state.Alert, ...]] = (-1, ())
        self._alerts_total = 0
        self._shared = plugin_facts.Shared()
        self._silences = kept_silences.KeptSilences()
        self._of_fleet: dict[str, list[health_state.Alert]] = {}
        """By node: alerts that belong to no plugin."""

    def receive_page(
        self, page: health_state.State, *, after: str, now: float, at: datetime
    ) -> None:
        """Replace all nodes after `after`, up to `page.next` or, if that is empty, to the end."""
        seen = self._put_plugins(page, at)
        gone = [
            name
            for name in self._facts
            if name > after and (not page.next or name <= page.next) and name not in seen
        ]
        for name in gone:
            self._remove(name)
        self.is_complete = self.is_complete or not page.next
        self._receive_service(page, now, at)

    def receive_node(
        self, page: health_state.State, node: str, *, now: float, at: datetime
    ) -> None:
        """Replace one node."""
        if node not in self._put_plugins(page, at) and node in self._facts:
            self._remove(node)
        self._receive_service(page, now, at)

    def receive_failure(self, problem: str, *, now: float) -> None:
        """Record why health's state could not be read."""
        self._began_at = now if self._began_at is None else self._began_at
        if problem != self._failure:
            self._failure = problem
            self.revision += 1

    def receive_silence(self, key: str, silence: matching.Silence | None, *, at: datetime) -> None:
        """Add, replace or (None) remove a silence."""
        matchers = self._silences.receive(key, silence)
        if not matchers:
            return
        self.revision += 1
        nodes = [matching.values_of(each, "node") for each in matchers]
        # of ten thousand alerts, few are concerned
        for name in set[str]().union(*nodes) & self._facts.keys() if all(nodes) else self._facts:
            facts = self._facts[name]
            labels = [alert.labels for alert in (*facts.alerts, *self._of_fleet.get(name, ()))]
            if any(matching.all_hold(each, of) for of in labels for each in matchers):
                self._summarise(name, at)

    @property
    def silences(self) -> Mapping[str, matching.Silence]:
        """Return the silences by id; if there are too many, only those that end last."""
        return self._silences.by_id

    @property
    def alerts(self) -> tuple[health_state.Alert, ...]:
        """Return all firing alerts, the most urgent first, then the oldest."""
        if self._alerts[0] != self.revision:
            of_plugins = (alert for facts in self._facts.values() for alert in facts.alerts)
            every = sorted([*self._fleet_alerts(), *of_plugins], key=lambda each: each.urgency)
            self._alerts = self.revision, tuple(every)
        return self._alerts[1]

    def changed_since(self, revision: int) -> Changes:
        """Return the changes after a revision, with `is_restart` if they are no longer known."""
        if revision < self._forgotten or revision > self.revision:
            return Changes(is_restart=True)
        return Changes(
            nodes=tuple(
                itertools.takewhile(
                    lambda node: node.revision > revision, reversed(self.nodes.values())
                )
            ),
            removed=tuple(name for name, when in self._removed.items() if when > revision),
        )

    def silence_of(self, alert: health_state.Alert, at: datetime) -> matching.Silence | None:
        """Return the active silence that matches an alert and ends last, or None."""
        return self._silences.silence_of(alert, at)

    def silenced(self, at: datetime) -> int:
        """Return how many alerts are silenced; those of nodes are counted as last summarised."""
        elsewhere = [each for each in self._fleet_alerts() if each.node not in self._facts]
        of_nodes = sum(node.silenced for node in self.nodes.values())
        return of_nodes + sum(self.silence_of(each, at) is not None for each in elsewhere)

    def problem(self, now: float) -> str:
        """Return why the state may be old or incomplete; empty if it is neither."""
        why = f": {self._failure}" if self._failure else ""
        if self.read_at is None:
            if self._began_at is None:
                return "health has not been queried yet"
            return f"health has not answered yet{why}"
        age_s = now - self.read_at
        if age_s < _SILENT_S and not self._failure:
            return "" if self.is_complete else "the nodes are still being read"
        return f"health has not answered for {age_s:.0f} s{why}; this is what it last reported"

    def caveats(self) -> list[str]:
        """Return the reasons why the shown state may be incomplete, from health and this model."""
        notes: list[str] = []
        if self.service is not None and self.fleet is not None:
            state = health_state.State(plugins=(), fleet=self.fleet, service=self.service)
            notes = state.caveats()
        return [*notes, *self._silences.caveats(self._at)]

    def _put_plugins(self, page: health_state.State, at: datetime) -> set[str]:
        """Store the nodes of a page; return their names."""
        by_node: dict[str, list[health_state.Plugin]] = {}
        for plugin in page.plugins:
            by_node.setdefault(plugin.node, []).append(plugin)
        for name, plugins in by_node.items():
            before = self._facts.get(name)
            self._alerts_total -= len(before.alerts) if before else 0
            facts = self._facts_of(plugins, page.places.get(name, _NOWHERE))
            self._alerts_total += len(facts.alerts)
            if facts != before:
                # equal objects would take their memory twice
                self._facts[name] = facts
            self._removed.pop(name, None)
            self._summarise(name, at)
        return set(by_node)

    def _facts_of(
        self, plugins: Collection[health_state.Plugin], place: health_state.Place
    ) -> _NodeFacts:
        every = [alert for plugin in plugins for alert in plugin.alerts]
        room = max(0, ALERTS_MAX - self._alerts_total)
        alerts = [*every[:room], *map(_shortened, every[room:])]
        facts = tuple(plugin_facts.of(plugin, self._shared) for plugin in plugins)
        return _NodeFacts(facts, tuple(alerts), place)

    def _receive_service(self, page: health_state.State, now: float, at: datetime) -> None:
        self.read_at, self._at = now, at
        if (page.fleet, page.service) == (self.fleet, self.service) and not self._failure:
            return
        self.fleet, self.service, self._failure = page.fleet, page.service, ""
        self.revision += 1
        before, self._of_fleet = self._of_fleet, {}
        for alert in self._fleet_alerts():
            self._of_fleet.setdefault(alert.node, []).append(alert)
        for name in (before.keys() | self._of_fleet.keys()) & self._facts.keys():
            self._summarise(name, at)

    def _fleet_alerts(self) -> tuple[health_state.Alert, ...]:
        of_fleet = self.fleet.alerts if self.fleet else ()
        of_notifier = self.service.notifier_alerts if self.service else ()
        return (*of_fleet, *of_notifier)

    def _remove(self, name: str) -> None:
        self._alerts_total -= len(self._facts.pop(name).alerts)
        del self.nodes[name]
        self.revision += 1
        self._removed[name] = self.revision
        if len(self._removed) > _REMOVED_MAX:
            oldest = next(iter(self._removed))
            self._forgotten = self._removed.pop(oldest)

    def _summarise(self, name: str, at: datetime) -> None:
        """Compute a node's summary again, and note if it has changed."""
        facts = self._facts[name]
        alerts = [*facts.alerts, *self._of_fleet.get(name, ())]
        is_silenced = [self.silence_of(alert, at) is not None for alert in alerts]
        loud = [a for a, silenced in zip(alerts, is_silenced, strict=True) if not silenced]
        worst = min(facts.plugins, key=_urgency)
        level = _level(facts.plugins, loud, has_silenced=any(is_silenced))
        urgent = min(loud, key=_alert_urgency, default=None)
        pods = _pods(alerts, is_silenced)
        is_well, before = _OF_VERDICT.get(worst.verdict) is Level.OK, self.nodes.get(name)
        resources = facts.plugins[0].resources
        for plugin in facts.plugins[1:]:
            resources = plugin_facts.merged(resources, plugin.resources)
        summary = NodeSummary(
            name=name,
            level=level,
            verdict=worst.verdict,
            label=urgent.kind.upper() if urgent and is_well else worst.label,
            plugin=worst.name,
            since=urgent.starts_at if urgent and is_well else worst.since,
            reason=(urgent.reason if urgent else worst.reason)[:_REASON_MAX],
            resources=resources,
            alerts=len(alerts),
            silenced=sum(is_silenced),
            pods=pods[:PODS_MAX],
            pods_total=max([len(pods), *(alert.pods_total for alert in alerts)]),
            pool=facts.place.pool,
            zone=facts.place.zone,
            revision=before.revision if before else 0,
        )
        if summary != before:
            self.revision += 1
            # the order of the nodes is the order of their changes
            self.nodes.pop(name, None)
            self.nodes[name] = msgspec.structs.replace(summary, revision=self.revision)


def _urgency(plugin: plugin_facts.PluginFacts) -> tuple[int, bool, bool, str]:
    """Return the key for sorting the plugins of a node, the worst first."""
    is_recovering = plugin.label == health_state.RECOVERING
    return (_ORDER[_verdict_level(plugin)], is_recovering, plugin.is_confirmed, plugin.name)


def _alert_urgency(alert: health_state.Alert) -> tuple[bool, tuple[str | int, ...]]:
    """Return the key for sorting the alerts of a node, the most urgent first."""
    return alert.recovery is not None, alert.urgency


def _pods(alerts: Iterable[health_state.Alert], is_silenced: Iterable[bool]) -> tuple[str, ...]:
    """Return the pods that alerts name, each once, those of the most urgent alert first."""
    ranked = sorted(
        zip(is_silenced, alerts, strict=True), key=lambda each: (each[0], _alert_urgency(each[1]))
    )
    return tuple(dict.fromkeys(pod for _, alert in ranked for pod in alert.pods))


def _shortened(alert: health_state.Alert) -> health_state.Alert:
    return msgspec.structs.replace(
        alert, evidence=(), advice="", devices=alert.devices[:2], pods=alert.pods[:1]
    )


def _verdict_level(plugin: plugin_facts.PluginFacts) -> Level:
    if not plugin.verdict:
        return Level.UNKNOWN
    level = _OF_VERDICT.get(plugin.verdict, Level.WARNING)
    return Level.NOTICE if level is Level.OK and plugin.reason else level


def _level(
    plugins: Iterable[plugin_facts.PluginFacts],
    alerts: Iterable[health_state.Alert],
    *,
    has_silenced: bool,
) -> Level:
    """Return the level of a node; a verdict whose alerts are all silenced is only a notice."""
    levels = [_OF_SEVERITY.get(alert.severity, Level.WARNING) for alert in alerts]
    for plugin in plugins:
        level = _verdict_level(plugin)
        is_acknowledged = level is Level.WARNING and has_silenced and not levels
        levels.append(Level.NOTICE if is_acknowledged else level)
    if has_silenced:
        levels.append(Level.NOTICE)
    return min(levels, key=_ORDER.__getitem__, default=Level.UNKNOWN)
