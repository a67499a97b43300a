"""Pure: defines the reasons why data of a node is not stored or not read."""

import enum
from dataclasses import dataclass


class Refusal(enum.StrEnum):
    """Why data of a node was not stored."""

    UNKNOWN_NODE = "unknown_node"
    """The node is not in the cluster."""
    NODES = "nodes"
    """There are too many nodes, and the Kubernetes API has not confirmed which of them exist."""
    PLUGINS = "plugins"
    """The node has too many plugins."""
    DEVICES = "devices"
    """The plugin has too many devices or resources with faults."""
    WATCHED = "watched"
    """The node has too many watched plugins."""
    RESERVED = "reserved"
    """The node's name is reserved for the fleet, or the plugin's name for a watched plugin."""


class Channel(enum.StrEnum):
    """The kind of traffic with which a node exceeds its limits."""

    HEARTBEATS = "heartbeats"
    EVENTS = "events"
    CONNECTION = "connection"
    """The gate has closed the node's connections to NATS."""
    SUSPICIONS = "suspicions"
    """No limit is exceeded, but the node's plugins are suspected repeatedly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNoisy:
    """A node exceeds its limits, or its plugins are suspected often; sent again while this lasts.

    At least `messages` messages (or suspicions) with `bytes` bytes (0 if unknown) came within
    `seconds`. `senders` are the plugins that sent most of them, or the reason why connections were
    closed.
    """

    node: str
    channel: Channel
    messages: int
    seconds: float
    bytes: int = 0
    senders: tuple[str, ...] = ()
