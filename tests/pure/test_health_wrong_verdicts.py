"""Wrong verdicts in a day: the real detector, a virtual clock, healthy plugins and failures."""

import statistics

import pytest

from tests.worlds import healthy_fleet, plugin_gaps
from tests.worlds.plugin_gaps import Kind

MOST_S = {Kind.CRASHED: (2.1, 2.1), Kind.FROZEN: (13.1, 16.5), Kind.NODE_DEAD: (16.6, 21.9)}
"""The median and the longest delay with the former policy, in the same world."""


@pytest.fixture(scope="module", params=plugin_gaps.MODELS, ids=str)
def day(request: pytest.FixtureRequest) -> healthy_fleet.Result:
    """Return the result of a simulated day with 1,000 healthy plugins, and 100 of each failure."""
    return healthy_fleet.simulate(1000, 1.0, request.param, failures=100)


def test_a_thousand_healthy_plugins_raise_no_alert_in_a_day(
    day: healthy_fleet.Result,
) -> None:
    assert day.alerts == []
    # the simulation is not trivial: plugins were suspected
    assert day.notes["suspected"] > 50
    assert day.notes["refuted"] > 50


def test_a_thousand_healthy_plugins_get_one_wrong_verdict_in_a_day_at_most(
    day: healthy_fleet.Result,
) -> None:
    assert day.wrong.total() <= 1, day.wrong


def test_a_short_pause_is_called_stuck_only_while_its_kubelet_says_so_too(
    day: healthy_fleet.Result,
) -> None:
    # a freeze is reported once its pod is not Ready; a pause that ends later looks the same
    assert {name.partition(":")[0] for name in day.standing} <= {
        "STUCK silent_and_pod_not_ready",
        "STUCK silent_and_no_answer",
    }
    # of 100 pauses with a mean of 10 s, 13.5 should end between the verdict and 20 s
    assert day.standing.total() <= 30


def test_failures_get_the_right_verdict_and_no_later_than_before(
    day: healthy_fleet.Result,
) -> None:
    assert day.misnamed == {}
    for kind, (median_s, longest_s) in MOST_S.items():
        delays = day.delays[kind]
        assert len(delays) == 100
        assert statistics.median(delays) <= median_s
        assert max(delays) <= longest_s


def test_a_dead_connection_is_no_dead_process() -> None:
    resets = plugin_gaps.Model(loss=0.0, pauses_per_day=2.0, link_share=1.0, reset_share=1.0)

    result = healthy_fleet.simulate(200, 1.0, resets)

    assert result.gaps > 100
    assert {name.partition(" ")[0] for name in result.verdicts} == {"HEALTHY", "UNREACHABLE"}
    assert result.wrong == {}
