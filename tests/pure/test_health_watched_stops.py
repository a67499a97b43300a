"""Planned stops and replaced pods of watched plugins."""

import dataclasses

import msgspec
import pytest

from muster import vocabulary
from muster.vocabulary import AlertKind, Verdict, WatchedFinding
from muster_health.model import signals
from muster_health.model.steps import Rule
from tests.worlds.watched_fleet import (
    AMD,
    DOWN,
    POD,
    WELL,
    finds,
    published,
    replaced,
    verdicts,
    world_of,
)


@pytest.mark.parametrize(
    ("others", "planned", "rule"),
    [
        ((dataclasses.replace(POD, deleting=True),), (), Rule.WATCHED_POD_DELETED),
        ((), (), Rule.WATCHED_POD_DELETED),
        ((dataclasses.replace(POD, age_s=3.0),), (), Rule.WATCHED_POD_REPLACED),
        ((POD,), (signals.Planned.UNSCHEDULABLE,), Rule.WATCHED_NODE_PLANNED),
        ((POD,), (signals.Planned.TO_BE_DELETED,), Rule.WATCHED_NODE_PLANNED),
    ],
)
@pytest.mark.parametrize("finding", ["not_served", "socket_removed", "no_answer"])
def test_a_planned_stop_is_maintenance_and_raises_no_alert(
    others: tuple[signals.Pod, ...], planned: tuple[signals.Planned, ...], rule: Rule, finding: str
) -> None:
    world = world_of("a")
    world.plugins["a"].others = others
    world.plugins["a"].planned = planned
    world.observe("a", finds(WatchedFinding(finding)))
    world.run(30.0)
    reached = published(world, "a")[-1]
    assert (reached.verdict, reached.rule) == (Verdict.MAINTENANCE, rule)
    world.report("a")
    world.run(200.0)
    assert (world.story("a"), verdicts(world, "a")[-1]) == ([], Verdict.MAINTENANCE)
    world.observe("a", WELL)
    world.run(20.0)
    assert (world.story("a"), verdicts(world, "a")[-1]) == ([], Verdict.HEALTHY)


def test_a_plugin_that_is_not_back_after_maintenance_has_an_alert_that_says_so() -> None:
    world = world_of("a")
    world.plugins["a"].others = ()
    world.observe("a", DOWN)
    world.run(310.0)
    (alert,) = (e for e in world.published.values() if isinstance(e, vocabulary.AlertChanged))
    assert (alert.kind, alert.summary, alert.runbook) == (
        AlertKind.MAINTENANCE_OVERDUE,
        f"watched plugin {AMD} on a is overdue: it has not returned from a planned stop",
        "watched_plugin.html#maintenance_overdue",
    )
    assert alert.evidence[0].observed == "not back 300 s after its pod was deleted"


@pytest.mark.parametrize(
    "others",
    [
        (replaced(POD, age_s=3.0, restarts=2),),
        (replaced(POD, age_s=61.0),),
        (POD, replaced(POD, name="kube-system/other", deleting=True)),
        None,
    ],
)
def test_a_pod_that_was_not_replaced_explains_nothing(
    others: tuple[signals.Pod, ...] | None,
) -> None:
    world = world_of("a")
    world.plugins["a"].others = others
    world.observe("a", DOWN)
    world.run(2.0)
    assert verdicts(world, "a") == [Verdict.HEALTHY, Verdict.PLUGIN_DOWN]


@pytest.mark.parametrize(
    ("age_s", "verdict"), [(25.0, Verdict.PLUGIN_DOWN), (3.0, Verdict.MAINTENANCE)]
)
def test_a_new_pod_that_has_served_already_explains_nothing(age_s: float, verdict: Verdict) -> None:
    world = world_of("a")
    world.plugins["a"].others = (replaced(POD, age_s=3.0),)
    world.observe("a", DOWN)
    world.run(2.0)
    world.observe("a", WELL)
    world.run(20.0)
    world.plugins["a"].others = (replaced(POD, age_s=age_s),)
    world.observe("a", DOWN)
    world.run(15.0)
    assert verdicts(world, "a")[1:] == [Verdict.MAINTENANCE, Verdict.HEALTHY, verdict]


def test_a_process_that_runs_in_no_pod_is_not_excused_by_the_lack_of_one() -> None:
    world = world_of("a")
    world.plugins["a"].others = ()
    world.observe("a", msgspec.structs.replace(DOWN, process="nvidia-device-plugin (pid 77)"))
    world.run(2.0)
    assert verdicts(world, "a") == [Verdict.HEALTHY, Verdict.PLUGIN_DOWN]


def test_a_problem_that_needs_a_serving_process_is_not_excused_by_a_new_pod() -> None:
    world = world_of("a")
    world.plugins["a"].others = (replaced(POD, age_s=3.0),)
    world.observe("a", finds(WatchedFinding.NOT_REGISTERED))
    world.run(2.0)
    assert verdicts(world, "a") == [Verdict.HEALTHY, Verdict.DEREGISTERED]


@pytest.mark.parametrize(("age_s", "deleting"), [(40.0, False), (9_000.0, True)])
def test_a_pod_that_is_replaced_while_it_still_serves_is_no_split_brain(
    *, age_s: float, deleting: bool
) -> None:
    world = world_of("a")
    other = dataclasses.replace(POD, name="kube-system/amdgpu-y", uid="u-2")
    world.plugins["a"].others = (
        POD,
        dataclasses.replace(other, age_s=age_s, deleting=deleting),
    )
    world.observe("a", finds(WatchedFinding.TWO_SERVERS))
    world.run(60.0)
    assert verdicts(world, "a") == [Verdict.HEALTHY]
    world.plugins["a"].others = (POD, other)
    world.run(15.0)
    assert verdicts(world, "a")[-1] is Verdict.SPLIT_BRAIN
