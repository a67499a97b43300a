import heapq
import itertools
import math
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.vocabulary import RegistrationReason as Reason
from muster_plugin.kubelet import registration, registration_signals
from muster_plugin.kubelet.registration_signals import State

TIMEOUTS = registration.Timeouts()
END = registration_signals.Stop(1)


def registered(
    machine: registration.Registration, *, kubelet: str = "k1", now: float = 0.0
) -> None:
    """Advance a machine from the start of its generation until the kubelet lists the resource."""
    machine.tick(now)
    generation = machine.generation
    machine.receive(registration_signals.Served(generation), now)
    machine.receive(registration_signals.Registered(generation, kubelet), now)
    machine.receive(registration_signals.StreamOpened(generation), now)
    assert machine.state is State.LISTED


def listed(kubelet: str = "k1") -> registration.Registration:
    machine = registration.Registration()
    registered(machine, kubelet=kubelet)
    return machine


def healed(
    machine: registration.Registration, now: float, kubelet: str = "k1"
) -> registration_signals.Action:
    """Let a machine stop, serve, register and be listed again; return its report."""
    generation = machine.generation
    assert machine.receive(registration_signals.Stopped(generation), now) == []
    deadline = machine.next_deadline()
    assert deadline is not None
    assert machine.tick(deadline) == [registration_signals.Serve(generation + 1)]
    served = machine.receive(registration_signals.Served(generation + 1), deadline)
    assert served == [registration_signals.Register(generation + 1)]
    assert machine.receive(registration_signals.Registered(generation + 1, kubelet), deadline) == []
    (report,) = machine.receive(registration_signals.StreamOpened(generation + 1), deadline)
    return report


def test_it_serves_before_it_registers_and_reports_when_the_stream_opens() -> None:
    machine = registration.Registration()
    assert machine.tick(0.0) == [registration_signals.Serve(1)]
    assert machine.receive(registration_signals.Served(1), 0.1) == [
        registration_signals.Register(1)
    ]
    assert machine.receive(registration_signals.Registered(1, "k1"), 0.2) == []
    assert machine.receive(registration_signals.StreamOpened(1), 0.3) == [
        registration_signals.Listed(1, Reason.START, 1)
    ]
    assert (machine.problem(0.4), machine.next_deadline()) == ("", None)


def test_a_drop_that_is_expected_is_repaired_at_once_and_a_later_one_after_the_delay() -> None:
    machine = listed()
    machine.expect_drop(12.0)
    assert machine.receive(registration_signals.StreamClosed(1), 11.9) == []
    assert machine.next_deadline() == 11.9
    assert machine.tick(11.9)[-1] == END
    machine = listed()
    machine.expect_drop(12.0)
    assert machine.receive(registration_signals.StreamClosed(1), 12.0) == []
    assert machine.next_deadline() == 12.0 + TIMEOUTS.stream_after_close_s


def test_a_stream_that_opens_before_register_answers_counts() -> None:
    machine = registration.Registration()
    machine.tick(0.0)
    machine.receive(registration_signals.Served(1), 0.0)
    assert machine.receive(registration_signals.StreamOpened(1), 0.0) == []
    assert machine.receive(registration_signals.Registered(1, "k1"), 0.0) == [
        registration_signals.Listed(1, Reason.START, 1)
    ]


@pytest.mark.parametrize(
    ("signal", "reason", "detail"),
    [
        (
            registration_signals.KubeletSocketSeen("k2"),
            Reason.KUBELET_SOCKET_REPLACED,
            "kubelet.sock was replaced",
        ),
        (
            registration_signals.OwnSocketLost(1),
            Reason.OWN_SOCKET_LOST,
            "the plugin's socket file is gone or was replaced",
        ),
        (registration_signals.ServerEnded(1), Reason.SERVER_ENDED, "the plugin's server ended"),
    ],
)
def test_each_certain_loss_ends_the_generation_and_names_its_reason(
    signal: registration_signals.Signal, reason: Reason, detail: str
) -> None:
    machine = listed()
    assert machine.receive(signal, 10.0) == [
        registration_signals.Lost(reason, detail),
        registration_signals.Stop(1),
    ]
    assert machine.problem(10.5) == f"{detail} 0.5 s ago, stopping the old server"
    kubelet = "k2" if reason is Reason.KUBELET_SOCKET_REPLACED else "k1"
    assert healed(machine, 10.5, kubelet) == registration_signals.Listed(2, reason, 2)


