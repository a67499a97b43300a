"""The alert about a plugin that has fewer devices than before, though its pod runs well."""

from datetime import UTC, datetime

import pytest

from muster import vocabulary
from muster.vocabulary import AlertKind, AlertState, Phase, Verdict
from muster_health.model import snapshot
from muster_health.plugin import device_counts
from tests.worlds.detector_fleet import GPU, World, running

FIRING, RESOLVED = AlertState.FIRING, AlertState.RESOLVED
SHORT = [(AlertKind.DEVICES_SHORT, FIRING)]
CAMERA = "ex.org/camera"
MIG = "nvidia.com/mig-1g.10gb"


def world_of(devices: int = 8, **how: object) -> World:
    world = World("a", **how)  # type: ignore[arg-type]  # keywords
    world.plugins["a"].devices = devices
    world.plugins["a"].configuration = "one"
    world.run(10.0)
    return world


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (0, f"{GPU} on a: 0 of the 8 devices that it had"),
        (7, f"{GPU} on a: 7 of the 8 devices that it had"),
    ],
)
def test_a_plugin_that_starts_anew_with_fewer_devices_is_short_until_they_are_back(
    devices: int, words: str
) -> None:
    world = world_of()
    world.replace("a", devices)
    world.run(58.0)
    assert world.story("a") == []
    world.run(5.0)
    assert world.story("a") == SHORT
    assert [alert.summary for alert in reported(world)] == [words]
    world.replace("a", 8)
    world.run(5.0)
    assert world.story("a") == [*SHORT, (AlertKind.DEVICES_SHORT, RESOLVED)]


def test_devices_that_come_late_after_a_start_are_no_shortage() -> None:
    world = world_of()
    world.replace("a", 0)
    world.run(50.0)
    world.plugins["a"].devices = 8
    world.run(300.0)
    assert world.story("a") == []


def test_devices_that_vanish_unreported_are_a_shortage_within_one_process_too() -> None:
    world = world_of()
    world.plugins["a"].devices = 0
    world.run(70.0)
    assert world.story("a") == SHORT


def test_a_device_that_is_unplugged_is_missed_by_nobody() -> None:
    world = world_of()
    world.unplug("a", "7")
    world.run(100.0)
    world.replace("a", 7)
    world.run(100.0)
    world.crash()
    world.run(100.0)
    assert world.story("a") == []


def test_another_configuration_means_what_it_leaves() -> None:
    world = world_of()
    world.replace("a", 3, "two")
    world.run(300.0)
    assert world.story("a") == []
    world.replace("a", 2)
    world.run(70.0)
    assert world.story("a") == SHORT
    world.replace("a", 2, "three")
    world.run(70.0)
    assert world.story("a") == [*SHORT, (AlertKind.DEVICES_SHORT, RESOLVED)]


def test_a_configuration_without_any_device_is_reported_and_the_next_one_is_intended() -> None:
    world = world_of()
    world.replace("a", 0, "typo")
    world.run(70.0)
    (alert,) = reported(world)
    assert alert.summary == (
        f"{GPU} on a: 0 of the 8 devices that it had before its configuration changed"
    )
    world.replace("a", 0, "meant")
    world.run(70.0)
    assert world.story("a") == [*SHORT, (AlertKind.DEVICES_SHORT, RESOLVED)]


def test_a_configuration_that_is_reverted_leaves_no_trace() -> None:
    world = world_of()
    world.replace("a", 0, "typo")
    world.run(70.0)
    world.replace("a", 8, "one")
    world.run(300.0)
    assert world.story("a") == [*SHORT, (AlertKind.DEVICES_SHORT, RESOLVED)]


@pytest.mark.parametrize("services", [1, 2])
@pytest.mark.parametrize("wait_s", [2.0, 70.0])
def test_a_shortage_outlives_health(wait_s: float, services: int) -> None:
    world = world_of(services=services)
    world.replace("a", 0)
    world.run(wait_s)
    for _ in range(3):
        world.crash(20.0)
        world.run(70.0)
    assert world.story("a") == SHORT
    assert world.verdicts("a") == [Verdict.HEALTHY]


def test_a_shortage_that_is_known_from_its_alert_alone_ends_no_health_service() -> None:
    world = world_of()
    world.replace("a", 0)
    world.run(70.0)
    published = [e for e in world.published.values() if isinstance(e, vocabulary.AlertChanged)]
    assert world.story("a") == SHORT
    world.stored = {
        f"{before.node}.p": snapshot.encode(before) for before in snapshot.of_alerts(published)
    }
    world.crash(1.0)
    world.run(5.0)
    assert {kind for kind, _ in world.story("a")} == {AlertKind.DEVICES_SHORT}
    assert set(world.verdicts("a")) == {Verdict.HEALTHY}


