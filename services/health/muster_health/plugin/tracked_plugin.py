"""Pure: All that is known about one plugin: its state, its devices, what was told of it."""

import functools
from datetime import datetime
from typing import Final, assert_never

from muster import vocabulary
from muster.vocabulary import AlertKind
from muster_health.alerting import (
    alert_lifecycle,
    device_alerts,
    device_faults,
    evidence,
    plugin_alert,
)
from muster_health.model import alerts, config, facts, signals, snapshot, steps
from muster_health.model.snapshot import State
from muster_health.model.steps import Rule
from muster_health.plugin import device_counts, liveness, verdict

_INSTANCES_MAX: Final = 4
_CURABLE: Final = frozenset(
    {vocabulary.Verdict.STUCK, vocabulary.Verdict.DEREGISTERED, vocabulary.Verdict.MISMATCH}
)
_DAY_S: Final = 86_400.0
_NOT_EXPECTED: Final = "it left, and is not to be there any more: the node is to have no plugin"
_FORGOTTEN: Final = {
    True: "it left as planned a day ago, and nothing says that it is to come back",
    False: "it has been silent for a week, and nothing says that it is to be there",
}


class TrackedPlugin:
    """One plugin on one node."""

    __slots__ = (
        "_around",
        "_dirty",
        "_forget_due",
        "_look_due",
        "_order",
        "_own",
        "_remedies",
        "_uncounted",
        "_unsaved",
        "_verdict_told",
        "_verdict_untold",
        "causes",
        "census",
        "devices",
        "evidence",
        "inhibited",
        "is_restored",
        "key",
        "node",
        "plugin",
        "problems",
        "remedied_since",
        "rule",
        "since",
        "skew",
        "state",
        "telling",
        "unwanted",
    )

    def __init__(self, node: str, plugin: str, about: config.Context, *, now: float) -> None:
        self.node, self.plugin = node, plugin
        self.key = key_of(node, plugin)
        self.state = verdict.VerdictMachine(about.settings, now, has_cluster=about.has_cluster)
        self.telling = alert_lifecycle.AlertLifecycle(about.settings, about.bounds)
        self.skew = liveness.ClockOffset()
        self.causes: tuple[str, ...] = ()
        self.inhibited = False
        """Another alert says already that the whole node is down."""
        self.is_restored = False
        """It is remembered, by whoever led last."""
        self.unwanted = False
        """It was expected here once, and is no longer."""
        self.problems: tuple[str, ...] = ()
        """What it says is wrong, with its configuration for instance; nobody is alerted of that."""
        self._around = about
        self._own: plugin_alert.PluginAlert | None = None
        self.devices = device_faults.DeviceFaults(about.bounds.devices_per_plugin)
        self.census = device_counts.DeviceCounts()
        self.since: datetime | None = None
        self.rule = ""
        self.evidence: tuple[vocabulary.Evidence, ...] = ()
        self._order: tuple[tuple[str, int], ...] = ()
        self.remedied_since: datetime | None = None
        self._remedies: tuple[datetime, ...] = ()
        self._verdict_told: vocabulary.Verdict | None = None
        self._verdict_untold: vocabulary.VerdictChanged | None = None
        self._look_due: float | None = None
        self._forget_due: float | None = None
        self._dirty = False
        self._unsaved = False
        """An event changed what is to be remembered, and told nothing yet."""
        self._uncounted = False
        """How many devices there are to be changed, which is to be remembered in its turn."""

    def restore(self, known: snapshot.Snapshot, now: float, at: datetime) -> None:
        """Take what was told; and, if we know nothing ourselves, what was known."""
        self.telling.load(known.firing, known.untold_alerts)
        self.is_restored = True
        self._verdict_told = known.verdict
        self._verdict_untold = known.untold_verdict
        self.remedied_since, self._remedies = known.remedied, known.remedies
        self.touch(now)
        if self.state.verdict is not None:
            self._uncounted |= dict(known.had) != self.census.had
            return
        overdue = any(a.kind is AlertKind.MAINTENANCE_OVERDUE for a in known.firing)
        # who comes again often must not wait from the beginning each time
        waited_s = 0.0 if known.since is None else max(0.0, (at - known.since).total_seconds())
        self.state.restore(known, now, waited_s=waited_s, overdue=overdue)
        self._own = self._own_alert()
        if self._own is not None:
            self._own.restore(known.firing, now, waited_s=waited_s)
        if any(a.kind is AlertKind.CLOCK_SKEW for a in known.firing):
            self.skew.restore()
        self.devices.restore(known.bad)
        short = {
            alert.resource: alert.evidence[0].observed
            for alert in known.firing
            if alert.kind is AlertKind.DEVICES_SHORT
        }
        self.census.restore(known.had, known.configuration, short)
        self.since, self.rule, self.evidence = known.since, known.rule, known.evidence
        self._order = known.order
        self._forget_due = now + self.state.rest_s(self._forget_s, waited_s)

    def untell(self) -> None:
        """Take that nothing is remembered of what we told: it was dropped when our lead ended."""
        self.telling.load((), ())
        self._verdict_told = self._verdict_untold = None

    @property
    def tells_of_node(self) -> bool:
        """Tell whether people were told by its alert that the node is down."""
        return any(alert.kind is AlertKind.NODE_DOWN for alert in self.telling.told.values())

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

    def report(self, event: vocabulary.Event, now: float) -> bool:
        """Take what the plugin says about its devices; False if they are too many to keep."""
        self._dirty = True
        changes = self.devices.changes
        kept = self.devices.apply(event, self.census.had)
        if isinstance(event, vocabulary.DeviceRemoved):
            counted = self.census.changes
            self.census.removed(event.resource, event.count, now)
            self._unsaved |= counted != self.census.changes
        self._unsaved |= changes != self.devices.changes
        if isinstance(event, vocabulary.PluginStarted) and self.state.leaving:
            self.state.started()
            self._unsaved = True
        return kept

    def hear(self, beat: vocabulary.Heartbeat, now: float, wall: float) -> None:
        """Take what a beat says beside being one; `wall` is our time now."""
        self.problems = beat.problems
        if self.state.beats.is_fresh:
            bound_s = self._around.settings.skew_s
            self._dirty |= self.skew.hear(beat.wall, wall, bound_s, now=now)
        self._dirty |= self.devices.hear(beat)
        counted = self.census.changes
        self._dirty |= self.census.hear(beat, now)
        self._uncounted |= counted != self.census.changes
        self._dirty |= self.devices.settle(self.census.lacks)

    def decide(
        self,
        found: steps.VerdictReached | steps.VerdictConfirmed | steps.ReturnOverdue,
        now: float,
        at: datetime,
    ) -> None:
        """Take a verdict, a firmer reason for it, or that a planned end lasts too long."""
        self._dirty = True
        self._own = own = self._own_alert()
        match found:
            case steps.VerdictReached():
                self.since, self.rule, self.evidence = at, found.rule.value, found.evidence
                self._forget_due = now + self._forget_s if self._may_go else None
                if own is not None:
                    own.concluded(found.verdict, now)
            case steps.VerdictConfirmed():
                self.rule, self.evidence = found.rule.value, found.evidence
            case steps.ReturnOverdue():
                assert own is not None, "who is overdue has left"
                own.overdue = found.evidence
            case _:
                assert_never(found)

    def question(self, number: int, resources: tuple[str, ...] = ()) -> signals.AskCluster:
        """Return what to ask Kubernetes: about the plugin, or who holds these resources."""
        return signals.AskCluster(
            node=self.node,
            plugin=self.plugin,
            number=number,
            timeout_s=self._around.settings.probe_timeout_s,
            resources=resources,
        )

    def learned(self, known: facts.Facts | None, number: int, now: float) -> None:
        """Take Kubernetes' answer, if it is about whom the alert names."""
        if self._own is not None:
            self._dirty |= self._own.learned(known, number, now)

    def stood_still(self, seconds: float, now: float) -> None:
        """Make every wait longer: we stood still for so long."""
        self.state.stood_still(seconds, now)
        if self._own is not None:
            self._own.stood_still(seconds)

    def needs_remedy(self, now: float) -> bool:
        """Tell whether its verdict stands, has been told, and has not been acted on."""
        verdict, own = self.state.verdict, self._own
        if own is None or verdict not in _CURABLE or self.remedied_since == self.since:
            return False
        if verdict is vocabulary.Verdict.DEREGISTERED and now < own.cure_due:
            return False
        return own.is_told_as(verdict) and self.state.state is not State.RECOVERING

    def remedied(self, leader: int, *, acted_at: datetime | None) -> signals.Remember:
        """Take that its verdict is acted on, once, whatever comes of it; None is a refusal."""
        self.remedied_since = self.since
        if acted_at is not None:
            self._remedies = (*self._remedies, acted_at)[-snapshot.REMEDIES_MAX :]
        return self._remember(leader)

    def touch(self, now: float) -> None:
        """Look again at what is to be told."""
        self._dirty, self._look_due = True, now

    @property
    def is_new(self) -> bool:
        """Tell whether all there is to tell is that it is there, and well."""
        return (
            self._verdict_told is None
            and self.state.verdict is vocabulary.Verdict.HEALTHY
            and not (self._unsaved or self.devices.bad or self.skew.is_skewed)
            and not (self.telling.told or self.telling.untold)
        )

    def may_wait(self, now: float) -> bool:
        """Tell whether nobody but ourselves waits for what there is to tell, or to remember."""
        return self.is_new or not self._is_due(now)

    def has_news(self, now: float) -> bool:
        """Tell whether `commit` is needed."""
        return self._uncounted or self._is_due(now)

    def _is_due(self, now: float) -> bool:
        if self._dirty or (self._own is not None and self._own.has_news(now)):
            return True
        return self._look_due is not None and self._look_due <= now

    def deadline(self) -> float | None:
        """Return when to look at this plugin next."""
        due, look = self.state.deadline(), self._look_due
        if self._forget_due is not None and self._may_go:
            due = self._forget_due if due is None else min(due, self._forget_due)
        if look is None or due is None:
            return due if look is None else look
        return min(due, look)

    def farewell(self, now: float, *, is_placed: bool) -> str:
        """Say why nobody waits for it any more; empty if somebody does, or it is there.

        `is_placed` is that Kubernetes says where this plugin should be.
        """
        if not self._may_go:
            return ""
        if self.state.rule is Rule.NODE_GONE:
            return "the node is not in the cluster any more"
        left = self.state.state is State.MAINTENANCE
        if is_placed and (left or self.unwanted or self.state.podless):
            return _NOT_EXPECTED
        if self._forget_due is not None and now >= self._forget_due:
            return _FORGOTTEN[left]
        return ""

    @property
    def _may_go(self) -> bool:
        return self.state.state in {State.MAINTENANCE, State.LOST} and not self.state.expected

    def commit(
        self, now: float, at: datetime, may_open: alert_lifecycle.MayOpen
    ) -> tuple[list[signals.Output], list[alerts.Alert]]:
        """Return what is to be done about what changed, in order; and what waits for its turn.

        While another one leads, what changed stays untold: who begins to lead looks at all.
        """
        self._dirty, self._look_due = False, None
        leader = self._around.leader
        own = self._own
        if leader is None:
            self._uncounted = False
            if own is not None:
                own.forget()
            return [], []
        self._tell_verdict(at, leader)
        held: list[alerts.Alert] = []
        asked: list[signals.Output] = []
        # an alert that was told by another process stays until it is known how the plugin is
        is_known = self.state.verdict is not None or not self.telling.told
        if is_known and not self.inhibited:
            if own is not None and own.prepare(self.evidence, now, at, may_open):
                number = self.state.inquire().number
                asked = [self.question(number, own.expect(number, now))]
            mine = [] if own is None else own.wanted(self.evidence, now, at)
            may = may_open if own is None else functools.partial(own.may_open, may_open)
            look_due, held = self.telling.follow(
                [*mine, *self._others(now, at)],
                now=now,
                at=at,
                may_open=may,
                why_ended=self._why_ended,
            )
            waits = [] if own is None else own.followed(mine, now)
            if self.skew.is_skewed and now < self._skew_due:
                waits.append(self._skew_due)
            self._look_due = min(waits if look_due is None else [*waits, look_due], default=None)
        elif own is not None:
            own.forget()
        return [*self._tellings(leader), *asked], held

    def close(self, at: datetime, why: str) -> list[signals.Output]:
        """Resolve all that is open, and forget this plugin."""
        leader = self._around.leader
        if leader is None:
            return []
        if self.state.verdict is vocabulary.Verdict.MAINTENANCE:
            self._tell_verdict(at, leader)
        self.telling.end_all(at, (evidence.seen("health", why),))
        outs = [out for out in self._tellings(leader) if isinstance(out, signals.Publish)]
        return [*outs, signals.Remember(key=self.key, value=b"", revision=leader)]

    def open_alerts(self) -> tuple[vocabulary.AlertChanged, ...]:
        """Return its open alerts as they were told, to be shown."""
        return tuple(self._changed(alert, 0) for alert in self.telling.told.values())

    def _own_alert(self) -> plugin_alert.PluginAlert | None:
        """Return the alert about the plugin itself, if its verdict may call for one."""
        if self.state.verdict in {None, vocabulary.Verdict.HEALTHY}:
            return None
        return self._own or plugin_alert.PluginAlert(
            self.node, self.plugin, self.state, self.telling, self._around
        )

    @property
    def _forget_s(self) -> float:
        return _DAY_S if self.state.state is State.MAINTENANCE else 7 * _DAY_S

    def _others(self, now: float, at: datetime) -> list[alerts.Alert]:
        found: list[alerts.Alert] = []
        if self.skew.is_skewed and not self._around.is_apart and now >= self._skew_due:
            told = (evidence.seen("heartbeat", self.skew.words()),)
            summary = f"the clock of node {self.node} is apart from ours"
            found.append(
                alerts.Alert(
                    kind=AlertKind.CLOCK_SKEW,
                    summary=summary,
                    evidence=told,
                    starts_at=at,
                    told_at=at,
                )
            )
        missed = self.census.short
        return [*found, *device_alerts.of(self.devices, node=self.node, at=at, missed=missed)]

    @property
    def _skew_due(self) -> float:
        """Return when it is known whether most nodes are apart from us, or only this one."""
        return self.skew.since + self._around.settings.storm_window_s

    def _why_ended(self, key: alerts.Key) -> tuple[vocabulary.Evidence, ...]:
        if plugin_alert.is_of_plugin(key):
            return self.evidence
        if key[0] == AlertKind.CLOCK_SKEW:
            return (evidence.seen("heartbeat", self.skew.words()),)
        return device_alerts.ended(self.devices, key)

    def _tell_verdict(self, at: datetime, leader: int) -> None:
        verdict = self.state.verdict
        if verdict is None or verdict is self._verdict_told:
            return
        self._verdict_untold = vocabulary.VerdictChanged(
            node=self.node,
            at=at,
            plugin=self.plugin,
            verdict=verdict,
            previous=self._verdict_told,
            rule=self.rule,
            evidence=self.evidence,
            resources=self.state.accused,
            leader=leader,
        )
        self._verdict_told = verdict

    def _tellings(self, leader: int) -> list[signals.Output]:
        told: list[signals.Publish] = []
        verdict = self._verdict_untold
        if verdict is not None:
            event_id = f"{self.key}:{verdict.verdict}:{verdict.at.isoformat()}"
            told.append(signals.Publish(event=verdict, event_id=event_id))
        for alert in self.telling.untold:
            event = self._changed(alert, leader)
            told.append(signals.Publish(event=event, event_id=alerts.event_id(event)))
        if not told:
            # the event is acknowledged after this, and does not come again
            return [self._remember(leader)] if self._unsaved or self._uncounted else []
        before = [self._remember(leader)]
        if verdict is not None and verdict.previous is None and not self.telling.untold:
            # should it be told once more after a crash, nobody is told anything new
            before = []
        self._verdict_untold = None
        self.telling.untold = ()
        return [*before, *told, self._remember(leader)]

    def _changed(self, alert: alerts.Alert, leader: int) -> vocabulary.AlertChanged:
        return alerts.changed(
            alert,
            node=self.node,
            plugin=self.plugin,
            runbook_url=self._around.runbook_url,
            leader=leader,
        )

    def _remember(self, leader: int) -> signals.Remember:
        state = self.state
        self._unsaved = self._uncounted = False
        known = snapshot.Snapshot(
            node=self.node,
            plugin=self.plugin,
            state=state.settled,
            interval_s=state.beats.interval_s,
            verdict=self._verdict_told,
            since=self.since,
            rule=self.rule,
            evidence=self.evidence,
            resources=state.resources,
            accused=state.accused,
            instance=state.beats.instance,
            seq=state.beats.seq,
            leaving=state.leaving,
            return_s=state.return_s,
            falls=state.falls,
            order=self._order,
            bad=self.devices.known(),
            had=tuple(self.census.had.items()),
            configuration=self.census.configuration,
            firing=tuple(self.telling.told.values()),
            untold_verdict=self._verdict_untold,
            untold_alerts=self.telling.untold,
            remedied=self.remedied_since,
            remedies=self._remedies,
            leader=leader,
        )
        return signals.Remember(key=self.key, value=snapshot.encode(known), revision=leader)


def key_of(node: str, plugin: str) -> str:
    """Return the key a plugin is remembered under."""
    return f"{vocabulary.node_token(node)}.{plugin}"
