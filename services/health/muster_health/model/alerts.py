"""Pure: defines alerts: the severity, fingerprint and text of each kind.

About a plugin itself, at most one alert of each severity is open: if first the plugin and then its
node goes down, the first alert changes, and no second alert opens.
"""

import hashlib
from collections.abc import Sequence
from datetime import datetime
from typing import Final, assert_never

import msgspec

from muster import vocabulary
from muster.vocabulary import AlertKind, Severity, Verdict

Key = tuple[str, str]
"""Slot and resource, which together distinguish the open alerts of one plugin."""

LATEST: Final = "; now: "
"""The separator between the first and the latest reason in a summary."""
PODS_MAX: Final = 32
"""How many pods an alert names; the others are only counted."""
_POD_BYTES_MAX: Final = 63 + 1 + 253
"""The length of the longest `namespace/name`."""
OF_DEVICES: Final = frozenset(
    {
        AlertKind.DEVICE_UNHEALTHY,
        AlertKind.DEVICE_DEGRADED,
        AlertKind.DEVICE_UNMONITORED,
        AlertKind.DEVICES_SHORT,
    }
)
"""The kinds of alerts that are about devices, not about their plugin."""
OF_MOUNTS: Final = frozenset(
    {AlertKind.FUSE_MOUNT_HUNG, AlertKind.FUSE_DAEMON_DIED, AlertKind.FUSE_POD_TERMINATING}
)
"""The kinds of alerts that are about FUSE mounts in pods."""
OF_FLEET: Final = frozenset(
    {AlertKind.STORM, AlertKind.MORE_ALERTS, AlertKind.NOISY_NODE, AlertKind.EVICTIONS}
)
"""The kinds of alerts that are about the fleet or a whole node, not about a single plugin."""


_OF_NODE: Final = frozenset({AlertKind.CLOCK_SKEW, AlertKind.CONFIGURATION_REFUSED})
"""The kinds of alerts about a node's clock or a plugin's configuration; the plugin works."""


