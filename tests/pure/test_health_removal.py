"""Plugins that are removed permanently: the node is removed, or no longer selected."""

from dataclasses import dataclass

import pytest

from muster import vocabulary
from muster.vocabulary import AlertKind, AlertState, StopReason, Verdict
from muster_health.model import signals
from tests.worlds.detector_fleet import GPU, ZERO, Plugin, World, running

FIRING, RESOLVED = AlertState.FIRING, AlertState.RESOLVED
DAY_S = 86_400.0


@dataclass
class Gone(Plugin):
    """A plugin whose pod, and perhaps also its node, no longer exists in Kubernetes."""

    node_gone: bool = False

    def facts(self, now: float) -> signals.Facts:
        if self.node_gone:
            return signals.Facts(exists=False)
        return signals.Facts(exists=True, lease_age_s=now - self.lease_at, ready=True, pods=())


def remembered(world: World) -> list[str]:
    return sorted(key for key in world.stored if not key.startswith(vocabulary.FLEET))


def expect(world: World, *nodes: str) -> None:
    where = {node: signals.Expected(age_s=500.0) for node in nodes}
    for service in world.services:
        service.feed(signals.ExpectedNodes(plugin="p", nodes=where))


def scaled_down(*, node_gone: bool = False, **how: object) -> World:
    """Return a world in which b still sends heartbeats, but is no longer expected."""
    world = World("a", "b", **how)  # type: ignore[arg-type]  # keywords
    world.plugins["b"] = Gone("b", node_gone=node_gone)
    world.run(10.0)
    expect(world, "a")
    return world


@pytest.mark.parametrize("node_gone", [True, False])
@pytest.mark.parametrize("act", ["stop", "kill", "cut", "down", "freeze"])
def test_a_plugin_that_is_no_longer_expected_leaves_without_an_alert(
    act: str,
    node_gone: bool,  # noqa: FBT001  # a case
) -> None:
    world = scaled_down(node_gone=node_gone)
    world.run(2.0)
    getattr(world, act)("b")
    world.run(600.0)
    assert (world.story("b"), remembered(world)) == ([], ["a.p"])
    assert len([*world.services[0].detector.plugins()]) == 1


def test_open_alerts_of_a_removed_plugin_are_resolved() -> None:
    world = scaled_down()
    world.turn("b", "1")
    world.run(5.0)
    assert world.story("b") == [(AlertKind.DEVICE_UNHEALTHY, FIRING)]
    world.stop("b")
    world.run(5.0)
    assert world.story("b")[1:] == [(AlertKind.DEVICE_UNHEALTHY, RESOLVED)]
    assert world.verdicts("b")[-1] is Verdict.MAINTENANCE


def test_a_plugin_that_goes_on_where_it_is_not_to_be_is_watched() -> None:
    world = scaled_down()
    world.run(100.0)
    world.part("b")
    world.run(20.0)
    assert world.story("b") == [(AlertKind.DEREGISTERED, FIRING)]


def test_a_plugin_that_is_expected_again_is_missed() -> None:
    world = scaled_down()
    expect(world, "a", "b")
    world.kill("b")
    world.run(30.0)
    assert world.story("b") == [(AlertKind.PLUGIN_DOWN, FIRING)]


def test_a_fleet_that_comes_and_goes_leaves_nothing_behind() -> None:
    nodes = [f"n{number}" for number in range(30)]
    world = World("a", *nodes)
    for node in nodes:
        world.plugins[node] = Gone(node, node_gone=True)
    world.run(10.0)
    for number, node in enumerate(nodes):
        expect(world, "a", *nodes[number + 1 :])
        world.stop(node)
        world.run(7.0)
    world.run(400.0)
    assert (world.alerts(), remembered(world)) == ([], ["a.p"])


def test_without_a_cluster_a_plugin_that_stopped_as_planned_is_forgotten_after_a_day() -> None:
    world = World("b", has_cluster=False)
    world.run(10.0)
    world.stop("b")
    world.run(2.0)
    world.interval_s = 600.0
    for _ in range(3):
        world.run(DAY_S / 4)
        world.crash(60.0)
    assert world.story("b") == [(AlertKind.MAINTENANCE_OVERDUE, FIRING)]
    world.run(DAY_S / 4)
    assert world.story("b")[1:] == [(AlertKind.MAINTENANCE_OVERDUE, RESOLVED)]
    assert remembered(world) == []


def test_what_is_critical_has_its_turn_before_what_is_not() -> None:
    nodes = [f"n{number:02}" for number in range(120)]
    world = World("a", *nodes)
    world.run(10.0)
    for node in nodes:
        world.plugins[node].short = "one of two"
    world.run(20.0)
    world.kill("a")
    world.run(8.0)
    waiting = {node for node, kind, _ in world.alerts() if kind is AlertKind.DEVICES_SHORT}
    assert ("a", AlertKind.PLUGIN_DOWN, "") in world.alerts()
    assert len(waiting) < len(nodes)


