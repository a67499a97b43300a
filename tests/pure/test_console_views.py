"""What the console's pages show: events in words, short names of devices, counts, pods."""

import itertools
import math
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster import codec, matching, vocabulary
from muster.cli import event_texts, why
from muster.fleet import health_state, model, usage
from muster_console import (
    alert_history,
    config,
    detection_delays,
    device_names,
    event_log,
    heartbeat_ages,
    moments,
    node_page,
    pages,
    plots,
    steps,
    timeline,
)
from muster_health.alerting import evidence
from tests.worlds.alert_events import event

AT = datetime(2026, 1, 2, 12, 0, 0, tzinfo=UTC)
GPU = "nvidia.com/gpu"
HOUR = timedelta(hours=1)
REPORT: dict[str, Any] = {"node": "a", "at": AT, "plugin": "device-plugin"}


def uuid(number: int) -> str:
    return f"GPU-{number:08x}-9c1d-4f6e-8a2b-0123456789ab"


def plugin(verdict: str = "HEALTHY", node: str = "a", **more: object) -> health_state.Plugin:
    fields = {
        "node": node,
        "plugin": "device-plugin",
        "verdict": verdict,
        "devices": {GPU: 4},
        "allocatable": {GPU: 4},
        **more,
    }
    return msgspec.convert(fields, health_state.Plugin)


def state(*plugins: health_state.Plugin) -> health_state.State:
    service = health_state.Service(revision=3, advisories="received", cluster={})
    return health_state.State(plugins=plugins, fleet=health_state.Fleet(), service=service)


def fleet_of(*plugins: health_state.Plugin) -> model.FleetModel:
    fleet = model.FleetModel()
    fleet.receive_page(state(*plugins), after="", now=0.0, at=AT)
    return fleet


def page_of(
    *events: vocabulary.Event,
    verdict: str = "HEALTHY",
    resources: Iterable[str] = (GPU,),
    device: str = "",
    then: datetime | None = None,
    silence: matching.Silence | None = None,
    **more: Any,
) -> node_page.NodePage:
    """Return the page of node `a`, which shows one hour; `more` has fields of its plugin."""
    fleet = fleet_of(plugin(verdict, **more))
    if silence is not None:
        fleet.receive_silence(silence.id, silence, at=AT)
    sources = node_page.Sources(
        state=state(plugin(verdict, devices=dict.fromkeys(resources, 4), **more)),
        events=[event(data, number) for number, data in enumerate(events)],
    )
    return node_page.page(
        "a",
        sources,
        fleet,
        alert_history.AlertHistory(),
        shown=HOUR,
        at=AT,
        device=device,
        then=then,
    )


def inventory(*, at: datetime = AT - HOUR / 2) -> vocabulary.InventoryReported:
    """Return an inventory of two GPUs and a serial device."""
    gpus = tuple(
        vocabulary.Gpu(uuid=uuid(n), product="L4", index=n, pci_bus_id=f"0{n}") for n in (0, 1)
    )
    return vocabulary.InventoryReported(
        **REPORT | {"at": at},
        devices=(
            *(vocabulary.Device(id=uuid(n), resource=GPU, physical=uuid(n)) for n in (0, 1)),
            vocabulary.Device(id="ttyUSB0", resource="x/serial"),
        ),
        resources=(GPU, "x/serial"),
        gpus=vocabulary.GpuNode(gpus=gpus),
    )


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            vocabulary.PluginStarted(**REPORT, version="1.2", instance="i1", resources=(GPU,)),
            "device-plugin 1.2 runs and serves nvidia.com/gpu (instance i1)",
        ),
        (
            vocabulary.PluginStopping(
                **REPORT, reason=vocabulary.StopReason.UPGRADE, expected_return_s=30
            ),
            "device-plugin stops (upgrade), expected back within 30 s",
        ),
        (
            vocabulary.PluginDeregistered(
                **REPORT, resource=GPU, reason=vocabulary.RegistrationReason.NO_STREAM
            ),
            "the kubelet no longer lists nvidia.com/gpu (no_stream)",
        ),
        (
            vocabulary.DeviceConditionChanged(
                **REPORT,
                resource=GPU,
                device_id="GPU-1",
                condition=vocabulary.Condition.DEGRADED,
                holds=True,
                reason="XID 63",
            ),
            "nvidia.com/gpu is degraded: XID 63 (GPU-1)",
        ),
        (
            vocabulary.ExpectationChanged(**REPORT, resource=GPU, short=""),
            "nvidia.com/gpu: as many devices as expected again",
        ),
        (
            vocabulary.ConfigurationApplied(**REPORT, config_hash="h", added=(GPU,)),
            "a new configuration adds nvidia.com/gpu",
        ),
        (
            vocabulary.ConfigurationRefused(**REPORT, config_hash="h", problems=("no path", "b")),
            "the previous configuration stays active: no path; b",
        ),
        (
            vocabulary.ProblemChanged(**REPORT, problem="no driver", holds=False),
            "resolved: no driver",
        ),
        (inventory(), "3 devices of nvidia.com/gpu, x/serial"),
        (
            vocabulary.ReceiversConfigured(
                node="_fleet", at=AT, receivers={"ops": "slack"}, interval_s=60
            ),
            "people are notified through ops (slack)",
        ),
    ],
)
def test_an_event_is_said_in_words(data: vocabulary.Event, said: str) -> None:
    assert event_texts.said(event(data)) == said


