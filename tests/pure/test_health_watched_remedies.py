"""Restarts of the pods of watched plugins."""

import msgspec
import pytest

from muster import vocabulary
from muster.vocabulary import Verdict, WatchedFinding, WatchedKind
from muster_health.model import config, signals
from tests.worlds.detector_fleet import World
from tests.worlds.watched_fleet import (
    POD,
    SHOWN,
    WELL,
    finds,
    replaced,
    show,
    verdicts,
    world_of,
)


@pytest.mark.parametrize("allowed", [True, False])
def test_a_pod_of_a_watched_plugin_is_restarted_only_if_that_is_allowed(allowed: bool) -> None:  # noqa: FBT001
    remediation = config.Remediation(mode=config.RemediationMode.RESTART_PLUGIN, watched=allowed)
    world = world_of("a", remediation=remediation)
    world.observe("a", finds(WatchedFinding.NO_ANSWER))
    world.run(59.0)
    assert remedies(world) == []
    world.run(5.0)
    acted = [(vocabulary.Remedy.ACTED, POD.name)]
    assert remedies(world) == (acted if allowed else [])
    world.run(300.0)
    assert len(remedies(world)) == int(allowed)


def test_what_only_the_api_shows_restarts_nothing() -> None:
    remediation = config.Remediation(mode=config.RemediationMode.RESTART_PLUGIN, watched=True)
    world = world_of("a", remediation=remediation)
    world.observe("a", msgspec.structs.replace(WELL, kind=WatchedKind.DRA_DRIVER))
    # this finding uses events, which every client that may create events can forge
    show(world, msgspec.structs.replace(SHOWN, kind=WatchedKind.DRA_DRIVER))
    world.run(120.0)
    assert verdicts(world, "a")[-1] is Verdict.PLUGIN_DOWN
    assert remedies(world) == []


@pytest.mark.parametrize(
    ("observed", "others"),
    [
        (finds(WatchedFinding.WRONG_ANSWER), (POD,)),
        (finds(WatchedFinding.FEWER_DEVICES), (POD,)),
        (finds(WatchedFinding.TWO_SERVERS), (POD,)),
        (finds(WatchedFinding.NOT_OFFERED), (POD,)),
    ],
)
def test_an_uncertain_verdict_restarts_nothing(
    observed: vocabulary.Watched, others: tuple[signals.Pod, ...]
) -> None:
    world = world_of(
        "a",
        remediation=config.Remediation(mode=config.RemediationMode.RESTART_PLUGIN, watched=True),
    )
    world.plugins["a"].others = others
    world.observe("a", observed)
    world.run(300.0)
    assert remedies(world) == []


@pytest.mark.parametrize("others", [(), None, (POD, replaced(POD, name="k/2", uid="u-2"))])
def test_without_exactly_one_known_pod_the_restart_is_refused(
    others: tuple[signals.Pod, ...] | None,
) -> None:
    world = world_of(
        "a",
        remediation=config.Remediation(mode=config.RemediationMode.RESTART_PLUGIN, watched=True),
    )
    world.plugins["a"].others = others
    world.observe("a", finds(WatchedFinding.NOT_REGISTERED))
    world.run(100.0)
    assert remedies(world) == [(vocabulary.Remedy.REFUSED, "")]


def test_while_the_agent_is_silent_nothing_is_restarted() -> None:
    world = world_of(
        "a",
        remediation=config.Remediation(mode=config.RemediationMode.RESTART_PLUGIN, watched=True),
    )
    world.observe("a", finds(WatchedFinding.NO_ANSWER))
    world.run(20.0)
    world.cut("a")
    world.run(200.0)
    assert remedies(world) == []


def remedies(world: World) -> list[tuple[vocabulary.Remedy, str]]:
    return [
        (event.outcome, event.pod)
        for event in world.published.values()
        if isinstance(event, vocabulary.RemediationDecided)
    ]
