"""Pure: What a plugin that is alive says is wrong with it, the worst first.

| verdict      | what shows it                                             | for how long      |
|--------------|-----------------------------------------------------------|-------------------|
| STUCK        | its own socket does not answer its self-probe             | its time to mend  |
| STUCK        | its last self-probe is a minute old (3)                   | its time to mend  |
| DEREGISTERED | a problem with the kubelet, or no open stream             | its time to mend  |
| DEREGISTERED | likewise, and the kubelet is away, or has just come       | 30 s (4)          |
| MISMATCH     | it saw the kubelet list other devices                     | its time to mend  |
| MISMATCH     | the node offers another number than it has Healthy        | `mismatch_s` (1)  |
| SPLIT_BRAIN  | two instances beat in turns                               | `degraded_s` (2)  |
| DEGRADED     | a health checker is silent, its loop or its beats are late | `degraded_s`      |

(1) The kubelet tells of what the plugin changed, or of a new registration, every 10 s only. But
where that is long ago, the node itself has changed: then the plugin has its time to mend.
(2) A DaemonSet with `maxSurge` starts the new pod before it ends the old one.
(3) Or 3 beats, if these are longer; or it is registered for so long, and has had none yet.
(4) It is upgraded, or starts: no plugin can mend that, and when it is there all register by
themselves. From then on they have their time to mend.

Who does not answer cannot be registered either, so that comes first. A plugin that has only just
started has `starting_s` to be registered.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from muster import vocabulary
from muster.vocabulary import Verdict
from muster_health.alerting import evidence
from muster_health.model import config, facts
from muster_health.model.steps import Rule
from muster_health.plugin import liveness

_SHOWN_MAX: Final = 8
_AWAY_S: Final = 30.0
_PROBE_OLD_S: Final = 60.0
_PROBE_OLD_BEATS: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The verdict that a self-report asks for, if it lasts for `grace_s`."""

    verdict: Verdict
    rule: Rule
    resources: tuple[str, ...]
    evidence: tuple[vocabulary.Evidence, ...]
    grace_s: float


def repair_s(settings: config.Detection, interval_s: float) -> float:
    """Return how long a plugin may take to mend what it can mend itself."""
    return min(settings.trouble_beats * interval_s, settings.trouble_s)


def reported(
    beat: vocabulary.Heartbeat,
    settings: config.Detection,
    *,
    offers: Mapping[str, facts.Offer] | None = None,
    settled_s: float = 0.0,
    twins: str = "",
    stretch: float = 1.0,
) -> Problem | None:
    """Return the worst that a beat tells, or None.

    `offers` is what the node offers, and `settled_s` for how long the plugin has had what it has;
    `twins` says that two instances beat, `stretch` how slowly one does.
    """
    grace_s = repair_s(settings, beat.interval_s)
    starts = beat.phase is vocabulary.Phase.STARTING
    return (
        _stuck(beat, grace_s)
        or _apart(beat, settings.starting_s if starts else grace_s)
        or _mismatched(beat, offers, grace_s, settings.mismatch_s, settled_s)
        or _split(beat, twins, settings.degraded_s)
        or _slow(beat, stretch, settings)
    )


def is_well(
    beat: vocabulary.Heartbeat,
    stretch: float,
    offers: Mapping[str, facts.Offer] | None,
    settings: config.Detection,
) -> bool:
    """Tell whether `reported` would return None, of a plugin that is alone, in few steps."""
    for resource in beat.resources:
        if not resource.streams or not resource.probe_ok or resource.problem or resource.apart:
            return False
        age_s = resource.probe_age_s
        if not 0 <= age_s <= _PROBE_OLD_S and not 0 <= age_s <= _old_s(beat):
            return False
    for age_s in beat.checkers.values():
        if not 0 <= age_s <= settings.checker_age_s:
            return False
    if beat.loop_lag_ms > settings.lag_ms or stretch > settings.stretch_max:
        return False
    return offers is None or _is_offered(beat, offers)


