"""Pure. All that is known about one plugin: its state, its devices, what was told of it."""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Final, assert_never

import msgspec

from muster import vocabulary
from muster.vocabulary import AlertKind
from muster_health import (
    affected,
    alerts,
    around,
    census,
    device_alerts,
    devices,
    evidence,
    facts,
    judgement,
    plugin_state,
    remedy,
    signals,
    skew,
    snapshot,
    steps,
    telling,
)
from muster_health.rules import Rule
from muster_health.snapshot import State

_INSTANCES_MAX: Final = 4
_DAY_S: Final = 86_400.0
_CURE_S: Final = 60.0
"""For so long a plugin tries by itself to be registered again; to end it would delay that."""
_NOT_EXPECTED: Final = "it left, and is not to be there any more: the node is to have no plugin"
_FORGOTTEN: Final = {
    True: "it left as planned a day ago, and nothing says that it is to come back",
    False: "it has been silent for a week, and nothing says that it is to be there",
}
_OWN: Final = frozenset(severity.value for severity in vocabulary.Severity)


class Dossier:
    """One plugin on one node."""

    __slots__ = (
        "_alert_due",
        "_around",
        "_asked",
        "_cure_due",
        "_dirty",
        "_forget_due",
        "_is_grave",
        "_look_due",
        "_order",
        "_overdue",
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
        "remedied_since",
        "rule",
        "since",
        "skew",
        "state",
        "telling",
        "unwanted",
    )

    def __init__(self, node: str, plugin: str, around: around.Around, *, now: float) -> None:
        self.node, self.plugin = node, plugin
        self.key = key_of(node, plugin)
        self.state = plugin_state.PluginState(around.settings, now, has_cluster=around.has_cluster)
        self.telling = telling.Telling(around.settings, around.bounds)
        self.skew = skew.Skew()
        self.causes: tuple[str, ...] = ()
        self.inhibited = False
        """Another alert says already that the whole node is down."""
        self.is_restored = False
        """It is remembered, by whoever led last."""
        self.unwanted = False
        """It was expected here once, and is no longer."""
        self._around = around
        self._asked: affected.Question | None = None
        self.devices = devices.Devices(around.bounds.devices_per_plugin)
        self.census = census.Census()
        self.since: datetime | None = None
        self.rule = ""
        self.evidence: tuple[vocabulary.Evidence, ...] = ()
        self._overdue: tuple[vocabulary.Evidence, ...] = ()
        self._order: tuple[tuple[str, int], ...] = ()
        self.remedied_since: datetime | None = None
        self._remedies: tuple[datetime, ...] = ()
        self._verdict_told: vocabulary.Verdict | None = None
        self._verdict_untold: vocabulary.VerdictChanged | None = None
        self._alert_due = 0.0
        self._cure_due = 0.0
        self._look_due: float | None = None
        self._forget_due: float | None = None
        self._is_grave = False
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
        overdue = [a for a in known.firing if a.kind is AlertKind.MAINTENANCE_OVERDUE]
        # who comes again often must not wait from the beginning each time
        waited_s = 0.0 if known.since is None else max(0.0, (at - known.since).total_seconds())
        self.state.restore(known, now, waited_s=waited_s, overdue=bool(overdue))
        self._overdue = overdue[0].evidence if overdue else ()
        self._is_grave = any(alert.grave for alert in known.firing)
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
        self._alert_due = now + self.state.rest_s(self._around.settings.patience_s, waited_s)
        self._cure_due = now + self.state.rest_s(_CURE_S, waited_s)
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
        if self.state.beats.is_fresh:
            bound_s = self._around.settings.skew_s
            self._dirty |= self.skew.hear(beat.wall, wall, bound_s, now=now)
        self._dirty |= self.devices.hear(beat)
        counted = self.census.changes
        self._dirty |= self.census.hear(beat, now)
        self._uncounted |= counted != self.census.changes
        self._dirty |= self.devices.settle(self.census.lacks)

    def decide(
        self, found: steps.Conclusion | steps.Confirmed | steps.Overdue, now: float, at: datetime
    ) -> None:
        """Take a verdict, a firmer reason for it, or that a planned end lasts too long."""
        self._dirty = True
        match found:
            case steps.Conclusion():
                self._conclude(found, now, at)
            case steps.Confirmed():
                self.rule, self.evidence = found.rule.value, found.evidence
                if not judgement.may_pause(found.rule):
                    self._alert_due = now
            case steps.Overdue():
                self._overdue = found.evidence
            case _:
                assert_never(found)

    def question(self, number: int, now: float) -> signals.AskCluster:
        """Return what to ask Kubernetes: of one that was told to be lost, also whom it affects."""
        resources: tuple[str, ...] = ()
        is_lost = self.state.state is State.LOST and self._around.leader is not None
        if is_lost and self._own_told:
            resources = self.state.accused
            self._asked = self._expect(number, now)
        return self._ask_cluster(number, resources)

    def learned(self, known: facts.Facts | None, number: int, now: float) -> None:
        """Take Kubernetes' answer, if it is about whom the alert names."""
        if self._asked is not None and self._asked.number == number:
            self._asked.answered(known, now)
            self._dirty = True

    def stood_still(self, seconds: float, now: float) -> None:
        """Make every wait longer: we stood still for so long."""
        self.state.stood_still(seconds, now)
        if self._asked is not None:
            self._asked.due += seconds

    def needs_remedy(self, now: float) -> bool:
        """Tell whether its verdict stands, has been told, and has not been acted on."""
        if self.state.verdict not in remedy.CURABLE or self.remedied_since == self.since:
            return False
        if self.state.verdict is vocabulary.Verdict.DEREGISTERED and now < self._cure_due:
            return False
        kind = alerts.kind_of(self.state.verdict)
        return kind is not None and self._is_told(kind) and self.state.state is not State.RECOVERING

    def remedied(self, leader: int, *, acted_at: datetime | None) -> signals.Remember:
        """Take that its verdict is acted on, once, whatever comes of it; None is a refusal."""
        self.remedied_since = self.since
        if acted_at is not None:
            self._remedies = (*self._remedies, acted_at)[-remedy.TIMES_MAX :]
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
        if self._dirty or (not self._is_grave and self._turns_grave):
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
        self, now: float, at: datetime, may_open: Callable[[], bool]
    ) -> tuple[list[signals.Output], list[alerts.Alert]]:
        """Return what is to be done about what changed, in order; and what waits for its turn.

        While another one leads, what changed stays untold: who begins to lead looks at all.
        """
        self._dirty, self._look_due = False, None
        leader = self._around.leader
        if leader is None:
            self._uncounted, self._asked = False, None
            return [], []
        self._tell_verdict(at, leader)
        held: list[alerts.Alert] = []
        asked: list[signals.Output] = []
        # an alert that was told by another process stays until it is known how the plugin is
        is_known = self.state.verdict is not None or not self.telling.told
        if is_known and not self.inhibited:
            own = self._own(now, at)
            asked = self._ask_whom(own, now)
            named = self._named(own, now)
            wanted = [*named, *self._others(now, at)]
            self._look_due, held = self.telling.follow(
                wanted, now=now, at=at, may_open=may_open, why_ended=self._why_ended
            )
            if not self._awaits_pods(now) and not any(map(self._is_still_to_tell, named)):
                self._asked = None
            self._look_by_then(now)
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

    def _conclude(self, found: steps.Conclusion, now: float, at: datetime) -> None:
        self.since, self.rule, self.evidence = at, found.rule.value, found.evidence
        self._overdue = ()
        self._is_grave &= found.verdict is vocabulary.Verdict.FLAPPING
        self._cure_due = now + _CURE_S
        self._forget_due = now + self._forget_s if self._may_go else None
        waits = self.state.rule is not None and judgement.may_pause(self.state.rule)
        self._alert_due = now + (self._around.settings.patience_s if waits else 0.0)

    @property
    def _forget_s(self) -> float:
        return _DAY_S if self.state.state is State.MAINTENANCE else 7 * _DAY_S

    def _look_by_then(self, now: float) -> None:
        """Have it looked at again when the first of its waits is over."""
        waits = [self._alert_due] if self._alert_waits(now) else []
        if self.skew.is_skewed and now < self._skew_due:
            waits.append(self._skew_due)
        if self._asked is not None and self._awaits_pods(now):
            waits.append(self._asked.due)
        if self._look_due is not None:
            waits.append(self._look_due)
        self._look_due = min(waits, default=None)

    def _ask_whom(self, own: alerts.Alert | None, now: float) -> list[signals.Output]:
        """Ask which pods an alert is to name, if it says something new, and nobody asked yet."""
        if own is None:
            self._asked = None
            return []
        resources = self.state.accused
        if not self._around.has_cluster or not resources:
            return []
        if self._asked is not None and self._asked.resources == resources:
            return []
        if not self._is_still_to_tell(affected.named(own, None, self._own_told)):
            return []
        number = self.state.inquire().number
        self._asked = self._expect(number, now)
        return [self._ask_cluster(number, resources)]

    def _expect(self, number: int, now: float) -> affected.Question:
        due = affected.due(now, self._around.settings.probe_timeout_s)
        return affected.Question(number, self.state.accused, due=due)

    def _ask_cluster(self, number: int, resources: tuple[str, ...]) -> signals.AskCluster:
        return signals.AskCluster(
            node=self.node,
            plugin=self.plugin,
            number=number,
            timeout_s=self._around.settings.probe_timeout_s,
            resources=resources,
        )

    def _awaits_pods(self, now: float) -> bool:
        return self._asked is not None and now < self._asked.due

    def _is_still_to_tell(self, alert: alerts.Alert) -> bool:
        told = self.telling.told.get(alert.key)
        return told is None or not told.says_the_same(alert)

    def _named(self, own: alerts.Alert | None, now: float) -> list[alerts.Alert]:
        """Return what the plugin suffers, with its pods; as it was told, until these are known."""
        if own is None:
            return []
        told = self._own_told
        return told if self._awaits_pods(now) else [affected.named(own, self._asked, told)]

    @property
    def _own_told(self) -> list[alerts.Alert]:
        return [alert for (slot, _), alert in self.telling.told.items() if slot in _OWN]

    def _others(self, now: float, at: datetime) -> list[alerts.Alert]:
        found: list[alerts.Alert] = []
        if self.skew.is_skewed and not self._around.is_apart and now >= self._skew_due:
            told = (evidence.seen("heartbeat", self.skew.words()),)
            summary = f"the clock of node {self.node} is apart from ours"
            found.append(_alert(AlertKind.CLOCK_SKEW, summary, told, at))
        missed = self.census.short
        return [*found, *device_alerts.of(self.devices, node=self.node, at=at, missed=missed)]

    @property
    def _skew_due(self) -> float:
        """Return when it is known whether most nodes are apart from us, or only this one."""
        return self.skew.since + self._around.settings.storm_window_s

    def _own(self, now: float, at: datetime) -> alerts.Alert | None:
        verdict = self.state.verdict
        kind = None if verdict is None else alerts.kind_of(verdict)
        told = self.evidence
        if self._overdue:
            kind, told = AlertKind.MAINTENANCE_OVERDUE, self._overdue
        if kind is None or (self._alert_waits(now) and not self._is_told(kind)):
            return None
        summary = alerts.summary_of(
            kind, node=self.node, plugin=self.plugin, resources=self.state.accused
        )
        self._is_grave |= self._turns_grave
        alert = _alert(kind, summary, told, at)
        return msgspec.structs.replace(alert, grave=True) if self._is_grave else alert

    @property
    def _turns_grave(self) -> bool:
        """Tell whether what is told as FLAPPING needs a person at once, as it would alone."""
        suffers = self.state.suffers
        if self.state.verdict is not vocabulary.Verdict.FLAPPING or suffers is None:
            return False
        kind = alerts.kind_of(suffers.verdict)
        if kind is None or alerts.severity_of(kind) is not vocabulary.Severity.CRITICAL:
            return False
        is_told = (vocabulary.Severity.CRITICAL.value, "") in self.telling.told
        return is_told or not judgement.may_pause(suffers.rule)

    def _alert_waits(self, now: float) -> bool:
        """Tell whether an alert is not due: it may only pause, or is on its way back."""
        rule = self.state.rule
        if rule is None or not judgement.may_pause(rule):
            return False
        return now < self._alert_due

    def _is_told(self, kind: AlertKind) -> bool:
        return (alerts.slot_of(kind, grave=self._is_grave), "") in self.telling.told

    def _why_ended(self, key: alerts.Key) -> tuple[vocabulary.Evidence, ...]:
        if key[0] in _OWN:
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


def _alert(
    kind: AlertKind, summary: str, told: Sequence[vocabulary.Evidence], at: datetime
) -> alerts.Alert:
    return alerts.Alert(kind=kind, summary=summary, evidence=tuple(told), starts_at=at, told_at=at)


def key_of(node: str, plugin: str) -> str:
    """Return the key a plugin is remembered under."""
    return f"{vocabulary.node_token(node)}.{plugin}"