def test_an_act_without_a_reason_has_no_colon_at_its_end() -> None:
    acted = vocabulary.OperatorActed(
        node="_fleet",
        at=AT,
        actor="ann",
        identity="local",
        act=vocabulary.Act.EXPIRE_SILENCE,
        outcome=vocabulary.ActOutcome.DONE,
        target="5e5d",
    )
    text = "operator.acted ann: expire_silence 5e5d done"
    assert event_texts.change_text(event(acted)) == text
    acted = msgspec.structs.replace(acted, about="node=a")
    assert event_texts.change_text(event(acted)) == f"{text}: node=a"


def test_ids_of_gpus_are_cut_and_other_words_are_not() -> None:
    text = f"{uuid(3)}::1 and MIG-{uuid(4)[4:]} on node-b, not GPU-3 or GPU-node-a"
    assert device_names.shortened(text) == (
        "GPU-00000003\N{HORIZONTAL ELLIPSIS}::1 and MIG-00000004\N{HORIZONTAL ELLIPSIS} "
        "on node-b, not GPU-3 or GPU-node-a"
    )


def test_pods_come_with_their_devices_and_first_those_that_a_fault_hurts() -> None:
    got = [
        vocabulary.AllocationObserved(**REPORT, resource=resource, device_ids=(id_,), pod=pod)
        for resource, id_, pod in (
            (GPU, uuid(0), "ml/a"),
            (GPU, uuid(1), "ml/b"),
            ("x/serial", "ttyUSB0", "ml/a"),
        )
    ]
    # only the newest inventory is stored, and it may be newer than the allocations
    later = page_of(*got, inventory())
    assert {(d.label, d.pod) for d in later.devices} == {
        ("GPU 0", "ml/a"),
        ("GPU 1", "ml/b"),
        ("ttyUSB0", "ml/a"),
    }
    fault = vocabulary.DeviceHealthChanged(
        **REPORT,
        resource=GPU,
        device_id=uuid(1),
        health=vocabulary.Health.UNHEALTHY,
        reason="XID 79",
    )
    shown = page_of(inventory(), *got, fault)
    pods = [(pod.name, pod.is_hurt, [d.label for d in pod.devices]) for pod in shown.pods]
    assert pods == [("ml/b", True, ["GPU 1"]), ("ml/a", False, ["GPU 0", "ttyUSB0"])]
    assert shown.labels == {uuid(0): "GPU 0", uuid(1): "GPU 1", "ttyUSB0": "ttyUSB0"}


