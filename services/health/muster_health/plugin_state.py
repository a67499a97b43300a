"""Pure. One plugin: from a doubt to a verdict and back.

A verdict needs evidence from two sides: silence alone raises a question, never an alarm.

| state       | what comes                                    | then        | verdict              |
|-------------|-----------------------------------------------|-------------|----------------------|
| UNKNOWN     | a good beat                                   | HEALTHY     | HEALTHY              |
| HEALTHY (1) | an event tells of a lost registration         | itself      | ask after the grace  |
| all but (2) | no beat for 2.5 intervals (3)                 | SUSPECT     | ask: silence         |
| all but (2) | a beat with trouble                           | itself      | ask after the grace  |
| all but (2) | trouble, and again after the grace            | ILL         | DEREGISTERED / STUCK |
| SUSPECT     | the probe is answered, or a fresh beat        | as before   | as before: refuted   |
| SUSPECT     | trouble: the answer shows it too              | ILL         | DEREGISTERED / STUCK |
| SUSPECT     | silence: nobody listens                       | LOST        | PLUGIN_DOWN          |
| SUSPECT     | silence: somebody listens, nobody answers     | LOST        | STUCK                |
| SUSPECT     | trouble: no answer; or nothing can be said    | as before   | as before            |
| LOST        | a fresh beat                                  | RECOVERING  | as before            |
| ILL         | a good beat                                   | RECOVERING  | as before            |
| RECOVERING  | 3 good beats, or 15 s after the first         | HEALTHY     | HEALTHY              |
| any         | goodbye                                       | MAINTENANCE | MAINTENANCE          |
| MAINTENANCE | a beat of another instance, or of a new start | RECOVERING  | as before            |
| MAINTENANCE | not back in time                              | MAINTENANCE | as before: overdue   |
| any         | our own link or clockwork failed              | as before   | waits begin anew     |

(1) UNKNOWN and RECOVERING too. (2) SUSPECT waits for its answer, LOST for a beat, MAINTENANCE for
a return. (3) As the plugin declares them, by our clock, not counting the time we could not hear.

The grace for trouble is the time a plugin has to repair a lost registration by itself. A beat out
of a backlog (`beats.Life.DOUBTFUL`) neither refutes a suspicion of silence nor counts as good.
"""

import enum
from typing import assert_never

from muster import vocabulary
from muster.vocabulary import Verdict
from muster_health import beats, config, evidence, signals, snapshot, steps, trouble
from muster_health.snapshot import State
from muster_health.trouble import Rule


class Doubt(enum.StrEnum):
    """What a suspicion is about."""

    SILENCE = "silence"
    TROUBLE = "trouble"


