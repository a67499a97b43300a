"""Regression tests for hostile or unfortunate inputs that once broke the detector."""

from collections import Counter
from dataclasses import dataclass
from datetime import timedelta

import msgspec

from muster import vocabulary
from muster.vocabulary import AlertKind, AlertState, Health, Remedy, Verdict
from muster_health.model import config, signals, snapshot
from tests.worlds.detector_fleet import GPU, ZERO, Plugin, World

RESTARTS = config.Remediation(mode=config.RemediationMode.RESTART_PLUGIN)


@dataclass
class Told(Plugin):
    """A simulated plugin for which a test can set the facts that Kubernetes reports."""

    known: signals.Facts | None = None

    def facts(self, now: float) -> signals.Facts:
        return self.known or super().facts(now)


def world_of(*nodes: str, expected: bool = True, **how: object) -> World:
    """Return a world in which all plugins are healthy and, by default, expected."""
    world = World(*nodes, **how)  # type: ignore[arg-type]  # keywords
    world.plugins = {node: Told(node, interval_s=world.interval_s) for node in nodes}
    if expected:
        expect(world, *nodes)
    world.run(10.0)
    return world


def expect(world: World, *nodes: str, causes: tuple[str, ...] = ()) -> None:
    where = {node: signals.Expected(age_s=500.0, causes=causes) for node in nodes}
    hear(world, signals.ExpectedNodes(plugin="p", nodes=where))


def hear(world: World, event: signals.Input) -> None:
    for service in world.services:
        service.feed(event)


def say(world: World, node: str, before: signals.Facts | None) -> None:
    plugin = world.plugins[node]
    assert isinstance(plugin, Told)
    plugin.known = before


def test_a_node_that_is_gone_and_still_expected_is_overdue() -> None:
    world = world_of("a", "b")
    for node in ("a", "b"):
        world.kill(node)
        say(world, node, signals.Facts(exists=False))
    world.run(20.0)
    assert world.verdicts("a")[-1] is Verdict.MAINTENANCE
    assert world.alerts() == []
    expect(world, "a")
    world.run(320.0)
    assert world.alerts() == [("a", AlertKind.MAINTENANCE_OVERDUE, "")]


def offering(count: int) -> signals.Facts:
    return signals.Facts(
        exists=True,
        lease_age_s=1.0,
        ready=True,
        pods=(signals.Pod(name="m/p", uid="1", phase="Running", ready=True),),
        offers={GPU: signals.Offer(capacity=2, allocatable=count)},
    )


def test_an_old_watch_leads_to_no_verdict_and_a_new_answer_of_kubernetes_does() -> None:
    world = world_of("a", "b", "c")
    for node, before in (
        ("a", offering(2)),
        ("b", offering(1)),
        ("c", signals.Facts(problem="no")),
    ):
        say(world, node, before)
        stale = {GPU: signals.Offer(capacity=2, allocatable=1)}
        hear(world, signals.NodeOffers(node=node, offers=stale))
    world.run(60.0)
    assert world.verdicts("a") == [Verdict.HEALTHY]
    assert world.verdicts("b") == [Verdict.HEALTHY, Verdict.MISMATCH]
    assert world.verdicts("c") == [Verdict.HEALTHY]


def test_a_restart_of_health_earns_nobody_another_restart_of_a_plugin() -> None:
    world = world_of("a", remediation=RESTARTS)
    for _ in range(3):
        world.part("a")
        world.run(80.0)
        world.mend("a")
        world.run(40.0)
        world.crash(1.0)
        world.run(20.0)
    decided = [
        event.outcome
        for event in world.published.values()
        if isinstance(event, vocabulary.RemediationDecided)
    ]
    assert decided == [Remedy.ACTED, Remedy.REFUSED, Remedy.REFUSED]


