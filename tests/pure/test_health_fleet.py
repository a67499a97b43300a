"""A whole fleet: each kind of failure gets its verdict, alone and in mass failures."""

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st

from muster import vocabulary
from muster.fleet import health_state
from muster.vocabulary import AlertKind, AlertState, Verdict
from muster_health.model import config, signals
from tests.worlds.detector_fleet import World, running

FIRING, RESOLVED = AlertState.FIRING, AlertState.RESOLVED


def fate(act: str, seconds: float) -> tuple[list[Verdict], list[tuple[str, AlertKind, str]]]:
    world = running("a", "b", interval_s=5.0)
    getattr(world, act)("a")
    world.run(seconds)
    alert = world.verdicts("a")[1:], world.alerts()
    world.mend("a")
    world.run(60.0)
    assert (world.alerts(), world.verdicts("a")[-1]) == ([], Verdict.HEALTHY)
    assert world.verdicts("b") == [Verdict.HEALTHY]
    return alert


def test_a_crash_is_a_verdict_within_three_seconds() -> None:
    assert fate("kill", 2.9) == ([Verdict.PLUGIN_DOWN], [("a", AlertKind.PLUGIN_DOWN, "")])


def test_a_dead_kubelet_is_named_and_its_plugin_is_not_blamed() -> None:
    world = running("a")
    world.plugins["a"].kubelet_dead = True
    world.run(40.0)
    alert = last(world)
    assert alert.summary == "the kubelet on a is not running; p cannot register: nvidia.com/gpu"
    assert alert.advice.startswith("start the kubelet on the node")
    assert [(each.source, each.observed) for each in alert.evidence] == [
        ("kubernetes", "the kubelet renewed the node's lease 40 s ago; it does so every 10 s"),
        ("kubernetes", "node Ready"),
        ("plugin", "nvidia.com/gpu: the kubelet has no ListAndWatch stream open"),
    ]
    world.mend("a")
    world.run(20.0)
    assert world.alerts() == []


def test_a_kubelet_that_renews_its_lease_is_alive_though_its_socket_does_not_answer() -> None:
    world = running("a")
    world.plugins["a"].kubelet_dead = True
    for _ in range(40):
        world.run(1.0)
        world.plugins["a"].lease_at = world.now
    alert = last(world)
    assert alert.summary == "p on a cannot reach the kubelet's socket: nvidia.com/gpu"
    assert "/var/lib/kubelet/device-plugins" in alert.advice


class Unanswered(World):
    """A world in which the Kubernetes API does not answer."""

    def learn(self, question: signals.AskCluster) -> tuple[float, signals.Input]:
        nothing = signals.ClusterAnswered(
            node=question.node, plugin=question.plugin, number=question.number, facts=None
        )
        return self.now + question.timeout_s, nothing


def test_a_crash_is_a_verdict_where_kubernetes_does_not_answer_too() -> None:
    world = Unanswered("a", interval_s=5.0)
    world.run(10.0)
    world.kill("a")
    world.run(40.0)
    assert world.verdicts("a")[-1] is Verdict.PLUGIN_DOWN


def test_a_crash_that_its_pod_does_not_show_yet_is_an_alert_once_it_does() -> None:
    world = running("a", interval_s=5.0)
    world.plugins["a"].shows_after_s = 6.0
    world.kill("a")
    world.run(3.0)
    assert (world.verdicts("a")[-1], world.alerts()) == (Verdict.PLUGIN_DOWN, [])
    world.run(12.0)
    assert world.alerts() == [("a", AlertKind.PLUGIN_DOWN, "")]
    assert world.verdicts("a") == [Verdict.HEALTHY, Verdict.PLUGIN_DOWN]


def test_a_suspended_process_is_a_verdict_at_once_and_an_alert_when_it_stays_so() -> None:
    assert fate("freeze", 20.0) == ([Verdict.STUCK], [])
    assert fate("freeze", 60.0) == ([Verdict.STUCK], [("a", AlertKind.STUCK, "")])


def test_a_plugin_whose_network_is_cut_is_unreachable() -> None:
    assert fate("cut", 15.0) == ([], [])
    assert fate("cut", 25.0) == ([Verdict.UNREACHABLE], [])
    assert fate("cut", 60.0) == ([Verdict.UNREACHABLE], [("a", AlertKind.UNREACHABLE, "")])


