"""How a health service that restarts or takes over uses the state stored before."""

import json
from typing import Any

import pytest

from muster import vocabulary
from muster.vocabulary import AlertKind, AlertState, Verdict
from muster_health.model import snapshot
from tests.worlds.detector_fleet import World, running

FIRING = AlertState.FIRING
STORED_BY_THE_VERSION_BEFORE = {
    "a.p": (
        b'{"v":2,"node":"a","plugin":"p","state":"ill","interval_s":1.0,"verdict":"DEREGISTERED",'
        b'"since":"2026-11-21T00:00:27.300000Z","rule":"reports_not_registered","evidence":'
        b'[{"source":"plugin","observed":"nvidia.com/gpu: the kubelet has no ListAndWatch stream '
        b'open"}],"resources":["nvidia.com/gpu"],"accused":["nvidia.com/gpu"],"instance":"a-0",'
        b'"seq":29,"return_s":0.0,"falls":1,"order":[["a-0",1]],"bad":[{"kind":"device_unhealthy",'
        b'"resource":"nvidia.com/gpu","why":"XID 79","ids":["1"]}],"had":[["nvidia.com/gpu",2]],'
        b'"firing":[{"kind":"device_unhealthy","summary":"nvidia.com/gpu 1 on a is unhealthy: XID '
        b'79","evidence":[{"source":"plugin","observed":"1: XID 79"}],"starts_at":'
        b'"2026-11-21T00:00:20.300000Z","told_at":"2026-11-21T00:00:20.300000Z","resource":'
        b'"nvidia.com/gpu","devices":["1"],"devices_total":1},{"kind":"deregistered","summary":'
        b'"nvidia.com/gpu on a is not registered with the kubelet","evidence":[{"source":"plugin",'
        b'"observed":"nvidia.com/gpu: the kubelet has no ListAndWatch stream open"}],"starts_at":'
        b'"2026-11-21T00:00:27.320000Z","told_at":"2026-11-21T00:00:27.320000Z","pods":'
        b'["ml/train"],"pods_total":1}],"leader":1}'
    ),
    "_fleet.health": (
        b'{"v":2,"node":"_fleet","plugin":"health","state":"unknown","interval_s":0.0,'
        b'"position":3,"leader":1}'
    ),
}


@pytest.mark.parametrize("services", [1, 2])
@pytest.mark.parametrize(
    ("act", "kind"),
    [
        ("kill", AlertKind.PLUGIN_DOWN),
        ("freeze", AlertKind.STUCK),
        ("cut", AlertKind.UNREACHABLE),
        ("down", AlertKind.NODE_DOWN),
    ],
)
def test_what_failed_keeps_its_name_over_a_restart(
    act: str, kind: AlertKind, services: int
) -> None:
    world = running("a", "b", services=services)
    getattr(world, act)("a")
    world.run(90.0)
    before = world.story("a"), world.verdicts("a")
    assert before[0][-1] == (kind, FIRING)
    for _ in range(2):
        world.crash(20.0)
        world.run(300.0)
    assert (world.story("a"), world.verdicts("a")) == before


def test_what_dies_while_nobody_watches_is_down_and_not_missing() -> None:
    world = running("a", "b")
    world.kill("a")
    world.crash(20.0)
    world.run(60.0)
    assert world.verdicts("a")[1:] == [Verdict.PLUGIN_DOWN]
    assert world.story("a") == [(AlertKind.PLUGIN_DOWN, FIRING)]


def test_what_never_came_is_missing_after_a_restart_too() -> None:
    world = World("a", "b")
    world.kill("a")
    world.run(150.0)
    world.crash(20.0)
    world.run(300.0)
    assert world.verdicts("a") == [Verdict.MISSING]
    assert world.story("a") == [(AlertKind.MISSING, FIRING)]


@pytest.mark.parametrize("every_s", [20.0, 29.0])
def test_repeated_restarts_of_health_do_not_suppress_the_alert_of_a_possible_pause(
    every_s: float,
) -> None:
    world = running("a", "b")
    world.freeze("a")
    for _ in range(4):
        world.run(every_s)
        world.crash(1.0)
    world.run(every_s)
    assert world.story("a") == [(AlertKind.STUCK, FIRING)]