def test_a_plugin_says_how_many_of_its_devices_are_unhealthy_whatever_its_verdict() -> None:
    def faulty(*events: vocabulary.Event) -> tuple[str, ...]:
        (shown,) = page_of(*events, resources=(GPU, "x/serial")).plugins
        assert (shown.verdict, shown.verdict_level) == ("HEALTHY", model.Level.OK)
        return shown.faulty

    serial = vocabulary.DeviceHealthChanged(
        **REPORT,
        resource="x/serial",
        device_id="ttyUSB0",
        health=vocabulary.Health.UNHEALTHY,
        reason="no such file",
    )
    assert faulty(inventory()) == ()
    assert faulty(inventory(), health(10, "Unhealthy")) == ("1 of 2 GPUs Unhealthy",)
    assert faulty(inventory(), health(10, "Unhealthy"), serial) == (
        "1 of 2 GPUs Unhealthy",
        "1 of 1 device of x/serial Unhealthy",
    )
    replicas = vocabulary.InventoryReported(
        **REPORT,
        devices=tuple(
            vocabulary.Device(id=f"{uuid(n)}::{replica}", resource=GPU, physical=uuid(n))
            for n in (0, 1)
            for replica in (0, 1)
        ),
        resources=(GPU,),
    )
    assert faulty(inventory(), replicas, health(10, "Unhealthy")) == (
        "1 of 2 devices of nvidia.com/gpu Unhealthy",
    )
    # two device nodes with 4 replicas each: only those of the broken one are listed one by one
    broken = [
        vocabulary.Device(
            id=f"ttyUSB1::{replica}", resource="x/serial", health=vocabulary.Health.UNHEALTHY
        )
        for replica in range(4)
    ]
    nodes = vocabulary.InventoryReported(
        **REPORT,
        devices=(vocabulary.Device(id="ttyUSB0::0", resource="x/serial", count=4), *broken),
        resources=("x/serial",),
    )
    assert faulty(nodes) == ("4 of 8 devices of x/serial Unhealthy",)


def test_counts_of_a_plugin_that_does_not_work_are_not_called_usable() -> None:
    for verdict, is_certain in (("HEALTHY", True), ("STUCK", False), ("DEGRADED", True)):
        (of_gpu,) = page_of(verdict=verdict).plugins[0].usages
        assert (of_gpu.usable, of_gpu.total, of_gpu.is_certain) == (4, 4, is_certain)
    fleet = fleet_of(plugin(), plugin("STUCK", "b"), plugin("PLUGIN_DOWN", "c"))
    sums = usage.Usage(
        resource=GPU,
        nodes=3,
        usable=12,
        total=12,
        unconfirmed=8,
        nodes_short=0,
        nodes_with_fewer=2,
    )
    assert plots.resources(fleet.nodes.values()) == ((sums,), 0)


def verdict(minutes: float, value: str, previous: str = "HEALTHY") -> vocabulary.VerdictChanged:
    """Return an event about a verdict, from some minutes ago."""
    return vocabulary.VerdictChanged(
        **REPORT | {"at": AT - timedelta(minutes=minutes)},
        verdict=vocabulary.Verdict(value),
        previous=vocabulary.Verdict(previous),
        rule="r",
    )


def health(
    minutes: float, value: str, *, device: str = uuid(1), code: str = "xid-79"
) -> vocabulary.DeviceHealthChanged:
    """Return an event about a change of a device's health, from some minutes ago."""
    return vocabulary.DeviceHealthChanged(
        **REPORT | {"at": AT - timedelta(minutes=minutes)},
        resource=GPU,
        device_id=device,
        health=vocabulary.Health(value),
        reason=f"it is {value}",
        code=code,
    )


def fired(minutes: float, *, number: int = 1, is_over: bool = False) -> vocabulary.AlertChanged:
    """Return an event about the alert for a device, which began 20 minutes ago."""
    state_ = vocabulary.AlertState.RESOLVED if is_over else vocabulary.AlertState.FIRING
    return vocabulary.AlertChanged(
        **REPORT | {"at": AT - timedelta(minutes=minutes)},
        kind=vocabulary.AlertKind.DEVICE_UNHEALTHY,
        severity=vocabulary.Severity.CRITICAL,
        state=state_,
        fingerprint=f"{number:016x}",
        summary="GPU 1 is unhealthy",
        starts_at=AT - timedelta(minutes=20),
        devices=(uuid(1),),
        change=int(is_over),
    )


def test_delays_of_detection_come_from_the_evidence_and_from_the_device_s_event() -> None:
    seen = detection_delays.DetectionDelays()
    silent = msgspec.structs.replace(
        verdict(5, "STUCK"), evidence=(evidence.silent(4.24, 1.0, ever_heard=True),)
    )
    unheard = msgspec.structs.replace(
        verdict(6, "PLUGIN_DOWN"), evidence=(evidence.silent(60.0, 1.0, ever_heard=False),)
    )
    events = [fired(20), fired(10, is_over=True), health(20.5, "Unhealthy"), silent, unheard]
    events += [verdict(4, "HEALTHY", "STUCK"), health(9, "Healthy")]
    # each event twice, in both orders
    for data in (*events, *reversed(events)):
        seen.receive(event(data))
    delays = seen.last_day(AT)
    assert [(each.is_device, each.seconds) for each in delays] == [(False, 4.2), (True, 30.0)]
    assert seen.last_day(AT + timedelta(days=2)) == []
    drawn = plots.delays(delays)
    assert [row for row in drawn.rows if row[1] != "none"] == [
        ("2-5 s", "1 silent plugins"),
        ("30-60 s", "1 device faults"),
    ]
    assert drawn.summary == (
        "silent plugins: half within 4.2 s, all within 4.2 s; "
        "device faults: half within 30.0 s, all within 30.0 s"
    )