def test_a_dead_node_is_reported_once_its_lease_is_stale_and_as_nothing_else() -> None:
    world = running("a", interval_s=5.0)
    world.down("a")
    world.run(27.0)
    assert world.verdicts("a") == [Verdict.HEALTHY, Verdict.NODE_DOWN]
    assert world.alerts() == [("a", AlertKind.NODE_DOWN, "")]


def test_an_announced_stop_is_maintenance_though_nats_reports_the_disconnect_too() -> None:
    assert fate("stop", 30.0) == ([Verdict.MAINTENANCE], [])


def test_a_lost_registration_is_reported() -> None:
    assert fate("part", 9.0) == ([Verdict.DEREGISTERED], [("a", AlertKind.DEREGISTERED, "")])


def test_a_verdict_that_turns_out_worse_changes_its_alert_and_opens_no_other() -> None:
    world = running("a")
    world.kill("a")
    world.run(5.0)
    world.down("a")
    world.run(60.0)

    assert world.verdicts("a")[1:] == [Verdict.PLUGIN_DOWN, Verdict.NODE_DOWN]
    assert world.story("a") == [(AlertKind.PLUGIN_DOWN, FIRING), (AlertKind.NODE_DOWN, FIRING)]
    world.mend("a")
    world.run(60.0)
    assert world.alerts() == []


def test_a_node_that_offers_another_number_is_a_mismatch_after_half_a_minute() -> None:
    world = running("a")
    world.offer("a", 0)
    world.run(29.0)
    assert world.alerts() == []
    world.run(5.0)
    assert world.alerts() == [("a", AlertKind.MISMATCH, "")]
    world.offer("a", None)
    world.run(10.0)
    assert world.alerts() == []


def test_a_node_without_its_plugin_is_missing_and_a_plugin_that_comes_ends_that() -> None:
    world = World("a", "b")
    world.plugins["b"].alive = False
    nodes = {"a": signals.Expected(age_s=0.0), "b": signals.Expected(age_s=0.0)}
    world.services[0].feed(signals.ExpectedNodes(plugin="p", nodes=nodes))
    world.plugins["b"].died_at = 0.0
    world.run(119.0)
    assert world.alerts() == []
    world.run(10.0)
    assert world.alerts() == [("b", AlertKind.MISSING, "")]
    world.mend("b")
    world.run(20.0)
    assert world.alerts() == []


def test_a_silent_node_that_leaves_the_cluster_is_forgotten() -> None:
    world = running("a", "b")
    nodes = {"a": signals.Expected(age_s=0.0), "b": signals.Expected(age_s=0.0)}
    world.services[0].feed(signals.ExpectedNodes(plugin="p", nodes=nodes))
    world.down("b")
    world.run(30.0)
    assert world.alerts() == [("b", AlertKind.NODE_DOWN, "")]
    world.services[0].feed(signals.ExpectedNodes(plugin="p", nodes={"a": nodes["a"]}))
    assert (world.alerts(), sorted(world.stored)) == ([], ["a.p"])


def test_a_reported_problem_is_kept_for_as_long_as_it_is_reported() -> None:
    world = running("a")
    (alert,) = world.services[0].detector.plugins()
    world.plugins["a"].problems = ("cannot be used",)
    world.run(2.0)
    assert (list(alert.problems), world.alerts()) == (["cannot be used"], [])
    world.plugins["a"].problems = ()
    world.run(2.0)
    assert list(alert.problems) == []


def changes(world: World) -> list[tuple[AlertKind, AlertState, vocabulary.Severity, bool]]:
    events = [e for e in world.published.values() if isinstance(e, vocabulary.AlertChanged)]
    return [(e.kind, e.state, e.severity, e.flapping) for e in events]


def last(world: World) -> vocabulary.AlertChanged:
    return [e for e in world.published.values() if isinstance(e, vocabulary.AlertChanged)][-1]


def verdicts(world: World) -> list[tuple[vocabulary.Verdict, bool]]:
    events = [e for e in world.published.values() if isinstance(e, vocabulary.VerdictChanged)]
    return [(e.verdict, e.flapping) for e in events if e.previous is not None]


CRITICAL, WARNING = vocabulary.Severity.CRITICAL, vocabulary.Severity.WARNING


