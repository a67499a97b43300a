"""Plugins that end when something connects to them, and plugins that end for other reasons."""

import itertools

import hypothesis
import pytest
from hypothesis import strategies

from muster import vocabulary
from muster_plugin.watch import backoff
from tests.worlds.watched_node import GPU, GPU_SOCKET, Node

Finding = vocabulary.WatchedFinding
DAY_S = 24 * 3600.0
STEP_S = 0.5


class Plugin:
    """A plugin that ends at a connection, and starts again 10 s later."""

    def __init__(self, *, connections_max: int) -> None:
        self.node = Node()
        self.ends: list[float] = []
        self._connections_max = connections_max
        self._start()

    def run(self, seconds: float) -> None:
        until = self.node.now + seconds
        while self.node.now < until:
            self.node.run(STEP_S)
            if len(self.node.connections[GPU_SOCKET]) >= self._connections_max:
                self.end()

    def end(self) -> None:
        """End the plugin, and start it again 10 s later."""
        self.ends.append(self.node.now)
        self.node.counts = {}
        self.node.kill(GPU_SOCKET)
        self.node.run(10.0)
        self._start()

    def _start(self) -> None:
        self.node.serve(GPU_SOCKET)
        self.node.connections.clear()
        self.node.counts = {GPU: 8}


@pytest.mark.parametrize("connections_max", [1, 2, 3])
def test_a_plugin_that_ends_at_a_connection_is_connected_to_ever_more_rarely(
    connections_max: int,
) -> None:
    plugin = Plugin(connections_max=connections_max)
    plugin.run(DAY_S)
    gaps = [later - end for end, later in itertools.pairwise(plugin.ends)]
    assert all(gap >= 300 * connections_max for gap in gaps[1:])
    assert all(gap >= 3600 * connections_max for gap in gaps[5:])
    assert len(plugin.ends) <= 30
    # each end is reported, and so is the return
    began = [at for at, _, finding, _ in plugin.node.changes if finding is Finding.NOT_SERVED]
    assert len(began) >= len(plugin.ends)
    assert plugin.node.findings() == {GPU: Finding.NONE}


def test_what_ends_at_each_connection_is_said_where_it_is_down() -> None:
    plugin = Plugin(connections_max=1)
    plugin.run(60.0)
    assert len(plugin.ends) == 2
    node = plugin.node
    assert node.findings() == {GPU: Finding.NONE}
    while not node.connections[GPU_SOCKET]:
        node.run(STEP_S)
    node.counts = {}
    node.kill(GPU_SOCKET)
    node.run(5.0)
    (watched,) = node.model.watched
    assert watched.text == (
        f"connections to {GPU_SOCKET} are refused; its process has ended 3 times in a row just "
        "after a connection; the kubelet lists 0 of 8 devices"
    )


def test_a_plugin_that_ends_without_a_connection_is_watched_as_before() -> None:
    plugin = Plugin(connections_max=1)
    plugin.run(60.0)
    node = plugin.node
    # the next process crashes before anything has connected to it
    plugin.end()
    node.run(0.2)
    assert len(node.connections[GPU_SOCKET]) == 1


def test_a_plugin_that_crashes_by_itself_is_watched_as_before() -> None:
    plugin = Plugin(connections_max=100)
    for _ in range(5):
        plugin.node.run(20.0)
        plugin.end()
    plugin.node.run(50.0)
    assert len(plugin.node.connections[GPU_SOCKET]) == 4


@hypothesis.given(
    strategies.lists(strategies.tuples(strategies.booleans(), strategies.floats(0.0, 10.0)))
)
def test_only_ends_just_after_connections_in_a_row_lead_to_a_pause(
    events: list[tuple[bool, float]],
) -> None:
    waits = backoff.ProbeBackoff()
    now, connected_at, ends = 0.0, -10.0, 0
    for is_end, wait_s in events:
        now += wait_s
        if is_end:
            ends = ends + 1 if now - connected_at <= 1.0 else 0
            connected_at = -10.0
            waits.ended(now)
        else:
            connected_at = now
            waits.connected(now)
        assert (waits.pause_s > 0) == (ends >= 2) == bool(waits.text)
        assert waits.pause_s <= 3600.0