def test_a_fault_that_ended_before_the_alert_began_is_not_what_it_is_about() -> None:
    seen = detection_delays.DetectionDelays()
    for data in (
        health(22, "Unhealthy"),
        health(21, "Healthy"),
        health(20.5, "Unhealthy"),
        fired(20),
    ):
        seen.receive(event(data))
    assert [each.seconds for each in seen.last_day(AT)] == [30.0]


def test_a_fault_that_seems_to_follow_its_alert_was_not_detected_before_it_began() -> None:
    seen = detection_delays.DetectionDelays()
    for data in (fired(20), health(18, "Unhealthy")):
        seen.receive(event(data))
    assert [each.seconds for each in seen.last_day(AT)] == [0.0]


def test_the_fault_of_an_alert_of_almost_a_day_ago_is_read_too() -> None:
    seen = detection_delays.DetectionDelays()
    fault, alert = health(20.5, "Unhealthy"), fired(20)
    later = alert.starts_at + timedelta(days=1, seconds=-10)
    assert later - fault.at > timedelta(days=1)
    for data in (fault, alert):
        if later - data.at <= detection_delays.KEPT:
            seen.receive(event(data))
    assert [each.seconds for each in seen.last_day(later)] == [30.0]
    assert seen.last_day(later + timedelta(seconds=20)) == []


def test_ages_of_heartbeats_are_counted_by_the_oldest_of_each_node() -> None:
    ages = heartbeat_ages.HeartbeatAges()
    beats = [("a", 0.5), ("a", 7.0), ("b", None), ("c", 2.5), ("gone", 1.0), ("d", -3.0)]
    plugins = [
        plugin(node=node, plugin=f"p{number}", beat_age_s=age, interval_s=1.0)
        for number, (node, age) in enumerate(beats)
    ]
    ages.receive(state(*plugins, plugin(node="c", watched="x/y", beat_age_s=99.0, interval_s=1.0)))
    shown = ages.of({"a", "b", "c", "d"})
    assert plots.ages(shown).rows == (
        ("<1 intervals", "1"),
        ("1-2 intervals", "none"),
        ("2-3 intervals", "1"),
        ("3-5 intervals", "none"),
        (">5 intervals", "1"),
        ("none", "1"),
    )
    assert plots.oldest(shown) == (("a", 7.0), ("c", 2.5))


def test_a_node_of_which_only_watched_plugins_are_left_has_no_age_any_more() -> None:
    ages = heartbeat_ages.HeartbeatAges()
    watched = plugin(node="a", watched="x/y", beat_age_s=99.0, interval_s=1.0)
    beats = [plugin(node=node, plugin="p", beat_age_s=3.0, interval_s=1.0) for node in "ab"]
    ages.receive(state(watched, *beats))
    assert ages.of({"a", "b"}) == dict.fromkeys("ab", heartbeat_ages.Age(3.0, 3.0))
    ages.receive(state(watched))
    assert ages.of({"a", "b"}) == {"b": heartbeat_ages.Age(3.0, 3.0)}


@given(st.lists(st.integers(0, 5_000), max_size=14))
def test_columns_stay_within_their_drawing(counts: list[int]) -> None:
    days = [(AT.date() - timedelta(days=n), {"critical": c}) for n, c in enumerate(counts)]
    drawn = plots.alerts_per_day(days)
    assert drawn.top % 2 == 0
    for rect in drawn.rects:
        assert 9 <= rect.y < rect.y + rect.height <= 108.5
        assert 34 <= rect.x < rect.x + rect.width <= plots.WIDTH
    assert len(drawn.rects) == sum(count > 0 for count in counts)


STORY = (
    verdict(40, "STUCK"),
    verdict(30, "HEALTHY", "STUCK"),
    health(25, "Unhealthy"),
    fired(20),
    health(10, "Healthy"),
    fired(5, is_over=True),
)


