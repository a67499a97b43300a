"""Pure: The vocabulary: every fact that crosses the bus, and its subject.

Subjects read `muster.<kind>.<node>.<rest>`: the node always stands third, so that a permission for
one node is `muster.<kind>.<node>.>`. Plugins speak on `heartbeat`, `event` and `rpc`; what muster
concludes from it goes out on `verdict`, `alert`, `label` and `notification`; `sys` is about muster
itself.

Node names are DNS subdomains and contain dots; on the bus a dot is written `_`, which no node name
may contain, so the way back is exact.
"""

import enum
import fnmatch
import functools
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, ClassVar, Final

import msgspec

SCHEMA_VERSION: Final = 1
FLEET: Final = "_fleet"
"""The node of a fact that concerns no single node; cannot collide: names start with [a-z0-9]."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Text = Annotated[str, msgspec.Meta(max_length=2048)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
_NODE_PATTERN: Final = r"^(_fleet|[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)$"
_PLUGIN_PATTERN: Final = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
NodeName = Annotated[str, msgspec.Meta(pattern=_NODE_PATTERN)]
PluginName = Annotated[str, msgspec.Meta(pattern=_PLUGIN_PATTERN)]
# what a fleet's beats bring again and again: for these names msgspec takes as long as for all else
# (0.22: half of 2.2 us), so that they are looked at where the subject is
BeatNode = Annotated[str, msgspec.Meta(extra_json_schema={"pattern": _NODE_PATTERN})]
BeatPlugin = Annotated[str, msgspec.Meta(extra_json_schema={"pattern": _PLUGIN_PATTERN})]
DeviceId = Annotated[str, msgspec.Meta(min_length=1, max_length=63)]

_YEARS: Final = (1970, 9000)
_NODE = re.compile(_NODE_PATTERN)
_PLUGIN = re.compile(_PLUGIN_PATTERN)
_TOKEN = re.compile(r"[A-Za-z0-9][-A-Za-z0-9_]{0,127}")


class Health(enum.StrEnum):
    """The kubelet's two words, spelled so (kubelet devicemanager: only `Healthy` is healthy)."""

    HEALTHY = "Healthy"
    UNHEALTHY = "Unhealthy"


class Condition(enum.StrEnum):
    """What may be true of a Healthy device: it works, but worse; or nobody can watch it."""

    DEGRADED = "degraded"
    UNMONITORED = "unmonitored"


class RegistrationReason(enum.StrEnum):
    """Why a resource was registered with the kubelet: it is new, or was lost."""

    START = "start"
    KUBELET_SOCKET_REPLACED = "kubelet_socket_replaced"
    OWN_SOCKET_LOST = "own_socket_lost"
    STREAM_CLOSED = "stream_closed"
    NO_STREAM = "no_stream"
    REGISTER_FAILED = "register_failed"
    SERVER_ENDED = "server_ended"
    PROBE_FAILED = "probe_failed"
    CONFIGURATION_CHANGED = "configuration_changed"
    DEVICE_APPEARED = "device_appeared"


class StopReason(enum.StrEnum):
    """Why a plugin says goodbye."""

    SIGNAL = "signal"
    CONFIGURATION = "configuration"
    UPGRADE = "upgrade"


class Verdict(enum.StrEnum):
    """What health concludes about one plugin."""

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
    SPLIT_BRAIN = "SPLIT_BRAIN"


class AlertKind(enum.StrEnum):
    """What an alert is about: a verdict that needs a person, devices, all the fleet, or muster.

    The notifier itself raises the last two.
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
    CLOCK_SKEW = "clock_skew"
    STORM = "storm"
    MORE_ALERTS = "more_alerts"
    HEALTH_SILENT = "health_silent"
    DEAD_LETTERS = "dead_letters"


class Severity(enum.StrEnum):
    """How soon a person is needed."""

    CRITICAL = "critical"
    WARNING = "warning"
    INFO = "info"


class Remedy(enum.StrEnum):
    """What became of a plan to restart a plugin."""

    ACTED = "acted"
    DRY_RUN = "dry_run"
    REFUSED = "refused"
    FAILED = "failed"


class AlertState(enum.StrEnum):
    """Alertmanager's two words."""

    FIRING = "firing"
    RESOLVED = "resolved"


