import dataclasses
import gc
import tracemalloc
from datetime import UTC, datetime

import msgspec
import pytest

from muster import vocabulary
from muster.vocabulary import Verdict
from muster_health.model import config, signals, snapshot, steps
from muster_health.model.signals import Note
from muster_health.model.snapshot import State
from muster_health.model.steps import Rule
from muster_health.plugin import tracked_plugin, watched_plugin

AT = datetime(2026, 11, 21, tzinfo=UTC)
GPU = "nvidia.com/gpu"
SETTINGS = config.Detection()
GOOD = vocabulary.ResourceBeat(name=GPU, streams=1, probe_ok=True, probe_age_s=0.1)
APART = vocabulary.ResourceBeat(name=GPU, problem="kubelet refuses registration: UNAVAILABLE")
DEAF = vocabulary.ResourceBeat(name=GPU, streams=1, probe_ok=False, probe_age_s=1.0)


def context(*, has_cluster: bool = False, leader: int | None = None) -> config.Context:
    return config.Context(
        settings=SETTINGS,
        bounds=config.Bounds(),
        runbook_url="",
        has_cluster=has_cluster,
        leader=leader,
    )


def tracked(now: float, *, has_cluster: bool = False) -> tracked_plugin.TrackedPlugin:
    about = context(has_cluster=has_cluster)
    return tracked_plugin.TrackedPlugin("node-a", "device-plugin", about, now=now)


class Plugin:
    """A simulated plugin with a heartbeat each second, and the `TrackedPlugin` that watches it."""

    def __init__(self) -> None:
        self.machine = tracked(0.0)
        self.instance = "one"
        self.seq = self.sequence = 0

    def beat(
        self,
        at: float,
        resource: vocabulary.ResourceBeat = GOOD,
        *,
        phase: vocabulary.Phase = vocabulary.Phase.SERVING,
        made_at: float | None = None,
    ) -> list[steps.Effect]:
        heartbeat = self.heartbeat(at, resource, phase=phase, made_at=made_at)
        return self.receive(heartbeat, at)

    def heartbeat(
        self,
        at: float,
        resource: vocabulary.ResourceBeat = GOOD,
        *,
        phase: vocabulary.Phase = vocabulary.Phase.SERVING,
        made_at: float | None = None,
    ) -> vocabulary.Heartbeat:
        self.seq += 1
        return vocabulary.Heartbeat(
            node="node-a",
            plugin="device-plugin",
            instance=self.instance,
            seq=self.seq,
            interval_s=1.0,
            uptime_s=100.0 + (at if made_at is None else made_at),
            phase=phase,
            resources=(resource,),
        )

    def stops(self, at: float, expected_return_s: float = 0.0) -> list[steps.Effect]:
        event = vocabulary.PluginStopping(
            node="node-a",
            at=AT,
            plugin="device-plugin",
            reason=vocabulary.StopReason.UPGRADE,
            expected_return_s=expected_return_s,
        )
        return self.reports(event, at)

    def suspected(self, at: float) -> int:
        noted, question = self.machine.tick(at)
        assert noted == signals.Noted(note=Note.SUSPECTED)
        assert isinstance(question, signals.Probe)
        return question.number

    def reports(self, event: vocabulary.PluginEvent, at: float) -> list[steps.Effect]:
        self.sequence += 1
        reported = signals.FromPlugin(event=event, instance=self.instance, sequence=self.sequence)
        return self.receive(reported, at)

    def failed(self, number: int, at: float, *, subscribed: bool) -> list[steps.Effect]:
        failed = signals.ProbeFailed(
            node="node-a", plugin="device-plugin", number=number, subscribed=subscribed
        )
        return self.receive(failed, at)

    def answered(
        self, heartbeat: vocabulary.Heartbeat, number: int, at: float
    ) -> list[steps.Effect]:
        return self.receive(signals.ProbeAnswered(heartbeat=heartbeat, number=number), at)

    def inconclusive(self, number: int, at: float) -> list[steps.Effect]:
        event = signals.ProbeInconclusive(node="node-a", plugin="device-plugin", number=number)
        return self.receive(event, at)

    def cluster_answered(self, answer: signals.Facts, number: int, at: float) -> list[steps.Effect]:
        event = signals.ClusterAnswered(
            node="node-a", plugin="device-plugin", number=number, facts=answer
        )
        return self.receive(event, at)

    def offered(self, offers: dict[str, signals.Offer], at: float) -> None:
        self.receive(signals.NodeOffers(node="node-a", offers=offers), at)

    def receive(self, event: steps.Event, at: float) -> list[steps.Effect]:
        return but_changes(self.machine.receive(event, at))

    def tick(self, at: float) -> list[steps.Effect]:
        return but_changes(self.machine.tick(at))

    @property
    def state(self) -> State:
        return self.machine.verdict.state

    @property
    def verdict(self) -> Verdict | None:
        return self.machine.current_verdict

    @property
    def deadline(self) -> float | None:
        return self.machine.next_deadline()