@pytest.mark.parametrize(
    ("minutes", "verdicts", "faults", "alerts"),
    [
        (50, ["HEALTHY"], [], 0),
        (40, ["STUCK"], [], 0),
        (26, ["HEALTHY"], [], 0),
        (24, ["HEALTHY"], ["GPU 1 Unhealthy"], 0),
        (15, ["HEALTHY"], ["GPU 1 Unhealthy"], 1),
        (8, ["HEALTHY"], [], 1),
        (0, ["HEALTHY"], [], 0),
        (-90, ["HEALTHY"], [], 0),
    ],
)
def test_a_moment_of_the_timeline_shows_what_was_then(
    minutes: float, verdicts: list[str], faults: list[str], alerts: int
) -> None:
    then = page_of(inventory(), *STORY, then=AT - timedelta(minutes=minutes)).moment
    assert then is not None
    assert [each.verdict for each in then.plugins] == verdicts
    assert [f"{each.device} {each.state}" for each in then.faults] == faults
    of_other = page_of(inventory(), *STORY, device=uuid(0), then=then.at).moment
    assert of_other is not None
    assert of_other.faults == ()
    assert len(then.alerts) == alerts


@given(st.integers(-200, 200))
def test_from_every_moment_the_entries_lead_to_both_ends(minutes: int) -> None:
    at = AT - timedelta(minutes=minutes)
    line = page_of(*STORY).timeline
    times = [mark.at for mark in line.marks]

    def steps(name: str) -> list[datetime]:
        reached, now = [], moments.moment((), (), line, at=at, labels={})
        while following := getattr(now, name):
            # times in a page's address are whole milliseconds
            rounded = datetime.fromtimestamp(math.ceil(following.timestamp() * 1e3) / 1e3, UTC)
            reached.append(following)
            now = moments.moment((), (), line, at=rounded, labels={})
        return reached

    inside = min(max(at, line.start), line.end)
    assert steps("earlier") == [time for time in reversed(times) if time < inside]
    assert steps("later") == [time for time in times if time > inside]


def test_an_event_from_a_clock_that_is_ahead_is_drawn_at_the_end_and_says_so() -> None:
    line = page_of(health(-60, "Unhealthy"), verdict(-60, "STUCK")).timeline
    (mark,) = line.marks
    assert (mark.at, mark.x) == (AT, 996.0)
    assert "clock is ahead: 13:00:00 UTC" in mark.text
    assert [bar.level for bar in line.lanes[0].bars] == ["ok", "critical"]
    assert all(bar.x >= 4 and bar.x + bar.width <= 1000 for bar in line.lanes[0].bars)


def test_the_page_of_a_device_counts_its_faults_by_code_and_draws_its_health() -> None:
    degraded = vocabulary.DeviceConditionChanged(
        **REPORT | {"at": AT - timedelta(minutes=50)},
        resource=GPU,
        device_id=uuid(1),
        condition=vocabulary.Condition.DEGRADED,
        holds=True,
        reason="row remapping",
        code="xid-63",
    )
    story = (degraded, *STORY, health(4, "Unhealthy"), health(3, "Unhealthy", device=uuid(0)))
    shown = page_of(inventory(at=AT - timedelta(minutes=55)), *story, device=uuid(1))
    assert shown.detail is not None
    assert (shown.detail.label, shown.detail.facts[:2]) == (
        "GPU 1",
        (("product", "L4"), ("index", "1")),
    )
    assert [(code.code, code.times) for code in shown.detail.codes] == [
        ("xid-79", 2),
        ("xid-63", 1),
    ]
    (lane,) = shown.timeline.lanes
    assert [(bar.level, bar.title.split()[0]) for bar in lane.bars] == [
        ("ok", "Healthy"),
        ("warning", "degraded"),
        ("critical", "Unhealthy"),
        ("warning", "degraded"),
        ("critical", "Unhealthy"),
    ]
    assert [device.id for device in shown.of_device] == [uuid(1)]
    nothing = page_of(inventory(), device="GPU-unknown")
    assert nothing.detail is not None
    assert (nothing.detail.codes, nothing.of_device) == ((), ())


def condition(
    minutes: float, name: str, *, holds: bool = True, code: str = "xid-63"
) -> vocabulary.DeviceConditionChanged:
    """Return an event: a condition of a device began or ended some minutes ago."""
    return vocabulary.DeviceConditionChanged(
        **REPORT | {"at": AT - timedelta(minutes=minutes)},
        resource=GPU,
        device_id=uuid(1),
        condition=vocabulary.Condition(name),
        holds=holds,
        reason=f"{code} {'began' if holds else 'ended'}",
        code=code,
    )


