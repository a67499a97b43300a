from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st

from muster import vocabulary
from muster.vocabulary import AlertKind, AlertState, Health, StopReason, Verdict
from muster_health.fleet import detector
from muster_health.model import config, signals, snapshot

ZERO = datetime(2026, 11, 21, tzinfo=UTC)
GPU = "nvidia.com/gpu"
Change = vocabulary.VerdictChanged | vocabulary.AlertChanged | vocabulary.RemediationDecided
SETTINGS = config.Detection(patience_s=0.0, hold_s=5.0, hold_max_s=40.0, flap_window_s=100.0)
LINK_S = SETTINGS.reconnect_s
MANY = 10_000


@dataclass
class Plugin:
    """A simulated plugin that sends a heartbeat each second, with its actual condition."""

    node: str
    alive: bool = True
    frozen: bool = False
    stopped: bool = False
    apart: bool = False
    broken: set[str] = field(default_factory=set)
    instance: int = 0
    seq: int = 0
    sequence: int = 0
    wronged_at: float = -100.0

    def beat(self) -> vocabulary.Heartbeat:
        self.seq += 1
        return vocabulary.Heartbeat(
            node=self.node,
            plugin="p",
            instance=f"{self.node}-{self.instance}",
            seq=self.seq,
            interval_s=1.0,
            resources=(
                vocabulary.ResourceBeat(
                    name=GPU, streams=int(not self.apart), probe_ok=True, probe_age_s=0.0
                ),
            ),
        )