def but_changes(effects: list[steps.Effect]) -> list[steps.Effect]:
    return [effect for effect in effects if effect is not steps.CHANGED]


def healthy() -> Plugin:
    plugin = Plugin()
    plugin.beat(1.0)
    assert plugin.state is State.HEALTHY
    return plugin


def down() -> Plugin:
    plugin = healthy()
    plugin.failed(plugin.suspected(3.5), 3.5, subscribed=False)
    assert plugin.state is State.LOST
    return plugin


def concluded(
    verdict: Verdict,
    previous: Verdict | None,
    rule: Rule,
    *evidence: tuple[str, str],
    resources: tuple[str, ...] = (GPU,),
) -> steps.VerdictReached:
    return steps.VerdictReached(
        verdict=verdict,
        previous=previous,
        rule=rule,
        resources=resources,
        evidence=tuple(vocabulary.Evidence(source=who, observed=what) for who, what in evidence),
    )


def convicted(seconds: float) -> signals.Noted:
    return signals.Noted(note=Note.VERDICT_REACHED, seconds=seconds)


STARTED = vocabulary.PluginStarted(
    node="node-a", at=AT, plugin="device-plugin", version="1", instance="one"
)
UNDECIDED = (
    "health",
    "without the Kubernetes API, a dead plugin cannot be distinguished from a dead node",
)
CONFIRMED = signals.Noted(note=Note.CONFIRMED)
REFUTED = signals.Noted(note=Note.REFUTED)


def test_a_first_good_heartbeat_is_believed() -> None:
    assert Plugin().beat(1.0) == [
        concluded(
            Verdict.HEALTHY,
            None,
            Rule.FIRST_SIGN_OF_LIFE,
            ("heartbeat", "alive, reports no problem"),
        )
    ]


def test_silence_of_two_and_a_half_intervals_is_suspicious_and_asks() -> None:
    plugin = healthy()

    assert plugin.deadline == 3.5
    assert plugin.tick(3.499) == []
    assert plugin.tick(3.5) == [
        signals.Noted(note=Note.SUSPECTED),
        probe(1),
    ]
    assert plugin.state is State.SUSPECT


def test_a_plugin_known_only_by_an_event_is_probed_too() -> None:
    plugin = Plugin()
    plugin.reports(STARTED, 0.0)

    number = plugin.suspected(2.5 * SETTINGS.interval_s)

    assert plugin.failed(number, 12.5, subscribed=False) == [
        CONFIRMED,
        concluded(
            Verdict.PLUGIN_DOWN,
            None,
            Rule.NOBODY_LISTENS,
            ("heartbeat", "none for 12.5 s, 2.5 intervals of 5 s"),
            ("probe", "no process is subscribed to the plugin's subject in NATS"),
            UNDECIDED,
            resources=(),
        ),
        convicted(12.5),
    ]


