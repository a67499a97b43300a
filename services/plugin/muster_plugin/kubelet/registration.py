"""Pure: The life of one resource with the kubelet, as a machine: it is never lost for good.

    state        | signal                              | then
    -------------|-------------------------------------|------------------------------------------
    WAITING      | its time comes; a new kubelet.sock  | Serve(next generation)      -> STARTING
    STARTING     | served                              | Register                    -> REGISTERING
                 | serve failed                        | back-off                    -> WAITING
                 | served elsewhere                    | a little wait               -> WAITING
    REGISTERING  | registered                          |                             -> UNWATCHED
                 | registered, a stream is open        | Listed                      -> WATCHED
                 | register failed                     | back-off, Lost(register_..) -> REFUSED
                 | too often, if there is another way  | End                         -> ENDING
    REFUSED      | its time comes; a new kubelet.sock  | Register                    -> REGISTERING
    UNWATCHED    | stream opened                       | Listed                      -> WATCHED
                 | no stream in time                   | Lost(no_stream), End        -> ENDING
    WATCHED      | a stream closed                     |                             -> DROPPED
    DROPPED      | a new stream opened                 |                             -> WATCHED
                 | none in time                        | Lost(stream_closed), End    -> ENDING
    registered   | another kubelet.sock                | Lost(kubelet_socket_..), End -> ENDING
    any serving  | own socket lost, probe failed       | Lost(own_socket_lost, probe_failed),
                 | twice, server ended by itself       | Lost(server_ended), End     -> ENDING
    ENDING       | ended                               | back-off if losses repeat   -> WAITING

Whatever was lost is repaired in one way: end the old generation wholly, then serve and register a
new one on a fresh socket. Registering over an open stream would take the node to 0 as soon as the
older stream ends (k/k#121994), so at no time are there two generations.

The kubelet opens one stream for a registration and never dials again, so the end of any stream of
ours is a loss. It gets a moment, in which a restarting kubelet shows a new kubelet.sock.
"""

import math
from typing import Final, assert_never

import msgspec

from muster import vocabulary
from muster_plugin.kubelet import registration_events, resource_status

Reason = vocabulary.RegistrationReason

_PROBE_FAILURES_MAX: Final = 2
_DOUBLINGS_MAX: Final = 30


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """How long is waited for what, in seconds."""

    stream_after_register_s: float = 5.0
    stream_after_close_s: float = 1.0
    retry_first_s: float = 0.02
    retry_max_s: float = 5.0
    refused_for_good_s: float = 30.0
    refusals_max: float = math.inf
    """After so many refusals a new generation tries, which may go another way."""
    served_elsewhere_s: float = 0.2
    kubelet_new_s: float = 10.0
    """A kubelet that has come takes so long at most to take its plugins in, and is busy then."""
    stable_s: float = 2.0
    """A resource listed this long has no history: its next loss is repaired without delay."""

    def backoff_s(self, failures: int) -> float:
        """Return how long to wait after so many failures: 20 ms doubling to 5 s; below 0 none."""
        if failures < 0:
            return 0.0
        return min(self.retry_first_s * 2.0 ** min(failures, _DOUBLINGS_MAX), self.retry_max_s)


