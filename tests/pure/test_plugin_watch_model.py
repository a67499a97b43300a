"""The watched plugins of a simulated node: scenarios, and any order of observations."""

import math

import hypothesis
import pytest
from hypothesis import strategies

from muster import vocabulary
from muster_plugin.watch import expectation, listings, naming, observation, sockets
from tests.worlds.watched_node import GPU, GPU_SOCKET, Node, delay_s, healthy

Answer = observation.Answer
Finding = vocabulary.WatchedFinding


def test_what_is_known_of_a_healthy_plugin() -> None:
    node = healthy()
    assert node.model.watched == (
        vocabulary.Watched(name=GPU, socket=f"device-plugins/{GPU_SOCKET}", expected=8, listed=8),
    )
    assert node.model.memory == expectation.Memory(expected={GPU: 8})


@pytest.mark.parametrize("phase_s", [0, 50, 55, 60, 65, 70])
@pytest.mark.parametrize("is_process_watched", [True, False])
def test_a_killed_plugin_is_found_within_five_seconds(
    *, is_process_watched: bool, phase_s: int
) -> None:
    node = healthy(is_process_watched=is_process_watched)
    node.run(phase_s)
    node.answers[GPU_SOCKET] = Answer.REFUSED
    if is_process_watched:
        node.kill(GPU_SOCKET)
    node.counts = {}
    assert delay_s(node, Finding.NOT_SERVED) <= 5
    node.serve(GPU_SOCKET)
    node.counts = {GPU: 8}
    assert delay_s(node, Finding.NONE) <= 3
    assert node.model.restarts == 1


@pytest.mark.parametrize("phase_s", range(16))
def test_a_stopped_plugin_is_found_within_twenty_seconds(phase_s: int) -> None:
    node = healthy()
    node.run(phase_s)
    node.answers[GPU_SOCKET] = Answer.SILENT
    assert delay_s(node, Finding.NO_ANSWER) <= 20


@pytest.mark.parametrize("phase_s", range(0, 48, 3))
def test_a_plugin_that_stops_again_and_again_is_found_within_twenty_seconds(phase_s: int) -> None:
    node = healthy()
    for _ in range(4):
        for answer, finding in (
            (Answer.SILENT, Finding.NO_ANSWER),
            (Answer.ANSWERED, Finding.NONE),
        ):
            node.answers[GPU_SOCKET] = answer
            began = node.now
            while node.findings() != {GPU: finding}:
                node.run(0.5)
            assert node.now - began <= 20.5
        node.run(phase_s)
    assert_few(node)


def test_devices_that_their_plugin_never_checks_look_healthy() -> None:
    node = healthy()
    at_first = node.model.watched
    # all devices have failed, but the plugin no longer checks them, and lists them as before
    node.run(3_600)
    assert (node.model.watched, node.findings()) == (at_first, {GPU: Finding.NONE})


def test_only_a_process_that_stays_stopped_is_a_finding() -> None:
    node = healthy()
    stopped = observation.ProcessesSeen({f"device-plugins/{GPU_SOCKET}": "stopped"})
    for seen in (stopped, observation.ProcessesSeen({}), stopped):
        node.send(seen)
        node.run(2.5)
    assert node.findings() == {GPU: Finding.NONE}
    node.run(0.6)
    assert node.findings() == {GPU: Finding.NO_ANSWER}


def test_a_removed_socket_is_found_within_three_seconds() -> None:
    node = healthy()
    node.remove(GPU_SOCKET)
    assert delay_s(node, Finding.SOCKET_REMOVED) <= 3


def test_a_plugin_that_the_kubelet_dropped_is_found_within_twelve_seconds() -> None:
    node = healthy()
    node.counts = {}
    assert delay_s(node, Finding.NOT_REGISTERED) <= 12
    node.counts = {GPU: 8}
    assert delay_s(node, Finding.NONE) <= 3


