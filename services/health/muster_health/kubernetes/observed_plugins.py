"""Pure: derives observations about plugins from the objects in the Kubernetes API.

Only a state that certainly makes pods fail becomes a finding.
"""

from collections.abc import Iterable
from typing import Final

from muster import vocabulary
from muster.kubernetes import driver_findings, plugin_findings
from muster.kubernetes.plugin_facts import Facts, Kind, Level, NodeFacts, PluginFinding
from muster.vocabulary import WatchedFinding, WatchedKind
from muster_health.model import signals

_FINDINGS: Final = {
    Kind.LOST: WatchedFinding.NOT_REGISTERED,
    Kind.NONE: WatchedFinding.NOT_REGISTERED,
    Kind.NEVER: WatchedFinding.NOT_OFFERED,
    Kind.POD: WatchedFinding.NOT_SERVED,
    Kind.NO_DRIVER: WatchedFinding.NOT_SERVED,
    Kind.NO_SLICE: WatchedFinding.FEWER_DEVICES,
    Kind.POOL: WatchedFinding.FEWER_DEVICES,
    Kind.OFFERED_TWICE: WatchedFinding.TWO_SERVERS,
}
"""The findings to publish, by kind; the omitted kinds are about pods, or uncertain."""
_PREPARE: Final = {
    driver_findings.Cause.UNREGISTERED: WatchedFinding.NOT_REGISTERED,
    driver_findings.Cause.SLOW: WatchedFinding.NO_ANSWER,
    driver_findings.Cause.UNSERVED: WatchedFinding.NOT_SERVED,
}
_DRIVER_KINDS: Final = frozenset({Kind.NO_DRIVER, Kind.NO_SLICE, Kind.POOL, Kind.PREPARE})
_TEXT_MAX: Final = 2048
_NAME_MAX: Final = 253

Place = tuple[str, str]
"""The names of a node, and of a resource or driver."""


class ObservedPlugins:
    """Stores the last observations, so that temporary states are not passed on.

    A finding is passed on if the previous round had it, too. The end of a finding is passed on only
    once.
    """

    def __init__(self) -> None:
        self._open: set[Place] = set()
        self._seen: set[Place] = set()
        self._has_observed = False

    def forget(self) -> None:
        """Discard all observations, because another replica may lead in the meantime."""
        self._open.clear()
        self._seen.clear()
        self._has_observed = False

    def observe(self, facts: Facts) -> list[signals.ClusterObserved]:
        """Return the lasting findings, and the plugins whose findings have ended.

        In the first round, every working plugin is returned as if its finding had ended.
        """
        current = dict(_observed(facts))
        lasting = {place: current[place] for place in current if place in self._seen | self._open}
        candidates = self._open if self._has_observed else set(_served(facts))
        doubtful = {(each.node, each.name) for each in _findings(facts)} | current.keys()
        fine = {place for place in candidates - doubtful if _is_fine(facts, *place)}
        self._seen = set(current)
        self._open = (self._open | lasting.keys()) - fine
        self._has_observed = True
        return [
            *(
                signals.ClusterObserved(node=node, watched=watched)
                for (node, _), watched in sorted(lasting.items(), key=_place)
            ),
            *(
                signals.ClusterObserved(node=node, watched=vocabulary.Watched(name=name))
                for node, name in sorted(fine)
            ),
        ]


def _place(item: tuple[Place, vocabulary.Watched]) -> Place:
    return item[0]


def _findings(facts: Facts) -> tuple[PluginFinding, ...]:
    return (*plugin_findings.evaluate(facts), *driver_findings.evaluate(facts))


def _is_fine(facts: Facts, node: str, name: str) -> bool:
    """Return whether a resource or driver without a finding works, or is gone; False if unsure."""
    if node not in facts.nodes:
        return True
    offer = facts.nodes[node].offers.get(name)
    return facts.nodes[node].is_settled and (offer is None or offer.allocatable > 0)


def _observed(facts: Facts) -> Iterable[tuple[Place, vocabulary.Watched]]:
    """Yield at most one finding for each plugin, and at most `WATCHED_MAX` for each node."""
    seen: dict[str, set[str]] = {}
    for each in _findings(facts):
        node = facts.nodes.get(each.node)
        if each.level is not Level.ERROR or node is None or not node.is_settled:
            continue
        for watched in _watched(each, node):
            names = seen.setdefault(node.name, set())
            if watched.name in names or len(names) >= vocabulary.WATCHED_MAX:
                continue
            names.add(watched.name)
            yield (node.name, watched.name), watched


def _watched(each: PluginFinding, node: NodeFacts) -> Iterable[vocabulary.Watched]:
    """Yield an observation for each resource or driver that a finding concerns."""
    if each.kind is Kind.PREPARE:
        finding = _PREPARE.get(driver_findings.cause(each.evidence[0]))
    else:
        finding = _FINDINGS.get(each.kind)
    if finding is None:
        return
    names = [each.name]
    if each.kind is Kind.POD:
        plugins = [p.plugin for p in node.plugins if p.pod.full_name == each.pod]
        unusable = [name for name, offer in node.offers.items() if not offer.allocatable]
        names = [name for name in unusable if any(plugin.serves(name) for plugin in plugins)]
    kind = WatchedKind.DRA_DRIVER if each.kind in _DRIVER_KINDS else WatchedKind.DEVICE_PLUGIN
    text = "; ".join((each.text, *each.evidence))[:_TEXT_MAX]
    for name in names:
        offer = node.offers.get(name)
        if 0 < len(name) <= _NAME_MAX and "*" not in name and ", " not in name:
            yield vocabulary.Watched(
                name=name,
                kind=kind,
                finding=finding,
                text=text,
                listed=offer.allocatable if offer else None,
            )


def _served(facts: Facts) -> Iterable[Place]:
    """Yield the resources and drivers that known plugins serve, at most `WATCHED_MAX` per node."""
    drivers: dict[str, set[str]] = {}
    for entry in facts.view.slices or ():
        drivers.setdefault(entry.spec.node_name, set()).add(entry.spec.driver)
    for node in facts.nodes.values():
        names = {*node.offers, *drivers.get(node.name, ())}
        for name in sorted(names)[: vocabulary.WATCHED_MAX]:
            if node.serving(name, 0.0) is not None:
                yield node.name, name