class Alert(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One alert, current or as last published; `changed_at` is when it last changed."""

    kind: AlertKind
    summary: str
    evidence: tuple[vocabulary.Evidence, ...]
    starts_at: datetime
    changed_at: datetime = msgspec.field(name="told_at")
    resource: str = ""
    devices: tuple[str, ...] = ()
    devices_total: int = 0
    pods: tuple[str, ...] = ()
    pods_total: int = 0
    change: int = 0
    ends_at: datetime | None = None
    grave: bool = False
    """Read from stored alerts, never written: earlier versions set it for a critical FLAPPING."""
    flapping: bool = False
    """Whether the plugin fails repeatedly."""
    advice: str = ""
    """The first step to take, unless it follows from the kind alone."""

    @property
    def severity(self) -> Severity:
        """Return how urgently a person must act."""
        return Severity.CRITICAL if self.grave else severity_of(self.kind)

    @property
    def key(self) -> Key:
        """Return the key that distinguishes this alert from the plugin's other open alerts."""
        return slot_of(self.kind, grave=self.grave), self.resource

    def says_the_same(self, other: "Alert") -> bool:
        """Return whether two alerts have the same text; their evidence is ignored."""
        return self.text == other.text

    @property
    def text(self) -> tuple[object, ...]:
        """Return the alert's text for people, without the evidence."""
        # alerts of an earlier version have no count of pods
        many = self.devices_total, max(len(self.pods), self.pods_total)
        return self.kind, self.summary, self.devices, self.pods, many

    def naming(self, pods: Sequence[str], total: int) -> "Alert":
        """Return the alert with the names of the affected pods; at most `PODS_MAX` are named."""
        return msgspec.structs.replace(self, pods=tuple(pods[:PODS_MAX]), pods_total=total)

    def becomes(self, other: "Alert", at: datetime) -> "Alert":
        """Return this alert with the content of another, changed at `at`."""
        return msgspec.structs.replace(
            other, starts_at=self.starts_at, changed_at=at, change=self.change + 1
        )

    def resolved(self, at: datetime, evidence: tuple[vocabulary.Evidence, ...]) -> "Alert":
        """Return the alert as resolved, with the evidence for its end.

        The latest reason is dropped from the summary, because it is no longer true.
        """
        return msgspec.structs.replace(
            self,
            summary=self.summary.partition(LATEST)[0],
            ends_at=at,
            changed_at=at,
            evidence=evidence,
            change=self.change + 1,
        )


def pod_name(text: str) -> str:
    """Return a pod's name as a plugin reports it, cut to the maximum length of such names."""
    return text.encode("utf-8", "replace")[:_POD_BYTES_MAX].decode("utf-8", "ignore")


def kind_of(verdict: Verdict) -> AlertKind | None:
    """Return the kind of alert for a verdict; None if the verdict needs no alert."""
    match verdict:
        case Verdict.HEALTHY | Verdict.MAINTENANCE:
            return None
        case (
            Verdict.DEGRADED
            | Verdict.PLUGIN_DOWN
            | Verdict.STUCK
            | Verdict.UNREACHABLE
            | Verdict.NODE_DOWN
            | Verdict.DEREGISTERED
            | Verdict.MISMATCH
            | Verdict.MISSING
            | Verdict.FLAPPING
            | Verdict.SPLIT_BRAIN
        ):
            return AlertKind(verdict.value.lower())
        case _:
            assert_never(verdict)


def severity_of(kind: AlertKind) -> Severity:
    """Return the severity: critical if pods fail or get no healthy device, or alerts are lost."""
    match kind:
        case (
            AlertKind.PLUGIN_DOWN
            | AlertKind.STUCK
            | AlertKind.NODE_DOWN
            | AlertKind.DEREGISTERED
            | AlertKind.MISMATCH
            | AlertKind.MISSING
            | AlertKind.DEVICE_UNHEALTHY
            | AlertKind.FUSE_MOUNT_HUNG
            | AlertKind.STORM
            | AlertKind.HEALTH_SILENT
            | AlertKind.DEAD_LETTERS
        ):
            return Severity.CRITICAL
        case (
            AlertKind.UNREACHABLE
            | AlertKind.MAINTENANCE_OVERDUE
            | AlertKind.FLAPPING
            | AlertKind.SPLIT_BRAIN
            | AlertKind.DEVICE_UNMONITORED
            | AlertKind.DEVICES_SHORT
            | AlertKind.CONFIGURATION_REFUSED
            | AlertKind.FUSE_DAEMON_DIED
            | AlertKind.FUSE_POD_TERMINATING
            | AlertKind.MORE_ALERTS
            | AlertKind.NOISY_NODE
            | AlertKind.EVICTIONS
        ):
            return Severity.WARNING
        case AlertKind.DEGRADED | AlertKind.DEVICE_DEGRADED | AlertKind.CLOCK_SKEW:
            return Severity.INFO
        case _:
            assert_never(kind)


def slot_of(kind: AlertKind, *, grave: bool = False) -> str:
    """Return an alert's slot: its severity if it is about the plugin itself, else its kind."""
    if kind in OF_DEVICES | OF_MOUNTS | OF_FLEET | _OF_NODE:
        return kind.value
    return (Severity.CRITICAL if grave else severity_of(kind)).value


def fingerprint(
    node: str, plugin: str, kind: AlertKind, *, resource: str = "", grave: bool = False
) -> str:
    """Return an alert's fingerprint, which stays the same when the alert fires again."""
    text = f"{node}|{plugin}|{slot_of(kind, grave=grave)}|{resource}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def changed(
    alert: Alert,
    *,
    node: str,
    plugin: str,
    runbook_url: str,
    leader: int,
    watched: str = "",
) -> vocabulary.AlertChanged:
    """Return the event for an alert that fires, changes or is resolved.

    An alert about a noisy node belongs to the fleet and names the node in `resource`; the event
    names it in `node`. Alerts about watched plugins have their own runbook, with a section for each
    kind.
    """
    resource = alert.resource
    if alert.kind is AlertKind.NOISY_NODE:
        node, resource = resource or node, ""
    return vocabulary.AlertChanged(
        node=node,
        at=alert.changed_at,
        plugin=plugin,
        kind=alert.kind,
        severity=alert.severity,
        state=(vocabulary.AlertState.RESOLVED if alert.ends_at else vocabulary.AlertState.FIRING),
        fingerprint=fingerprint(node, plugin, alert.kind, resource=resource, grave=alert.grave),
        summary=alert.summary,
        starts_at=alert.starts_at,
        ends_at=alert.ends_at,
        resource=resource,
        devices=alert.devices,
        devices_total=alert.devices_total,
        pods=alert.pods,
        pods_total=alert.pods_total,
        evidence=alert.evidence,
        advice=alert.advice or advice_of(alert.kind),
        flapping=alert.flapping,
        runbook=runbook_url
        + (f"{_WATCHED}.html#{alert.kind}" if watched else f"{alert.kind}.html"),
        change=alert.change,
        leader=leader,
        watched=watched,
    )


def of_event(event: vocabulary.AlertChanged) -> Alert:
    """Return the alert that an event describes."""
    return Alert(
        kind=event.kind,
        summary=event.summary,
        evidence=event.evidence,
        starts_at=event.starts_at,
        changed_at=event.at,
        resource=event.node if event.kind is AlertKind.NOISY_NODE else event.resource,
        devices=event.devices,
        devices_total=event.devices_total,
        pods=event.pods,
        pods_total=event.pods_total,
        change=event.change,
        ends_at=event.ends_at,
        flapping=event.flapping,
        advice=event.advice,
    )


def event_id(alert: vocabulary.AlertChanged) -> str:
    """Return the id of an alert's change; NATS uses it to drop duplicates after a crash."""
    return f"{alert.fingerprint}:{alert.starts_at.isoformat()}:{alert.change}:{alert.state}"


