"""The alert about a full stream that removes messages too early."""

from muster import vocabulary
from muster.vocabulary import FLEET, AlertKind, AlertState
from muster_health.model import signals
from tests.worlds.detector_fleet import World

EARLY = "MUSTER_EVENTS has 512 of 512 MiB, and its oldest message is 40 s old"


def check(world: World, *early: str) -> None:
    for service in world.services:
        service.feed(signals.StreamsChecked(early=early))
    world.run(15.0)


def test_a_stream_that_removes_messages_too_early_is_an_alert_until_it_no_longer_does() -> None:
    world = World("a")
    world.run(30.0)
    check(world)
    assert world.alerts() == []
    check(world, EARLY)
    check(world, EARLY)
    (alert,) = (e for e in world.published.values() if isinstance(e, vocabulary.AlertChanged))
    assert (alert.node, alert.kind, alert.severity, alert.state) == (
        FLEET,
        AlertKind.EVICTIONS,
        vocabulary.Severity.WARNING,
        AlertState.FIRING,
    )
    assert [(e.source, e.observed) for e in alert.evidence] == [("bus", EARLY)]
    check(world)
    world.run(60.0)
    assert world.alerts() == []
    assert world.story(FLEET) == [
        (AlertKind.EVICTIONS, AlertState.FIRING),
        (AlertKind.EVICTIONS, AlertState.RESOLVED),
    ]