def other(node: str, seq: int) -> vocabulary.Heartbeat:
    resource = vocabulary.ResourceBeat(
        name=GPU, streams=1, probe_ok=True, probe_age_s=0.0, devices=2, healthy=2
    )
    return vocabulary.Heartbeat(
        node=node, plugin="q", instance="q", seq=seq, interval_s=1.0, resources=(resource,)
    )


def test_when_the_plugin_that_reports_a_dead_node_leaves_the_next_one_reports_it() -> None:
    world = running("a")
    for seq in range(5):
        world.services[0].feed(signals.HeartbeatArrived(heartbeat=other("a", seq)))
        world.run(1.0)
    world.down("a")
    world.run(40.0)
    first = who(world)
    assert len(first) == 1
    for _ in range(2):
        world.crash(5.0)
        world.run(60.0)
    assert who(world) == first == ["q"]
    world.services[0].feed(
        signals.ExpectedNodes(plugin="q", nodes={"a": signals.Expected(age_s=0)})
    )
    world.services[0].feed(signals.ExpectedNodes(plugin="q", nodes={}))
    world.run(5.0)
    assert who(world) == ["p"]
    world.mend("a")
    world.run(30.0)
    assert who(world) == []
    world.kill("a")
    world.run(30.0)
    assert world.alerts() == [("a", AlertKind.PLUGIN_DOWN, "")]


def who(world: World) -> list[str]:
    firing: dict[str, str] = {}
    for event in world.published.values():
        if isinstance(event, vocabulary.AlertChanged):
            firing[event.fingerprint] = event.plugin
            if event.state is RESOLVED:
                del firing[event.fingerprint]
    return sorted(firing.values())


def test_an_announced_stop_where_the_plugin_is_expected_is_waited_for() -> None:
    world = running("a")
    event = vocabulary.PluginStopping(node="a", at=ZERO, plugin="p", reason=StopReason.SIGNAL)
    assert event.expected_return_s == 0.0
    world.stop("a")
    world.run(320.0)
    assert world.story("a") == [(AlertKind.MAINTENANCE_OVERDUE, FIRING)]


def stored_inventory(node: str, plugin: str) -> signals.FromPlugin:
    """Return an inventory that the stream has stored, as each new process reads it."""
    event = vocabulary.InventoryReported(node=node, at=ZERO, plugin=plugin, devices=())
    return signals.FromPlugin(event=event, instance="q", sequence=1)


def test_a_forgotten_plugin_stays_forgotten_when_its_stored_inventory_is_read_again() -> None:
    world = scaled_down()
    world.stop("b")
    world.run(5.0)
    assert remembered(world) == ["a.p"]
    del world.plugins["b"]
    world.crash(5.0)
    world.services[0].feed(stored_inventory("b", "p"))
    world.run(60.0)
    assert (world.story("b"), remembered(world)) == ([], ["a.p"])
    assert [each.key for each in world.services[0].detector.plugins()] == ["a.p"]


def test_an_inventory_that_arrives_before_the_first_heartbeat_counts_with_it() -> None:
    world = running("a")
    broken = vocabulary.Device(id="0", resource=GPU, health=vocabulary.Health.UNHEALTHY)
    event = vocabulary.InventoryReported(node="b", at=ZERO, plugin="q", devices=(broken,))
    world.services[0].feed(signals.FromPlugin(event=event, instance="q", sequence=1))
    world.run(0.5)
    assert world.story("b") == []
    world.services[0].feed(signals.HeartbeatArrived(heartbeat=other("b", 1)))
    world.run(0.5)
    assert world.story("b") == [(AlertKind.DEVICE_UNHEALTHY, FIRING)]


def test_a_plugin_that_is_not_configured_and_announced_its_stop_is_in_maintenance() -> None:
    world = running("a")
    for seq in range(5):
        world.services[0].feed(signals.HeartbeatArrived(heartbeat=other("a", seq)))
        world.run(1.0)
    stop = vocabulary.PluginStopping(node="a", at=ZERO, plugin="q", reason=StopReason.SIGNAL)
    world.services[0].feed(signals.FromPlugin(event=stop, instance="q", sequence=2))
    world.run(60.0)
    world.crash(5.0)
    world.services[0].feed(stored_inventory("a", "q"))
    world.run(60.0)
    verdicts = {each.plugin: each.verdict for each in world.services[0].detector.reached()}
    assert (verdicts, world.alerts()) == ({"p": Verdict.HEALTHY, "q": Verdict.MAINTENANCE}, [])
