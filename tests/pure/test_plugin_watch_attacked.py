"""Processes on the node that fake plugins: the watch of the real plugins still works."""

import collections
import time

from muster import vocabulary
from muster_plugin.watch import expectation, observation, sockets
from tests.worlds import watched_node

Answer = observation.Answer
Finding = vocabulary.WatchedFinding
GPU, GPU_SOCKET = watched_node.GPU, watched_node.GPU_SOCKET


def made_up(node: watched_node.Node, count: int, answer: Answer) -> list[str]:
    """Let a process create sockets whose names sort before all others; return the names."""
    names = [f"!{number:03}-x.sock" for number in range(count)]
    for name in names:
        node.make(name)
        node.answers[name] = answer
    node.scan()
    return names


def test_made_up_plugins_crowd_out_none_that_the_kubelet_lists() -> None:
    node = watched_node.healthy()
    made_up(node, 100, Answer.ANSWERED)
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


def test_a_socket_that_never_answers_is_a_failure_only_of_a_known_plugin() -> None:
    node = watched_node.Node()
    made_up(node, 3, Answer.SILENT)
    node.make(GPU_SOCKET)
    node.answers[GPU_SOCKET] = Answer.SILENT
    node.scan()
    node.run(120)
    assert node.findings() == {GPU: Finding.NO_ANSWER}


# Attempts to hide failures


def test_a_kubelet_that_started_in_the_future_by_a_clock_set_back_hides_no_failure() -> None:
    node = watched_node.healthy()
    node.kubelet_age_s = -1e6
    node.scan()
    node.run(60)
    node.remove(GPU_SOCKET)
    assert watched_node.delay_s(node, Finding.SOCKET_REMOVED) <= 3


def test_a_kubelet_that_no_longer_answers_hides_no_failure_for_long() -> None:
    node = watched_node.healthy()
    node.is_answering = False
    node.run(10)
    node.kill(GPU_SOCKET)
    node.run(280)
    assert node.findings() == {GPU: Finding.NONE}
    node.run(20)
    assert node.findings() == {GPU: Finding.NOT_SERVED}
    node.serve(GPU_SOCKET)
    node.is_answering = True
    node.run(10)
    assert node.findings() == {GPU: Finding.NONE}


def test_a_plugin_that_leaves_a_socket_behind_at_every_crash_is_always_found_again() -> None:
    node = watched_node.Node()
    node.counts = {"a.com/x": 3}
    for crash in range(sockets.SOCKETS_MAX + 10):
        name = f"gdp-YS5jb20veA==-{1_700_000_000 + crash}.sock"
        node.serve(name)
        node.run(40)
        assert node.findings() == {"a.com/x": Finding.NONE}
        before = sum(len(times) for times in node.connections.values())
        node.kill(name)
        node.run(1)
    assert node.model.left_out == 0
    assert sum(len(times) for times in node.connections.values()) - before <= 2
