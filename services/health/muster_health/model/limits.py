"""Pure: why something of a node is not kept or not read."""

import enum
from dataclasses import dataclass


class Refusal(enum.StrEnum):
    """Why something was not kept."""

    UNKNOWN_NODE = "unknown_node"
    """Kubernetes does not know the node."""
    NODES = "nodes"
    """There are too many nodes, and the Kubernetes API has not said which of them exist."""
    PLUGINS = "plugins"
    """The node has too many plugins."""
    DEVICES = "devices"
    """The plugin has too many devices or resources with faults."""
    WATCHED = "watched"
    """The node has too many watched plugins."""
    RESERVED = "reserved"
    """The node's name stands for the fleet, or the plugin's for a watched plugin."""


class Channel(enum.StrEnum):
    """Where a node sends more than it may."""

    HEARTBEATS = "heartbeats"
    EVENTS = "events"
    CONNECTION = "connection"
    """The gate has closed the node's connections to NATS."""
    SUSPICIONS = "suspicions"
    """Nothing too much, but its plugins become suspected again and again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNoisy:
    """A node sends more than it may; most of that is not read. Repeated while it lasts.

    `messages` and `bytes` (0 if unknown) were received within `seconds`, mostly from `senders`:
    plugin names, or what closed the connections and why.
    """

    node: str
    channel: Channel
    messages: int
    seconds: float
    bytes: int = 0
    senders: tuple[str, ...] = ()
