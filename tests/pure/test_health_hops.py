"""How many modules an input passes through: few, so that the code of health is easy to follow."""

from scripts import hops


def test_a_heartbeat_passes_through_five_modules_at_most() -> None:
    each, _ = hops.heartbeat()
    assert len(each) <= hops.HEARTBEAT_MAX, each


def test_an_event_passes_through_eight_modules_at_most() -> None:
    visited, _ = hops.event()
    assert len(visited) <= hops.EVENT_MAX, visited
