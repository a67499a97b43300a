"""Pure: a plugin's messages: its life cycle, configuration, devices, GPUs and heartbeats."""

import enum
from collections.abc import Mapping
from typing import Annotated, ClassVar

import msgspec

from muster.vocabulary import facts, fuse, watch


class Health(enum.StrEnum):
    """The kubelet's two health values, in its spelling; only `Healthy` counts as healthy."""

    HEALTHY = "Healthy"
    UNHEALTHY = "Unhealthy"


class Condition(enum.StrEnum):
    """A condition of a Healthy device: it is degraded, or it cannot be monitored."""

    DEGRADED = "degraded"
    UNMONITORED = "unmonitored"


class RegistrationReason(enum.StrEnum):
    """Why a resource must be registered with the kubelet: it is new, has changed, or was lost."""

    START = "start"
    KUBELET_SOCKET_REPLACED = "kubelet_socket_replaced"
    OWN_SOCKET_LOST = "own_socket_lost"
    STREAM_CLOSED = "stream_closed"
    NO_STREAM = "no_stream"
    REGISTER_FAILED = "register_failed"
    SERVER_ENDED = "server_ended"
    PROBE_FAILED = "probe_failed"
    DISPLACED = "displaced"
    CONFIGURATION_CHANGED = "configuration_changed"
    DEVICE_APPEARED = "device_appeared"


class StopReason(enum.StrEnum):
    """Why a plugin stops."""

    SIGNAL = "signal"
    CONFIGURATION = "configuration"
    UPGRADE = "upgrade"


class MigDevice(facts.Struct, frozen=True, kw_only=True):
    """One MIG device of a GPU: a compute instance `ci` within a GPU instance `gi`.

    `index` is NVML's index within the GPU; indices may have gaps. The slices and engines are those
    of NVML's device attributes.
    """

    uuid: facts.Name
    profile: facts.Name
    gi: facts.Count
    ci: facts.Count
    index: facts.Count | None = None
    memory_mib: facts.Count | None = None
    multiprocessors: facts.Count | None = None
    gi_slices: facts.Count | None = None
    ci_slices: facts.Count | None = None
    copy_engines: facts.Count | None = None
    decoders: facts.Count | None = None
    encoders: facts.Count | None = None
    jpeg_engines: facts.Count | None = None
    ofa_engines: facts.Count | None = None


class Gpu(facts.Struct, frozen=True, kw_only=True):
    """The properties of a GPU; `None` means unknown, never zero.

    `index` is NVML's index and may change between boots; `minor` is the number of
    /dev/nvidia<minor>. `pci_class` is as sysfs writes it (0x030200). `mig_enabled` is None if MIG
    is not supported. `clique` is `<cluster uuid>.<clique id>` of its NVLink fabric, empty without a
    fabric. `vgpu` is whether this is a virtual GPU in a guest (NVML's virtualization mode VGPU).
    """

    uuid: facts.Name
    product: facts.Text
    memory_mib: facts.Count | None = None
    index: facts.Count | None = None
    minor: facts.Count | None = None
    serial: str | None = None
    compute_capability: str | None = None
    pci_bus_id: str | None = None
    pci_class: str | None = None
    numa_node: int | None = None
    mig_enabled: bool | None = None
    mig: tuple[MigDevice, ...] = ()
    clique: str = ""
    vgpu: bool | None = None


class GpuResource(facts.Struct, frozen=True, kw_only=True):
    """How the GPUs of one resource are shared: `replicas` per GPU, 1 if not shared.

    `was` is the resource's name without sharing. `profile` is the MIG profile, empty for whole
    GPUs.
    """

    name: facts.Name
    was: facts.Name
    replicas: facts.Count = 1
    profile: str = ""