def test_a_plugin_that_fails_again_and_again_has_one_alert_that_says_so() -> None:
    world = running("a")
    for _ in range(5):
        world.kill("a")
        world.run(4.0)
        world.mend("a")
        world.run(4.0)
    down = (AlertKind.PLUGIN_DOWN, FIRING, CRITICAL)
    over = (AlertKind.PLUGIN_DOWN, RESOLVED, CRITICAL, False)
    assert changes(world) == [(*down, False), over, (*down, False), (*down, True)]
    assert last(world).summary == "p (nvidia.com/gpu) on a is down; it fails repeatedly"
    assert last(world).evidence[0].observed == "failed 3 times within 1.66667 min"
    world.run(60.0)
    assert (world.alerts(), world.story("a")[-1]) == ([], (AlertKind.PLUGIN_DOWN, RESOLVED))


def test_what_is_wrong_with_a_flapping_plugin_is_reported_under_its_own_name_at_once() -> None:
    world = running("a")
    for _ in range(3):
        world.kill("a")
        world.run(5.0)
        world.mend("a")
        world.run(0.5)
    world.run(4.0)
    world.part("a")
    world.run(6.0)
    assert verdicts(world)[-2:] == [(Verdict.PLUGIN_DOWN, False), (Verdict.DEREGISTERED, True)]
    assert changes(world)[-1] == (AlertKind.DEREGISTERED, FIRING, CRITICAL, True)
    seen = [each.observed for each in last(world).evidence]
    assert seen[0].startswith("failed 3 times within")
    assert seen[1].endswith("the kubelet has no ListAndWatch stream open")


def test_a_flapping_plugin_that_is_down_for_good_stays_so_over_a_restart_of_health() -> None:
    world = running("a")
    for _ in range(3):
        world.kill("a")
        world.run(5.0)
        world.mend("a")
        world.run(0.5)
    world.kill("a")
    world.run(8.0)
    down = (AlertKind.PLUGIN_DOWN, FIRING, CRITICAL)
    assert changes(world) == [(*down, False), (*down, True)]
    world.crash(5.0)
    world.run(10.0)
    assert len(changes(world)) == 2
    world.mend("a")
    world.run(100.0)
    assert world.story("a")[2:] == [(AlertKind.PLUGIN_DOWN, RESOLVED)]


def test_a_flapping_plugin_that_may_be_pausing_has_a_warning_until_patience_is_over() -> None:
    world = running("a")
    for _ in range(4):
        world.cut("a")
        world.run(20.0)
        world.mend("a")
        world.run(1.3)
    warning = (AlertKind.FLAPPING, FIRING, WARNING, True)
    assert changes(world) == [warning]
    assert last(world).summary.endswith("it fails repeatedly; now: UNREACHABLE")
    world.freeze("a")
    # STUCK after 14 s; `patience_s` is 30 s
    world.run(40.0)
    assert changes(world) == [warning, warning]
    assert last(world).summary.endswith("it fails repeatedly; now: STUCK")
    assert verdicts(world)[-1] == (Verdict.STUCK, True)
    world.run(5.0)
    graver = [
        (AlertKind.FLAPPING, RESOLVED, WARNING, True),
        (AlertKind.STUCK, FIRING, CRITICAL, True),
    ]
    assert changes(world)[2:] == graver
    world.run(15.0)
    assert changes(world)[2:] == graver


@pytest.mark.parametrize(
    ("deleting", "planned", "words"),
    [
        (True, (), "not back 300 s after its pod was deleted"),
        (
            False,
            (signals.Planned.UNSCHEDULABLE,),
            "not back 300 s after its last heartbeat, on a node that is cordoned or being removed",
        ),
    ],
)
def test_an_overdue_alert_names_what_the_planned_stop_began_with(
    deleting: bool,  # noqa: FBT001  # a case
    planned: tuple[signals.Planned, ...],
    words: str,
) -> None:
    world = running("a")
    pod = signals.Pod(name="m/p", uid="1", phase="Running", ready=True, deleting=deleting)
    tracked = signals.Facts(exists=True, lease_age_s=1.0, ready=True, pods=(pod,), planned=planned)
    world.plugins["a"].facts = lambda now: tracked  # type: ignore[method-assign]  # noqa: ARG005  # told
    world.kill("a")
    world.run(320.0)
    (alert,) = [e for e in world.published.values() if isinstance(e, vocabulary.AlertChanged)]
    assert (alert.kind, [each.observed for each in alert.evidence]) == (
        AlertKind.MAINTENANCE_OVERDUE,
        [words],
    )