class NotificationReason(enum.StrEnum):
    """Why a notification is sent now (Alertmanager notify/dedup_stage.go).

    ACKNOWLEDGED is ours: what was told still fires, and somebody has silenced it meanwhile.
    """

    FIRST = "first"
    NEW_ALERTS = "new_alerts"
    NEW_RESOLVED = "new_resolved"
    ALL_RESOLVED = "all_resolved"
    REPEAT = "repeat"
    ACKNOWLEDGED = "acknowledged"


class Phase(enum.StrEnum):
    """Where in its life a plugin says it is."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


class _Struct(msgspec.Struct, frozen=True, kw_only=True):
    """Unknown fields are ignored: a newer sender may say more than an older receiver knows."""


class Evidence(_Struct, frozen=True, kw_only=True):
    """One observation behind a verdict: who saw it, and what, in words a person understands."""

    source: Name
    observed: Text


class MigDevice(_Struct, frozen=True, kw_only=True):
    """One MIG device of a GPU: a compute instance `ci` within a GPU instance `gi`.

    `index` is NVML's within the GPU, where numbers may be missing. The slices and engines are those
    of NVML's device attributes.
    """

    uuid: Name
    profile: Name
    gi: Count
    ci: Count
    index: Count | None = None
    memory_mib: Count | None = None
    multiprocessors: Count | None = None
    gi_slices: Count | None = None
    ci_slices: Count | None = None
    copy_engines: Count | None = None
    decoders: Count | None = None
    encoders: Count | None = None
    jpeg_engines: Count | None = None
    ofa_engines: Count | None = None


class Gpu(_Struct, frozen=True, kw_only=True):
    """What is known about a GPU; `None` is unknown, never zero.

    `index` is NVML's and may change between boots; `minor` is the number of /dev/nvidia<minor>.
    `pci_class` is as sysfs writes it (0x030200). `mig_enabled` is None where MIG cannot be.
    `clique` is `<cluster uuid>.<clique id>` of its NVLink fabric, empty if it is in none. `vgpu`
    says whether this is a virtual GPU in a guest (NVML's virtualization mode VGPU).
    """

    uuid: Name
    product: Text
    memory_mib: Count | None = None
    index: Count | None = None
    minor: Count | None = None
    serial: str | None = None
    compute_capability: str | None = None
    pci_bus_id: str | None = None
    pci_class: str | None = None
    numa_node: int | None = None
    mig_enabled: bool | None = None
    mig: tuple[MigDevice, ...] = ()
    clique: str = ""
    vgpu: bool | None = None


class GpuResource(_Struct, frozen=True, kw_only=True):
    """How the GPUs of one resource are handed out: `replicas` of each, 1 if not shared.

    `was` is the name it would have without sharing. `profile` is empty for whole GPUs.
    """

    name: Name
    was: Name
    replicas: Count = 1
    profile: str = ""


class GpuNode(_Struct, frozen=True, kw_only=True):
    """Everything about a node's GPUs that is no device of the kubelet's.

    `problem` says why there are none, or which could not be read; empty if all is well.
    """

    gpus: tuple[Gpu, ...] = ()
    resources: tuple[GpuResource, ...] = ()
    mig_strategy: str = "none"
    driver_version: str | None = None
    cuda_version: str | None = None
    machine: str | None = None
    problem: Text = ""
    simulated: bool = False


class Device(_Struct, frozen=True, kw_only=True):
    """One schedulable unit as the kubelet sees it. `reason` says why it is not Healthy.

    `physical` is the uuid of the GPU or MIG device behind it, the same for all its replicas; empty
    for anything else. It stands for `count` units that are alike but for their ids, of which `id`
    is the first.
    """

    id: DeviceId
    resource: Name
    health: Health = Health.HEALTHY
    reason: Text = ""
    simulated: bool = False
    numa_node: int | None = None
    physical: str = ""
    count: Annotated[int, msgspec.Meta(ge=1, le=2**31)] = 1


class Event(_Struct, frozen=True, kw_only=True):
    """A fact, in the past tense. `at` is UTC, stamped by the door that saw it."""

    TYPE: ClassVar[str]
    SUBJECT: ClassVar[str]

    node: NodeName
    at: datetime

    def __post_init__(self) -> None:
        """Refuse a node or an `at` that could not cross the bus."""
        node_token(self.node)
        _refuse_time("at", self.at)

    @property
    def subject(self) -> str:
        """The NATS subject this fact is published on."""
        return _fill(self.SUBJECT, self)


class PluginEvent(Event, frozen=True, kw_only=True):
    """A fact that a plugin reports about its node."""

    plugin: PluginName


class PluginStarted(PluginEvent, frozen=True, kw_only=True):
    """A plugin process serves; sent at start and again after every (re)connect to the bus."""

    TYPE = "plugin.started"
    SUBJECT = "muster.event.{node}.{plugin}.plugin.started"
    version: str
    instance: Name
    config_hash: str = ""
    resources: tuple[Name, ...] = ()


class PluginRegistered(PluginEvent, frozen=True, kw_only=True):
    """The kubelet took a registration and opened its stream."""

    TYPE = "plugin.registered"
    SUBJECT = "muster.event.{node}.{plugin}.plugin.registered"
    resource: Name
    endpoint: str
    reason: RegistrationReason
    registrations: Count


class PluginDeregistered(PluginEvent, frozen=True, kw_only=True):
    """The kubelet no longer lists a resource of this plugin; the plugin is repairing it."""

    TYPE = "plugin.deregistered"
    SUBJECT = "muster.event.{node}.{plugin}.plugin.deregistered"
    resource: Name
    reason: RegistrationReason
    detail: Text = ""


class PluginStopping(PluginEvent, frozen=True, kw_only=True):
    """Goodbye: a planned end. `expected_return_s` is 0 when nobody expects it back."""

    TYPE = "plugin.stopping"
    SUBJECT = "muster.event.{node}.{plugin}.plugin.stopping"
    reason: StopReason
    expected_return_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 0.0


class InventoryReported(PluginEvent, frozen=True, kw_only=True):
    """The whole snapshot: at start, after every (re)connect, on a period and on request."""

    TYPE = "inventory.reported"
    SUBJECT = "muster.event.{node}.{plugin}.inventory.reported"
    devices: tuple[Device, ...]
    resources: tuple[Name, ...] = ()
    gpus: GpuNode | None = None


class DeviceAdded(PluginEvent, frozen=True, kw_only=True):
    """A device appeared and is advertised."""

    TYPE = "device.added"
    SUBJECT = "muster.event.{node}.{plugin}.device.added"
    device: Device


class DeviceRemoved(PluginEvent, frozen=True, kw_only=True):
    """A device left the list for good; `physical` as in `Device`, once the last replica left.

    So do `count` replicas of one GPU or MIG device together, of which `device_id` is the first.
    """

    TYPE = "device.removed"
    SUBJECT = "muster.event.{node}.{plugin}.device.removed"
    resource: Name
    device_id: DeviceId
    reason: Text = ""
    physical: str = ""
    count: Annotated[int, msgspec.Meta(ge=1, le=2**31)] = 1


class DeviceHealthChanged(PluginEvent, frozen=True, kw_only=True):
    """A device turned Healthy or Unhealthy. `code` names the rule, such as `xid-79`.

    For a GPU or MIG device `device_id` is its uuid, and the event holds for all its replicas in
    the resource. `policy` says which rule of which policy decided, and where that comes from.
    """

    TYPE = "device.health_changed"
    SUBJECT = "muster.event.{node}.{plugin}.device.health_changed"
    resource: Name
    device_id: DeviceId
    health: Health
    reason: Text
    code: str = ""
    policy: Text = ""
    evidence: tuple[Evidence, ...] = ()
    pods: tuple[Text, ...] = ()
    """`namespace/name` of those that hold the device, where podresources told it."""


class DeviceConditionChanged(PluginEvent, frozen=True, kw_only=True):
    """Something is to be known of a device that stays Healthy; `condition` began or ended."""

    TYPE = "device.condition_changed"
    SUBJECT = "muster.event.{node}.{plugin}.device.condition_changed"
    resource: Name
    device_id: DeviceId
    condition: Condition
    holds: bool
    reason: Text
    code: str = ""
    policy: Text = ""
    evidence: tuple[Evidence, ...] = ()
    pods: tuple[Text, ...] = ()


class AllocationObserved(PluginEvent, frozen=True, kw_only=True):
    """The kubelet was given devices for a container; `pod` where podresources told it."""

    TYPE = "allocation.observed"
    SUBJECT = "muster.event.{node}.{plugin}.allocation.observed"
    resource: Name
    device_ids: tuple[DeviceId, ...]
    pod: str = ""


class ExpectationChanged(PluginEvent, frozen=True, kw_only=True):
    """A resource has fewer devices than configured as expected, or again enough (`short` empty)."""

    TYPE = "expectation.changed"
    SUBJECT = "muster.event.{node}.{plugin}.expectation.changed"
    resource: Name
    short: Text


class ConfigurationApplied(PluginEvent, frozen=True, kw_only=True):
    """A changed configuration is in force; resources that are not named were left alone.

    `restart` names the settings that changed and wait for the next start.
    """

    TYPE = "configuration.applied"
    SUBJECT = "muster.event.{node}.{plugin}.configuration.applied"
    config_hash: str
    added: tuple[Name, ...] = ()
    removed: tuple[Name, ...] = ()
    registered_again: tuple[Name, ...] = ()
    restart: tuple[str, ...] = ()


class ConfigurationRefused(PluginEvent, frozen=True, kw_only=True):
    """A changed configuration cannot be used; the one before stays in force."""

    TYPE = "configuration.refused"
    SUBJECT = "muster.event.{node}.{plugin}.configuration.refused"
    config_hash: str
    problems: tuple[Text, ...]


class ProblemChanged(PluginEvent, frozen=True, kw_only=True):
    """Something about the devices is not as it was meant, or no longer: no fault of a device."""

    TYPE = "problem.changed"
    SUBJECT = "muster.event.{node}.{plugin}.problem.changed"
    problem: Text
    holds: bool


class LabelEvent(Event, frozen=True, kw_only=True):
    """A fact about one node's labels."""

    labels: Mapping[str, str]
    reason: Text
    source: str = ""


class LabelsSuggested(LabelEvent, frozen=True, kw_only=True):
    """These labels would be right for the node; nothing was written."""

    TYPE = "labels.suggested"
    SUBJECT = "muster.label.{node}.labels.suggested"


class LabelsApplied(LabelEvent, frozen=True, kw_only=True):
    """These labels were written and read back."""

    TYPE = "labels.applied"
    SUBJECT = "muster.label.{node}.labels.applied"


class LabelsRefused(LabelEvent, frozen=True, kw_only=True):
    """These labels were asked for and not written; `reason` says why."""

    TYPE = "labels.refused"
    SUBJECT = "muster.label.{node}.labels.refused"


class VerdictChanged(Event, frozen=True, kw_only=True):
    """Health concluded something new about a plugin. `rule` names what decided.

    `leader` is the fencing revision of the health service that says so: a lower one than before is
    of a former leader.
    """

    TYPE = "verdict.changed"
    SUBJECT = "muster.verdict.{node}.{plugin}.verdict.changed"
    plugin: PluginName
    verdict: Verdict
    previous: Verdict | None = None
    rule: str
    evidence: tuple[Evidence, ...] = ()
    resources: tuple[Name, ...] = ()
    leader: Count = 0


class RemediationDecided(Event, frozen=True, kw_only=True):
    """Health restarted a plugin's pod, or says why it did not. `leader` as in VerdictChanged."""

    TYPE = "remediation.decided"
    SUBJECT = "muster.verdict.{node}.{plugin}.remediation.decided"
    plugin: PluginName
    verdict: Verdict
    outcome: Remedy
    reason: Text
    pod: str = ""
    leader: Count = 0


class AlertChanged(Event, frozen=True, kw_only=True):
    """An alert fires, fires otherwise, or is resolved. One fingerprint names it, first to last.

    A firing alert may change what it is about (a plugin that is down is then on a node that is):
    the newest by fingerprint holds. `change` counts from 0 while it fires. `devices` and `pods`
    name the first ones, of `devices_total` and `pods_total`. `advice` says what to do first.
    """

    TYPE = "alert.changed"
    SUBJECT = "muster.alert.{node}.{severity}.{kind}.{fingerprint}"
    plugin: PluginName
    kind: AlertKind
    severity: Severity
    state: AlertState
    fingerprint: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}$")]
    summary: Text
    starts_at: datetime
    ends_at: datetime | None = None
    resource: str = ""
    devices: tuple[DeviceId, ...] = ()
    devices_total: Count = 0
    pods: tuple[str, ...] = ()
    pods_total: Count = 0
    evidence: tuple[Evidence, ...] = ()
    advice: Text = ""
    runbook: str = ""
    change: Count = 0
    leader: Count = 0

    def __post_init__(self) -> None:
        """Refuse the times of no time zone as well."""
        super().__post_init__()
        _refuse_time("starts_at", self.starts_at)
        if self.ends_at is not None:
            _refuse_time("ends_at", self.ends_at)