class World:
    """A virtual clock, plugins, a bus that can fail, and a health service that can crash."""

    def __init__(self, *nodes: str) -> None:
        self.now = 0.0
        self.plugins = {node: Plugin(node) for node in nodes}
        self.stored: dict[str, bytes] = {}
        self.published: dict[str, Change] = {}
        self.published_ids: list[str] = []
        self.crash_after = MANY
        self._answers: list[tuple[float, signals.Input]] = []
        self._events: list[signals.FromPlugin] = []
        self._again: list[signals.FromPlugin] = []
        self._boots = 0
        self._link = True
        self._beats_due = 0.3
        self._boot()

    # events outside health

    def kill(self, node: str) -> None:
        plugin = self.plugins[node]
        plugin.alive, plugin.wronged_at = False, self.now

    def freeze(self, node: str) -> None:
        plugin = self.plugins[node]
        plugin.frozen, plugin.wronged_at = True, self.now

    def mend(self, node: str) -> None:
        plugin = self.plugins[node]
        if plugin.frozen or not plugin.alive or plugin.apart:
            plugin.wronged_at = self.now
        if not plugin.alive or plugin.stopped:
            plugin.instance, plugin.seq, plugin.sequence = plugin.instance + 1, 0, 0
            self._report(plugin, started(node, f"{node}-{plugin.instance}"))
        plugin.alive, plugin.frozen, plugin.stopped, plugin.apart = True, False, False, False
        self.report(node)

    def stop(self, node: str) -> None:
        plugin = self.plugins[node]
        if plugin.alive and not plugin.frozen:
            self._report(plugin, stopping(node))
            plugin.alive, plugin.stopped = False, True

    def part(self, node: str) -> None:
        plugin = self.plugins[node]
        plugin.apart, plugin.wronged_at = True, self.now

    def turn(self, node: str, device: str, *, unhealthy: bool, lost: bool = False) -> None:
        plugin = self.plugins[node]
        if unhealthy == (device in plugin.broken):
            return
        plugin.broken ^= {device}
        if not lost:
            self._report(plugin, turned(node, device, unhealthy=unhealthy))

    def report(self, node: str) -> None:
        plugin = self.plugins[node]
        self._report(plugin, inventory(node, plugin.broken))

    def cut(self, seconds: float) -> None:
        self._link = False
        self._feed(signals.BusLost())
        self._answers.clear()
        self.run(seconds)
        self._link = True
        self._feed(signals.BusBack(at=ZERO + timedelta(seconds=self.now)))

    def stall(self, seconds: float) -> None:
        self.now += seconds

    def crash(self, away_s: float = 0.0) -> None:
        self.now += away_s
        self._boot()

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        for at in self._moments(end):
            self.now = max(at, self.now)
            self._turn()
        self.now = max(end, self.now)

    # results of health

    def alerts(self) -> list[tuple[str, AlertKind, str]]:
        """Return the alerts that fire; assert that their changes were published in order."""
        firing: dict[str, vocabulary.AlertChanged] = {}
        for event in self.published.values():
            if not isinstance(event, vocabulary.AlertChanged):
                continue
            before = firing.pop(event.fingerprint, None)
            if event.change == 0:
                assert before is None, "fired twice"
            else:
                assert before is not None, "changed what did not fire"
                assert (before.starts_at, before.change) == (event.starts_at, event.change - 1)
            if event.state is AlertState.FIRING:
                firing[event.fingerprint] = event
        return sorted((e.node, e.kind, "".join(e.devices)) for e in firing.values())

    def verdicts(self) -> dict[str, Verdict]:
        return {
            event.node: event.verdict
            for event in self.published.values()
            if isinstance(event, vocabulary.VerdictChanged)
        }

    def _boot(self) -> None:
        self.crash_after = MANY
        self._boots += 1
        self._zero = -1000.0 * self._boots
        self._answers.clear()
        self.detector = detector.Detector(
            SETTINGS, runbook_url="", at_zero=ZERO + timedelta(seconds=self._zero)
        )
        for value in list(self.stored.values()):
            self._feed(signals.Restored(state=snapshot.decode(value)))
        self._feed(signals.BusBack(at=ZERO + timedelta(seconds=self.now)))

    @property
    def _clock(self) -> float:
        return self.now - self._zero

    def _moments(self, end: float) -> Iterator[float]:
        while True:
            due = self.detector.next_deadline()
            waits = [self._beats_due, *(at for at, _ in self._answers)]
            if due is not None:
                waits.append(due + self._zero)
            if min(waits) > end:
                return
            yield min(waits)

    def _turn(self) -> None:
        due = self.detector.next_deadline()
        if due is not None and due <= self._clock:
            boots = self._boots
            self._do(self.detector.tick(self._clock))
            later = self.detector.next_deadline()
            assert later is None or later > self._clock or boots != self._boots
        for at, answer in sorted(self._answers, key=lambda pair: pair[0]):
            if at <= self.now and (at, answer) in self._answers:
                self._answers.remove((at, answer))
                self._feed(answer)
        if self._beats_due <= self.now:
            self._beats_due = self.now + 1.0
            self._listen()

    def _listen(self) -> None:
        if not self._link:
            return
        for plugin in self.plugins.values():
            if plugin.alive and not plugin.frozen:
                self._feed(signals.HeartbeatArrived(heartbeat=plugin.beat()))
        while self._events:
            self._feed(self._events.pop(0))
        # an event that was not acknowledged before a crash is delivered again, after later ones
        self._events, self._again = self._again, []

    def _report(self, plugin: Plugin, event: vocabulary.PluginEvent) -> None:
        plugin.sequence += 1
        self._events.append(
            signals.FromPlugin(
                event=event,
                instance=f"{plugin.node}-{plugin.instance}",
                sequence=plugin.sequence,
            )
        )

    def _feed(self, event: signals.Input) -> None:
        boots = self._boots
        self._do(self.detector.receive(event, self._clock))
        if boots != self._boots and isinstance(event, signals.FromPlugin):
            self._again.append(event)

    def _do(self, outs: list[signals.Output]) -> None:
        for out in outs:
            if self.crash_after == 0:
                self._boot()
                return
            self.crash_after -= 1
            match out:
                case signals.Probe():
                    self._answers.append(self._answer(out))
                case signals.Store():
                    self.stored[out.key] = out.value
                case signals.Publish():
                    self._publish(out)
                case signals.Noted():
                    pass

    def _publish(self, out: signals.Publish) -> None:
        self.published_ids.append(out.event_id)
        before = self.published.setdefault(out.event_id, out.event)
        assert before == out.event, "one id, two facts"
        assert not isinstance(out.event, vocabulary.RemediationDecided)
        assert out.event.evidence
        if isinstance(out.event, vocabulary.VerdictChanged) and before is out.event:
            plugin = self.plugins[out.event.node]
            right = {
                Verdict.PLUGIN_DOWN: not plugin.alive,
                Verdict.STUCK: plugin.frozen,
                Verdict.DEREGISTERED: plugin.apart,
            }.get(out.event.verdict, True)
            assert right or self.now - plugin.wronged_at < 4.0, out.event

    def _answer(self, probe: signals.Probe) -> tuple[float, signals.Input]:
        plugin = self.plugins[probe.node]
        if plugin.alive and not plugin.frozen:
            answer = signals.ProbeAnswered(heartbeat=plugin.beat(), number=probe.number)
            return self.now + 0.01, answer
        failed = signals.ProbeFailed(
            node=probe.node, plugin="p", number=probe.number, subscribed=plugin.alive
        )
        return self.now + (probe.timeout_s if plugin.alive else 0.01), failed


