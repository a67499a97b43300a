"""Pure: decides what to publish about one plugin: its verdict, alerts and pending changes.

The decision follows from the current verdict and from earlier publications. The caller stores
pending changes before they are published: after a crash, they may be published again under the same
id, but are never lost.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, assert_never

import msgspec

from muster import vocabulary
from muster.vocabulary import AlertKind, Verdict
from muster_health.alerting import (
    alert_delay,
    alert_lifecycle,
    device_alerts,
    evidence,
    mount_alerts,
    plugin_alert,
    refused_configuration,
    watched_alerts,
)
from muster_health.model import alerts, config, signals, snapshot, steps

_REPAIRABLE: Final = frozenset({Verdict.STUCK, Verdict.DEREGISTERED, Verdict.MISMATCH})
"""The verdicts after which restarting the plugin's pod may help."""
_OF_KUBELET: Final = frozenset({steps.Rule.KUBELET_AWAY, steps.Rule.KUBELET_DEAD})
"""The rules under which a restart does not help, because the kubelet is at fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Observations, besides the verdict, that may need alerts; at `due`, evaluate them again."""

    faults: device_alerts.DeviceFaults
    mounts: mount_alerts.MountFaults
    refused: refused_configuration.RefusedConfiguration
    short: Mapping[str, str]
    clock_text: str
    is_clock_skewed: bool
    due: float | None


