"""Pure: takes one plugin from a suspicion to a verdict, and back to healthy.

The table of states is in the package's docstring. `tracked_plugin` passes every event to the method
that is named after it. `verdict_state` stores the reported verdict, and `investigation` the open
probes and queries.
"""

from typing import Final, assert_never

from muster import vocabulary
from muster.vocabulary import Verdict
from muster_health.alerting import evidence
from muster_health.model import signals, steps
from muster_health.model.snapshot import State
from muster_health.model.steps import Rule
from muster_health.plugin import problems, verdict_state
from muster_health.plugin.investigation import Reason, Suspicion

_ALIVE: Final = frozenset({State.HEALTHY, State.FAILING, State.RECOVERING})
_NOT_HEARD: Final = frozenset({State.SUSPECT, State.LOST, State.MAINTENANCE})


class VerdictMachine(verdict_state.VerdictState):
    """The verdict's state machine for one plugin. `now` is our monotonic time in seconds."""

    def replaced(self, former: str, now: float) -> bool:
        """Count an unannounced replacement of an instance; return whether there are too many."""
        if self.settled is not State.HEALTHY or former == self.planned.instance:
            return False
        return self.standing.replaced(now)

    def flapping(self, now: float) -> list[steps.Step]:
        """Report FLAPPING, because instances replace one another too often."""
        noted = self._end_suspicion(None)
        self.reported.clear()
        self.recovery.begin()
        self.state = State.RECOVERING
        self.recovery.good(now, counts=False, hold_s=self.standing.damping.hold_s)
        return [*noted, *self.standing.flapping(now, self.reported.resources)]

    def sign_of_life(
        self, problem: problems.Problem | None, now: float, *, counts: bool
    ) -> list[steps.Step]:
        """Handle a heartbeat or a probe's answer, with the worst problem in it.

        `counts` means that the heartbeat or answer counts towards a recovery if it reports no
        problem.
        """
        noted = self._end_suspicion(problem)
        match self.state:
            case State.UNKNOWN | State.HEALTHY:
                if problem is not None:
                    return [*noted, *self._has_problem(problem, now)]
                self.reported.clear()
                self.state = State.HEALTHY
                if self.standing.verdict is Verdict.HEALTHY:
                    return noted
                alive = self._alive_evidence()
                return [*noted, *self._conclude(Verdict.HEALTHY, Rule.FIRST_SIGN_OF_LIFE, alive)]
            case State.FAILING:
                if problem is not None and problem.verdict is self.standing.verdict:
                    return [*noted, *self._problem_persists(problem)]
                return [*noted, *self._return(problem, now, counts=True)]
            case State.LOST | State.MAINTENANCE | State.RECOVERING:
                return [*noted, *self._return(problem, now, counts=counts)]
            case State.SUSPECT:
                raise AssertionError("`sign_of_life` has ended the suspicion")
            case _:
                assert_never(self.state)

    def probe_failed(self, number: int, now: float, *, subscribed: bool) -> list[steps.Step]:
        """Handle a probe that reached no subscriber, or (`subscribed`) got no answer."""
        suspicion = self.investigation.awaited(number)
        if suspicion is None:
            return []
        if suspicion.reason is Reason.PROBLEM:
            # the plugin sent a heartbeat a moment ago; if it is gone, its silence will show that
            self._dismiss_suspicion()
            return []
        suspicion.is_subscribed = subscribed
        return self._diagnose(suspicion, now)

    def probe_inconclusive(self, number: int, now: float) -> list[steps.Step]:
        """Handle a probe that proves nothing about the plugin; an earlier result stays valid.

        The probe is repeated before all waits restart, because new waits would delay the verdict by
        several intervals.
        """
        suspicion = self.investigation.awaited(number)
        if suspicion is None:
            return []
        if suspicion.is_subscribed is not None and not suspicion.is_hopeless(now):
            return []
        if self.state is State.LOST:
            self.investigation.postpone(now)
        elif self.is_resumed and self.state is State.SUSPECT:
            # the result is still unknown; after a new wait, many plugins would be suspected again
            self.suspend()
        elif suspicion.reason is Reason.PROBLEM or not suspicion.probe_again(now):
            self.reconnected(now)
        return []

    def cluster_answered(
        self, answer: signals.Facts | None, number: int, now: float
    ) -> list[steps.Step]:
        """Handle an answer from Kubernetes; None means that Kubernetes did not answer."""
        if self.reported.is_recheck(number):
            is_alive = self.state not in _NOT_HEARD
            problem = self.reported.rechecked(answer, is_alive=is_alive)
            return [] if problem is None else self._confirm_problem(problem, now)
        if number == self.asked_while_suspended:
            self.asked_while_suspended = 0
            self.is_gone = self.is_suspended and answer is not None and _is_gone(answer)
        suspicion = self.investigation.answered(answer, number)
        return [] if suspicion is None else self._diagnose(suspicion, now)

    def ask_while_suspended(self) -> signals.AskCluster:
        """Return a query that shows whether the suspended plugin's pod or node is gone."""
        question = self.investigation.ask_kubernetes()
        self.asked_while_suspended = question.number
        return question

    def disconnected(self, now: float) -> list[steps.Step]:
        """Handle the end of the plugin's last connection to NATS."""
        if self.alive.last_heard_at is None:
            return []
        if self.state in _ALIVE:
            return self._suspect(Reason.DISCONNECT, now)
        if self.state is State.LOST:
            self.investigation.review_soon(now)
        return []

    def stopping(
        self, event: vocabulary.PluginStopping, instance: str, now: float
    ) -> list[steps.Step]:
        """Handle a planned stop; ignore it while two instances run: one of them stays."""
        alternates = bool(self.alive.order.two_instances(now))
        stays = self.planned.instance in {"", instance} and alternates
        self.planned.instance = instance
        if stays:
            return []
        return_s = event.expected_return_s or self.context.settings.maintenance_s
        why = evidence.stop_announced(event.reason, return_s, is_own=event.expected_return_s > 0)
        return self._maintenance(Rule.GOODBYE, (why,), return_s, now)

    def suspend(self) -> None:
        """Reach no verdict about silence or problems until `resume`."""
        if self.is_silent:
            self.investigation.suspicion, self.is_suspended = None, True
            self.is_gone = False
            return
        if self.state is State.SUSPECT:
            self.investigation.suspicion, self.state = None, self.before
        self.reported.suspend()

    def resume(self, now: float) -> list[steps.Step]:
        """Investigate again if the plugin is still silent; accept the next problem it reports."""
        self.reported.resume()
        if not self.is_suspended:
            return []
        self.is_suspended = False
        if self.state is not State.SUSPECT:
            return []
        self.state = self.before
        _, *questions = self._suspect(Reason.SILENCE, now)
        self.is_resumed = True
        return questions

    def reconnected(self, now: float, *, window_s: float = 0.0, paused_s: float = 0.0) -> None:
        """Restart all waits: while disconnected we received nothing, so silence proves nothing."""
        self.alive.restart_wait(now, window_s=window_s)
        if paused_s:
            self.alive.connections.forget()
        self._dismiss_suspicion()
        self.reported.clear()
        self._shift(paused_s)

    def clock_stalled(self, seconds: float, now: float) -> None:
        """Extend every wait by the time for which our own process was suspended."""
        self.alive.shift(seconds, now)
        if self.is_calm:
            self.alive.shift_expected(seconds)
            return
        self._dismiss_suspicion()
        self.reported.shift(seconds)
        self._shift(seconds)

    # time

    def next_deadline(self) -> float | None:
        """Return the time at which `tick` must be called next; None if nothing is planned."""
        if self.state is State.HEALTHY and self.reported.due is None:
            # true for nearly all plugins
            return self.alive.due
        if self.state is State.SUSPECT:
            return self.investigation.deadline()
        if self.state is State.LOST:
            return self.investigation.deadline()
        if self.state is State.MAINTENANCE:
            return self.planned.due
        return _earliest(self.alive.due, self.reported.due, self.recovery.due)

    def tick(self, now: float) -> list[steps.Step]:
        """Perform all actions whose deadline has passed."""
        if not _is_due(self.next_deadline(), now):
            return []
        if self.investigation.suspicion is not None:
            return self._pursue(self.investigation.suspicion, now)
        if self.state is State.LOST:
            return self.investigation.review(now)
        if self.state is State.MAINTENANCE:
            return [self.planned.overdue(self.standing.rule)]
        return self._overdue(now)

    def _overdue(self, now: float) -> list[steps.Step]:
        if _is_due(self.alive.due, now):
            was_heard = self.alive.was_heard
            return self._suspect(Reason.SILENCE if was_heard else Reason.ABSENCE, now)
        if _is_due(self.reported.due, now):
            return self._suspect(Reason.PROBLEM, now)
        return self._recovered()

    def _pursue(self, suspicion: Suspicion, now: float) -> list[steps.Step]:
        if suspicion.is_hopeless(now):
            return self.probe_inconclusive(suspicion.number, now)
        questions = self.investigation.questions(suspicion, now)
        return [*questions, *self._diagnose(suspicion, now)]

    def _suspect(self, reason: Reason, now: float) -> list[steps.Step]:
        self.before, self.state = self.state, State.SUSPECT
        self.reported.due, self.is_resumed = None, False
        noted = signals.Noted(note=signals.Note.SUSPECTED)
        return [noted, *self.investigation.open(reason, now)]

    def _dismiss_suspicion(self) -> None:
        suspicion = self.investigation.suspicion
        if suspicion is not None and self.state is State.LOST:
            self.investigation.postpone(suspicion.opened_at)
        self.investigation.suspicion, self.is_suspended = None, False
        self.state = self.settled

    def _end_suspicion(self, problem: problems.Problem | None) -> list[steps.Step]:
        suspicion, self.is_suspended = self.investigation.refuted(), False
        if self.state is not State.SUSPECT:
            return []
        self.state = self.before
        is_about_problem = suspicion is not None and suspicion.reason is Reason.PROBLEM
        is_confirmed = is_about_problem and problem is not None
        note = signals.Note.CONFIRMED if is_confirmed else signals.Note.REFUTED
        return [signals.Noted(note=note)]

    def _diagnose(self, suspicion: Suspicion, now: float) -> list[steps.Step]:
        is_new = self.state is State.SUSPECT
        reached = self.investigation.diagnose(
            suspicion, self.alive, self.reported.healthy, now, is_new=is_new
        )
        if reached is None:
            return []
        noted = [signals.Noted(note=signals.Note.CONFIRMED)] if is_new else []
        if reached.verdict is Verdict.MAINTENANCE:
            self.state = self.settled
            return_s = self.context.settings.maintenance_s
            reported = self._maintenance(reached.rule, reached.evidence, return_s, now)
            if reached.rule is Rule.NODE_GONE and not self.alive.is_expected:
                # if the plugin is still expected there, Kubernetes contradicts itself
                self.planned.due = None
            return [*noted, *reported]
        self.state = State.LOST
        self.reported.clear()
        self.recovery.begin()
        reported = self.standing.reached(
            reached,
            now,
            now - self.alive.silent_since if is_new else None,
            is_failure=is_new,
            resources=self.reported.resources,
        )
        return [*noted, *reported]

    def _maintenance(
        self, rule: Rule, why: tuple[vocabulary.Evidence, ...], return_s: float, now: float
    ) -> list[steps.Step]:
        self.investigation.suspicion, self.is_suspended = None, False
        self.state = State.MAINTENANCE
        self.planned.begin(return_s, now)
        self.reported.clear()
        self.recovery.begin()
        self.investigation.review_due = None
        return self._conclude(Verdict.MAINTENANCE, rule, *why)

    def _has_problem(self, problem: problems.Problem, now: float) -> list[steps.Step]:
        if not self.reported.record_problem(problem, now):
            return []
        is_asked = problem.rule in {Rule.NODE_OFFERS_OTHERS, Rule.KUBELET_AWAY}
        if not is_asked or not self.investigation.has_cluster:
            return self._confirm_problem(problem, now)
        if not self.reported.may_recheck(now):
            return []
        question = self.investigation.ask_kubernetes()
        self.reported.rechecking(question.number, now)
        return [question]

    def _confirm_problem(self, problem: problems.Problem, now: float) -> list[steps.Step]:
        delay_s = now - self.reported.since
        self.reported.clear()
        is_failure = self.state is not State.FAILING
        self.state = State.FAILING
        self.recovery.begin()
        reached = steps.Diagnosis(
            verdict=problem.verdict, rule=problem.rule, evidence=problem.evidence
        )
        return self.standing.reached(
            reached, now, delay_s, is_failure=is_failure, resources=problem.resources
        )

    def _problem_persists(self, problem: problems.Problem) -> list[steps.Step]:
        self.reported.clear()
        before = {*self.standing.resources}
        if {*problem.resources} <= before:
            return []
        # resources are only added: a resource that comes and goes must not be reported each time
        more = tuple(sorted({*before, *problem.resources}))
        return [self.standing.confirm(problem.rule, problem.evidence, more)]

    def _return(
        self, problem: problems.Problem | None, now: float, *, counts: bool
    ) -> list[steps.Step]:
        """Begin or continue the recovery from a bad verdict; a new problem restarts it."""
        if self.state is not State.FAILING or problem is None:
            if self.state is not State.RECOVERING:
                self.recovery.begin()
            self.state = State.RECOVERING
            self.investigation.review_due = None
        if problem is not None:
            self.recovery.begin()
            return self._has_problem(problem, now)
        self.reported.clear()
        is_enough = self.recovery.good(now, counts=counts, hold_s=self.standing.damping.hold_s)
        return self._recovered() if is_enough else []

    def _recovered(self) -> list[steps.Step]:
        why = self._recovery_evidence()
        self.state, self.planned.instance = State.HEALTHY, ""
        self.recovery.begin()
        self.investigation.end()
        return self._conclude(Verdict.HEALTHY, Rule.RECOVERED, why)

    def _alive_evidence(self) -> vocabulary.Evidence:
        return evidence.alive()

    def _recovery_evidence(self) -> vocabulary.Evidence:
        return evidence.recovered(self.recovery.good_heartbeats)

    def _conclude(
        self, verdict: Verdict, rule: Rule, *why: vocabulary.Evidence
    ) -> list[steps.Step]:
        return self.standing.conclude(verdict, rule, why, self.reported.resources)

    def _shift(self, seconds: float) -> None:
        self.recovery.shift(seconds)
        self.standing.shift(seconds)
        self.alive.shift_expected(seconds)
        self.investigation.shift(seconds)
        self.planned.shift(seconds)


def _is_gone(answer: signals.Facts) -> bool:
    """Return whether Kubernetes reports that the plugin has no running pod, or no node."""
    if answer.exists is False:
        return True
    pods = answer.pods
    return pods is not None and not any(pod.runs and not pod.deleting for pod in pods)


def _earliest(*dues: float | None) -> float | None:
    return min((due for due in dues if due is not None), default=None)


def _is_due(due: float | None, now: float) -> bool:
    return due is not None and due <= now
