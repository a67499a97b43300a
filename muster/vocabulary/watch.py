"""Pure: device plugins and drivers that muster does not run, as the node's agent observes them.

The agent only observes: it never registers, allocates or opens ListAndWatch. Its inventory lists
all watched plugins; `PluginObserved` reports a change between two inventories.
"""

import enum
import hashlib
import re
from typing import Final

from muster.vocabulary import facts

WATCHED_MAX: Final = 64
"""The maximum number of watched plugins on one node."""
WATCHED_PREFIX: Final = "watched-"
"""The name prefix of watched plugins; none of muster's own plugins uses it."""
_NAME_MAX: Final = 40
_DIGITS: Final = 12
"""How many digits of the hash are used: with 8, an attacker could find a name with the same digits
in less than a day.
"""


class WatchedKind(enum.StrEnum):
    """The kind of a watched plugin: how it serves the kubelet."""

    DEVICE_PLUGIN = "device_plugin"
    DRA_DRIVER = "dra_driver"
    CSI_DRIVER = "csi_driver"


class WatchedFinding(enum.StrEnum):
    """The problem of a watched plugin, as observed from outside; NONE if there is no problem."""

    NONE = "none"
    SOCKET_REMOVED = "socket_removed"
    """Its socket file is gone, so the kubelet cannot connect to it again."""
    NOT_SERVED = "not_served"
    """Connections to its socket are refused: its process has exited and was not restarted."""
    NO_ANSWER = "no_answer"
    """Its socket accepts connections, but no process answers in time."""
    WRONG_ANSWER = "wrong_answer"
    """The process that answers on its socket does not speak the protocol."""
    NOT_REGISTERED = "not_registered"
    """It answers, but the kubelet lists none of its devices and is probably not connected."""
    FEWER_DEVICES = "fewer_devices"
    """The kubelet lists fewer of its devices than are expected."""
    TWO_SERVERS = "two_servers"
    """Two processes serve the same resource."""
    NOT_OFFERED = "not_offered"
    """The node has the hardware, but no plugin has ever advertised it."""
    FILES_MISSING = "files_missing"
    """CDI files that running pods need after their next restart do not exist."""


class Watched(facts.Struct, frozen=True, kw_only=True):
    """A device plugin, or a driver, that muster does not run.

    `name` is the resource (`nvidia.com/gpu`) or the driver (`gpu.nvidia.com`); the file name of the
    socket if neither is known. `socket` is a path below the kubelet's directory. `text` describes
    the problem; it is empty if there is none. `expected` is the configured or learned number of
    devices, `listed` the number that the kubelet offers to pods, and `allocated` the number
    allocated to pods; None means unknown. `process` and `pod` (its uid) are known only where the
    agent sees the node's processes. `pods` are the first pods (`namespace/name`) that use its
    devices.
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
    """The agent `plugin` observed that a watched plugin changed.

    `gone` means that it is no longer watched: it was removed from the node as planned.
    """

    TYPE = "plugin.observed"
    SUBJECT = "muster.event.{node}.{plugin}.plugin.observed"
    watched: Watched
    gone: bool = False


def watched_plugin(name: str) -> str:
    """Return the plugin name under which verdicts and alerts about a watched plugin are published.

    It consists of `watched-`, the readable part of `name`, and digits of its hash, which
    distinguish names with the same readable part: `watched-nvidia-com-gpu-b81425dbf37c`.
    """
    readable = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:_NAME_MAX].strip("-")
    digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGITS]
    return f"{WATCHED_PREFIX}{readable or 'plugin'}-{digest}"
