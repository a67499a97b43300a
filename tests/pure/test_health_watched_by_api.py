"""Watched plugins whose failure only the Kubernetes API shows."""

import msgspec

from muster import vocabulary
from muster.vocabulary import AlertKind, Verdict, WatchedFinding, WatchedKind
from muster_health.model import limits, signals
from tests.worlds.detector_fleet import World
from tests.worlds.watched_fleet import (
    AMD,
    DOWN,
    LAGS,
    POD,
    SHOWN,
    WELL,
    published,
    show,
    verdicts,
    world_of,
)


def test_what_the_api_alone_shows_leads_to_a_verdict_until_it_is_over() -> None:
    world = World("a")
    world.run(5.0)
    show(world, vocabulary.Watched(name=AMD))
    assert len(list(world.services[0].detector.plugins())) == 1
    world.plugins["a"].others = (POD,)
    show(world, SHOWN)
    world.run(2.0)
    reached = published(world, "a")[-1]
    assert (reached.verdict, reached.evidence[0].source) == (Verdict.PLUGIN_DOWN, "kubernetes")
    detector = world.services[0].detector
    plugins = detector.shown_plugins(world.services[0].clock, detector.nodes()[1])
    (shown,) = (plugin for plugin in plugins if "watched" in plugin)
    assert (shown["observed"], shown["agent"]) == (True, "")
    show(world, vocabulary.Watched(name=AMD))
    world.run(20.0)
    assert (verdicts(world, "a")[-1], world.alerts()) == (Verdict.HEALTHY, [])


def test_a_node_that_offers_devices_again_does_not_contradict_what_the_api_showed_before() -> None:
    world = World("a")
    world.run(5.0)
    world.plugins["a"].others = (POD,)
    world.offer_other("a", AMD, 0)
    show(world, msgspec.structs.replace(SHOWN, finding=WatchedFinding.NOT_REGISTERED))
    world.run(5.0)
    # the plugin is back; the API is read only every minute
    world.offer_other("a", AMD, 4)
    world.run(55.0)
    show(world, vocabulary.Watched(name=AMD))
    world.run(30.0)
    assert verdicts(world, "a") == [Verdict.DEREGISTERED, Verdict.HEALTHY]
    assert not any(
        LAGS in each.observed for event in published(world, "a") for each in event.evidence
    )


def test_an_agent_on_the_node_knows_better_than_the_api() -> None:
    world = world_of("a")
    show(world, SHOWN)
    world.run(60.0)
    assert verdicts(world, "a") == [Verdict.HEALTHY]
    world.observe("a", DOWN)
    world.run(5.0)
    show(world, vocabulary.Watched(name=AMD))
    world.crash(3.0)
    show(world, vocabulary.Watched(name=AMD))
    world.run(60.0)
    assert world.alerts() == [("a", AlertKind.PLUGIN_DOWN, "")]


def test_what_only_the_api_shows_of_a_driver_counts_beside_the_agent() -> None:
    world = world_of("a")
    world.observe("a", msgspec.structs.replace(WELL, kind=WatchedKind.DRA_DRIVER))
    stale = vocabulary.Watched(
        name=AMD, kind=WatchedKind.DRA_DRIVER, finding=WatchedFinding.FEWER_DEVICES
    )
    show(world, stale)
    world.run(5.0)
    assert verdicts(world, "a")[-1] is Verdict.MISMATCH


def test_an_observation_of_an_unknown_node_is_refused() -> None:
    world = world_of("a")
    world.services[0].feed(signals.NodeOffers(node="a", offers={}))
    world.services[0].feed(signals.NodesListed())
    show(world, SHOWN, "elsewhere")
    refused = [out for out in world.noted if isinstance(out, signals.Noted) and out.refusal]
    assert {out.refusal for out in refused} == {limits.Refusal.UNKNOWN_NODE}
