"""Mass failures: what causes one, what cannot, and for how long a plugin may be suspended."""

import itertools
from collections.abc import Mapping, Sequence

import hypothesis
from hypothesis import strategies as st

from muster import vocabulary
from muster.vocabulary import AlertKind, Verdict
from muster_health.model import signals
from tests.worlds.detector_fleet import World

HONEST = [f"n{number}" for number in range(12)]
VICTIM = HONEST[0]
BUDGET_S = 52.5
USUAL_S = {"kill": 3.0, "freeze": 20.0, "cut": 22.0}
"""How long the verdict takes if nobody interferes."""

Act = tuple[float, frozenset[int], str]
"""A wait in seconds, the numbers of hostile nodes, and what all plugins on them do then."""


class HostileWorld(World):
    """A fleet in which some nodes are hostile: a test decides what they send."""

    def __init__(self, hostile: int, names: int = 8, honest: Sequence[str] = HONEST) -> None:
        self.hostile = [f"h{number}" for number in range(hostile)]
        self.names = [f"x{number}" for number in range(names)]
        self.seq = 0
        super().__init__(*honest)
        for plugin in self.plugins.values():
            self._connect(plugin.node, "p", is_open=True)
        self.place(dict.fromkeys(honest, ("revision=r1",)), ("revision=r1",))

    def place(self, honest: Mapping[str, tuple[str, ...]], hostile: tuple[str, ...]) -> None:
        """Let Kubernetes expect the plugins, with the causes that their failures may share."""
        nodes = {node: signals.Expected(age_s=0.0, causes=each) for node, each in honest.items()}
        self._feed_all(signals.ExpectedNodes(plugin="p", nodes=nodes))
        nodes = {node: signals.Expected(age_s=0.0, causes=hostile) for node in self.hostile}
        for name in self.names if self.hostile else ():
            self._feed_all(signals.ExpectedNodes(plugin=name, nodes=nodes))

    def attack(self, acts: Sequence[Act], interval_s: float, until: float) -> None:
        """Repeat the acts until a time."""
        while self.now < until:
            for wait_s, nodes, act in acts:
                self.run(wait_s)
                for number in nodes:
                    if number < len(self.hostile):
                        self._act(self.hostile[number], act, interval_s)

    def answer(self, probe: signals.Probe) -> tuple[float, signals.Input]:
        if probe.node in self.plugins:
            return super().answer(probe)
        failed = signals.ProbeFailed(
            node=probe.node, plugin=probe.plugin, number=probe.number, subscribed=True
        )
        return self.now + probe.timeout_s, failed

    def storms(self) -> int:
        """Return how often a mass failure was reported."""
        return len([alert for alert in self.fleet_alerts(AlertKind.STORM) if not alert.change])

    def fleet_alerts(self, kind: AlertKind) -> list[vocabulary.AlertChanged]:
        """Return all changes of an alert about the fleet."""
        changed = [e for e in self.published.values() if isinstance(e, vocabulary.AlertChanged)]
        return [e for e in changed if (e.node, e.kind) == (vocabulary.FLEET, kind)]

    def _act(self, node: str, act: str, interval_s: float) -> None:
        for name in self.names:
            if act == "beat":
                self.beat(node, name, interval_s)
            else:
                self._connect(node, name, is_open=act == "connect")

    def beat(self, node: str, plugin: str, interval_s: float, wall: float = 0.0) -> None:
        """Send a heartbeat."""
        self.seq += 1
        heartbeat = vocabulary.Heartbeat(
            node=node, plugin=plugin, instance="i", seq=self.seq, interval_s=interval_s, wall=wall
        )
        self._feed_all(signals.HeartbeatArrived(heartbeat=heartbeat))

    def _connect(self, node: str, plugin: str, *, is_open: bool) -> None:
        where = {"node": node, "plugin": plugin, "server": "nats-0", "client": 0}
        self._feed_all(
            signals.Connected(**where)  # type: ignore[arg-type]  # keywords
            if is_open
            else signals.Disconnected(**where, reason="Client Closed")  # type: ignore[arg-type]  # keywords
        )


def judged(world: HostileWorld, acts: Sequence[Act], interval_s: float, fault: str) -> float:
    """Let the victim fail during an attack, and return how long its verdict takes."""
    world.run(5.0)
    world.attack(acts, interval_s, world.now + 10.0)
    began = world.now
    getattr(world, fault)(VICTIM)
    for act in itertools.cycle(acts):
        if world.verdicts(VICTIM)[-1] is not Verdict.HEALTHY or world.now > began + 200.0:
            break
        world.attack([act], interval_s, world.now + 0.01)
    return world.now - began


ACTS = st.lists(
    st.tuples(
        st.floats(0.1, 2.5),
        st.frozensets(st.integers(0, 7), min_size=1),
        st.sampled_from(["beat", "beat", "connect", "disconnect"]),
    ),
    min_size=1,
    max_size=8,
)
INTERVALS = st.sampled_from([0.1, 0.5, 1.0])
IN_TURN = [(1.8, frozenset(range(0, 8, 2)), "beat"), (1.8, frozenset(range(1, 8, 2)), "beat")]
RECONNECTING = [(0.2, frozenset(range(8)), "connect"), (0.1, frozenset(range(8)), "beat")]
RECONNECTING += [(0.1, frozenset(range(8)), "disconnect"), (1.5, frozenset({0}), "beat")]


