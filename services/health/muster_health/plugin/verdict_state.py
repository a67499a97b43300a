"""Pure: tracks the state of one plugin between suspicion and verdict, and its reported verdict.

`verdict_machine` adds the transitions. The verdict describes the current problem; a separate mark
shows whether the plugin fails repeatedly (flapping). Only a change is reported, so nothing is
reported twice. If the diagnosis of a failure changes, the new diagnosis is reported.
"""

from typing import Final

import msgspec

from muster import vocabulary
from muster.vocabulary import Verdict
from muster_health.alerting import evidence, flap_damping
from muster_health.model import config, signals, snapshot, steps
from muster_health.model.snapshot import State
from muster_health.model.steps import Rule
from muster_health.plugin import investigation, liveness, self_reported
from muster_health.plugin.investigation import Reason

_NO_FAILURE = frozenset({Verdict.HEALTHY, Verdict.MAINTENANCE, Verdict.DEGRADED})


class StandingVerdict(msgspec.Struct, eq=False, gc=False):
    """The reported verdict, and whether the plugin fails repeatedly.

    `resources` are those that the verdict is about; `failed_at` is the time of the last failure.
    """

    settings: config.Detection
    damping: flap_damping.FlapDamping
    verdict: Verdict | None = None
    rule: Rule | None = None
    resources: tuple[str, ...] = ()
    is_flapping: bool = False
    failed_at: float = 0.0

    def restore(self, before: snapshot.Snapshot, now: float, *, waited_s: float) -> None:
        """Restore the verdict that a previous process saved, and how long it has lasted."""
        self.verdict, self.rule = before.verdict, steps.rule_named(before.rule)
        self.resources, self.failed_at = before.accused or before.resources, now - waited_s
        self.is_flapping = before.flapping
        self.damping.restore(before.falls, now)

    def conclude(
        self,
        verdict: Verdict,
        rule: Rule,
        why: tuple[vocabulary.Evidence, ...],
        resources: tuple[str, ...],
        delay_s: float | None = None,
        *,
        is_flapping: bool = False,
    ) -> list[steps.Step]:
        """Set the verdict; return what to report, if anything has changed."""
        was_flapping, self.is_flapping = self.is_flapping, is_flapping
        if verdict is self.verdict:
            is_same = rule is self.rule and was_flapping is is_flapping
            if is_same or verdict in {Verdict.HEALTHY, Verdict.MAINTENANCE}:
                return []
            return [self.confirm(rule, why, resources)]
        previous, self.verdict, self.rule = self.verdict, verdict, rule
        self.resources = resources
        reported: list[steps.Step] = [
            steps.VerdictReached(
                verdict=verdict, previous=previous, rule=rule, resources=resources, evidence=why
            )
        ]
        if delay_s is not None:
            reported.append(signals.Noted(note=signals.Note.VERDICT_REACHED, seconds=delay_s))
        return reported

    def confirm(
        self, rule: Rule, why: tuple[vocabulary.Evidence, ...], resources: tuple[str, ...]
    ) -> steps.VerdictConfirmed:
        """Keep the verdict, with another reason or more resources."""
        self.rule, self.resources = rule, resources
        return steps.VerdictConfirmed(rule=rule, evidence=why, resources=resources)

    def reached(
        self,
        diagnosis: steps.Diagnosis,
        now: float,
        delay_s: float | None,
        *,
        is_failure: bool,
        resources: tuple[str, ...],
    ) -> list[steps.Step]:
        """Set a bad verdict; return what to report.

        `is_failure` means that this is a new failure, not a new diagnosis of the same failure.
        """
        why, is_flapping = diagnosis.evidence, self.is_flapping
        if is_failure:
            self.failed_at = now
            if diagnosis.verdict not in _NO_FAILURE:
                self.damping.failed(now)
                is_flapping = self.damping.is_flapping(now)
        if is_flapping:
            why = (self._often(now), *why)
        return self.conclude(
            diagnosis.verdict, diagnosis.rule, why, resources, delay_s, is_flapping=is_flapping
        )

    def replaced(self, now: float) -> bool:
        """Count an unannounced replacement of an instance; return whether there are too many."""
        self.damping.failed(now)
        return self.damping.is_flapping(now)

    def flapping(self, now: float, resources: tuple[str, ...]) -> list[steps.Step]:
        """Set FLAPPING: nothing is wrong at present, but the plugin has failed too often."""
        text = "a new process has replaced one that had not announced a stop"
        why = (self._often(now), evidence.of("heartbeat", text))
        return self.conclude(
            Verdict.FLAPPING, Rule.FELL_OFTEN, why, resources, 0.0, is_flapping=True
        )

    def shift(self, seconds: float) -> None:
        """Shift `failed_at` by the time during which we could receive nothing."""
        self.failed_at += seconds

    def _often(self, now: float) -> vocabulary.Evidence:
        return evidence.failures(self.damping.failures(now), self.settings.flap_window_s)


class Recovery(msgspec.Struct, eq=False, gc=False):
    """Counts good heartbeats after a plugin's return; at `due`, the plugin counts as recovered."""

    settings: config.Detection
    good_heartbeats: int = 0
    due: float | None = None
    since: float = 0.0
    """When the first good heartbeat arrived; valid only while `due` is set."""
    _held_until: float = 0.0

    def begin(self) -> None:
        """Restart the count, because the plugin is not back or has failed again."""
        self.good_heartbeats, self.due = 0, None

    def good(self, now: float, *, counts: bool, hold_s: float) -> bool:
        """Record a good heartbeat; return whether the plugin has recovered."""
        self.good_heartbeats += counts
        if self.due is None:
            self.since, self._held_until = now, now + hold_s
            self.due = now + max(self.settings.recover_s, hold_s)
        return self.good_heartbeats >= self.settings.recover_beats and now >= self._held_until

    def shift(self, seconds: float) -> None:
        """Postpone the recovery by the time during which we could receive nothing."""
        if self.due is not None:
            self.due += seconds
            self.since += seconds
            self._held_until += seconds