def _old_s(beat: vocabulary.Heartbeat) -> float:
    """Return how old a self-probe may be: they are made every few seconds, whatever happens."""
    return max(_PROBE_OLD_S, _PROBE_OLD_BEATS * beat.interval_s)


def _is_offered(beat: vocabulary.Heartbeat, offers: Mapping[str, facts.Offer]) -> bool:
    """Tell whether the node offers what the plugin has, as nearly all do."""
    for resource in beat.resources:
        offer = offers.get(resource.name)
        if offer is None or offer.allocatable != resource.healthy:
            return False
    return True


def deregistered(event: vocabulary.PluginDeregistered, grace_s: float) -> Problem:
    """Return what a report of a lost registration asks for, if it lasts."""
    detail = f": {event.detail}" if event.detail else ""
    said = f"{event.resource}: the kubelet lost it ({event.reason}{detail})"
    return Problem(
        verdict=Verdict.DEREGISTERED,
        rule=Rule.NOT_REGISTERED,
        resources=(event.resource,),
        evidence=(evidence.seen("plugin", said),),
        grace_s=grace_s,
    )


def offered(
    had: Mapping[str, int], offers: Mapping[str, facts.Offer], grace_s: float
) -> Problem | None:
    """Return what it asks for, if it lasts, that a node now offers other than the plugin had."""
    told = list(_offered_otherwise(had, offers))
    return _of(Verdict.MISMATCH, Rule.NODE_OFFERS_OTHERS, told, grace_s)


def _apart(beat: vocabulary.Heartbeat, grace_s: float) -> Problem | None:
    told = [
        (r.name, r.problem or "the kubelet has no ListAndWatch stream open")
        for r in beat.resources
        if r.problem or not r.streams
    ]
    away = {r.name for r in beat.resources if r.away}
    lost = [(name, text) for name, text in told if name not in away]
    if told and not lost:
        return _of(Verdict.DEREGISTERED, Rule.KUBELET_AWAY, told, _AWAY_S)
    return _of(Verdict.DEREGISTERED, Rule.NOT_REGISTERED, lost, grace_s)


def _stuck(beat: vocabulary.Heartbeat, grace_s: float) -> Problem | None:
    deaf = "{}its own socket does not answer (self-probe {:.1f} s ago){}"
    # an age below 0 is a self-probe that has not run yet
    told = [
        (
            r.name,
            deaf.format(
                "" if r.problem else "registered, but ",
                r.probe_age_s,
                f"; {r.problem}" if r.problem else "",
            ),
        )
        for r in beat.resources
        if not r.probe_ok and r.probe_age_s >= 0
    ]
    if told:
        return _of(Verdict.STUCK, Rule.SELF_PROBE_FAILS, told, grace_s)
    old_s = _old_s(beat)
    never = "registered {:.0f} s ago, and its own socket was never probed"
    stale = "nobody looked for {:.0f} s whether its own socket answers"
    told = [
        (r.name, never.format(r.registered_age_s))
        if r.probe_age_s < 0
        else (r.name, stale.format(r.probe_age_s))
        for r in beat.resources
        if not r.problem
        and (r.probe_age_s > old_s or (r.probe_age_s < 0 and r.registered_age_s > old_s))
    ]
    return _of(Verdict.STUCK, Rule.SELF_PROBE_STALE, told, grace_s)


def _mismatched(
    beat: vocabulary.Heartbeat,
    offers: Mapping[str, facts.Offer] | None,
    grace_s: float,
    mismatch_s: float,
    settled_s: float,
) -> Problem | None:
    odd = [(r.name, r.apart) for r in beat.resources if r.apart]
    if odd or offers is None:
        return _of(Verdict.MISMATCH, Rule.KUBELET_LISTS_OTHERS, odd, grace_s)
    had = {r.name: r.healthy for r in beat.resources}
    told = list(_offered_otherwise(had, offers))
    names = {name for name, _ in told}
    ages_s = (r.registered_age_s for r in beat.resources if r.name in names)
    is_settled = min((settled_s, *ages_s)) >= mismatch_s
    wait_s = grace_s if is_settled else mismatch_s
    return _of(Verdict.MISMATCH, Rule.NODE_OFFERS_OTHERS, told, wait_s)


