"""Which nodes health tracks: those of Kubernetes, or a limited number until these are listed."""

from muster import vocabulary
from muster_health.model import config, limits, signals, snapshot
from tests.worlds.detector_fleet import World


def beat(node: str, plugin: str = "p") -> signals.HeartbeatArrived:
    """Return a heartbeat from a node."""
    return signals.HeartbeatArrived(
        heartbeat=vocabulary.Heartbeat(
            node=node, plugin=plugin, instance="i", seq=1, interval_s=1.0
        )
    )


def saved(node: str) -> signals.Restored:
    """Return a saved state for a node."""
    state = snapshot.Snapshot(
        node=node, plugin="p", state=snapshot.State.HEALTHY, interval_s=1.0, instance="i", seq=1
    )
    return signals.Restored(state=state)


def tracked(world: World) -> set[str]:
    """Return the tracked nodes, as the reader of heartbeats gets them."""
    _, nodes = world.services[0].detector.nodes()
    return set(nodes)


def refusals(world: World) -> list[tuple[limits.Refusal | None, str]]:
    """Return the reason and the node of each refusal."""
    return [
        (out.refusal, out.node)
        for out in world.noted
        if isinstance(out, signals.Noted) and out.note is signals.Note.REFUSED
    ]


def test_only_nodes_that_kubernetes_has_named_are_tracked() -> None:
    world = World("a")
    service = world.services[0]
    service.feed(beat("invented"))
    for node in ("a", "b"):
        service.feed(signals.NodeOffers(node=node, offers={}))
    assert tracked(world) == {"a", "b", "invented"}
    service.feed(signals.NodesListed())
    assert tracked(world) == {"a", "b"}
    service.feed(beat("invented"))
    service.feed(saved("saved"))
    service.feed(beat("b"))
    assert tracked(world) == {"a", "b"}
    assert {plugin.node for plugin in service.detector.plugins()} == {"a", "b"}
    assert refusals(world) == [
        (limits.Refusal.UNKNOWN_NODE, "invented"),
        (limits.Refusal.UNKNOWN_NODE, "saved"),
    ]


def test_a_node_that_joins_later_is_tracked_and_one_that_left_is_not() -> None:
    world = World("a")
    service = world.services[0]
    service.feed(signals.NodeOffers(node="a", offers={}))
    service.feed(signals.NodesListed())
    service.feed(signals.NodeOffers(node="new", offers={}))
    service.feed(beat("new"))
    assert tracked(world) == {"a", "new"}
    service.feed(signals.NodeOffers(node="empty", offers={}))
    service.feed(signals.NodeOffers(node="empty", offers=None))
    assert tracked(world) == {"a", "new"}


def test_without_kubernetes_only_so_many_nodes_are_tracked_restored_ones_included() -> None:
    world = World("a", has_cluster=False, bounds=config.Bounds(nodes=50))
    service = world.services[0]
    for number in range(30):
        service.feed(saved(f"saved-{number}"))
    for number in range(1_000):
        service.feed(beat(f"invented-{number}"))
    assert len(tracked(world)) == 50
    assert {f"saved-{number}" for number in range(30)} <= tracked(world)
    assert {reason for reason, _ in refusals(world)} == {limits.Refusal.NODES}


def test_a_node_may_have_eight_plugins() -> None:
    world = World("a")
    service = world.services[0]
    for number in range(20):
        service.feed(beat("a", f"p{number}"))
    assert len(list(service.detector.plugins())) == 8
    assert refusals(world) == [(limits.Refusal.PLUGINS, "a")] * 13


def test_the_number_of_the_nodes_changes_whenever_they_do() -> None:
    world = World("a")
    service = world.services[0]
    versions = [service.detector.nodes()[0]]
    for event in (
        beat("b"),
        signals.NodeOffers(node="c", offers={}),
        signals.NodeOffers(node="c", offers=None),
    ):
        service.feed(event)
        versions.append(service.detector.nodes()[0])
    assert versions == sorted(set(versions))
    service.feed(beat("b"))
    assert service.detector.nodes()[0] == versions[-1]
