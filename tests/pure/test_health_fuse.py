"""The FUSE broker, evaluated like a plugin without devices, and the alerts about its mounts."""

from typing import Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster import vocabulary
from muster.vocabulary import AlertKind, AlertState, FuseCondition, Verdict
from muster_health.alerting import mount_alerts
from muster_health.model import alerts, config, signals, snapshot
from muster_health.plugin import problems
from tests.worlds.detector_fleet import ZERO, World

FIRING, RESOLVED = AlertState.FIRING, AlertState.RESOLVED
HUNG, DEAD, LINGERING = FuseCondition.HUNG, FuseCondition.DEAD, FuseCondition.LINGERING
BROKER: Final = vocabulary.ResourceBeat(
    name="fuse.muster.dev",
    registered_age_s=600.0,
    streams=1,
    probe_ok=True,
    probe_age_s=2.0,
    devices=1,
    healthy=1,
    allocated=3,
    extended=False,
)


def mount(number: int, pod: str = "shop/web-0") -> vocabulary.FuseMount:
    return vocabulary.FuseMount(
        id=f"{number}-7",
        pod=pod,
        connection=number,
        source="host:/data",
        subtype="sshfs",
        mount_point="/mnt",
    )


def world_of(*nodes: str, **how: object) -> World:
    world = World(*nodes, **how)  # type: ignore[arg-type]  # keywords
    world.broker(*nodes)
    world.run(10.0)
    assert [world.verdicts(node) for node in nodes] == [[Verdict.HEALTHY]] * len(nodes)
    return world


# the broker as a plugin


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        ("kill", AlertKind.PLUGIN_DOWN),
        ("freeze", AlertKind.STUCK),
        ("cut", AlertKind.UNREACHABLE),
        ("down", AlertKind.NODE_DOWN),
        ("part", AlertKind.DEREGISTERED),
    ],
)
def test_a_broker_that_fails_gets_the_verdict_of_a_plugin_and_is_well_again(
    act: str, kind: AlertKind
) -> None:
    world = world_of("a")
    getattr(world, act)("a")
    world.run(120.0)
    assert world.story("a") == [(kind, FIRING)]
    world.mend("a")
    world.run(120.0)
    assert world.story("a") == [(kind, FIRING), (kind, RESOLVED)]


def test_a_broker_that_announces_its_stop_is_in_maintenance() -> None:
    world = world_of("a")
    world.stop("a")
    world.run(30.0)
    assert (world.verdicts("a")[-1], world.story("a")) == (Verdict.MAINTENANCE, [])


def test_a_resource_that_is_not_extended_is_neither_offered_nor_counted() -> None:
    world = world_of("a")
    world.offer("a", 0)
    world.plugins["a"].devices = 0
    world.run(300.0)
    assert (world.verdicts("a")[-1], world.story("a")) == (Verdict.HEALTHY, [])


@pytest.mark.parametrize(
    ("changes", "verdict", "text"),
    [
        ({}, None, ""),
        (
            {"streams": 0},
            Verdict.DEREGISTERED,
            "fuse.muster.dev: the kubelet has not registered it",
        ),
        (
            {"streams": 0, "problem": "no kubelet has asked for 60 s"},
            Verdict.DEREGISTERED,
            "fuse.muster.dev: no kubelet has asked for 60 s",
        ),
        (
            {"probe_ok": False},
            Verdict.STUCK,
            "fuse.muster.dev: registered, but its self-test fails (self-probe 2.0 s ago)",
        ),
        ({"devices": 0, "healthy": 0}, None, ""),
    ],
)
def test_what_a_broker_reports_is_said_in_its_words(
    changes: dict[str, object], verdict: Verdict | None, text: str
) -> None:
    heartbeat = vocabulary.Heartbeat(
        node="a",
        plugin="fuse-broker",
        instance="i",
        seq=1,
        interval_s=5.0,
        resources=(msgspec.structs.replace(BROKER, **changes),),
    )
    offers = {"nvidia.com/gpu": signals.Offer(capacity=8, allocatable=8)}
    worst = problems.worst(heartbeat, config.Detection(), offers=offers)
    assert (worst and worst.verdict, worst.evidence[0].observed if worst else "") == (verdict, text)