def _split(beat: vocabulary.Heartbeat, twins: str, grace_s: float) -> Problem | None:
    if not twins:
        return None
    told = (evidence.seen("heartbeat", twins),)
    return _whole(beat, Verdict.SPLIT_BRAIN, Rule.TWO_INSTANCES, told, grace_s)


def _offered_otherwise(
    had: Mapping[str, int], offers: Mapping[str, facts.Offer]
) -> Iterable[tuple[str, str]]:
    for name, healthy in had.items():
        offer = offers.get(name, facts.Offer(capacity=0, allocatable=0))
        if offer.allocatable != healthy:
            node = f"the node offers {offer.allocatable} of {offer.capacity}"
            yield name, f"the plugin has {healthy} Healthy, {node}"


def _slow(beat: vocabulary.Heartbeat, stretch: float, settings: config.Detection) -> Problem | None:
    told = [
        evidence.seen("plugin", f"health checker {name} last succeeded {age_s:.0f} s ago")
        for name, age_s in beat.checkers.items()
        if age_s > settings.checker_age_s
    ]
    # an age below 0 is a checker that has not succeeded yet
    told += [
        evidence.seen("plugin", f"health checker {name} has never succeeded")
        for name, age_s in beat.checkers.items()
        if age_s < 0 and beat.uptime_s > settings.checker_age_s
    ]
    rule = Rule.CHECKER_SILENT
    if not told and beat.loop_lag_ms > settings.lag_ms:
        rule = Rule.LOOP_LATE
        told = [evidence.seen("plugin", f"its event loop was {beat.loop_lag_ms:.0f} ms late")]
    if not told and stretch > settings.stretch_max:
        rule = Rule.BEATS_STRETCHED
        slow = f"it makes a beat every {stretch * beat.interval_s:.1f} s"
        told = [evidence.seen("heartbeat", f"{slow}, and means to every {beat.interval_s:g} s")]
    if not told:
        return None
    shown = tuple(told[:_SHOWN_MAX])
    return _whole(beat, Verdict.DEGRADED, rule, shown, settings.degraded_s)


def _of(
    verdict: Verdict,
    rule: Rule,
    told: list[tuple[str, str]],
    grace_s: float,
) -> Problem | None:
    if not told:
        return None
    return Problem(
        verdict=verdict,
        rule=rule,
        resources=tuple(name for name, _ in told),
        evidence=tuple(
            evidence.seen("plugin", f"{name}: {text}") for name, text in told[:_SHOWN_MAX]
        ),
        grace_s=grace_s,
    )


def _whole(
    beat: vocabulary.Heartbeat,
    verdict: Verdict,
    rule: Rule,
    told: tuple[vocabulary.Evidence, ...],
    grace_s: float,
) -> Problem:
    names = tuple(resource.name for resource in beat.resources)
    return Problem(verdict=verdict, rule=rule, resources=names, evidence=told, grace_s=grace_s)


_COMMON: Final = frozenset({Verdict.DEREGISTERED, Verdict.MISMATCH, Verdict.STUCK})
"""What many say of themselves at once where their kubelets or their revision are at fault."""
_LOOK_AGAIN_S: Final = 10.0
"""How soon Kubernetes is asked again what a node offers, if it did not say."""


