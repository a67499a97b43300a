"""Pure: What each plugin last reported, how each node stands, and what was last told about it."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

from muster import codec, vocabulary
from muster_labeler import model
from muster_labeler.naming import node_labels, sources
from muster_labeler.service import all_or_nothing, decisions

_SHARED_MAX: Final = 4096
_SKEW: Final = timedelta(minutes=1)
_LONG_AGO: Final = datetime.fromtimestamp(0, UTC)
_NOTHING: Final = vocabulary.InventoryReported(node="any", plugin="any", at=_LONG_AGO, devices=())


class View(msgspec.Struct, frozen=True, kw_only=True):
    """One node as `/state` shows it."""

    gpus: int
    action: decisions.Action | None
    labels: Mapping[str, str]
    reason: str
    is_waiting: bool


class Fleet:
    """The nodes with GPUs, by name.

    While it `is_blind`, the cluster's nodes are not known, and those that are reported count as
    there.
    """

    def __init__(
        self, rules: decisions.Rules, *, aliases: Mapping[str, str], is_blind: bool = False
    ) -> None:
        self.is_blind = is_blind
        self._rules = rules
        self._aliases = aliases
        # every detail of them is needed for these labels alone
        self._keeps_gpus = node_labels.LabelSet.NVIDIA in rules.policy.labels
        self._events: dict[str, dict[str, codec.CloudEvent]] = {}
        self._reports: dict[str, dict[str, decisions.Report]] = {}
        self._nodes: dict[str, model.Node] = {}
        self._told: dict[str, decisions.Decision] = {}
        self._waiting: dict[str, tuple[str, str]] = {}
        """For what cause each was looked at, and what it waits for."""
        self._held: dict[str, tuple[str, str]] = {}
        """The same of those that wait for all others, and need not be tried again till then."""
        self._denied: dict[str, str] = {}
        self._guard = all_or_nothing.Guard()
        self.heard = 0
        """How many inventories were taken; the same number, the same `reported`."""

    def take(self, event: codec.CloudEvent) -> bool:
        """Take a plugin's inventory; False if it says nothing newer than what is known."""
        inventory = event.data
        assert isinstance(inventory, vocabulary.InventoryReported), f"{event.type}: no inventory"
        events = self._events.setdefault(inventory.node, {})
        known = events.get(inventory.plugin)
        if known is not None and not known.precedes(event):
            return False
        node = self._nodes.get(inventory.node)
        if node is not None and _is_of_another(event, node):
            return False
        self.heard += 1
        events[inventory.plugin] = _place(event)
        gpus = inventory.gpus
        if gpus is not None and gpus.problem and not gpus.gpus:
            # none could be read; that does not mean that there are none
            return True
        if gpus is not None:
            report = _shared_report(
                tuple(decisions.kinds_of(gpus).items()), gpus.simulated and bool(gpus.gpus)
            )
            if self._keeps_gpus:
                report = dataclasses.replace(report, gpus=gpus)
            self._reports.setdefault(inventory.node, {})[inventory.plugin] = report
        else:
            self._reports.get(inventory.node, {}).pop(inventory.plugin, None)
        self._look(inventory.node)
        return True

    def put(self, node: model.Node) -> bool:
        """Take a node as it is now; False if nothing that matters changed."""
        known = self._nodes.get(node.name)
        if known is not None and _is_older(node, known):
            # the watch has not come to what we read back
            return False
        if known is not None and known.uid != node.uid:
            # deleted and made again, and nobody told us
            self.drop(node.name)
            known = None
        self._nodes[node.name] = node
        self._forget_others(node)
        if known is not None and _alike(known, node):
            return False
        self._look(node.name)
        return True

    def written(self, before: model.Node, now: model.Node) -> None:
        """Take a node as it was read back, unless it was heard of since: it may be another one."""
        if self._nodes.get(now.name) is before:
            self.put(now)

    def replace(self, nodes: Iterable[model.Node]) -> list[str]:
        """Take all nodes there are; return the names of those that changed or went."""
        there = {node.name: node for node in nodes}
        gone = [name for name in self._nodes if name not in there]
        for name in gone:
            self.drop(name)
        return [name for name, node in there.items() if self.put(node)]

    def drop(self, name: str) -> None:
        """Take that a node is gone, with its GPUs: what comes again by that name is another."""
        for kept in (self._nodes, self._told, self._waiting, self._held, self._denied):
            kept.pop(name, None)
        self._events.pop(name, None)
        self._reports.pop(name, None)
        self.heard += 1
        self._guard.update(name, None)

    def report(self, name: str) -> decisions.Report:
        """Return the GPUs of a node, whichever of its plugins reported them."""
        found = list(self._reports.get(name, {}).values())
        if len(found) <= 1:
            return found[0] if found else decisions.NO_REPORT
        kinds: dict[sources.Product, int] = {}
        for one in found:
            for product, count in one.kinds.items():
                kinds[product] = kinds.get(product, 0) + count
        gpus = next((one.gpus for one in found if one.gpus and one.gpus.gpus), None)
        is_simulated = any(one.is_simulated for one in found)
        return decisions.Report(kinds=kinds, is_simulated=is_simulated, gpus=gpus)

    def standing(self, name: str) -> node_labels.Standing | None:
        """Return how a node stands; None if there is no such node in the cluster."""
        node = self._nodes.get(name)
        if node is None:
            if not self.is_blind:
                return None
            node = model.Node(name=name)
        agents = {name: self.report(name).kinds} if self._reports.get(name) else {}
        return node_labels.standing(node, sources.Views(agents, {}, self._aliases))

    def objection(self) -> str | None:
        """Return why nothing may be labelled that has no label yet, or None."""
        return self._guard.objection()

    def covering(self) -> str | None:
        """Return the key of another scheme that makes ours needless, if there is one."""
        return self._guard.covering()

    def settle(
        self, node: str, decision: decisions.Decision, *, cause: str, may_pass: bool = False
    ) -> bool:
        """Note a decision that was carried out; True if it is news.

        A write is always news; a suggestion or refusal once, until something else is true of the
        node. A node that waits is tried again, for the same `cause`; so is, less often, one of
        which the refusal `may_pass`, such as a right that is missing.
        """
        self._waiting.pop(node, None)
        self._denied.pop(node, None)
        self._held.pop(node, None)
        if decision.action is decisions.Action.WAIT:
            self._waiting[node] = (cause, decision.reason)
            return False
        if decision.action is decisions.Action.HOLD:
            self._held[node] = (cause, decision.reason)
            return False
        if may_pass:
            self._denied[node] = cause
        told = self._told.get(node)
        is_write = decision.action in {decisions.Action.APPLY, decisions.Action.WITHDRAW}
        if (
            decision.action is decisions.Action.NOTHING
            and told is not None
            and told.action in {decisions.Action.APPLY, decisions.Action.WITHDRAW}
            and told.labels == decision.labels
        ):
            # what we wrote is there
            return False
        self._told[node] = _shared_decision(
            decision.action,
            tuple(decision.labels.items()),
            decision.reason,
            decision.source,
            decision.drop,
        )
        return is_write or told != decision

    def waiting(self) -> dict[str, str]:
        """Return the nodes that are to be tried again, and for what cause."""
        return {node: cause for node, (cause, _) in self._waiting.items()}

    def held(self) -> dict[str, str]:
        """Return the nodes that wait until all can be labelled, and for what cause."""
        return {node: cause for node, (cause, _) in self._held.items()}

    def denied(self) -> dict[str, str]:
        """Return the nodes that the API refused to have labelled, and for what cause."""
        return dict(self._denied)

    def names(self) -> list[str]:
        """Return every node that is known, from the cluster or from reports."""
        return sorted(self._nodes.keys() | self._reports.keys())

    def reported(self) -> tuple[dict[str, sources.Kinds], frozenset[str]]:
        """Return the GPUs by node, and which are simulated, for the commands."""
        kinds = {
            name: self.report(name).kinds
            for name, found in self._reports.items()
            if found and (self.is_blind or name in self._nodes)
        }
        kinds = {name: found for name, found in kinds.items() if found}
        return kinds, frozenset(name for name in kinds if self.report(name).is_simulated)

    def view(self) -> dict[str, View]:
        """Return every node of which something is known as it stands."""
        views = {}
        waiting = {**self._waiting, **self._held}
        for node in sorted(self._reports.keys() | self._told.keys() | waiting.keys()):
            told = self._told.get(node)
            waits_for = waiting.get(node, ("", ""))[1]
            views[node] = View(
                gpus=sum(self.report(node).kinds.values()),
                action=told.action if told else None,
                labels=told.labels if told else {},
                reason=waits_for or (told.reason if told else ""),
                is_waiting=node in waiting,
            )
        return views

    def _look(self, name: str) -> None:
        one = self.standing(name)
        may_label = one is not None and decisions.may_label(one, self._rules, self.report(name))
        self._guard.update(name, one, may_label=may_label)

    def _forget_others(self, node: model.Node) -> None:
        """Let go what was reported of a former node of this name."""
        events = self._events.get(node.name, {})
        for plugin in [name for name, event in events.items() if _is_of_another(event, node)]:
            del events[plugin]
            self._reports.get(node.name, {}).pop(plugin, None)


