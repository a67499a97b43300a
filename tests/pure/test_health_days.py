"""No false alarm: the real detector, a virtual clock, plugins that are all well."""

import pytest

from tests.worlds import healthy_fleet


@pytest.mark.parametrize(
    "model",
    [healthy_fleet.Model(), healthy_fleet.Model(loss=0.01), healthy_fleet.Model(pause_s=3.0)],
    ids=str,
)
def test_a_thousand_plugins_that_are_well_raise_no_alert_in_a_day(
    model: healthy_fleet.Model,
) -> None:
    found = healthy_fleet.simulate(1000, 1.0, model)

    assert found.alerts == []
    # the day was not idle: there was something to be suspicious of
    assert found.notes["suspected"] > 50
    assert found.verdicts["HEALTHY recovered"] > 0
