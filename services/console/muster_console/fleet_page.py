"""Pure: the page of the fleet: counts by level, the worst nodes, and what changed last."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final

import msgspec

from muster.fleet import model
from muster_console import alert_history, event_log

PROBLEMS_MAX: Final = 20
_NEWS_MAX: Final = 8
_WORDS_MAX: Final = 8
_GROUPINGS: Final = ("pool", "zone", "resource", "none")
_RANK: Final = {level: rank for rank, level in enumerate(model.Level)}


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """The filter in the page's address."""

    levels: frozenset[model.Level] = frozenset()
    words: tuple[str, ...] = ()
    by: str = ""

    def shows(self, node: model.NodeSummary) -> bool:
        """Return whether a node is to be shown."""
        if self.levels and node.level not in self.levels:
            return False
        if not self.words:
            return True
        words = (node.name, node.label, node.pool, node.zone, *node.resources, *node.pods)
        text = " ".join(words).lower()
        return all(word in text for word in self.words)


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One node in the list of problems, with the reason."""

    node: model.NodeSummary
    why: str
    since: datetime | None


class FleetPage(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the page of the fleet shows, except the cells."""

    nodes: int
    shown: int
    levels: tuple[tuple[model.Level, int], ...]
    problems: tuple[Problem, ...]
    problems_total: int
    news: tuple[event_log.Entry, ...]
    last_resolved: alert_history.Resolved | None
    alerts: int
    grouping: str
    groupings: tuple[str, ...]


def filter_of(query: Mapping[str, str]) -> Filter:
    """Return the filter in a query; unknown parameters are ignored."""
    levels = {level for level in model.Level if level.value in query.get("level", "").split(",")}
    by = query.get("by", "")
    return Filter(
        levels=frozenset(levels),
        words=words(query.get("q", "")),
        by=by if by in _GROUPINGS else "",
    )


def words(text: str) -> tuple[str, ...]:
    """Return the words to search for, in lower case."""
    return tuple(text.lower().split()[:_WORDS_MAX])


def page(
    fleet: model.FleetModel,
    history: alert_history.AlertHistory,
    log: event_log.EventLog,
    *,
    wanted: Filter,
    at: datetime,
) -> FleetPage:
    """Return the page of the fleet."""
    nodes = fleet.nodes.values()
    shown = [node for node in nodes if wanted.shows(node)]
    # with a filter by level, nodes without a problem are listed as well
    listed = [n for n in shown if wanted.levels or n.level is not model.Level.OK]
    listed.sort(key=lambda node: (_RANK[node.level], -_since(node), node.name))
    began: dict[str, datetime | None] = {}
    for alert in fleet.alerts:
        began.setdefault(alert.node, alert.starts_at)
    counts = Counter(node.level for node in nodes)
    resolved = history.resolved(at)
    return FleetPage(
        nodes=len(nodes),
        shown=len(shown),
        levels=tuple((level, counts[level]) for level in model.Level),
        problems=tuple(_problem(n, began.get(n.name)) for n in listed[:PROBLEMS_MAX]),
        problems_total=len(listed),
        news=tuple(_news(log)),
        last_resolved=resolved[0] if resolved else None,
        alerts=len(fleet.alerts),
        grouping=wanted.by or _grouping(nodes),
        groupings=_GROUPINGS,
    )


def _problem(node: model.NodeSummary, began: datetime | None) -> Problem:
    return Problem(node=node, why=why(node), since=began or node.since)


def why(node: model.NodeSummary) -> str:
    """Return a node's problem in one sentence, or that no alert fires."""
    if node.reason:
        return node.reason
    if node.silenced:
        return "its alerts are silenced"
    if node.level is model.Level.UNKNOWN:
        return "health has no verdict about it yet"
    return "no alert fires"


def _news(log: event_log.EventLog) -> Sequence[event_log.Entry]:
    recent = log.newest(event_log.Filter(), most=event_log.EVENTS_MAX)
    return [entry for entry in recent if entry.is_news][:_NEWS_MAX]


def _since(node: model.NodeSummary) -> float:
    return node.since.timestamp() if node.since else 0.0


def _grouping(nodes: Iterable[model.NodeSummary]) -> str:
    """Return the default grouping: by pool if one is known, else by zone, else none."""
    has_zone = False
    for node in nodes:
        if node.pool:
            return "pool"
        has_zone = has_zone or bool(node.zone)
    return "zone" if has_zone else "none"
