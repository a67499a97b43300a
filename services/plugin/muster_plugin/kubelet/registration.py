"""Pure: registers one resource with the kubelet, and again after every restart of the kubelet.

    state           | signal                     | action                          | next state
    ----------------|----------------------------|---------------------------------|----------------
    WAITING         | deadline; new kubelet.sock | Serve(next generation)          | STARTING
    STARTING        | served                     | Register                        | REGISTERING
                    | serve failed               | (back-off)                      | WAITING
                    | served elsewhere           | (short wait)                    | WAITING
    REGISTERING     | registered                 |                                 | AWAITING_STREAM
                    | registered, stream open    | Listed                          | LISTED
                    | register failed            | Lost(register_failed), back-off | REFUSED
                    | refused too often          | Lost(register_failed), Stop     | STOPPING
    REFUSED         | deadline; new kubelet.sock | Register                        | REGISTERING
                    | stream opened              | Listed                          | LISTED
    AWAITING_STREAM | stream opened              | Listed                          | LISTED
                    | deadline                   | Lost(no_stream), Stop           | STOPPING
    LISTED          | stream closed              |                                 | STREAM_CLOSED
    STREAM_CLOSED   | stream opened              |                                 | LISTED
                    | deadline                   | Lost(stream_closed), Stop       | STOPPING
    LISTED          | another's devices listed   | Lost(displaced)                 | DISPLACED
    DISPLACED       | deadline (see below)       | Stop                            | STOPPING
                    | another plugin has gone    | Stop                            | STOPPING
                    | our devices are listed     | Listed                          | LISTED
                    | stream closed              |                                 | STREAM_CLOSED
    registered      | another kubelet.sock       | Lost(kubelet_socket_..), Stop   | STOPPING
    with a server   | own socket lost            | Lost(own_socket_lost), Stop     | STOPPING
                    | two probes failed          | Lost(probe_failed), Stop        | STOPPING
                    | server ended unexpectedly  | Lost(server_ended), Stop        | STOPPING
    STOPPING        | stopped                    | (back-off if losses repeat)     | WAITING

Every loss is repaired in the same way: stop the old generation completely, then serve and register
a new one on a fresh socket. If a new generation registered while the older stream is open, the node
would have 0 devices as soon as that stream ends (k/k#121994), so there are never two generations at
the same time.

The kubelet opens one stream per registration and never dials again, so a closed stream is a loss.
The loss is reported after a short delay: if the kubelet restarts, its new kubelet.sock is a better
reason. There is no delay just after a handover, because the end of the older stream closes the
newer stream too (up to 1.36).

An open stream does not prove that the resource is listed: the newest registration of a name wins.
The kubelet then lists another plugin's devices; when that plugin ends, it lists none (up to 1.36)
or still lists them (since 1.37). `Compared` reports this. The plugin registers again immediately.
If the resource is taken again, another plugin keeps registering it too. Each attempt then fails the
admission of pods at that moment. The next attempts are therefore 30 s later, a minute later, and so
on, or when a plugin that may have taken the resource has gone. Until then the old stream stays
open, because its end can remove the other plugin's devices.
"""

import math
from typing import Final, assert_never

import msgspec

from muster import pacing, vocabulary
from muster_plugin.kubelet import registration_signals as model

Reason = vocabulary.RegistrationReason
State = model.State

_PROBE_FAILURES_MAX: Final = 2


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """The timing of a registration, in seconds, and the maximum number of refusals."""

    stream_after_register_s: float = 5.0
    stream_after_close_s: float = 0.25
    retry: pacing.Backoff = pacing.Backoff(first_s=0.02, max_s=5.0)
    permanent_refusal_s: float = 30.0
    refusals_max: float = math.inf
    """After this many refusals the generation ends; the next may use another method."""
    served_elsewhere_s: float = 0.2
    kubelet_startup_s: float = 10.0
    """The longest time for which a new kubelet is busy registering plugins."""
    settled_s: float = 1.0
    """The longest time that the kubelet needs to list the devices of a new registration."""
    vacant: pacing.Backoff = pacing.Backoff(first_s=1.0, max_s=600.0)
    """The wait between registrations without effect, if no other plugin serves the resource."""
    fight: pacing.Backoff = pacing.Backoff(first_s=30.0, max_s=600.0)
    """The wait between registrations of a resource that another plugin registers too."""
    peace_s: float = 600.0
    """If a resource was listed for this long, its next displacement counts as the first."""
    stable_s: float = 2.0
    """If a resource was listed for this long, its next loss is repaired without back-off."""


