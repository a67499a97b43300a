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

from muster import vocabulary
from muster_plugin.kubelet import patience, signals, states

Reason = vocabulary.RegistrationReason

_PROBE_FAILURES_MAX: Final = 2


class Registration:
    """One resource's machine; wants to serve as soon as it is first ticked."""

    def __init__(
        self, patient: patience.Patience | None = None, *, reason: Reason = Reason.START
    ) -> None:
        self.registrations = 0
        """How often the kubelet took us."""
        self.registered_at: float | None = None
        self.kubelet = ""
        """The kubelet.sock of the last registration."""
        self.streams = 0
        """Open streams of the present generation."""
        self._patience = patient or patience.Patience()
        self._state = states.State.WAITING
        self._generation = 0
        self._deadline: float | None = -math.inf
        self._first = reason
        self._unlisted: Reason | None = reason
        self._is_told = False
        self._trouble = patience.NO_TROUBLE
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
    def state(self) -> states.State:
        """Where the resource stands."""
        return self._state

    @property
    def generation(self) -> int:
        """The newest generation; 0 before the first."""
        return self._generation

    @property
    def is_listed(self) -> bool:
        """Whether the kubelet lists this resource, as far as we can know."""
        return self._state is states.State.WATCHED

    @property
    def is_kept_out(self) -> bool:
        """Whether something lasting keeps the resource from a kubelet that is there."""
        return not self.is_listed and self._trouble.lasts and not self._is_away

    def problem(self, now: float) -> str:
        """Say in words what keeps the resource from the kubelet; empty when nothing does."""
        if self._state is states.State.WATCHED:
            return ""
        return self._trouble.told(now, then=states.doing(self._state))

    def is_kubelet_away(self, now: float) -> bool:
        """Tell whether all that keeps the resource from the kubelet is that it is away, or new."""
        if self._state is states.State.WATCHED:
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

    def tick(self, now: float) -> list[signals.Action]:
        """Do what is due."""
        if self._deadline is None or now < self._deadline:
            return []
        match self._state:
            case states.State.WAITING:
                return self._serve()
            case states.State.REFUSED:
                return self._register()
            case states.State.UNWATCHED:
                waited = self._patience.stream_after_register_s
                text = f"no stream from the kubelet {waited:g} s after it took the registration"
                return self._lose(Reason.NO_STREAM, text, now)
            case states.State.DROPPED:
                return self._lose(Reason.STREAM_CLOSED, "stream closed by the kubelet", now)
            case (
                states.State.STARTING
                | states.State.REGISTERING
                | states.State.WATCHED
                | states.State.ENDING
            ):
                raise AssertionError(f"{self._state} has no deadline")
            case _:
                assert_never(self._state)

    def receive(self, event: signals.Signal, now: float) -> list[signals.Action]:
        """Take one signal; what concerns an older generation changes nothing."""
        if isinstance(event, signals.KubeletSeen):
            return self._kubelet_seen(event.kubelet, now)
        if event.generation != self._generation:
            return []
        if isinstance(event, signals.ProbePassed | signals.ProbeFailed):
            return self._probed(event, now)
        if isinstance(
            event,
            signals.Registered
            | signals.RegisterFailed
            | signals.StreamOpened
            | signals.StreamClosed,
        ):
            return self._from_kubelet(event, now)
        return self._from_server(event, now)

    # What the signals do

    def _from_server(self, event: signals.FromServer, now: float) -> list[signals.Action]:
        match event:
            case signals.Served():
                return self._register() if self._state is states.State.STARTING else []
            case signals.ServeFailed(text=text):
                if self._state is states.State.STARTING:
                    self._hold("cannot serve", text, now)
                    self._losses += 1
                    self._wait(now + self._patience.backoff_s(self._losses - 1))
            case signals.ServedElsewhere(owner=owner):
                if self._state is states.State.STARTING:
                    self._hold("another plugin on this node serves it", owner, now)
                    self._wait(now + self._patience.served_elsewhere_s)
            case signals.Ended():
                if self._state is states.State.ENDING:
                    self._wait(now + self._patience.backoff_s(self._losses - 2))
            case signals.OwnSocketLost():
                return self._lose(Reason.OWN_SOCKET_LOST, "own socket lost", now)
            case signals.ServerEnded():
                return self._lose(Reason.SERVER_ENDED, "own server ended", now)
            case _:
                assert_never(event)
        return []

    def _from_kubelet(self, event: signals.FromKubelet, now: float) -> list[signals.Action]:
        match event:
            case signals.Registered(kubelet=kubelet):
                return self._taken(kubelet, now) if self._state is states.State.REGISTERING else []
            case signals.RegisterFailed():
                return self._refused(event, now) if self._state is states.State.REGISTERING else []
            case signals.StreamOpened():
                return self._stream_opened(now)
            case signals.StreamClosed():
                self.streams = max(0, self.streams - 1)
                if self._state is states.State.WATCHED:
                    self._state = states.State.DROPPED
                    self._deadline = now + self._patience.stream_after_close_s
                    self._trouble = patience.Trouble("stream closed", now)
            case _:
                assert_never(event)
        return []

    def _stream_opened(self, now: float) -> list[signals.Action]:
        if self._state in {states.State.WAITING, states.State.ENDING}:
            return []
        self.streams += 1
        if self._state is states.State.REFUSED:
            # the kubelet took us; it was the answer that got lost
            return self._taken(self._seen, now)
        return (
            self._listed(now)
            if self._state in {states.State.UNWATCHED, states.State.DROPPED}
            else []
        )

    def _probed(self, event: signals.FromProbe, now: float) -> list[signals.Action]:
        if isinstance(event, signals.ProbePassed):
            self._probe_failures = 0
            return []
        self._probe_failures += 1
        if self._probe_failures < _PROBE_FAILURES_MAX:
            return []
        return self._lose(Reason.PROBE_FAILED, f"self-probe failed: {event.text}", now)

    def _kubelet_seen(self, kubelet: str, now: float) -> list[signals.Action]:
        is_new = kubelet not in {"", self._seen}
        self._seen = kubelet
        if not is_new or (self._state in states.REGISTERED and kubelet == self.kubelet):
            return []
        self._losses = self._refusals = 0
        self._came_at = now
        if self._state in states.REGISTERED:
            return self._lose(Reason.KUBELET_SOCKET_REPLACED, "kubelet.sock was replaced", now)
        self._blame(kubelet)
        self._seen_while_registering = kubelet
        if self._state in {states.State.WAITING, states.State.REFUSED}:
            self._deadline = now
        return []

    def _taken(self, kubelet: str, now: float) -> list[signals.Action]:
        self._blame(kubelet)
        self.registrations += 1
        self.registered_at, self.kubelet, self._seen = now, kubelet, kubelet
        self._refusals = 0
        self._trouble = patience.Trouble("taken by the kubelet", now)
        if self._seen_while_registering not in {"", kubelet}:
            return self._lose(Reason.KUBELET_SOCKET_REPLACED, "kubelet.sock was replaced", now)
        if self.streams:
            return self._listed(now)
        self._state = states.State.UNWATCHED
        self._deadline = now + self._patience.stream_after_register_s
        return []

    def _refused(self, event: signals.RegisterFailed, now: float) -> list[signals.Action]:
        if self.streams:
            return self._taken(self._seen, now)
        wait_s = self._patience.backoff_s(self._refusals)
        self._refusals += 1
        self._state = states.State.REFUSED
        self._deadline = now + (self._patience.refused_for_good_s if event.permanent else wait_s)
        self._hold("kubelet refuses registration", event.text, now, away=event.away)
        lost = self._unlist(Reason.REGISTER_FAILED, event.text)
        if self._refusals < self._patience.refusals_max:
            return lost
        self._losses += 1
        self._state, self._deadline = states.State.ENDING, None
        return [*lost, signals.End(self._generation)]

    # The ways between the states

    def _wait(self, until: float) -> None:
        self._state, self._deadline = states.State.WAITING, until

    def _serve(self) -> list[signals.Action]:
        self._generation += 1
        self._state, self._deadline = states.State.STARTING, None
        self.streams = self._refusals = self._probe_failures = 0
        return [signals.Serve(self._generation)]

    def _register(self) -> list[signals.Action]:
        self._state, self._deadline = states.State.REGISTERING, None
        self._seen_while_registering = ""
        return [signals.Register(self._generation)]

    def _listed(self, now: float) -> list[signals.Action]:
        self._state, self._deadline = states.State.WATCHED, None
        self._listed_at = now
        self._trouble = patience.NO_TROUBLE
        self._is_told = False
        reason, self._unlisted = self._unlisted, None
        if reason is None:
            return []
        return [signals.Listed(self._generation, reason, self.registrations)]

    def _lose(self, reason: Reason, text: str, now: float) -> list[signals.Action]:
        if self._state not in states.SERVING:
            return []
        if self._state is not states.State.DROPPED:
            # a dropped stream is the trouble already, and older
            self._trouble = patience.Trouble(text, now)
        self._losses = 1 if now - self._listed_at >= self._patience.stable_s else self._losses + 1
        self._listed_at = math.inf
        self._state, self._deadline = states.State.ENDING, None
        self.streams = 0
        return [*self._unlist(reason, text), signals.End(self._generation)]

    def _unlist(self, reason: Reason, text: str) -> list[signals.Action]:
        """Report a loss, once until the resource is listed again.

        What the kubelet has never taken is not lost yet.
        """
        if self._unlisted in {None, self._first}:
            self._unlisted = reason
        if self._is_told or not self.registrations:
            return []
        self._is_told = True
        return [signals.Lost(reason, text)]

    def _blame(self, kubelet: str) -> None:
        """Find the deeper reason of a loss: the kubelet of the last registration is gone."""
        known = self.kubelet not in {"", kubelet}
        if known and self._unlisted not in {None, self._first}:
            self._unlisted = Reason.KUBELET_SOCKET_REPLACED

    def _hold(self, text: str, detail: str, now: float, *, away: bool = False) -> None:
        """Note a trouble that lasts; it counts from when it began, whatever detail it has now."""
        since = self._trouble.at if self._trouble.text == text else now
        self._trouble = patience.Trouble(text, since, detail=detail, lasts=True)
        self._is_away = away
