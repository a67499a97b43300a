"""Processes on the node that make up plugins: what the watch of the others makes of them."""

import collections
import time

from muster import vocabulary
from muster_plugin.watch import expectation, observation, sockets
from tests.worlds import watched_node

Answer = observation.Answer
Finding = vocabulary.WatchedFinding
GPU, GPU_SOCKET = watched_node.GPU, watched_node.GPU_SOCKET


def made_up(node: watched_node.Node, count: int, answer: Answer) -> list[str]:
    """Let a process make sockets with names that come before all others."""
    names = [f"!{number:03}-x.sock" for number in range(count)]
    for name in names:
        node.make(name)
        node.answers[name] = answer
    node.scan()
    return names


def test_made_up_plugins_crowd_out_none_that_the_kubelet_lists() -> None:
    node = watched_node.healthy()
    made_up(node, 100, Answer.SILENT)
    node.run(120)
    assert len(node.findings()) == vocabulary.WATCHED_MAX
    assert node.findings()[GPU] is Finding.NONE
    assert node.model.left_out == 101 - vocabulary.WATCHED_MAX
    node.kill(GPU_SOCKET)
    node.run(60)
    assert node.findings()[GPU] is Finding.NOT_SERVED


def test_made_up_plugins_that_come_and_go_cannot_make_the_node_flood_the_bus() -> None:
    node = watched_node.healthy()
    for _ in range(20):
        names = made_up(node, 60, Answer.ANSWERED)
        node.run(1)
        for name in names:
            del node.files[name]
            node.kill(name)
        node.scan()
        node.run(1)
    per_second = collections.Counter(int(at) for at, *_ in node.changes)
    assert sum(per_second.values()) <= 128 + 20 * 41
    assert sorted(per_second.values())[-2] <= 128


def test_the_cost_of_made_up_plugins_does_not_grow_with_the_square_of_their_number() -> None:
    node = watched_node.Node()
    made_up(node, sockets.SOCKETS_MAX, Answer.ANSWERED)
    node.counts = {f"x{number}.example/device{number}": 1 for number in range(256)}
    began = time.process_time()
    node.run(3)
    node.counts = {}
    node.run(3)
    assert time.process_time() - began < 5


def test_sockets_that_keep_the_prober_waiting_delay_others_only_a_little() -> None:
    node = watched_node.Node(memory=expectation.Memory(expected={GPU: 8}))
    made_up(node, 250, Answer.SILENT)
    node.run(60)
    node.serve(GPU_SOCKET)
    node.counts = {GPU: 8}
    node.run(60)
    assert node.findings()[GPU] is Finding.NONE
    assert node.connections[GPU_SOCKET]
    node.answers[GPU_SOCKET] = Answer.SILENT
    node.run(60)
    assert node.findings()[GPU] is Finding.NO_ANSWER