def test_a_closed_stream_is_a_loss_when_no_new_one_opens_in_time() -> None:
    machine = listed()
    assert machine.receive(registration_signals.StreamClosed(1), 10.0) == []
    assert machine.problem(10.2) == "stream closed 0.2 s ago, registering"
    assert machine.next_deadline() == 10.25
    lost = registration_signals.Lost(Reason.STREAM_CLOSED, "stream closed by the kubelet")
    assert machine.tick(10.25) == [lost, registration_signals.Stop(1)]
    assert machine.problem(12.0) == "stream closed 2.0 s ago, stopping the old server"
    assert healed(machine, 12.0) == registration_signals.Listed(2, Reason.STREAM_CLOSED, 2)


def test_a_closed_stream_is_no_loss_when_a_new_one_opens_in_time() -> None:
    machine = listed()
    machine.receive(registration_signals.StreamClosed(1), 10.0)
    assert machine.receive(registration_signals.StreamOpened(1), 10.2) == []
    assert (machine.state, machine.next_deadline()) == (State.LISTED, None)


def test_the_older_of_two_streams_that_stays_open_proves_nothing() -> None:
    machine = listed()
    machine.receive(registration_signals.StreamOpened(1), 5.0)
    machine.receive(registration_signals.StreamClosed(1), 10.0)
    lost = registration_signals.Lost(Reason.STREAM_CLOSED, "stream closed by the kubelet")
    assert machine.tick(11.0) == [lost, registration_signals.Stop(1)]


def test_a_new_kubelet_socket_during_the_wait_for_a_stream_is_the_reason() -> None:
    machine = listed()
    machine.receive(registration_signals.StreamClosed(1), 10.0)
    lost = registration_signals.Lost(Reason.KUBELET_SOCKET_REPLACED, "kubelet.sock was replaced")
    assert machine.receive(registration_signals.KubeletSocketSeen("k2"), 10.1) == [
        lost,
        registration_signals.Stop(1),
    ]


def test_a_kubelet_restart_is_named_even_when_our_own_socket_is_missed_first() -> None:
    machine = listed()
    machine.receive(registration_signals.OwnSocketLost(1), 10.0)
    assert machine.receive(registration_signals.KubeletSocketSeen("k2"), 10.0) == []
    assert healed(machine, 10.0, "k2") == registration_signals.Listed(
        2, Reason.KUBELET_SOCKET_REPLACED, 2
    )


def test_no_stream_after_register_is_a_loss_after_five_seconds() -> None:
    machine = registration.Registration()
    machine.tick(0.0)
    machine.receive(registration_signals.Served(1), 0.0)
    machine.receive(registration_signals.Registered(1, "k1"), 0.0)
    assert machine.next_deadline() == 5.0
    text = "no stream from the kubelet 5 s after it accepted the registration"
    assert machine.tick(5.0) == [
        registration_signals.Lost(Reason.NO_STREAM, text),
        registration_signals.Stop(1),
    ]


def test_a_resource_that_was_never_registered_is_not_lost_by_a_refusal() -> None:
    machine = registration.Registration()
    machine.tick(0.0)
    machine.receive(registration_signals.Served(1), 0.0)
    refused = registration_signals.RegisterFailed(
        1, "UNAVAILABLE: kubelet.sock is missing", permanent=False
    )
    assert machine.receive(refused, 0.0) == []
    machine.tick(0.02)
    machine.receive(registration_signals.Registered(1, "k1"), 1.0)
    listed = registration_signals.Listed(1, Reason.REGISTER_FAILED, 1)
    assert machine.receive(registration_signals.StreamOpened(1), 1.0) == [listed]


