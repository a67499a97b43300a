"""Pure: the nodes of the cluster, the plugins' reports, and the last decision about each node."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

from muster import codec, vocabulary
from muster_labeler import config, model
from muster_labeler.naming import node_labels, sources
from muster_labeler.service import decisions, limits

_SHARED_MAX: Final = 4096
_WAITING: Final = frozenset({decisions.Action.WAIT, decisions.Action.HOLD})
_WRITES: Final = frozenset({decisions.Action.APPLY, decisions.Action.WITHDRAW})
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
    """The nodes of the cluster by name, with the plugins' reports and the last decisions.

    While `are_nodes_unknown` is true, the nodes of the cluster have not been listed, and every node
    that a plugin reports counts as existing.
    """

    def __init__(self, settings: config.Settings, *, are_nodes_unknown: bool = False) -> None:
        self.are_nodes_unknown = are_nodes_unknown
        self._settings = settings
        # only these labels need every detail of the GPUs
        self._keeps_gpus = node_labels.LabelSet.NVIDIA in settings.policy.labels
        self._events: dict[str, dict[str, codec.CloudEvent]] = {}
        self._reports: dict[str, dict[str, decisions.Report]] = {}
        self._nodes: dict[str, model.Node] = {}
        self._unread: dict[str, None] = {}
        """New nodes; their plugins may have reported before the API showed the nodes."""
        self._decided: dict[str, decisions.Decision] = {}
        self._pending: dict[str, tuple[decisions.Action, str, str]] = {}
        """The pending action of each node, the cause of its decision, and the reason.

        WAIT waits for a retry, HOLD until all nodes can be labelled, REFUSE for a permission.
        """
        self._all_or_nothing = decisions.AllOrNothing()
        self.inventory_version = 0
        """Increases whenever the result of `reported` may have changed."""

    def refusal(self, node: str, plugin: str) -> limits.Refusal | None:
        """Return why a plugin's inventories are ignored; None if they are accepted."""
        if not self.are_nodes_unknown and node not in self._nodes:
            return limits.Refusal.UNKNOWN_NODE
        plugins = self._events.get(node)
        if plugins is None:
            is_full = len(self._events) >= limits.NODES_MAX and node not in self._nodes
            return limits.Refusal.TOO_MANY_NODES if is_full else None
        if plugin not in plugins and len(plugins) >= vocabulary.PLUGINS_MAX:
            return limits.Refusal.TOO_MANY_PLUGINS
        return None

    def observe_inventory(self, event: codec.CloudEvent) -> bool:
        """Store a plugin's inventory; return False if it is refused or outdated.

        The time that this takes does not depend on the number of nodes.
        """
        inventory = event.data
        assert isinstance(inventory, vocabulary.InventoryReported), f"{event.type}: no inventory"
        if self.refusal(inventory.node, inventory.plugin) is not None:
            return False
        events = self._events.setdefault(inventory.node, {})
        newest = events.get(inventory.plugin)
        if newest is not None and not newest.precedes(event):
            return False
        node = self._nodes.get(inventory.node)
        if node is not None and _predates(event, node):
            return False
        self.inventory_version += 1
        events[inventory.plugin] = _ordering(event)
        self._unread.pop(inventory.node, None)
        gpus = inventory.gpus
        if gpus is not None and gpus.problem and not gpus.gpus:
            # GPUs could not be read, which does not mean that there are none
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
        self._update_all_or_nothing(inventory.node)
        return True

    def put(self, node: model.Node) -> bool:
        """Store the current state of a node; return False if nothing relevant changed."""
        before = self._nodes.get(node.name)
        if before is not None and _is_older(node, before):
            # the watch lags behind the node that was read back after a write
            return False
        if before is not None and before.uid != node.uid:
            # the node was deleted and created again, but the watch missed it
            self.drop(node.name)
            before = None
        self._nodes[node.name] = node
        self._forget_earlier(node)
        if before is None and not self._events.get(node.name):
            self._unread[node.name] = None
        if before is not None and _is_alike(before, node):
            return False
        self._update_all_or_nothing(node.name)
        return True

    def put_written(self, before: model.Node, now: model.Node) -> None:
        """Store a node read back after a write, unless a newer version was stored meanwhile."""
        if self._nodes.get(now.name) is before:
            self.put(now)

    def replace(self, nodes: Iterable[model.Node]) -> list[str]:
        """Replace all nodes with those that exist; return the names of new and changed nodes."""
        present = {node.name: node for node in nodes}
        gone = [name for name in self._nodes.keys() | self._events.keys() if name not in present]
        for name in gone:
            self.drop(name)
        return [name for name, node in present.items() if self.put(node)]

    def take_unread(self) -> list[str]:
        """Return the nodes added since the last call for which no plugin's report was read yet."""
        unread = list(self._unread)
        self._unread.clear()
        return unread

    def drop(self, name: str) -> None:
        """Forget a node and its GPUs; a later node of the same name is a different node."""
        self._unread.pop(name, None)
        self._nodes.pop(name, None)
        self._decided.pop(name, None)
        self._pending.pop(name, None)
        self._events.pop(name, None)
        self._reports.pop(name, None)
        self.inventory_version += 1
        self._all_or_nothing.update(name, None)

    def report(self, name: str) -> decisions.Report:
        """Return the GPUs of a node, from the reports of all its plugins."""
        reports = list(self._reports.get(name, {}).values())
        if len(reports) <= 1:
            return reports[0] if reports else decisions.NO_REPORT
        kinds: dict[sources.Product, int] = {}
        for report in reports:
            for product, count in report.kinds.items():
                kinds[product] = kinds.get(product, 0) + count
        gpus = next((report.gpus for report in reports if report.gpus and report.gpus.gpus), None)
        is_simulated = any(report.is_simulated for report in reports)
        return decisions.Report(kinds=kinds, is_simulated=is_simulated, gpus=gpus)

    def status(self, name: str) -> node_labels.LabelStatus | None:
        """Return how a node is labelled; None if there is no such node in the cluster."""
        node = self._nodes.get(name)
        if node is None:
            if not self.are_nodes_unknown:
                return None
            node = model.Node(name=name)
        agents = {name: self.report(name).kinds} if self._reports.get(name) else {}
        return node_labels.label_status(node, sources.Evidence(agents, {}, self._settings.aliases))

    def objection(self) -> str | None:
        """Return why no node without a label may be labelled, or None."""
        return self._all_or_nothing.objection()

    def covering_scheme(self) -> str | None:
        """Return the key of another scheme that makes SkyPilot's label unnecessary, if any."""
        return self._all_or_nothing.covering_scheme()

    def record_decision(
        self, node: str, decision: decisions.Decision, *, cause: str, is_retriable: bool = False
    ) -> bool:
        """Store a decision that was carried out; return whether to publish it.

        A write is always published; a suggestion or a refusal is not published twice in a row.
        `cause` is kept for the retry of a node that waits. A refusal that `is_retriable`, such as a
        missing permission, is retried less often.
        """
        self._pending.pop(node, None)
        is_waiting = decision.action in _WAITING
        if is_waiting or is_retriable:
            self._pending[node] = decision.action, cause, decision.reason
        if is_waiting:
            return False
        before = self._decided.get(node)
        if self._is_read_back(node, decision):
            return False
        self._decided[node] = _shared_decision(
            decision.action,
            tuple(decision.labels.items()),
            decision.reason,
            decision.source,
            decision.drop,
        )
        return decision.action in _WRITES or before != decision

    def is_news(self, node: str, decision: decisions.Decision) -> bool:
        """Return whether a decision that neither writes nor waits differs from the last one."""
        is_quiet = decision.action in _WAITING | _WRITES or self._is_read_back(node, decision)
        return not is_quiet and self._decided.get(node) != decision

    def pending(self, action: decisions.Action) -> dict[str, str]:
        """Return the nodes with this pending action, each with its cause.

        WAIT nodes are retried; HOLD nodes wait until all nodes can be labelled; for REFUSE nodes
        the API refused the label.
        """
        return {node: cause for node, (of, cause, _) in self._pending.items() if of is action}

    def names(self) -> list[str]:
        """Return the name of every node in the cluster or in a plugin's report."""
        return sorted(self._nodes.keys() | self._reports.keys())

    def reported(self) -> tuple[dict[str, sources.Kinds], frozenset[str]]:
        """Return the GPUs by node, and which nodes are simulated, for the commands."""
        kinds = {
            name: self.report(name).kinds
            for name, reports in self._reports.items()
            if reports and (self.are_nodes_unknown or name in self._nodes)
        }
        kinds = {name: gpus for name, gpus in kinds.items() if gpus}
        return kinds, frozenset(name for name in kinds if self.report(name).is_simulated)

    def view(self) -> dict[str, View]:
        """Return every node with a report or a decision, as `/state` shows it."""
        views = {}
        waiting = {node: why for node, (of, _, why) in self._pending.items() if of in _WAITING}
        for node in sorted(self._reports.keys() | self._decided.keys() | waiting.keys()):
            decision = self._decided.get(node)
            waits_for = waiting.get(node, "")
            views[node] = View(
                gpus=sum(self.report(node).kinds.values()),
                action=decision.action if decision else None,
                labels=decision.labels if decision else {},
                reason=waits_for or (decision.reason if decision else ""),
                is_waiting=node in waiting,
            )
        return views

    def _is_read_back(self, node: str, decision: decisions.Decision) -> bool:
        """Return whether nothing is to be done because the written labels are on the node."""
        before = self._decided.get(node)
        return (
            decision.action is decisions.Action.NOTHING
            and before is not None
            and before.action in _WRITES
            and before.labels == decision.labels
        )

    def _update_all_or_nothing(self, name: str) -> None:
        status = self.status(name)
        may_label = status is not None and decisions.may_label(
            status, self._settings, self.report(name)
        )
        self._all_or_nothing.update(name, status, may_label=may_label)

    def _forget_earlier(self, node: model.Node) -> None:
        """Forget the reports about an earlier node of this name."""
        events = self._events.get(node.name, {})
        for plugin in [name for name, event in events.items() if _predates(event, node)]:
            del events[plugin]
            self._reports.get(node.name, {}).pop(plugin, None)