class Publication(msgspec.Struct, eq=False, gc=False):
    """The published state of one plugin; `since` is when its verdict was reached."""

    node: str
    plugin: str
    context: config.Context
    lifecycle: alert_lifecycle.AlertLifecycle
    since: datetime | None = None
    rule: str = ""
    evidence: tuple[vocabulary.Evidence, ...] = ()
    observed_at: float | None = None
    """When the evidence was observed; None if a former process observed it."""
    inhibited: bool = False
    """Whether another plugin's alert already reports that the node is down."""
    is_dirty: bool = False
    look_due: float | None = None
    published_verdict: Verdict | None = None
    pending_verdict: vocabulary.VerdictChanged | None = None
    alert: plugin_alert.PluginAlert | None = None
    watched: watched_alerts.Subject | None = None
    """The plugin as a subject of alerts if muster only watches it; None if muster runs it."""
    _reached_at: float | None = None

    def load(self, before: snapshot.Snapshot) -> None:
        """Load another process's published verdict and alerts, and its pending changes."""
        self.lifecycle.load(before.firing, before.unpublished_alerts)
        self.published_verdict = before.verdict
        self.pending_verdict = before.unpublished_verdict

    def restore(
        self,
        before: snapshot.Snapshot,
        standing: steps.Standing,
        *,
        pause_due: float,
        repair_due: float,
    ) -> None:
        """Restore the state that a previous process saved."""
        self.since, self.rule, self.evidence = before.since, before.rule, before.evidence
        self._follow(standing)
        if self.alert is not None:
            self.alert.restore(before.firing, pause_due=pause_due, repair_due=repair_due)

    def reset_published(self) -> None:
        """Reset the published state: another replica led, so our publications were dropped."""
        self.lifecycle.load((), ())
        self.published_verdict = self.pending_verdict = None

    def decided(self, decision: steps.Decision, standing: steps.Standing, now: float) -> None:
        """Record a new verdict, a new reason for the same one, or an overdue planned stop."""
        self.is_dirty = True
        self._follow(standing)
        if not isinstance(decision, steps.ReturnOverdue):
            self.observed_at = now
        match decision:
            case steps.VerdictReached():
                self._reached_at = now
                self.rule, self.evidence = decision.rule.value, decision.evidence
                if self.alert is not None:
                    self.alert.concluded(now)
            case steps.VerdictConfirmed():
                self.rule, self.evidence = decision.rule.value, decision.evidence
            case steps.ReturnOverdue():
                # restored state may contradict itself: a stop without a verdict about it
                if self.alert is not None:
                    self.alert.overdue = decision.evidence
            case _:
                assert_never(decision)

    def cluster_answered(self, answer: signals.Facts | None, number: int, now: float) -> None:
        """Record an answer from Kubernetes, if it lists the pods that the alert needs."""
        if self.alert is not None:
            self.is_dirty |= self.alert.cluster_answered(answer, number, now)

    def clock_stalled(self, seconds: float) -> None:
        """Extend the wait for an answer by the time for which our own process was suspended."""
        if self.alert is not None:
            self.alert.clock_stalled(seconds)

    def touch(self, now: float) -> None:
        """Schedule the next evaluation at `now`."""
        self.is_dirty, self.look_due = True, now

    def wait_for_turn(self, now: float) -> None:
        """Cancel an evaluation that is due, because it takes place later, in the plugin's turn."""
        if self.look_due is not None and self.look_due <= now:
            self.is_dirty, self.look_due = True, None

    def is_repairable(self, standing: steps.Standing, now: float) -> bool:
        """Return whether an alert about the plugin is open and a restart may repair the plugin."""
        verdict, alert = standing.verdict, self.alert
        if alert is None or verdict not in _REPAIRABLE or standing.rule in _OF_KUBELET:
            return False
        if verdict is Verdict.DEREGISTERED and now < alert.repair_due:
            return False
        is_returning = standing.state is snapshot.State.RECOVERING
        return alert.is_published_as(verdict) and not is_returning

    @property
    def reports_node(self) -> bool:
        """Return whether the plugin's alert reports that the node is down."""
        published = self.lifecycle.published.values()
        return any(alert.kind is AlertKind.NODE_DOWN for alert in published)

    def skip(self, now: float, at: datetime) -> None:
        """Skip the evaluation, because only the leader decides what to publish."""
        self._stamp(now, at)
        self.is_dirty, self.look_due = False, None
        if self.alert is not None:
            self.alert.forget()

    def update(
        self,
        standing: steps.Standing,
        observed: Observed,
        *,
        now: float,
        at: datetime,
        may_open: alert_lifecycle.MayOpen,
        ask: Callable[[tuple[str, ...]], signals.AskCluster],
    ) -> tuple[list[signals.Output], list[alerts.Alert]]:
        """Decide what to publish; return the queries to send first, and the delayed alerts."""
        self._stamp(now, at)
        self.is_dirty, self.look_due = False, None
        self._follow_verdict(standing, at)
        own = self.alert
        # alerts that another process published stay open until the plugin's state is known
        is_known = standing.verdict is not None or not self.lifecycle.published
        if not is_known or self.inhibited:
            if own is not None:
                own.forget()
            return [], []
        questions: list[signals.Output] = []
        wanted, may = self._other_alerts(observed, now, at), may_open
        if own is not None:
            if own.prepare(standing, self.evidence, now, at, may_open):
                question = ask(standing.resources)
                own.asked(standing, question.number, now)
                questions = [question]
            own_wanted = own.wanted(standing, self.evidence, now, at)
            wanted = [*own_wanted, *wanted]
            may = own.may_open(may_open)
        look_due, held = self.lifecycle.follow(
            wanted, now=now, at=at, may_open=may, why_ended=self._why_ended(observed)
        )
        dues = [due for due in (look_due, observed.due) if due is not None]
        if own is not None:
            dues += own.followed(standing, own_wanted, now)
        self.look_due = min(dues, default=None)
        return questions, held

    def end_all(self, standing: steps.Standing, now: float, at: datetime, why: str) -> None:
        """Resolve all open alerts, because the plugin is removed."""
        self._stamp(now, at)
        is_removed = standing.rule is steps.Rule.WATCHED_REMOVED
        if standing.verdict is Verdict.MAINTENANCE or is_removed:
            self._follow_verdict(standing, at)
        self.lifecycle.end_all(at, (evidence.of("health", why),))

    @property
    def is_first_verdict(self) -> bool:
        """Return whether the only pending change is a first verdict."""
        verdict = self.pending_verdict
        return verdict is not None and verdict.previous is None and not self.lifecycle.pending

    def pending(self) -> list[signals.Publish]:
        """Return the pending changes as events."""
        events: list[signals.Publish] = []
        verdict = self.pending_verdict
        if verdict is not None:
            key = snapshot.key_of(self.node, self.plugin)
            event_id = f"{key}:{verdict.verdict}:{verdict.at.isoformat()}"
            events.append(signals.Publish(event=verdict, event_id=event_id))
        for alert in self.lifecycle.pending:
            event = self.event_of(alert, self.context.leader or 0)
            events.append(signals.Publish(event=event, event_id=alerts.event_id(event)))
        return events

    def clear_pending(self) -> None:
        """Record that the pending changes are published."""
        self.pending_verdict, self.lifecycle.pending = None, ()

    def event_of(self, alert: alerts.Alert, leader: int) -> vocabulary.AlertChanged:
        """Return an alert as an event."""
        return alerts.changed(
            alert,
            node=self.node,
            plugin=self.plugin,
            runbook_url=self.context.runbook_url,
            leader=leader,
            watched=self.watched.name if self.watched else "",
        )

    def _stamp(self, now: float, at: datetime) -> None:
        if self._reached_at is not None:
            self.since = at - timedelta(seconds=now - self._reached_at)
            self._reached_at = None

    def _follow(self, standing: steps.Standing) -> None:
        """Track an alert about the plugin itself while the verdict may require one."""
        if standing.verdict in {None, Verdict.HEALTHY}:
            self.alert = None
        elif self.alert is None:
            self.alert = plugin_alert.PluginAlert(
                self.node,
                self.plugin,
                self.lifecycle,
                self.context,
                alert_delay.AlertDelay(self.context),
                self.watched,
            )

    def _follow_verdict(self, standing: steps.Standing, at: datetime) -> None:
        verdict = standing.verdict
        if verdict is None or verdict is self.published_verdict:
            return
        self.pending_verdict = vocabulary.VerdictChanged(
            node=self.node,
            at=at,
            plugin=self.plugin,
            verdict=verdict,
            previous=self.published_verdict,
            rule=self.rule,
            evidence=self.evidence,
            resources=standing.resources,
            leader=self.context.leader or 0,
            flapping=standing.is_flapping,
            watched=self.watched.name if self.watched else "",
        )
        self.published_verdict = verdict

    def _other_alerts(self, observed: Observed, now: float, at: datetime) -> list[alerts.Alert]:
        faults, short = observed.faults, observed.short
        wanted = list(device_alerts.of(faults, node=self.node, at=at, missed=short))
        wanted += mount_alerts.of(observed.mounts, node=self.node, at=at)
        wanted += observed.refused.alerts(node=self.node, plugin=self.plugin, now=now, at=at)
        if not observed.is_clock_skewed:
            return wanted
        skewed = alerts.Alert(
            kind=AlertKind.CLOCK_SKEW,
            summary=f"the clock of node {self.node} differs from the clock of health's node",
            evidence=(evidence.of("heartbeat", observed.clock_text),),
            starts_at=at,
            changed_at=at,
        )
        return [skewed, *wanted]

    def _why_ended(self, observed: Observed) -> alert_lifecycle.WhyEnded:
        def why(key: alerts.Key) -> tuple[vocabulary.Evidence, ...]:
            if plugin_alert.is_of_plugin(key):
                return self.evidence
            if key[0] == AlertKind.CLOCK_SKEW:
                return (evidence.of("heartbeat", observed.clock_text),)
            if key[0] == AlertKind.CONFIGURATION_REFUSED:
                return observed.refused.why_ended()
            if key[0] in alerts.OF_MOUNTS:
                return mount_alerts.ended()
            return device_alerts.ended(observed.faults, key)

        return why