def test_a_failed_register_is_tried_again_with_doubling_delay_on_the_same_server() -> None:
    machine = listed()
    machine.receive(registration_signals.StreamClosed(1), 10.0)
    actions = [*machine.tick(11.0), *machine.receive(registration_signals.Stopped(1), 11.0)]
    assert actions == [
        registration_signals.Lost(Reason.STREAM_CLOSED, "stream closed by the kubelet"),
        END,
    ]
    machine.tick(11.0)
    actions = machine.receive(registration_signals.Served(2), 11.0)
    now, delays, lost = 11.0, [], []
    for _ in range(11):
        assert actions == [registration_signals.Register(2)]
        lost += machine.receive(
            registration_signals.RegisterFailed(2, "UNAVAILABLE: x", permanent=False), now
        )
        deadline = machine.next_deadline()
        assert deadline is not None
        delays.append(round(deadline - now, 6))
        now = deadline
        actions = machine.tick(now)
    assert delays == [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.0, 5.0, 5.0]
    assert lost == []
    assert (
        machine.problem(now)
        == "kubelet refuses registration (UNAVAILABLE: x), for 20.1 s; registering"
    )


def test_a_permanent_refusal_waits_half_a_minute_or_for_a_new_kubelet() -> None:
    machine = registration.Registration()
    machine.tick(0.0)
    machine.receive(registration_signals.KubeletSocketSeen("k1"), 0.0)
    machine.receive(registration_signals.Served(1), 0.0)
    machine.receive(
        registration_signals.RegisterFailed(1, "UNKNOWN: is invalid", permanent=True), 0.0
    )
    assert machine.next_deadline() == 30.0
    machine.receive(registration_signals.KubeletSocketSeen("k1"), 1.0)
    assert machine.next_deadline() == 30.0
    machine.receive(registration_signals.KubeletSocketSeen("k2"), 2.0)
    assert machine.tick(2.0) == [registration_signals.Register(1)]


def test_one_failed_probe_is_not_a_loss_and_two_are() -> None:
    machine = listed()
    assert machine.receive(registration_signals.ProbeFailed(1, "DEADLINE_EXCEEDED"), 10.0) == []
    assert machine.receive(registration_signals.ProbePassed(1), 10.1) == []
    assert machine.receive(registration_signals.ProbeFailed(1, "UNAVAILABLE"), 20.0) == []
    lost = registration_signals.Lost(Reason.PROBE_FAILED, "self-probe failed: UNAVAILABLE")
    assert machine.receive(registration_signals.ProbeFailed(1, "UNAVAILABLE"), 20.2) == [
        lost,
        registration_signals.Stop(1),
    ]


def test_a_server_that_cannot_start_is_tried_again_with_delay() -> None:
    machine = registration.Registration()
    machine.tick(0.0)
    assert machine.receive(registration_signals.ServeFailed(1, "no such directory"), 0.0) == []
    assert machine.problem(1.0) == "cannot serve (no such directory), for 1.0 s; serving again"
    assert machine.next_deadline() == 0.02
    assert machine.tick(0.02) == [registration_signals.Serve(2)]
    machine.receive(registration_signals.ServeFailed(2, "no such directory"), 0.02)
    assert machine.next_deadline() == 0.06


def test_a_first_loss_is_repaired_at_once_and_repeated_ones_slow_down() -> None:
    machine = listed()
    now, delays = 10.0, []
    for _ in range(4):
        machine.receive(registration_signals.OwnSocketLost(machine.generation), now)
        machine.receive(registration_signals.Stopped(machine.generation), now)
        deadline = machine.next_deadline()
        assert deadline is not None
        delays.append(round(deadline - now, 6))
        now = deadline
        registered(machine, now=now)
        now += 0.1
    assert delays == [0.0, 0.02, 0.04, 0.08]


