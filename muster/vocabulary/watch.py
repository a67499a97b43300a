"""Pure: device plugins and drivers that muster does not run, as the node's agent observes them.

The agent observes without taking part: it never registers, allocates or opens ListAndWatch. Its
inventory lists all watched plugins; `PluginObserved` is a hint in between.
"""

import enum
import hashlib
import re
from typing import Final

from muster.vocabulary import facts

WATCHED_MAX: Final = 64
"""The most watched plugins of one node."""
WATCHED_PREFIX: Final = "watched-"
"""Begins the plugin names of watched plugins; no plugin of muster has such a name."""
_NAME_MAX: Final = 40
_DIGITS: Final = 12
"""Among made-up names, one that shares 8 digits with another is found within a day."""


class WatchedKind(enum.StrEnum):
    """What a watched plugin is to the kubelet."""

    DEVICE_PLUGIN = "device_plugin"
    DRA_DRIVER = "dra_driver"
    CSI_DRIVER = "csi_driver"


class WatchedFinding(enum.StrEnum):
    """What is wrong with a watched plugin, as far as it can be seen from outside."""

    NONE = "none"
    SOCKET_REMOVED = "socket_removed"
    """The file of its socket is gone, so no kubelet can register it again."""
    NOT_SERVED = "not_served"
    """Connections to its socket are refused: its process has ended and is not back."""
    NO_ANSWER = "no_answer"
    """Its socket accepts connections, but nothing answers in time."""
    WRONG_ANSWER = "wrong_answer"
    """Something answers that does not speak the protocol."""
    NOT_REGISTERED = "not_registered"
    """It answers, but the kubelet has no connection to it: it lists none of its devices."""
    FEWER_DEVICES = "fewer_devices"
    """The kubelet lists fewer of its devices than are expected."""
    TWO_SERVERS = "two_servers"
    """Two processes serve the same resource."""
    NOT_OFFERED = "not_offered"
    """The node has the hardware, and no plugin has ever offered it."""
    FILES_MISSING = "files_missing"
    """CDI files that running pods need after their next restart do not exist."""


class Watched(facts.Struct, frozen=True, kw_only=True):
    """A device plugin, or a driver, that muster does not run.

    `name` is the resource (`nvidia.com/gpu`) or the driver (`gpu.nvidia.com`); the file name of the
    socket if neither is known. `socket` is a path below the kubelet's directory. `text` is what was
    observed, in words; empty if nothing is wrong. `expected` devices are learned or configured,
    `listed` ones the kubelet offers to pods, `allocated` ones pods hold; None means unknown.
    `process` and `pod` (a pod's uid) are known only where the agent sees the node's processes.
    `pods` are the first (`namespace/name`) that hold its devices.
    """

    name: facts.Name
    kind: WatchedKind = WatchedKind.DEVICE_PLUGIN
    finding: WatchedFinding = WatchedFinding.NONE
    text: facts.Text = ""
    socket: facts.Text = ""
    expected: facts.Count | None = None
    listed: facts.Count | None = None
    allocated: facts.Count | None = None
    process: facts.Text = ""
    pod: facts.Text = ""
    pods: tuple[facts.Text, ...] = ()


class PluginObserved(facts.PluginEvent, frozen=True, kw_only=True):
    """What the agent `plugin` observes of a watched plugin changed.

    `gone` means that it is no longer watched: it was removed from the node as planned.
    """

    TYPE = "plugin.observed"
    SUBJECT = "muster.event.{node}.{plugin}.plugin.observed"
    watched: Watched
    gone: bool = False


def watched_plugin(name: str) -> str:
    """Return the plugin name under which verdicts and alerts about a watched plugin are published.

    It is `watched-`, the readable part of `name`, and digits of its hash, which keep apart what the
    readable part does not: `watched-nvidia-com-gpu-b81425dbf37c`.
    """
    readable = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:_NAME_MAX].strip("-")
    digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGITS]
    return f"{WATCHED_PREFIX}{readable or 'plugin'}-{digest}"