class PluginState:
    """The machine of one plugin. `now` is the receiver's monotonic time in seconds."""

    def __init__(self, settings: config.Detection, now: float) -> None:
        self.state = State.UNKNOWN
        self.verdict: Verdict | None = None
        self.resources: tuple[str, ...] = ()
        self.beats = beats.Beats(settings.interval_s)
        self.heard_at: float | None = None
        self.leaving = ""
        self.return_s = 0.0
        self._settings = settings
        self._listening_since = now
        self._window_s = 0.0
        self._before = State.UNKNOWN
        self._doubt = Doubt.SILENCE
        self._number = 0
        self._trouble: trouble.Trouble | None = None
        self._trouble_since = now
        self._trouble_due: float | None = None
        self._good_beats = 0
        self._recovered_due: float | None = None
        self._return_due: float | None = None

    @property
    def settled(self) -> State:
        """The state without a doubt that may be pending."""
        return self._before if self.state is State.SUSPECT else self.state

    def restore(self, known: snapshot.Snapshot, now: float, *, overdue: bool) -> None:
        """Go on where a former process stopped; `overdue` has been told already."""
        self.state, self.verdict = known.state, known.verdict
        self.resources, self.leaving, self.return_s = known.resources, known.leaving, known.return_s
        self.beats.restore(known.instance, known.seq, known.interval_s)
        self._listening_since = now
        if self.state is State.MAINTENANCE and not overdue:
            # another process may have another clock, so the wait begins anew
            self._return_due = now + self.return_s

    def hear(self, beat: vocabulary.Heartbeat, now: float) -> list[steps.Step]:
        """Take a heartbeat."""
        life = self.beats.take(beat, now)
        if life is beats.Life.STALE:
            return [signals.Noted(note=signals.Note.BEAT_STALE)]
        if self._proves_nothing(beat, life):
            return []
        return self._alive(beat, now, counts=life is beats.Life.FRESH)

    def answered(self, beat: vocabulary.Heartbeat, number: int, now: float) -> list[steps.Step]:
        """Take the answer to a probe."""
        return self._alive(beat, now, counts=False) if self._awaits(number) else []

    def failed(self, number: int, now: float, *, subscribed: bool) -> list[steps.Step]:
        """Take that a probe found nobody, or (`subscribed`) no answer."""
        if not self._awaits(number):
            return []
        if self._doubt is Doubt.TROUBLE:
            # it spoke a moment ago: whether it is gone is for its silence to tell
            self.state = self._before
            return []
        silent_s = now - self._silent_since
        interval_s = self.beats.interval_s
        seen = evidence.silent(silent_s, interval_s, ever_heard=self.heard_at is not None)
        self.state = State.LOST
        self._forget_trouble()
        confirmed = signals.Noted(note=signals.Note.CONFIRMED)
        if subscribed:
            told = (seen, evidence.no_answer(self._settings.probe_timeout_s))
            concluded = self._conclude(Verdict.STUCK, Rule.NO_ANSWER, told, silent_s)
        else:
            told = (seen, evidence.nobody_listens())
            concluded = self._conclude(Verdict.PLUGIN_DOWN, Rule.NOBODY_LISTENS, told, silent_s)
        return [confirmed, *concluded]

    def inconclusive(self, number: int, now: float) -> list[steps.Step]:
        """Take that a probe says nothing about the plugin."""
        if self._awaits(number):
            self.rebase(now)
        return []

    def hint(self, event: vocabulary.PluginDeregistered, now: float) -> list[steps.Step]:
        """Take that a registration was lost a moment ago: worth a question, if it lasts."""
        if self.state in {State.UNKNOWN, State.HEALTHY, State.RECOVERING} and not self._trouble:
            self._worry(trouble.deregistered(event), now)
        return []

    def goodbye(
        self, event: vocabulary.PluginStopping, instance: str, now: float
    ) -> list[steps.Step]:
        """Take that the plugin leaves as planned."""
        self.state, self.leaving = State.MAINTENANCE, instance
        self._forget_trouble()
        self._recovered_due = None
        self.return_s = event.expected_return_s or self._settings.maintenance_s
        self._return_due = now + self.return_s
        said = evidence.goodbye(event.reason, self.return_s, said=event.expected_return_s > 0)
        return self._conclude(Verdict.MAINTENANCE, Rule.GOODBYE, (said,))

    def started(self) -> None:
        """Take that the plugin began anew: even the instance that said goodbye may be back."""
        self.leaving = ""

    def rebase(self, now: float, *, window_s: float = 0.0, paused_s: float = 0.0) -> None:
        """Begin every wait anew: until now we heard nothing, and that proves nothing.

        The plugin has `window_s` more than usual to be heard again.
        """
        self._listening_since, self._window_s = now, window_s
        self.state = self.settled
        self._forget_trouble()
        if self._recovered_due is not None:
            self._recovered_due += paused_s
        if self._return_due is not None:
            self._return_due += paused_s

    def deadline(self) -> float | None:
        """Return when `tick` is next needed."""
        match self.state:
            case State.SUSPECT | State.LOST:
                return None
            case State.MAINTENANCE:
                return self._return_due
            case State.UNKNOWN | State.HEALTHY | State.ILL | State.RECOVERING:
                waits = (self._silence_due, self._trouble_due, self._recovered_due)
                return min(due for due in waits if due is not None)
            case _:
                assert_never(self.state)

    def tick(self, now: float) -> list[steps.Step]:
        """Do what is due."""
        due = self.deadline()
        if due is None or due > now:
            return []
        if self.state is State.MAINTENANCE:
            self._return_due = None
            return [steps.Overdue(evidence=(evidence.overdue(self.return_s),))]
        if self._silence_due <= now:
            return self._ask(Doubt.SILENCE)
        if self._trouble_due is not None and self._trouble_due <= now:
            return self._ask(Doubt.TROUBLE)
        return self._recover()

    @property
    def _silent_since(self) -> float:
        heard_at = self._listening_since if self.heard_at is None else self.heard_at
        return max(heard_at, self._listening_since)

    @property
    def _silence_due(self) -> float:
        patience_s = self._settings.suspicion_beats * self.beats.interval_s
        # the window only holds until the plugin has been heard once more
        heard = self.heard_at is not None and self.heard_at > self._listening_since
        return self._silent_since + patience_s + (0.0 if heard else self._window_s)

    @property
    def _grace_s(self) -> float:
        beats_s = self._settings.trouble_beats * self.beats.interval_s
        return min(beats_s, self._settings.trouble_s)

    def _awaits(self, number: int) -> bool:
        return self.state is State.SUSPECT and number == self._number

    def _proves_nothing(self, beat: vocabulary.Heartbeat, life: beats.Life) -> bool:
        if self.state is State.MAINTENANCE:
            leaves = beat.phase is vocabulary.Phase.DRAINING
            return leaves or beat.instance == self.leaving
        silent = self.state is State.SUSPECT and self._doubt is Doubt.SILENCE
        return life is beats.Life.DOUBTFUL and (silent or self.state is State.LOST)

    def _alive(self, beat: vocabulary.Heartbeat, now: float, *, counts: bool) -> list[steps.Step]:
        self.heard_at = now
        self.resources = tuple(resource.name for resource in beat.resources)
        found = trouble.reported(beat)
        before = self._end_doubt(found)
        match self.state:
            case State.UNKNOWN | State.HEALTHY:
                if found is not None:
                    return [*before, *self._worry(found, now)]
                self._forget_trouble()
                self.state = State.HEALTHY
                told = (evidence.alive(),)
                return [
                    *before,
                    *self._conclude(Verdict.HEALTHY, Rule.FIRST_SIGN_OF_LIFE, told),
                ]
            case State.ILL:
                if found is not None and found.verdict is self.verdict:
                    self._forget_trouble()
                    return before
                return [*before, *self._return(found, now, counts=True)]
            case State.LOST | State.MAINTENANCE | State.RECOVERING:
                return [*before, *self._return(found, now, counts=counts)]
            case State.SUSPECT:
                raise AssertionError("a doubt was just ended")
            case _:
                assert_never(self.state)

    def _end_doubt(self, found: trouble.Trouble | None) -> list[steps.Step]:
        if self.state is not State.SUSPECT:
            return []
        self.state = self._before
        confirmed = self._doubt is Doubt.TROUBLE and found is not None
        note = signals.Note.CONFIRMED if confirmed else signals.Note.REFUTED
        return [signals.Noted(note=note)]

    def _return(
        self, found: trouble.Trouble | None, now: float, *, counts: bool
    ) -> list[steps.Step]:
        """Come back from a bad verdict; trouble on the way back is trouble, and no good beat."""
        if self.state is not State.ILL or found is None:
            if self.state is not State.RECOVERING:
                self._good_beats, self._recovered_due = 0, None
            self.state = State.RECOVERING
        if found is not None:
            self._good_beats, self._recovered_due = 0, None
            return self._worry(found, now)
        self._forget_trouble()
        self._good_beats += counts
        if self._recovered_due is None:
            self._recovered_due = now + self._settings.recover_s
        return self._recover() if self._good_beats >= self._settings.recover_beats else []

    def _recover(self) -> list[steps.Step]:
        self.state, self._recovered_due, self.leaving = State.HEALTHY, None, ""
        told = (evidence.recovered(self._good_beats),)
        return self._conclude(Verdict.HEALTHY, Rule.RECOVERED, told)

    def _worry(self, found: trouble.Trouble, now: float) -> list[steps.Step]:
        if self._trouble is None:
            self._trouble_since = now
        self._trouble = found
        due = self._trouble_since + self._grace_s
        if now < due:
            self._trouble_due = due
            return []
        self._forget_trouble()
        self.state, self._recovered_due = State.ILL, None
        delay_s = now - self._trouble_since
        return self._conclude(
            found.verdict, found.rule, found.evidence, delay_s, resources=found.resources
        )

    def _forget_trouble(self) -> None:
        self._trouble = self._trouble_due = None

    def _ask(self, doubt: Doubt) -> list[steps.Step]:
        self._before, self.state, self._doubt = self.state, State.SUSPECT, doubt
        self._trouble_due = None
        self._number += 1
        return [signals.Noted(note=signals.Note.SUSPECTED), steps.Question(number=self._number)]

    def _conclude(
        self,
        verdict: Verdict,
        rule: Rule,
        told: tuple[vocabulary.Evidence, ...],
        delay_s: float | None = None,
        *,
        resources: tuple[str, ...] | None = None,
    ) -> list[steps.Step]:
        if verdict is self.verdict:
            return []
        previous, self.verdict = self.verdict, verdict
        taken: list[steps.Step] = [
            steps.Conclusion(
                verdict=verdict,
                previous=previous,
                rule=rule,
                resources=self.resources if resources is None else resources,
                evidence=told,
            )
        ]
        if delay_s is not None:
            taken.append(signals.Noted(note=signals.Note.CONVICTED, seconds=delay_s))
        return taken
