"""Pure: status of one resource: state of its registration, what is wrong with it, is it ready."""

import enum
import math
from collections.abc import Iterable, Mapping
from typing import Final, assert_never

import msgspec

from muster import vocabulary

_PROBES_MISSED_MAX: Final = 3


class State(enum.StrEnum):
    """State of a registration; the table in `registration` has the transitions."""

    WAITING = "waiting"
    STARTING = "starting"
    REGISTERING = "registering"
    REFUSED = "refused"
    AWAITING_STREAM = "awaiting_stream"
    LISTED = "listed"
    STREAM_CLOSED = "stream_closed"
    STOPPING = "stopping"


WITH_SERVER: Final = frozenset(
    {State.REGISTERING, State.REFUSED, State.AWAITING_STREAM, State.LISTED, State.STREAM_CLOSED}
)
REGISTERED: Final = frozenset({State.AWAITING_STREAM, State.LISTED, State.STREAM_CLOSED})


def next_step(state: State) -> str:
    """Return what the plugin does next to get the resource listed; empty if it is listed."""
    match state:
        case State.WAITING | State.STARTING:
            return "serving again"
        case State.REGISTERING | State.REFUSED | State.STREAM_CLOSED:
            return "registering"
        case State.AWAITING_STREAM:
            return "waiting for the kubelet's stream"
        case State.STOPPING:
            return "stopping the old server"
        case State.LISTED:
            return ""
        case _:
            assert_never(state)


class Problem(msgspec.Struct, frozen=True):
    """What happened and when; or, if it `persists`, what has been wrong since then."""

    text: str
    at: float
    detail: str = ""
    persists: bool = False

    def describe(self, now: float, *, then: str) -> str:
        """Return the problem in words, and the plugin's next step."""
        seconds = max(0.0, now - self.at)
        if not self.text:
            return f"not registered yet, {then}"
        if self.persists:
            return f"{self.text} ({self.detail}), for {seconds:.1f} s; {then}"
        return f"{self.text} {seconds:.1f} s ago, {then}"


NO_PROBLEM: Final = Problem("", -math.inf)


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one self-probe, which dials the plugin's own socket by its path."""

    ok: bool
    seconds: float
    at: float


class ResourceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of one resource; times are monotonic seconds, None is never."""

    name: str
    registered_at: float | None
    streams: int
    sent_at: float | None
    registrations: int
    probe: ProbeResult | None
    devices: int
    healthy: int
    allocated: int
    problem: str
    shortage: str = ""
    mismatch: str = ""
    conditions: Mapping[vocabulary.Condition, int] = {}
    waits_for_kubelet: bool = False


def readiness(resources: Iterable[ResourceStatus], *, now: float, probe_s: float) -> str | None:
    """Return what keeps the plugin from being ready, or None; it probes itself every `probe_s`."""
    problems = []
    for state in resources:
        if state.problem:
            problems.append(f"{state.name}: {state.problem}")
        elif state.probe is None or not state.probe.ok:
            outcome = "failed" if state.probe else "has not run yet"
            problems.append(f"{state.name}: the self-probe {outcome}")
        elif now - state.probe.at > _PROBES_MISSED_MAX * probe_s:
            problems.append(
                f"{state.name}: the last self-probe was {now - state.probe.at:.1f} s ago"
            )
    return "; ".join(problems) or None
