"""What a hostile or unlucky world did to the detector once, each as a rule that holds since."""

from dataclasses import dataclass

from muster.vocabulary import AlertKind, Verdict
from muster_health import facts, signals
from tests.pure.health_world import Plugin, World


@dataclass
class Told(Plugin):
    """A plugin of which Kubernetes says what it likes."""

    known: facts.Facts | None = None

    def facts(self, now: float) -> facts.Facts:
        return self.known or super().facts(now)


def world_of(*nodes: str, expected: bool = True, **how: object) -> World:
    """Return a world in which all are well, and expected."""
    world = World(*nodes, **how)  # type: ignore[arg-type]  # by name
    world.plugins = {node: Told(node, interval_s=world.interval_s) for node in nodes}
    if expected:
        expect(world, *nodes)
    world.run(10.0)
    return world


def expect(world: World, *nodes: str, causes: tuple[str, ...] = ()) -> None:
    where = {node: facts.Expected(age_s=500.0, causes=causes) for node in nodes}
    hear(world, signals.ExpectedNodes(plugin="p", nodes=where))


def hear(world: World, event: signals.Input) -> None:
    for service in world.services:
        service.feed(event)


def say(world: World, node: str, known: facts.Facts | None) -> None:
    plugin = world.plugins[node]
    assert isinstance(plugin, Told)
    plugin.known = known


def test_a_node_that_is_gone_by_one_way_of_knowing_and_expected_by_another_is_overdue() -> None:
    world = world_of("a", "b")
    for node in ("a", "b"):
        world.kill(node)
        say(world, node, facts.Facts(exists=False))
    world.run(20.0)
    assert world.verdicts("a")[-1] is Verdict.MAINTENANCE
    assert world.alerts() == []
    expect(world, "a")
    world.run(320.0)
    assert world.alerts() == [("a", AlertKind.MAINTENANCE_OVERDUE, "")]