def test_a_refused_generation_ends_where_the_next_can_use_another_method() -> None:
    machine = registration.Registration(registration.Timeouts(refusals_max=2))
    machine.tick(0.0)
    machine.receive(registration_signals.Served(1), 0.0)
    refused = registration_signals.RegisterFailed(1, "UNAVAILABLE: x", permanent=False)
    assert machine.receive(refused, 0.0) == []
    assert machine.tick(0.02) == [registration_signals.Register(1)]
    assert machine.receive(refused, 0.02) == [registration_signals.Stop(1)]
    machine.receive(registration_signals.Stopped(1), 0.03)
    assert machine.tick(0.03) == [registration_signals.Serve(2)]


def test_a_resource_of_a_new_configuration_is_listed_with_that_reason() -> None:
    machine = registration.Registration(reason=Reason.CONFIGURATION_CHANGED)
    machine.tick(0.0)
    machine.receive(registration_signals.Served(1), 0.0)
    machine.receive(registration_signals.Registered(1, "k1"), 0.0)
    listed = registration_signals.Listed(1, Reason.CONFIGURATION_CHANGED, 1)
    assert machine.receive(registration_signals.StreamOpened(1), 0.0) == [listed]


def test_signals_of_an_older_generation_change_nothing() -> None:
    machine = listed()
    machine.receive(registration_signals.OwnSocketLost(1), 10.0)
    healed(machine, 10.0)
    for signal in (
        registration_signals.StreamClosed(1),
        registration_signals.OwnSocketLost(1),
        registration_signals.ServerEnded(1),
        registration_signals.Stopped(1),
        registration_signals.ProbeFailed(1, "x"),
        registration_signals.ProbeFailed(1, "x"),
    ):
        assert machine.receive(signal, 11.0) == []
    assert machine.is_listed


# The world around the machine, for the property below

Step: TypeAlias = tuple[float, str, float, bool]
KINDS = (
    *("nothing", "restart", "own_socket", "stream", "server", "probe", "refuse", "second_stream"),
    *("rival", "rival_forgotten", "rival_goes"),
)
DELAYS = st.floats(0, 1.5)
STEPS = st.lists(
    st.tuples(st.floats(0, 8), st.sampled_from(KINDS), DELAYS, st.booleans()), max_size=40
)