def test_repeated_restarts_of_health_do_not_suppress_an_overdue_alert() -> None:
    world = running("a", "b")
    world.stop("a")
    for _ in range(3):
        world.run(110.0)
        world.crash(1.0)
    world.run(30.0)
    assert world.story("a") == [(AlertKind.MAINTENANCE_OVERDUE, FIRING)]


def test_a_plugin_that_returned_while_health_was_down_has_time_to_send_a_heartbeat() -> None:
    world = running("a", "b")
    world.freeze("a")
    world.run(20.0)
    assert world.verdicts("a")[-1] is Verdict.STUCK
    world.services.clear()
    world.mend("a")
    world._replace(1000.0)  # health was down for a long time
    world.run(60.0)
    assert (world.story("a"), world.verdicts("a")[-1]) == ([], Verdict.HEALTHY)


def test_what_was_dropped_when_leadership_ended_is_published_when_it_begins_again() -> None:
    world = World("a", "b")
    world.kill("a")
    world.run(119.0)
    world.lose_lead()
    world.run(20.0)
    assert world.story("a") == []
    world.lead_again()
    world.run(5.0)
    assert (world.story("a"), world.verdicts("a")) == (
        [(AlertKind.MISSING, FIRING)],
        [Verdict.MISSING],
    )


@pytest.mark.parametrize("act", ["kill", "part", "cut"])
def test_a_lead_that_is_lost_and_won_again_repeats_and_loses_nothing(act: str) -> None:
    world = running("a", "b")
    getattr(world, act)("a")
    world.run(60.0)
    before = world.story("a"), world.verdicts("a")
    world.lose_lead()
    world.run(5.0)
    world.lead_again()
    world.run(60.0)
    assert (world.story("a"), world.verdicts("a")) == before
    world.lose_lead()
    world.mend("a")
    world.run(30.0)
    world.lead_again()
    world.run(5.0)
    assert (world.alerts(), world.verdicts("a")[-1]) == ([], Verdict.HEALTHY)


def test_what_the_version_before_stored_is_read_and_written_alike() -> None:
    for value in STORED_BY_THE_VERSION_BEFORE.values():
        assert snapshot.encode(snapshot.decode(value)) == value


def test_an_alert_of_the_version_before_goes_on_and_is_resolved() -> None:
    world = World("a", services=0)
    world.stored = dict(STORED_BY_THE_VERSION_BEFORE)
    world.plugins["a"].seq, world.plugins["a"].sequence = 29, 1
    world.plugins["a"].broken = {"1"}
    world.part("a")
    world.now = 100.0
    world.start(leads=True)
    world.run(60.0)
    assert list(world.published.values()) == []
    world.plugins["a"].broken = set()
    world.mend("a")
    world.run(60.0)
    resolved = {
        (event.kind, event.starts_at.second)
        for event in world.published.values()
        if isinstance(event, vocabulary.AlertChanged) and event.state is AlertState.RESOLVED
    }
    assert resolved == {(AlertKind.DEVICE_UNHEALTHY, 20), (AlertKind.DEREGISTERED, 27)}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"since": "0001-01-01T00:00:00Z"}, "out of range"),
        ({"remedies": ["9999-01-01T00:00:00Z"]}, "out of range"),
        ({"firing": {"evidence": []}}, "an alert has no evidence"),
        ({"firing": {"told_at": "0001-01-01T00:00:00Z"}}, "out of range"),
    ],
)
def test_state_that_nobody_could_publish_again_is_refused(
    change: dict[str, Any], problem: str
) -> None:
    tree = json.loads(STORED_BY_THE_VERSION_BEFORE["a.p"])
    firing = change.pop("firing", {})
    tree = {**tree, **change, "firing": [{**alert, **firing} for alert in tree["firing"]]}
    with pytest.raises(ValueError, match=problem):
        snapshot.decode(json.dumps(tree).encode())