class Registration:
    """The state machine of one resource; its first tick returns `Serve`."""

    def __init__(self, timeouts: Timeouts | None = None, *, reason: Reason = Reason.START) -> None:
        self.state = State.WAITING
        self.generation = 0
        """The number of the newest generation; 0 before the first."""
        self.registrations = 0
        """How many times the kubelet accepted the registration."""
        self.registered_at: float | None = None
        self.kubelet = ""
        """The identity of kubelet.sock at the last registration."""
        self.streams = 0
        """The number of open ListAndWatch streams of the current generation."""
        self._timeouts = timeouts or Timeouts()
        self._deadline: float | None = -math.inf
        self._initial_reason = reason
        self._next_listed_reason: Reason | None = reason
        self._is_loss_reported = False
        self._problem = model.NO_PROBLEM
        self._current_kubelet = ""
        self._kubelet_while_registering = ""
        self._refusals = 0
        self._losses = 0
        self._probe_failures = 0
        self.displacements = 0
        """How many times the kubelet dropped this plugin's devices without `peace_s` in between."""
        self._futile = 0
        self._others: frozenset[str] = frozenset()
        self._listed_at = math.inf
        self._drop_expected_until = -math.inf
        self._is_kubelet_unreachable = False
        """Whether kubelet.sock did not answer the last attempt to register."""
        self._kubelet_started_at = -math.inf

    @property
    def is_listed(self) -> bool:
        """Whether the kubelet lists this resource, according to the signals so far."""
        return self.state is State.LISTED

    @property
    def is_blocked(self) -> bool:
        """Whether a lasting problem keeps a reachable kubelet from listing the resource."""
        return not self.is_listed and self._problem.persists and not self._is_kubelet_unreachable

    def problem(self, now: float) -> str:
        """Describe why the kubelet does not list the resource; empty if it does."""
        if self.state is State.LISTED:
            return ""
        return self._problem.describe(now, then=model.NEXT_STEP[self.state])

    def is_waiting_for_kubelet(self, now: float) -> bool:
        """Return whether the resource only waits for an unreachable or restarting kubelet."""
        if self.state is State.LISTED:
            return False
        if self._problem.persists:
            return self._is_kubelet_unreachable
        return now - self._kubelet_started_at < self._timeouts.kubelet_startup_s

    def has_settled(self, now: float) -> bool:
        """Return whether the kubelet has had time to list the plugin's devices."""
        has_been_listed = now - self._listed_at >= self._timeouts.settled_s
        return has_been_listed and self.state in {State.LISTED, State.DISPLACED}

    def expect_drop(self, until: float) -> None:
        """Register again immediately if the stream closes before `until`, in monotonic seconds."""
        self._drop_expected_until = until

    def next_deadline(self) -> float | None:
        """Return when `tick` is next needed; None if no deadline is pending."""
        return self._deadline

    def tick(self, now: float) -> list[model.Action]:
        """Perform the transitions that are due; return their actions."""
        if self._deadline is None or now < self._deadline:
            return []
        match self.state:
            case State.WAITING:
                return self._serve()
            case State.REFUSED:
                return self._register()
            case State.AWAITING_STREAM:
                waited = self._timeouts.stream_after_register_s
                text = f"no stream from the kubelet {waited:g} s after it accepted the registration"
                return self._end_generation(Reason.NO_STREAM, text, now)
            case State.STREAM_CLOSED:
                return self._end_generation(
                    Reason.STREAM_CLOSED, "stream closed by the kubelet", now
                )
            case State.DISPLACED:
                return self._end_generation(Reason.DISPLACED, self._problem.detail, now)
            case State.STARTING | State.REGISTERING | State.LISTED | State.STOPPING:
                raise AssertionError(f"{self.state} has no deadline")
            case _:
                assert_never(self.state)

    def receive(self, event: model.Signal, now: float) -> list[model.Action]:
        """Handle one signal and return actions; signals of an older generation change nothing."""
        if isinstance(event, model.KubeletSocketSeen):
            return self._on_kubelet_socket(event.kubelet, now)
        if event.generation != self.generation:
            return []
        if isinstance(event, model.FromProbe):
            return self._on_probe(event, now)
        if isinstance(event, model.FromKubelet):
            return self._on_kubelet_signal(event, now)
        return self._on_server_signal(event, now)

    # Signals

    def _on_server_signal(self, event: model.FromServer, now: float) -> list[model.Action]:
        match event:
            case model.Served():
                return self._register() if self.state is State.STARTING else []
            case model.ServeFailed(text=text):
                if self.state is State.STARTING:
                    self._set_lasting_problem("cannot serve", text, now)
                    self._losses += 1
                    self._wait_until(now + self._timeouts.retry.delay_s(self._losses))
            case model.ServedElsewhere(owner=owner):
                if self.state is State.STARTING:
                    self._set_lasting_problem("another plugin on this node serves it", owner, now)
                    self._wait_until(now + self._timeouts.served_elsewhere_s)
            case model.Stopped():
                if self.state is State.STOPPING:
                    self._wait_until(now + self._timeouts.retry.delay_s(self._losses - 1))
            case model.OwnSocketLost():
                text = "the plugin's socket file is gone or was replaced"
                return self._end_generation(Reason.OWN_SOCKET_LOST, text, now)
            case model.ServerEnded():
                return self._end_generation(Reason.SERVER_ENDED, "the plugin's server ended", now)
            case _:
                assert_never(event)
        return []

    def _on_kubelet_signal(self, event: model.FromKubelet, now: float) -> list[model.Action]:
        match event:
            case model.Registered(kubelet=kubelet):
                return self._on_registered(kubelet, now) if self.state is State.REGISTERING else []
            case model.RegisterFailed():
                return self._on_refused(event, now) if self.state is State.REGISTERING else []
            case model.StreamOpened():
                return self._on_stream_opened(now)
            case model.StreamClosed():
                self.streams = max(0, self.streams - 1)
                if self.state in {State.LISTED, State.DISPLACED}:
                    self.state = State.STREAM_CLOSED
                    grace_s = self._timeouts.stream_after_close_s
                    self._deadline = now if now < self._drop_expected_until else now + grace_s
                    self._problem = model.Problem("stream closed", now)
            case model.Compared():
                return self._on_compared(event, now)
            case _:
                assert_never(event)
        return []

    def _on_stream_opened(self, now: float) -> list[model.Action]:
        if self.state in {State.WAITING, State.STOPPING}:
            return []
        self.streams += 1
        if self.state is State.REFUSED:
            # the kubelet accepted the registration; only its answer was lost
            return self._on_registered(self._current_kubelet, now)
        return (
            self._on_listed(now)
            if self.state in {State.AWAITING_STREAM, State.STREAM_CLOSED}
            else []
        )

    def _on_compared(self, event: model.Compared, now: float) -> list[model.Action]:
        if not event.displaced:
            self._futile = 0
            return self._on_listed(now) if self.state is State.DISPLACED else []
        if self.state is State.LISTED:
            if now - self._listed_at >= self._timeouts.peace_s:
                self.displacements = 0
            wait_s = self._timeouts.vacant.delay_s(self._futile)
            if event.others:
                wait_s = self._timeouts.fight.delay_s(self.displacements)
            self.state, self._deadline = State.DISPLACED, now + wait_s
            self.displacements += 1
            self._futile += 1
        elif self.state is not State.DISPLACED:
            return []
        elif not self._others <= event.others:
            self._deadline = now
        self._others = event.others
        text = "another plugin registered it" if event.others else "the kubelet dropped it"
        self._set_lasting_problem(text, event.displaced, now)
        return [*self._report_loss(Reason.DISPLACED, event.displaced), *self.tick(now)]

    def _on_probe(self, event: model.FromProbe, now: float) -> list[model.Action]:
        if isinstance(event, model.ProbePassed):
            self._probe_failures = 0
            return []
        self._probe_failures += 1
        if self._probe_failures < _PROBE_FAILURES_MAX:
            return []
        return self._end_generation(Reason.PROBE_FAILED, f"self-probe failed: {event.text}", now)

    def _on_kubelet_socket(self, kubelet: str, now: float) -> list[model.Action]:
        is_new = kubelet not in {"", self._current_kubelet}
        self._current_kubelet = kubelet
        if not is_new or (self.state in model.REGISTERED and kubelet == self.kubelet):
            return []
        self._losses = self._refusals = 0
        self._kubelet_started_at = now
        if self.state in model.REGISTERED:
            return self._end_generation(
                Reason.KUBELET_SOCKET_REPLACED, "kubelet.sock was replaced", now
            )
        self._attribute_to_kubelet(kubelet)
        self._kubelet_while_registering = kubelet
        if self.state in {State.WAITING, State.REFUSED}:
            self._deadline = now
        return []

    def _on_registered(self, kubelet: str, now: float) -> list[model.Action]:
        self._attribute_to_kubelet(kubelet)
        self.registrations += 1
        self.registered_at, self.kubelet, self._current_kubelet = now, kubelet, kubelet
        self._refusals = 0
        self._problem = model.Problem("registered with the kubelet", now)
        if self._kubelet_while_registering not in {"", kubelet}:
            return self._end_generation(
                Reason.KUBELET_SOCKET_REPLACED, "kubelet.sock was replaced", now
            )
        if self.streams:
            return self._on_listed(now)
        self.state = State.AWAITING_STREAM
        self._deadline = now + self._timeouts.stream_after_register_s
        return []

    def _on_refused(self, event: model.RegisterFailed, now: float) -> list[model.Action]:
        if self.streams:
            return self._on_registered(self._current_kubelet, now)
        self._refusals += 1
        wait_s = self._timeouts.retry.delay_s(self._refusals)
        self.state = State.REFUSED
        self._deadline = now + (self._timeouts.permanent_refusal_s if event.permanent else wait_s)
        self._set_lasting_problem(
            "kubelet refuses registration", event.text, now, unreachable=event.unreachable
        )
        lost = self._report_loss(Reason.REGISTER_FAILED, event.text)
        if self._refusals < self._timeouts.refusals_max:
            return lost
        self._losses += 1
        self.state, self._deadline = State.STOPPING, None
        return [*lost, model.Stop(self.generation)]

    # Transitions

    def _wait_until(self, until: float) -> None:
        self.state, self._deadline = State.WAITING, until

    def _serve(self) -> list[model.Action]:
        self.generation += 1
        self.state, self._deadline = State.STARTING, None
        self.streams = self._refusals = self._probe_failures = 0
        return [model.Serve(self.generation)]

    def _register(self) -> list[model.Action]:
        self.state, self._deadline = State.REGISTERING, None
        self._kubelet_while_registering = ""
        return [model.Register(self.generation)]

    def _on_listed(self, now: float) -> list[model.Action]:
        self.state, self._deadline = State.LISTED, None
        self._listed_at = now
        self._problem = model.NO_PROBLEM
        self._is_loss_reported = False
        reason, self._next_listed_reason = self._next_listed_reason, None
        if reason is None:
            return []
        return [model.Listed(self.generation, reason, self.registrations)]

    def _end_generation(self, reason: Reason, text: str, now: float) -> list[model.Action]:
        if self.state not in model.WITH_SERVER:
            return []
        if self.state not in {State.STREAM_CLOSED, State.DISPLACED}:
            # in these two states the problem is already known, with its earlier start
            self._problem = model.Problem(text, now)
        self._losses = 1 if now - self._listed_at >= self._timeouts.stable_s else self._losses + 1
        self._listed_at = math.inf
        self.state, self._deadline = State.STOPPING, None
        self.streams = 0
        return [*self._report_loss(reason, text), model.Stop(self.generation)]

    def _report_loss(self, reason: Reason, text: str) -> list[model.Action]:
        """Report the loss of a resource; ignore further losses until it is listed again.

        A resource that the kubelet has never accepted cannot be lost.
        """
        if self._next_listed_reason in {None, self._initial_reason}:
            self._next_listed_reason = reason
        if self._is_loss_reported or not self.registrations:
            return []
        self._is_loss_reported = True
        return [model.Lost(reason, text)]

    def _attribute_to_kubelet(self, kubelet: str) -> None:
        """Correct the reason for a loss if the kubelet of the last registration was replaced."""
        is_replaced = self.kubelet not in {"", kubelet}
        if is_replaced and self._next_listed_reason not in {None, self._initial_reason}:
            self._next_listed_reason = Reason.KUBELET_SOCKET_REPLACED

    def _set_lasting_problem(
        self, text: str, detail: str, now: float, *, unreachable: bool = False
    ) -> None:
        """Set a lasting problem; its start time is kept when only the detail changes."""
        since = self._problem.at if self._problem.text == text else now
        self._problem = model.Problem(text, since, detail=detail, persists=True)
        self._is_kubelet_unreachable = unreachable
