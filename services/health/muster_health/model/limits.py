"""Pure: why something of a node is not kept or not read."""

import enum


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
    RESERVED = "reserved"
    """The node's name stands for the fleet."""


class Channel(enum.StrEnum):
    """Where a node sends more than it may."""

    HEARTBEATS = "heartbeats"
    EVENTS = "events"
    CONNECTION = "connection"
    """The gate has closed the node's connections to NATS."""
    SUSPICIONS = "suspicions"
    """Nothing too much, but its plugins become suspected again and again."""