class Registration:
    """One resource's machine; wants to serve as soon as it is first ticked."""

    def __init__(self, patient: Timeouts | None = None, *, reason: Reason = Reason.START) -> None:
        self.registrations = 0
        """How often the kubelet took us."""
        self.registered_at: float | None = None
        self.kubelet = ""
        """The kubelet.sock of the last registration."""
        self.streams = 0
        """Open streams of the present generation."""
        self._patience = patient or Timeouts()
        self._state = resource_status.State.WAITING
        self._generation = 0
        self._deadline: float | None = -math.inf
        self._first = reason
        self._unlisted: Reason | None = reason
        self._is_told = False
        self._trouble = resource_status.NO_TROUBLE
        self._seen = ""
        self._seen_while_registering = ""
        self._refusals = 0
        self._losses = 0
        self._probe_failures = 0
        self._listed_at = math.inf
        self._is_away = False
        """Nobody was there to refuse us, when last tried."""
        self._came_at = -math.inf

    @property
    def state(self) -> resource_status.State:
        """Where the resource stands."""
        return self._state

    @property
    def generation(self) -> int:
        """The newest generation; 0 before the first."""
        return self._generation

    @property
    def is_listed(self) -> bool:
        """Whether the kubelet lists this resource, as far as we can know."""
        return self._state is resource_status.State.WATCHED

    @property
    def is_kept_out(self) -> bool:
        """Whether something lasting keeps the resource from a kubelet that is there."""
        return not self.is_listed and self._trouble.lasts and not self._is_away

    def problem(self, now: float) -> str:
        """Say in words what keeps the resource from the kubelet; empty when nothing does."""
        if self._state is resource_status.State.WATCHED:
            return ""
        return self._trouble.told(now, then=resource_status.doing(self._state))

    def is_kubelet_away(self, now: float) -> bool:
        """Tell whether all that keeps the resource from the kubelet is that it is away, or new."""
        if self._state is resource_status.State.WATCHED:
            return False
        if self._trouble.lasts:
            return self._is_away
        return now - self._came_at < self._patience.kubelet_new_s

    def has_settled(self, now: float) -> bool:
        """Tell whether the kubelet lists it, and for so long that it is busy with it no more."""
        return self.is_listed and now - self._listed_at >= self._patience.kubelet_new_s

    def next_deadline(self) -> float | None:
        """Return when `tick` is next needed."""
        return self._deadline

    def tick(self, now: float) -> list[registration_events.Action]:
        """Do what is due."""
        if self._deadline is None or now < self._deadline:
            return []
        match self._state:
            case resource_status.State.WAITING:
                return self._serve()
            case resource_status.State.REFUSED:
                return self._register()
            case resource_status.State.UNWATCHED:
                waited = self._patience.stream_after_register_s
                text = f"no stream from the kubelet {waited:g} s after it took the registration"
                return self._lose(Reason.NO_STREAM, text, now)
            case resource_status.State.DROPPED:
                return self._lose(Reason.STREAM_CLOSED, "stream closed by the kubelet", now)
            case (
                resource_status.State.STARTING
                | resource_status.State.REGISTERING
                | resource_status.State.WATCHED
                | resource_status.State.ENDING
            ):
                raise AssertionError(f"{self._state} has no deadline")
            case _:
                assert_never(self._state)

    def receive(
        self, event: registration_events.Signal, now: float
    ) -> list[registration_events.Action]:
        """Take one signal; what concerns an older generation changes nothing."""
        if isinstance(event, registration_events.KubeletSeen):
            return self._kubelet_seen(event.kubelet, now)
        if event.generation != self._generation:
            return []
        if isinstance(event, registration_events.ProbePassed | registration_events.ProbeFailed):
            return self._probed(event, now)
        if isinstance(
            event,
            registration_events.Registered
            | registration_events.RegisterFailed
            | registration_events.StreamOpened
            | registration_events.StreamClosed,
        ):
            return self._from_kubelet(event, now)
        return self._from_server(event, now)

    # What the signals do

    def _from_server(
        self, event: registration_events.FromServer, now: float
    ) -> list[registration_events.Action]:
        match event:
            case registration_events.Served():
                return self._register() if self._state is resource_status.State.STARTING else []
            case registration_events.ServeFailed(text=text):
                if self._state is resource_status.State.STARTING:
                    self._hold("cannot serve", text, now)
                    self._losses += 1
                    self._wait(now + self._patience.backoff_s(self._losses - 1))
            case registration_events.ServedElsewhere(owner=owner):
                if self._state is resource_status.State.STARTING:
                    self._hold("another plugin on this node serves it", owner, now)
                    self._wait(now + self._patience.served_elsewhere_s)
            case registration_events.Ended():
                if self._state is resource_status.State.ENDING:
                    self._wait(now + self._patience.backoff_s(self._losses - 2))
            case registration_events.OwnSocketLost():
                return self._lose(Reason.OWN_SOCKET_LOST, "own socket lost", now)
            case registration_events.ServerEnded():
                return self._lose(Reason.SERVER_ENDED, "own server ended", now)
            case _:
                assert_never(event)
        return []

    def _from_kubelet(
        self, event: registration_events.FromKubelet, now: float
    ) -> list[registration_events.Action]:
        match event:
            case registration_events.Registered(kubelet=kubelet):
                return (
                    self._taken(kubelet, now)
                    if self._state is resource_status.State.REGISTERING
                    else []
                )
            case registration_events.RegisterFailed():
                return (
                    self._refused(event, now)
                    if self._state is resource_status.State.REGISTERING
                    else []
                )
            case registration_events.StreamOpened():
                return self._stream_opened(now)
            case registration_events.StreamClosed():
                self.streams = max(0, self.streams - 1)
                if self._state is resource_status.State.WATCHED:
                    self._state = resource_status.State.DROPPED
                    self._deadline = now + self._patience.stream_after_close_s
                    self._trouble = resource_status.Trouble("stream closed", now)
            case _:
                assert_never(event)
        return []

    def _stream_opened(self, now: float) -> list[registration_events.Action]:
        if self._state in {resource_status.State.WAITING, resource_status.State.ENDING}:
            return []
        self.streams += 1
        if self._state is resource_status.State.REFUSED:
            # the kubelet took us; it was the answer that got lost
            return self._taken(self._seen, now)
        return (
            self._listed(now)
            if self._state in {resource_status.State.UNWATCHED, resource_status.State.DROPPED}
            else []
        )

    def _probed(
        self, event: registration_events.FromProbe, now: float
    ) -> list[registration_events.Action]:
        if isinstance(event, registration_events.ProbePassed):
            self._probe_failures = 0
            return []
        self._probe_failures += 1
        if self._probe_failures < _PROBE_FAILURES_MAX:
            return []
        return self._lose(Reason.PROBE_FAILED, f"self-probe failed: {event.text}", now)

    def _kubelet_seen(self, kubelet: str, now: float) -> list[registration_events.Action]:
        is_new = kubelet not in {"", self._seen}
        self._seen = kubelet
        if not is_new or (self._state in resource_status.REGISTERED and kubelet == self.kubelet):
            return []
        self._losses = self._refusals = 0
        self._came_at = now
        if self._state in resource_status.REGISTERED:
            return self._lose(Reason.KUBELET_SOCKET_REPLACED, "kubelet.sock was replaced", now)
        self._blame(kubelet)
        self._seen_while_registering = kubelet
        if self._state in {resource_status.State.WAITING, resource_status.State.REFUSED}:
            self._deadline = now
        return []

    def _taken(self, kubelet: str, now: float) -> list[registration_events.Action]:
        self._blame(kubelet)
        self.registrations += 1
        self.registered_at, self.kubelet, self._seen = now, kubelet, kubelet
        self._refusals = 0
        self._trouble = resource_status.Trouble("taken by the kubelet", now)
        if self._seen_while_registering not in {"", kubelet}:
            return self._lose(Reason.KUBELET_SOCKET_REPLACED, "kubelet.sock was replaced", now)
        if self.streams:
            return self._listed(now)
        self._state = resource_status.State.UNWATCHED
        self._deadline = now + self._patience.stream_after_register_s
        return []

    def _refused(
        self, event: registration_events.RegisterFailed, now: float
    ) -> list[registration_events.Action]:
        if self.streams:
            return self._taken(self._seen, now)
        wait_s = self._patience.backoff_s(self._refusals)
        self._refusals += 1
        self._state = resource_status.State.REFUSED
        self._deadline = now + (self._patience.refused_for_good_s if event.permanent else wait_s)
        self._hold("kubelet refuses registration", event.text, now, away=event.away)
        lost = self._unlist(Reason.REGISTER_FAILED, event.text)
        if self._refusals < self._patience.refusals_max:
            return lost
        self._losses += 1
        self._state, self._deadline = resource_status.State.ENDING, None
        return [*lost, registration_events.End(self._generation)]

    # The ways between the states

    def _wait(self, until: float) -> None:
        self._state, self._deadline = resource_status.State.WAITING, until

    def _serve(self) -> list[registration_events.Action]:
        self._generation += 1
        self._state, self._deadline = resource_status.State.STARTING, None
        self.streams = self._refusals = self._probe_failures = 0
        return [registration_events.Serve(self._generation)]

    def _register(self) -> list[registration_events.Action]:
        self._state, self._deadline = resource_status.State.REGISTERING, None
        self._seen_while_registering = ""
        return [registration_events.Register(self._generation)]

    def _listed(self, now: float) -> list[registration_events.Action]:
        self._state, self._deadline = resource_status.State.WATCHED, None
        self._listed_at = now
        self._trouble = resource_status.NO_TROUBLE
        self._is_told = False
        reason, self._unlisted = self._unlisted, None
        if reason is None:
            return []
        return [registration_events.Listed(self._generation, reason, self.registrations)]

    def _lose(self, reason: Reason, text: str, now: float) -> list[registration_events.Action]:
        if self._state not in resource_status.SERVING:
            return []
        if self._state is not resource_status.State.DROPPED:
            # a dropped stream is the trouble already, and older
            self._trouble = resource_status.Trouble(text, now)
        self._losses = 1 if now - self._listed_at >= self._patience.stable_s else self._losses + 1
        self._listed_at = math.inf
        self._state, self._deadline = resource_status.State.ENDING, None
        self.streams = 0
        return [*self._unlist(reason, text), registration_events.End(self._generation)]

    def _unlist(self, reason: Reason, text: str) -> list[registration_events.Action]:
        """Report a loss, once until the resource is listed again.

        What the kubelet has never taken is not lost yet.
        """
        if self._unlisted in {None, self._first}:
            self._unlisted = reason
        if self._is_told or not self.registrations:
            return []
        self._is_told = True
        return [registration_events.Lost(reason, text)]

    def _blame(self, kubelet: str) -> None:
        """Find the deeper reason of a loss: the kubelet of the last registration is gone."""
        known = self.kubelet not in {"", kubelet}
        if known and self._unlisted not in {None, self._first}:
            self._unlisted = Reason.KUBELET_SOCKET_REPLACED

    def _hold(self, text: str, detail: str, now: float, *, away: bool = False) -> None:
        """Note a trouble that lasts; it counts from when it began, whatever detail it has now."""
        since = self._trouble.at if self._trouble.text == text else now
        self._trouble = resource_status.Trouble(text, since, detail=detail, lasts=True)
        self._is_away = away
