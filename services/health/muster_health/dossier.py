"""Pure. All that is known about one plugin: its state, its devices, its open alerts.

What changes is told by `commit`: remembered with what is to be told, then told, then remembered
without. A crash at any point between repeats a telling under the same id, or nothing.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

import msgspec

from muster import vocabulary
from muster.vocabulary import AlertKind
from muster_health import (
    alerts,
    config,
    devices,
    evidence,
    plugin_state,
    signals,
    snapshot,
    steps,
)
from muster_health.snapshot import State

_INSTANCES_MAX: Final = 4


class Unhealthy(msgspec.Struct, frozen=True, kw_only=True):
    """An unhealthy device, shown."""

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
    resources: tuple[str, ...]
    devices: dict[str, int]
    unhealthy: tuple[Unhealthy, ...]
    alerts: tuple[vocabulary.AlertChanged, ...]


class Dossier:
    """One plugin on one node."""

    def __init__(
        self, node: str, plugin: str, settings: config.Detection, *, now: float, runbook_url: str
    ) -> None:
        self.node, self.plugin = node, plugin
        self.key = key_of(node, plugin)
        self.state = plugin_state.PluginState(settings, now)
        self.alerts: dict[alerts.Key, alerts.Alert] = {}
        self._devices = devices.Devices()
        self._runbook_url = runbook_url
        self._since: datetime | None = None
        self._rule = ""
        self._evidence: tuple[vocabulary.Evidence, ...] = ()
        self._order: tuple[tuple[str, int], ...] = ()
        self._verdict_untold: vocabulary.VerdictChanged | None = None
        self._alerts_untold: list[alerts.Alert] = []

    def restore(self, known: snapshot.Snapshot, now: float) -> list[signals.Output]:
        """Go on where a former process stopped; tell what it may not have told."""
        self.alerts = {alert.key: alert for alert in known.firing}
        overdue = any(alert.kind is AlertKind.MAINTENANCE_OVERDUE for alert in known.firing)
        self.state.restore(known, now, overdue=overdue)
        for alert in known.firing:
            if alert.kind is AlertKind.DEVICE_UNHEALTHY:
                self._devices.restore(alert.resource, alert.device, alert.evidence[0].observed)
        self._since, self._rule, self._evidence = known.since, known.rule, known.evidence
        self._order = known.order
        self._verdict_untold = known.untold_verdict
        self._alerts_untold = list(known.untold_alerts)
        return self.commit()[1:]

    def is_news(self, instance: str, sequence: int) -> bool:
        """Take an event's place in order; False if it came before what we know already.

        After a restart of ours, the server delivers again what we had not acknowledged, and later
        than what followed it.
        """
        known = dict(self._order)
        if sequence <= known.pop(instance, -1):
            return False
        # a former instance may be the one that stays: an update rolled back, a second one stopped
        self._order = (*known.items(), (instance, sequence))[-_INSTANCES_MAX:]
        return True

    def report(self, event: vocabulary.Event, at: datetime) -> None:
        """Take what the plugin says about its devices."""
        for turned in self._devices.apply(event):
            seen = (evidence.seen("plugin", turned.why),)
            key = (AlertKind.DEVICE_UNHEALTHY, turned.resource, turned.device)
            if not turned.unhealthy:
                self._close(key, at, seen)
                continue
            where = f"{turned.resource} {turned.device} on {self.node}"
            self._open(
                alerts.Alert(
                    kind=AlertKind.DEVICE_UNHEALTHY,
                    summary=f"{where} is unhealthy: {seen[0].observed}",
                    evidence=seen,
                    starts_at=at,
                    resource=turned.resource,
                    device=turned.device,
                )
            )

    def conclude(self, found: steps.Conclusion, at: datetime) -> None:
        """Take a verdict: its alert opens, the alert of the verdict before it closes."""
        self._since, self._rule, self._evidence = at, found.rule, found.evidence
        self._verdict_untold = vocabulary.VerdictChanged(
            node=self.node,
            at=at,
            plugin=self.plugin,
            verdict=found.verdict,
            previous=found.previous,
            rule=found.rule,
            evidence=found.evidence,
            resources=found.resources,
        )
        kind = alerts.kind_of(found.verdict)
        for key in [key for key in self.alerts if key[0] is not AlertKind.DEVICE_UNHEALTHY]:
            if key[0] is not kind:
                self._close(key, at, found.evidence)
        if kind is not None:
            self._open_own(kind, at, found.evidence, found.resources)

    def overdue(self, found: steps.Overdue, at: datetime) -> None:
        """Take that a planned end lasts too long."""
        kind = AlertKind.MAINTENANCE_OVERDUE
        self._open_own(kind, at, found.evidence, self.state.resources)

    def commit(self) -> list[signals.Output]:
        """Return what is to be done about what changed since the last call, in order."""
        tellings = self._tellings()
        if not tellings:
            return []
        before = self._remember()
        self._verdict_untold = None
        self._alerts_untold.clear()
        return [before, *tellings, self._remember()]

    def view(self, now: float) -> View:
        """Return what is known, to be shown."""
        state = self.state
        return View(
            node=self.node,
            plugin=self.plugin,
            state=state.state,
            verdict=state.verdict,
            since=self._since,
            rule=self._rule,
            evidence=self._evidence,
            instance=state.beats.instance,
            interval_s=state.beats.interval_s,
            beat_age_s=None if state.heard_at is None else round(now - state.heard_at, 3),
            resources=state.resources,
            devices=dict(self._devices.totals),
            unhealthy=tuple(
                Unhealthy(resource=resource, device=device, why=why)
                for (resource, device), why in sorted(self._devices.unhealthy().items())
            ),
            alerts=tuple(self._changed(alert) for alert in self.alerts.values()),
        )

    def _open_own(
        self,
        kind: AlertKind,
        at: datetime,
        seen: tuple[vocabulary.Evidence, ...],
        resources: tuple[str, ...],
    ) -> None:
        summary = alerts.summary_of(kind, node=self.node, plugin=self.plugin, resources=resources)
        self._open(alerts.Alert(kind=kind, summary=summary, evidence=seen, starts_at=at))

    def _open(self, alert: alerts.Alert) -> None:
        if alert.key not in self.alerts:
            self.alerts[alert.key] = alert
            self._alerts_untold.append(alert)

    def _close(self, key: alerts.Key, at: datetime, seen: tuple[vocabulary.Evidence, ...]) -> None:
        alert = self.alerts.pop(key, None)
        if alert is not None:
            self._alerts_untold.append(alert.resolved(at, seen))

    def _tellings(self) -> Sequence[signals.Publish]:
        verdict = self._verdict_untold
        told: list[signals.Publish] = []
        if verdict is not None:
            event_id = f"{self.key}:{verdict.verdict}:{verdict.at.isoformat()}"
            told.append(signals.Publish(event=verdict, event_id=event_id))
        for alert in self._alerts_untold:
            event = self._changed(alert)
            told.append(signals.Publish(event=event, event_id=alerts.event_id(event)))
        return told

    def _changed(self, alert: alerts.Alert) -> vocabulary.AlertChanged:
        return alerts.changed(
            alert, node=self.node, plugin=self.plugin, runbook_url=self._runbook_url
        )

    def _remember(self) -> signals.Remember:
        state = self.state
        known = snapshot.Snapshot(
            node=self.node,
            plugin=self.plugin,
            state=state.settled,
            interval_s=state.beats.interval_s,
            verdict=state.verdict,
            since=self._since,
            rule=self._rule,
            evidence=self._evidence,
            resources=state.resources,
            instance=state.beats.instance,
            seq=state.beats.seq,
            leaving=state.leaving,
            return_s=state.return_s,
            order=self._order,
            firing=tuple(self.alerts.values()),
            untold_verdict=self._verdict_untold,
            untold_alerts=tuple(self._alerts_untold),
        )
        return signals.Remember(key=self.key, value=snapshot.encode(known))


def key_of(node: str, plugin: str) -> str:
    """Return the key a plugin is remembered under."""
    return f"{vocabulary.node_token(node)}.{plugin}"