# mounts that do not work


def published(world: World) -> list[vocabulary.AlertChanged]:
    return [e for e in world.published.values() if isinstance(e, vocabulary.AlertChanged)]


@pytest.mark.parametrize(
    ("condition", "kind", "severity", "words"),
    [
        (HUNG, AlertKind.FUSE_MOUNT_HUNG, "critical", "a FUSE mount hangs"),
        (
            DEAD,
            AlertKind.FUSE_DAEMON_DIED,
            "warning",
            "the program that served a FUSE mount has ended",
        ),
        (
            LINGERING,
            AlertKind.FUSE_POD_TERMINATING,
            "warning",
            "a FUSE mount prevents a pod from terminating",
        ),
    ],
)
def test_a_condition_of_a_mount_is_an_alert_that_names_the_pod_until_it_ends(
    condition: FuseCondition, kind: AlertKind, severity: str, words: str
) -> None:
    world = world_of("a")
    world.change_mount("a", mount(51), condition)
    world.run(5.0)
    (alert,) = published(world)
    assert (alert.kind, alert.severity, alert.pods) == (kind, severity, ("shop/web-0",))
    why = "shop/web-0: sshfs host:/data on /mnt: observed"
    assert alert.summary == f"{words} on a: {why}"
    assert [(e.source, e.observed) for e in alert.evidence] == [("plugin", why)]
    world.change_mount("a", mount(51), condition)
    world.run(60.0)
    assert world.story("a") == [(kind, FIRING), (kind, RESOLVED)]


def test_there_is_one_alert_for_each_kind_and_node_however_many_pods_it_names() -> None:
    world = world_of("a", "b")
    for number in range(40):
        world.change_mount("a", mount(number, f"shop/web-{number:02}"), HUNG)
    world.change_mount("b", mount(1, "shop/other"), HUNG)
    world.change_mount("b", mount(1, "shop/other"), LINGERING)
    world.run(60.0)
    assert world.alerts() == [
        ("a", AlertKind.FUSE_MOUNT_HUNG, ""),
        ("b", AlertKind.FUSE_MOUNT_HUNG, ""),
        ("b", AlertKind.FUSE_POD_TERMINATING, ""),
    ]
    of_a = [alert for alert in published(world) if alert.node == "a"][-1]
    assert (of_a.pods[:2], len(of_a.pods), of_a.pods_total) == (
        ("shop/web-00", "shop/web-01"),
        alerts.PODS_MAX,
        40,
    )
    named = "shop/web-00, shop/web-01, shop/web-02, shop/web-03 and 36 more"
    assert of_a.summary == f"40 FUSE mounts hang on a: {named}"


def test_an_inventory_corrects_what_an_event_that_was_lost_would_have_said() -> None:
    world = world_of("a")
    hung = msgspec.structs.replace(mount(51), conditions=(HUNG,))
    world.plugins["a"].mounts = {hung.id: hung}
    world.report("a")
    world.run(5.0)
    assert [alert.summary for alert in published(world)] == [
        "a FUSE mount hangs on a: shop/web-0: sshfs host:/data on /mnt"
    ]
    world.plugins["a"].mounts = {}
    world.report("a")
    world.run(60.0)
    assert world.story("a") == [
        (AlertKind.FUSE_MOUNT_HUNG, FIRING),
        (AlertKind.FUSE_MOUNT_HUNG, RESOLVED),
    ]


def test_a_new_health_neither_repeats_nor_ends_an_alert_about_a_mount() -> None:
    world = world_of("a")
    world.change_mount("a", mount(51), DEAD)
    world.run(5.0)
    before = published(world)
    world.crash(3.0)
    world.run(60.0)
    assert published(world) == before
    world.change_mount("a", mount(51), DEAD)
    world.run(60.0)
    assert world.story("a")[-1] == (AlertKind.FUSE_DAEMON_DIED, RESOLVED)