def started(node: str, instance: str) -> vocabulary.PluginStarted:
    return vocabulary.PluginStarted(node=node, at=ZERO, plugin="p", version="1", instance=instance)


def stopping(node: str) -> vocabulary.PluginStopping:
    return vocabulary.PluginStopping(node=node, at=ZERO, plugin="p", reason=StopReason.SIGNAL)


def turned(node: str, device: str, *, unhealthy: bool) -> vocabulary.DeviceHealthChanged:
    return vocabulary.DeviceHealthChanged(
        node=node,
        at=ZERO,
        plugin="p",
        resource=GPU,
        device_id=device,
        health=Health.UNHEALTHY if unhealthy else Health.HEALTHY,
        reason="XID 79",
    )


def inventory(node: str, broken: set[str]) -> vocabulary.InventoryReported:
    return vocabulary.InventoryReported(
        node=node,
        at=ZERO,
        plugin="p",
        devices=tuple(
            vocabulary.Device(
                id=device,
                resource=GPU,
                health=Health.UNHEALTHY if device in broken else Health.HEALTHY,
            )
            for device in ("0", "1")
        ),
    )


def running(*nodes: str) -> World:
    world = World(*nodes)
    world.run(10.0)
    assert world.verdicts() == dict.fromkeys(nodes, Verdict.HEALTHY)
    return world


def test_a_killed_plugin_is_down_within_three_intervals_and_is_resolved_when_back() -> None:
    world = running("a", "b.c")
    world.kill("b.c")
    world.run(3.0)

    assert world.alerts() == [("b.c", AlertKind.PLUGIN_DOWN, "")]
    world.mend("b.c")
    world.run(4.0)
    assert (world.alerts(), world.verdicts()["b.c"]) == ([], Verdict.HEALTHY)


def test_a_suspended_process_is_stuck_within_its_silence_and_the_probe() -> None:
    world = running("a")
    world.freeze("a")
    world.run(4.5)

    assert world.alerts() == [("a", AlertKind.STUCK, "")]


def test_a_plugin_without_its_kubelet_is_deregistered() -> None:
    world = running("a")
    world.part("a")
    world.run(4.0)

    assert world.alerts() == [("a", AlertKind.DEREGISTERED, "")]


def test_a_plugin_that_leaves_as_planned_alerts_only_when_it_is_overdue() -> None:
    world = running("a")
    world.stop("a")
    world.run(299.0)
    assert (world.alerts(), world.verdicts()) == ([], {"a": Verdict.MAINTENANCE})
    world.run(3.0)
    assert world.alerts() == [("a", AlertKind.MAINTENANCE_OVERDUE, "")]

    world.mend("a")
    world.run(4.0)
    assert (world.alerts(), world.verdicts()) == ([], {"a": Verdict.HEALTHY})


def test_device_alerts_stay_while_the_plugin_is_silent() -> None:
    world = running("a")
    world.turn("a", "0", unhealthy=True)
    world.run(1.0)
    world.kill("a")
    world.run(3.0)

    assert world.alerts() == [
        ("a", AlertKind.DEVICE_UNHEALTHY, "0"),
        ("a", AlertKind.PLUGIN_DOWN, ""),
    ]