class WatchdogTicked(Event, frozen=True, kw_only=True):
    """The leading health service watches. When this stops coming, nobody does: tell people so.

    `leader` is its fencing revision, `holder` its name; the next is due in `interval_s`.
    """

    TYPE = "watchdog.ticked"
    SUBJECT = "muster.sys.{node}.watchdog.ticked"
    leader: Count
    holder: Name
    interval_s: Annotated[float, msgspec.Meta(gt=0, le=3600)]


class NotificationEvent(Event, frozen=True, kw_only=True):
    """What became of one message about one group; the ledger speaking."""

    receiver: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][-A-Za-z0-9_]{0,62}$")]
    group: Text
    reason: NotificationReason
    firing: tuple[str, ...] = ()
    resolved: tuple[str, ...] = ()
    attempts: Count = 1


class NotificationDelivered(NotificationEvent, frozen=True, kw_only=True):
    """The receiver took it."""

    TYPE = "notification.delivered"
    SUBJECT = "muster.notification.{node}.{receiver}.notification.delivered"


class NotificationFailed(NotificationEvent, frozen=True, kw_only=True):
    """The receiver refused it, or was away for too long; it is kept among the dead letters.

    `outcome` is what the last attempt came to, in a word: `not_found`, `timed_out`.
    """

    TYPE = "notification.failed"
    SUBJECT = "muster.notification.{node}.{receiver}.notification.failed"
    error: Text
    outcome: Text = ""


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


