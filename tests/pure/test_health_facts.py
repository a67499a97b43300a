from datetime import UTC, datetime
from pathlib import Path

import pytest

from muster import vocabulary
from muster.vocabulary import AlertKind, Health, Verdict
from muster_health import alerts, beats, config, deadlines, devices, dossier, evidence, snapshot
from muster_health.devices import Turned
from muster_health.snapshot import State

AT = datetime(2026, 11, 21, 12, tzinfo=UTC)
GPU = "nvidia.com/gpu"
ROOT = Path(__file__).parents[2]


def changed(device: str, health: Health, reason: str = "") -> vocabulary.DeviceHealthChanged:
    return vocabulary.DeviceHealthChanged(
        node="a",
        at=AT,
        plugin="p",
        resource=GPU,
        device_id=device,
        health=health,
        reason=reason,
        code="xid-79" if reason else "",
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


def turned(device: str, why: str, *, unhealthy: bool) -> Turned:
    return Turned(resource=GPU, device=device, unhealthy=unhealthy, why=why)


def test_a_device_turns_unhealthy_once_and_healthy_once() -> None:
    known = devices.Devices()

    assert known.apply(changed("g0", Health.UNHEALTHY, "fell off the bus")) == [
        turned("g0", "fell off the bus (xid-79)", unhealthy=True)
    ]
    assert known.apply(changed("g0", Health.UNHEALTHY, "fell off the bus")) == []
    assert known.apply(changed("g0", Health.HEALTHY)) == [
        turned("g0", "the plugin reports it Healthy", unhealthy=False)
    ]
    assert known.apply(changed("g0", Health.HEALTHY)) == []


def test_a_snapshot_heals_lost_events_both_ways() -> None:
    known = devices.Devices()
    known.restore(GPU, "g0", "XID 79")
    known.restore(GPU, "g9", "XID 79")

    assert known.apply(inventory(g0=Health.HEALTHY, g1=Health.UNHEALTHY)) == [
        turned("g0", "the plugin's inventory shows it Healthy", unhealthy=False),
        turned("g1", "XID 79", unhealthy=True),
        turned("g9", "the plugin's inventory no longer lists it", unhealthy=False),
    ]
    assert (known.totals, known.unhealthy()) == ({GPU: 2}, {(GPU, "g1"): "XID 79"})


def test_a_removed_device_is_no_longer_unhealthy() -> None:
    known = devices.Devices()
    known.restore(GPU, "g0", "XID 79")
    removed = vocabulary.DeviceRemoved(
        node="a", at=AT, plugin="p", resource=GPU, device_id="g0", reason="unplugged"
    )

    assert known.apply(removed) == [turned("g0", "removed: unplugged", unhealthy=False)]


def test_a_device_can_be_unhealthy_when_it_is_added() -> None:
    added = vocabulary.DeviceAdded(
        node="a",
        at=AT,
        plugin="p",
        device=vocabulary.Device(id="g0", resource=GPU, health=Health.UNHEALTHY),
    )

    assert devices.Devices().apply(added) == [
        turned("g0", "the plugin gives no reason", unhealthy=True)
    ]


def test_an_alert_becomes_a_fact_with_a_name_of_its_own() -> None:
    seen = (evidence.seen("plugin", "XID 79"),)
    alert = alerts.Alert(
        kind=AlertKind.DEVICE_UNHEALTHY,
        summary="g0 is unhealthy",
        evidence=seen,
        starts_at=AT,
        resource=GPU,
        device="g0",
    )

    fact = alerts.changed(alert, node="a.b", plugin="p", runbook_url="https://run/")

    assert fact == vocabulary.AlertChanged(
        node="a.b",
        at=AT,
        plugin="p",
        kind=AlertKind.DEVICE_UNHEALTHY,
        severity=vocabulary.Severity.CRITICAL,
        state=vocabulary.AlertState.FIRING,
        fingerprint="aba589f5a7080ad4",
        summary="g0 is unhealthy",
        starts_at=AT,
        resource=GPU,
        devices=("g0",),
        evidence=seen,
        runbook="https://run/device_unhealthy.md",
    )
    assert alerts.event_id(fact) == "aba589f5a7080ad4:firing:2026-11-21T12:00:00+00:00"


def test_every_verdict_says_what_it_alerts_about() -> None:
    silent = {Verdict.HEALTHY, Verdict.MAINTENANCE}

    assert {v for v in Verdict if alerts.kind_of(v) is None} == silent
    assert {alerts.severity_of(kind) for kind in AlertKind} == set(vocabulary.Severity)


@pytest.mark.parametrize(
    "kind",
    [
        AlertKind.PLUGIN_DOWN,
        AlertKind.STUCK,
        AlertKind.DEREGISTERED,
        AlertKind.MAINTENANCE_OVERDUE,
        AlertKind.DEVICE_UNHEALTHY,
    ],
)
def test_every_alert_that_can_fire_has_its_runbook(kind: AlertKind) -> None:
    page = ROOT / config.Settings().runbook_url / f"{kind}.md"

    assert page.read_text("utf-8").startswith(f"# {kind}\n")


def test_a_long_text_is_cut() -> None:
    assert evidence.seen("plugin", "x" * 3000).observed == "x" * 497 + "..."


def test_the_way_through_memory_changes_nothing() -> None:
    known = snapshot.Snapshot(
        node="a.b",
        plugin="p",
        state=State.ILL,
        interval_s=1.0,
        verdict=Verdict.DEREGISTERED,
        since=AT,
        order=(("zero", 3), ("one", 7)),
        firing=(alerts.Alert(kind=AlertKind.STUCK, summary="s", evidence=(), starts_at=AT),),
    )

    assert snapshot.decode(snapshot.encode(known)) == known


@pytest.mark.parametrize("value", [b"", b"{}", b"[1]", b"\xff"])
def test_what_is_not_ours_is_not_remembered(value: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        snapshot.decode(value)


def test_another_version_is_not_remembered() -> None:
    value = snapshot.encode(
        snapshot.Snapshot(v=2, node="a", plugin="p", state=State.ILL, interval_s=1.0)
    )

    with pytest.raises(ValueError, match="v=2, and this is version 1"):
        snapshot.decode(value)


def test_deadlines_come_in_order_and_may_come_early_but_never_late() -> None:
    waits = deadlines.Deadlines()
    waits.set("b", 2.0)
    waits.set("a", 1.0)
    waits.set("a", 5.0)
    waits.set("b", 0.5)
    waits.set("c", None)

    assert [waits.earliest(), waits.due(0.4), waits.due(1.0), waits.earliest()] == [
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


def test_beats_that_arrive_together_are_doubtful() -> None:
    order = beats.Beats(5.0)

    assert [order.take(beat(1), 1.0), order.take(beat(2), 1.4), order.take(beat(3), 2.4)] == [
        beats.Life.FRESH,
        beats.Life.DOUBTFUL,
        beats.Life.FRESH,
    ]


def test_a_host_that_slept_is_believed_from_its_second_beat_on() -> None:
    order = beats.Beats(5.0)
    order.take(beat(1, uptime_s=1.0), 1.0)

    assert order.take(beat(2, uptime_s=2.0), 3600.0) is beats.Life.DOUBTFUL
    assert order.take(beat(3, uptime_s=3.0), 3601.0) is beats.Life.FRESH


def test_lost_beats_make_the_next_one_no_less_fresh() -> None:
    order = beats.Beats(5.0)
    order.take(beat(1, uptime_s=1.0), 1.0)

    assert order.take(beat(9, uptime_s=9.1), 9.0) is beats.Life.FRESH


def test_an_interval_too_short_to_be_meant_is_not_taken() -> None:
    order = beats.Beats(5.0)
    order.take(beat(1, interval_s=1e-9), 1.0)

    assert order.interval_s == beats.INTERVAL_MIN_S


def test_the_instance_that_stays_is_heard_whichever_came_first() -> None:
    one = dossier.Dossier("a.b", "p", config.Detection(), now=0.0, runbook_url="")
    told = [("old", 1), ("new", 1), ("old", 2), ("new", 1), ("old", 2), ("new", 2), ("old", 3)]
    assert [one.is_news(*said) for said in told] == [True, True, True, False, False, True, True]