class SelfReported:
    """The trouble of one plugin. `due` is when to ask about it, if no beat comes before.

    While it is `held` it is not believed, however long it lasts: many have trouble at once.
    """

    __slots__ = (
        "_drains_at",
        "_look_again_at",
        "_looked",
        "_settings",
        "due",
        "found",
        "held",
        "offers",
        "settled_at",
        "since",
    )

    def __init__(self, settings: config.Detection, now: float) -> None:
        self.found: Problem | None = None
        self.since = 0.0
        self.due: float | None = None
        self.held = False
        self.offers: Mapping[str, facts.Offer] | None = None
        """What the node offers, as Kubernetes said last."""
        self.settled_at = now
        """Since when the plugin has had what it has."""
        self._settings = settings
        self._drains_at: float | None = None
        self._looked: int | None = None
        """Under which number Kubernetes is asked what the node offers now."""
        self._look_again_at = now

    def reported(
        self, beat: vocabulary.Heartbeat, order: liveness.HeartbeatOrder, now: float
    ) -> Problem | None:
        """Return the worst that a beat tells; one that is about to end may lose its streams."""
        drains = beat.phase is vocabulary.Phase.DRAINING or self._drains_at is not None
        if drains and self._drains(beat, now):
            return None
        if not order.turns and is_well(beat, order.stretch, self.offers, self._settings):
            # as of nearly all
            return None
        return reported(
            beat,
            self._settings,
            offers=self.offers,
            settled_s=now - self.settled_at,
            twins=order.twins(now),
            stretch=order.stretch,
        )

    def lost(self, event: vocabulary.PluginDeregistered, interval_s: float, now: float) -> None:
        """Take that a registration was lost a moment ago."""
        grace_s = repair_s(self._settings, interval_s)
        self.about(deregistered(event, grace_s), now)

    def offered(self, had: Mapping[str, int], interval_s: float, now: float) -> None:
        """Take that what the node offers has changed, which may not be due to the plugin."""
        is_settled = now - self.settled_at >= self._settings.mismatch_s
        if self.offers is None or not is_settled:
            return
        grace_s = repair_s(self._settings, interval_s)
        found = offered(had, self.offers, grace_s)
        if found is not None:
            self.about(found, now)

    def about(self, found: Problem, now: float) -> bool:
        """Take trouble; return whether it has lasted long enough.

        Other trouble of another patience begins anew; of the same one it is the same, turned.
        """
        known = self.found
        if known is None or (known.grace_s != found.grace_s and known.rule is not found.rule):
            self.since = now
        self.found = found
        due = self.since + found.grace_s
        self.due = due if now < due and not self.held else None
        return self.due is None and not self.held

    def is_common(self, interval_s: float, now: float) -> bool:
        """Tell whether it is about to be believed, and many may have it in common."""
        found = self.found
        if found is None or found.verdict not in _COMMON:
            return False
        return self.since + found.grace_s - now <= self._settings.trouble_s + interval_s

    def may_look(self, now: float) -> bool:
        """Tell whether it is time to ask what the node offers now.

        What a watch told may be old, and the watch not know that.
        """
        return now >= self._look_again_at

    def looks(self, number: int, now: float) -> None:
        """Take that Kubernetes is asked what the node offers now."""
        self._looked, self._look_again_at = number, now + _LOOK_AGAIN_S

    def is_look(self, number: int) -> bool:
        """Tell whether an answer is to that question."""
        return number == self._looked

    def looked(
        self, known: facts.Facts | None, had: Mapping[str, int], *, hears: bool
    ) -> Problem | None:
        """Take what Kubernetes says; return what it bears out of the trouble that made us ask."""
        self._looked = None
        if known is None or known.offers is None:
            return None
        self.offers = known.offers
        if self.found is None or self.found.rule is not Rule.NODE_OFFERS_OTHERS or not hears:
            return None
        found = offered(had, known.offers, self.found.grace_s)
        if found is None:
            self.forget()
        return found

    def hold(self) -> None:
        """Believe it not before `release`."""
        self.held, self.due = True, None

    def release(self) -> None:
        """Believe it again, when it is told of the next time."""
        self.held = False

    def shift(self, seconds: float) -> None:
        """Take that we stood still for so long."""
        if self.due is not None:
            self.since += seconds
            self.due += seconds

    def forget(self) -> None:
        """Take that there is none."""
        self.found, self.due, self.held = None, None, False

    def _drains(self, beat: vocabulary.Heartbeat, now: float) -> bool:
        """Tell whether it is about to end: one that does not come to its end is not."""
        if beat.phase is not vocabulary.Phase.DRAINING:
            self._drains_at = None
            return False
        if self._drains_at is None:
            self._drains_at = now
        return now - self._drains_at < self._settings.maintenance_s
