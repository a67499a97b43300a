"""Pure: the settings of the health service, with all defaults and limits."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec

import muster
from muster import vocabulary
from muster.kubernetes import known_plugins
from muster.service import sections

Heartbeats = Annotated[int, msgspec.Meta(ge=1, le=100)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]


class Detection(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions for suspicions, verdicts and recoveries."""

    suspicion_beats: Annotated[float, msgspec.Meta(gt=1, le=100)] = 2.5
    """After how many intervals without a heartbeat a plugin is suspected; may be a fraction."""
    probe_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = 2.0
    """How long a probe or a Kubernetes query may take."""
    probes_max: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 256
    restart_s: Seconds = 2.0
    """How long a plugin may take to reconnect after an unannounced disconnection."""
    lease_stale_s: sections.Period = 20.0
    """A silent node whose lease is older than this is down; kubelets renew leases every 10 s."""
    ready_s: Seconds = 22.0
    """How long a plugin with a Ready pod must be cut off to count as UNREACHABLE.

    The default is 20 s, plus 2 s to notice that the plugin is back. A stopped process
    must fail its readiness probes within a shorter time."""
    review_s: sections.Period = 20.0
    """Delay before a lost plugin is probed again; doubled each time."""
    review_max_s: sections.Period = 120.0
    trouble_beats: Heartbeats = 2
    trouble_s: sections.Period = 3.0
    """How long a plugin may repair a problem itself; `trouble_beats` intervals if shorter."""
    starting_s: sections.Period = 15.0
    """Time for a plugin's first registration; a restarted kubelet may be busy."""
    mismatch_s: sections.Period = 30.0
    """How long the node's allocatable may differ from the plugin; kubelets report every 10 s."""
    degraded_s: sections.Period = 30.0
    checker_age_s: sections.Period = 300.0
    """A health checker that has not succeeded for this long counts as not monitoring."""
    lag_ms: sections.Period = 1000.0
    stretch_max: Annotated[float, msgspec.Meta(gt=1, le=100)] = 1.5
    """The mean time between heartbeats may be up to this many times the declared interval."""
    recover_beats: Heartbeats = 3
    recover_s: sections.Period = 15.0
    hold_s: sections.Period = 30.0
    """Healthy time required after a plugin's second failure; doubled after each later failure."""
    hold_max_s: sections.Period = 900.0
    flap_falls: Heartbeats = 3
    flap_window_s: sections.Period = 600.0
    patience_s: Seconds = 180.0
    """Delay between verdict and alert if the plugin may only be pausing."""
    missing_s: sections.Period = 120.0
    """How long an expected plugin may take to send its first heartbeat."""
    maintenance_s: sections.Period = 300.0
    """How long a plugin may stay away if it announced a stop without a duration."""
    reconnect_s: sections.Period = 5.0
    """The longest time that clients need to reconnect to a restarted NATS server."""
    stall_s: sections.Period = 1.0
    """If health runs later than planned by more than this, all waits grow by that delay."""
    blind_s: Seconds = 10.0
    """How long our own connection may be down before people are notified without NATS."""
    interval_s: sections.Period = 5.0
    """The interval assumed for a plugin that has not declared its own yet."""
    configuration_s: Seconds = 300.0
    """How long a refused configuration may stay uncorrected before people are notified."""
    skew_s: sections.Period = 5.0
    storm_min: Count = 5
    storm_share: Share = 0.1
    storm_window_s: sections.Period = 10.0
    """The time within which plugins must fail to count as one mass failure.

    They must be on more than `storm_min` nodes, and either have a common cause or be on more than
    `storm_share` of all nodes."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on stored and published data, for each node and for the fleet."""

    alerts_per_minute: Count = 60
    alerts_per_node_minute: Count = 10
    nodes: Count = 20_000
    """How many nodes are tracked until the Kubernetes API has listed the nodes."""
    plugins_per_node: Count = vocabulary.PLUGINS_MAX
    devices_per_plugin: Count = 10_000
    alerts_per_plugin: Count = 32
    update_s: sections.Period = 5.0
    """The shortest time between two updates of an open alert that stays of the same kind."""


class RemediationMode(enum.StrEnum):
    """Whether health may restart a plugin to repair it."""

    OFF = "off"
    DRY_RUN = "dry-run"
    RESTART_PLUGIN = "restart-plugin"


class Remediation(msgspec.Struct, frozen=True, kw_only=True):
    """Whether and how often health restarts plugins to repair them."""

    mode: RemediationMode = RemediationMode.OFF
    per_hour: Count = 6
    node_backoff_s: sections.Period = 600.0
    """Shortest time between two restarts on a node; doubled each time, reset after a quiet day."""
    watched: bool = False
    """Whether pods of plugins that muster does not run may be restarted, too."""