def test_fewer_devices_are_found_once_that_has_lasted() -> None:
    node = healthy()
    node.counts = {GPU: 7}
    assert 30 <= delay_s(node, Finding.FEWER_DEVICES) <= 33
    assert node.model.watched[0].text == "the kubelet lists 7 of 8 devices"


def test_a_crash_that_is_back_at_once_is_only_counted() -> None:
    node = healthy()
    node.kill(GPU_SOCKET)
    node.run(1)
    node.serve(GPU_SOCKET)
    node.run(60)
    assert {finding for _, _, finding, _ in node.changes} == {Finding.NONE}
    assert node.model.restarts == 1


def test_a_process_that_hands_its_socket_to_a_child_is_no_failure() -> None:
    node = healthy()
    node.kill(GPU_SOCKET)
    node.answers[GPU_SOCKET] = Answer.ANSWERED
    node.run(60)
    assert {finding for _, _, finding, _ in node.changes} == {Finding.NONE}


def test_a_restart_of_the_kubelet_is_no_failure_of_plugins_that_come_back() -> None:
    node = healthy()
    node.is_answering, node.kubelet_age_s = False, None
    node.remove(GPU_SOCKET)
    node.run(10)
    node.is_answering, node.kubelet_age_s, node.counts = True, 0.0, {}
    node.scan()
    node.run(20)
    node.serve(GPU_SOCKET, "process of nvidia-gpu.sock 1")
    node.counts = {GPU: 8}
    node.run(60)
    assert {finding for _, _, finding, _ in node.changes} == {Finding.NONE}


def test_a_plugin_that_a_restarted_kubelet_does_not_get_back_is_found() -> None:
    node = healthy()
    node.kubelet_age_s, node.counts = 0.0, {}
    node.remove(GPU_SOCKET)
    assert 29 <= delay_s(node, Finding.SOCKET_REMOVED) <= 31


def test_a_kubelet_that_never_listed_devices_may_list_none_that_it_has_registered() -> None:
    node = Node()
    node.register({GPU: 8})
    node.serve(GPU_SOCKET)
    node.run(60)
    (watched,) = node.model.watched
    assert (watched.finding, watched.expected, watched.listed) == (Finding.NONE, 8, None)
    node.kill(GPU_SOCKET)
    node.run(5)
    assert node.findings() == {GPU: Finding.NOT_SERVED}


def test_everything_at_zero_is_at_first_the_kubelet() -> None:
    node = Node(expect={"a.com/x": 1, GPU: 8})
    node.serve(GPU_SOCKET)
    node.serve("x.sock")
    node.counts = {GPU: 8, "a.com/x": 1}
    node.run(60)
    node.counts = {}
    node.run(25)
    assert {finding for _, _, finding, _ in node.changes} == {Finding.NONE}
    node.run(10)
    assert node.findings() == {GPU: Finding.NOT_REGISTERED, "a.com/x": Finding.NOT_REGISTERED}


def test_a_socket_left_behind_is_no_failure() -> None:
    node = Node()
    node.serve("gdp-YS5jb20veA==-1.sock")
    node.answers["gdp-YS5jb20veA==-1.sock"] = Answer.REFUSED
    node.serve("gdp-YS5jb20veA==-2.sock")
    node.serve("dead.sock")
    node.answers["dead.sock"] = Answer.REFUSED
    node.counts = {"a.com/x": 3}
    node.run(300)
    assert node.model.watched == (
        vocabulary.Watched(
            name="a.com/x",
            socket="device-plugins/gdp-YS5jb20veA==-2.sock",
            expected=3,
            listed=3,
        ),
    )


def test_a_plugin_that_was_dead_before_the_agent_came_is_found() -> None:
    node = Node(memory=expectation.Memory(expected={GPU: 8}))
    node.serve(GPU_SOCKET)
    node.answers[GPU_SOCKET] = Answer.REFUSED
    assert delay_s(node, Finding.NOT_SERVED) <= 5