def test_an_answered_probe_refutes_silence() -> None:
    plugin = healthy()
    number = plugin.suspected(3.5)

    assert plugin.answered(plugin.heartbeat(3.6), number, 3.6) == [REFUTED]
    assert (plugin.state, plugin.deadline) == (State.HEALTHY, 6.1)


def test_a_fresh_heartbeat_refutes_silence_and_a_late_answer_does_not_matter() -> None:
    plugin = healthy()
    number = plugin.suspected(3.5)

    assert plugin.beat(3.6) == [REFUTED]
    assert plugin.failed(number, 5.5, subscribed=True) == []
    assert plugin.state is State.HEALTHY


def test_silence_that_nobody_listens_to_is_a_plugin_down() -> None:
    plugin = healthy()

    assert plugin.failed(plugin.suspected(3.5), 3.51, subscribed=False) == [
        CONFIRMED,
        concluded(
            Verdict.PLUGIN_DOWN,
            Verdict.HEALTHY,
            Rule.NOBODY_LISTENS,
            ("heartbeat", "none for 2.5 s, 2.5 intervals of 1 s"),
            ("probe", "no process is subscribed to the plugin's subject in NATS"),
            UNDECIDED,
        ),
        convicted(3.51 - 1.0),
    ]


def test_silence_with_a_listener_that_does_not_answer_is_a_plugin_stuck() -> None:
    plugin = healthy()

    assert plugin.failed(plugin.suspected(3.5), 5.5, subscribed=True) == [
        CONFIRMED,
        concluded(
            Verdict.STUCK,
            Verdict.HEALTHY,
            Rule.NO_ANSWER,
            ("heartbeat", "none for 4.5 s, 4.5 intervals of 1 s"),
            ("probe", "the plugin is subscribed but did not answer within 2 s"),
        ),
        convicted(4.5),
    ]


WELL = signals.Facts(
    exists=True,
    lease_age_s=0.0,
    ready=True,
    pods=(signals.Pod(name="m/p", uid="1", phase="Running", ready=True),),
)


def probe(number: int) -> signals.Probe:
    return signals.Probe(node="node-a", plugin="device-plugin", number=number, timeout_s=2.0)


def question(number: int) -> signals.AskCluster:
    return signals.AskCluster(node="node-a", plugin="device-plugin", number=number, timeout_s=2.0)


def undecided_by_its_pod() -> Plugin:
    """Return a plugin silent since 1.0 that does not answer, but whose pod is well."""
    plugin = Plugin()
    plugin.machine = tracked(0.0, has_cluster=True)
    plugin.beat(1.0)
    _, *asked = plugin.tick(3.5)
    assert asked == [probe(1), question(2)]
    assert plugin.cluster_answered(WELL, 2, 3.6) == []
    assert plugin.failed(1, 5.5, subscribed=True) == []
    return plugin


def test_while_kubernetes_is_asked_again_so_is_the_plugin() -> None:
    plugin = undecided_by_its_pod()

    assert plugin.deadline == 7.5
    assert plugin.tick(7.5) == [probe(1), question(3)]
    # the plugin is back, and its next heartbeat would be an interval away
    assert plugin.answered(plugin.heartbeat(7.6), 1, 7.6) == [REFUTED]
    assert plugin.state is State.HEALTHY


def test_the_result_of_a_probe_stands_when_the_next_one_is_inconclusive() -> None:
    plugin = undecided_by_its_pod()
    plugin.tick(7.5)

    assert plugin.inconclusive(1, 7.6) == []
    assert plugin.state is State.SUSPECT
    assert WELL.pods is not None
    pod = dataclasses.replace(WELL.pods[0], ready=False)
    not_ready = dataclasses.replace(WELL, lease_age_s=0.0, pods=(pod,))
    _, reached, _ = plugin.cluster_answered(not_ready, 3, 7.7)
    assert isinstance(reached, steps.VerdictReached)
    assert (reached.verdict, reached.rule) == (Verdict.STUCK, Rule.NO_ANSWER)


