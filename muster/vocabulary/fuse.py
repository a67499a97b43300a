"""Pure: FUSE file systems in pods, as the broker that mounts them reports them.

The broker is the plugin `fuse-broker` of its node. Its inventory lists all current mounts with
their conditions; these events are hints between inventories.
"""

import enum

from muster.vocabulary import facts


class FuseCondition(enum.StrEnum):
    """A problem with a mount."""

    HUNG = "hung"
    """Its program does not answer requests, so every process that uses the mount blocks."""
    DEAD = "dead"
    """Its program has exited but its pod still runs: every use of the mount fails."""
    LINGERING = "lingering"
    """Its pod is being deleted, but does not end."""


class FuseMount(facts.Struct, frozen=True, kw_only=True):
    """A FUSE file system that the broker mounted in a pod.

    `id` identifies it on its node while it exists, `pod` is `<namespace>/<name>`, `connection` the
    number of its directory in /sys/fs/fuse/connections. `source` and `subtype` are declared by its
    program; `mount_point` is a path in the container, empty if it is not known. `user_id` is the
    user of the program, in the user namespace of the mount.
    """

    id: facts.DeviceId
    pod: facts.Text
    connection: facts.Count
    source: facts.Text = ""
    subtype: facts.Text = ""
    mount_point: facts.Text = ""
    user_id: facts.Count = 0
    conditions: tuple[FuseCondition, ...] = ()


class FuseMounted(facts.PluginEvent, frozen=True, kw_only=True):
    """The broker mounted a FUSE file system in a pod."""

    TYPE = "fuse.mounted"
    SUBJECT = "muster.event.{node}.{plugin}.fuse.mounted"
    mount: FuseMount


class FuseRefused(facts.PluginEvent, frozen=True, kw_only=True):
    """The broker refused a pod's request; `reason` is one word, `text` is its answer to the pod.

    At most one event per second is published for each pod and reason.
    """

    TYPE = "fuse.refused"
    SUBJECT = "muster.event.{node}.{plugin}.fuse.refused"
    pod: facts.Text
    reason: facts.Name
    text: facts.Text


class FuseAborted(facts.PluginEvent, frozen=True, kw_only=True):
    """The broker ended `count` FUSE connections that a pod had left behind."""

    TYPE = "fuse.aborted"
    SUBJECT = "muster.event.{node}.{plugin}.fuse.aborted"
    pod: facts.Text
    count: facts.Count
    reason: facts.Text


class FuseMountChanged(facts.PluginEvent, frozen=True, kw_only=True):
    """A condition of a mount began or ended; `text` is what was observed.

    All conditions of a mount end with the mount.
    """

    TYPE = "fuse.mount_changed"
    SUBJECT = "muster.event.{node}.{plugin}.fuse.mount_changed"
    mount: FuseMount
    condition: FuseCondition
    holds: bool
    text: facts.Text = ""