class ResourceBeat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One resource in a heartbeat. Ages are the sender's monotonic seconds; -1 is never."""

    name: Name = msgspec.field(name="r")
    registered_age_s: float = msgspec.field(name="reg", default=-1.0)
    streams: Count = msgspec.field(name="law", default=0)
    last_send_age_s: float = msgspec.field(name="snd", default=-1.0)
    registrations: Count = msgspec.field(name="n", default=0)
    probe_ok: bool = msgspec.field(name="ok", default=False)
    probe_ms: float = msgspec.field(name="ms", default=0.0)
    probe_age_s: float = msgspec.field(name="pa", default=-1.0)
    devices: Count = msgspec.field(name="tot", default=0)
    healthy: Count = msgspec.field(name="up", default=0)
    allocated: Count = msgspec.field(name="al", default=0)
    problem: Text = msgspec.field(name="bad", default="")
    """What keeps this resource from the kubelet, in words; empty when nothing does."""
    short: Text = msgspec.field(name="few", default="")
    """That there are fewer devices than configured as expected, in words; else empty."""
    apart: Text = msgspec.field(name="odd", default="")
    """What the kubelet has listed otherwise than we told it, and for how long; else empty."""
    degraded: Count = msgspec.field(name="deg", default=0)
    unmonitored: Count = msgspec.field(name="unm", default=0)
    """How many of the devices are Healthy, but degraded; and how many nobody can watch."""
    away: bool = msgspec.field(name="awy", default=False)
    """The kubelet is away, or has just come: that is all that keeps this resource from it."""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A sign of life with what only the plugin itself can know; also the answer to a probe.

    Crosses core NATS as compact JSON: not stored, not acknowledged, its loss is the information.
    Order is (`instance`, `seq`); `wall` is shown and never compared.
    """

    SUBJECT: ClassVar[str] = "muster.heartbeat.{node}.{plugin}"
    TYPE: ClassVar[str] = "heartbeat"

    v: int = 1
    node: BeatNode
    plugin: BeatPlugin
    instance: Name = msgspec.field(name="i")
    boot: str = msgspec.field(name="b", default="")
    version: str = msgspec.field(name="ver", default="")
    config_hash: str = msgspec.field(name="cfg", default="")
    seq: Count
    interval_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = msgspec.field(name="t")
    uptime_s: Seconds = msgspec.field(name="up", default=0.0)
    wall: float = msgspec.field(name="w", default=0.0)
    phase: Phase = msgspec.field(name="ph", default=Phase.SERVING)
    kubelet_socket: str = msgspec.field(name="ks", default="")
    """`<inode>.<ctime>` of kubelet.sock at the last registration; empty before it."""
    resources: tuple[ResourceBeat, ...] = msgspec.field(name="res", default=())
    checkers: Mapping[str, float] = msgspec.field(name="chk", default_factory=dict)
    """Seconds since each health checker last succeeded."""
    loop_lag_ms: float = msgspec.field(name="lag", default=0.0)
    reconnects: Count = msgspec.field(name="rc", default=0)
    problems: tuple[Text, ...] = msgspec.field(name="prb", default=())
    """What is not as it was meant, and concerns no single resource; the first of it."""

    @property
    def subject(self) -> str:
        """The NATS subject this beat is published on. Raises ValueError for names without one."""
        return f"muster.heartbeat.{node_token(self.node)}.{_plugin_token(self.plugin)}"


def node_token(node: str) -> str:
    """Return the node name as one subject token: `a.b` becomes `a_b`.

    Raises ValueError for what no node can be called.
    """
    if not _NODE.fullmatch(node):
        raise ValueError(f"node: {node!r} is not a Kubernetes node name")
    return node.replace(".", "_")


@functools.lru_cache(maxsize=64)
def _plugin_token(plugin: str) -> str:
    if not _PLUGIN.fullmatch(plugin):
        raise ValueError(f"plugin: {plugin!r} cannot stand in a subject")
    return plugin


def node_of(token: str) -> str:
    """Return the node name that a subject token stands for; the inverse of `node_token`."""
    return token if token == FLEET else token.replace("_", ".")


def rpc_subject(node: str, plugin: str, verb: str) -> str:
    """Return the subject a plugin answers requests of this verb on, such as `probe`."""
    return f"muster.rpc.{node_token(node)}.{plugin}.{verb}"


def subject_filters(type_pattern: str, node_pattern: str = "*") -> tuple[str, ...]:
    """Return the NATS filters for the event types and nodes that two shell patterns name.

    A node pattern with wildcards inside (`gpu-*`) cannot be said in a filter and becomes `*`: the
    reader compares the node as well. Raises ValueError when no event type matches, or no node can.
    """
    types = [e for e in EVENTS if fnmatch.fnmatchcase(e.TYPE, type_pattern)]
    if not types:
        known = ", ".join(sorted(BY_TYPE))
        raise ValueError(f"no event type matches {type_pattern!r}; there are: {known}")
    node = "*" if re.search(r"[*?\[]", node_pattern) else node_token(node_pattern)
    return tuple(re.sub(r"\{\w+\}", "*", e.SUBJECT.replace("{node}", node)) for e in types)


def _refuse_time(name: str, time: datetime) -> None:
    if time.tzinfo is None:
        raise ValueError(f"{name}: a time without a time zone; use UTC")
    if not _YEARS[0] <= time.year < _YEARS[1]:
        # the first and last days of the calendar overflow in another time zone
        raise ValueError(f"{name}: the year {time.year} is none of ours")


def _fill(template: str, source: Event | Heartbeat) -> str:
    def token(match: re.Match[str]) -> str:
        field = match.group(1)
        value = str(getattr(source, field))
        if field == "node":
            return node_token(value)
        if not _TOKEN.fullmatch(value):
            raise ValueError(f"{field}: {value!r} cannot stand in a subject")
        return value

    return re.sub(r"\{(\w+)\}", token, template)
