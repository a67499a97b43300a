"""What a node may report about watched plugins, and how much of it is stored."""

import msgspec

from muster import vocabulary
from muster.vocabulary import AlertKind, Verdict, WatchedFinding
from muster_health.model import limits, signals
from tests.worlds.detector_fleet import World
from tests.worlds.watched_fleet import (
    AMD,
    DOWN,
    NAME,
    SHOWN,
    WELL,
    finds,
    published,
    show,
    tracked,
    verdicts,
    world_of,
)


def test_a_node_cannot_have_more_watched_plugins_than_the_limit() -> None:
    world = world_of("a", "b")
    for number in range(200):
        world.observe("a", vocabulary.Watched(name=f"x.example/{number}"))
    world.run(10.0)
    detector = world.services[0].detector
    on_a = [plugin for plugin in detector.plugins() if plugin.node == "a"]
    assert len(on_a) == 1 + vocabulary.WATCHED_MAX
    refused = [out for out in world.noted if isinstance(out, signals.Noted) and out.refusal]
    assert {out.refusal for out in refused} == {limits.Refusal.WATCHED}
    assert len(refused) == 200 + 1 - vocabulary.WATCHED_MAX
    world.observe("b", DOWN)
    world.run(5.0)
    assert verdicts(world, "b")[-1] is Verdict.PLUGIN_DOWN


def test_a_plugin_cannot_call_itself_a_watched_one() -> None:
    world = world_of("a")
    heartbeat = msgspec.structs.replace(world.plugins["a"].beat(world.now), plugin=NAME)
    world.services[0].feed(signals.HeartbeatArrived(heartbeat=heartbeat))
    other = msgspec.structs.replace(heartbeat, plugin="watched-x-0000")
    world.services[0].feed(signals.HeartbeatArrived(heartbeat=other))
    refused = [out for out in world.noted if isinstance(out, signals.Noted) and out.refusal]
    assert {out.refusal for out in refused} == {limits.Refusal.RESERVED}
    assert len(list(world.services[0].detector.plugins())) == 2


def test_a_node_that_alternates_between_findings_is_asked_about_seldom() -> None:
    world = world_of("a")
    before = len(world.asked)
    for number in range(300):
        world.observe("a", [DOWN, finds(WatchedFinding.NO_ANSWER)][number % 2])
        world.run(0.2)
    assert len(world.asked) - before <= 60.0 / 10.0 + 3
    assert len(published(world, "a")) <= 60.0 / 15.0 + 2


def test_an_agent_that_makes_up_names_without_end_is_refused() -> None:
    world = world_of("a")
    for number in range(200):
        name = f"x.example/{number}"
        world.observe("a", vocabulary.Watched(name=name))
        world.unwatch("a", name)
    world.run(60.0)
    verdicts = [e for e in world.published.values() if isinstance(e, vocabulary.VerdictChanged)]
    assert 0 < len([event for event in verdicts if event.watched]) <= (vocabulary.WATCHED_MAX + 1)
    refused = [out for out in world.noted if isinstance(out, signals.Noted) and out.refusal]
    assert len(refused) == 200 - vocabulary.WATCHED_MAX


def test_made_up_names_do_not_keep_out_a_resource_that_the_node_offers() -> None:
    world = World("a")
    world.run(5.0)
    for number in range(200):
        name = f"x.example/{number}"
        world.observe("a", vocabulary.Watched(name=name))
        world.unwatch("a", name)
    world.offer_other("a", AMD, 4)
    world.observe("a", WELL)
    world.observe("a", DOWN)
    world.run(5.0)
    assert verdicts(world, "a")[-1] is Verdict.PLUGIN_DOWN


def test_alerts_of_made_up_plugins_do_not_delay_that_of_the_agent_itself() -> None:
    world = World("a")
    world.run(5.0)
    for number in range(vocabulary.WATCHED_MAX):
        finding = WatchedFinding.NO_ANSWER
        world.observe("a", vocabulary.Watched(name=f"x.example/{number}", finding=finding))
    world.run(10.0)
    assert len(world.alerts()) < vocabulary.WATCHED_MAX
    world.part("a")
    world.run(10.0)
    assert ("a", AlertKind.DEREGISTERED, "") in world.alerts()


def test_an_agent_that_does_not_know_what_to_expect_hides_nothing_that_the_api_shows() -> None:
    world = World("a")
    world.run(5.0)
    world.observe("a", vocabulary.Watched(name=AMD, listed=0))
    show(world, SHOWN)
    world.run(5.0)
    assert verdicts(world, "a")[-1] is Verdict.PLUGIN_DOWN
    world.offer_other("a", AMD, 4)
    world.observe("a", WELL)
    world.run(20.0)
    assert verdicts(world, "a")[-1] is Verdict.HEALTHY


def test_no_name_can_be_made_up_that_stands_for_another_plugin() -> None:
    names = [
        f"nvidia.com/gpu{'!' * (number % 97)}{'.' * (number // 97)}" for number in range(9_000)
    ]
    plugins = {vocabulary.watched_plugin(name) for name in names}
    assert len(plugins) == len(names)
    assert {plugin.rpartition("-")[0] for plugin in plugins} == {"watched-nvidia-com-gpu"}
    assert len(vocabulary.watched_plugin("x" * 253)) <= 63


def test_what_is_kept_of_an_observation_is_bounded() -> None:
    world = world_of("a")
    long = "x" * 2048
    huge = msgspec.structs.replace(
        DOWN, text=long, socket=long, process=long, pod=long, pods=(long,) * 20
    )
    world.observe("a", huge)
    world.run(5.0)
    assert len(world.stored[tracked(world).key]) < 8_000