def test_an_alert_from_before_all_state_was_lost_is_resolved_when_its_plugin_is_healthy() -> None:
    world = world_of("a", "b", expected=False)
    world.kill("a")
    world.turn("b", "1")
    world.run(30.0)
    open_ = [("a", AlertKind.PLUGIN_DOWN, ""), ("b", AlertKind.DEVICE_UNHEALTHY, "1")]
    assert world.alerts() == open_
    published = [e for e in world.published.values() if isinstance(e, vocabulary.AlertChanged)]
    world.stored = {
        f"{before.node}.p": snapshot.encode(before) for before in snapshot.of_alerts(published)
    }
    assert sorted(world.stored) == ["a.p", "b.p"]
    world.crash(1.0)
    world.run(5.0)
    assert world.alerts() == open_
    world.mend("a")
    world.turn("b", "1")
    world.report("b")
    world.run(60.0)
    assert world.alerts() == []
    assert (
        snapshot.of_alerts(
            e for e in world.published.values() if isinstance(e, vocabulary.AlertChanged)
        )
        == []
    )


def test_a_backlog_that_is_read_late_proves_nothing_about_a_clock() -> None:
    world = world_of("a", "b", expected=False)
    for _ in range(5):
        # health is suspended for 25 s, and then reads all heartbeats of that time at once
        backlog = []
        for _ in range(25):
            world.now += 1.0
            backlog += [plugin.beat(world.now) for plugin in world.plugins.values()]
        late = [
            msgspec.structs.replace(beat, uptime_s=1000.0 + beat.seq, wall=beat.wall)
            for beat in backlog
        ]
        hear(world, signals.HeartbeatsArrived(heartbeats=late))
        world._beats_due = world.now + 1.0  # the heartbeats until now are in the backlog
        world.run(5.0)
    assert world.alerts() == []


def test_if_most_clocks_differ_from_ours_there_is_one_alert() -> None:
    nodes = [f"n{number}" for number in range(20)]
    world = world_of(*nodes)
    for node in nodes[1:]:
        world.plugins[node].skew_s = 3600.0
    world.run(60.0)
    assert world.alerts() == [("_fleet", AlertKind.CLOCK_SKEW, "")]
    assert world.story("n1") == []
    world.crash(1.0)
    world.run(60.0)
    assert world.story("_fleet") == [(AlertKind.CLOCK_SKEW, AlertState.FIRING)]
    for node in nodes[2:]:
        world.plugins[node].skew_s = 0.0
    world.run(60.0)
    assert world.alerts() == [("n1", AlertKind.CLOCK_SKEW, "")]


def test_the_same_problem_of_many_at_once_is_one_alert_and_those_that_keep_it_get_a_verdict() -> (
    None
):
    nodes = [f"n{number}" for number in range(40)]
    world = world_of(*nodes, remediation=RESTARTS)
    expect(world, *nodes, causes=("revision=r2",))
    for node in nodes:
        world.part(node)
    world.run(15.0)
    assert world.alerts() == [("_fleet", AlertKind.STORM, "")]
    (published,) = (e for e in world.published.values() if isinstance(e, vocabulary.AlertChanged))
    assert (
        published.summary
        == "40 of 40 plugins reported problems at the same time; in common: revision=r2"
    )
    for node in nodes[3:]:
        world.plugins[node].apart = False
    world.run(20.0)
    assert world.alerts() == [(node, AlertKind.DEREGISTERED, "") for node in nodes[:3]]
    for node in nodes[:3]:
        world.plugins[node].apart = False
    world.run(60.0)
    assert world.alerts() == []
    assert world.verdicts("n9") == [Verdict.HEALTHY]


def test_plugins_that_come_and_go_for_ever_do_not_flood_people_with_mass_failure_alerts() -> None:
    nodes = [f"n{number}" for number in range(40)]
    world = world_of(*nodes)
    for _ in range(20):
        for node in nodes[:12]:
            world.kill(node)
        world.run(20.0)
        for node in nodes[:12]:
            world.mend(node)
        world.run(20.0)
    story = [e for e in world.story("_fleet") if e[0] is AlertKind.STORM]
    fired = [at for at, e in enumerate(story) if e[1] is AlertState.FIRING]
    assert len(story) - len(fired) <= 4
    world.run(1000.0)
    assert world.alerts() == []