def test_an_inconclusive_probe_is_repeated_and_the_next_result_decides() -> None:
    plugin = healthy()
    number = plugin.suspected(3.5)

    assert plugin.inconclusive(number, 4.0) == []
    assert (plugin.state, plugin.deadline) == (State.SUSPECT, 5.0)
    assert plugin.tick(5.0) == [probe(number)]
    noted, reached, *_ = plugin.failed(number, 5.1, subscribed=False)
    assert noted == CONFIRMED
    assert isinstance(reached, steps.VerdictReached)
    assert (reached.verdict, reached.rule) == (Verdict.PLUGIN_DOWN, Rule.NOBODY_LISTENS)


def test_after_four_inconclusive_probes_the_wait_begins_anew() -> None:
    plugin = healthy()
    number = plugin.suspected(3.5)

    for at in (4.0, 5.5, 7.0):
        assert plugin.inconclusive(number, at) == []
        assert plugin.tick(at + 1.0) == [probe(number)]
    assert plugin.inconclusive(number, 8.5) == []
    assert (plugin.state, plugin.deadline) == (State.HEALTHY, 11.0)


def test_a_burst_out_of_a_backlog_refutes_nothing() -> None:
    plugin = healthy()
    number = plugin.suspected(3.5)

    assert [plugin.beat(20.0, made_at=made) for made in (2.0, 3.0, 4.0, 5.0)] == [[]] * 4
    assert plugin.failed(number, 20.1, subscribed=False)[0] == CONFIRMED


def test_a_repeated_heartbeat_is_stale() -> None:
    plugin = healthy()
    plugin.seq -= 1

    assert plugin.beat(2.0) == [signals.Noted(note=Note.HEARTBEAT_STALE)]


def test_a_crashed_plugin_that_is_back_in_time_stays_healthy() -> None:
    plugin = healthy()
    plugin.instance, plugin.seq = "two", 0

    assert plugin.beat(3.0) == []
    assert plugin.state is State.HEALTHY


def test_a_late_heartbeat_of_the_former_instance_is_stale() -> None:
    plugin = healthy()
    plugin.instance, plugin.seq = "two", 0
    plugin.beat(2.0)
    plugin.instance, plugin.seq = "one", 7

    assert plugin.beat(2.1) == [signals.Noted(note=Note.HEARTBEAT_STALE)]


def test_a_problem_that_lasts_two_heartbeats_is_a_plugin_deregistered() -> None:
    plugin = healthy()

    assert plugin.beat(2.0, APART) == []
    assert plugin.beat(3.0, APART) == []
    assert plugin.beat(4.0, APART) == [
        concluded(
            Verdict.DEREGISTERED,
            Verdict.HEALTHY,
            Rule.NOT_REGISTERED,
            ("plugin", f"{GPU}: kubelet refuses registration: UNAVAILABLE"),
        ),
        convicted(2.0),
    ]


def test_a_problem_that_the_plugin_repairs_in_time_is_no_verdict() -> None:
    plugin = healthy()
    plugin.beat(2.0, APART)

    assert plugin.beat(3.0) == []
    assert (plugin.state, plugin.deadline) == (State.HEALTHY, 5.5)


def test_a_first_heartbeat_with_a_problem_is_not_called_healthy() -> None:
    plugin = Plugin()

    assert [plugin.beat(at, APART) for at in (1.0, 2.0)] == [[], []]
    assert plugin.beat(3.0, APART)[0] == concluded(
        Verdict.DEREGISTERED,
        None,
        Rule.NOT_REGISTERED,
        ("plugin", f"{GPU}: kubelet refuses registration: UNAVAILABLE"),
    )


