"""Pure: One plugin: from a doubt to a verdict and back.

A verdict needs evidence from two sides: silence alone raises a question, never an alarm.

| state       | what comes                                    | then        | verdict              |
|-------------|-----------------------------------------------|-------------|----------------------|
| UNKNOWN     | a good beat                                   | HEALTHY     | HEALTHY              |
| UNKNOWN     | expected, and not heard in its time           | SUSPECT     | ask: absence         |
| HEALTHY (1) | an event tells of a lost registration         | itself      | ask after the grace  |
| all but (2) | no beat for 2.5 intervals (3)                 | SUSPECT     | ask: silence         |
| all but (2) | its connection ends, without a goodbye        | SUSPECT     | ask after 2 s        |
| all but (2) | a beat with trouble                           | itself      | ask after the grace  |
| all but (2) | trouble, and again after the grace (5)        | ILL         | see `trouble`        |
| HEALTHY     | another instance, without a goodbye, often    | RECOVERING  | FLAPPING             |
| SUSPECT     | the probe is answered, or a fresh beat        | as before   | as before: refuted   |
| SUSPECT     | trouble: the answer shows it too              | ILL         | see `trouble`        |
| SUSPECT     | silence: all asked have answered              | LOST (4)    | see `judgement`      |
| SUSPECT     | trouble: no answer; or nothing can be said    | as before   | as before            |
| SUSPECT     | many are suspect at once (6)                  | SUSPECT     | frozen: nobody asked |
| LOST        | 20 s, 40 s, ... 2 min later                   | LOST (4)    | asked again: refined |
| LOST        | a fresh beat, or an answer                    | RECOVERING  | as before            |
| ILL         | a good beat                                   | RECOVERING  | as before            |
| RECOVERING  | 3 good beats, or 15 s; see `damping`          | HEALTHY     | HEALTHY              |
| any         | goodbye                                       | MAINTENANCE | MAINTENANCE          |
| MAINTENANCE | a beat of another instance, or of a new start | RECOVERING  | as before            |
| MAINTENANCE | not back in time                              | MAINTENANCE | as before: overdue   |
| any         | our own link failed                           | as before   | waits begin anew     |
| any         | our own clockwork stood still                 | as before   | waits are longer     |

(1) UNKNOWN and RECOVERING too. (2) SUSPECT waits for its answer, LOST for a beat, MAINTENANCE for
a return. (3) As the plugin declares them, by our clock, not counting the time we could not hear.
(4) MAINTENANCE, if what was asked shows that its silence was planned. (5) What the node offers is
asked of Kubernetes once more, and what it says then is what counts. (6) With trouble that they may
have in common, too: then it stays what it is, and the trouble is not believed meanwhile.

A verdict that is reached for the third time in 10 min is called FLAPPING instead, until it has
stayed what it is for its hold-down. A beat out of a backlog (`beats.Life.DOUBTFUL`) neither
refutes a suspicion of silence nor counts as good.
"""

import functools
from collections.abc import Mapping
from typing import Final, assert_never

from muster import vocabulary
from muster.vocabulary import Verdict
from muster_health.alerting import evidence
from muster_health.model import config, facts, signals, snapshot, steps
from muster_health.model.snapshot import State
from muster_health.model.steps import Rule
from muster_health.plugin import diagnosis, investigation, liveness, self_reported, standing_verdict
from muster_health.plugin.investigation import Reason

_NOTHING: Final[Mapping[str, int]] = {}
_IN_FLIGHT_S: Final = 0.5
"""A beat may be in flight when its sender's connection ends."""
_HEARD: Final = frozenset({State.UNKNOWN, State.HEALTHY, State.RECOVERING, State.SUSPECT})


