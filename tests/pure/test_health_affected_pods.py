"""Which pods the alert of a failed plugin names, and what happens if they cannot be determined."""

import pytest

from muster import vocabulary
from muster.vocabulary import AlertKind, AlertState, Verdict
from muster_health.model import config
from tests.worlds.detector_fleet import GPU, World, running

FIRING, RESOLVED = AlertState.FIRING, AlertState.RESOLVED
DOWN = AlertKind.PLUGIN_DOWN


def alerts(world: World) -> list[vocabulary.AlertChanged]:
    return [e for e in world.published.values() if isinstance(e, vocabulary.AlertChanged)]


def lists(world: World) -> int:
    """Return how often all pods of a node were listed."""
    return sum(bool(query.resources) for query in world.asked)


@pytest.mark.parametrize(
    ("action", "kind"),
    [
        ("kill", AlertKind.PLUGIN_DOWN),
        ("freeze", AlertKind.STUCK),
        ("cut", AlertKind.UNREACHABLE),
        ("down", AlertKind.NODE_DOWN),
        ("stop", AlertKind.MAINTENANCE_OVERDUE),
        ("part", AlertKind.DEREGISTERED),
    ],
)
def test_an_alert_about_a_plugin_names_the_pods_that_request_its_resources(
    action: str, kind: AlertKind
) -> None:
    world = running("a", interval_s=5.0)
    getattr(world, action)("a")
    world.run(310.0)
    assert world.named("a") == [(kind, FIRING, ("ml/train",))]
    world.mend("a")
    world.run(60.0)
    assert world.named("a")[1:] == [(kind, RESOLVED, ("ml/train",))]


def test_a_verdict_does_not_wait_for_the_pods_and_its_alert_not_for_long() -> None:
    world = running("a", "b")
    world.hush(mute=True)
    world.kill("a")
    world.part("b")
    world.run(3.5)
    assert (world.verdicts("a")[-1], world.named("a")) == (Verdict.PLUGIN_DOWN, [])
    assert (world.verdicts("b")[-1], world.named("b")) == (Verdict.DEREGISTERED, [])
    world.run(3.0)
    assert world.named("a") == [(DOWN, FIRING, ())]
    assert world.named("b") == [(AlertKind.DEREGISTERED, FIRING, ())]


@pytest.mark.parametrize("action", ["kill", "part"])
@pytest.mark.parametrize(("silent_s", "queries"), [(10.0, 2), (40.0, 3)])
def test_pods_that_were_not_listed_are_queried_again_and_then_named(
    action: str, silent_s: float, queries: int
) -> None:
    world = running("a")
    world.hush(mute=True)
    getattr(world, action)("a")
    world.run(silent_s)
    world.hush(mute=False)
    world.run(300.0)
    assert [pods for _, _, pods in world.named("a")] == [(), ("ml/train",)]
    assert lists(world) == queries


def test_an_api_that_never_lists_pods_is_queried_three_times_for_one_alert() -> None:
    world = running("a")
    world.hush(mute=True)
    world.part("a")
    world.run(900.0)
    assert (lists(world), len(world.named("a"))) == (3, 1)


def test_alerts_do_not_wait_for_slow_lists_and_name_their_pods_in_the_end() -> None:
    nodes = [f"n{number:02}" for number in range(20)]
    world = running(*nodes, "a", "b", "c")
    world.list_s = 0.5
    for node in nodes:
        world.part(node)
    world.run(40.0)
    events = [event for event in alerts(world) if event.kind is AlertKind.DEREGISTERED]
    fired = {event.node: event for event in events if event.change == 0}
    assert {event.pods for event in fired.values()} == {(), ("ml/train",)}
    times = [event.at for event in fired.values()]
    assert (max(times) - min(times)).total_seconds() < 3.5
    last = {event.node: event.pods for event in events}
    assert last == dict.fromkeys(nodes, ("ml/train",))
    assert lists(world) == 20


@pytest.mark.parametrize(("has_cluster", "queries"), [(True, 1), (False, 0)])
def test_without_the_permission_to_list_pods_the_alert_comes_at_once_without(
    *, has_cluster: bool, queries: int
) -> None:
    world = running("a", has_cluster=has_cluster)
    world.plugins["a"].holders = None
    world.part("a")
    world.run(5.0)
    assert world.named("a") == [(AlertKind.DEREGISTERED, FIRING, ())]
    assert lists(world) == queries
    event = alerts(world)[0]
    verdicts = [e for e in world.published.values() if isinstance(e, vocabulary.VerdictChanged)]
    assert (event.at - verdicts[-1].at).total_seconds() < 0.1


