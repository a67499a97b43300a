"""The CPU budget of scans: bounded in the long run; rare or short scans never wait."""

import pytest

from muster_plugin.discovery import inotify


def taken(pace_: inotify.CpuBudget, *, took_s: float, looks: int, idle_s: float = 0.0) -> float:
    """Return the share of the time that scans take, with the required rest after each."""
    now = 0.0
    for _ in range(looks):
        now += idle_s
        now += took_s
        now += pace_.rest_s(took_s, now)
    return looks * took_s / now


@pytest.mark.parametrize("took_s", [0.001, 0.1, 1.0])
def test_work_without_end_takes_its_share_in_the_long_run(took_s: float) -> None:
    assert taken(inotify.CpuBudget(0.2), took_s=took_s, looks=100_000) == pytest.approx(
        0.2, rel=0.05
    )


def test_work_that_is_rare_or_short_never_waits() -> None:
    assert taken(inotify.CpuBudget(0.2), took_s=0.01, looks=1000, idle_s=0.04) == pytest.approx(0.2)
    assert inotify.CpuBudget(0.2).rest_s(0.4, 5.4) == 0.0


def test_no_rest_is_longer_than_a_few_seconds() -> None:
    assert inotify.CpuBudget(0.2).rest_s(100.0, 100.0) == 5.0


def test_work_that_may_take_all_the_time_never_waits() -> None:
    assert taken(inotify.CpuBudget(1), took_s=1, looks=100) == 1


def test_one_rest_repays_even_an_expensive_scan() -> None:
    budget = inotify.CpuBudget(0.2)
    assert budget.rest_s(10.0, 10.0) == 5.0
    assert budget.rest_s(0.001, 15.0) < 0.1