def summary_of(kind: AlertKind, *, node: str, plugin: str, resources: tuple[str, ...]) -> str:
    """Return a description of a plugin's problem, in one line."""
    those = ", ".join(resources[:4]) + (", ..." if len(resources) > 4 else "")  # noqa: PLR2004  # one line
    template = _SUMMARY.get(kind, "{plugin} on {node}: {kind}")
    named = f"{plugin} ({resources[0]})" if len(resources) == 1 else plugin
    kind_words = kind.replace("_", " ")
    summary = template.format(
        plugin=plugin, named=named, node=node, kind=kind_words, what=those or plugin
    )
    return f"{summary}: {those}" if kind is AlertKind.MISMATCH and those else summary


def often(summary: str, kind: AlertKind, verdict: Verdict) -> str:
    """Return the summary of an alert about a plugin that fails repeatedly."""
    if kind is not AlertKind.FLAPPING:
        return f"{summary}; it fails repeatedly"
    return summary if verdict is Verdict.FLAPPING else f"{summary}{LATEST}{verdict}"


def advice_of(kind: AlertKind) -> str:
    """Return the first step to take, in one line; empty if there is none for this kind."""
    return _ADVICE.get(kind, "")


_WATCHED: Final = "watched_plugin"
_SUMMARY: Final = {
    AlertKind.PLUGIN_DOWN: "{named} on {node} is down",
    AlertKind.STUCK: "{named} on {node} is stuck: it is running but does not work",
    AlertKind.DEREGISTERED: "{what} on {node} is not registered with the kubelet",
    AlertKind.MAINTENANCE_OVERDUE: (
        "{plugin} on {node} is overdue: it has not returned from a planned stop"
    ),
    AlertKind.NODE_DOWN: "node {node} is down, and {plugin} with it",
    AlertKind.UNREACHABLE: "{plugin} on {node} works, but cannot be reached over NATS",
    AlertKind.MISMATCH: "{node} offers pods other devices than {plugin} has",
    AlertKind.MISSING: "{plugin} on {node} is missing: it is expected, but has sent no heartbeat",
    AlertKind.DEGRADED: "{plugin} on {node} is degraded: it still works",
    AlertKind.FLAPPING: "{plugin} on {node} is flapping: it fails repeatedly",
    AlertKind.SPLIT_BRAIN: "{plugin} on {node} is running twice at the same time",
}
_ADVICE: Final = {
    AlertKind.PLUGIN_DOWN: "check the plugin's pod: its last log lines, its exit code, its node",
    AlertKind.STUCK: "take a stack dump of the plugin, then delete its pod",
    AlertKind.NODE_DOWN: "repair the node; its plugins then recover by themselves",
    AlertKind.UNREACHABLE: "check the network between the node and NATS",
    AlertKind.DEREGISTERED: "read the kubelet's and plugin's logs, then delete the plugin's pod",
    AlertKind.MISMATCH: "compare the node's allocatable with the plugin's devices",
    AlertKind.MISSING: "find out why the DaemonSet has no running pod on this node",
    AlertKind.MAINTENANCE_OVERDUE: "finish the maintenance, or find out why the plugin is not back",
    AlertKind.FLAPPING: "find out when the plugin restarts, and what happens just before",
    AlertKind.SPLIT_BRAIN: "stop the older of the two processes",
    AlertKind.DEGRADED: "check the node's load and the health checker that the evidence names",
    AlertKind.DEVICE_UNHEALTHY: "move the pods that use it; look up the fault in the runbook",
    AlertKind.DEVICE_DEGRADED: "watch the device; plan a replacement",
    AlertKind.DEVICE_UNMONITORED: "find out why the device cannot be monitored; faults go "
    "unnoticed until then",
    AlertKind.DEVICES_SHORT: "look for the missing devices: lspci, dmesg, cables",
    AlertKind.FUSE_MOUNT_HUNG: "find out why the program serving the mount hangs, then restart it",
    AlertKind.FUSE_DAEMON_DIED: "read the pod's log, then delete the pod so that it mounts again",
    AlertKind.FUSE_POD_TERMINATING: "abort the mount's connection on the node; the pod then "
    "terminates",
    AlertKind.CONFIGURATION_REFUSED: "before the plugin restarts, correct the file or restore the "
    "previous one",
    AlertKind.CLOCK_SKEW: "check time synchronization (chrony, NTP) on this node, and on the "
    "node of the health pod if many nodes have this alert",
    AlertKind.NOISY_NODE: "find out what sends so many messages; cordon the node if there is no "
    "good reason",
    AlertKind.EVICTIONS: "find out which nodes fill the stream, and why they publish so many "
    "messages",
    AlertKind.STORM: "first look for a common cause: the network, NATS, a rollout, power; "
    "plugins that stay down get their own alerts later",
    AlertKind.MORE_ALERTS: "run `muster status` to see all alerts",
}