def test_two_processes_that_send_heartbeats_alternately_are_a_split_brain() -> None:
    world = running("a")
    plugin = world.plugins["a"]
    zombie = plugin.beat(world.now)
    world.mend("a")
    plugin.instance, plugin.seq = 1, 0
    for number in range(40):
        assert world.alerts() == [] or number > 30  # a rollout may look the same
        world.run(0.5)
        beat = vocabulary.Heartbeat(
            node="a",
            plugin="p",
            instance=zombie.instance,
            seq=zombie.seq + 10 + number,
            interval_s=1.0,
            resources=zombie.resources,
        )
        world.services[0].feed(signals.HeartbeatArrived(heartbeat=beat))
        world.run(0.5)
    assert world.alerts() == [("a", AlertKind.SPLIT_BRAIN, "")]
    world.run(20.0)
    assert world.alerts() == []


def test_a_skewed_clock_is_an_alert_and_no_verdict() -> None:
    world = running("a")
    world.plugins["a"].skew_s = 60.0
    world.run(5.0)
    assert world.alerts() == []
    world.run(10.0)
    assert (world.alerts(), world.verdicts("a")) == (
        [("a", AlertKind.CLOCK_SKEW, "")],
        [Verdict.HEALTHY],
    )
    world.plugins["a"].skew_s = 0.0
    world.run(5.0)
    assert world.alerts() == []


def test_hundreds_of_broken_devices_are_one_alert() -> None:
    world = running("a")
    for device in ("0", "1"):
        world.turn("a", device)
    world.run(2.0)
    assert world.alerts() == [("a", AlertKind.DEVICE_UNHEALTHY, "0")]
    world.run(5.0)
    assert world.alerts() == [("a", AlertKind.DEVICE_UNHEALTHY, "01")]
    assert [state for _, state in world.story("a")] == [FIRING, FIRING]


def test_one_alert_reports_for_all_plugins_of_a_node_that_it_is_down() -> None:
    world = running("a")
    other = world.plugins["a"].beat(world.now)
    for seq in range(3):
        beat = vocabulary.Heartbeat(
            node="a", plugin="q", instance="q", seq=seq, interval_s=1.0, resources=other.resources
        )
        world.services[0].feed(signals.HeartbeatArrived(heartbeat=beat))
    world.down("a")
    world.run(60.0)
    assert world.alerts() == [("a", AlertKind.NODE_DOWN, "")]


def test_many_silent_at_once_are_one_alert_and_those_that_stay_silent_get_a_verdict() -> None:
    nodes = [f"n{number}" for number in range(40)]
    world = running(*nodes)
    for node in nodes:
        world.kill(node)
    world.run(2.5)
    assert world.alerts() == [("_fleet", AlertKind.STORM, "")]
    for node in nodes[2:]:
        world.mend(node)
    world.run(40.0)
    assert world.alerts() == [
        ("n0", AlertKind.PLUGIN_DOWN, ""),
        ("n1", AlertKind.PLUGIN_DOWN, ""),
    ]
    assert [world.verdicts(node) for node in nodes[2:]] == [[Verdict.HEALTHY]] * 38


def test_a_mass_failure_names_what_its_suspects_have_in_common() -> None:
    nodes = [f"n{number}" for number in range(200)]
    world = running(*nodes)
    zones = {
        n: signals.Expected(age_s=0.0, causes=(f"zone={i % 20}",)) for i, n in enumerate(nodes)
    }
    world.services[0].feed(signals.ExpectedNodes(plugin="p", nodes=zones))
    for node in nodes[3::20]:
        world.freeze(node)
    world.run(10.0)
    (storm,) = world.services[0].detector.fleet_alerts()
    assert storm.summary == "10 of 200 plugins went silent at the same time; in common: zone=3"
    world.run(120.0)
    assert [alert[1] for alert in world.alerts()] == [AlertKind.STUCK] * 10