@hypothesis.given(ACTS, INTERVALS, st.integers(1, 4), st.sampled_from(sorted(USUAL_S)))
@hypothesis.example(IN_TURN, 0.1, 4, "kill")
@hypothesis.example(IN_TURN, 0.1, 4, "freeze")
@hypothesis.example(RECONNECTING, 1.0, 4, "kill")
@hypothesis.settings(max_examples=20, deadline=None)
def test_a_few_hostile_nodes_delay_no_verdict(
    acts: list[Act], interval_s: float, hostile: int, fault: str
) -> None:
    world = HostileWorld(hostile)
    seconds = judged(world, acts, interval_s, fault)
    assert seconds <= USUAL_S[fault] + max(wait_s for wait_s, _, _ in acts)
    assert world.storms() == 0


@hypothesis.given(ACTS, INTERVALS, st.integers(5, 8), st.sampled_from(sorted(USUAL_S)))
@hypothesis.example(IN_TURN, 0.1, 8, "kill")
@hypothesis.example(IN_TURN, 0.1, 8, "freeze")
@hypothesis.example(RECONNECTING, 1.0, 8, "kill")
@hypothesis.settings(max_examples=12, deadline=None)
def test_no_number_of_hostile_nodes_delays_a_verdict_beyond_the_budget(
    acts: list[Act], interval_s: float, hostile: int, fault: str
) -> None:
    seconds = judged(HostileWorld(hostile), acts, interval_s, fault)
    slack_s = 2.0 + max(wait_s for wait_s, _, _ in acts)
    assert seconds <= USUAL_S[fault] + BUDGET_S + slack_s


WHOLE_S = {"kill": 1.0, "freeze": 8.0, "cut": 8.0, "part": 8.0}
"""How long a mass failure may last here before its members are judged."""


@hypothesis.given(
    st.sampled_from(sorted(WHOLE_S)),
    st.integers(8, 30),
    st.floats(0.0, 0.03),
    st.floats(0.1, 1.0),
    st.sampled_from(["", "zone=a", "revision=r2"]),
    st.integers(0, 1),
)
@hypothesis.settings(max_examples=12, deadline=None)
def test_an_honest_mass_failure_is_a_single_alert(
    fault: str, many: int, apart_s: float, share: float, cause: str, hostile: int
) -> None:
    honest = [f"n{number:02}" for number in range(40)]
    world = HostileWorld(hostile, honest=honest)
    if cause:
        others = "zone=b", "revision=r1"
        where = {node: (cause,) if at < many else others for at, node in enumerate(honest)}
        world.place(where, others)
    world.run(10.0)
    for node in honest[:many]:
        getattr(world, fault)(node)
        world.run(apart_s)
    until = world.now + share * WHOLE_S[fault]
    if hostile:
        world.attack([(0.3, frozenset({0}), "beat"), (0.7, frozenset(), "beat")], 0.1, until)
    world.run(max(0.0, until - world.now))
    for node in honest[:many]:
        world.mend(node)
    world.run(120.0)
    stories = {node: world.story(node) for node in honest}
    assert {node: story for node, story in stories.items() if story} == {}
    assert world.storms() <= 1
    assert [alert for alert in world.alerts() if alert[0] not in world.hostile] == []


def zone_a_cut_off(nodes: Sequence[str], *, hostile: int = 0) -> HostileWorld:
    """Place the fleet in two zones, and cut 20 nodes of one of them off from NATS."""
    world = HostileWorld(hostile, honest=nodes)
    in_a, in_b = ("zone=a", "revision=r1"), ("zone=b", "revision=r1")
    world.place({node: in_a if at < 25 else in_b for at, node in enumerate(nodes)}, in_a)
    world.run(10.0)
    for node in nodes[:20]:
        world.cut(node)
    return world


def failed(world: HostileWorld) -> dict[str, Verdict]:
    last = {node: world.verdicts(node)[-1] for node in world.plugins}
    return {node: verdict for node, verdict in last.items() if verdict is not Verdict.HEALTHY}


def test_who_dies_alone_during_a_mass_failure_is_judged_in_the_usual_time() -> None:
    nodes = [f"n{number:02}" for number in range(40)]
    ended, closed, other, late = nodes[19], nodes[20], nodes[39], nodes[21]
    world = zone_a_cut_off(nodes)
    # Kubernetes reports that its pod has ended; the other pods are well
    world.plugins[ended].alive, world.plugins[ended].died_at = False, world.now
    world.freeze(other)
    world.run(4.0)
    # its client closes the connection; the others are only silent
    world.kill(closed)
    world.run(2.5)
    assert failed(world) == {closed: Verdict.PLUGIN_DOWN}
    world.run(4.5)
    world.freeze(late)
    world.run(5.0)
    down = {ended: Verdict.PLUGIN_DOWN, closed: Verdict.PLUGIN_DOWN, other: Verdict.STUCK}
    assert failed(world) == down
    suspended = {each.node for each in world.services[0].detector.plugins() if each.is_suspended}
    assert suspended == {*nodes[:19]}
    assert world.storms() == 1


