"""Pure: What is told of a plugin, and by which name: its own, or FLAPPING if it came too often.

The machine of a plugin reaches verdicts; here stands the one that was told, and a step comes of
another one only. So nobody is told twice, and what turns out to be otherwise is told as that.
"""

from muster import vocabulary
from muster.vocabulary import Verdict
from muster_health.alerting import evidence, flap_damping
from muster_health.model import config, signals, snapshot, steps
from muster_health.model.steps import Rule
from muster_health.plugin import diagnosis

_NO_FALL = frozenset({Verdict.HEALTHY, Verdict.MAINTENANCE, Verdict.DEGRADED})


class StandingVerdict:
    """The verdict that is told; `actual` is what a plugin really suffers.

    `accused` are those of its resources that the verdict is about, `fell_at` is when it fell last.
    """

    __slots__ = (
        "_settings",
        "accused",
        "actual",
        "damping",
        "fell_at",
        "rule",
        "settle_due",
        "verdict",
    )

    def __init__(self, settings: config.Detection) -> None:
        self.verdict: Verdict | None = None
        self.rule: Rule | None = None
        self.accused: tuple[str, ...] = ()
        self.actual: diagnosis.Diagnosis | None = None
        self.fell_at = 0.0
        self.damping = flap_damping.FlapDamping(settings)
        self.settle_due: float | None = None
        """When to call by its name what has stayed as it fell."""
        self._settings = settings

    def restore(self, known: snapshot.Snapshot, now: float, *, waited_s: float) -> None:
        """Go on where a former process stopped, whose verdict has stood for so long."""
        self.verdict, self.rule = known.verdict, steps.rule_named(known.rule)
        self.accused, self.fell_at = known.accused or known.resources, now - waited_s
        self.damping.restore(known.falls, now)

    def conclude(
        self,
        verdict: Verdict,
        rule: Rule,
        told: tuple[vocabulary.Evidence, ...],
        resources: tuple[str, ...],
        delay_s: float | None = None,
    ) -> list[steps.Step]:
        """Take a verdict; return what is to be told, if it is news."""
        if verdict is self.verdict:
            if rule is self.rule or verdict in {Verdict.HEALTHY, Verdict.MAINTENANCE}:
                return []
            return [self.confirm(rule, told, resources)]
        previous, self.verdict, self.rule = self.verdict, verdict, rule
        self.accused = resources
        taken: list[steps.Step] = [
            steps.VerdictReached(
                verdict=verdict,
                previous=previous,
                rule=rule,
                resources=resources,
                evidence=told,
            )
        ]
        if delay_s is not None:
            taken.append(signals.Noted(note=signals.Note.CONVICTED, seconds=delay_s))
        return taken

    def confirm(
        self, rule: Rule, told: tuple[vocabulary.Evidence, ...], resources: tuple[str, ...]
    ) -> steps.VerdictConfirmed:
        """Take that the verdict stands, for another reason or for more resources."""
        self.rule, self.accused = rule, resources
        return steps.VerdictConfirmed(rule=rule, evidence=told, resources=resources)

    def convict(
        self,
        reached: diagnosis.Diagnosis,
        now: float,
        delay_s: float | None,
        *,
        fell: bool,
        resources: tuple[str, ...],
    ) -> list[steps.Step]:
        """Take a bad verdict; return what is to be told, if FLAPPING does not say it already.

        `fell` is a fall, and not what a fall turned out to be.
        """
        self.actual = told = reached
        if fell:
            self.fell_at = now
        if fell and reached.verdict not in _NO_FALL:
            self.damping.fell(now)
            if self.damping.is_flapping(now):
                self.settle_due = now + self.damping.hold_s
                told = self._flapping(now, reached.evidence)
        if told is reached and self.verdict is Verdict.FLAPPING and self.settle_due is not None:
            return []
        return self.conclude(told.verdict, told.rule, told.evidence, resources, delay_s)

    def settle(self) -> list[steps.Step]:
        """Call by its name what has stayed as it fell."""
        actual, self.settle_due = self.actual, None
        if actual is None:
            return []
        return self.conclude(actual.verdict, actual.rule, actual.evidence, self.accused)

    def flap(self, now: float, resources: tuple[str, ...]) -> list[steps.Step]:
        """Take that other processes came too often, each without a goodbye of the one before."""
        came = (evidence.seen("heartbeat", "each time another process came"),)
        told = self._flapping(now, came)
        return self.conclude(told.verdict, told.rule, told.evidence, resources, 0.0)

    def is_still(self, verdict: Verdict) -> bool:
        """Tell whether it suffers what it suffered, whatever that is called."""
        return verdict is (self.verdict if self.actual is None else self.actual.verdict)

    def end(self) -> None:
        """Take that it is well, or on its way."""
        self.actual = self.settle_due = None

    def shift(self, seconds: float) -> None:
        """Take that we heard nothing for so long."""
        self.fell_at += seconds
        if self.settle_due is not None:
            self.settle_due += seconds

    def _flapping(self, now: float, seen: tuple[vocabulary.Evidence, ...]) -> diagnosis.Diagnosis:
        often = evidence.fell(self.damping.falls(now), self._settings.flap_window_s)
        return diagnosis.Diagnosis(
            verdict=Verdict.FLAPPING, rule=Rule.FELL_OFTEN, evidence=(often, *seen)
        )


class Recovery:
    """Counts the good beats since a plugin came back; `due` is when it is believed anyhow."""

    __slots__ = ("_held_until", "_settings", "due", "good_beats")

    def __init__(self, settings: config.Detection) -> None:
        self._settings = settings
        self.good_beats = 0
        self.due: float | None = None
        self._held_until = 0.0

    def begin(self) -> None:
        """Take that it is not back, or no longer."""
        self.good_beats, self.due = 0, None

    def good(self, now: float, *, counts: bool, hold_s: float) -> bool:
        """Take a good beat; return whether that is enough."""
        self.good_beats += counts
        if self.due is None:
            self._held_until = now + hold_s
            self.due = now + max(self._settings.recover_s, hold_s)
        return self.good_beats >= self._settings.recover_beats and now >= self._held_until

    def shift(self, seconds: float) -> None:
        """Take that we heard nothing for so long."""
        if self.due is not None:
            self.due += seconds
            self._held_until += seconds