def test_the_state_counts_mounts_and_lists_those_that_do_not_work() -> None:
    world = world_of("a")
    world.change_mount("a", mount(51), HUNG)
    world.plugins["a"].mounts["52-7"] = mount(52, "shop/web-1")
    world.report("a")
    world.run(5.0)
    service = world.services[0]
    (shown,) = (plugin.shown(service.clock) for plugin in service.detector.plugins())
    assert (shown["mounts"], shown["devices"]) == (2, {})
    assert shown["unhealthy"] == [
        {
            "kind": AlertKind.FUSE_MOUNT_HUNG,
            "resource": "shop/web-0",
            "device": "51-7",
            "why": "shop/web-0: sshfs host:/data on /mnt: observed",
        }
    ]


def changed(mount: vocabulary.FuseMount, condition: FuseCondition, *, holds: bool) -> object:
    return vocabulary.FuseMountChanged(
        node="a", at=ZERO, plugin="p", mount=mount, condition=condition, holds=holds
    )


def listed(mounts: tuple[vocabulary.FuseMount, ...]) -> object:
    return vocabulary.InventoryReported(
        node="a", at=ZERO, plugin="p", devices=(), fuse_mounts=mounts
    )


MOUNTS: Final = st.builds(mount, st.integers(0, 4), st.sampled_from(["x/a", "x/b"]))
CONDITIONS: Final = st.sampled_from(FuseCondition)
REPORTS: Final = st.one_of(
    st.builds(changed, MOUNTS, CONDITIONS, holds=st.booleans()),
    st.lists(
        st.builds(
            lambda mount, conditions: msgspec.structs.replace(mount, conditions=tuple(conditions)),
            MOUNTS,
            st.lists(CONDITIONS, unique=True),
        ),
        unique_by=lambda mount: mount.id,
    ).map(lambda mounts: listed(tuple(mounts))),
)
KINDS: Final = {
    HUNG: AlertKind.FUSE_MOUNT_HUNG,
    DEAD: AlertKind.FUSE_DAEMON_DIED,
    LINGERING: AlertKind.FUSE_POD_TERMINATING,
}


@given(st.lists(REPORTS, max_size=30))
def test_after_any_reports_exactly_the_conditions_that_hold_are_alerts(
    reports: list[vocabulary.Event],
) -> None:
    faults = mount_alerts.MountFaults()
    holding: set[tuple[FuseCondition, str]] = set()
    for report in reports:
        changes = faults.changes
        before = faults.known()
        assert faults.apply(report)
        assert (faults.known() != before) == (faults.changes != changes)
        if isinstance(report, vocabulary.FuseMountChanged):
            key = report.condition, report.mount.id
            holding = holding | {key} if report.holds else holding - {key}
        else:
            assert isinstance(report, vocabulary.InventoryReported)
            holding = {(c, each.id) for each in report.fuse_mounts for c in each.conditions}
    expected = {(KINDS[condition], mount_id) for condition, mount_id in holding}
    assert {(kind, key) for kind, by_id in faults.by_kind.items() for key in by_id} == expected
    assert {alert.kind for alert in mount_alerts.of(faults, node="a", at=ZERO)} == {
        kind for kind, _ in expected
    }
    again = mount_alerts.MountFaults()
    again.restore(faults.known())
    assert again.by_kind == faults.by_kind


def test_what_is_known_already_is_not_replaced_by_what_was_saved() -> None:
    saved = (snapshot.KnownFault(AlertKind.FUSE_MOUNT_HUNG, "x/a", "old", ("51-7",)),)
    faults = mount_alerts.MountFaults()
    assert faults.apply(vocabulary.InventoryReported(node="a", at=ZERO, plugin="p", devices=()))
    faults.restore(saved)
    assert (faults.by_kind, faults.total) == ({}, 0)


def test_a_node_that_reports_mounts_without_end_is_refused_at_a_limit() -> None:
    faults = mount_alerts.MountFaults()
    reports = [changed(mount(number), HUNG, holds=True) for number in range(1_100)]
    kept = [faults.apply(report) for report in reports if isinstance(report, vocabulary.Event)]
    assert kept == [True] * mount_alerts.FAULTS_MAX + [False] * (1_100 - mount_alerts.FAULTS_MAX)
    (alert,) = mount_alerts.of(faults, node="a", at=ZERO)
    assert alert.summary.startswith("1024 FUSE mounts hang on a: shop/web-0")
