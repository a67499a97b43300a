"""Pure: the verdict's state machine for a watched plugin, which sends no heartbeats.

It is the same machine as for our own plugins, with these differences:

| state       | event                                       | next state  | verdict                |
|-------------|---------------------------------------------|-------------|------------------------|
| any         | no observation, however long                | as before   | as before              |
| all but (1) | a problem is observed                       | unchanged   | query after 0.5 s (2)  |
| all but (1) | Kubernetes: it is planned (5)               | MAINTENANCE | MAINTENANCE            |
| all but (1) | Kubernetes: it is not; or no answer, twice  | FAILING     | see `watched_findings` |
| FAILING     | the same, with another rule or text         | FAILING     | as before, confirmed   |
| (3)         | another problem for 15 s                    | unchanged   | query                  |
| FAILING (4) | the node keeps offering its devices         | unchanged   | query; MISMATCH        |
| FAILING     | nothing is wrong any more                   | RECOVERING  | as before              |
| RECOVERING  | nothing is wrong for 15 s; `flap_damping`   | HEALTHY     | HEALTHY                |
| MAINTENANCE | still, or again, nothing answers            | MAINTENANCE | as before              |
| MAINTENANCE | nothing is wrong, or another problem        | RECOVERING  | as before              |
| MAINTENANCE | it is not back in time                      | MAINTENANCE | as before: overdue     |

It is never SUSPECT or LOST: the agent has confirmed what it reports. (1) MAINTENANCE. (2) The short
wait lets failures on many nodes become one mass failure. Kubernetes is queried at most once in 10
s. (3) Any with a verdict other than HEALTHY. (4) Under WATCHED_NOT_REGISTERED. (5) A new pod that
has already served is not a sign of a planned stop.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from muster import vocabulary
from muster.vocabulary import Verdict, WatchedFinding
from muster_health.alerting import evidence
from muster_health.model import signals, steps
from muster_health.model.snapshot import State
from muster_health.model.steps import Rule
from muster_health.plugin import problems, verdict_machine, watched_findings

GRACE_S: Final = 0.5
CHANGE_S: Final = 15.0
"""How long a problem must last to change a verdict: a hostile node may alternate its reports."""
_ASK_PACE_S: Final = 10.0
_AGAIN_S: Final = 1.0
_ATTEMPTS_MAX: Final = 2
_ANSWER_LOST_S: Final = 10.0
_CONTRADICTED: Final = frozenset({Rule.WATCHED_NOT_REGISTERED, Rule.WATCHED_NODE_OFFERS_OTHERS})


class WatchedMachine(verdict_machine.VerdictMachine):
    """The verdict's state machine for one watched plugin. `now` is our monotonic time in seconds.

    `name` is the resource or driver, and `watched` the last observation, made by `source`.
    """

    name: str = ""
    source: str = "agent"
    watched: vocabulary.Watched | None = None
    _asked: int = 0
    """The number of the current query to Kubernetes; 0 if there is none."""
    _attempts: int = 0
    _is_away: bool = True
    """Whether nothing answered at the last observation; True before the first observation."""
    _back_at: float | None = None
    """When the plugin first answered, or answered again after it was away."""
    _ask_not_before: float = 0.0
    _seen: tuple[vocabulary.Evidence, ...] | None = None
    """The observed evidence for the verdict; None if a previous process reached the verdict."""
    _answer: tuple[vocabulary.Evidence, ...] = ()
    """The answer from Kubernetes on which the verdict is based."""

    def evaluate(self, now: float) -> list[steps.Step]:
        """Evaluate the last observation."""
        if self.watched is None:
            return []
        is_first = self.standing.verdict in {None, Verdict.HEALTHY}
        grace_s = GRACE_S if is_first else CHANGE_S
        problem = self._problem(self.watched, self.reported.offers, grace_s)
        return self.sign_of_life(problem, now, counts=False)

    def removed(self, why: vocabulary.Evidence) -> list[steps.Step]:
        """End the tracking of the plugin: replace a bad verdict with HEALTHY."""
        self.reported.clear()
        if self.standing.verdict in {None, Verdict.HEALTHY}:
            return []
        self.state = State.HEALTHY
        return self._conclude(Verdict.HEALTHY, Rule.WATCHED_REMOVED, why)

    def sign_of_life(
        self, problem: problems.Problem | None, now: float, *, counts: bool
    ) -> list[steps.Step]:
        """Handle an observation; during a planned stop, ignore missing answers."""
        is_away = problem is not None and problem.rule in watched_findings.AWAY
        if self._is_away and not is_away:
            self._back_at = now
        self._is_away = is_away
        if self.state is State.MAINTENANCE and is_away:
            return []
        if problem is None:
            self._asked = self._attempts = 0
        elif self._is_late_offer(problem) and not self.reported.record_problem(problem, now):
            return []
        return super().sign_of_life(problem, now, counts=counts)

    def cluster_answered(
        self, answer: signals.Facts | None, number: int, now: float
    ) -> list[steps.Step]:
        """Handle an answer from Kubernetes; None means that Kubernetes did not answer."""
        if number != self._asked or not number:
            return []
        self._asked = 0
        problem, watched = self.reported.problem, self.watched
        if problem is None or watched is None or self.reported.suspended:
            return []
        if answer is None and self._attempts < _ATTEMPTS_MAX:
            self._ask_not_before = self.reported.due = now + _AGAIN_S
            return []
        self._attempts = 0
        if answer is not None and answer.offers is not None:
            self.reported.offers = answer.offers
        if problem.rule is Rule.WATCHED_NODE_OFFERS_OTHERS:
            return self._compared(problem, answer, now)
        return self._judge(problem, watched, answer, now)

    def suspend(self) -> None:
        """Reach no verdict until `resume`."""
        super().suspend()
        self._asked = self._attempts = 0

    def reconnected(self, now: float, *, window_s: float = 0.0, paused_s: float = 0.0) -> None:
        """Restart all waits; the caller evaluates the last observation again."""
        super().reconnected(now, window_s=window_s, paused_s=paused_s)
        self._asked = self._attempts = 0

    def _problem(
        self,
        watched: vocabulary.Watched,
        offers: Mapping[str, signals.Offer] | None,
        grace_s: float,
    ) -> problems.Problem | None:
        """Return the problem with the watched plugin, or None.

        If the node's offer contradicts the finding, that contradiction is the problem.
        """
        mismatch_s = self.context.settings.mismatch_s
        if self._is_contradicted(watched, offers):
            return watched_findings.offered_otherwise(watched, offers, mismatch_s)
        return watched_findings.problem(
            watched, offers, grace_s=grace_s, mismatch_s=mismatch_s, source=self.source
        )

    def _is_contradicted(
        self, watched: vocabulary.Watched, offers: Mapping[str, signals.Offer] | None
    ) -> bool:
        """Return whether the node keeps offering devices, although the kubelet lists none.

        Without an agent, both numbers are from the node's status and differ only in age.
        """
        is_about_list = watched.finding is WatchedFinding.NOT_REGISTERED
        if self.source != "agent" or not is_about_list or self.standing.rule not in _CONTRADICTED:
            return False
        return watched_findings.contradicts(watched, offers)

    def _is_late_offer(self, problem: problems.Problem) -> bool:
        """Return whether the failure is over, and only the node's status still shows it."""
        is_offer = problem.rule is Rule.WATCHED_NODE_OFFERS_OTHERS
        return is_offer and self.state is State.FAILING and self.standing.rule is not problem.rule

    def _judge(
        self,
        problem: problems.Problem,
        watched: vocabulary.Watched,
        answer: signals.Facts | None,
        now: float,
    ) -> list[steps.Step]:
        """Reach a verdict, unless the answer from Kubernetes explains the problem."""
        if answer is not None and watched_findings.is_replacing(problem, answer):
            self._ask_not_before = self.reported.due = now + _ASK_PACE_S
            return []
        rule = None
        if answer is not None:
            back_s = None if self._back_at is None else now - self._back_at
            rule = watched_findings.planned(problem, watched, answer, back_s=back_s)
        if rule is not None:
            why = (*problem.evidence, *self._shown(answer, watched))
            return self._maintenance(rule, why, self.context.settings.maintenance_s, now)
        self._answer = tuple(self._shown(answer, watched))
        reached = self._confirm_problem(problem, now)
        # nothing else may change for minutes
        is_contradicted = self._is_contradicted(watched, self.reported.offers)
        return [*reached, *self.evaluate(now)] if is_contradicted else reached

    def _shown(
        self, answer: signals.Facts | None, watched: vocabulary.Watched
    ) -> list[vocabulary.Evidence]:
        return watched_findings.shown(answer, watched, source=self.source)

    def _compared(
        self, problem: problems.Problem, answer: signals.Facts | None, now: float
    ) -> list[steps.Step]:
        """Evaluate a problem again with the node's offer in the answer, because a watch may lag."""
        if answer is None or answer.offers is None:
            self._ask_not_before = self.reported.due = now + _ASK_PACE_S
            return []
        assert self.watched is not None, "it was observed"
        current = self._problem(self.watched, answer.offers, GRACE_S)
        if current is None or current.rule is not problem.rule:
            return self.evaluate(now)
        is_contradicted = self._is_contradicted(self.watched, answer.offers)
        if is_contradicted and not self._is_written(answer):
            self._ask_not_before = self.reported.due = now + _ASK_PACE_S
            return []
        self._answer = ()
        return self._confirm_problem(current, now)

    def _is_written(self, answer: signals.Facts) -> bool:
        """Return whether the kubelet still writes the node's status."""
        lease_age_s = answer.lease_age_s
        is_renewed = lease_age_s is None or lease_age_s <= self.context.settings.lease_stale_s
        return is_renewed and answer.ready is not False

    def _has_problem(self, problem: problems.Problem, now: float) -> list[steps.Step]:
        if not self.reported.record_problem(problem, now):
            return []
        if not self.investigation.has_cluster:
            self._answer = ()
            return self._confirm_problem(problem, now)
        if self._asked:
            self.reported.due = self._lost_at
            return []
        if now < self._ask_not_before:
            self.reported.due = self._ask_not_before
            return []
        question = self.ask()
        self._asked, self._attempts = question.number, self._attempts + 1
        self._ask_not_before = now + _ASK_PACE_S
        self.reported.due = self._lost_at
        return [signals.Noted(note=signals.Note.SUSPECTED), question]

    @property
    def _lost_at(self) -> float:
        """Return when to give up on a query that our Kubernetes adapter should have answered."""
        lost_s = self.context.settings.probe_timeout_s + _ANSWER_LOST_S
        return self._ask_not_before - _ASK_PACE_S + lost_s

    def ask(self) -> signals.AskCluster:
        """Return a query to Kubernetes for the plugin's pods."""
        pod = self.watched.pod if self.watched else ""
        return replace(self.investigation.ask_kubernetes(), watched=self.name, pod=pod)

    def _confirm_problem(self, problem: problems.Problem, now: float) -> list[steps.Step]:
        self._seen = problem.evidence
        shown = replace(problem, evidence=(*problem.evidence, *self._answer))
        confirmed = signals.Noted(note=signals.Note.CONFIRMED)
        return [confirmed, *super()._confirm_problem(shown, now)]

    def _problem_persists(self, problem: problems.Problem) -> list[steps.Step]:
        self.reported.clear()
        is_unknown, before, self._seen = self._seen is None, self._seen, problem.evidence
        is_same = problem.rule is self.standing.rule
        if is_same and (is_unknown or before == problem.evidence):
            return []
        seen = (*problem.evidence, *self._answer)
        return [self.standing.confirm(problem.rule, seen, problem.resources)]

    def _overdue(self, now: float) -> list[steps.Step]:
        due, problem = self.reported.due, self.reported.problem
        if due is None or due > now:
            return self._recovered()
        self.reported.due = None
        if problem is None:
            return []
        if self._asked and now >= self._lost_at:
            return self.cluster_answered(None, self._asked, now)
        return self._has_problem(problem, now)

    def _alive_evidence(self) -> vocabulary.Evidence:
        if self.source != "agent":
            return evidence.of(self.source, "no problem is observed")
        if self.watched is None or not self.watched.socket:
            return evidence.of("agent", "the kubelet lists its devices; its socket is not known")
        return evidence.of("agent", "it answers, and the kubelet lists its devices")

    def _recovery_evidence(self) -> vocabulary.Evidence:
        return evidence.of(self.source, "no problem is observed any more")
