"""Pure: the central services' events: labels, verdicts, alerts, notifications, audit."""

import enum
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Final

import msgspec

from muster.vocabulary import facts

CONSOLE: Final = "console"
"""The kind of the receiver that only writes to the notifier's log."""
NOBODY_NOTIFIED: Final = "nobody is notified yet: alerts go only to the notifier's log"


class Verdict(enum.StrEnum):
    """The health service's conclusion about a plugin."""

    HEALTHY = "HEALTHY"
    DEGRADED = "DEGRADED"
    PLUGIN_DOWN = "PLUGIN_DOWN"
    STUCK = "STUCK"
    UNREACHABLE = "UNREACHABLE"
    NODE_DOWN = "NODE_DOWN"
    DEREGISTERED = "DEREGISTERED"
    MISMATCH = "MISMATCH"
    MISSING = "MISSING"
    MAINTENANCE = "MAINTENANCE"
    FLAPPING = "FLAPPING"
    """Nothing is wrong at present, but the plugin's process restarts repeatedly."""
    SPLIT_BRAIN = "SPLIT_BRAIN"


class AlertKind(enum.StrEnum):
    """What an alert is about: a verdict that needs a person, devices, the fleet, or muster.

    The notifier itself raises the last two kinds.
    """

    DEGRADED = "degraded"
    PLUGIN_DOWN = "plugin_down"
    STUCK = "stuck"
    UNREACHABLE = "unreachable"
    NODE_DOWN = "node_down"
    DEREGISTERED = "deregistered"
    MISMATCH = "mismatch"
    MISSING = "missing"
    MAINTENANCE_OVERDUE = "maintenance_overdue"
    FLAPPING = "flapping"
    SPLIT_BRAIN = "split_brain"
    DEVICE_UNHEALTHY = "device_unhealthy"
    DEVICE_DEGRADED = "device_degraded"
    DEVICE_UNMONITORED = "device_unmonitored"
    DEVICES_SHORT = "devices_short"
    FUSE_MOUNT_HUNG = "fuse_mount_hung"
    FUSE_DAEMON_DIED = "fuse_daemon_died"
    FUSE_POD_TERMINATING = "fuse_pod_terminating"
    CONFIGURATION_REFUSED = "configuration_refused"
    """A plugin refused its changed configuration, which has not been corrected since."""
    CLOCK_SKEW = "clock_skew"
    NOISY_NODE = "noisy_node"
    STORM = "storm"
    EVICTIONS = "evictions"
    """A full stream is deleting messages that are still needed."""
    MORE_ALERTS = "more_alerts"
    HEALTH_SILENT = "health_silent"
    DEAD_LETTERS = "dead_letters"


class Severity(enum.StrEnum):
    """How urgently a person must act."""

    CRITICAL = "critical"
    WARNING = "warning"
    INFO = "info"


class Remedy(enum.StrEnum):
    """The outcome of a decision to restart a plugin."""

    ACTED = "acted"
    DRY_RUN = "dry_run"
    REFUSED = "refused"
    FAILED = "failed"


class AlertState(enum.StrEnum):
    """The state of an alert, as Alertmanager names it."""

    FIRING = "firing"
    RESOLVED = "resolved"


class NotificationReason(enum.StrEnum):
    """Why a notification is sent now (Alertmanager notify/dedup_stage.go).

    Two are specific to muster. ACKNOWLEDGED: an alert caused a notification and still fires, but is
    now silenced. CHANGED: a firing alert now has another cause or more devices, or now names its
    first pods.
    """

    FIRST = "first"
    NEW_ALERTS = "new_alerts"
    NEW_RESOLVED = "new_resolved"
    ALL_RESOLVED = "all_resolved"
    REPEAT = "repeat"
    ACKNOWLEDGED = "acknowledged"
    CHANGED = "changed"


class Act(enum.StrEnum):
    """An action that a person can take in the console."""

    SILENCE = "silence"
    EXPIRE_SILENCE = "expire_silence"
    SEND_AGAIN = "send_again"


class ActOutcome(enum.StrEnum):
    """The outcome of an act. FAILED: NATS did not confirm it, but it may have succeeded."""

    DONE = "done"
    REFUSED = "refused"
    FAILED = "failed"


class LabelEvent(facts.Event, frozen=True, kw_only=True):
    """An event about one node's labels."""

    labels: Mapping[str, str]
    reason: facts.Text
    source: str = ""


class LabelsSuggested(LabelEvent, frozen=True, kw_only=True):
    """Labels that the labeler would set on the node; nothing was written."""

    TYPE = "labels.suggested"
    SUBJECT = "muster.label.{node}.labels.suggested"


class LabelsApplied(LabelEvent, frozen=True, kw_only=True):
    """Labels that were written to the node and read back."""

    TYPE = "labels.applied"
    SUBJECT = "muster.label.{node}.labels.applied"


class LabelsRefused(LabelEvent, frozen=True, kw_only=True):
    """Labels that were requested but not written, with the `reason`."""

    TYPE = "labels.refused"
    SUBJECT = "muster.label.{node}.labels.refused"


class VerdictChanged(facts.Event, frozen=True, kw_only=True):
    """Health's verdict on a plugin changed; `rule` is the rule that applied.

    `flapping` means that the plugin fails repeatedly, regardless of the verdict. `watched` is the
    resource or driver if muster does not run the plugin but only watches it. `leader` is the
    fencing token of the health service that published the verdict: a token lower than an earlier
    one belongs to a former leader.
    """

    TYPE = "verdict.changed"
    SUBJECT = "muster.verdict.{node}.{plugin}.verdict.changed"
    plugin: facts.PluginName
    verdict: Verdict
    previous: Verdict | None = None
    rule: str
    evidence: tuple[facts.Evidence, ...] = ()
    resources: tuple[facts.Name, ...] = ()
    leader: facts.Count = 0
    flapping: bool = False
    watched: str = ""