class Plugin(msgspec.Struct, frozen=True, kw_only=True):
    """Where one plugin should run: on nodes with the labels `nodes`, or where its DaemonSet is.

    `daemonset` is the name of a DaemonSet in `namespace`; if it is empty, the plugin's pods are
    unknown.
    """

    plugin: vocabulary.PluginName = "device-plugin"
    namespace: vocabulary.Name = "muster"
    daemonset: Annotated[str, msgspec.Meta(max_length=253)] = ""
    nodes: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        """Refuse a plugin without a way to select its nodes."""
        if not self.daemonset and not self.nodes:
            raise ValueError(
                "set the plugin's daemonset, or the labels of the nodes where it should run"
            )


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach the Kubernetes API (by kubeconfig, or else as a pod), and what to read from it.

    Health never looks for a kubeconfig: on a laptop it could belong to a production cluster.
    """

    kubeconfig: str | None = None
    context: str | None = None
    plugins: tuple[Plugin, ...] = ()
    cause_labels: tuple[vocabulary.Name, ...] = ("topology.kubernetes.io/zone",)
    """Node labels that may show a common cause, such as the zone."""
    asks_max: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 32
    """How many nodes are queried concurrently; each query needs three or more requests."""
    known: Annotated[
        tuple[known_plugins.KnownPlugin, ...], msgspec.Meta(max_length=known_plugins.ENTRIES_MAX)
    ] = ()
    """Plugins that muster does not run, by image or label, in addition to the well-known ones."""
    reads_plugins: bool = False
    """Whether the Kubernetes API is read every minute to check plugins that muster does not run."""

    def __post_init__(self) -> None:
        """Refuse a context without a kubeconfig, and a plugin that is listed twice."""
        if self.context is not None and self.kubeconfig is None:
            raise ValueError("context: set kubeconfig, too")
        names = [plugin.plugin for plugin in self.plugins]
        if len(names) != len(set(names)):
            raise ValueError("plugins: a plugin is listed twice")


class Leading(msgspec.Struct, frozen=True, kw_only=True):
    """Leader election among replicas: how soon another replica leads when the leader is gone."""

    ttl_s: Annotated[int, msgspec.Meta(ge=1, le=60)] = 5
    renew_s: sections.Period = 1.5
    margin_s: sections.Period = 1.0
    """We stop leading this long before the lock could expire."""
    watchdog_s: sections.Period = 10.0

    def __post_init__(self) -> None:
        """Refuse a lock that would expire between two renewals."""
        if self.renew_s + self.margin_s >= self.ttl_s:
            raise ValueError("ttl_s: must be more than renew_s and margin_s together")


class OutOfBandAlarm(msgspec.Struct, frozen=True, kw_only=True):
    """How people are notified without NATS: by an Event about our pod, and by a webhook."""

    namespace: Annotated[str, msgspec.Meta(max_length=63)] = ""
    pod: Annotated[str, msgspec.Meta(max_length=253)] = ""
    """The name of our own pod (downward API); without it the Event is about the namespace."""
    webhook_url: Annotated[str, msgspec.Meta(pattern="^(https?://.+)?$", max_length=2048)] = ""


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """Where inputs are recorded for `muster replay`; by default they are not recorded."""

    file: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    mib_max: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 64
    """The limit for this file and its predecessor `FILE.1` together; a heartbeat takes 0.4 KiB."""


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """Options for the exported metrics."""

    per_node: bool = True
    """Whether the verdict on each plugin is exported: 13 series for each plugin of each node."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the health service."""

    bus: sections.Bus = sections.Bus()
    streams: sections.Streams = sections.Streams()
    http: sections.Http = sections.Http()
    log: sections.Log = sections.Log()
    detection: Detection = Detection()
    bounds: Bounds = Bounds()
    remediation: Remediation = Remediation()
    cluster: Cluster = Cluster()
    leading: Leading = Leading()
    blind: OutOfBandAlarm = OutOfBandAlarm()
    recording: Recording = Recording()
    metrics: Metrics = Metrics()
    runbook_url: Annotated[str, msgspec.Meta(min_length=1, max_length=512)] = muster.RUNBOOKS_URL
    """The beginning of an alert's runbook link, before `<alert kind>.html`."""


@dataclass(slots=True, kw_only=True, eq=False)
class Context:
    """The state that all plugins of the fleet share.

    `leader` is the revision under which we lead; None while we do not lead. `wall_zero` is UTC in
    seconds at second 0 of our monotonic clock. `is_our_clock_skewed` means that our clock differs
    from those of most nodes.
    """

    settings: Detection
    bounds: Bounds
    runbook_url: str
    has_cluster: bool
    leader: int | None
    wall_zero: float = 0.0
    is_our_clock_skewed: bool = False
