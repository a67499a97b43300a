"""The alert about a node that sends more than allowed: its text, its duration and its end."""

from datetime import timedelta

from muster import vocabulary
from muster.vocabulary import AlertKind, AlertState
from muster_health.fleet import noisy_nodes
from muster_health.model import limits, snapshot
from tests.worlds.detector_fleet import ZERO, World


def running(*nodes: str) -> World:
    """Return a fleet whose plugins are all HEALTHY."""
    world = World(*nodes)
    world.run(30.0)
    return world


def noisy(node: str, channel: limits.Channel = limits.Channel.HEARTBEATS) -> limits.NodeNoisy:
    """Return a report about a noisy node."""
    return limits.NodeNoisy(
        node=node,
        channel=channel,
        messages=10_400,
        bytes=680_000_000,
        seconds=2.0,
        senders=("device-plugin",),
    )


def flood(world: World, node: str, seconds: int) -> None:
    """Report the node as noisy every second."""
    for _ in range(seconds):
        for service in world.services:
            service.feed(noisy(node))
        world.run(1.0)


def test_a_noisy_node_is_an_alert_with_how_much_over_what_time_and_from_whom() -> None:
    world = running("a", "b")
    flood(world, "a", 3)
    (alert,) = (e for e in world.published.values() if isinstance(e, vocabulary.AlertChanged))
    assert (alert.node, alert.plugin, alert.kind, alert.resource, alert.change) == (
        "a",
        "health",
        AlertKind.NOISY_NODE,
        "",
        0,
    )
    assert alert.summary == "a sends more than allowed: heartbeats; the excess is not read"
    assert [(e.source, e.observed) for e in alert.evidence] == [
        ("bus", "at least 10,400 heartbeats (680.0 MB) within 2.0 s; from device-plugin")
    ]
    assert [e.summary for e in world.services[0].detector.fleet_alerts()] == [alert.summary]


def test_it_lasts_as_long_as_the_noise_and_ends_thirty_seconds_later() -> None:
    world = running("a")
    flood(world, "a", 60)
    assert world.story("a") == [(AlertKind.NOISY_NODE, AlertState.FIRING)]
    world.run(25.0)
    assert world.alerts() == [("a", AlertKind.NOISY_NODE, "")]
    world.run(10.0)
    assert world.story("a")[1:] == [(AlertKind.NOISY_NODE, AlertState.RESOLVED)]


def test_another_kind_of_noise_changes_the_alert() -> None:
    world = running("a")
    flood(world, "a", 1)
    world.services[0].feed(noisy("a", limits.Channel.CONNECTION))
    world.run(10.0)
    assert world.story("a") == [(AlertKind.NOISY_NODE, AlertState.FIRING)] * 2
    (shown,) = world.services[0].detector.fleet_alerts()
    assert (
        shown.summary == "a sends more than allowed: connection, heartbeats; the excess is not read"
    )


def test_after_a_restart_the_alert_is_neither_repeated_nor_left_open() -> None:
    world = running("a")
    flood(world, "a", 5)
    world.crash()
    world.run(60.0)
    assert world.story("a") == [
        (AlertKind.NOISY_NODE, AlertState.FIRING),
        (AlertKind.NOISY_NODE, AlertState.RESOLVED),
    ]


def test_without_saved_state_it_is_restored_from_the_stream_of_alerts() -> None:
    world = running("a")
    flood(world, "a", 1)
    (alert,) = (e for e in world.published.values() if isinstance(e, vocabulary.AlertChanged))
    (state,) = snapshot.of_alerts([alert])
    assert (state.node, state.plugin) == (vocabulary.FLEET, "health")
    assert [(a.kind, a.resource) for a in state.firing] == [(AlertKind.NOISY_NODE, "a")]


def test_only_so_many_nodes_are_named_at_once() -> None:
    nodes = noisy_nodes.NoisyNodes()
    named = [nodes.report(noisy(f"n{number}"), 0.0) for number in range(1_000)]
    assert named == [True] * noisy_nodes.NODES_MAX + [False] * (1_000 - noisy_nodes.NODES_MAX)
    assert len(list(nodes.alerts(ZERO))) == noisy_nodes.NODES_MAX
    assert nodes.report(noisy("later"), 31.0), "the first ones are quiet again"
    assert [a.resource for a in nodes.alerts(ZERO + timedelta(seconds=31))] == ["later"]


def test_a_check_at_the_announced_time_forgets_the_node() -> None:
    nodes = noisy_nodes.NoisyNodes()
    # 16358.56 + 30.0 - 16358.56 is less than 30.0
    nodes.report(noisy("a"), 16_358.56)
    due = nodes.expire(16_358.56)
    assert due is not None
    assert nodes.expire(due) is None
