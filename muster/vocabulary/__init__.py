"""Defines all events on the bus and their subjects; `EVENTS` is the complete set.

`facts` has the common parts (names, subjects, node and time), `plugin` the events of plugins,
`fuse` those of the FUSE broker (also a plugin), `watch` the observations of plugins that muster
does not run, and `conclusions` the events of the central services. Plugins publish on
`muster.heartbeat`, `muster.event` and `muster.inventory`, and answer on `muster.rpc`; the central
services on `muster.verdict`, `muster.alert`, `muster.label` and `muster.notification`; `muster.sys`
is about muster itself, and `muster.audit` about what people did in the console. Import this
package, not its modules: `from muster import vocabulary`.
"""

import fnmatch
import re
from collections.abc import Mapping
from typing import Final

from muster.vocabulary.conclusions import (
    CONSOLE as CONSOLE,
    NOBODY_NOTIFIED as NOBODY_NOTIFIED,
    Act as Act,
    ActOutcome as ActOutcome,
    AlertChanged as AlertChanged,
    AlertKind as AlertKind,
    AlertState as AlertState,
    LabelEvent as LabelEvent,
    LabelsApplied as LabelsApplied,
    LabelsRefused as LabelsRefused,
    LabelsSuggested as LabelsSuggested,
    NodeLimited as NodeLimited,
    NotificationDelivered as NotificationDelivered,
    NotificationEvent as NotificationEvent,
    NotificationFailed as NotificationFailed,
    OperatorActed as OperatorActed,
    ReceiversConfigured as ReceiversConfigured,
    NotificationReason as NotificationReason,
    RemediationDecided as RemediationDecided,
    Remedy as Remedy,
    Severity as Severity,
    Verdict as Verdict,
    VerdictChanged as VerdictChanged,
    WatchdogTicked as WatchdogTicked,
)
from muster.vocabulary.facts import (
    FLEET as FLEET,
    PAGES_MAX as PAGES_MAX,
    PLUGINS_MAX as PLUGINS_MAX,
    SCHEMA_VERSION as SCHEMA_VERSION,
    TEST_PLUGIN as TEST_PLUGIN,
    BeatNode as BeatNode,
    BeatPlugin as BeatPlugin,
    Count as Count,
    DeviceId as DeviceId,
    Event as Event,
    Evidence as Evidence,
    Name as Name,
    NodeName as NodeName,
    PluginEvent as PluginEvent,
    PluginName as PluginName,
    Seconds as Seconds,
    Text as Text,
    node_of as node_of,
    node_token as node_token,
    rpc_subject as rpc_subject,
)
from muster.vocabulary.fuse import (
    FuseAborted as FuseAborted,
    FuseCondition as FuseCondition,
    FuseMount as FuseMount,
    FuseMountChanged as FuseMountChanged,
    FuseMounted as FuseMounted,
    FuseRefused as FuseRefused,
)
from muster.vocabulary.plugin import (
    AllocationObserved as AllocationObserved,
    Condition as Condition,
    ConfigurationApplied as ConfigurationApplied,
    ConfigurationRefused as ConfigurationRefused,
    Device as Device,
    DeviceAdded as DeviceAdded,
    DeviceConditionChanged as DeviceConditionChanged,
    DeviceHealthChanged as DeviceHealthChanged,
    DeviceRemoved as DeviceRemoved,
    ExpectationChanged as ExpectationChanged,
    Gpu as Gpu,
    GpuNode as GpuNode,
    GpuResource as GpuResource,
    Health as Health,
    Heartbeat as Heartbeat,
    InventoryReported as InventoryReported,
    MigDevice as MigDevice,
    Phase as Phase,
    PluginDeregistered as PluginDeregistered,
    PluginRegistered as PluginRegistered,
    PluginStarted as PluginStarted,
    PluginStopping as PluginStopping,
    ProblemChanged as ProblemChanged,
    RegistrationReason as RegistrationReason,
    ResourceBeat as ResourceBeat,
    StopReason as StopReason,
)
from muster.vocabulary.watch import (
    WATCHED_MAX as WATCHED_MAX,
    WATCHED_PREFIX as WATCHED_PREFIX,
    PluginObserved as PluginObserved,
    Watched as Watched,
    WatchedFinding as WatchedFinding,
    WatchedKind as WatchedKind,
    watched_plugin as watched_plugin,
)

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
    PluginObserved,
    FuseMounted,
    FuseRefused,
    FuseMountChanged,
    FuseAborted,
    LabelsSuggested,
    LabelsApplied,
    LabelsRefused,
    VerdictChanged,
    RemediationDecided,
    AlertChanged,
    WatchdogTicked,
    NodeLimited,
    NotificationDelivered,
    NotificationFailed,
    ReceiversConfigured,
    OperatorActed,
)


BY_TYPE: Final[Mapping[str, type[Event]]] = {event.TYPE: event for event in EVENTS}


def subject_filters(type_pattern: str, node_pattern: str = "*") -> tuple[str, ...]:
    """Return the NATS filters for the event types and nodes that match two shell patterns.

    A node pattern with wildcards inside (`gpu-*`) cannot be expressed in a filter and becomes `*`;
    the caller must also compare the node of each event. Raises ValueError if no event type or no
    node can match.
    """
    types = [e for e in EVENTS if fnmatch.fnmatchcase(e.TYPE, type_pattern)]
    if not types:
        names = ", ".join(sorted(BY_TYPE))
        raise ValueError(f"no event type matches {type_pattern!r}; the types are: {names}")
    node = "*" if re.search(r"[*?\[]", node_pattern) else node_token(node_pattern)
    templates = [t for e in types for t in (e.SUBJECT, e.EARLIER_SUBJECT) if t]
    return tuple(re.sub(r"\{\w+\}", "*", t.replace("{node}", node)) for t in templates)
