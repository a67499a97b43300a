"""The state of watched plugins after a restart of health."""

import pytest

from muster import vocabulary
from muster.vocabulary import AlertKind, Verdict, WatchedFinding
from muster_health.fleet import detector
from muster_health.model import config, signals, snapshot
from tests.worlds.detector_fleet import ZERO
from tests.worlds.watched_fleet import (
    AMD,
    DOWN,
    FIRING,
    NAME,
    RESOLVED,
    WELL,
    finds,
    tracked,
    verdicts,
    world_of,
)


@pytest.mark.parametrize("finding", [DOWN, WELL, finds(WatchedFinding.TWO_SERVERS)])
def test_a_new_health_neither_repeats_nor_ends_an_alert(finding: vocabulary.Watched) -> None:
    world = world_of("a", services=2)
    world.observe("a", finding)
    world.run(5.0)
    before = dict(world.published)
    world.crash(3.0)
    world.run(60.0)
    world.report("a")
    world.run(60.0)
    assert {key: event for key, event in world.published.items() if key not in before} == {}
    if finding is not WELL:
        world.observe("a", WELL)
        world.run(60.0)
        assert (world.alerts(), verdicts(world, "a")[-1]) == ([], Verdict.HEALTHY)


def test_a_restarted_health_with_no_agent_keeps_the_alert_and_shows_it() -> None:
    world = world_of("a")
    world.observe("a", DOWN)
    world.run(5.0)
    world.kill("a")
    world.crash(3.0)
    world.run(60.0)
    assert ("a", AlertKind.PLUGIN_DOWN, "") in world.alerts()
    shown = tracked(world).shown(world.services[0].clock)
    assert (shown["verdict"], shown["text"], shown["agent"]) == (
        Verdict.PLUGIN_DOWN,
        "refused for 2 s",
        "p",
    )


def test_a_planned_stop_is_overdue_on_time_after_a_restart_of_health() -> None:
    world = world_of("a")
    world.plugins["a"].others = ()
    world.observe("a", DOWN)
    world.run(100.0)
    world.crash(3.0)
    world.run(190.0)
    assert world.story("a") == []
    world.run(20.0)
    assert world.story("a") == [(AlertKind.MAINTENANCE_OVERDUE, FIRING)]


def test_alerts_that_outlive_all_saved_state_stay_until_the_agent_reports() -> None:
    world = world_of("a")
    world.observe("a", DOWN)
    world.run(5.0)
    alerts = [e for e in world.published.values() if isinstance(e, vocabulary.AlertChanged)]
    (state,) = snapshot.of_alerts(alerts)
    assert (state.watched, state.plugin) == (vocabulary.Watched(name=AMD), NAME)
    world.stored = {state_key(state): snapshot.encode(state)}
    world.crash(3.0)
    world.run(60.0)
    assert world.story("a") == [(AlertKind.PLUGIN_DOWN, FIRING)]
    world.report("a")
    world.run(5.0)
    assert world.story("a") == [(AlertKind.PLUGIN_DOWN, FIRING)]
    world.observe("a", WELL)
    world.run(60.0)
    assert world.story("a")[-1] == (AlertKind.PLUGIN_DOWN, RESOLVED)


def state_key(state: snapshot.Snapshot) -> str:
    return snapshot.key_of(state.node, state.plugin)


def test_a_state_of_another_name_is_not_used() -> None:
    state = snapshot.Snapshot(
        node="a",
        plugin="watched-other-0000",
        state=snapshot.State.FAILING,
        interval_s=5.0,
        watched=DOWN,
    )
    with pytest.raises(ValueError, match="is not the plugin of amd"):
        snapshot.decode(snapshot.encode(state))


def test_a_node_that_left_while_health_was_away_takes_its_watched_plugins_with_it() -> None:
    before = detector.Detector(config.Detection(), runbook_url="", at_zero=ZERO)
    before.receive(signals.BusBack(at=ZERO), 0.0)
    heartbeat = vocabulary.Heartbeat(node="a", plugin="p", instance="i", seq=1, interval_s=5.0)
    observed = vocabulary.PluginObserved(node="a", plugin="p", at=ZERO, watched=WELL)
    reported = signals.FromPlugin(event=observed, instance="i", sequence=1, position=1)
    outs = before.receive(signals.HeartbeatArrived(heartbeat=heartbeat), 1.0)
    outs += before.receive(reported, 1.0)
    outs += before.tick(1.1)
    stored = {out.key: out.value for out in outs if isinstance(out, signals.Store)}
    assert len(stored) == 2

    after = detector.Detector(config.Detection(), runbook_url="", at_zero=ZERO, leader=None)
    after.receive(signals.BusBack(at=ZERO), 0.0)
    for value in stored.values():
        after.receive(signals.Restored(state=snapshot.decode(value)), 0.1)
    after.receive(signals.Leadership(revision=7), 0.2)
    assert {plugin.key for plugin in after.plugins()} == set(stored)
    after.receive(signals.NodeOffers(node="b", offers={}), 0.3)
    outs = after.receive(signals.NodesListed(), 0.3)
    removed = [out.key for out in outs if isinstance(out, signals.Store) and not out.value]
    assert (sorted(removed), list(after.plugins())) == (sorted(stored), [])
