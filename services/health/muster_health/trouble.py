"""Pure. What a plugin that is alive says is wrong with it."""

import enum
from dataclasses import dataclass
from typing import Final

from muster import vocabulary
from muster_health import evidence

_SHOWN_MAX: Final = 8


class Rule(enum.StrEnum):
    """What decided a verdict; the same word stands in the event, the log and the tests."""

    FIRST_SIGN_OF_LIFE = "first_sign_of_life"
    NOBODY_LISTENS = "silent_and_nobody_listens"
    NO_ANSWER = "silent_and_no_answer"
    NOT_REGISTERED = "reports_not_registered"
    SELF_PROBE_FAILS = "reports_self_probe_failing"
    GOODBYE = "said_goodbye"
    RECOVERED = "recovered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """The verdict that a self-report asks for, if it lasts."""

    verdict: vocabulary.Verdict
    rule: Rule
    resources: tuple[str, ...]
    evidence: tuple[vocabulary.Evidence, ...]


def reported(beat: vocabulary.Heartbeat) -> Trouble | None:
    """Return the worst that a beat tells, or None; a plugin that drains may lose its streams."""
    if beat.phase is vocabulary.Phase.DRAINING:
        return None
    apart = [r for r in beat.resources if r.problem or not r.streams]
    if apart:
        return Trouble(
            verdict=vocabulary.Verdict.DEREGISTERED,
            rule=Rule.NOT_REGISTERED,
            resources=tuple(r.name for r in apart),
            evidence=tuple(
                evidence.seen(
                    "plugin",
                    f"{r.name}: {r.problem or 'the kubelet has no ListAndWatch stream open'}",
                )
                for r in apart[:_SHOWN_MAX]
            ),
        )
    # an age below 0 is a self-probe that has not run yet
    stuck = [r for r in beat.resources if not r.probe_ok and r.probe_age_s >= 0]
    if stuck:
        return Trouble(
            verdict=vocabulary.Verdict.STUCK,
            rule=Rule.SELF_PROBE_FAILS,
            resources=tuple(r.name for r in stuck),
            evidence=tuple(
                evidence.seen(
                    "plugin",
                    f"{r.name}: registered, but its own socket does not answer "
                    f"(self-probe {r.probe_age_s:.1f} s ago)",
                )
                for r in stuck[:_SHOWN_MAX]
            ),
        )
    return None


def deregistered(event: vocabulary.PluginDeregistered) -> Trouble:
    """Return what a report of a lost registration asks for, if it lasts."""
    detail = f": {event.detail}" if event.detail else ""
    return Trouble(
        verdict=vocabulary.Verdict.DEREGISTERED,
        rule=Rule.NOT_REGISTERED,
        resources=(event.resource,),
        evidence=(
            evidence.seen(
                "plugin", f"{event.resource}: the kubelet lost it ({event.reason}{detail})"
            ),
        ),
    )
