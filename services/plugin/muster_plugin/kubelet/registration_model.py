"""Pure: signals, actions and states of a resource's registration, and the status of the resource.

A generation is one server on one socket. The adapter answers every action in bounded time: Serve
with Served, ServeFailed or ServedElsewhere, Register with Registered or RegisterFailed, Stop with
Stopped. `kubelet` identifies one kubelet.sock; it is empty if there is none.
"""

import enum
import math
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias, assert_never

import msgspec

from muster import vocabulary

_PROBES_MISSED_MAX: Final = 3


class Served(msgspec.Struct, frozen=True):
    """The server of this generation listens."""

    generation: int


class ServeFailed(msgspec.Struct, frozen=True):
    """The server of this generation could not start, and has been cleaned up."""

    generation: int
    text: str


class ServedElsewhere(msgspec.Struct, frozen=True):
    """Another process serves this resource, so this generation has no server."""

    generation: int
    owner: str


class Registered(msgspec.Struct, frozen=True):
    """The kubelet behind this kubelet.sock accepted the registration."""

    generation: int
    kubelet: str


class RegisterFailed(msgspec.Struct, frozen=True):
    """The kubelet refused (`permanent`: it would refuse again), or was `unreachable`."""

    generation: int
    text: str
    permanent: bool
    unreachable: bool = False


class StreamOpened(msgspec.Struct, frozen=True):
    """The kubelet opened a ListAndWatch."""

    generation: int


class StreamClosed(msgspec.Struct, frozen=True):
    """A ListAndWatch ended that the plugin did not end."""

    generation: int


class KubeletSocketSeen(msgspec.Struct, frozen=True):
    """The kubelet.sock that exists now; sent at every check, even without a change."""

    kubelet: str


class OwnSocketLost(msgspec.Struct, frozen=True):
    """The plugin's socket file is gone or was replaced."""

    generation: int


class ProbePassed(msgspec.Struct, frozen=True):
    """The self-probe reached this server."""

    generation: int


class ProbeFailed(msgspec.Struct, frozen=True):
    """The self-probe reached no server, or another one."""

    generation: int
    text: str


class ServerEnded(msgspec.Struct, frozen=True):
    """The server ended unexpectedly."""

    generation: int


class Stopped(msgspec.Struct, frozen=True):
    """Streams, server and socket of this generation are gone."""

    generation: int


FromServer: TypeAlias = (
    Served | ServeFailed | ServedElsewhere | Stopped | ServerEnded | OwnSocketLost
)
FromKubelet: TypeAlias = Registered | RegisterFailed | StreamOpened | StreamClosed
FromProbe: TypeAlias = ProbePassed | ProbeFailed
Signal: TypeAlias = FromServer | FromKubelet | FromProbe | KubeletSocketSeen


class Serve(msgspec.Struct, frozen=True):
    """Start a server on a fresh socket."""

    generation: int


class Register(msgspec.Struct, frozen=True):
    """Register that socket with the kubelet."""

    generation: int


class Stop(msgspec.Struct, frozen=True):
    """Cancel a Register in flight, end the streams and the server, remove the socket."""

    generation: int


class Listed(msgspec.Struct, frozen=True):
    """The kubelet lists the resource: it accepted the registration and opened its stream."""

    generation: int
    reason: vocabulary.RegistrationReason
    registrations: int


class Lost(msgspec.Struct, frozen=True):
    """The kubelet does not list the resource any more, or soon will not."""

    reason: vocabulary.RegistrationReason
    detail: str


ListingChange: TypeAlias = Listed | Lost
Action: TypeAlias = Serve | Register | Stop | ListingChange


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
    """A problem and when it happened, or since when it `persists`."""

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
    """Return why the plugin is not ready, or None; it probes itself every `probe_s`."""
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
