"""Pure: decides which verdict follows from a heartbeat's report: STUCK, DEREGISTERED, MISMATCH, ….

| verdict      | sign                                                        | for how long     |
|--------------|-------------------------------------------------------------|------------------|
| STUCK        | its own socket does not answer its self-probe               | its repair time  |
| STUCK        | its last self-probe is over a minute old (3)                | its repair time  |
| DEREGISTERED | a problem with the kubelet, or no open stream               | its repair time  |
| DEREGISTERED | likewise, while the kubelet is down or has just started (5) | 30 s (4)         |
| MISMATCH     | it reports that the kubelet lists other devices             | its repair time  |
| MISMATCH     | the node offers more or fewer devices than are Healthy      | `mismatch_s` (1) |
| SPLIT_BRAIN  | two instances send heartbeats alternately                   | `degraded_s` (2) |
| DEGRADED     | a health checker, its event loop or its heartbeats are late | `degraded_s`     |

A plugin's repair time is `trouble_beats` intervals, at most `trouble_s` (`repair_s`).

(1) The kubelet reports changed devices and new registrations only every 10 s. If the plugin's last
change is longer ago, the node itself has changed, and the repair time applies.
(2) A DaemonSet with `maxSurge` starts the new pod before it ends the old one.
(3) Or over 3 intervals, if these are longer; or it has been registered for that long without any
self-probe.
(4) The kubelet is being upgraded or is starting. No plugin can repair that, and all register by
themselves once the kubelet is back. From then on they have their repair time.
(5) Kubernetes is queried: a kubelet with a stale lease is down, and the plugin is not at fault.

STUCK comes first, because a plugin that does not answer cannot be registered either. A plugin that
has only just started has `starting_s` to register.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from muster import vocabulary
from muster.vocabulary import Verdict
from muster_health.alerting import evidence
from muster_health.model import config, signals
from muster_health.model.steps import Rule

_SHOWN_MAX: Final = 8
_AWAY_S: Final = 30.0
PROBE_MAX_AGE_S: Final = 60.0
_PROBE_OLD_INTERVALS: Final = 3.0
_NO_STREAM: Final = {
    True: "the kubelet has no ListAndWatch stream open",
    False: "the kubelet has not registered it",
}
"""Descriptions of a lost registration, for extended resources (True) and drivers (False)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A reported problem, and the verdict that follows if it lasts longer than `grace_s`."""

    verdict: Verdict
    rule: Rule
    resources: tuple[str, ...]
    evidence: tuple[vocabulary.Evidence, ...]
    grace_s: float


def repair_s(settings: config.Detection, interval_s: float) -> float:
    """Return for how long a plugin may try to repair a problem itself."""
    return min(settings.trouble_beats * interval_s, settings.trouble_s)


def worst(
    heartbeat: vocabulary.Heartbeat,
    settings: config.Detection,
    *,
    offers: Mapping[str, signals.Offer] | None = None,
    unchanged_s: float = 0.0,
    two_instances: str = "",
    stretch: float = 1.0,
) -> Problem | None:
    """Return the worst problem in a heartbeat, or None.

    `offers` is what the node offers, `unchanged_s` how long the plugin's devices have not changed,
    `two_instances` the evidence that two instances alternate (empty if they do not), `stretch` the
    mean time between heartbeats divided by the declared interval.
    """
    grace_s = repair_s(settings, heartbeat.interval_s)
    starts = heartbeat.phase is vocabulary.Phase.STARTING
    return (
        _stuck(heartbeat, grace_s)
        or _deregistered(heartbeat, settings.starting_s if starts else grace_s)
        or _mismatched(heartbeat, offers, grace_s, settings.mismatch_s, unchanged_s)
        or _split(heartbeat, two_instances, settings.degraded_s)
        or _slow(heartbeat, stretch, settings)
    )


def probe_max_age_s(heartbeat: vocabulary.Heartbeat) -> float:
    """Return the maximum age of a self-probe; healthy plugins probe every few seconds."""
    return max(PROBE_MAX_AGE_S, _PROBE_OLD_INTERVALS * heartbeat.interval_s)


def deregistered(event: vocabulary.PluginDeregistered, grace_s: float) -> Problem:
    """Return the problem for a lost registration."""
    detail = f": {event.detail}" if event.detail else ""
    text = f"{event.resource}: no longer registered with the kubelet ({event.reason}{detail})"
    return Problem(
        verdict=Verdict.DEREGISTERED,
        rule=Rule.NOT_REGISTERED,
        resources=(event.resource,),
        evidence=(evidence.of("plugin", text),),
        grace_s=grace_s,
    )


def with_lease(problem: Problem, answer: signals.Facts | None, lease_stale_s: float) -> Problem:
    """Return the problem that the kubelet is unreachable, with the evidence of its lease.

    A stale lease shows that the kubelet is down. The problem is unchanged if the lease's age is
    unknown.
    """
    if answer is None or answer.lease_age_s is None:
        return problem
    is_dead = answer.lease_age_s > lease_stale_s
    return replace(
        problem,
        rule=Rule.KUBELET_DEAD if is_dead else problem.rule,
        evidence=(*evidence.kubelet(answer.lease_age_s, is_ready=answer.ready), *problem.evidence),
    )


def offered(
    had: Mapping[str, int], offers: Mapping[str, signals.Offer], grace_s: float
) -> Problem | None:
    """Return the problem if a node offers more or fewer devices than the plugin has, or None."""
    mismatches = list(_offered_otherwise(had, offers))
    return _of(Verdict.MISMATCH, Rule.NODE_OFFERS_OTHERS, mismatches, grace_s)


def _deregistered(heartbeat: vocabulary.Heartbeat, grace_s: float) -> Problem | None:
    reported = [
        (r.name, r.problem or _NO_STREAM[r.extended])
        for r in heartbeat.resources
        if r.problem or not r.streams
    ]
    away = {r.name for r in heartbeat.resources if r.kubelet_away}
    lost = [(name, text) for name, text in reported if name not in away]
    if reported and not lost:
        return _of(Verdict.DEREGISTERED, Rule.KUBELET_AWAY, reported, _AWAY_S)
    return _of(Verdict.DEREGISTERED, Rule.NOT_REGISTERED, lost, grace_s)


def _stuck(heartbeat: vocabulary.Heartbeat, grace_s: float) -> Problem | None:
    no_answer = "{}its {} (self-probe {:.1f} s ago){}"
    # a negative age means that no self-probe has run yet
    stuck = [
        (
            r.name,
            no_answer.format(
                "" if r.problem else "registered, but ",
                "socket does not answer" if r.extended else "self-test fails",
                r.probe_age_s,
                f"; {r.problem}" if r.problem else "",
            ),
        )
        for r in heartbeat.resources
        if not r.probe_ok and r.probe_age_s >= 0
    ]
    if stuck:
        return _of(Verdict.STUCK, Rule.SELF_PROBE_FAILS, stuck, grace_s)
    old_s = probe_max_age_s(heartbeat)
    never = "registered {:.0f} s ago, but its socket was never probed"
    stale = "its socket has not been probed for {:.0f} s"
    stuck = [
        (r.name, never.format(r.registered_age_s))
        if r.probe_age_s < 0
        else (r.name, stale.format(r.probe_age_s))
        for r in heartbeat.resources
        if not r.problem
        and (r.probe_age_s > old_s or (r.probe_age_s < 0 and r.registered_age_s > old_s))
    ]
    return _of(Verdict.STUCK, Rule.SELF_PROBE_STALE, stuck, grace_s)


def _mismatched(
    heartbeat: vocabulary.Heartbeat,
    offers: Mapping[str, signals.Offer] | None,
    grace_s: float,
    mismatch_s: float,
    unchanged_s: float,
) -> Problem | None:
    listed = [(r.name, r.mismatch) for r in heartbeat.resources if r.mismatch]
    if listed or offers is None:
        return _of(Verdict.MISMATCH, Rule.KUBELET_LISTS_OTHERS, listed, grace_s)
    had = {r.name: r.healthy for r in heartbeat.resources if r.extended}
    mismatches = list(_offered_otherwise(had, offers))
    names = {name for name, _ in mismatches}
    ages_s = (r.registered_age_s for r in heartbeat.resources if r.name in names)
    is_settled = min((unchanged_s, *ages_s)) >= mismatch_s
    wait_s = grace_s if is_settled else mismatch_s
    return _of(Verdict.MISMATCH, Rule.NODE_OFFERS_OTHERS, mismatches, wait_s)


def _split(heartbeat: vocabulary.Heartbeat, two_instances: str, grace_s: float) -> Problem | None:
    if not two_instances:
        return None
    seen = (evidence.of("heartbeat", two_instances),)
    return _whole(heartbeat, Verdict.SPLIT_BRAIN, Rule.TWO_INSTANCES, seen, grace_s)


def _offered_otherwise(
    had: Mapping[str, int], offers: Mapping[str, signals.Offer]
) -> Iterable[tuple[str, str]]:
    for name, healthy in had.items():
        offer = offers.get(name, signals.Offer(capacity=0, allocatable=0))
        if offer.allocatable != healthy:
            node = f"the node's allocatable is {offer.allocatable} of {offer.capacity}"
            yield name, f"the plugin reports {healthy} Healthy, {node}"


def _slow(
    heartbeat: vocabulary.Heartbeat, stretch: float, settings: config.Detection
) -> Problem | None:
    seen = [
        evidence.of("plugin", f"health checker {name} last succeeded {age_s:.0f} s ago")
        for name, age_s in heartbeat.checkers.items()
        if age_s > settings.checker_age_s
    ]
    # a negative age means that the checker has not succeeded yet
    seen += [
        evidence.of("plugin", f"health checker {name} has never succeeded")
        for name, age_s in heartbeat.checkers.items()
        if age_s < 0 and heartbeat.uptime_s > settings.checker_age_s
    ]
    rule = Rule.CHECKER_SILENT
    if not seen and heartbeat.loop_lag_ms > settings.lag_ms:
        rule = Rule.LOOP_LATE
        seen = [evidence.of("plugin", f"its event loop was {heartbeat.loop_lag_ms:.0f} ms late")]
    if not seen and stretch > settings.stretch_max:
        rule = Rule.BEATS_STRETCHED
        slow = f"it sends a heartbeat every {stretch * heartbeat.interval_s:.1f} s"
        seen = [evidence.of("heartbeat", f"{slow} instead of every {heartbeat.interval_s:g} s")]
    if not seen:
        return None
    shown = tuple(seen[:_SHOWN_MAX])
    return _whole(heartbeat, Verdict.DEGRADED, rule, shown, settings.degraded_s)


def _of(
    verdict: Verdict,
    rule: Rule,
    named: list[tuple[str, str]],
    grace_s: float,
) -> Problem | None:
    if not named:
        return None
    return Problem(
        verdict=verdict,
        rule=rule,
        resources=tuple(name for name, _ in named),
        evidence=tuple(
            evidence.of("plugin", f"{name}: {text}") for name, text in named[:_SHOWN_MAX]
        ),
        grace_s=grace_s,
    )


def _whole(
    heartbeat: vocabulary.Heartbeat,
    verdict: Verdict,
    rule: Rule,
    seen: tuple[vocabulary.Evidence, ...],
    grace_s: float,
) -> Problem:
    names = tuple(resource.name for resource in heartbeat.resources)
    return Problem(verdict=verdict, rule=rule, resources=names, evidence=seen, grace_s=grace_s)
