from datetime import UTC, datetime
from pathlib import Path

import pytest

from muster import vocabulary
from muster.vocabulary import AlertKind, Health, Verdict
from muster_health.alerting import device_alerts, evidence
from muster_health.fleet import effects, timer_queue
from muster_health.model import alerts, config, signals, snapshot
from muster_health.model.snapshot import State
from muster_health.plugin import liveness, tracked_plugin

AT = datetime(2026, 11, 21, 12, tzinfo=UTC)
GPU = "nvidia.com/gpu"
ROOT = Path(__file__).parents[2]


def beat_of(**fields: object) -> vocabulary.Heartbeat:
    resource = vocabulary.ResourceBeat(name=GPU, **fields)  # type: ignore[arg-type]  # numbers, words
    return vocabulary.Heartbeat(
        node="a", plugin="p", instance="one", seq=1, interval_s=1.0, resources=(resource,)
    )


def changed(
    device: str, health: Health, reason: str = "", code: str = "xid-79"
) -> vocabulary.DeviceHealthChanged:
    return vocabulary.DeviceHealthChanged(
        node="a",
        at=AT,
        plugin="p",
        resource=GPU,
        device_id=device,
        health=health,
        reason=reason,
        code=code if reason else "",
    )


def inventory(**healths: Health) -> vocabulary.InventoryReported:
    return vocabulary.InventoryReported(
        node="a",
        at=AT,
        plugin="p",
        devices=tuple(
            vocabulary.Device(id=id_, resource=GPU, health=health, reason="XID 79")
            for id_, health in healths.items()
        ),
    )


def group(kind: AlertKind, faults: device_alerts.DeviceFaults) -> dict[str, str]:
    return {device: bad.why for device, bad in faults.by_group.get((kind, GPU), {}).items()}


def alert_of(faults: device_alerts.DeviceFaults) -> alerts.Alert:
    (alert,) = device_alerts.of(faults, node="a", at=AT)
    return alert


def test_a_device_is_unhealthy_from_its_first_word_to_its_last() -> None:
    faults = device_alerts.DeviceFaults(10)

    faults.apply(changed("g0", Health.UNHEALTHY, "fell off the bus"))
    assert group(AlertKind.DEVICE_UNHEALTHY, faults) == {"g0": "fell off the bus (xid-79)"}
    faults.apply(changed("g0", Health.HEALTHY))
    assert (faults.by_group, faults.ended) == (
        {},
        {(AlertKind.DEVICE_UNHEALTHY, GPU): "the plugin reports the device as Healthy"},
    )


def test_a_snapshot_heals_lost_events_both_ways() -> None:
    faults = device_alerts.DeviceFaults(10)
    faults.restore([snapshot.KnownFault(AlertKind.DEVICE_UNHEALTHY, GPU, "XID 79", ("g0", "g9"))])

    faults.apply(inventory(g0=Health.HEALTHY, g1=Health.UNHEALTHY))

    assert (faults.totals, group(AlertKind.DEVICE_UNHEALTHY, faults)) == (
        {GPU: 2},
        {"g1": "XID 79"},
    )
    assert faults.known() == (
        snapshot.KnownFault(AlertKind.DEVICE_UNHEALTHY, GPU, "XID 79", ("g1",)),
    )


def test_a_snapshot_outweighs_what_was_stored_before_it() -> None:
    """A new leader reads the stored state again, when it has already received the first reports."""
    faults = device_alerts.DeviceFaults(10)
    faults.apply(inventory(g0=Health.HEALTHY, g1=Health.UNHEALTHY))

    faults.restore(
        [
            snapshot.KnownFault(AlertKind.DEVICE_UNHEALTHY, GPU, "XID 79", ("g0",)),
            # an inventory does not contain this condition
            snapshot.KnownFault(AlertKind.DEVICE_DEGRADED, GPU, "row remapping", ("g0",)),
        ]
    )

    assert group(AlertKind.DEVICE_UNHEALTHY, faults) == {"g1": "XID 79"}
    assert group(AlertKind.DEVICE_DEGRADED, faults) == {"g0": "row remapping"}


