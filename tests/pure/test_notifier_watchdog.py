"""The watchdog for health: the table in its docstring, row by row."""

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from muster import vocabulary
from muster_notifier import monitor

AT = datetime(2026, 1, 2, tzinfo=UTC)
BACK = monitor.BusRestored()
LOST = monitor.BusLost()


def ticked(leader: int, holder: str = "a") -> vocabulary.WatchdogTicked:
    return vocabulary.WatchdogTicked(
        node=vocabulary.FLEET, at=AT, leader=leader, holder=holder, interval_s=10
    )


def connected(now: float = 0.0) -> monitor.Watchdog:
    machine = monitor.Watchdog(patience_s=60)
    assert machine.receive(BACK, now) == ()
    return machine


def test_ticks_in_time_are_no_news() -> None:
    machine = connected()
    for now in range(0, 600, 10):
        assert machine.receive(ticked(5), float(now)) == ()
        assert machine.tick(now + 9.9) == ()
    assert machine.next_deadline() == 590 + 25


def test_silence_is_reported_once_and_its_end_once() -> None:
    machine = connected()
    machine.receive(ticked(5, "a"), 100.0)
    assert machine.tick(124.9) == ()
    assert machine.tick(125.0) == (monitor.Silent(seconds=25.0, holder="a"),)
    assert machine.tick(126.0) == ()
    assert machine.next_deadline() is None
    assert machine.receive(ticked(9, "b"), 200.0) == (monitor.Recovered(seconds=100.0, holder="b"),)
    assert machine.receive(ticked(9, "b"), 201.0) == ()


def test_a_health_service_that_never_came_is_silent_after_our_patience() -> None:
    machine = connected(10.0)
    assert machine.tick(70.0) == (monitor.Silent(seconds=60.0, holder=""),)


def test_no_deadline_runs_while_our_own_connection_is_lost() -> None:
    machine = connected()
    machine.receive(ticked(5), 0.0)
    assert machine.receive(LOST, 1.0) == ()
    assert machine.next_deadline() is None
    assert machine.tick(1000.0) == ()
    machine.receive(BACK, 1000.0)
    assert machine.next_deadline() == 1025.0


def test_who_was_late_itself_waits_once_more() -> None:
    machine = connected()
    machine.receive(ticked(5), 0.0)
    assert machine.tick(30.0) == ()
    assert machine.tick(55.0) == (monitor.Silent(seconds=55.0, holder="a"),)


def test_a_tick_of_a_former_leader_is_none() -> None:
    machine = connected()
    machine.receive(ticked(9, "b"), 0.0)
    assert machine.receive(ticked(5, "a"), 20.0) == ()
    assert machine.is_stale(5)
    assert not machine.is_stale(9)
    assert machine.tick(25.0) == (monitor.Silent(seconds=25.0, holder="b"),)


def test_after_the_connection_is_restored_the_first_tick_counts() -> None:
    machine = connected()
    machine.receive(ticked(57, "a"), 0.0)
    machine.receive(monitor.BusLost(), 1.0)
    machine.receive(BACK, 2.0)
    assert not machine.is_stale(1)
    machine.receive(ticked(1, "b"), 3.0)
    assert (machine.term, machine.is_stale(1), machine.is_stale(0)) == (1, False, True)


def test_terms_that_begin_again_count_after_a_silence() -> None:
    machine = connected()
    machine.receive(ticked(900, "b"), 0.0)
    machine.tick(25.0)
    assert machine.receive(ticked(1, "c"), 30.0) == (monitor.Recovered(seconds=30.0, holder="c"),)
    assert machine.term == 1


@given(
    st.lists(
        st.tuples(
            st.floats(min_value=0, max_value=40),
            st.one_of(
                st.none(), st.sampled_from([LOST, BACK]), st.builds(ticked, st.integers(1, 9))
            ),
        )
    )
)
def test_silence_and_its_end_take_turns(
    steps: list[tuple[float, monitor.Input | None]],
) -> None:
    machine = monitor.Watchdog(patience_s=60)
    now = 0.0
    reported: list[monitor.Output] = []
    for wait_s, event in steps:
        now += wait_s
        reported += machine.tick(now)
        deadline = machine.next_deadline()
        assert deadline is None or deadline > now
        if event is not None:
            reported += machine.receive(event, now)
    kinds = [type(output) for output in reported]
    assert kinds == [monitor.Silent, monitor.Recovered] * (len(kinds) // 2) + [monitor.Silent] * (
        len(kinds) % 2
    )
