"""Pure. What each plugin last reported, and what was last told about each node."""

from collections.abc import Mapping

import msgspec

from muster import codec, vocabulary
from muster_labeler import desired


class View(msgspec.Struct, frozen=True, kw_only=True):
    """One node as `/state` shows it."""

    gpus: int
    action: desired.Action | None
    labels: Mapping[str, str]
    reason: str
    is_waiting: bool


class Fleet:
    """The nodes with GPUs, by name."""

    def __init__(self) -> None:
        self._reports: dict[str, dict[str, codec.CloudEvent]] = {}
        self._products: dict[tuple[str, str], dict[desired.Product, int]] = {}
        self._told: dict[str, desired.Decision] = {}
        self._waiting: dict[str, str] = {}

    def take(self, event: codec.CloudEvent) -> bool:
        """Take a plugin's inventory; False if it says nothing newer than what is known."""
        inventory = event.data
        assert isinstance(inventory, vocabulary.InventoryReported), f"{event.type}: no inventory"
        reports = self._reports.setdefault(inventory.node, {})
        known = reports.get(inventory.plugin)
        if known is not None and not known.precedes(event):
            return False
        # the devices of ten thousand nodes need not be kept for their order
        reports[inventory.plugin] = msgspec.structs.replace(
            event, data=msgspec.structs.replace(inventory, devices=(), gpus=None)
        )
        self._products[inventory.node, inventory.plugin] = desired.products_of(inventory.gpus)
        return True

    def products(self, node: str) -> dict[desired.Product, int]:
        """Return the GPUs of a node, whichever of its plugins reported them."""
        found: dict[desired.Product, int] = {}
        for plugin in self._reports.get(node, {}):
            for product, count in self._products[node, plugin].items():
                found[product] = found.get(product, 0) + count
        return found

    def settle(self, node: str, decision: desired.Decision, *, cause: str) -> bool:
        """Note a decision that was carried out; True if it is news.

        A write is always news; a suggestion or refusal once, until something else is true of the
        node. A node that waits is tried again, for the same `cause`.
        """
        if decision.action is desired.Action.WAIT:
            self._waiting[node] = cause
            return False
        self._waiting.pop(node, None)
        is_news = decision.action is desired.Action.APPLY or self._told.get(node) != decision
        self._told[node] = decision
        return is_news

    def waiting(self) -> dict[str, str]:
        """Return the nodes that are to be tried again, and for what cause."""
        return dict(self._waiting)

    def view(self) -> dict[str, View]:
        """Return every node as it stands."""
        views = {}
        for node in sorted(self._reports):
            told = self._told.get(node)
            views[node] = View(
                gpus=sum(self.products(node).values()),
                action=told.action if told else None,
                labels=told.labels if told else {},
                reason=told.reason if told else "",
                is_waiting=node in self._waiting,
            )
        return views
