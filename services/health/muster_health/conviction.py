"""Pure. By which name a bad verdict is told: its own, or FLAPPING if it came too often."""

from muster import vocabulary
from muster.vocabulary import Verdict
from muster_health import config, damping, evidence, judgement
from muster_health.rules import Rule

_NO_FALL = frozenset({Verdict.HEALTHY, Verdict.MAINTENANCE, Verdict.DEGRADED})


class Conviction:
    """What a plugin really suffers, and how often it fell before."""

    __slots__ = ("_settings", "actual", "damping", "settle_due")

    def __init__(self, settings: config.Detection) -> None:
        self.actual: judgement.Judgement | None = None
        self.damping = damping.Damping(settings)
        self.settle_due: float | None = None
        """When to call by its name what has stayed as it fell."""
        self._settings = settings

    def reach(
        self, reached: judgement.Judgement, now: float, *, fell: bool, told: Verdict | None
    ) -> judgement.Judgement | None:
        """Take a bad verdict; return the one to tell, or None if FLAPPING says it already.

        `fell` is a fall, and not what a fall turned out to be; `told` is what is told so far.
        """
        self.actual = reached
        if fell and reached.verdict not in _NO_FALL:
            self.damping.fell(now)
            if self.damping.is_flapping(now):
                self.settle_due = now + self.damping.hold_s
                return self.flapping(now, reached.evidence)
        if told is Verdict.FLAPPING and self.settle_due is not None:
            return None
        return reached

    def flapping(self, now: float, seen: tuple[vocabulary.Evidence, ...]) -> judgement.Judgement:
        """Return the verdict for what fell too often."""
        often = evidence.fell(self.damping.falls(now), self._settings.flap_window_s)
        return judgement.Judgement(
            verdict=Verdict.FLAPPING, rule=Rule.FELL_OFTEN, evidence=(often, *seen)
        )

    def is_still(self, verdict: Verdict, told: Verdict | None) -> bool:
        """Tell whether it suffers what it suffered, whatever that is called."""
        return verdict is (told if self.actual is None else self.actual.verdict)

    def end(self) -> None:
        """Take that it is well, or on its way."""
        self.actual = self.settle_due = None

    def shift(self, seconds: float) -> None:
        """Take that we heard nothing for so long."""
        if self.settle_due is not None:
            self.settle_due += seconds