def test_a_stored_degraded_device_ends_with_a_heartbeat_that_counts_none() -> None:
    faults = device_alerts.DeviceFaults(10)
    where = AlertKind.DEVICE_DEGRADED, GPU
    faults.restore(
        [
            snapshot.KnownFault(*where, "row remapping", ("g0",)),
            snapshot.KnownFault(*where, "hot", ("g1",)),
        ]
    )
    assert dict(faults.counts) == {where: 2}

    assert not faults.observe(beat_of(degraded=2))
    assert faults.observe(beat_of(degraded=0))
    assert (faults.by_group, faults.ended) == (
        {},
        {where: "the plugin's heartbeat reports no such fault"},
    )


def test_a_removed_device_is_no_longer_unhealthy() -> None:
    faults = device_alerts.DeviceFaults(10)
    faults.apply(changed("g0", Health.UNHEALTHY))
    removed = vocabulary.DeviceRemoved(
        node="a", at=AT, plugin="p", resource=GPU, device_id="g0", reason="unplugged"
    )

    faults.apply(removed)
    assert (faults.by_group, faults.ended) == (
        {},
        {(AlertKind.DEVICE_UNHEALTHY, GPU): "removed: unplugged"},
    )


def test_a_device_can_be_unhealthy_when_it_is_added() -> None:
    faults = device_alerts.DeviceFaults(10)
    device = vocabulary.Device(id="g0", resource=GPU, health=Health.UNHEALTHY)
    faults.apply(vocabulary.DeviceAdded(node="a", at=AT, plugin="p", device=device))

    assert group(AlertKind.DEVICE_UNHEALTHY, faults) == {"g0": "the plugin gives no reason"}


def test_a_condition_holds_until_its_end_is_reported_or_a_heartbeat_counts_none() -> None:
    faults = device_alerts.DeviceFaults(10)
    for device in ("g0", "g1"):
        faults.apply(
            vocabulary.DeviceConditionChanged(
                node="a",
                at=AT,
                plugin="p",
                resource=GPU,
                device_id=device,
                condition=vocabulary.Condition.DEGRADED,
                holds=True,
                reason="row remapping",
                pods=("default/train",),
            )
        )
    assert faults.observe(beat_of(degraded=2)) is True
    assert faults.observe(beat_of(degraded=2)) is False
    alert = alert_of(faults)
    assert (alert.kind, alert.summary, alert.devices, alert.pods) == (
        AlertKind.DEVICE_DEGRADED,
        f"2 {GPU} on a are degraded: g0, g1",
        ("g0", "g1"),
        ("default/train",),
    )
    assert faults.observe(beat_of()) is True
    assert list(device_alerts.of(faults, node="a", at=AT)) == []


def test_a_heartbeat_reports_what_no_event_came_for() -> None:
    faults = device_alerts.DeviceFaults(10)
    faults.observe(beat_of(unmonitored=3))

    alert = alert_of(faults)
    assert (alert.kind, alert.devices, alert.devices_total) == (
        AlertKind.DEVICE_UNMONITORED,
        (),
        3,
    )
    assert [each.observed for each in alert.evidence] == ["3 unmonitored"]


def test_fewer_devices_than_expected_are_reported() -> None:
    faults = device_alerts.DeviceFaults(10)
    faults.observe(beat_of(short="3 of 4 expected devices"))

    assert alert_of(faults).summary == f"{GPU} on a: 3 of 4 expected devices"


def test_the_first_reason_is_kept_and_the_newest_stands_beside_it() -> None:
    faults = device_alerts.DeviceFaults(10)
    for reason, code in (
        ("XID 79: it has fallen off the bus", "xid-79"),
        ("NVML has lost the GPU", "gpu-lost"),
        ("NVML does not answer", "silent"),
    ):
        faults.apply(changed("g0", Health.UNHEALTHY, reason, code))

    first = "XID 79: it has fallen off the bus (xid-79)"
    assert alert_of(faults).summary == (
        f"{GPU} g0 on a is unhealthy: {first}; now: NVML does not answer (silent)"
    )
    faults.apply(changed("g0", Health.UNHEALTHY, "XID 79: it has fallen off the bus", "xid-79"))
    assert alert_of(faults).summary == f"{GPU} g0 on a is unhealthy: {first}"