REMOVED = vocabulary.DeviceRemoved(
    **REPORT | {"at": AT - HOUR / 6}, resource=GPU, device_id=uuid(1), physical=uuid(1)
)


@pytest.mark.parametrize(
    ("story", "expected"),
    [
        (
            (
                condition(50, "degraded"),
                health(40, "Unhealthy"),
                condition(30, "degraded", holds=False),
                health(20, "Healthy"),
            ),
            [
                (50, "degraded", ": xid-63 began"),
                (40, "Unhealthy", ": it is Unhealthy"),
                (20, "Healthy", ": it is Healthy"),
            ],
        ),
        (
            (
                condition(50, "degraded"),
                condition(40, "unmonitored", code="unpolled"),
                condition(30, "unmonitored", holds=False, code="unpolled"),
                condition(20, "degraded", holds=False),
            ),
            [
                (50, "degraded", ": xid-63 began"),
                (40, "unmonitored", ": unpolled began"),
                (30, "degraded", ": xid-63 began"),
                (20, "Healthy", ": xid-63 ended"),
            ],
        ),
        # two faults of one kind
        (
            (
                condition(50, "degraded"),
                condition(40, "degraded", code="xid-94"),
                condition(30, "degraded", holds=False),
                condition(20, "degraded", holds=False, code="xid-94"),
            ),
            [
                (50, "degraded", ": xid-63 began"),
                (40, "degraded", ": xid-94 began"),
                (20, "Healthy", ": xid-94 ended"),
            ],
        ),
        # a condition that began while the device was Unhealthy holds afterwards
        (
            (
                health(50, "Unhealthy"),
                condition(40, "degraded"),
                health(30, "Healthy"),
                inventory(at=AT - HOUR / 3),
            ),
            [(50, "Unhealthy", ": it is Unhealthy"), (30, "degraded", ": xid-63 began")],
        ),
        # after a device was removed, no earlier report about it applies
        (
            (condition(50, "degraded"), REMOVED, health(5, "Healthy")),
            [
                (50, "degraded", ": xid-63 began"),
                (10, "", ""),
                (5, "Healthy", ": it is Healthy"),
            ],
        ),
    ],
)
def test_what_still_holds_of_a_device_is_shown_after_something_else_has_ended(
    story: tuple[vocabulary.Event, ...], expected: list[tuple[int, str, str]]
) -> None:
    sent = [event(data, number) for number, data in enumerate(story)]
    (of_one,) = (each for (_, id_), each in steps.of_devices(sent).items() if id_ == uuid(1))
    shown = [((AT - step.at) / timedelta(minutes=1), step.value, step.reason) for step in of_one]
    assert shown == expected
    assert steps.of_device(sent, frozenset({uuid(1)})) == of_one


def lanes_of(shown: node_page.NodePage) -> dict[str, list[tuple[str, str]]]:
    """Return the level and the text of each bar of the timeline, by lane."""
    return {
        lane.name: [(bar.level, bar.title.split(" from ")[0]) for bar in lane.bars]
        for lane in shown.timeline.lanes
    }


def started(minutes: float, instance: str) -> vocabulary.PluginStarted:
    """Return an event: the plugin started, or reconnected to the bus, some minutes ago."""
    at = AT - timedelta(minutes=minutes)
    return vocabulary.PluginStarted(**REPORT | {"at": at}, version="1", instance=instance)


@pytest.mark.parametrize(
    ("events", "bars"),
    [
        ((), [("unknown", "health not known")]),
        ((health(10, "Unhealthy"),), [("unknown", "health not known"), ("critical", "Unhealthy")]),
        # the plugin started before the oldest known event
        ((inventory(),), [("ok", "Healthy")]),
        (
            (started(30, "i1"), started(20, "i1"), inventory(at=AT - HOUR / 10)),
            [("unknown", "health not known"), ("ok", "Healthy")],
        ),
        (
            (
                vocabulary.DeviceAdded(
                    **REPORT | {"at": AT - HOUR / 2},
                    device=vocabulary.Device(id=uuid(1), resource=GPU, physical=uuid(1)),
                ),
                inventory(at=AT - HOUR / 3),
            ),
            [("unknown", "health not known"), ("ok", "Healthy")],
        ),
        (
            (
                inventory(at=AT - 2 * HOUR),
                vocabulary.DeviceRemoved(
                    **REPORT | {"at": AT - HOUR / 2}, resource=GPU, device_id=uuid(1)
                ),
            ),
            [("ok", "Healthy")],
        ),
        (
            (
                inventory(at=AT - 2 * HOUR),
                vocabulary.DeviceRemoved(
                    **REPORT | {"at": AT - HOUR / 2},
                    resource=GPU,
                    device_id=uuid(1),
                    physical=uuid(1),
                ),
            ),
            [("ok", "Healthy"), ("unknown", "health not known")],
        ),
    ],
)
def test_the_health_of_a_device_is_unknown_before_the_first_event_that_names_it(
    events: tuple[vocabulary.Event, ...], bars: list[tuple[str, str]]
) -> None:
    (shown,) = lanes_of(page_of(*events, device=uuid(1))).values()
    assert shown == bars