def test_between_two_heartbeats_a_problem_is_probed() -> None:
    plugin = healthy()
    plugin.beat(2.0, APART)
    number = plugin.suspected(4.0)

    assert plugin.answered(plugin.heartbeat(4.1, DEAF), number, 4.1) == [
        CONFIRMED,
        concluded(
            Verdict.STUCK,
            Verdict.HEALTHY,
            Rule.SELF_PROBE_FAILS,
            (
                "plugin",
                f"{GPU}: registered, but its socket does not answer (self-probe 1.0 s ago)",
            ),
        ),
        convicted(4.1 - 2.0),
    ]


def test_an_answer_without_a_problem_refutes_it() -> None:
    plugin = healthy()
    plugin.beat(2.0, APART)

    assert plugin.answered(plugin.heartbeat(4.1), plugin.suspected(4.0), 4.1) == [REFUTED]
    assert plugin.state is State.HEALTHY


def test_a_failed_probe_about_a_problem_decides_nothing() -> None:
    plugin = healthy()
    plugin.beat(2.0, APART)

    assert plugin.failed(plugin.suspected(4.0), 4.1, subscribed=False) == []
    assert (plugin.state, plugin.deadline) == (State.HEALTHY, 4.5)


def test_an_event_of_a_lost_registration_is_worth_a_question() -> None:
    plugin = healthy()
    event = vocabulary.PluginDeregistered(
        node="node-a",
        at=AT,
        plugin="device-plugin",
        resource=GPU,
        reason=vocabulary.RegistrationReason.STREAM_CLOSED,
    )

    assert plugin.reports(event, 1.1) == []
    assert plugin.suspected(3.1) == 1


def test_a_draining_plugin_may_lose_its_streams() -> None:
    plugin = healthy()

    assert [
        plugin.beat(at, APART, phase=vocabulary.Phase.DRAINING) for at in (2.0, 3.0, 4.0, 5.0)
    ] == [[]] * 4


def test_a_lost_plugin_is_recovered_after_three_good_heartbeats() -> None:
    plugin = down()
    plugin.instance, plugin.seq = "two", 0

    assert [plugin.beat(10.0), plugin.beat(11.0)] == [[], []]
    assert plugin.state is State.RECOVERING
    assert plugin.beat(12.0) == [
        concluded(
            Verdict.HEALTHY,
            Verdict.PLUGIN_DOWN,
            Rule.RECOVERED,
            ("heartbeat", "3 good heartbeats since it came back"),
        )
    ]


def test_a_slow_plugin_is_recovered_fifteen_seconds_after_its_first_heartbeat() -> None:
    plugin = down()
    slow = vocabulary.Heartbeat(
        node="node-a",
        plugin="device-plugin",
        instance="two",
        seq=1,
        interval_s=60.0,
        resources=(GOOD,),
    )
    plugin.receive(slow, 10.0)

    assert plugin.deadline == 25.0
    assert plugin.tick(25.0) == [
        concluded(
            Verdict.HEALTHY,
            Verdict.PLUGIN_DOWN,
            Rule.RECOVERED,
            ("heartbeat", "1 good heartbeat since it came back"),
        )
    ]


def test_a_plugin_that_is_silent_while_recovering_is_probed_again() -> None:
    plugin = down()
    plugin.beat(10.0)
    number = plugin.suspected(12.5)

    stuck, still = plugin.failed(number, 14.5, subscribed=True)[:2]

    assert stuck == CONFIRMED
    assert isinstance(still, steps.VerdictReached)
    assert (still.previous, still.verdict) == (Verdict.PLUGIN_DOWN, Verdict.STUCK)


def test_a_deregistered_plugin_is_recovered_after_three_good_heartbeats() -> None:
    plugin = healthy()
    for at in (2.0, 3.0, 4.0):
        plugin.beat(at, APART)

    assert [plugin.beat(5.0), plugin.beat(6.0)] == [[], []]
    assert plugin.beat(7.0)[0] == concluded(
        Verdict.HEALTHY,
        Verdict.DEREGISTERED,
        Rule.RECOVERED,
        ("heartbeat", "3 good heartbeats since it came back"),
    )