class GpuNode(facts.Struct, frozen=True, kw_only=True):
    """The GPUs of a node, with details that the kubelet does not have.

    `problem` explains why there are no GPUs, or which GPUs could not be read; else it is empty.
    """

    gpus: tuple[Gpu, ...] = ()
    resources: tuple[GpuResource, ...] = ()
    mig_strategy: str = "none"
    driver_version: str | None = None
    cuda_version: str | None = None
    machine: str | None = None
    problem: facts.Text = ""
    simulated: bool = False


class Device(facts.Struct, frozen=True, kw_only=True):
    """A schedulable unit as the kubelet sees it. `reason` explains why it is not Healthy.

    `physical` is the uuid of the GPU or MIG device behind it, the same for all its replicas; empty
    for other devices. One Device stands for `count` units that differ only in their ids; `id` is
    the first.
    """

    id: facts.DeviceId
    resource: facts.Name
    health: Health = Health.HEALTHY
    reason: facts.Text = ""
    simulated: bool = False
    numa_node: int | None = None
    physical: str = ""
    count: Annotated[int, msgspec.Meta(ge=1, le=2**31)] = 1


class PluginStarted(facts.PluginEvent, frozen=True, kw_only=True):
    """A plugin process is serving; published at start and after every (re)connect to the bus."""

    TYPE = "plugin.started"
    SUBJECT = "muster.event.{node}.{plugin}.plugin.started"
    version: str
    instance: facts.Name
    config_hash: str = ""
    resources: tuple[facts.Name, ...] = ()


class PluginRegistered(facts.PluginEvent, frozen=True, kw_only=True):
    """The kubelet accepted a registration and opened the resource's ListAndWatch stream."""

    TYPE = "plugin.registered"
    SUBJECT = "muster.event.{node}.{plugin}.plugin.registered"
    resource: facts.Name
    endpoint: str
    reason: RegistrationReason
    registrations: facts.Count


class PluginDeregistered(facts.PluginEvent, frozen=True, kw_only=True):
    """The kubelet no longer lists a resource of this plugin; the plugin registers it again."""

    TYPE = "plugin.deregistered"
    SUBJECT = "muster.event.{node}.{plugin}.plugin.deregistered"
    resource: facts.Name
    reason: RegistrationReason
    detail: facts.Text = ""


class PluginStopping(facts.PluginEvent, frozen=True, kw_only=True):
    """A plugin stops as planned. `expected_return_s` is 0 if the plugin is not expected back."""

    TYPE = "plugin.stopping"
    SUBJECT = "muster.event.{node}.{plugin}.plugin.stopping"
    reason: StopReason
    expected_return_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 0.0


class InventoryReported(facts.PluginEvent, frozen=True, kw_only=True):
    """All devices of a plugin on its node; published after every connect, and periodically.

    A long inventory is published in `pages` messages: each has the next part of `devices`,
    `resources`, `fuse_mounts`, `watched`, and of the lists in `gpus`. Pages of the same `instance`
    and `version` belong together, and only all of them are an inventory
    (`muster.inventory_pages`).
    """

    TYPE = "inventory.reported"
    SUBJECT = "muster.inventory.{node}.{plugin}.{page}"
    EARLIER_SUBJECT = "muster.event.{node}.{plugin}.inventory.reported"
    devices: tuple[Device, ...]
    resources: tuple[facts.Name, ...] = ()
    gpus: GpuNode | None = None
    fuse_mounts: tuple[fuse.FuseMount, ...] = ()
    """All mounts of the broker `fuse-broker`; other plugins have none."""
    watched: tuple[watch.Watched, ...] = ()
    """All device plugins and drivers on the node that muster does not run, if it watches them."""
    version: facts.Count = 0
    """The sequence number of the inventory's event, which is the same on every page."""
    page: Annotated[int, msgspec.Meta(ge=0, le=facts.PAGES_MAX - 1)] = 0
    pages: Annotated[int, msgspec.Meta(ge=1, le=facts.PAGES_MAX)] = 1