class World:
    """A stand-in for the adapters and the kubelet: answers actions, and injects faults."""

    def __init__(self) -> None:
        self.machine = registration.Registration()
        self.now = 0.0
        self.kubelet = "k0"
        self.delay_s = 0.0
        self.refusing = False
        self.shown = ""
        self.rivals: frozenset[str] = frozenset()
        self.serving: set[int] = set()
        self.streams: dict[int, int] = {}
        self.order = itertools.count()
        self.coming: list[tuple[float, int, registration_signals.Signal]] = []
        self.numbers = itertools.count(1)

    def tell(self, signal: registration_signals.Signal, delay_s: float = 0.0) -> None:
        heapq.heappush(self.coming, (self.now + delay_s, next(self.order), signal))

    def run_until(self, end: float) -> None:
        for _ in range(10_000):
            deadline = self.machine.next_deadline()
            first = self.coming[0][0] if self.coming else None
            due = min((t for t in (deadline, first) if t is not None), default=math.inf)
            if due > end:
                break
            self.now = max(self.now, due)
            if deadline is not None and deadline <= self.now:
                self.act(self.machine.tick(self.now))
                after = self.machine.next_deadline()
                assert after is None or after > self.now
            elif self.coming:
                signal = heapq.heappop(self.coming)[2]
                self.act(self.machine.receive(signal, self.now))
        else:
            raise AssertionError("the machine spins")
        self.now = end

    def compare_until(self, end: float) -> None:
        """Advance until a time; each second, compare what the kubelet lists, as the poller does."""
        while self.now < end:
            self.run_until(min(end, self.now + 1.0))
            if self.machine.state in {State.LISTED, State.DISPLACED}:
                displaced = "" if self.shown == "ours" else "the kubelet lists x"
                others = self.rivals if self.shown == "rival" else frozenset()
                compared = registration_signals.Compared(self.machine.generation, displaced, others)
                self.act(self.machine.receive(compared, self.now))

    def act(self, actions: list[registration_signals.Action]) -> None:
        for action in actions:
            match action:
                case registration_signals.Serve(generation=generation):
                    assert not self.serving, "two generations at once"
                    self.serving.add(generation)
                    self.streams[generation] = 0
                    self.tell(registration_signals.Served(generation), self.delay_s)
                case registration_signals.Register(generation=generation):
                    assert self.serving == {generation}
                    assert not self.streams[generation], "registered over an open stream"
                    if self.refusing:
                        refused = registration_signals.RegisterFailed(
                            generation, "UNAVAILABLE", permanent=False
                        )
                        self.tell(refused, self.delay_s)
                    else:
                        self.tell(
                            registration_signals.Registered(generation, self.kubelet), self.delay_s
                        )
                        self.shown = "ours"
                        self.streams[generation] = 1
                        self.tell(registration_signals.StreamOpened(generation), self.delay_s)
                case registration_signals.Stop(generation=generation):
                    assert self.serving == {generation}
                    self.serving.remove(generation)
                    self.streams[generation] = 0
                    self.tell(registration_signals.Stopped(generation), self.delay_s)
                case _:
                    pass

    def suffer(self, kind: str) -> None:
        generation = self.machine.generation
        match kind:
            case "rival":
                self.shown, self.rivals = "rival", frozenset({"rival.sock"})
            case "rival_goes" if self.shown == "rival":
                # since Kubernetes 1.37, its devices stay listed
                self.rivals = frozenset()
            case "rival_forgotten" if self.shown == "rival":
                self.shown, self.rivals = "", frozenset()
            case "restart":
                self.shown = ""
                self.kubelet = f"k{next(self.numbers)}"
                self.close_streams()
                self.tell(registration_signals.OwnSocketLost(generation))
                self.tell(registration_signals.KubeletSocketSeen(self.kubelet), self.delay_s)
            case "own_socket":
                self.tell(registration_signals.OwnSocketLost(generation))
            case "stream":
                self.close_streams()
            case "server" if generation in self.serving:
                self.tell(registration_signals.ServerEnded(generation))
            case "probe":
                self.tell(registration_signals.ProbeFailed(generation, "x"))
            case "second_stream" if self.streams.get(generation):
                self.streams[generation] += 1
                self.tell(registration_signals.StreamOpened(generation))
            case _:
                pass

    def close_streams(self) -> None:
        for generation, count in self.streams.items():
            for _ in range(count):
                self.tell(registration_signals.StreamClosed(generation), self.delay_s)
            self.streams[generation] = 0


def test_a_resource_that_another_plugin_serves_is_retried_often_and_reported_at_once() -> None:
    machine = registration.Registration()
    machine.tick(0.0)
    for at, generation in ((0.0, 1), (0.2, 2), (0.4, 3)):
        assert machine.receive(registration_signals.ServedElsewhere(generation, "pod-b"), at) == []
        assert machine.tick(at + 0.2) == [registration_signals.Serve(generation + 1)]
    assert machine.problem(1.0) == (
        "another plugin on this node serves it (pod-b), for 1.0 s; serving again"
    )
    assert machine.receive(registration_signals.Served(4), 1.0) == [
        registration_signals.Register(4)
    ]