def test_an_announced_stop_is_maintenance_with_a_deadline() -> None:
    plugin = healthy()

    assert plugin.stops(2.0, expected_return_s=60.0) == [
        concluded(
            Verdict.MAINTENANCE,
            Verdict.HEALTHY,
            Rule.GOODBYE,
            ("plugin", "announced a stop (upgrade); expected back within 60 s"),
        )
    ]
    assert plugin.deadline == 62.0
    assert plugin.tick(62.0) == [
        steps.ReturnOverdue(
            evidence=(
                vocabulary.Evidence(
                    source="clock", observed="not back 60 s after it announced a stop"
                ),
            )
        )
    ]
    # the plugin is forgotten then
    assert plugin.deadline == 2.0 + 86_400.0


def test_a_stop_for_an_unknown_time_waits_as_long_as_configured() -> None:
    plugin = healthy()
    plugin.stops(2.0)

    assert plugin.deadline == 302.0


def test_a_last_heartbeat_after_the_announced_stop_is_no_return() -> None:
    plugin = healthy()
    plugin.stops(2.0)

    assert plugin.beat(2.1) == []
    assert plugin.state is State.MAINTENANCE


def test_a_new_instance_ends_the_maintenance() -> None:
    plugin = healthy()
    plugin.stops(2.0)
    plugin.instance, plugin.seq = "two", 0

    assert [plugin.beat(5.0), plugin.beat(6.0)] == [[], []]
    assert plugin.beat(7.0)[0] == concluded(
        Verdict.HEALTHY,
        Verdict.MAINTENANCE,
        Rule.RECOVERED,
        ("heartbeat", "3 good heartbeats since it came back"),
    )


def test_the_same_instance_ends_the_maintenance_when_it_reports_its_start() -> None:
    plugin = healthy()
    plugin.stops(2.0)
    plugin.reports(STARTED, 4.0)
    plugin.beat(5.0)

    assert plugin.state is State.RECOVERING


def test_after_our_own_outage_every_wait_begins_anew() -> None:
    plugin = healthy()
    number = plugin.suspected(3.5)

    plugin.receive(steps.Reconnected(window_s=5.0, paused_s=55.0), 60.0)

    assert plugin.failed(number, 60.1, subscribed=False) == []
    assert (plugin.state, plugin.deadline) == (State.HEALTHY, 67.5)
    plugin.beat(61.0)
    assert plugin.deadline == 63.5


def test_our_own_outage_prolongs_a_maintenance() -> None:
    plugin = healthy()
    plugin.stops(2.0, expected_return_s=10.0)

    plugin.receive(steps.Reconnected(window_s=0.0, paused_s=55.0), 60.0)

    assert plugin.deadline == 67.0


@pytest.mark.parametrize(
    ("state", "deadline"),
    [
        (State.HEALTHY, 102.5),
        (State.FAILING, 102.5),
        (State.LOST, 120.0),
        (State.MAINTENANCE, 130.0),
    ],
)
def test_a_restored_plugin_has_all_its_time_anew(state: State, deadline: float | None) -> None:
    machine = tracked(100.0)
    stored = snapshot.Snapshot(
        node="node-a",
        plugin="device-plugin",
        state=state,
        interval_s=1.0,
        instance="one",
        return_s=30.0,
    )

    machine.receive(signals.Restored(state=stored), 100.0)
    machine.publish(100.0, AT, lambda _: True)

    assert machine.next_deadline() == deadline


def test_an_answer_that_never_comes_ends_a_suspicion_undecided() -> None:
    plugin = healthy()
    plugin.suspected(3.5)

    assert plugin.deadline == 3.5 + 2.0 + 10.0
    assert plugin.tick(15.5) == []
    assert (plugin.state, plugin.deadline) == (State.HEALTHY, 18.0)