def test_an_unhealthy_device_is_not_well_because_nobody_lists_it_any_more() -> None:
    world = running("a")
    world.turn("a", "1")
    world.run(5.0)
    world.replace("a", 1)
    world.run(100.0)
    unhealthy = ("a", AlertKind.DEVICE_UNHEALTHY, "1")
    assert world.alerts() == [unhealthy, ("a", AlertKind.DEVICES_SHORT, "")]
    world.crash()
    world.run(30.0)
    world.replace("a", 1)
    world.run(30.0)
    assert world.alerts() == [unhealthy, ("a", AlertKind.DEVICES_SHORT, "")]
    world.plugins["a"].broken.clear()
    world.replace("a", 2)
    world.run(30.0)
    assert world.alerts() == []


def test_an_unhealthy_device_that_the_configuration_leaves_out_is_no_alert() -> None:
    world = world_of(2)
    world.turn("a", "1")
    world.run(5.0)
    world.replace("a", 1, "two")
    world.run(100.0)
    assert world.alerts() == []


def test_gpus_that_are_divided_otherwise_are_not_missed() -> None:
    counts = device_counts.DeviceCounts()
    heard(counts, 0.0, {GPU: 8, CAMERA: 1})
    heard(counts, 1.0, {GPU: 7, MIG: 7, CAMERA: 1})
    heard(counts, 100.0, {GPU: 7, MIG: 7, CAMERA: 1})
    assert (dict(counts.short), dict(counts.had)) == ({}, {GPU: 7, MIG: 7, CAMERA: 1})
    heard(counts, 200.0, {GPU: 8, CAMERA: 1})
    heard(counts, 300.0, {GPU: 8, CAMERA: 1})
    assert (dict(counts.short), dict(counts.had)) == ({}, {GPU: 8, CAMERA: 1})


def test_a_resource_that_the_plugin_does_not_name_any_more_is_missed_too() -> None:
    counts = device_counts.DeviceCounts()
    heard(counts, 0.0, {GPU: 8, CAMERA: 1})
    heard(counts, 1.0, {CAMERA: 1})
    assert heard(counts, 61.0, {CAMERA: 1})
    assert dict(counts.short) == {GPU: "0 of the 8 devices that it had"}


def test_a_plugin_that_drains_counts_nothing() -> None:
    counts = device_counts.DeviceCounts()
    heard(counts, 0.0, {GPU: 8})
    for at in (1.0, 100.0):
        heard(counts, at, {GPU: 0}, phase=Phase.DRAINING)
    assert (dict(counts.short), dict(counts.has)) == ({}, {GPU: 8})


def test_a_heartbeat_in_flight_does_not_bring_back_what_was_unplugged() -> None:
    counts = device_counts.DeviceCounts()
    heard(counts, 0.0, {GPU: 8})
    counts.removed(GPU, 1, 1.0)
    heard(counts, 1.1, {GPU: 8})
    for at in (6.0, 20.0, 100.0):
        heard(counts, at, {GPU: 7})
    assert (dict(counts.short), dict(counts.had)) == ({}, {GPU: 7})


def test_a_device_that_is_plugged_in_again_under_another_name_counts_once() -> None:
    counts = device_counts.DeviceCounts()
    heard(counts, 0.0, {CAMERA: 1})
    beat = vocabulary.Heartbeat(
        node="a",
        plugin="p",
        instance="one",
        seq=2,
        interval_s=5.0,
        # the old device stays in the list for a minute after it was unplugged
        resources=(vocabulary.ResourceBeat(name=CAMERA, devices=2, healthy=1),),
    )
    counts.observe(beat, 5.0)
    for at in (10.0, 100.0):
        heard(counts, at, {CAMERA: 1})
    assert (dict(counts.short), dict(counts.had)) == ({}, {CAMERA: 1})


def test_devices_that_are_all_unhealthy_are_there() -> None:
    world = world_of(2)
    world.plugins["a"].healthy = 0
    world.run(100.0)
    assert world.story("a") == []


def test_resources_are_kept_to_a_bound() -> None:
    counts = device_counts.DeviceCounts()
    heard(counts, 0.0, {f"ex.org/{n:03}": n for n in range(500)})
    heard(counts, 1.0, {f"ex.org/{n:03}": 2 * n for n in range(500, 0, -1)})
    assert (len(counts.had), counts.changes) == (64, 2)


def reported(world: World) -> list[vocabulary.AlertChanged]:
    return [e for e in world.published.values() if isinstance(e, vocabulary.AlertChanged)]


def heard(
    counts: device_counts.DeviceCounts,
    now: float,
    counted: dict[str, int],
    phase: Phase = Phase.SERVING,
) -> bool:
    beat = vocabulary.Heartbeat(
        node="a",
        plugin="p",
        instance="one",
        seq=int(now * 10),
        interval_s=5.0,
        phase=phase,
        wall=datetime(2026, 1, 1, tzinfo=UTC).timestamp(),
        resources=tuple(
            vocabulary.ResourceBeat(name=name, devices=count, healthy=count)
            for name, count in counted.items()
        ),
    )
    return counts.observe(beat, now)