def test_after_a_mass_failure_plugins_are_probed_some_at_a_time_and_cause_no_new_one() -> None:
    nodes = [f"n{number}" for number in range(200)]
    world = world_of(*nodes)
    questions: list[float] = []
    answer = world.answer

    def mute(probe: signals.Probe) -> tuple[float, signals.Input]:
        questions.append(world.now)
        at, answered = answer(probe)
        if world.now < until:
            nothing = signals.ProbeInconclusive(
                node=probe.node, plugin=probe.plugin, number=probe.number
            )
            return at, nothing
        return at, answered

    world.answer = mute  # type: ignore[method-assign]
    until = world.now + 40.0
    for node in nodes:
        world.kill(node)
    world.run(60.0)
    assert world.story("_fleet")[:2] == [
        (AlertKind.STORM, AlertState.FIRING),
        (AlertKind.STORM, AlertState.RESOLVED),
    ]
    assert all(e[0] is not AlertKind.STORM for e in world.story("_fleet")[2:])
    assert max(Counter(int(at) for at in questions).values()) <= 60
    assert {world.verdicts(node)[-1] for node in nodes} == {Verdict.PLUGIN_DOWN}


def test_a_plugin_that_claims_to_be_the_fleet_is_ignored() -> None:
    world = world_of("a", expected=False)
    for seq in range(3):
        beat = msgspec.structs.replace(
            world.plugins["a"].beat(world.now), node=vocabulary.FLEET, plugin="health", seq=seq
        )
        hear(world, signals.HeartbeatArrived(heartbeat=beat))
    started = vocabulary.PluginStarted(
        node=vocabulary.FLEET, at=ZERO, plugin="health", version="1", instance="i"
    )
    hear(world, signals.FromPlugin(event=started, instance="i", sequence=1))
    world.run(60.0)
    assert [(before.node, before.plugin) for before in world.services[0].detector.plugins()] == [
        ("a", "p")
    ]
    assert world.alerts() == []


def test_what_is_stored_of_thousands_of_broken_devices_is_no_more_than_nats_accepts() -> None:
    for devices_, name in ((3500, "GPU-{:05}"), (4096, "x" * 240 + "{:05}")):
        world = world_of("a", expected=False)
        for number in range(devices_):
            event = vocabulary.DeviceHealthChanged(
                node="a",
                at=ZERO,
                plugin="p",
                resource=GPU,
                device_id=name.format(number),
                health=Health.UNHEALTHY,
                reason=f"device {number} " + "x" * 280,
            )
            (before,) = world.services[0].detector.plugins()
            reported = signals.FromPlugin(event=event, instance="one", sequence=1000 + number)
            before.receive(reported, world.now)
        remembered, *_ = before.publish(1e9, ZERO, lambda _: True)[0]
        assert isinstance(remembered, signals.Store)
        assert len(remembered.value) < 1_000_000
        assert len(snapshot.decode(remembered.value).bad) > 30


def test_nodes_that_always_have_new_alerts_do_not_delay_the_alerts_of_others() -> None:
    hostile, others = [f"h{n}" for n in range(8)], [f"v{n}" for n in range(12)]
    bounds = config.Bounds(alerts_per_minute=12, alerts_per_node_minute=4)
    world = world_of(*hostile, *others, bounds=bounds)
    killed_at: dict[str, float] = {}
    late_s: dict[str, float] = {}
    for second in range(300):
        for node in hostile:
            event = vocabulary.DeviceHealthChanged(
                node=node,
                at=ZERO,
                plugin="p",
                resource=f"x/{second % 32}",
                device_id="device",
                health=Health.UNHEALTHY,
                reason="r",
            )
            hear(world, signals.FromPlugin(event=event, instance="one", sequence=second))
        # before that, no node is known to have new alerts often
        if second > 180 and second % 30 == 20:
            killed_at[others.pop()] = world.now
            world.kill(list(killed_at)[-1])
        world.run(1.0)
        for node, kind, _ in world.alerts():
            if kind is AlertKind.PLUGIN_DOWN:
                late_s.setdefault(node, world.now - killed_at[node])
    assert late_s.keys() == killed_at.keys()
    assert max(late_s.values()) < 15