def test_a_plugin_that_stood_still_for_long_is_well_again_and_not_slow() -> None:
    plugin = healthy()
    for at in (2.0, 3.0):
        plugin.beat(at)
    # its loop was blocked for a minute; the next heartbeats arrive on time
    for second in range(100):
        plugin.beat(63.0 + second)

    assert plugin.machine.alive.order.stretch < SETTINGS.stretch_max
    assert plugin.verdict is Verdict.HEALTHY


def test_a_pause_is_no_pace_and_a_pace_is() -> None:
    plugin = healthy()
    plugin.beat(2.0)
    plugin.beat(62.0)
    assert plugin.machine.alive.order.stretch < SETTINGS.stretch_max
    for second in range(8):
        plugin.beat(64.0 + 2.0 * second)
    assert plugin.machine.alive.order.stretch > SETTINGS.stretch_max


def both() -> Plugin:
    """Return a plugin of which two instances send heartbeats in turn."""
    plugin = healthy()
    sequences = {"one": 10, "two": 10}
    for half in range(78):
        assert plugin.verdict is Verdict.HEALTHY or half > 60  # a rollout may look the same
        plugin.instance = "two" if half % 2 else "one"
        sequences[plugin.instance] += 1
        plugin.seq = sequences[plugin.instance]
        plugin.beat(2.0 + half / 2)
    assert plugin.verdict is Verdict.SPLIT_BRAIN
    return plugin


def test_when_one_of_two_instances_stops_the_other_is_not_in_maintenance() -> None:
    plugin = both()
    plugin.instance = "two"
    assert plugin.stops(41.1) == []
    plugin.instance, plugin.seq = "one", 100
    # the second instance, which was not announced, counts as a failure
    for second in range(40):
        plugin.beat(42.0 + second)

    assert plugin.verdict is Verdict.HEALTHY


def test_when_both_of_two_instances_stop_the_plugin_is_not_down() -> None:
    plugin = both()
    for at, plugin.instance in ((41.1, "two"), (41.2, "one")):
        plugin.stops(at)

    assert plugin.verdict is Verdict.MAINTENANCE


def test_a_plugin_that_starts_has_more_time_to_be_registered() -> None:
    plugin = Plugin()
    for second in range(1, 16):
        assert plugin.beat(float(second), APART, phase=vocabulary.Phase.STARTING) == []
        assert plugin.verdict is None
    plugin.beat(17.0, APART, phase=vocabulary.Phase.STARTING)

    assert plugin.verdict is Verdict.DEREGISTERED


def test_a_plugin_that_does_not_answer_is_stuck_and_not_only_deregistered() -> None:
    plugin = healthy()
    worse = vocabulary.ResourceBeat(
        name=GPU, problem="registering", streams=0, probe_ok=False, probe_age_s=1.0
    )
    plugin.beat(2.0, worse)
    (concluded, _) = plugin.beat(4.5, worse)

    assert isinstance(concluded, steps.VerdictReached)
    assert concluded.verdict is Verdict.STUCK
    assert [evidence.observed for evidence in concluded.evidence] == [
        f"{GPU}: its socket does not answer (self-probe 1.0 s ago); registering"
    ]


def test_two_alternating_instances_are_no_failures_however_long_each_turn_is() -> None:
    plugin = healthy()
    sequences = {"one": 10, "two": 10}
    for turn in range(12):
        plugin.instance = "two" if turn % 2 else "one"
        for second in range(4):
            sequences[plugin.instance] += 1
            plugin.seq = sequences[plugin.instance]
            plugin.beat(4.0 + 6.0 * turn + second)

    assert plugin.verdict is Verdict.SPLIT_BRAIN


HAS = vocabulary.ResourceBeat(
    name=GPU, streams=1, probe_ok=True, probe_age_s=0.1, healthy=8, registered_age_s=100.0
)
OFFERS = {GPU: signals.Offer(capacity=8, allocatable=8)}
FEWER = {GPU: signals.Offer(capacity=8, allocatable=7)}
APART_SAID = f"{GPU}: the plugin reports 8 Healthy, the node's allocatable is 7 of 8"


