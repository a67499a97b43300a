"""Pure: Where one resource stands between us and the kubelet."""

import enum
import math
from collections.abc import Iterable, Mapping
from typing import Final, assert_never

import msgspec

from muster import vocabulary

_PROBES_MISSED_MAX: Final = 3


class State(enum.StrEnum):
    """Where the resource stands; the table of `registration` tells the ways between."""

    WAITING = "waiting"
    STARTING = "starting"
    REGISTERING = "registering"
    REFUSED = "refused"
    UNWATCHED = "unwatched"
    WATCHED = "watched"
    DROPPED = "dropped"
    ENDING = "ending"


SERVING: Final = frozenset(
    {State.REGISTERING, State.REFUSED, State.UNWATCHED, State.WATCHED, State.DROPPED}
)
REGISTERED: Final = frozenset({State.UNWATCHED, State.WATCHED, State.DROPPED})


def doing(state: State) -> str:
    """Say what is being done to have the resource listed; nothing where it is."""
    match state:
        case State.WAITING | State.STARTING:
            return "serving again"
        case State.REGISTERING | State.REFUSED | State.DROPPED:
            return "registering"
        case State.UNWATCHED:
            return "waiting for the kubelet's stream"
        case State.ENDING:
            return "ending the old server"
        case State.WATCHED:
            return ""
        case _:
            assert_never(state)


class Trouble(msgspec.Struct, frozen=True):
    """What happened and when; or, if it `lasts`, what is wrong since then."""

    text: str
    at: float
    detail: str = ""
    lasts: bool = False

    def told(self, now: float, *, then: str) -> str:
        """Say it in words, and what is done about it."""
        seconds = max(0.0, now - self.at)
        if not self.text:
            return f"not registered yet, {then}"
        if self.lasts:
            return f"{self.text} ({self.detail}), for {seconds:.1f} s; {then}"
        return f"{self.text} {seconds:.1f} s ago, {then}"


NO_TROUBLE: Final = Trouble("", -math.inf)


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """What came of dialling our own socket by its path."""

    ok: bool
    seconds: float
    at: float


class ResourceState(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about one resource; times are monotonic seconds, None is never."""

    name: str
    registered_at: float | None
    streams: int
    sent_at: float | None
    registrations: int
    probe: Probe | None
    devices: int
    healthy: int
    allocated: int
    problem: str
    short: str = ""
    apart: str = ""
    conditions: Mapping[vocabulary.Condition, int] = {}
    away: bool = False


def readiness(resources: Iterable[ResourceState], *, now: float, probe_s: float) -> str | None:
    """Say what keeps the plugin from doing its whole job, or None; it probes every `probe_s`."""
    problems = []
    for state in resources:
        if state.problem:
            problems.append(f"{state.name}: {state.problem}")
        elif state.probe is None or not state.probe.ok:
            told = "failed" if state.probe else "has not run yet"
            problems.append(f"{state.name}: the self-probe {told}")
        elif now - state.probe.at > _PROBES_MISSED_MAX * probe_s:
            problems.append(
                f"{state.name}: the last self-probe was {now - state.probe.at:.1f} s ago"
            )
    return "; ".join(problems) or None
