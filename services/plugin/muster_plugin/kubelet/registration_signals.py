"""Pure: signals, actions and states of a resource's registration, and the status of the resource.

A generation is one server on one socket. The adapter answers these actions in bounded time: Serve
with Served, ServeFailed or ServedElsewhere, Register with Registered or RegisterFailed, Stop with
Stopped. `kubelet` identifies one kubelet.sock; it is empty if there is none.
"""

import enum
import math
from collections.abc import Iterable
from typing import Final, TypeAlias

import msgspec

from muster import vocabulary

_PROBES_MISSED_MAX: Final = 3
DIGITS: Final = 2
"""The decimal places of numbers in heartbeats."""
_NEVER_S: Final = -1.0
PROBE_PERIOD_S: Final = 14.0
"""The time between two self-probes.

It is long, because a probe's connection is half of an idle plugin's work; the socket file is
checked more often. A server that hangs must be detected within 20 s: this period, the probe's
timeout of 2 s, and the 3 s that health waits for a recovery.
"""


class _OfGeneration(msgspec.Struct, frozen=True):
    generation: int


class Served(_OfGeneration, frozen=True):
    """The server of this generation listens."""


class ServeFailed(_OfGeneration, frozen=True):
    """The server of this generation could not start and has been cleaned up."""

    text: str


class ServedElsewhere(_OfGeneration, frozen=True):
    """Another process serves this resource, so this generation has no server."""

    owner: str


class Registered(_OfGeneration, frozen=True):
    """The kubelet behind this kubelet.sock accepted the registration."""

    kubelet: str


class RegisterFailed(_OfGeneration, frozen=True):
    """The kubelet could not be reached, or refused; a `permanent` refusal would be repeated."""

    text: str
    permanent: bool
    unreachable: bool = False


class StreamOpened(_OfGeneration, frozen=True):
    """The kubelet opened a ListAndWatch stream."""


class StreamClosed(_OfGeneration, frozen=True):
    """The kubelet ended a ListAndWatch stream, or its connection broke."""


class KubeletSocketSeen(msgspec.Struct, frozen=True):
    """The identity of the current kubelet.sock; sent at every check, even without a change."""

    kubelet: str


class OwnSocketLost(_OfGeneration, frozen=True):
    """The plugin's socket file is gone or was replaced."""


class Compared(_OfGeneration, frozen=True):
    """The devices that the kubelet lists were compared with the advertised devices.

    `displaced` describes the devices that the kubelet persistently lists instead; it is empty if
    the kubelet lists the plugin's devices. `others` are the sockets of plugins that could have
    registered the resource; empty if the kubelet lists no devices.
    """

    displaced: str
    others: frozenset[str] = frozenset()


class ProbePassed(_OfGeneration, frozen=True):
    """The self-probe reached this server."""


class ProbeFailed(_OfGeneration, frozen=True):
    """The self-probe reached no server, or another server."""

    text: str


class ServerEnded(_OfGeneration, frozen=True):
    """The server ended unexpectedly."""


class Stopped(_OfGeneration, frozen=True):
    """Streams, server and socket of this generation are gone."""


FromServer: TypeAlias = (
    Served | ServeFailed | ServedElsewhere | Stopped | ServerEnded | OwnSocketLost
)
FromKubelet: TypeAlias = Registered | RegisterFailed | StreamOpened | StreamClosed | Compared
FromProbe: TypeAlias = ProbePassed | ProbeFailed
Signal: TypeAlias = FromServer | FromKubelet | FromProbe | KubeletSocketSeen


class Serve(_OfGeneration, frozen=True):
    """The action to start a server on a fresh socket."""


class Register(_OfGeneration, frozen=True):
    """The action to register the socket of this generation with the kubelet."""


class Stop(_OfGeneration, frozen=True):
    """The action to cancel a Register in flight, end streams and server, and remove the socket."""


class Listed(_OfGeneration, frozen=True):
    """The kubelet lists the resource: it accepted the registration and opened a stream."""

    reason: vocabulary.RegistrationReason
    registrations: int


class Lost(msgspec.Struct, frozen=True):
    """The kubelet no longer lists the resource, or will soon stop listing it."""

    reason: vocabulary.RegistrationReason
    detail: str


ListingChange: TypeAlias = Listed | Lost
Action: TypeAlias = Serve | Register | Stop | ListingChange


class State(enum.StrEnum):
    """The state of a registration; the table in `registration` shows the transitions."""

    WAITING = "waiting"
    STARTING = "starting"
    REGISTERING = "registering"
    REFUSED = "refused"
    AWAITING_STREAM = "awaiting_stream"
    LISTED = "listed"
    STREAM_CLOSED = "stream_closed"
    DISPLACED = "displaced"
    STOPPING = "stopping"


REGISTERED: Final = frozenset(
    {State.AWAITING_STREAM, State.LISTED, State.STREAM_CLOSED, State.DISPLACED}
)
WITH_SERVER: Final = REGISTERED | {State.REGISTERING, State.REFUSED}


NEXT_STEP: Final = {
    State.WAITING: "serving again",
    State.STARTING: "serving again",
    State.REGISTERING: "registering",
    State.REFUSED: "registering",
    State.STREAM_CLOSED: "registering",
    State.DISPLACED: "registering again after a pause, or as soon as no other plugin serves it",
    State.AWAITING_STREAM: "waiting for the kubelet's stream",
    State.STOPPING: "stopping the old server",
}
"""The plugin's next step, in each state except LISTED, to get the resource listed."""


class Problem(msgspec.Struct, frozen=True):
    """A problem and when it happened, or, if it `persists`, when it began."""

    text: str
    at: float
    detail: str = ""
    persists: bool = False

    def describe(self, now: float, *, then: str) -> str:
        """Return the problem as text, with the plugin's next step."""
        seconds = max(0.0, now - self.at)
        if not self.text:
            return f"not registered yet, {then}"
        if self.persists:
            return f"{self.text} ({self.detail}), for {seconds:.1f} s; {then}"
        return f"{self.text} {seconds:.1f} s ago, {then}"


NO_PROBLEM: Final = Problem("", -math.inf)


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one self-probe, which dials the plugin's own socket by its path."""

    ok: bool
    seconds: float
    at: float


def age_s(at: float | None, now: float) -> float:
    """Return the seconds since `at`, as heartbeats report them; -1 if `at` is None."""
    return _NEVER_S if at is None else round(max(0.0, now - at), DIGITS)


def readiness(resources: Iterable[vocabulary.ResourceBeat], *, probe_s: float) -> str | None:
    """Return why the plugin is not ready, or None; self-probes are due every `probe_s` seconds."""
    problems = []
    for status in resources:
        if status.problem:
            problems.append(f"{status.name}: {status.problem}")
        elif not status.probe_ok:
            outcome = "has not run yet" if status.probe_age_s == _NEVER_S else "failed"
            problems.append(f"{status.name}: the self-probe {outcome}")
        elif status.probe_age_s > _PROBES_MISSED_MAX * probe_s:
            problems.append(
                f"{status.name}: the last self-probe was {status.probe_age_s:.1f} s ago"
            )
    return "; ".join(problems) or None