class DeviceAdded(facts.PluginEvent, frozen=True, kw_only=True):
    """A device appeared and is advertised."""

    TYPE = "device.added"
    SUBJECT = "muster.event.{node}.{plugin}.device.added"
    device: Device


class DeviceRemoved(facts.PluginEvent, frozen=True, kw_only=True):
    """A device was removed permanently; `physical` is set when its last replica is gone.

    The event represents `count` replicas of one GPU or MIG device; `device_id` is the first.
    """

    TYPE = "device.removed"
    SUBJECT = "muster.event.{node}.{plugin}.device.removed"
    resource: facts.Name
    device_id: facts.DeviceId
    reason: facts.Text = ""
    physical: str = ""
    count: Annotated[int, msgspec.Meta(ge=1, le=2**31)] = 1


class DeviceHealthChanged(facts.PluginEvent, frozen=True, kw_only=True):
    """A device became Healthy or Unhealthy. `code` names the rule, such as `xid-79`.

    For a GPU or MIG device, `device_id` is its uuid, and the event applies to all its replicas in
    the resource. `policy` names the policy and the rule that applied, with its source.
    """

    TYPE = "device.health_changed"
    SUBJECT = "muster.event.{node}.{plugin}.device.health_changed"
    resource: facts.Name
    device_id: facts.DeviceId
    health: Health
    reason: facts.Text
    code: str = ""
    policy: facts.Text = ""
    evidence: tuple[facts.Evidence, ...] = ()
    pods: tuple[facts.Text, ...] = ()
    """`namespace/name` of the pods that the device is allocated to, if podresources reports them.
    """


class DeviceConditionChanged(facts.PluginEvent, frozen=True, kw_only=True):
    """A condition of a device that stays Healthy began or ended."""

    TYPE = "device.condition_changed"
    SUBJECT = "muster.event.{node}.{plugin}.device.condition_changed"
    resource: facts.Name
    device_id: facts.DeviceId
    condition: Condition
    holds: bool
    reason: facts.Text
    code: str = ""
    policy: facts.Text = ""
    evidence: tuple[facts.Evidence, ...] = ()
    pods: tuple[facts.Text, ...] = ()


class AllocationObserved(facts.PluginEvent, frozen=True, kw_only=True):
    """Devices were allocated to a container; `pod` is set if podresources reports it."""

    TYPE = "allocation.observed"
    SUBJECT = "muster.event.{node}.{plugin}.allocation.observed"
    resource: facts.Name
    device_ids: tuple[facts.DeviceId, ...]
    pod: str = ""


class ExpectationChanged(facts.PluginEvent, frozen=True, kw_only=True):
    """A resource has fewer devices than expected, or enough again (then `short` is empty)."""

    TYPE = "expectation.changed"
    SUBJECT = "muster.event.{node}.{plugin}.expectation.changed"
    resource: facts.Name
    short: facts.Text


class ConfigurationApplied(facts.PluginEvent, frozen=True, kw_only=True):
    """A changed configuration is in force; resources that are not named did not change.

    `restart` names the changed settings that take effect only at the next start.
    """

    TYPE = "configuration.applied"
    SUBJECT = "muster.event.{node}.{plugin}.configuration.applied"
    config_hash: str
    added: tuple[facts.Name, ...] = ()
    removed: tuple[facts.Name, ...] = ()
    registered_again: tuple[facts.Name, ...] = ()
    restart: tuple[str, ...] = ()


class ConfigurationRefused(facts.PluginEvent, frozen=True, kw_only=True):
    """A changed configuration is invalid; the previous one stays in force."""

    TYPE = "configuration.refused"
    SUBJECT = "muster.event.{node}.{plugin}.configuration.refused"
    config_hash: str
    problems: tuple[facts.Text, ...]


class ProblemChanged(facts.PluginEvent, frozen=True, kw_only=True):
    """A problem with the configured devices, other than a device fault, began or ended."""

    TYPE = "problem.changed"
    SUBJECT = "muster.event.{node}.{plugin}.problem.changed"
    problem: facts.Text
    holds: bool