def settled(resource: vocabulary.ResourceBeat = HAS) -> Plugin:
    """Return a plugin whose devices have not changed for 40 s."""
    plugin = Plugin()
    plugin.offered(OFFERS, 0.5)
    for second in range(1, 41):
        plugin.beat(float(second), resource)
    return plugin


def test_a_node_that_changes_what_it_offers_is_asked_about_within_seconds() -> None:
    plugin = settled()
    plugin.offered(FEWER, 40.5)
    assert plugin.deadline == 42.5
    number = plugin.suspected(42.5)
    _, concluded, _ = plugin.answered(plugin.heartbeat(42.6, HAS), number, 42.6)

    assert isinstance(concluded, steps.VerdictReached)
    assert concluded.verdict is Verdict.MISMATCH
    assert [evidence.observed for evidence in concluded.evidence] == [APART_SAID]


def test_a_kubelet_has_its_time_to_report_a_new_registration() -> None:
    plugin = settled()
    plugin.offered(FEWER, 40.5)
    number = plugin.suspected(42.5)
    again = msgspec.structs.replace(HAS, registered_age_s=1.0)
    assert plugin.answered(plugin.heartbeat(42.6, again), number, 42.6) == [REFUTED]
    for second in range(43, 70):
        plugin.beat(float(second), again)
    assert plugin.verdict is Verdict.HEALTHY


def test_a_kubelet_has_its_time_to_report_what_the_plugin_changed() -> None:
    plugin = settled()
    fewer = msgspec.structs.replace(HAS, healthy=6)
    for second in range(41, 71):
        plugin.beat(float(second), fewer)
    verdicts = [plugin.verdict]
    plugin.beat(71.5, fewer)
    verdicts.append(plugin.verdict)

    assert verdicts == [Verdict.HEALTHY, Verdict.MISMATCH]


def test_a_healthy_plugin_takes_2_kib() -> None:
    beat = healthy().heartbeat(2.0)
    tracemalloc.start()
    try:
        plugins = [tracked(1.0) for _ in range(100)]
        for plugin in plugins:
            plugin.receive(beat, 2.0)
        assert tracemalloc.get_traced_memory()[0] < len(plugins) * 2_048
    finally:
        tracemalloc.stop()


def with_an_alert() -> Plugin:
    plugin = Plugin()
    about = context(leader=1)
    plugin.machine = tracked_plugin.TrackedPlugin("node-a", "device-plugin", about, now=0.0)
    plugin.beat(1.0)
    failed = vocabulary.DeviceHealthChanged(
        node="node-a",
        at=AT,
        plugin="device-plugin",
        resource="example.com/fuse",
        device_id="0",
        health=vocabulary.Health.UNHEALTHY,
        reason="gone",
    )
    plugin.reports(failed, 1.5)
    plugin.machine.publish(1.5, AT, lambda _: True)
    assert plugin.machine.open_kinds() == [vocabulary.AlertKind.DEVICE_UNHEALTHY]
    return plugin


def watched() -> watched_plugin.WatchedPlugin:
    return watched_plugin.WatchedPlugin("node-a", "amd.com/gpu", context(), now=0.0)


def test_plugins_are_freed_without_the_garbage_collector() -> None:
    # the collector does not track their parts, so a cycle of references would never be freed
    kinds = (healthy, down, undecided_by_its_pod, with_an_alert, watched)
    plugins: list[object] = [begin() for begin in kinds]
    gc.disable()
    tracemalloc.start()
    try:
        plugins += [begin() for _ in range(50) for begin in kinds]
        held, _ = tracemalloc.get_traced_memory()
        plugins.clear()
        assert tracemalloc.get_traced_memory()[0] < held / 10
    finally:
        tracemalloc.stop()
        gc.enable()