def test_many_pods_that_ended_are_a_mass_failure_too() -> None:
    nodes = [f"n{number:02}" for number in range(40)]
    world = zone_a_cut_off(nodes)
    for node in nodes[:6]:
        world.plugins[node].alive, world.plugins[node].died_at = False, world.now
    world.run(10.0)
    assert failed(world) == {}


def test_mass_failures_with_several_causes_are_a_single_alert_about_all_of_them() -> None:
    nodes = [f"n{number:02}" for number in range(40)]
    world = zone_a_cut_off(nodes)
    for node in nodes[25:]:
        world.part(node)
    world.run(10.0)
    *_, alert = world.fleet_alerts(AlertKind.STORM)
    how = "went silent or reported problems"
    assert alert.summary == f"35 of 40 plugins {how} at the same time; in common: zone=a, zone=b"
    assert (world.storms(), failed(world)) == (1, {})


def test_the_alert_names_who_makes_the_mass_failure() -> None:
    world = zone_a_cut_off([f"n{number:02}" for number in range(40)], hostile=1)
    world.attack(IN_TURN[:1], 0.1, world.now + 12.0)
    *_, alert = world.fleet_alerts(AlertKind.STORM)
    assert alert.summary == "28 of 48 plugins went silent at the same time; in common: zone=a"
    assert alert.evidence[1].observed == (
        "36 suspicions, by node: h0 16 (44%), n00 1 (3%), n01 1 (3%), n02 1 (3%) and 17 more nodes"
    )


def test_a_plugin_is_suspended_for_a_limited_time_however_many_mass_failures_there_are() -> None:
    nodes = [f"n{number:02}" for number in range(40)]
    world = HostileWorld(0, honest=nodes)
    world.run(10.0)
    suspended_s = 0.0
    for _ in range(8):
        for node in nodes[:12]:
            world.freeze(node)
        for _ in range(24):
            world.run(1.0)
            (first,) = (e for e in world.services[0].detector.plugins() if e.node == nodes[0])
            suspended_s += first.is_suspended
        for node in nodes[:12]:
            world.mend(node)
        world.run(6.0)
    assert BUDGET_S < suspended_s < BUDGET_S + 0.1 * 8 * 30.0


def test_servers_that_are_restarted_one_after_the_other_hide_nobody_who_dies_meanwhile() -> None:
    nodes = [f"n{number:02}" for number in range(60)]
    world = HostileWorld(0, honest=nodes)
    world.run(10.0)
    for dead, first in zip(nodes[:3], (3, 22, 41), strict=True):
        for node in nodes[first : first + 19]:
            world.cut(node)
        world.kill(dead)
        world.run(1.5)
        for node in nodes[first : first + 19]:
            world.mend(node)
        world.run(1.5)
        assert world.verdicts(dead)[-1] is Verdict.PLUGIN_DOWN
        world.run(20.0)
    assert failed(world) == dict.fromkeys(nodes[:3], Verdict.PLUGIN_DOWN)


def test_nodes_that_kubernetes_does_not_know_make_no_mass_failure() -> None:
    world = HostileWorld(0)
    world.services[0].feed(signals.NodesListed())
    for _ in range(3):
        for number in range(50):
            world.beat(f"invented-{number}", "p", 0.5)
        world.run(2.5)
    world.run(3.0)
    assert world.storms() == 0
    assert world.services[0].detector.shown()["storms"] == 0


def test_plugins_of_a_single_node_that_fail_are_alerts_about_that_node() -> None:
    world = HostileWorld(1)
    world.attack(IN_TURN[:1], 1.0, world.now + 6.0)
    world.run(60.0)
    assert [node for node, kind, _ in world.alerts() if kind is AlertKind.STUCK] == ["h0"] * 8
    assert world.storms() == 0


def test_a_node_whose_plugins_come_and_go_for_ever_is_an_alert_about_that_node() -> None:
    world = HostileWorld(1)
    world.attack(IN_TURN, 0.1, world.now + 120.0)
    assert ("h0", AlertKind.NOISY_NODE, "") in world.alerts()
    (alert,) = world.services[0].detector.fleet_alerts()
    assert alert.summary == "the plugins on h0 are suspected repeatedly"
    seen = [each.observed for each in alert.evidence]
    assert seen == ["at least 60 suspicions within 60.0 s"]
    world.run(60.0)
    assert world.services[0].detector.fleet_alerts() == ()


def test_the_clocks_of_one_nodes_plugins_say_nothing_about_our_own() -> None:
    world = HostileWorld(1, honest=HONEST[:6])
    for _ in range(20):
        for name in world.names:
            world.beat("h0", name, 1.0, wall=1.0)
        world.run(1.0)
    world.run(20.0)
    assert world.fleet_alerts(AlertKind.CLOCK_SKEW) == []
