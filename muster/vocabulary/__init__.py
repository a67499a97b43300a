"""All events on the bus and their subjects; `EVENTS` is the complete set.

`facts` has what all share (names, subjects, node and time), `plugin` what a plugin publishes,
`conclusions` what the central services publish. Plugins publish on `muster.heartbeat` and
`muster.event` and answer on `muster.rpc`; the central services on
`muster.verdict`, `muster.alert`, `muster.label` and `muster.notification`; `muster.sys` is about
muster itself. Import this package, not its modules: `from muster import vocabulary`.
"""

import fnmatch
import re
from collections.abc import Mapping
from typing import Final

from muster.vocabulary.conclusions import (
    AlertChanged,
    AlertKind,
    AlertState,
    LabelEvent,
    LabelsApplied,
    LabelsRefused,
    LabelsSuggested,
    NotificationDelivered,
    NotificationEvent,
    NotificationFailed,
    NotificationReason,
    RemediationDecided,
    Remedy,
    Severity,
    Verdict,
    VerdictChanged,
    WatchdogTicked,
)
from muster.vocabulary.facts import (
    FLEET,
    SCHEMA_VERSION,
    BeatNode,
    BeatPlugin,
    Count,
    DeviceId,
    Event,
    Evidence,
    Name,
    NodeName,
    PluginName,
    Seconds,
    Text,
    node_of,
    node_token,
    rpc_subject,
)
from muster.vocabulary.plugin import (
    AllocationObserved,
    Condition,
    ConfigurationApplied,
    ConfigurationRefused,
    Device,
    DeviceAdded,
    DeviceConditionChanged,
    DeviceHealthChanged,
    DeviceRemoved,
    ExpectationChanged,
    Gpu,
    GpuNode,
    GpuResource,
    Health,
    Heartbeat,
    InventoryReported,
    MigDevice,
    Phase,
    PluginDeregistered,
    PluginEvent,
    PluginRegistered,
    PluginStarted,
    PluginStopping,
    ProblemChanged,
    RegistrationReason,
    ResourceBeat,
    StopReason,
)

__all__ = [
    "BY_TYPE",
    "EVENTS",
    "FLEET",
    "SCHEMA_VERSION",
    "AlertChanged",
    "AlertKind",
    "AlertState",
    "AllocationObserved",
    "BeatNode",
    "BeatPlugin",
    "Condition",
    "ConfigurationApplied",
    "ConfigurationRefused",
    "Count",
    "Device",
    "DeviceAdded",
    "DeviceConditionChanged",
    "DeviceHealthChanged",
    "DeviceId",
    "DeviceRemoved",
    "Event",
    "Evidence",
    "ExpectationChanged",
    "Gpu",
    "GpuNode",
    "GpuResource",
    "Health",
    "Heartbeat",
    "InventoryReported",
    "LabelEvent",
    "LabelsApplied",
    "LabelsRefused",
    "LabelsSuggested",
    "MigDevice",
    "Name",
    "NodeName",
    "NotificationDelivered",
    "NotificationEvent",
    "NotificationFailed",
    "NotificationReason",
    "Phase",
    "PluginDeregistered",
    "PluginEvent",
    "PluginName",
    "PluginRegistered",
    "PluginStarted",
    "PluginStopping",
    "ProblemChanged",
    "RegistrationReason",
    "RemediationDecided",
    "Remedy",
    "ResourceBeat",
    "Seconds",
    "Severity",
    "StopReason",
    "Text",
    "Verdict",
    "VerdictChanged",
    "WatchdogTicked",
    "node_of",
    "node_token",
    "rpc_subject",
    "subject_filters",
]

EVENTS: Final[tuple[type[Event], ...]] = (
    PluginStarted,
    PluginRegistered,
    PluginDeregistered,
    PluginStopping,
    InventoryReported,
    DeviceAdded,
    DeviceRemoved,
    DeviceHealthChanged,
    DeviceConditionChanged,
    AllocationObserved,
    ExpectationChanged,
    ConfigurationApplied,
    ConfigurationRefused,
    ProblemChanged,
    LabelsSuggested,
    LabelsApplied,
    LabelsRefused,
    VerdictChanged,
    RemediationDecided,
    AlertChanged,
    WatchdogTicked,
    NotificationDelivered,
    NotificationFailed,
)


BY_TYPE: Final[Mapping[str, type[Event]]] = {event.TYPE: event for event in EVENTS}


def subject_filters(type_pattern: str, node_pattern: str = "*") -> tuple[str, ...]:
    """Return the NATS filters for the event types and nodes that two shell patterns name.

    A node pattern with wildcards inside (`gpu-*`) cannot be said in a filter and becomes `*`: the
    reader compares the node as well. Raises ValueError when no event type matches, or no node can.
    """
    types = [e for e in EVENTS if fnmatch.fnmatchcase(e.TYPE, type_pattern)]
    if not types:
        names = ", ".join(sorted(BY_TYPE))
        raise ValueError(f"no event type matches {type_pattern!r}; there are: {names}")
    node = "*" if re.search(r"[*?\[]", node_pattern) else node_token(node_pattern)
    return tuple(re.sub(r"\{\w+\}", "*", e.SUBJECT.replace("{node}", node)) for e in types)
