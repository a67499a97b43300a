"""Pure: All that is known about one plugin, to be shown."""

from datetime import datetime

import msgspec

from muster import vocabulary
from muster.vocabulary import AlertKind
from muster_health.model.snapshot import State
from muster_health.plugin import tracked_plugin


class Unhealthy(msgspec.Struct, frozen=True, kw_only=True):
    """A device with something wrong, shown."""

    kind: AlertKind
    resource: str
    device: str
    why: str


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about one plugin, shown. Ages are seconds by our clock."""

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


def of(found: tracked_plugin.TrackedPlugin, now: float) -> View:
    """Return what is known."""
    state = found.state
    heard_at = state.silence.heard_at
    return View(
        node=found.node,
        plugin=found.plugin,
        state=state.state,
        verdict=state.verdict,
        since=found.since,
        rule=found.rule,
        evidence=found.evidence,
        instance=state.beats.instance,
        interval_s=state.beats.interval_s,
        beat_age_s=None if heard_at is None else round(now - heard_at, 3),
        clock_skew_s=round(found.skew.seconds, 3),
        expected=state.expected,
        frozen=state.is_held,
        resources=state.resources,
        devices=dict(found.census.has or found.devices.totals),
        unhealthy=tuple(
            Unhealthy(kind=kind, resource=resource, device=device, why=bad.why)
            for (kind, resource), them in sorted(found.devices.bad.items())
            for device, bad in sorted(them.items())
        ),
        problems=found.problems,
        alerts=found.open_alerts(),
    )
