"""Which pods count as slow, and for how long."""

import pytest

from muster_fuse.kernel import job_history


def slow_for(history: job_history.JobHistory, now: float) -> float:
    """Return for how many of the next thousand seconds a history counts as slow."""
    return sum(history.is_slow(now + second) for second in range(1000))


@pytest.mark.parametrize(
    ("took_s", "is_waiting", "seconds"),
    [(0.5, False, 0), (0.51, False, 30), (2.0, True, 0), (2.01, True, 30)],
)
def test_a_pod_is_slow_for_half_a_minute_after_a_job_that_was_not_quick(
    took_s: float, seconds: int, *, is_waiting: bool
) -> None:
    history = job_history.JobHistory()
    assert slow_for(history, 0.0) == 0
    history.record(took_s=took_s, is_waiting=is_waiting, now=100.0)
    assert slow_for(history, 100.0) == seconds


def test_each_further_slow_job_doubles_the_time_up_to_ten_minutes() -> None:
    history = job_history.JobHistory()
    now, seconds = 0.0, []
    for _ in range(7):
        history.record(took_s=1.0, is_waiting=False, now=now)
        seconds.append(slow_for(history, now))
        now += seconds[-1]
    assert seconds == [30, 60, 120, 240, 480, 600, 600]
    # ten minutes without a slow job
    now += 601
    history.record(took_s=1.0, is_waiting=False, now=now)
    assert slow_for(history, now) == 30


def test_the_brokers_own_socket_is_never_slow() -> None:
    history = job_history.JobHistory(can_be_slow=False)
    history.record(took_s=60.0, is_waiting=False, now=0.0)
    assert not history.is_slow(0.0)