def test_a_resolved_alert_says_what_was_wrong_and_not_what_was_true_last() -> None:
    faults = device_alerts.DeviceFaults(10)
    for reason, code in (
        ("XID 79: it has fallen off the bus", "xid-79"),
        ("xid-79 is over: 6 good polls in a row; but NVML has lost the GPU", "xid-79"),
    ):
        faults.apply(changed("g0", Health.UNHEALTHY, reason, code))
    firing = alert_of(faults)
    assert "; now: xid-79 is over" in firing.summary

    faults.apply(changed("g0", Health.HEALTHY, "gpu-lost is over: not seen in 3 polls"))
    resolved = firing.resolved(AT, device_alerts.ended(faults, firing.key))
    assert resolved.summary == (
        f"{GPU} g0 on a is unhealthy: XID 79: it has fallen off the bus (xid-79)"
    )
    assert [each.observed for each in resolved.evidence] == [
        "gpu-lost is over: not seen in 3 polls (xid-79)"
    ]


def test_hundreds_of_devices_are_one_alert_and_are_bounded() -> None:
    faults = device_alerts.DeviceFaults(300)
    kept = [faults.apply(changed(f"g{n:03}", Health.UNHEALTHY, "XID 79")) for n in range(400)]

    alert = alert_of(faults)
    assert kept == [True] * 300 + [False] * 100
    assert (len(alert.devices), alert.devices_total, len(alert.evidence)) == (32, 300, 4)
    assert alert.summary == f"300 {GPU} on a are unhealthy: g000, g001, g002, g003 and 296 more"
    assert faults.known() == (
        snapshot.KnownFault(
            AlertKind.DEVICE_UNHEALTHY,
            GPU,
            "XID 79 (xid-79)",
            # the next inventory lists the others
            tuple(f"g{n:03}" for n in range(128)),
        ),
    )


def test_an_alert_becomes_a_fact_with_a_name_of_its_own() -> None:
    each = (evidence.of("plugin", "XID 79"),)
    alert = alerts.Alert(
        kind=AlertKind.DEVICE_UNHEALTHY,
        summary="g0 is unhealthy",
        evidence=each,
        starts_at=AT,
        changed_at=AT,
        resource=GPU,
        devices=("g0",),
        devices_total=1,
    )

    fact = alerts.changed(alert, node="a.b", plugin="p", runbook_url="https://run/", leader=7)

    assert fact == vocabulary.AlertChanged(
        node="a.b",
        at=AT,
        plugin="p",
        kind=AlertKind.DEVICE_UNHEALTHY,
        severity=vocabulary.Severity.CRITICAL,
        state=vocabulary.AlertState.FIRING,
        fingerprint="86a71ae77dc3df60",
        summary="g0 is unhealthy",
        starts_at=AT,
        resource=GPU,
        devices=("g0",),
        devices_total=1,
        evidence=each,
        advice="move the pods that use it; look up the fault in the runbook",
        runbook="https://run/device_unhealthy.html",
        leader=7,
    )
    assert alerts.event_id(fact) == f"{fact.fingerprint}:2026-11-21T12:00:00+00:00:0:firing"


def test_a_plugin_has_one_alert_for_each_severity() -> None:
    def name(kind: AlertKind) -> str:
        return alerts.fingerprint("a", "p", kind)

    assert name(AlertKind.PLUGIN_DOWN) == name(AlertKind.NODE_DOWN) == name(AlertKind.STUCK)
    assert name(AlertKind.UNREACHABLE) != name(AlertKind.PLUGIN_DOWN)
    assert name(AlertKind.DEVICE_UNHEALTHY) != name(AlertKind.PLUGIN_DOWN)


