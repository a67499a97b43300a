"""Pure: limits the size of plugins' reports, because a node's credentials allow any content."""

import enum
from typing import Final

from muster import vocabulary
from muster_labeler.kubernetes import projection
from muster_labeler.service import decisions

NODES_MAX: Final = 20_000
"""The maximum number of nodes with reports while the cluster's nodes are unknown.

After the nodes have been listed, reports of other nodes are ignored.
"""
MESSAGES_MAX: Final = vocabulary.PLUGINS_MAX * vocabulary.PAGES_MAX
"""The maximum number of messages in the inventories of one node."""
GPUS_MAX: Final = 1_024
"""The maximum number of GPUs in one plugin's report."""
DEVICES_MAX: Final = 10_000
"""The maximum number of devices in one plugin's report."""


class Refusal(enum.StrEnum):
    """Why an inventory is ignored."""

    UNKNOWN_NODE = "unknown_node"
    """The API does not show this node; the node is read again as soon as it does."""
    TOO_MANY_NODES = "too_many_nodes"
    TOO_MANY_PLUGINS = "too_many_plugins"
    TOO_OFTEN = "too_often"
    """The node sent too many messages; it is read again a little later."""
    TOO_LARGE = "too_large"
    """The plugin reports more than a node can have; its previous inventory still counts."""


def is_too_large(inventory: vocabulary.InventoryReported) -> bool:
    """Return whether a plugin reports more than a node can have."""
    gpus = inventory.gpus.gpus if inventory.gpus else ()
    return (
        len(inventory.devices) > DEVICES_MAX
        or len(gpus) > GPUS_MAX
        or not projection.is_bounded(decisions.kinds_of(inventory.gpus))
    )