def test_an_alert_says_what_where_why_and_what_to_do() -> None:
    world = running("a")
    world.turn("a", "0", unhealthy=True)
    world.run(1.0)

    fact = list(world.published.values())[-1]

    assert isinstance(fact, vocabulary.AlertChanged)
    assert (fact.summary, fact.evidence, fact.runbook) == (
        "nvidia.com/gpu 0 on a is unhealthy: XID 79",
        (vocabulary.Evidence(source="plugin", observed="0: XID 79"),),
        "device_unhealthy.html",
    )


def test_an_outage_of_nats_leads_to_no_verdict_and_a_plugin_that_died_meanwhile_is_detected() -> (
    None
):
    world = running("a", "b")
    published = len(world.published_ids)
    world.kill("b")
    world.cut(60.0)
    world.run(LINK_S)
    assert len(world.published_ids) == published

    world.run(3.0)
    assert world.alerts() == [("b", AlertKind.PLUGIN_DOWN, "")]


def test_our_own_stall_convicts_nobody() -> None:
    world = running("a")
    published = len(world.published_ids)
    world.stall(30.0)
    world.run(30.0)

    assert len(world.published_ids) == published


def test_a_leader_publishes_thousands_of_first_verdicts_in_turns() -> None:
    made = detector.Detector(SETTINGS, runbook_url="", at_zero=ZERO, leader=None)
    made.receive(signals.BusBack(at=ZERO), 0.0)
    beats = tuple(Plugin(f"n{number}").beat() for number in range(3_000))
    made.receive(signals.HeartbeatsArrived(heartbeats=beats), 0.5)
    now = 1.0
    outs = made.receive(signals.Leadership(revision=7), now)
    for _ in range(50):
        outs += made.tick(now)
        due = made.next_deadline()
        assert due is not None
        now = max(now, due)
        if now >= 2.0:
            break
    verdicts = [
        out.event.verdict
        for out in outs
        if isinstance(out, signals.Publish) and isinstance(out.event, vocabulary.VerdictChanged)
    ]
    assert verdicts == [Verdict.HEALTHY] * 500


def test_a_new_leader_publishes_alerts_before_the_first_verdicts_of_healthy_plugins() -> None:
    made = detector.Detector(SETTINGS, runbook_url="", at_zero=ZERO, leader=None)
    made.receive(signals.BusBack(at=ZERO), 0.0)
    plugins = [Plugin(f"n{number}") for number in range(1_000)]
    for second in range(1, 75):
        beats = [plugin.beat() for plugin in plugins]
        # one device of the last plugin is gone
        beats[-1] = with_devices(beats[-1], 2 if second < 3 else 1)
        made.receive(signals.HeartbeatsArrived(heartbeats=tuple(beats)), float(second))
        made.tick(float(second))
    outs = made.receive(signals.Leadership(revision=7), 75.0)
    alerts = [
        (out.event.node, out.event.kind)
        for out in outs
        if isinstance(out, signals.Publish) and isinstance(out.event, vocabulary.AlertChanged)
    ]
    assert alerts == [("n999", AlertKind.DEVICES_SHORT)]


def with_devices(heartbeat: vocabulary.Heartbeat, count: int) -> vocabulary.Heartbeat:
    """Return a heartbeat that reports this many devices, all of them healthy."""
    (resource,) = heartbeat.resources
    more = msgspec.structs.replace(resource, devices=count, healthy=count, extended=True)
    return msgspec.structs.replace(heartbeat, resources=(more,))


def test_a_plugin_killed_while_health_was_down_is_detected() -> None:
    world = running("a", "b")
    world.kill("a")
    world.crash(away_s=3600.0)
    world.run(LINK_S + 3.0)

    assert world.alerts() == [("a", AlertKind.PLUGIN_DOWN, "")]


def test_a_restart_publishes_nothing_twice() -> None:
    world = running("a", "b")
    world.kill("a")
    world.turn("b", "0", unhealthy=True)
    world.run(10.0)
    published = list(world.published_ids)
    world.crash()
    world.run(60.0)

    assert world.published_ids == published


