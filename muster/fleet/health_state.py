"""Pure: health's `/state`: its structs, and how it is decoded.

Readers do not import the health service, so these are separate structs. Missing keys have defaults
and unknown keys are ignored, so that an older program can read the state of a newer service.
"""

from datetime import datetime
from typing import Final

import msgspec

from muster import escaping, matching, vocabulary

RECOVERING: Final = "RECOVERING"
"""Shown instead of the verdict after a problem has ended, until it counts as resolved."""
SUSPECTED: Final = "SUSPECTED"
"""Shown instead of HEALTHY while health finds out why a plugin is silent or reports a problem."""
_SUSPECT_STATE: Final = "suspect"
_WELL: Final = frozenset({vocabulary.Verdict.HEALTHY.value, vocabulary.Verdict.MAINTENANCE.value})
UNCONFIRMED: Final = frozenset(
    verdict.value
    for verdict in (
        vocabulary.Verdict.PLUGIN_DOWN,
        vocabulary.Verdict.STUCK,
        vocabulary.Verdict.UNREACHABLE,
        vocabulary.Verdict.NODE_DOWN,
        vocabulary.Verdict.DEREGISTERED,
        vocabulary.Verdict.MISSING,
    )
)
"""Verdicts on plugins that hand out no devices, even if the node's status still lists some."""
_ADVISORIES_FINE: Final = frozenset({"", "they come", "received"})
_RANK: Final = {severity.value: rank for rank, severity in enumerate(vocabulary.Severity)}


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One observation and its source."""

    source: str = ""
    observed: str = ""


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """A problem that ended at `since`, and counts as resolved at `until` unless it returns."""

    since: datetime
    until: datetime

    def text(self, now: datetime | None = None) -> str:
        """Return how long the problem must be absent; with `now`, also how long it was absent."""
        needed_s = round((self.until - self.since).total_seconds())
        if now is None:
            return f"recovering: must be well for {needed_s} s"
        # the clocks may differ
        good_s = min(max(0, int((now - self.since).total_seconds())), needed_s)
        return f"recovering: well for {good_s} of {needed_s} s"


class Alert(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One firing alert."""

    fingerprint: str = ""
    node: str = ""
    plugin: str = ""
    kind: str = ""
    severity: str = ""
    summary: str = ""
    starts_at: datetime | None = None
    resource: str = ""
    devices: tuple[str, ...] = ()
    devices_total: int = 0
    pods: tuple[str, ...] = ()
    pods_total: int = 0
    evidence: tuple[Evidence, ...] = ()
    advice: str = ""
    runbook: str = ""
    flapping: bool = False
    watched: str = ""
    recovery: Recovery | None = None

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels that silences match."""
        return matching.labels(
            kind=self.kind,
            severity=self.severity,
            node=self.node,
            plugin=self.plugin,
            resource=self.resource,
            devices=self.devices,
            is_flapping=self.flapping,
            watched=self.watched,
        )

    @property
    def reason(self) -> str:
        """Return the summary, preceded by `recovering: ...` if the problem has ended."""
        return f"{self.recovery.text()}: {self.summary}" if self.recovery else self.summary

    @property
    def urgency(self) -> tuple[int, str, str, str]:
        """Return the key for sorting: the most urgent first, then the oldest."""
        started = self.starts_at.isoformat() if self.starts_at else ""
        return (_RANK.get(self.severity, len(_RANK)), started, self.node, self.kind)


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A faulty device."""

    kind: str = ""
    resource: str = ""
    device: str = ""
    why: str = ""