class VerdictMachine:
    """The machine of one plugin. `now` is the receiver's monotonic time in seconds."""

    __slots__ = (
        "_before",
        "_conviction",
        "_inquest",
        "_is_thawed",
        "_recovery",
        "_return_due",
        "_settings",
        "_worry",
        "beats",
        "expected",
        "expected_due",
        "healthy",
        "heard_of",
        "is_frozen",
        "is_hasty",
        "leaving",
        "link",
        "podless",
        "pods",
        "resources",
        "return_s",
        "silence",
        "state",
    )

    def __init__(
        self, settings: config.Detection, now: float, *, has_cluster: bool = False
    ) -> None:
        self.state = State.UNKNOWN
        self.resources: tuple[str, ...] = ()
        self.healthy: Mapping[str, int] = _NOTHING
        self.pods: tuple[facts.Pod, ...] = ()
        self.podless = False
        """Kubernetes said last that the node has no pod of it."""
        self.beats = liveness.HeartbeatOrder(settings.interval_s)
        self.silence = liveness.Silence(now)
        self.link = liveness.Connections()
        self.leaving = ""
        self.return_s = 0.0
        self.heard_of = False
        self.expected = False
        self.expected_due = now
        self.is_frozen = False
        self.is_hasty = False
        """Its next beat may be due sooner than was said before its last one."""
        self._settings = settings
        self._before = State.UNKNOWN
        self._inquest = investigation.Investigation(settings, has_cluster=has_cluster)
        self._conviction = standing_verdict.StandingVerdict(settings)
        self._worry = self_reported.SelfReported(settings, now)
        self._is_thawed = False
        self._recovery = standing_verdict.Recovery(settings)
        self._return_due: float | None = None

    @property
    def verdict(self) -> Verdict | None:
        """The one that is told."""
        return self._conviction.verdict

    @property
    def rule(self) -> Rule | None:
        """What decided it."""
        return self._conviction.rule

    @property
    def accused(self) -> tuple[str, ...]:
        """Those of the resources that its verdict is about."""
        return self._conviction.accused

    @property
    def settled(self) -> State:
        """The state without a doubt that may be pending."""
        return self._before if self.state is State.SUSPECT else self.state

    @property
    def is_calm(self) -> bool:
        """Tell whether all it waits for is its next beat, in the usual time."""
        return self.state is State.HEALTHY and self._worry.found is None and not self.is_hasty

    @property
    def is_held(self) -> bool:
        """Tell whether it is not judged, because many are suspect at once."""
        return self.is_frozen or self._worry.held

    def is_troubled(self, now: float) -> bool:
        """Tell whether it is about to be convicted of trouble that many may have in common."""
        return self.state in _HEARD and self._worry.is_common(self.beats.interval_s, now)

    @property
    def is_silent(self) -> bool:
        """Tell whether it is suspected of silence, and nothing is decided."""
        return self.state is State.SUSPECT and self._inquest.is_about_silence

    @property
    def is_alive(self) -> bool:
        """Tell whether it is being heard."""
        return self.state in {State.HEALTHY, State.ILL, State.RECOVERING}

    @property
    def suffers(self) -> diagnosis.Diagnosis | None:
        """Return what it suffers by its own name, where that is told as FLAPPING."""
        return self._conviction.actual

    @property
    def fell_at(self) -> float:
        """When it began to suffer that."""
        return self._conviction.fell_at

    @property
    def falls(self) -> int:
        """Return how often it fell lately, to be remembered."""
        return self._conviction.damping.level

    def rest_s(self, wait_s: float, waited_s: float) -> float:
        """Return what is left of a wait that a former process began; time to be heard at least."""
        heard_s = self._settings.reconnect_s + self._patience_s
        return min(wait_s, max(heard_s, wait_s - waited_s))

    def restore(
        self, known: snapshot.Snapshot, now: float, *, waited_s: float, overdue: bool
    ) -> None:
        """Go on where a former process stopped; `overdue` has been told already.

        Its verdict stood for `waited_s`, as far as clocks of several machines can tell.
        """
        self.state, self.resources = known.state, known.resources
        self.leaving, self.return_s = known.leaving, known.return_s
        self._conviction.restore(known, now, waited_s=waited_s)
        self.beats.restore(known.instance, known.seq, known.interval_s)
        self.silence.begin_anew(now)
        # one that never came is remembered as well
        self.heard_of = bool(known.instance or known.order)
        if self.state is State.MAINTENANCE and not overdue:
            self._return_due = now + self.rest_s(self.return_s, waited_s)
        if self.state is State.LOST:
            self._inquest.put_off(now)
        if self.state is State.RECOVERING:
            self._recovery.good(now, counts=False, hold_s=self._conviction.damping.hold_s)

    def hear(self, beat: vocabulary.Heartbeat, now: float) -> list[steps.Step] | None:
        """Take a heartbeat; None if all that it changed is that the next one is due later."""
        former, interval_s = self.beats.instance, self.beats.interval_s
        is_new = former != beat.instance and not self.beats.comes_back(beat.instance)
        life = self.beats.take(beat, now)
        if life is liveness.Freshness.STALE:
            return [signals.Noted(note=signals.Note.BEAT_STALE)]
        self.is_hasty = self.beats.interval_s < interval_s or self.silence.window_s > 0.0
        was_worried = self._worry.found is not None
        if self._goes_on(beat, former, now):
            return [] if was_worried or self.is_hasty else None
        if self._proves_nothing(beat, life, now):
            return []
        if is_new and former and self._fell_unseen(former, now):
            return self._flap(beat, now)
        return self._alive(beat, now, counts=life is liveness.Freshness.FRESH)

    def answered(self, beat: vocabulary.Heartbeat, number: int, now: float) -> list[steps.Step]:
        """Take the answer to a probe."""
        return [] if self._inquest.awaited(number) is None else self._alive(beat, now, counts=False)

    def failed(self, number: int, now: float, *, subscribed: bool) -> list[steps.Step]:
        """Take that a probe found nobody, or (`subscribed`) no answer."""
        asked = self._inquest.awaited(number)
        if asked is None:
            return []
        if asked.doubt is Reason.TROUBLE:
            # it spoke a moment ago: whether it is gone is for its silence to tell
            self._dismiss_case()
            return []
        asked.listens = subscribed
        return self._judge(asked, now)

    def learned(self, known: facts.Facts | None, number: int, now: float) -> list[steps.Step]:
        """Take what Kubernetes knows; None is no answer."""
        if known is not None and known.pods is not None:
            self.pods, self.podless = known.pods, not known.pods
        if self._worry.is_look(number):
            hears = self.state not in {State.SUSPECT, State.LOST, State.MAINTENANCE}
            found = self._worry.looked(known, self.healthy, hears=hears)
            return [] if found is None else self._believe(found, now)
        asked = self._inquest.learned(known, number)
        return [] if asked is None else self._judge(asked, now)

    def inconclusive(self, number: int, now: float) -> list[steps.Step]:
        """Take that a probe says nothing about the plugin."""
        if self._inquest.awaited(number) is None:
            return []
        if self.state is State.LOST:
            self._inquest.put_off(now)
        elif self._is_thawed and self.state is State.SUSPECT:
            # nothing is known of it yet: to begin its wait anew would make many suspect once more
            self.freeze()
        else:
            self.deaf(now)
        return []

    def connected(self, server: str, client: int) -> None:
        """Take that the bus accepted a connection of it."""
        self.link.opened(server, client)

    def disconnected(self, server: str, client: int, reason: str, now: float) -> list[steps.Step]:
        """Take that the bus lost a connection of it."""
        if not self.link.ended(server, client, reason, now) or not self.silence.ever_heard:
            return []
        match self.state:
            case State.HEALTHY | State.ILL | State.RECOVERING:
                return self._ask(Reason.DISCONNECT, now)
            case State.LOST:
                if self._inquest.case is None:
                    self._inquest.review_due = now + self._settings.restart_s
            case State.UNKNOWN | State.SUSPECT | State.MAINTENANCE:
                pass
            case _:
                assert_never(self.state)
        return []

    def hint(self, event: vocabulary.PluginDeregistered, now: float) -> list[steps.Step]:
        """Take that a registration was lost a moment ago: worth a question, if it lasts."""
        if self._may_worry:
            self._worry.lost(event, self.beats.interval_s, now)
        return []

    def offered(self, offers: Mapping[str, facts.Offer] | None, now: float) -> None:
        """Take what the node offers: worth a question, if that is not due to the plugin."""
        self._worry.offers = offers
        if self._may_worry:
            self._worry.offered(self.healthy, self.beats.interval_s, now)

    @property
    def _may_worry(self) -> bool:
        hears = self.state in {State.UNKNOWN, State.HEALTHY, State.RECOVERING}
        return hears and self._worry.found is None

    def goodbye(
        self, event: vocabulary.PluginStopping, instance: str, now: float
    ) -> list[steps.Step]:
        """Take that the plugin leaves as planned; of two that beat in turns one stays."""
        stays = self.leaving in {"", instance} and bool(self.beats.twins(now))
        self.leaving = instance
        if stays:
            return []
        return_s = event.expected_return_s or self._settings.maintenance_s
        said = evidence.goodbye(event.reason, return_s, said=event.expected_return_s > 0)
        return self._leave(Rule.GOODBYE, (said,), return_s, now)

    def started(self) -> None:
        """Take that the plugin began anew: even the instance that said goodbye may be back."""
        self.leaving = ""

    def expect(self, age_s: float, now: float) -> None:
        """Take that it should be there, for `age_s` already."""
        if not self.expected:
            self.expected, self.expected_due = True, now + self._settings.missing_s - age_s

    def inquire(self) -> steps.AskKubernetes:
        """Ask Kubernetes for its pods, beside all else."""
        return self._inquest.inquire()

    def freeze(self) -> None:
        """Judge neither silence nor trouble until `thaw`: many are suspect at once."""
        if self.is_silent:
            self._inquest.case, self.is_frozen = None, True
            return
        if self.state is State.SUSPECT:
            self._inquest.case, self.state = None, self._before
        self._worry.hold()

    def thaw(self, now: float) -> list[steps.Step]:
        """Ask again, if it still is silent; believe the trouble that it tells of next."""
        self._worry.release()
        if not self.is_frozen:
            return []
        self.is_frozen = False
        if self.state is not State.SUSPECT:
            return []
        self.state = self._before
        _, *asked = self._ask(Reason.SILENCE, now)
        self._is_thawed = True
        return asked

    def deaf(self, now: float, *, window_s: float = 0.0, paused_s: float = 0.0) -> None:
        """Begin every wait anew: until now we heard nothing, and that proves nothing.

        The plugin has `window_s` more than usual to be heard again.
        """
        self.silence.begin_anew(now, window_s=window_s)
        if paused_s:
            self.link.forget()
        self._dismiss_case()
        self._worry.forget()
        self._shift(paused_s)

    def shift(self, seconds: float, now: float) -> None:
        """Make the waits of one that is calm longer: we stood still for so long."""
        self.silence.shift(seconds, now)
        self.expected_due += seconds

    def stood_still(self, seconds: float, now: float) -> None:
        """Make every wait longer: we stood still for so long."""
        self.silence.shift(seconds, now)
        self._dismiss_case()
        self._worry.shift(seconds)
        self._shift(seconds)

    def deadline(self) -> float | None:
        """Return when `tick` is next needed."""
        if self.state is State.HEALTHY and self._worry.due is None and self._recovery.due is None:
            # as of nearly all
            return self._silence_due
        match self.state:
            case State.SUSPECT:
                return self._inquest.deadline()
            case State.LOST:
                return _earliest(self._inquest.deadline(), self._conviction.settle_due)
            case State.MAINTENANCE:
                return self._return_due
            case State.UNKNOWN | State.HEALTHY | State.ILL | State.RECOVERING:
                settle = self._conviction.settle_due if self._is_unsettled else None
                return _earliest(self._silence_due, self._worry.due, self._recovery.due, settle)
            case _:
                assert_never(self.state)

    def tick(self, now: float) -> list[steps.Step]:
        """Do what is due."""
        if not _is_due(self.deadline(), now):
            return []
        if self._inquest.case is not None:
            return self._pursue(self._inquest.case, now)
        if self._is_unsettled and _is_due(self._conviction.settle_due, now):
            return self._conviction.settle()
        match self.state:
            case State.MAINTENANCE:
                self._return_due = None
                since = steps.PLANNED.get(self.rule or Rule.GOODBYE, steps.PLANNED[Rule.GOODBYE])
                return [steps.ReturnOverdue(evidence=(evidence.overdue(self.return_s, since),))]
            case State.LOST:
                return self._inquest.review(now)
            case _:
                return self._doubt(now)

    def _doubt(self, now: float) -> list[steps.Step]:
        if _is_due(self._silence_due, now):
            known = self.silence.ever_heard or self.heard_of
            return self._ask(Reason.SILENCE if known else Reason.ABSENCE, now)
        if _is_due(self._worry.due, now):
            return self._ask(Reason.TROUBLE, now)
        return self._recover()

    @property
    def _is_unsettled(self) -> bool:
        return self._conviction.settle_due is not None and self.state in {State.LOST, State.ILL}

    @property
    def _patience_s(self) -> float:
        return self._settings.suspicion_beats * self.beats.interval_s

    @property
    def _silence_due(self) -> float | None:
        due = self.silence.due(self._patience_s)
        if self.silence.heard_at is not None or self.heard_of:
            return due
        return max(due, self.expected_due) if self.expected else None

    def _shift(self, seconds: float) -> None:
        self._recovery.shift(seconds)
        self._conviction.shift(seconds)
        self.expected_due += seconds
        self._inquest.shift(seconds)
        if self._return_due is not None:
            self._return_due += seconds

    def _dismiss_case(self) -> None:
        if self._inquest.case is not None and self.state is State.LOST:
            self._inquest.put_off(self._inquest.case.opened_at)
        self._inquest.case, self.is_frozen = None, False
        self.state = self.settled

    def _proves_nothing(
        self, beat: vocabulary.Heartbeat, life: liveness.Freshness, now: float
    ) -> bool:
        if self.state is State.MAINTENANCE:
            leaves = beat.phase is vocabulary.Phase.DRAINING
            return leaves or beat.instance == self.leaving
        asked = self._inquest.case
        if asked is not None and asked.doubt is Reason.DISCONNECT and not self.link.is_open:
            return now - asked.opened_at < _IN_FLIGHT_S
        return life is liveness.Freshness.DOUBTFUL and (self.is_silent or self.state is State.LOST)

    def _goes_on(self, beat: vocabulary.Heartbeat, former: str, now: float) -> bool:
        """Take a beat of one that is well and stays so, as nearly all are, in few steps."""
        if self.state is not State.HEALTHY or self._conviction.verdict is not Verdict.HEALTHY:
            return False
        if former != beat.instance or self._worry.reported(beat, self.beats, now) is not None:
            return False
        self.silence.broken(now)
        self._take_resources(beat, now)
        if self._worry.found is not None or self._worry.held:
            self._worry.forget()
        return True

    def _alive(self, beat: vocabulary.Heartbeat, now: float, *, counts: bool) -> list[steps.Step]:
        self.silence.broken(now)
        self._take_resources(beat, now)
        found = self._worry.reported(beat, self.beats, now)
        before = self._end_doubt(found)
        match self.state:
            case State.UNKNOWN | State.HEALTHY:
                if found is not None:
                    return [*before, *self._troubled(found, now)]
                self._worry.forget()
                self.state = State.HEALTHY
                if self.verdict is Verdict.HEALTHY:
                    return before
                told = self._conclude(Verdict.HEALTHY, Rule.FIRST_SIGN_OF_LIFE, evidence.alive())
                return [*before, *told]
            case State.ILL:
                if found is not None and self._conviction.is_still(found.verdict):
                    self._worry.forget()
                    if found.verdict is self.verdict and {*found.resources} - {*self.accused}:
                        # it never shrinks: what comes and goes is not to be told each time
                        more = tuple(sorted({*self.accused, *found.resources}))
                        said = self._conviction.confirm(found.rule, found.evidence, more)
                        before.append(said)
                    return before
                return [*before, *self._return(found, now, counts=True)]
            case State.LOST | State.MAINTENANCE | State.RECOVERING:
                return [*before, *self._return(found, now, counts=counts)]
            case State.SUSPECT:
                raise AssertionError("a doubt was just ended")
            case _:
                assert_never(self.state)

    def _take_resources(self, beat: vocabulary.Heartbeat, now: float) -> None:
        known = self.healthy
        if len(known) == len(beat.resources):
            for resource in beat.resources:
                if known.get(resource.name) != resource.healthy:
                    break
            else:
                return
        said = tuple((resource.name, resource.healthy) for resource in beat.resources)
        self.resources, self.healthy = _shared(said)
        self._worry.settled_at = now

    def _end_doubt(self, found: self_reported.Problem | None) -> list[steps.Step]:
        asked, self.is_frozen = self._inquest.refuted(), False
        if self.state is not State.SUSPECT:
            return []
        self.state = self._before
        about_trouble = asked is not None and asked.doubt is Reason.TROUBLE
        confirmed = about_trouble and found is not None
        return [signals.Noted(note=signals.Note.CONFIRMED if confirmed else signals.Note.REFUTED)]

    def _return(
        self, found: self_reported.Problem | None, now: float, *, counts: bool
    ) -> list[steps.Step]:
        """Come back from a bad verdict; trouble on the way back is trouble, and no good beat."""
        if self.state is not State.ILL or found is None:
            if self.state is not State.RECOVERING:
                self._recovery.begin()
            self.state, self._conviction.settle_due = State.RECOVERING, None
            self._inquest.review_due = None
        if found is not None:
            self._recovery.begin()
            return self._troubled(found, now)
        self._worry.forget()
        enough = self._recovery.good(now, counts=counts, hold_s=self._conviction.damping.hold_s)
        return self._recover() if enough else []

    def _recover(self) -> list[steps.Step]:
        told = evidence.recovered(self._recovery.good_beats)
        self.state, self.leaving = State.HEALTHY, ""
        self._conviction.end()
        self._recovery.begin()
        self._inquest.end()
        return self._conclude(Verdict.HEALTHY, Rule.RECOVERED, told)

    def _troubled(self, found: self_reported.Problem, now: float) -> list[steps.Step]:
        if not self._worry.about(found, now):
            return []
        if found.rule is not Rule.NODE_OFFERS_OTHERS or not self._inquest.has_cluster:
            return self._believe(found, now)
        if not self._worry.may_look(now):
            return []
        inquiry = self._inquest.inquire()
        self._worry.looks(inquiry.number, now)
        return [inquiry]

    def _believe(self, found: self_reported.Problem, now: float) -> list[steps.Step]:
        delay_s = now - self._worry.since
        self._worry.forget()
        fresh = self.state is not State.ILL
        self.state = State.ILL
        self._recovery.begin()
        reached = diagnosis.Diagnosis(
            verdict=found.verdict, rule=found.rule, evidence=found.evidence
        )
        return self._conviction.convict(
            reached, now, delay_s, fell=fresh, resources=found.resources
        )

    def _ask(self, doubt: Reason, now: float) -> list[steps.Step]:
        self._before, self.state = self.state, State.SUSPECT
        self._worry.due, self._is_thawed = None, False
        return [signals.Noted(note=signals.Note.SUSPECTED), *self._inquest.open(doubt, now)]

    def _pursue(self, asked: investigation.Suspicion, now: float) -> list[steps.Step]:
        if asked.is_hopeless(now):
            return self.inconclusive(asked.number, now)
        return [*self._inquest.ask(asked, now), *self._judge(asked, now)]

    def _judge(self, asked: investigation.Suspicion, now: float) -> list[steps.Step]:
        if not asked.is_complete(now):
            return []
        silent_s = now - self.silence.since
        scene = diagnosis.Observations(
            silent_s=silent_s,
            interval_s=self.beats.interval_s,
            ever_heard=self.silence.ever_heard or self.heard_of,
            expected=self.expected,
            # what listened was there when it was asked, and may have gone since
            listens=bool(asked.listens) and not self.link.has_ended_since(asked.asked_at),
            link=self.link,
            has_cluster=self._inquest.has_cluster,
            known=asked.known,
            healthy=self.healthy,
            waited=asked.has_waited,
            now=now,
        )
        reached = diagnosis.diagnose(scene, self._settings)
        if reached is None:
            asked.ask_again(now)
            return []
        self._inquest.case = None
        fresh = self.state is State.SUSPECT
        noted: list[steps.Step] = [signals.Noted(note=signals.Note.CONFIRMED)] if fresh else []
        if reached.verdict is Verdict.MAINTENANCE:
            self.state = self.settled
            return_s = self._settings.maintenance_s
            left = self._leave(reached.rule, reached.evidence, return_s, now)
            if reached.rule is Rule.NODE_GONE and not self.expected:
                # where it still is expected, the two ways of knowing that contradict each other
                self._return_due = None
            return [*noted, *left]
        is_early = reached.rule is Rule.NOT_BACK
        wait_s = max(0.0, self._patience_s - scene.quiet_s) if is_early else None
        self._inquest.found(now, fresh=fresh, wait_s=wait_s)
        self.state = State.LOST
        self._worry.forget()
        self._recovery.begin()
        told = self._conviction.convict(
            reached, now, silent_s if fresh else None, fell=fresh, resources=self.resources
        )
        return [*noted, *told]

    def _leave(
        self, rule: Rule, told: tuple[vocabulary.Evidence, ...], return_s: float, now: float
    ) -> list[steps.Step]:
        self._inquest.case, self.is_frozen = None, False
        self.state, self.return_s = State.MAINTENANCE, return_s
        self._return_due = now + return_s
        self._worry.forget()
        self._recovery.begin()
        self._inquest.review_due = None
        self._conviction.end()
        return self._conclude(Verdict.MAINTENANCE, rule, *told)

    def _fell_unseen(self, former: str, now: float) -> bool:
        """Take that another instance beats, without a goodbye; tell whether that was too often."""
        if self.settled is not State.HEALTHY or former == self.leaving:
            return False
        self._conviction.damping.fell(now)
        return self._conviction.damping.is_flapping(now)

    def _flap(self, beat: vocabulary.Heartbeat, now: float) -> list[steps.Step]:
        before = self._end_doubt(None)
        self.silence.broken(now)
        self._take_resources(beat, now)
        self._worry.forget()
        self._recovery.begin()
        self.state = State.RECOVERING
        self._recovery.good(now, counts=False, hold_s=self._conviction.damping.hold_s)
        return [*before, *self._conviction.flap(now, self.resources)]

    def _conclude(
        self, verdict: Verdict, rule: Rule, *told: vocabulary.Evidence
    ) -> list[steps.Step]:
        return self._conviction.conclude(verdict, rule, told, self.resources)


@functools.lru_cache(maxsize=1024)
def _shared(said: tuple[tuple[str, int], ...]) -> tuple[tuple[str, ...], Mapping[str, int]]:
    """Return resources and healthy devices; nodes that are alike share them (0.5 KiB a node)."""
    healthy = dict(said)
    return tuple(healthy), healthy


def _earliest(*dues: float | None) -> float | None:
    first = None
    for due in dues:
        if due is not None and (first is None or due < first):
            first = due
    return first


def _is_due(due: float | None, now: float) -> bool:
    return due is not None and due <= now