def test_every_verdict_has_its_kind_of_alert() -> None:
    silent = {Verdict.HEALTHY, Verdict.MAINTENANCE}

    assert {v for v in Verdict if alerts.kind_of(v) is None} == silent
    assert {alerts.severity_of(kind) for kind in AlertKind} == set(vocabulary.Severity)


def test_a_long_text_is_cut() -> None:
    assert evidence.of("plugin", "x" * 3000).observed == "x" * 497 + "..."


def test_the_way_through_memory_changes_nothing() -> None:
    faults = snapshot.Snapshot(
        node="a.b",
        plugin="p",
        state=State.FAILING,
        interval_s=1.0,
        verdict=Verdict.DEREGISTERED,
        since=AT,
        order=(("zero", 3), ("one", 7)),
        firing=(
            alerts.Alert(
                kind=AlertKind.STUCK,
                summary="s",
                evidence=(evidence.of("plugin", "x"),),
                starts_at=AT,
                changed_at=AT,
            ),
        ),
    )

    assert snapshot.decode(snapshot.encode(faults)) == faults


def test_a_state_is_stored_under_its_first_name_and_shown_under_its_present_one() -> None:
    stored = snapshot.Snapshot(node="a", plugin="p", state=State.FAILING, interval_s=1.0)

    assert b'"state":"ill"' in snapshot.encode(stored)
    assert {state.value: state.shown for state in State if state.value != state.shown} == {
        "ill": "failing"
    }