class PlannedStop(msgspec.Struct, eq=False, gc=False):
    """A planned stop: the `instance` that announced it, if any, and when the return is overdue."""

    instance: str = ""
    return_s: float = 0.0
    due: float | None = None

    def begin(self, return_s: float, now: float) -> None:
        """Record a planned stop, from which the plugin must return within `return_s`."""
        self.return_s, self.due = return_s, now + return_s

    def overdue(self, rule: Rule | None) -> steps.ReturnOverdue:
        """Report once that the plugin's return is overdue; `rule` is why the plugin stopped."""
        self.due = None
        since = steps.PLANNED.get(rule or Rule.GOODBYE) or steps.PLANNED[Rule.GOODBYE]
        return steps.ReturnOverdue(evidence=(evidence.overdue(self.return_s, since),))

    def shift(self, seconds: float) -> None:
        """Postpone the deadline by the time during which we could receive nothing."""
        if self.due is not None:
            self.due += seconds


_IN_FLIGHT_S: Final = 0.5
"""A heartbeat may arrive this long after its sender's connection has ended."""
_NOT_LOST: Final = frozenset({State.UNKNOWN, State.HEALTHY, State.RECOVERING, State.SUSPECT})


class VerdictState(msgspec.Struct, kw_only=True, eq=False, gc=False):
    """The state and the verdict of one plugin.

    Its methods read `alive` and `reported`, which the tracked plugin updates first.
    """

    context: config.Context
    alive: liveness.Liveness
    reported: self_reported.SelfReported
    standing: StandingVerdict
    recovery: Recovery
    investigation: investigation.Investigation
    planned: PlannedStop = msgspec.field(default_factory=PlannedStop)
    state: State = State.UNKNOWN
    is_suspended: bool = False
    """Whether the diagnosis of a silent plugin waits, because many plugins are suspected."""
    is_gone: bool = False
    """Whether Kubernetes showed, while the plugin was suspended, that its pod or node is gone."""
    asked_while_suspended: int = 0
    before: State = State.UNKNOWN
    """The state before the current suspicion."""
    is_resumed: bool = False
    """Whether the suspicion was opened again after a suspension."""

    @property
    def settled(self) -> State:
        """The state to return to when a pending suspicion is dropped."""
        return self.before if self.state is State.SUSPECT else self.state

    @property
    def is_calm(self) -> bool:
        """Return whether the machine waits only for the next heartbeat."""
        return self.state is State.HEALTHY and self.reported.problem is None

    @property
    def is_silent(self) -> bool:
        """Return whether the plugin is silent and suspected, without a verdict so far."""
        return self.state is State.SUSPECT and self.investigation.is_about_silence

    def is_suspect(self, now: float) -> bool:
        """Return whether the plugin is silent, or has a problem that other plugins may share."""
        if self.is_silent:
            return True
        is_common = self.reported.is_common(self.alive.order.interval_s, now)
        return is_common and self.state in _NOT_LOST

    def restore(
        self, before: snapshot.Snapshot, now: float, *, waited_s: float, is_overdue: bool
    ) -> None:
        """Restore the state that a previous process saved.

        `waited_s` is how long the verdict has lasted, measured with the clocks of two machines.
        `is_overdue` means that the alert about the plugin's overdue return is already firing.
        """
        # a suspicion belongs to the replaced state; if it were kept, it would stay due for ever
        self.investigation.suspicion = None
        self.state = before.state
        self.planned.instance, self.planned.return_s = before.leaving, before.return_s
        self.standing.restore(before, now, waited_s=waited_s)
        if self.state is State.MAINTENANCE and not is_overdue:
            return_s = self.alive.remaining_s(before.return_s, waited_s)
            self.planned.due = now + return_s
        if self.state is State.LOST:
            self.investigation.postpone(now)
        if self.state is State.RECOVERING:
            self.recovery.good(now, counts=False, hold_s=self.standing.damping.hold_s)

    @property
    def may_have_problem(self) -> bool:
        """Return whether the state allows recording a problem, and none is recorded yet."""
        is_heard = self.state in {State.UNKNOWN, State.HEALTHY, State.RECOVERING}
        return is_heard and self.reported.problem is None

    def proves_nothing(
        self, heartbeat: vocabulary.Heartbeat, freshness: liveness.Freshness, now: float
    ) -> bool:
        """Return whether a heartbeat proves nothing.

        It may have been sent before a stop or a disconnection, or be delayed.
        """
        if self.state is State.MAINTENANCE:
            is_last = heartbeat.phase is vocabulary.Phase.DRAINING
            return is_last or heartbeat.instance == self.planned.instance
        suspicion = self.investigation.suspicion
        is_disconnect = suspicion is not None and suspicion.reason is Reason.DISCONNECT
        if suspicion is not None and is_disconnect and not self.alive.connections.is_open:
            return now - suspicion.opened_at < _IN_FLIGHT_S
        is_doubtful = freshness is liveness.Freshness.DOUBTFUL
        return is_doubtful and (self.is_silent or self.state is State.LOST)