@pytest.mark.parametrize("outs", range(8))
def test_a_crash_while_publishing_loses_nothing(outs: int) -> None:
    world = running("a")
    world.turn("a", "0", unhealthy=True)
    world.kill("a")
    world.crash_after = outs
    world.run(30.0)

    assert world.alerts() == [
        ("a", AlertKind.DEVICE_UNHEALTHY, "0"),
        ("a", AlertKind.PLUGIN_DOWN, ""),
    ]


def test_an_event_delivered_again_after_newer_ones_changes_nothing() -> None:
    world = running("a")
    broke = signals.FromPlugin(event=turned("a", "0", unhealthy=True), instance="i", sequence=1)
    healed = signals.FromPlugin(event=turned("a", "0", unhealthy=False), instance="i", sequence=2)
    for event in (broke, healed, broke):
        world._feed(event)

    assert world.alerts() == []


NODES = st.sampled_from(["a", "b"])
DEVICES = st.sampled_from(["0", "1"])
SECONDS = st.floats(0.01, 20.0)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("run"), SECONDS),
        st.tuples(st.just("kill"), NODES),
        st.tuples(st.just("freeze"), NODES),
        st.tuples(st.just("mend"), NODES),
        st.tuples(st.just("stop"), NODES),
        st.tuples(st.just("part"), NODES),
        st.tuples(st.just("report"), NODES),
        st.tuples(st.just("turn"), NODES, DEVICES, st.booleans(), st.booleans()),
        st.tuples(st.just("cut"), SECONDS),
        st.tuples(st.just("stall"), SECONDS),
        st.tuples(st.just("crash"), SECONDS),
        st.tuples(st.just("crash_after"), st.integers(0, 12)),
    ),
    max_size=30,
)


def play(world: World, steps: list[tuple[object, ...]]) -> None:
    for step in steps:
        match step:
            case ("turn", str(node), str(device), bool(unhealthy), bool(lost)):
                world.turn(node, device, unhealthy=unhealthy, lost=lost)
            case ("crash_after", int(outs)):
                world.crash_after = outs
            case (str(name), value):
                getattr(world, name)(value)
            case _:
                raise AssertionError(step)


# the failure behind FLAPPING is due to be reported while queries about it are pending
FLAPPING_UNDER_REVIEW = [
    ("part", "a"),
    ("run", 3.0),
    ("kill", "a"),
    ("run", 2.0),
    ("mend", "a"),
    ("run", 6.0),
    ("kill", "a"),
]


@hypothesis.example(FLAPPING_UNDER_REVIEW)
@hypothesis.given(STEPS)
@hypothesis.settings(max_examples=150, deadline=None)
def test_whatever_happens_the_truth_is_reported_and_all_is_resolved_once_healthy(
    steps: list[tuple[object, ...]],
) -> None:
    world = World("a", "b")
    play(world, steps)
    world.mend("a")
    world.run(60.0)
    world.mend("b")
    world.kill("a")
    world.turn("b", "0", unhealthy=True)
    world.report("b")
    world.run(120.0)
    broken = [
        (node, AlertKind.DEVICE_UNHEALTHY, "".join(sorted(plugin.broken)))
        for node, plugin in world.plugins.items()
        if plugin.broken
    ]
    assert world.alerts() == sorted([("a", AlertKind.PLUGIN_DOWN, ""), *broken])

    for plugin in world.plugins.values():
        plugin.broken.clear()
    world.mend("a")
    world.report("b")
    world.run(60.0)
    assert world.alerts() == []
    assert world.verdicts() == {"a": Verdict.HEALTHY, "b": Verdict.HEALTHY}


@hypothesis.given(
    st.lists(
        st.tuples(st.sampled_from(["run", "cut", "stall", "crash"]), st.floats(0.01, 120.0)),
        max_size=20,
    )
)
@hypothesis.settings(max_examples=100, deadline=None)
def test_no_outage_stall_or_restart_of_ours_publishes_anything(
    steps: list[tuple[object, ...]],
) -> None:
    world = running("a", "b")
    published = list(world.published_ids)
    play(world, steps)
    world.run(60.0)

    assert world.published_ids == published