def test_alerts_have_their_turn_and_the_rest_is_counted_in_one() -> None:
    nodes = [f"n{number:02}" for number in range(90)]
    world = running(*nodes)
    for node in nodes:
        world.turn(node, "0")
    world.run(5.0)
    kinds = [kind for _, kind, _ in world.alerts()]
    # 60 at once, and one more in each of the next seconds
    counts = kinds.count(AlertKind.DEVICE_UNHEALTHY), kinds.count(AlertKind.MORE_ALERTS)
    assert counts == (64, 1)
    world.run(120.0)
    assert [kind for _, kind, _ in world.alerts()] == [AlertKind.DEVICE_UNHEALTHY] * 90


def test_an_outage_of_nats_is_reported_without_nats_and_leads_to_no_verdict() -> None:
    world = running("a")
    world.outage(30.0)
    world.run(60.0)
    alarms = [out for out in world.noted if isinstance(out, signals.Alarm)]
    assert [(alarm.firing, alarm.seconds) for alarm in alarms] == [(True, 10.0), (False, 30.0)]
    assert world.verdicts("a") == [Verdict.HEALTHY]


def test_a_node_that_floods_names_of_plugins_is_bounded() -> None:
    world = running("a")
    service = world.services[0]
    for number in range(100):
        beat = vocabulary.Heartbeat(
            node="a", plugin=f"x{number}", instance="i", seq=1, interval_s=1.0
        )
        service.feed(signals.HeartbeatArrived(heartbeat=beat))
    assert len(list(service.detector.plugins())) == 8


@pytest.mark.parametrize("wait_s", [0.0, 1.0, 2.2, 5.0, 20.0])
@pytest.mark.parametrize("services", [1, 2])
def test_a_leader_that_dies_loses_and_repeats_nothing(wait_s: float, services: int) -> None:
    world = running("a", "b", services=services)
    world.turn("b", "0")
    world.kill("a")
    world.run(wait_s)
    world.crash()
    world.run(30.0)

    assert world.alerts() == [
        ("a", AlertKind.PLUGIN_DOWN, ""),
        ("b", AlertKind.DEVICE_UNHEALTHY, "0"),
    ]
    world.turn("b", "0")
    world.mend("a")
    world.crash()
    world.run(60.0)
    assert world.alerts() == []
    assert len(world.story("a")) == len(world.story("b")) == 2


def test_a_follower_publishes_and_stores_nothing() -> None:
    world = World("a", services=2)
    follower = world.services[1]
    world.run(10.0)
    world.kill("a")
    world.run(10.0)
    (tracked,) = follower.detector.plugins()
    assert tracked.current_verdict is Verdict.PLUGIN_DOWN
    assert world.alerts() == [("a", AlertKind.PLUGIN_DOWN, "")]


def remedied(mode: config.RemediationMode, *parts: str, per_hour: int = 6) -> list[tuple[str, str]]:
    nodes = [f"n{number}" for number in range(10)]
    world = World(*nodes, remediation=config.Remediation(mode=mode, per_hour=per_hour))
    world.run(10.0)
    for node in parts:
        world.part(node)
        world.run(90.0)
        world.mend(node)
        world.run(60.0)
    published = [
        event
        for event in world.published.values()
        if isinstance(event, vocabulary.RemediationDecided)
    ]
    return [(event.outcome, event.reason) for event in published]


def test_a_plugin_that_is_not_registered_is_restarted_where_that_is_configured() -> None:
    assert remedied(config.RemediationMode.OFF, "n1") == []
    assert remedied(config.RemediationMode.DRY_RUN, "n1") == [
        ("dry_run", "the pod would be deleted")
    ]
    assert remedied(config.RemediationMode.RESTART_PLUGIN, "n1") == [
        ("acted", "the pod was deleted")
    ]


def test_a_restart_beyond_the_budget_is_published_as_refused() -> None:
    assert remedied(config.RemediationMode.RESTART_PLUGIN, "n1", "n1", "n2", "n3", per_hour=2) == [
        ("acted", "the pod was deleted"),
        (
            "refused",
            (
                "a plugin on this node was restarted 150 s ago; "
                "the next restart is allowed 600 s after that"
            ),
        ),
        ("acted", "the pod was deleted"),
        ("refused", "2 restarts within an hour, which is the limit"),
    ]