class Phase(enum.StrEnum):
    """The phase of a plugin's life cycle."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


class ResourceBeat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One resource in a heartbeat. Ages are seconds of the sender's monotonic clock; -1: never."""

    name: facts.Name = msgspec.field(name="r")
    registered_age_s: float = msgspec.field(name="reg", default=-1.0)
    streams: facts.Count = msgspec.field(name="law", default=0)
    last_send_age_s: float = msgspec.field(name="snd", default=-1.0)
    registrations: facts.Count = msgspec.field(name="n", default=0)
    probe_ok: bool = msgspec.field(name="ok", default=False)
    probe_ms: float = msgspec.field(name="ms", default=0.0)
    probe_age_s: float = msgspec.field(name="pa", default=-1.0)
    devices: facts.Count = msgspec.field(name="tot", default=0)
    healthy: facts.Count = msgspec.field(name="up", default=0)
    allocated: facts.Count = msgspec.field(name="al", default=0)
    problem: facts.Text = msgspec.field(name="bad", default="")
    """Why this resource is not registered with the kubelet; empty if it is."""
    short: facts.Text = msgspec.field(name="few", default="")
    """A description of the shortage of devices; empty if there is none."""
    mismatch: facts.Text = msgspec.field(name="odd", default="")
    """How the kubelet's list differs from the plugin's, and for how long; empty if they agree."""
    degraded: facts.Count = msgspec.field(name="deg", default=0)
    unmonitored: facts.Count = msgspec.field(name="unm", default=0)
    """How many Healthy devices cannot be monitored; `degraded` is how many are degraded."""
    kubelet_away: bool = msgspec.field(name="awy", default=False)
    """Whether the resource is unregistered only because the kubelet is down or has just started."""
    extended: bool = msgspec.field(name="ext", default=True)
    """Whether this is an extended resource, which the node's allocatable lists."""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A heartbeat: the status that a plugin reports about itself; also the answer to a probe.

    It is sent over core NATS as compact JSON, neither stored nor acknowledged: a missing heartbeat
    is the signal. Heartbeats are ordered by (`instance`, `seq`); `wall` is shown but never
    compared.
    """

    SUBJECT: ClassVar[str] = "muster.heartbeat.{node}.{plugin}"
    TYPE: ClassVar[str] = "heartbeat"

    v: int = 1
    node: facts.BeatNode
    plugin: facts.BeatPlugin
    instance: facts.Name = msgspec.field(name="i")
    boot: str = msgspec.field(name="b", default="")
    version: str = msgspec.field(name="ver", default="")
    config_hash: str = msgspec.field(name="cfg", default="")
    seq: facts.Count
    interval_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = msgspec.field(name="t")
    uptime_s: facts.Seconds = msgspec.field(name="up", default=0.0)
    wall: float = msgspec.field(name="w", default=0.0)
    phase: Phase = msgspec.field(name="ph", default=Phase.SERVING)
    kubelet_socket: str = msgspec.field(name="ks", default="")
    """`<inode>.<ctime>` of kubelet.sock at the last registration; empty before the first."""
    resources: tuple[ResourceBeat, ...] = msgspec.field(name="res", default=())
    checkers: Mapping[str, float] = msgspec.field(name="chk", default_factory=dict)
    """Seconds since each kind of check last succeeded."""
    loop_lag_ms: float = msgspec.field(name="lag", default=0.0)
    reconnects: facts.Count = msgspec.field(name="rc", default=0)
    problems: tuple[facts.Text, ...] = msgspec.field(name="prb", default=())
    """The first problems that do not concern a single resource."""

    @property
    def subject(self) -> str:
        """The NATS subject of the heartbeat. Raises ValueError for names not allowed in one."""
        return f"muster.heartbeat.{facts.node_token(self.node)}.{facts.plugin_token(self.plugin)}"