def test_a_plugin_that_never_came_back_without_any_socket_is_found() -> None:
    node = Node(memory=expectation.Memory(expected={GPU: 8}))
    node.scan()
    assert delay_s(node, Finding.NOT_SERVED) <= 5
    assert node.model.watched[0].text == (
        "no socket in the kubelet's directory matches it; the kubelet lists 0 of 8 devices"
    )


def test_a_plugin_on_demand_may_leave() -> None:
    node = Node()
    node.serve("kubevirt-kvm.sock")
    node.counts = {"devices.kubevirt.io/kvm": 110}
    node.run(60)
    node.remove("kubevirt-kvm.sock")
    node.kill("kubevirt-kvm.sock")
    node.counts = {}
    node.run(60)
    assert [change[1:] for change in node.changes if change[3]] == [
        ("devices.kubevirt.io/kvm", Finding.NONE, True)
    ]
    assert node.model.watched == ()


def test_a_socket_and_a_resource_that_vanish_together_belong_together() -> None:
    node = Node()
    for name in ("one", "two"):
        node.serve(f"{name}.sock")
    node.counts = {"a.com/first": 1, "a.com/second": 2}
    node.run(60)
    assert node.findings() == dict.fromkeys(
        ("one.sock", "two.sock", "a.com/first", "a.com/second"), Finding.NONE
    )
    node.kill("one.sock")
    node.counts = {"a.com/second": 2}
    node.run(10)
    assert node.findings() == {
        "a.com/first": Finding.NOT_SERVED,
        "two.sock": Finding.NONE,
        "a.com/second": Finding.NONE,
    }
    assert node.model.memory.resources == {"one.sock": "a.com/first"}


def test_two_processes_of_one_resource_are_found() -> None:
    node = healthy()
    node.serve(GPU_SOCKET)
    assert 30 <= delay_s(node, Finding.TWO_SERVERS) <= 32
    node.send(
        observation.ProcessEnded(f"device-plugins/{GPU_SOCKET}", f"process of {GPU_SOCKET} 1")
    )
    assert node.findings() == {GPU: Finding.NONE}


def test_what_is_ignored_or_served_by_muster_is_not_watched() -> None:
    node = Node(ignore=("nvidia.com/*", "odd*.sock"))
    node.model.ours = frozenset({"muster.example/fuse"})
    node.serve(GPU_SOCKET)
    node.serve("odd-1.sock")
    node.counts = {GPU: 8, "muster.example/fuse": 1}
    node.run(60)
    assert (node.model.watched, node.changes) == ((), [])


def test_hardware_that_nothing_offers_is_found_after_a_while() -> None:
    node = Node()
    node.send(observation.HardwareSeen({GPU: "2 NVIDIA GPUs", "amd.com/gpu": "1 AMD GPU"}))
    node.serve("amd.com_gpu")
    node.counts = {"amd.com/gpu": 1}
    node.run(299)
    assert node.findings() == {"amd.com/gpu": Finding.NONE}
    node.run(2)
    assert node.findings() == {"amd.com/gpu": Finding.NONE, GPU: Finding.NOT_OFFERED}


def test_a_plugin_that_was_uninstalled_is_forgotten_in_the_end() -> None:
    node = healthy()
    node.kill(GPU_SOCKET)
    node.remove(GPU_SOCKET)
    node.counts = {}
    node.run(26 * 3600)
    assert [change[1:] for change in node.changes if change[3]] == [(GPU, Finding.NONE, True)]
    assert node.model.memory == expectation.Memory()


def test_healthy_hours_with_rolling_updates_have_no_finding_and_few_connections() -> None:
    node = healthy()
    for _ in range(6):
        node.run(1800)
        node.kill(GPU_SOCKET)
        node.serve(GPU_SOCKET)
    assert {finding for _, _, finding, _ in node.changes} == {Finding.NONE}
    assert_few(node)
    assert len(node.connections[GPU_SOCKET]) <= 3 * 3600 / sockets.PERIOD_S + 12