@given(STEPS)
def test_whatever_happens_one_generation_serves_and_the_resource_is_listed_again(
    steps: list[Step],
) -> None:
    world = World()
    for wait_s, kind, delay_s, refusing in steps:
        world.delay_s, world.refusing = delay_s, refusing or kind == "refuse"
        world.compare_until(world.now + wait_s)
        world.suffer(kind)
    world.delay_s, world.refusing = 0.01, False
    world.suffer("rival_goes")
    # all pending answers, the longest back-off, a missing stream, and the repair of that
    longest_s = 1.5 + 2 * TIMEOUTS.retry.max_s + TIMEOUTS.stream_after_register_s
    world.compare_until(world.now + longest_s + TIMEOUTS.vacant.delay_s(5))
    assert world.machine.is_listed, world.machine.problem(world.now)
    assert world.shown == "ours"
    assert world.machine.problem(world.now) == ""
    assert world.serving == {world.machine.generation}
    assert world.machine.next_deadline() is None


def test_an_unreachable_or_new_kubelet_differs_from_one_that_refuses() -> None:
    machine = listed()
    assert not machine.is_waiting_for_kubelet(10.0)
    machine.receive(registration_signals.StreamClosed(1), 10.0)
    machine.receive(registration_signals.KubeletSocketSeen(""), 10.0)
    assert not machine.is_waiting_for_kubelet(10.5)
    machine.tick(11.0)
    machine.receive(registration_signals.Stopped(1), 11.0)
    machine.tick(11.0)
    machine.receive(registration_signals.Served(2), 11.0)
    missing = "UNAVAILABLE: kubelet.sock is missing"
    machine.receive(
        registration_signals.RegisterFailed(2, missing, permanent=False, unreachable=True), 11.0
    )
    assert (machine.is_waiting_for_kubelet(25.0), machine.is_blocked) == (True, False)
    machine.receive(registration_signals.KubeletSocketSeen("k2"), 30.0)
    machine.tick(30.0)
    assert (machine.is_waiting_for_kubelet(30.5), machine.is_blocked) == (True, False)
    machine.receive(
        registration_signals.RegisterFailed(2, "UNKNOWN: is invalid", permanent=False), 31.0
    )
    assert (machine.is_waiting_for_kubelet(31.0), machine.is_blocked) == (False, True)


def test_a_kubelet_that_was_replaced_has_some_seconds_for_the_registration() -> None:
    machine = listed()
    machine.receive(registration_signals.KubeletSocketSeen("k2"), 10.0)
    assert machine.is_waiting_for_kubelet(10.0)
    assert not machine.is_waiting_for_kubelet(10.0 + TIMEOUTS.kubelet_startup_s)
    healed(machine, 11.0, "k2")
    assert not machine.is_waiting_for_kubelet(11.5)


def test_a_resource_has_settled_when_the_kubelet_has_listed_it_for_some_seconds() -> None:
    machine = listed()
    machine.receive(registration_signals.KubeletSocketSeen("k2"), 10.0)
    healed(machine, 11.0, "k2")
    assert not machine.has_settled(11.0 + TIMEOUTS.settled_s - 0.1)
    assert machine.has_settled(11.0 + TIMEOUTS.settled_s)
    machine.receive(registration_signals.StreamClosed(machine.generation), 30.0)
    assert not machine.has_settled(60.0)


X = "the kubelet lists x"


def test_a_displaced_resource_is_registered_again_at_once_the_first_time() -> None:
    machine = listed()
    rival = registration_signals.Compared(1, X, frozenset({"rival.sock"}))
    assert machine.receive(rival, 10.0) == [
        registration_signals.Lost(Reason.DISPLACED, X),
        registration_signals.Stop(1),
    ]
    assert machine.problem(12.0) == (
        f"another plugin registered it ({X}), for 2.0 s; stopping the old server"
    )
    assert healed(machine, 12.0) == registration_signals.Listed(2, Reason.DISPLACED, 2)
    assert machine.problem(13.0) == ""


