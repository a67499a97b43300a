"""Watched plugins over a day, and over random sequences of observations."""

import random
from collections.abc import Callable
from typing import Final

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from muster import vocabulary
from muster.vocabulary import AlertKind, Verdict, WatchedFinding
from muster_health.model import signals
from muster_health.plugin import watched_findings
from tests.worlds.detector_fleet import World
from tests.worlds.watched_fleet import (
    AMD,
    POD,
    WELL,
    alert_events,
    finds,
    replaced,
    tracked,
    verdicts,
    world_of,
)


def test_healthy_plugins_with_rolling_updates_raise_no_alert_in_a_day() -> None:
    nodes = [f"n{number}" for number in range(6)]
    world = world_of(*nodes)
    for node in nodes:
        world.plugins[node].interval_s = 600.0
    world.interval_s = 600.0
    world.run(1.0)
    chance = random.Random(18)  # noqa: S311  # a simulation
    for _ in range(25):
        for node in nodes:
            roll(world, node, chance)
        world.run(3_600.0 - 30.0 * len(nodes))
        for node in nodes:
            world.report(node)
    assert {event.kind for event in alert_events(world)} == set()
    assert {verdicts(world, node)[-1] for node in nodes} == {Verdict.HEALTHY}
    assert world.now > 24 * 3_600.0
    rolled = [verdict for node in nodes for verdict in verdicts(world, node)]
    assert rolled.count(Verdict.MAINTENANCE) > 100


def roll(world: World, node: str, chance: random.Random) -> None:
    """Replace a node's plugin as a DaemonSet does; the agent reports most of the stages."""
    away = finds(chance.choice([WatchedFinding.NOT_SERVED, WatchedFinding.SOCKET_REMOVED]))
    stages: list[tuple[signals.Pod, ...]] = [(replaced(POD, deleting=True),), ()]
    stages.append((replaced(POD, name="kube-system/new", uid="u-2", age_s=2.0, ready=False),))
    for pods in stages:
        world.plugins[node].others = pods
        if chance.random() < 0.7:
            world.observe(node, away)
            world.deliver()
        world.run(chance.uniform(0.1, 8.0))
    world.observe(node, WELL)
    world.deliver()
    world.run(6.0)
    world.plugins[node].others = (POD,)


OBSERVATIONS: Final = st.builds(
    lambda finding, listed, text: msgspec.structs.replace(
        WELL, finding=finding, listed=listed, text=text
    ),
    st.sampled_from(WatchedFinding),
    st.sampled_from([None, 0, 3, 4]),
    st.sampled_from(["", "seen"]),
)


PODS: Final = st.sampled_from(
    [None, (), (POD,), (replaced(POD, deleting=True),), (replaced(POD, age_s=1.0),)]
)


Step = Callable[[World], None]


def _steps() -> st.SearchStrategy[Step]:
    seconds = st.sampled_from([0.1, 0.6, 2.0, 8.0, 31.0, 120.0, 400.0])
    return st.one_of(
        OBSERVATIONS.map(lambda watched: lambda world: world.observe("a", watched)),
        PODS.map(lambda pods: lambda world: setattr(world.plugins["a"], "others", pods)),
        st.sampled_from([0, 3, 4]).map(
            lambda count: lambda world: world.offer_other("a", AMD, count)
        ),
        st.booleans().map(lambda mute: lambda world: world.hush(mute)),
        seconds.map(lambda seconds: lambda world: world.run(seconds)),
        seconds.map(lambda seconds: lambda world: world.outage(seconds)),
        seconds.map(lambda seconds: lambda world: world.crash(seconds)),
        st.sampled_from(["report", "kill", "mend", "freeze"]).map(
            lambda act: lambda world: getattr(world, act)("a")
        ),
    )


@settings(max_examples=60)
@given(st.lists(_steps(), max_size=14), OBSERVATIONS)
def test_after_any_sequence_the_alert_is_that_of_the_last_observation(
    sequence: list[Step], last: vocabulary.Watched
) -> None:
    world = world_of("a")
    for step in sequence:
        step(world)
    world.hush(mute=False)
    world.plugins["a"].others = (POD,)
    world.plugins["a"].planned = ()
    world.mend("a")
    world.observe("a", WELL)
    world.offer_other("a", AMD, 4)
    world.run(200.0)
    assert world.alerts() == []
    assert tracked(world).current_verdict is Verdict.HEALTHY
    last = msgspec.structs.replace(last, listed=4)
    world.observe("a", last)
    world.run(60.0)
    expected = watched_findings.VERDICTS.get(last.finding, (Verdict.HEALTHY, None))[0]
    assert tracked(world).current_verdict is expected
    kinds = [] if expected is Verdict.HEALTHY else [AlertKind(expected.lower())]
    assert [kind for _, kind, _ in world.alerts()] == kinds
    world.observe("a", WELL)
    world.run(200.0)
    assert (world.alerts(), tracked(world).current_verdict) == ([], Verdict.HEALTHY)