def assert_few(node: Node) -> None:
    """Assert that each process got at most four connections in any minute."""
    for times in node.connections_by_process.values():
        for at, fifth in zip(times, times[sockets.CONNECTIONS_MAX :], strict=False):
            assert fifth - at >= 60


NAMES = (GPU_SOCKET, "x.sock", "kubevirt-kvm.sock")
RESOURCES = (GPU, "a.com/x", "devices.kubevirt.io/kvm", "not a resource")
STEPS = strategies.one_of(
    strategies.tuples(strategies.just("serve"), strategies.sampled_from(NAMES)),
    strategies.tuples(strategies.just("remove"), strategies.sampled_from(NAMES)),
    strategies.tuples(strategies.just("kill"), strategies.sampled_from(NAMES)),
    strategies.tuples(strategies.sampled_from([*Answer]), strategies.sampled_from(NAMES)),
    strategies.tuples(
        strategies.just("list"),
        strategies.none()
        | strategies.dictionaries(strategies.sampled_from(RESOURCES), strategies.integers(0, 9)),
    ),
    strategies.tuples(strategies.just("restart"), strategies.none()),
    strategies.tuples(strategies.just("away"), strategies.none()),
)


def happen(node: Node, what: str, which: object) -> None:
    name = str(which)
    match what:
        case "serve":
            node.serve(name)
        case "remove" if name in node.files:
            node.remove(name)
        case "kill" if name in node.files:
            node.kill(name)
        case "list":
            assert which is None or isinstance(which, dict)
            node.counts = which
        case "restart":
            node.files.clear()
            node.is_answering, node.kubelet_age_s = True, 0.0
            node.scan()
        case "away":
            node.is_answering, node.kubelet_age_s = False, None
            node.scan()
        case Answer():
            node.answers[name] = what
        case _:
            pass


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    strategies.lists(strategies.tuples(STEPS, strategies.floats(0, 50)), max_size=20),
    strategies.booleans(),
)
def test_whatever_happens_probes_and_events_have_limits(
    steps: list[tuple[tuple[str, object], float]],
    is_process_watched: bool,  # noqa: FBT001  # given by hypothesis
) -> None:
    node = Node(is_process_watched=is_process_watched)
    away_at: float | None = None
    for (what, which), wait_s in steps:
        happen(node, what, which)
        is_there = node.kubelet_age_s is not None and node.is_answering
        away_at = None if is_there else away_at or node.now
        is_away = away_at is not None and node.now + wait_s < away_at + listings.AWAY_S
        before = node.findings()
        node.run(wait_s)
        if is_away:
            begun = {
                n for n, f in node.findings().items() if f not in {before.get(n), Finding.NONE}
            }
            assert not begun - {n for n, f in before.items() if f is not Finding.NONE}
    assert_few(node)
    published: dict[str, float] = {}
    for at, name, _, gone in node.changes:
        assert gone or at - published.get(name, -math.inf) >= 1.0
        published[name] = -math.inf if gone else at
    assert all(naming.RESOURCE.fullmatch(name) or name in NAMES for name in node.findings())


def test_probes_without_a_result_do_not_block_the_others() -> None:
    watched = sockets.Sockets()
    files = [
        observation.SocketFile(
            directory=observation.Directory.PLUGINS,
            name=f"{number}.sock",
            identity=str(number),
            created_at=0,
        )
        for number in range(40)
    ]
    watched.record_scan(tuple(files), 0.0)
    first = watched.due(1.0)
    assert len(first) == sockets.AT_ONCE_MAX
    assert watched.due(2.0) == []
    # the process was suspended meanwhile
    probed = {probe.file.name for now in (40.0, 41.0) for probe in _results(watched, now)}
    assert probed == {file.name for file in files}
    due = watched.next_deadline()
    assert due is not None
    assert due > 41.0


def _results(watched: sockets.Sockets, now: float) -> list[observation.Probe]:
    """Start the probes that are due, and record that none is answered."""
    probes = watched.due(now)
    for probe in probes:
        watched.record_probe(observation.inconclusive(probe.file), now)
    return probes