class Plugin(msgspec.Struct, frozen=True, kw_only=True):
    """One plugin on one node; ages are in seconds on health's clock."""

    node: str
    plugin: str
    state: str = ""
    verdict: str | None = None
    since: datetime | None = None
    rule: str = ""
    evidence: tuple[Evidence, ...] = ()
    evidence_age_s: float | None = None
    instance: str = ""
    interval_s: float = 0.0
    beat_age_s: float | None = None
    clock_skew_s: float = 0.0
    is_expected: bool = msgspec.field(default=False, name="expected")
    is_suspended: bool = msgspec.field(default=False, name="frozen")
    resources: tuple[str, ...] = ()
    devices: dict[str, int] = msgspec.field(default_factory=dict)
    allocatable: dict[str, int] = msgspec.field(default_factory=dict)
    """The number of devices that pods may use, by resource, according to the node's status."""
    unhealthy: tuple[Device, ...] = ()
    mounts: int = 0
    """The number of FUSE mounts in the plugin's inventory."""
    problems: tuple[str, ...] = ()
    recovery: Recovery | None = None
    alerts: tuple[Alert, ...] = ()
    watched: str = ""
    """The resource or driver of a watched plugin; the next fields are set only for watched plugins.
    """
    agent: str = ""
    """The plugin that observes the watched plugin."""
    is_observed: bool = msgspec.field(default=True, name="observed")
    finding: str = ""
    text: str = ""
    socket: str = ""
    expected_devices: int | None = None
    allocated: int | None = None
    process: str = ""

    @property
    def name(self) -> str:
        """Return the name for people; for a watched plugin, its resource or driver."""
        return f"{self.watched} (watched)" if self.watched else self.plugin

    def is_named(self, name: str) -> bool:
        """Return whether `name` is the name of the plugin or of one of its resources."""
        return name in {self.plugin, self.watched, *self.resources}

    @property
    def past(self) -> tuple[Evidence, ...]:
        """Return the evidence of problems that have ended, but do not count as resolved yet."""
        if self.recovery is not None:
            return self.evidence
        return tuple(item for each in self.alerts if each.recovery for item in each.evidence)

    @property
    def label(self) -> str:
        """Return the verdict as lists show it; empty before the first verdict."""
        if self.recovery:
            return RECOVERING
        is_healthy = self.verdict == vocabulary.Verdict.HEALTHY.value
        return SUSPECTED if is_healthy and self.is_suspected else self.verdict or ""

    @property
    def is_suspected(self) -> bool:
        """Whether the plugin is silent or reports a problem, and no verdict about that exists."""
        return self.state == _SUSPECT_STATE and not self.is_suspended

    @property
    def is_confirmed(self) -> bool:
        """Whether the plugin works, so that a pod gets one of its devices."""
        return self.label == RECOVERING or self.verdict not in UNCONFIRMED

    @property
    def reasons(self) -> list[str]:
        """Return the reasons why the plugin is not healthy, as texts, the most urgent first."""
        reasons = [*self.problems]
        if self.is_suspended:
            reasons.append("suspended: many plugins became silent at the same time")
        if self.is_suspected:
            reasons.append("suspected: silent, or it reports a problem; no verdict yet")
        if not self.is_observed:
            reasons.append("not observed at present")
        if self.recovery is not None:
            reasons.append(self.recovery.text())
        if not reasons and self.verdict not in _WELL and self.evidence:
            reasons.append(f"{self.evidence[0].source}: {self.evidence[0].observed}")
        return reasons

    @property
    def is_well(self) -> bool:
        """Whether the plugin is HEALTHY or in MAINTENANCE, with no alert, problem or suspicion."""
        has_doubts = self.is_suspended or self.is_suspected
        return self.verdict in _WELL and not (self.alerts or has_doubts or self.problems)


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the whole fleet; alerts about `held` plugins are delayed by the rate limit."""

    alerts: tuple[Alert, ...] = ()
    mass_failures: int = msgspec.field(default=0, name="storms")
    suspects: int = 0
    held: int = 0


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """The health service itself; `revision` is its term if it leads."""

    revision: int | None = msgspec.field(default=None, name="leads")
    leader: str | None = None
    is_disconnected: bool = msgspec.field(default=False, name="blind")
    advisories: str = ""
    publishing_problem: str = msgspec.field(default="", name="telling")
    notified: str = ""
    """Why alerts might not reach people."""
    notifier_alerts: tuple[Alert, ...] = ()
    """The alerts that the notifier itself raises."""
    cluster: str | dict[str, str] = ""


class Place(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node's pool and zone according to its labels; empty if unknown."""

    pool: str = ""
    zone: str = ""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `/state`, or of one page of it."""

    plugins: tuple[Plugin, ...]
    fleet: Fleet
    service: Service
    places: dict[str, Place] = msgspec.field(default_factory=dict)
    """By node; nodes whose pool and zone are unknown are left out."""
    next: str = ""
    """The last node of this page; empty if no page follows."""

    @property
    def alerts(self) -> list[Alert]:
        """Return all firing alerts, the most urgent first, then the oldest."""
        of_plugins = (alert for plugin in self.plugins for alert in plugin.alerts)
        return sorted(
            [*self.fleet.alerts, *self.service.notifier_alerts, *of_plugins],
            key=lambda alert: alert.urgency,
        )

    def caveats(self) -> list[str]:
        """Return the reasons why the state is incomplete or out of date."""
        service = self.service
        notes = []
        if service.is_disconnected:
            notes.append("health is disconnected from NATS; this is what it last received")
        if service.revision is None:
            leader = service.leader or "unknown"
            notes.append(
                f"this health service is not the leader ({leader}); its alerts may be out of date"
            )
        if self.fleet.mass_failures:
            notes.append(
                "mass failure: many plugins became silent at the same time; verdicts are suspended"
            )
        notes += [service.publishing_problem] if service.publishing_problem else []
        notes += [service.notified] if service.notified else []
        if service.advisories not in _ADVISORIES_FINE:
            notes.append(f"connections: {service.advisories}")
        if isinstance(service.cluster, str):
            notes += [f"Kubernetes: {service.cluster}"] if service.cluster else []
        else:
            notes += [f"Kubernetes: {what}: {why}" for what, why in sorted(service.cluster.items())]
        return [escaping.plain(note) for note in notes]


def decode(body: bytes) -> State:
    """Decode `/state`. Raises ValueError if it is invalid."""
    try:
        return msgspec.json.decode(body, type=State)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None