def _place(event: codec.CloudEvent) -> codec.CloudEvent:
    """Return what orders an event among others, without what ten thousand would keep in vain."""
    return msgspec.structs.replace(event, id="", type="", boot="", data=_NOTHING)


def _is_of_another(event: codec.CloudEvent, node: model.Node) -> bool:
    """Tell whether an inventory is of a former node of this name; clocks may differ a little."""
    return node.created is not None and event.time < node.created - _SKEW


@functools.lru_cache(maxsize=_SHARED_MAX)
def _shared_decision(
    action: decisions.Action,
    labels: tuple[tuple[str, str], ...],
    reason: str,
    source: str,
    drop: frozenset[str],
) -> decisions.Decision:
    """Return the same decision for all nodes of which it is taken."""
    return decisions.Decision(action, dict(labels), reason, source, drop)


@functools.lru_cache(maxsize=_SHARED_MAX)
def _shared_report(
    kinds: tuple[tuple[sources.Product, int], ...],
    is_simulated: bool,  # noqa: FBT001  # a cache tells arguments by their order
) -> decisions.Report:
    """Return the same report for all nodes with the same GPUs."""
    return decisions.Report(kinds=dict(kinds), is_simulated=is_simulated)


def _is_older(one: model.Node, other: model.Node) -> bool:
    """Tell whether a sight of the same node is older; versions of one resource are ordered."""
    is_known = one.version.isdecimal() and other.version.isdecimal() and one.uid == other.uid
    return is_known and int(one.version) < int(other.version)


def _alike(one: model.Node, other: model.Node) -> bool:
    """Tell whether two sights of a node differ in nothing that decides a label."""
    return (
        one.uid == other.uid
        and one.labels == other.labels
        and one.ours == other.ours
        and one.owners == other.owners
        and one.told_of == other.told_of
        and one.is_selected == other.is_selected
        and one.accelerators == other.accelerators
    )