def test_the_timeline_of_a_node_has_a_lane_for_each_device_that_was_faulty() -> None:
    story = (
        inventory(at=AT - 2 * HOUR),
        verdict(90, "HEALTHY"),
        health(50, "Unhealthy", device=uuid(0)),
        health(40, "Healthy", device=uuid(0)),
        health(10, "Unhealthy"),
        # an inventory has the current health of each device
        inventory(at=AT - HOUR / 10),
    )
    assert lanes_of(page_of(*story[:2])) == {"device-plugin": [("ok", "HEALTHY")]}
    assert lanes_of(page_of(*story[:5])) == {
        "device-plugin": [("ok", "HEALTHY")],
        "GPU 1": [("ok", "Healthy"), ("critical", "Unhealthy")],
        "GPU 0": [("ok", "Healthy"), ("critical", "Unhealthy"), ("ok", "Healthy")],
    }
    assert lanes_of(page_of(*story))["GPU 1"][-1] == ("ok", "Healthy")
    long_ago = (inventory(at=AT - 3 * HOUR), health(150, "Unhealthy"), health(100, "Healthy"))
    assert list(lanes_of(page_of(*long_ago))) == ["device-plugin"]


def test_of_many_faulty_devices_some_have_a_lane_and_the_others_are_counted() -> None:
    many = [health(number, "Unhealthy", device=f"dev-{number}") for number in range(1, 13)]
    shown = page_of(*reversed(many)).timeline
    assert [lane.name for lane in shown.lanes] == [
        "device-plugin",
        *(f"dev-{number}" for number in range(1, timeline.DEVICES_MAX + 1)),
    ]
    assert shown.devices_more == 12 - timeline.DEVICES_MAX


@given(
    st.lists(
        st.one_of(
            st.builds(
                health,
                st.integers(-5, 90),
                st.sampled_from(["Healthy", "Unhealthy"]),
                device=st.sampled_from([uuid(0), uuid(1)]),
            ),
            st.integers(-5, 90).map(lambda minutes: inventory(at=AT - timedelta(minutes=minutes))),
        )
    )
)
def test_a_device_s_steps_follow_each_other_and_are_the_same_on_both_pages(
    events: list[vocabulary.Event],
) -> None:
    sent = [event(data, number) for number, data in enumerate(events)]
    of_each = steps.of_devices(sent)
    for (_, device), of_one in of_each.items():
        values = ["", *(step.value for step in of_one)]
        assert [step.previous for step in of_one] == values[:-1]
        assert steps.of_device(sent, frozenset({device})) == of_one


def test_a_plugin_that_health_suspects_is_a_notice_with_the_reason() -> None:
    (shown,) = page_of(state="suspect").plugins
    assert (shown.level, shown.verdict, shown.facts[-1]) == (
        model.Level.NOTICE,
        "SUSPECTED",
        ("suspected", "silent, or it reports a problem; no verdict yet"),
    )


def test_a_silenced_problem_is_a_notice_on_the_whole_page() -> None:
    stuck = health_state.Alert(fingerprint="f", node="a", kind="stuck", severity="critical")
    silence = matching.Silence(
        id="s1",
        matchers=("node=a",),
        starts_at=AT - HOUR / 4,
        ends_at=AT + HOUR,
        author="ann",
        comment="replaced tomorrow",
    )
    shown = page_of(
        inventory(),
        verdict(30, "STUCK"),
        verdict="STUCK",
        silence=silence,
        alerts=(stuck,),
        evidence_age_s=20.0,
    )
    (only,) = shown.plugins
    assert (shown.level, shown.silenced) == (model.Level.NOTICE, 1)
    assert (only.level, only.silenced_at, only.evidence_at) == (
        model.Level.NOTICE,
        AT - HOUR / 4,
        AT - timedelta(seconds=20),
    )
    bars = [(bar.level, bar.label, bar.width) for bar in shown.timeline.lanes[0].bars]
    assert bars == [
        ("ok", "HEALTHY", 496.0),
        ("critical", "STUCK", 248.0),
        ("notice", "STUCK, silenced", 248.0),
    ]
    assert shown.broken == {GPU: "STUCK"}