def test_many_pods_are_counted_and_the_first_of_them_named() -> None:
    world = running("a")
    world.hold("a", 40)
    world.kill("a")
    world.run(5.0)
    (event,) = alerts(world)
    assert event.pods == tuple(f"ml/{number:03}" for number in range(32))
    assert event.pods_total == 40


def test_pods_are_those_at_publication_however_often_the_verdict_is_reviewed() -> None:
    world = running("a")
    world.kill("a")
    world.run(150.0)
    world.hold("a", 2)
    world.run(600.0)
    assert (world.named("a"), lists(world)) == ([(DOWN, FIRING, ("ml/train",))], 1)


def test_an_alert_that_changes_is_never_resolved_while_its_pods_are_listed() -> None:
    world = running("a", interval_s=5.0)
    world.cut("a")
    world.run(60.0)
    world.hush(mute=True)
    world.down("a")
    world.run(60.0)
    world.hush(mute=False)
    world.run(120.0)
    pods = ("ml/train",)
    assert world.named("a") == [
        (AlertKind.UNREACHABLE, FIRING, pods),
        (AlertKind.UNREACHABLE, RESOLVED, pods),
        (AlertKind.NODE_DOWN, FIRING, pods),
    ]
    ended, fired = alerts(world)[1:]
    assert fired.at == ended.at


def test_a_plugin_that_never_started_has_no_resources_and_so_no_pods() -> None:
    world = World("a")
    world.kill("a")
    world.run(150.0)
    assert (world.named("a"), lists(world)) == ([(AlertKind.MISSING, FIRING, ())], 0)


def test_a_restart_of_health_keeps_the_named_pods_and_lists_none() -> None:
    world = running("a")
    world.part("a")
    world.run(10.0)
    world.hold("a", 3)
    world.crash(5.0)
    world.run(100.0)
    assert world.named("a") == [(AlertKind.DEREGISTERED, FIRING, ("ml/train",))]
    world.mend("a")
    world.run(60.0)
    assert world.named("a")[1:] == [(AlertKind.DEREGISTERED, RESOLVED, ("ml/train",))]


def test_only_the_leader_lists_pods() -> None:
    world = running("a", services=2)
    world.part("a")
    world.run(30.0)
    assert lists(world) == 1


def test_each_of_many_alerts_lists_pods_once() -> None:
    nodes = [f"n{number:02}" for number in range(80)]
    world = running(*nodes)
    for number, node in enumerate(nodes):
        world.part(node)
        if number % 5 == 4:
            world.run(11.0)
    world.run(60.0)
    fired = [event for event in alerts(world) if event.kind is AlertKind.DEREGISTERED]
    assert {event.pods for event in fired} == {("ml/train",)}
    assert (len(fired), lists(world)) == (80, 80)


def test_remediation_queries_the_cluster_as_before() -> None:
    mode = config.RemediationMode.RESTART_PLUGIN
    world = running("a", remediation=config.Remediation(mode=mode))
    world.part("a")
    world.run(90.0)
    assert [e.outcome for e in world.published.values() if hasattr(e, "outcome")] == ["acted"]
    assert {query.resources for query in world.asked} == {(), (GPU,)}


def test_alerts_held_by_the_rate_limit_list_pods_when_they_are_published() -> None:
    nodes = [f"n{number:03}" for number in range(150)]
    world = running(*nodes, interval_s=5.0)
    for node in nodes[:100]:
        world.part(node)
    published = []
    for _ in range(15):
        world.run(10.0)
        fired = [event for event in alerts(world) if event.kind is AlertKind.DEREGISTERED]
        assert lists(world) == len(fired)
        published.append(len(fired))
    assert (any(0 < many < 100 for many in published), published[-1]) == (True, 100)
    assert {event.pods for event in fired} == {("ml/train",)}


def test_no_other_alert_overtakes_one_that_waits_for_its_pods() -> None:
    world = running("a", bounds=config.Bounds(alerts_per_minute=1))
    world.hush(mute=True)
    world.part("a")
    while not lists(world):
        world.run(0.1)
    world.turn("a", "0")
    world.run(3.0)
    assert world.story("a") == [(AlertKind.DEREGISTERED, FIRING)]
    world.run(60.0)
    assert world.story("a")[1:] == [(AlertKind.DEVICE_UNHEALTHY, FIRING)]