NODES = st.sampled_from(["a", "b"])
FAULTS = st.sampled_from(
    ["kill", "freeze", "cut", "down", "stop", "part", "lose", "mend", "report"]
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("run"), st.floats(0.01, 30.0)),
        st.tuples(FAULTS, NODES),
        st.tuples(st.just("turn"), NODES, st.sampled_from(["0", "1"])),
        st.tuples(st.just("outage"), st.floats(0.1, 30.0)),
        st.tuples(st.just("crash"), st.floats(0.01, 20.0)),
        st.tuples(st.just("crash_after"), st.integers(0, 12)),
        st.tuples(st.just("hold"), NODES, st.integers(0, 3)),
        st.tuples(st.just("hush"), st.booleans()),
    ),
    max_size=25,
)


RESTORED = [("part", "a"), ("run", 1.0), ("freeze", "a"), ("crash_after", 2), ("run", 6.0)]
"""Steps in which a state stored by another replica replaces one that suspects the plugin."""


@hypothesis.given(STEPS, st.sampled_from([1, 2]))
@hypothesis.example(RESTORED, 2)
@hypothesis.settings(max_examples=100, deadline=None)
def test_whatever_happens_all_is_resolved_once_healthy(
    steps: list[tuple[object, ...]], services: int
) -> None:
    world = World("a", "b", services=services)
    for name, *values in steps:
        getattr(world, str(name))(*values)
    for node, plugin in world.plugins.items():
        plugin.broken.clear()
        plugin.devices = 2
        world.mend(node)
    world.hush(mute=False)
    world.run(150.0)

    assert world.alerts() == []
    assert {world.verdicts(node)[-1] for node in ("a", "b")} == {Verdict.HEALTHY}


@hypothesis.given(
    st.lists(st.tuples(FAULTS, NODES), max_size=6),
    st.lists(st.integers(0, 200), min_size=1, max_size=3),
    st.sampled_from([1, 2]),
)
@hypothesis.settings(max_examples=60, deadline=None)
def test_a_crash_at_any_point_changes_nothing_that_is_published(
    faults: list[tuple[str, str]], crashes: list[int], services: int
) -> None:
    def played(at: list[int]) -> list[list[tuple[AlertKind, AlertState, tuple[str, ...]]]]:
        world = running("a", "b", services=services, interval_s=5.0)
        for number, (name, node) in enumerate(faults):
            if number < len(at):
                world.crash_after(at[number])
            getattr(world, name)(node)
            # long enough for each wait, also if another process starts it again
            world.run(650.0)
        return [world.named(node) for node in ("a", "b")]

    assert played(crashes) == played([])


def test_state_shows_how_many_devices_pods_may_use() -> None:
    world = running("a")
    world.offer("a", 0)
    service = world.services[0]
    (shown,) = (plugin.shown(service.clock) for plugin in service.detector.plugins())
    name = "nvidia.com/gpu"
    assert (shown["devices"], shown["allocatable"]) == ({name: 2}, {name: 0})


def test_state_shows_since_when_a_failure_is_over_and_until_when_that_must_last() -> None:
    world = running("a")
    for _ in range(2):
        world.kill("a")
        world.run(4.0)
        assert _recoveries(world) == (None, {"plugin_down": None})
        world.mend("a")
        world.run(4.0)
    # 15 s: too few heartbeats have arrived, so recovery takes longer than the hold
    assert _recoveries(world) == (15.0, {"plugin_down": 15.0})


def test_state_shows_since_when_a_device_that_failed_again_is_healthy() -> None:
    world = running("a")
    for _ in range(2):
        world.turn("a", "0")
        world.run(2.0)
        assert _recoveries(world) == (None, {"device_unhealthy": None})
        world.turn("a", "0")
        world.run(2.0)
    assert _recoveries(world) == (None, {"device_unhealthy": 5.0})


def _recoveries(world: World) -> tuple[float | None, dict[str, float | None]]:
    """Return how long the plugin and its alerts, by kind, must stay well; None while they fail."""
    service = world.services[0]
    (shown,) = (plugin.shown(service.clock) for plugin in service.detector.plugins())
    encoded = msgspec.json.encode(shown)
    plugin = msgspec.json.decode(encoded, type=health_state.Plugin)
    return _needed_s(plugin), {alert.kind: _needed_s(alert) for alert in plugin.alerts}


def _needed_s(shown: health_state.Plugin | health_state.Alert) -> float | None:
    times = shown.recovery
    return None if times is None else (times.until - times.since).total_seconds()