def test_after_many_changes_at_once_an_alert_is_late_by_a_second_at_most() -> None:
    world = world_of("a", expected=False)
    for number in range(100):
        event = vocabulary.DeviceHealthChanged(
            node="a",
            at=ZERO,
            plugin="p",
            resource="x/last" if number == 99 else "x/first",
            device_id=f"device-{number}",
            health=Health.UNHEALTHY,
            reason="r",
        )
        hear(world, signals.FromPlugin(event=event, instance="one", sequence=number))

    def alerted() -> list[str]:
        events = world.published.values()
        return [e.resource for e in events if isinstance(e, vocabulary.AlertChanged)]

    # this many changes are not evaluated one by one
    assert alerted() == ["x/first"]
    world.run(1.1)
    assert alerted() == ["x/first", "x/last"]


class Storing(World):
    """A world that records the size of each stored state of a plugin."""

    def __init__(self, *nodes: str, bounds: config.Bounds) -> None:
        self.sizes: list[int] = []
        super().__init__(*nodes, bounds=bounds)

    def remember(self, out: signals.Store) -> None:
        if not out.key.startswith(vocabulary.FLEET):
            self.sizes.append(len(out.value))
        super().remember(out)


def test_a_plugin_whose_devices_change_all_the_time_is_stored_and_updated_seldom() -> None:
    bounds = config.Bounds(alerts_per_plugin=8)
    world = Storing("a", bounds=bounds)
    world.run(10.0)
    world.sizes.clear()
    seconds, per_s = 120, 3
    for number in range(seconds * per_s):
        event = vocabulary.DeviceHealthChanged(
            node="a",
            at=ZERO,
            plugin="p",
            resource=f"x/{number % 8}",
            device_id=f"device-{number % 32}",
            health=Health.UNHEALTHY,
            reason=f"{number}",
            pods=tuple(f"n/{number}-{pod}-{'x' * 1_900}" for pod in range(8)),
        )
        hear(world, signals.FromPlugin(event=event, instance="one", sequence=number))
        world.run(1 / per_s)
    published = [e for e in world.published.values() if isinstance(e, vocabulary.AlertChanged)]
    updates = [e for e in published if e.change]
    allowed = seconds / bounds.update_s
    assert len(updates) <= 8 + allowed
    # each new or updated alert is stored before and after it is published
    assert len(world.sizes) <= 2 * (8 + len(updates)) + 32 + allowed
    assert max(len(msgspec.json.encode(e)) for e in published) < 16_384
    # the alerts that have been out of date for longest are updated first
    assert {e.resource for e in updates[-8:]} == {f"x/{number}" for number in range(8)}


def test_a_plugin_silent_after_one_heartbeat_since_we_reconnected_is_suspected_in_its_time() -> (
    None
):
    world = world_of("a", interval_s=5.0)
    world.run(3.0)
    hear(world, signals.BusLost())
    hear(world, signals.BusBack(at=ZERO + timedelta(seconds=world.now)))
    hear(world, signals.HeartbeatArrived(heartbeat=world.plugins["a"].beat(world.now)))
    world.freeze("a")
    suspected = signals.Noted(note=signals.Note.SUSPECTED)
    world.run(12.4)
    assert suspected not in world.noted
    world.run(0.2)
    assert suspected in world.noted