@pytest.mark.parametrize("value", [b"", b"{}", b"[1]", b"\xff"])
def test_what_is_not_ours_is_not_remembered(value: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        snapshot.decode(value)


def test_another_version_is_not_remembered() -> None:
    value = snapshot.encode(
        snapshot.Snapshot(v=1, node="a", plugin="p", state=State.FAILING, interval_s=1.0)
    )

    with pytest.raises(ValueError, match="the state has version 1, expected 2"):
        snapshot.decode(value)


def test_deadlines_come_in_order_and_may_come_early_but_never_late() -> None:
    waits = timer_queue.TimerQueue()
    waits.set("b", 2.0)
    waits.set("a", 1.0)
    waits.set("a", 5.0)
    waits.set("b", 0.5)
    waits.set("c", None)

    assert [waits.earliest(), waits.due(0.4, most=9), waits.due(1.0, most=9), waits.earliest()] == [
        0.5,
        [],
        ["b", "a"],
        None,
    ]


def beat(seq: int, **facts: float) -> vocabulary.Heartbeat:
    return vocabulary.Heartbeat(
        node="a",
        plugin="p",
        instance="one",
        seq=seq,
        interval_s=facts.get("interval_s", 1.0),
        uptime_s=facts.get("uptime_s", 0.0),
    )


def test_heartbeats_that_arrive_together_are_doubtful() -> None:
    order = liveness.HeartbeatOrder(5.0)

    assert [
        order.observe(beat(1), 1.0),
        order.observe(beat(2), 1.4),
        order.observe(beat(3), 2.4),
    ] == [
        liveness.Freshness.FRESH,
        liveness.Freshness.DOUBTFUL,
        liveness.Freshness.FRESH,
    ]


def test_a_host_that_slept_is_believed_from_its_second_heartbeat_on() -> None:
    order = liveness.HeartbeatOrder(5.0)
    order.observe(beat(1, uptime_s=1.0), 1.0)

    assert order.observe(beat(2, uptime_s=2.0), 3600.0) is liveness.Freshness.DOUBTFUL
    assert order.observe(beat(3, uptime_s=3.0), 3601.0) is liveness.Freshness.FRESH


def test_lost_heartbeats_make_the_next_one_no_less_fresh() -> None:
    order = liveness.HeartbeatOrder(5.0)
    order.observe(beat(1, uptime_s=1.0), 1.0)

    assert order.observe(beat(9, uptime_s=9.1), 9.0) is liveness.Freshness.FRESH


def test_an_implausibly_short_interval_is_not_used() -> None:
    order = liveness.HeartbeatOrder(5.0)
    order.observe(beat(1, interval_s=1e-9), 1.0)

    assert order.interval_s == liveness.INTERVAL_MIN_S


def test_events_of_the_instance_that_stays_are_processed_whichever_came_first() -> None:
    about = config.Context(
        settings=config.Detection(),
        bounds=config.Bounds(),
        runbook_url="",
        has_cluster=False,
        leader=0,
    )
    plugin = tracked_plugin.TrackedPlugin("a.b", "p", about, now=0.0)
    stale = [signals.Noted(note=signals.Note.EVENT_STALE)]

    def is_taken(instance: str, sequence: int) -> bool:
        event = vocabulary.ExpectationChanged(node="a.b", at=AT, plugin="p", resource="r", short="")
        reported = signals.FromPlugin(event=event, instance=instance, sequence=sequence)
        return plugin.receive(reported, 1.0) != stale

    places = [("old", 1), ("new", 1), ("old", 2), ("new", 1), ("old", 2), ("new", 2), ("old", 3)]
    assert [is_taken(*place) for place in places] == [True, True, True, False, False, True, True]


def test_an_inventory_from_the_other_stream_hides_no_event_and_undoes_none() -> None:
    about = config.Context(
        settings=config.Detection(),
        bounds=config.Bounds(),
        runbook_url="",
        has_cluster=False,
        leader=0,
    )
    plugin = tracked_plugin.TrackedPlugin("a.b", "p", about, now=0.0)

    def receive(event: vocabulary.PluginEvent, sequence: int) -> set[str]:
        plugin.receive(signals.FromPlugin(event=event, instance="i", sequence=sequence), 1.0)
        unhealthy = plugin.faults.by_group.get((vocabulary.AlertKind.DEVICE_UNHEALTHY, "r"), {})
        return {*unhealthy}

    def listed(*unhealthy: str) -> vocabulary.InventoryReported:
        devices = tuple(
            vocabulary.Device(
                id=name,
                resource="r",
                health=Health.UNHEALTHY if name in unhealthy else Health.HEALTHY,
            )
            for name in "xyz"
        )
        return vocabulary.InventoryReported(node="a.b", at=AT, plugin="p", devices=devices)

    def changed(name: str, health: Health) -> vocabulary.DeviceHealthChanged:
        return vocabulary.DeviceHealthChanged(
            node="a.b", at=AT, plugin="p", resource="r", device_id=name, health=health, reason="why"
        )

    assert receive(listed("x"), 4) == {"x"}
    # published before that inventory, and overtaken by it
    assert receive(changed("x", Health.UNHEALTHY), 3) == {"x"}
    assert receive(changed("y", Health.UNHEALTHY), 5) == {"x", "y"}
    # an older inventory, such as the newest stored one after a restart
    assert receive(listed("x"), 4) == {"x", "y"}
    assert receive(listed("z"), 6) == {"z"}


def test_a_deadline_that_moved_back_is_queued_anew_without_a_wakeup() -> None:
    waits = timer_queue.TimerQueue()
    actual: dict[str, float | None] = {"a": 9.0, "b": 1.5, "c": None, "d": 3.0}
    for key in actual:
        waits.set(key, 1.0)
    waits.follow(2.0, actual.get)
    due = (waits.due(1.0, most=9), waits.due(3.0, most=1), waits.due(3.0, most=9))
    assert (due, waits.due(9.0, most=9)) == ((["c"], ["b"], ["d"]), ["a"])


def test_first_verdicts_are_published_fifty_at_a_time_in_order_and_each_once() -> None:
    turns = effects.StartupRateLimit()
    names = [f"node-{number}.p" for number in range(120)]
    waiting = [name for name in names if turns.must_wait(name, 1.0)]
    assert waiting == names[50:]
    assert turns.must_wait(names[60], 1.05)
    assert turns.turn(1.05) == []
    assert turns.turn(1.1) == names[50:100]
    assert turns.must_wait("late.p", 1.15)
    due = turns.due
    assert due is not None
    assert due == pytest.approx(1.2)
    assert turns.turn(due) == [*names[100:], "late.p"]
    assert turns.due is None