def test_nothing_is_silenced_about_a_plugin_that_is_well() -> None:
    (only,) = page_of(verdict="HEALTHY").plugins
    assert (only.is_silenced, only.silenced_at, only.evidence_at) == (False, None, None)


@pytest.mark.parametrize(
    ("shown", "minutes"), [("15m", 2), ("1h", 10), ("6h", 60), ("1d", 180), ("7d", 1440)]
)
def test_the_ticks_of_a_timeline_are_round_times(shown: str, minutes: int) -> None:
    end = AT + timedelta(minutes=7, seconds=13)
    start = end - timeline.RANGES[shown]
    ticks = [tick.at for tick in timeline.timeline((), (), (), start=start, end=end).ticks]
    step = timedelta(minutes=minutes)
    assert {later - at for at, later in itertools.pairwise(ticks)} == {step}
    assert all((at - datetime(1970, 1, 1, tzinfo=UTC)) % step == timedelta() for at in ticks)
    assert ticks[0] - start < step
    assert end - ticks[-1] < step


def test_a_plugin_that_recovers_says_how_long_it_must_be_well() -> None:
    recovery = {"since": AT - timedelta(seconds=37), "until": AT + timedelta(seconds=83)}
    sources = node_page.Sources(state=state(plugin("STUCK", recovery=recovery)), events=[])
    shown = node_page.page(
        "a", sources, fleet_of(), alert_history.AlertHistory(), shown=HOUR, at=AT
    )
    assert ("recovering", "well for 37 of 120 s") in shown.plugins[0].facts


def test_evidence_is_of_the_past_if_only_the_alert_about_it_recovers() -> None:
    recovery = {"since": AT - timedelta(seconds=37), "until": AT + timedelta(seconds=83)}
    proof = [{"source": "driver", "observed": "XID 79"}]
    beats = {"source": "heartbeat", "observed": "1 of 1"}
    alert = {"kind": "device_unhealthy", "evidence": proof, "recovery": recovery}
    faulty = plugin("DEGRADED", evidence=[*proof, beats], alerts=[alert])
    assert [item.source for item in faulty.past] == ["driver"]
    view = why.NodeView(node="a", source="", state=state(faulty), events=None, since="1h", now=AT)
    lines = [line.split(maxsplit=1)[1] for line in why.lines(view) if "evidence" in line]
    assert lines == ["past, driver: XID 79", "heartbeat: 1 of 1", "past, driver: XID 79"]


@pytest.mark.parametrize(
    "url",
    [
        "grafana.example.com",
        "javascript:alert(1)",
        "https://u:p@g.example/",
        "https://g/{x}",
        "https://g/ a",
    ],
)
def test_an_unusable_link_into_grafana_is_refused(url: str) -> None:
    with pytest.raises(codec.UNREADABLE, match=r"grafana_url: .* is not an address such as"):
        msgspec.convert({"grafana_url": url}, config.Settings)


def test_the_link_into_grafana_names_the_node_or_all_nodes() -> None:
    url = "https://g.example:3000/d/muster/muster?var-node={node}&from=now-1h"
    settings = msgspec.convert({"grafana_url": url}, config.Settings)
    assert pages.grafana_link(settings.grafana_url, "a&b/c") == url.replace("{node}", "a%26b%2Fc")
    assert pages.grafana_link(settings.grafana_url) == url.replace("{node}", "$__all")
    assert pages.grafana_link(config.Settings().grafana_url, "a") == ""


def test_an_event_from_a_clock_that_is_ahead_does_not_stay_the_newest() -> None:
    log = event_log.EventLog()
    for number, (minutes, arrived) in enumerate([(-60, 5), (3, 3), (2, 2)]):
        data = health(minutes, "Unhealthy")
        log.receive(event(data, number), at=AT - timedelta(minutes=arrived))
    assert [entry.id for entry in log.newest(event_log.Filter(), most=9)] == ["e2", "e1", "e0"]