def _ordering(event: codec.CloudEvent) -> codec.CloudEvent:
    """Return an event without its content, so that the events of 10,000 nodes use few bytes."""
    return msgspec.structs.replace(event, id="", type="", boot="", data=_NOTHING)


def _predates(event: codec.CloudEvent, node: model.Node) -> bool:
    """Return whether an inventory is from an earlier node of this name, despite clock skew."""
    return node.created is not None and event.time < node.created - _SKEW


@functools.lru_cache(maxsize=_SHARED_MAX)
def _shared_decision(
    action: decisions.Action,
    labels: tuple[tuple[str, str], ...],
    reason: str,
    source: str,
    drop: frozenset[str],
) -> decisions.Decision:
    """Return the same object for equal decisions, to save memory."""
    return decisions.Decision(action, dict(labels), reason, source, drop)


@functools.lru_cache(maxsize=_SHARED_MAX)
def _shared_report(
    kinds: tuple[tuple[sources.Product, int], ...],
    is_simulated: bool,  # noqa: FBT001  # lru_cache keys depend on the order
) -> decisions.Report:
    """Return the same object for all nodes with equal GPUs, to save memory."""
    return decisions.Report(kinds=dict(kinds), is_simulated=is_simulated)


def _is_older(node: model.Node, other: model.Node) -> bool:
    """Return whether `node` is an older version of the same node as `other`."""
    is_comparable = node.version.isdecimal() and other.version.isdecimal() and node.uid == other.uid
    return is_comparable and int(node.version) < int(other.version)


def _is_alike(node: model.Node, other: model.Node) -> bool:
    """Return whether two versions of a node agree in everything that affects its labels."""
    return (
        node.uid == other.uid
        and node.labels == other.labels
        and node.our_labels == other.our_labels
        and node.owners == other.owners
        and node.labelled_from == other.labelled_from
        and node.is_selected == other.is_selected
        and node.accelerators == other.accelerators
        and node.has_accelerators == other.has_accelerators
    )