def displaced_twice(*others: str) -> registration.Registration:
    machine = listed()
    machine.receive(registration_signals.Compared(1, X, frozenset(others)), 10.0)
    healed(machine, 10.0)
    rival = registration_signals.Compared(2, X, frozenset(others))
    assert machine.receive(rival, 20.0) == [registration_signals.Lost(Reason.DISPLACED, X)]
    assert (machine.state, machine.streams, machine.is_blocked) == (State.DISPLACED, 1, True)
    return machine


def test_a_resource_that_is_displaced_again_is_left_to_the_other_plugin_for_a_while() -> None:
    machine = displaced_twice("rival.sock", "other.sock")
    assert machine.next_deadline() == 50.0
    assert machine.problem(25.0) == (
        f"another plugin registered it ({X}), for 5.0 s; "
        "registering again after a pause, or as soon as no other plugin serves it"
    )
    same = registration_signals.Compared(
        2, X, frozenset({"rival.sock", "other.sock", "third.sock"})
    )
    assert machine.receive(same, 21.0) == []
    assert machine.tick(50.0) == [registration_signals.Stop(2)]


@pytest.mark.parametrize("others", [{"other.sock"}, set()])
def test_a_displaced_resource_is_registered_when_a_plugin_that_may_have_it_has_gone(
    others: set[str],
) -> None:
    machine = displaced_twice("rival.sock", "other.sock")
    fewer = registration_signals.Compared(2, X, frozenset(others))
    assert machine.receive(fewer, 21.0) == [registration_signals.Stop(2)]
    assert healed(machine, 21.0) == registration_signals.Listed(3, Reason.DISPLACED, 3)


def test_registrations_that_change_nothing_become_rare() -> None:
    machine = displaced_twice()
    assert machine.problem(20.0).startswith(f"the kubelet dropped it ({X}), for 0.0 s; ")
    assert machine.tick(21.0) == [registration_signals.Stop(2)]
    healed(machine, 21.0)
    machine.receive(registration_signals.Compared(3, X), 30.0)
    assert machine.next_deadline() == 32.0


def test_a_resource_that_nobody_serves_is_registered_at_once_if_that_has_helped_before() -> None:
    machine = displaced_twice()
    machine.tick(21.0)
    healed(machine, 21.0)
    machine.receive(registration_signals.Compared(3, ""), 25.0)
    assert machine.receive(registration_signals.Compared(3, X), 30.0) == [
        registration_signals.Lost(Reason.DISPLACED, X),
        registration_signals.Stop(3),
    ]


def test_a_displaced_resource_that_is_listed_again_was_lost_and_is_back() -> None:
    machine = displaced_twice("rival.sock")
    assert machine.receive(registration_signals.Compared(2, ""), 22.0) == [
        registration_signals.Listed(2, Reason.DISPLACED, 2)
    ]
    assert (machine.problem(22.0), machine.next_deadline()) == ("", None)


def test_after_ten_minutes_of_peace_a_displacement_is_a_first_one() -> None:
    machine = displaced_twice("rival.sock")
    machine.receive(registration_signals.Compared(2, ""), 22.0)
    late = 22.0 + TIMEOUTS.peace_s
    rival = registration_signals.Compared(2, X, frozenset({"rival.sock"}))
    assert machine.receive(rival, late)[-1] == registration_signals.Stop(2)


def test_the_stream_of_a_displaced_resource_that_closes_is_a_closed_stream() -> None:
    machine = displaced_twice("rival.sock")
    machine.receive(registration_signals.StreamClosed(2), 22.0)
    assert machine.tick(23.0) == [registration_signals.Stop(2)]


def test_a_plugin_that_always_comes_back_is_fought_ever_more_rarely() -> None:
    world = World()
    world.delay_s = 0.01
    world.compare_until(10.0)
    for _ in range(3600):
        world.suffer("rival")
        world.compare_until(world.now + 1.0)
    assert 8 <= world.machine.registrations <= 12
    world.suffer("rival_goes")
    world.compare_until(world.now + 3.0)
    assert (world.machine.state, world.shown) == (State.LISTED, "ours")