class RemediationDecided(facts.Event, frozen=True, kw_only=True):
    """Health restarted a plugin's pod, or decided not to. `leader` is as in VerdictChanged."""

    TYPE = "remediation.decided"
    SUBJECT = "muster.verdict.{node}.{plugin}.remediation.decided"
    plugin: facts.PluginName
    verdict: Verdict
    outcome: Remedy
    reason: facts.Text
    pod: str = ""
    leader: facts.Count = 0


class AlertChanged(facts.Event, frozen=True, kw_only=True):
    """An alert fires, changes or is resolved. Its fingerprint never changes.

    The subject of a firing alert may change, for example from a plugin that is down to a node that
    is down: the newest event with the fingerprint is valid. `change` is 0 in the first event, and
    grows with each change. `devices` and `pods` name the first of `devices_total` devices and
    `pods_total` pods. `advice` is the first step to take. `flapping` means that the plugin fails
    repeatedly, regardless of its present problem. `watched` is as in VerdictChanged.
    """

    TYPE = "alert.changed"
    SUBJECT = "muster.alert.{node}.{severity}.{kind}.{fingerprint}"
    plugin: facts.PluginName
    kind: AlertKind
    severity: Severity
    state: AlertState
    fingerprint: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}$")]
    summary: facts.Text
    starts_at: datetime
    ends_at: datetime | None = None
    resource: str = ""
    devices: tuple[facts.DeviceId, ...] = ()
    devices_total: facts.Count = 0
    pods: tuple[str, ...] = ()
    pods_total: facts.Count = 0
    evidence: tuple[facts.Evidence, ...] = ()
    advice: facts.Text = ""
    runbook: str = ""
    change: facts.Count = 0
    leader: facts.Count = 0
    flapping: bool = False
    watched: str = ""

    def __post_init__(self) -> None:
        """Also refuse times without a time zone."""
        super().__post_init__()
        facts.check_time("starts_at", self.starts_at)
        if self.ends_at is not None:
            facts.check_time("ends_at", self.ends_at)


class WatchdogTicked(facts.Event, frozen=True, kw_only=True):
    """The leading health service is working. If these events stop, failures go undetected.

    `leader` is its fencing token, `holder` its name; the next event is due in `interval_s`.
    """

    TYPE = "watchdog.ticked"
    SUBJECT = "muster.sys.{node}.watchdog.ticked"
    leader: facts.Count
    holder: facts.Name
    interval_s: Annotated[float, msgspec.Meta(gt=0, le=3600)]


class NodeLimited(facts.Event, frozen=True, kw_only=True):
    """The gate closed a node's connections because the node exceeded its rate limit.

    The node sent `messages` and `bytes` within `seconds`; its connections are refused for
    `refused_s`.
    """

    TYPE = "node.limited"
    SUBJECT = "muster.sys.{node}.node.limited"
    messages: facts.Count
    bytes: facts.Count
    seconds: facts.Seconds
    refused_s: facts.Seconds
    reason: facts.Text


class ReceiversConfigured(facts.Event, frozen=True, kw_only=True):
    """The receivers (name and kind) of the leading notifier, which publishes them periodically.

    `refused` are the names of receivers that it skips because their settings are unusable.
    `alerts` are firing alerts that the notifier raises: it has no right to publish AlertChanged.
    """

    TYPE = "receivers.configured"
    SUBJECT = "muster.notification.{node}.receivers.configured"
    receivers: Mapping[str, str]
    refused: tuple[str, ...] = ()
    alerts: tuple[AlertChanged, ...] = ()
    interval_s: Annotated[float, msgspec.Meta(gt=0, le=3600)]


class NotificationEvent(facts.Event, frozen=True, kw_only=True):
    """The outcome of one notification about one group of alerts."""

    receiver: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][-A-Za-z0-9_]{0,62}$")]
    group: facts.Text
    reason: NotificationReason
    firing: tuple[str, ...] = ()
    resolved: tuple[str, ...] = ()
    attempts: facts.Count = 1


class NotificationDelivered(NotificationEvent, frozen=True, kw_only=True):
    """The receiver accepted the notification; `answer` is its response, such as `HTTP 200`."""

    TYPE = "notification.delivered"
    SUBJECT = "muster.notification.{node}.{receiver}.notification.delivered"
    answer: facts.Text = ""


class NotificationFailed(NotificationEvent, frozen=True, kw_only=True):
    """The receiver refused the notification or was unreachable for too long.

    The notification is now a dead letter. `outcome` is the last attempt's result in one word, such
    as `not_found` or `timed_out`.
    """

    TYPE = "notification.failed"
    SUBJECT = "muster.notification.{node}.{receiver}.notification.failed"
    error: facts.Text
    outcome: facts.Text = ""


class OperatorActed(facts.Event, frozen=True, kw_only=True):
    """A person acted in the console, or tried to: an entry of the audit log.

    `actor` is the person; `identity` is how that person was identified: `local`, `header` or
    `oidc`. `target` is the id of the silence or the dead letter, `about` what it concerns:
    matchers, or a receiver. `reason` is the comment, or why the act failed.
    """

    TYPE = "operator.acted"
    SUBJECT = "muster.audit.{node}.operator.acted"
    actor: facts.Name
    identity: facts.Name
    act: Act
    outcome: ActOutcome
    target: Annotated[str, msgspec.Meta(max_length=256)] = ""
    about: facts.Text = ""
    reason: facts.Text = ""
