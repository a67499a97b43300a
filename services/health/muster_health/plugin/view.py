"""Pure: what `/state` shows about one plugin."""

from datetime import datetime

import msgspec

from muster import vocabulary
from muster.vocabulary import AlertKind
from muster_health.model.snapshot import State
from muster_health.plugin import tracked_plugin


class Unhealthy(msgspec.Struct, frozen=True, kw_only=True):
    """A faulty device, as shown."""

    kind: AlertKind
    resource: str
    device: str
    why: str


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Everything known about one plugin, as shown; ages are seconds by our clock."""

    node: str
    plugin: str
    state: State
    verdict: vocabulary.Verdict | None
    since: datetime | None
    rule: str
    evidence: tuple[vocabulary.Evidence, ...]
    instance: str
    interval_s: float
    beat_age_s: float | None
    clock_skew_s: float
    expected: bool
    frozen: bool
    resources: tuple[str, ...]
    devices: dict[str, int]
    unhealthy: tuple[Unhealthy, ...]
    problems: tuple[str, ...]
    alerts: tuple[vocabulary.AlertChanged, ...]


def of(plugin: tracked_plugin.TrackedPlugin, now: float) -> View:
    """Return what is known about one plugin."""
    alive, machine, alerting = plugin.alive, plugin.verdict, plugin.alerting
    heard_at = alive.last_heard_at
    return View(
        node=plugin.node,
        plugin=plugin.plugin,
        state=machine.state,
        verdict=machine.standing.verdict,
        since=alerting.since,
        rule=alerting.rule,
        evidence=alerting.evidence,
        instance=alive.order.instance,
        interval_s=alive.order.interval_s,
        beat_age_s=None if heard_at is None else round(now - heard_at, 3),
        clock_skew_s=round(alive.clock.seconds, 3),
        expected=alive.is_expected,
        frozen=plugin.is_suspended,
        resources=plugin.reported.resources,
        devices=dict(plugin.counts.has or plugin.faults.totals),
        unhealthy=tuple(
            Unhealthy(kind=kind, resource=resource, device=device, why=fault.why)
            for (kind, resource), devices in sorted(plugin.faults.by_group.items())
            for device, fault in sorted(devices.items())
        ),
        problems=plugin.problems,
        alerts=plugin.open_alerts(),
    )
