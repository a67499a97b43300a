"""The tables of `gpu_health` and `gpu_recovery`, and what holds after any observations."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import muster_plugin
from muster import vocabulary
from muster_plugin.config import gpus
from muster_plugin.gpu import faults, gpu_health, xid_policy
from muster_plugin.gpu import faults as gpu_faults
from muster_plugin.model import gpu

HERE = Path(muster_plugin.__file__).parent
KNOWN = xid_policy.catalogue((HERE / xid_policy.CATALOGUE).read_bytes())
COMPATIBLE, CATALOGUE = (
    xid_policy.preset((HERE / xid_policy.preset_file(preset)).read_bytes())
    for preset in gpus.Preset
)
JUDGE = xid_policy.Policy(KNOWN, COMPATIBLE)
DEGRADES_94 = xid_policy.Policy(
    KNOWN,
    COMPATIBLE,
    overrides=xid_policy.Overrides(
        rules=(xid_policy.Override(xids=(94,), action=xid_policy.Action.DEGRADE),),
    ),
)
TOLD = gpus.Health(poll_s=10, good=3, cooldown_s=60)
START = datetime(2026, 1, 1, tzinfo=UTC)
A, B = gpu.Part(gpu="GPU-a"), gpu.Part(gpu="GPU-b")
MIG3, MIG5 = gpu.Part(gpu="GPU-a", gi=3, ci=0), gpu.Part(gpu="GPU-a", gi=5, ci=0)
BAD, WORSE, BLIND = gpu.Effect.UNHEALTHY, gpu.Effect.DEGRADED, gpu.Effect.UNMONITORED
FINE = gpu.Poll(
    gpu="GPU-a", at=START, recovery_action=0, ecc_uncorrected=0, slowdowns=(), nvlinks_down=()
)
MUTE = gpu.Poll(gpu="GPU-a", at=START)
"""The answer of a driver that supports none of these queries."""
LOST = gpu.Poll(gpu="GPU-a", at=START, error="GPU_IS_LOST")
UNKNOWN = gpu.Poll(gpu="GPU-a", at=START, error="UNKNOWN")


def poll(**error_text: object) -> gpu.Poll:
    return msgspec.structs.replace(FINE, **error_text)


class Story:
    """A state machine, its clock, and the faults that it has reported as begun and not ended."""

    def __init__(
        self,
        policy: xid_policy.Policy = JUDGE,
        health_rules: gpus.Health = TOLD,
        now: float = 1000.0,
    ) -> None:
        self.machine = gpu_health.GpuHealth(policy, health_rules)
        self.now = now
        self.changes: list[gpu.FaultChange] = []
        self.holding: dict[tuple[gpu.Part, str], gpu.FaultBegan] = {}

    def see(self, event: gpu.Scan | gpu.Observation, *, after: float = 0.0) -> list[str]:
        """Pass a scan or an observation to the machine; return the changes in short form."""
        self.now += after
        return self.take(self.machine.receive(stamped(event, self.now), self.now))

    def xid(self, number: int, part: gpu.Part = A, *, after: float = 0.0) -> list[str]:
        return self.see(gpu.Xid(part=part, xid=number, at=START), after=after)

    def polls(self, observation: gpu.Poll, count: int, *, every: float = 10.0) -> list[str]:
        """Poll repeatedly; return the changes, each with the number of its poll."""
        changes = []
        for at in range(1, count + 1):
            changes += [f"{at}: {change}" for change in self.see(observation, after=every)]
        return changes

    def tick(self) -> list[str]:
        due = self.machine.next_deadline()
        assert due is not None
        self.now = due
        return self.take(self.machine.tick(due))

    def wait(self, seconds: float) -> None:
        """Let time pass, and handle every deadline when it is due."""
        until = self.now + seconds
        while (due := self.machine.next_deadline()) is not None and due <= until:
            self.tick()
        self.now = until

    def take(self, changes: Sequence[gpu.FaultChange]) -> list[str]:
        for change in changes:
            self.changes.append(change)
            if isinstance(change, gpu.FaultBegan):
                assert (change.part, change.code) not in self.holding, "it holds already"
                self.holding[change.part, change.code] = change
            else:
                began = self.holding.pop((change.part, change.code))
                assert began.effect is change.effect
        return [short(change) for change in changes]

    def effects(self, part: gpu.Part = A) -> set[gpu.Effect]:
        return {change.effect for (of, _), change in self.holding.items() if of.covers(part)}


def short(changes: gpu.FaultChange) -> str:
    sign = "+" if isinstance(changes, gpu.FaultBegan) else "-"
    inner = "" if changes.part.gi is None else f" on gi {changes.part.gi}"
    return f"{sign}{changes.effect} {changes.code}{inner}"


# Faults that begin: the table of gpu_health, row by row

SEEN: list[tuple[gpu.Observation, list[str]]] = [
    (gpu.Xid(part=A, xid=13, at=START), []),
    (gpu.Xid(part=A, xid=94, at=START), ["+unhealthy xid-94"]),
    (gpu.Xid(part=A, xid=95, at=START), ["+unhealthy xid-95"]),
    (gpu.Xid(part=A, xid=79, at=START), ["+unhealthy xid-79"]),
    (gpu.Xid(part=MIG3, xid=94, at=START), ["+unhealthy xid-94 on gi 3"]),
    (LOST, ["+unhealthy gpu-lost"]),
    (poll(error="RESET_REQUIRED"), ["+unhealthy reset-required"]),
    (UNKNOWN, []),
    (poll(error="NOT_SUPPORTED"), []),
    (FINE, []),
    (MUTE, []),
    (poll(recovery_action=1), ["+unhealthy recovery-reset"]),
    (poll(recovery_action=2), ["+unhealthy recovery-reboot"]),
    (poll(recovery_action=3), ["+degraded recovery-drain-p2p"]),
    (poll(recovery_action=4), ["+unhealthy recovery-drain-and-reset"]),
    (poll(recovery_action=5), ["+degraded recovery-imex"]),
    (poll(recovery_action=6), ["+unhealthy recovery-bus-reset"]),
    (poll(recovery_action=7), ["+unhealthy recovery-system-reboot"]),
    (poll(recovery_action=8), ["+degraded recovery-other"]),
    (poll(remap_pending=True), ["+degraded remap-pending"]),
    (poll(remap_failed=True), ["+unhealthy remap-failed"]),
    (poll(retired_pending=True), ["+degraded retired-pending"]),
    (poll(ecc_uncorrected=7), []),  # a count since the driver was loaded; the time is unknown
    (poll(slowdowns=("HW_THERMAL",)), []),
    (poll(nvlinks_down=(2, 5)), ["+degraded nvlink-down"]),
    (poll(fabric="not_supported"), []),
    (poll(fabric="completed"), []),
    (poll(fabric="not_started"), ["+unhealthy fabric-not-ready"]),
    (poll(fabric="in_progress"), ["+unhealthy fabric-not-ready"]),
    (poll(fabric="failed"), ["+unhealthy fabric-not-ready"]),
    (poll(fabric="of_a_new_kind"), []),
    (gpu.MonitoringChanged(gpu="GPU-a", at=START, problem="no events"), ["+unmonitored unwatched"]),
    (gpu.MonitoringChanged(gpu="GPU-a", at=START), []),
    (gpu.RepairReported(gpu="GPU-a", at=START, by="a person"), []),
]


@pytest.mark.parametrize(("event", "expected"), SEEN)
def test_what_is_observed_first_begins_what_the_table_says(
    event: gpu.Observation, expected: list[str]
) -> None:
    story = Story()
    assert story.see(event) == expected
    assert story.see(event) == [], "it holds once"


def test_a_fault_reports_code_reason_policy_and_evidence() -> None:
    story = Story()
    story.see(FINE)
    story.xid(94, MIG3)
    assert story.changes == [
        gpu.FaultBegan(
            part=MIG3,
            effect=BAD,
            code="xid-94",
            reason="XID 94: Contained memory error",
            at=START + timedelta(seconds=1000),
            policy="nvidia-compatible/any-other v1: unhealthy"
            " (NVIDIA/k8s-device-plugin 1b826ac: unhealthy)",
            evidence=(
                vocabulary.Evidence(
                    source="nvml-events", observed="XID 94 on GPU instance 3, compute instance 0"
                ),
                vocabulary.Evidence(
                    source="nvml-poll",
                    observed="before: it answers, recovery action 0, uncorrected ecc errors 0",
                ),
            ),
        )
    ]


def test_a_polled_fault_reports_where_nvml_says_so() -> None:
    story = Story()
    story.see(poll(slowdowns=("HW_THERMAL",), temperature_c=91, slowdown_c=89, fabric="failed"))
    began = story.holding[A, gpu_faults.FABRIC]
    assert began.reason == "CUDA cannot start, because the GPU's fabric is not ready: failed"
    assert began.policy == "polled/fabric-not-ready: unhealthy (NVML GPU fabric state)"


def test_a_slowdown_is_reported_once_it_has_lasted_and_its_heat_with_it() -> None:
    story = Story()
    slow = poll(slowdowns=("HW_SLOWDOWN", "HW_THERMAL"), temperature_c=91, slowdown_c=89)
    assert story.polls(slow, 2) + story.polls(FINE, 1) + story.polls(slow, 2) == []
    assert story.polls(poll(slowdowns=None), 1) == [], "an unknown value interrupts no row"
    assert story.polls(slow, 1) == ["1: +degraded slowdown"]
    assert story.holding[A, gpu_faults.SLOWDOWN].reason == (
        "slowed down: HW_SLOWDOWN, HW_THERMAL (91 C, slows down at 89 C)"
    )
    assert story.polls(FINE, 3) == ["3: -degraded slowdown"]


def test_ecc_errors_that_rise_degrade_until_they_are_quiet() -> None:
    story = Story()
    story.see(poll(ecc_uncorrected=2))
    assert story.see(poll(ecc_uncorrected=3), after=10) == ["+degraded ecc-uncorrected"]
    assert story.polls(poll(ecc_uncorrected=3), 4) == []
    assert story.see(poll(ecc_uncorrected=4), after=10) == []
    assert story.polls(poll(ecc_uncorrected=4), 6) == ["6: -degraded ecc-uncorrected"]


def test_one_error_of_nobody_knows_what_means_nothing_and_three_that_nothing_can_see() -> None:
    story = Story()
    assert story.polls(UNKNOWN, 3) == ["3: +unmonitored unanswered"]
    assert story.polls(UNKNOWN, 20) == []
    assert story.effects() == {BLIND}
    assert story.polls(FINE, 1) == ["1: -unmonitored unanswered"]


def test_a_watch_is_reported_when_it_ends_and_when_it_begins_again() -> None:
    story = Story()
    story.see(FINE)
    silent = gpu.MonitoringChanged(gpu="GPU-a", at=START, problem="NVML has not answered for 5 s")
    assert story.see(silent) == ["+unmonitored unwatched"]
    assert story.machine.next_deadline() is None, "it is unmonitored already"
    assert story.see(gpu.MonitoringChanged(gpu="GPU-a", at=START), after=30) == [
        "-unmonitored unwatched"
    ]


def test_a_gpu_that_nothing_polls_is_unmonitored() -> None:
    story = Story()
    story.see(FINE)
    assert story.tick() == ["+unmonitored unpolled"]
    assert story.now == 1030
    assert story.changes[-1].reason == "it has not been polled for 30 s"
    assert story.changes[-1].at == START + timedelta(seconds=1030)
    assert story.machine.next_deadline() is None
    assert story.see(FINE, after=100) == ["-unmonitored unpolled"]


def test_a_process_that_stood_still_says_nothing_of_gpus_that_it_could_not_hear_of() -> None:
    story = Story()
    story.see(FINE)
    assert story.take(story.machine.tick(story.now + 200)) == []
    story.now += 200
    due = story.machine.next_deadline()
    assert due == story.now + 30
    assert story.tick() == ["+unmonitored unpolled"]


# Faults that end: the table of gpu_recovery, row by row

ENDS: list[tuple[str, gpu.Poll | int, gpu.Poll, str]] = [
    ("a state", poll(nvlinks_down=(1,)), FINE, "3: -degraded nvlink-down"),
    ("a state", poll(remap_pending=True), poll(remap_pending=False), "3: -degraded remap-pending"),
    ("a state", poll(recovery_action=3), FINE, "3: -degraded recovery-drain-p2p"),
    ("a state", poll(fabric="failed"), poll(fabric="completed"), "3: -unhealthy fabric-not-ready"),
    ("a state nothing rules out", poll(fabric="failed"), MUTE, ""),
    ("a state nothing rules out", poll(remap_pending=True), MUTE, ""),
    ("a state nothing rules out", poll(nvlinks_down=(1,)), MUTE, ""),
    ("lost", LOST, FINE, "6: -unhealthy gpu-lost"),
    ("lost, driver cannot say", LOST, MUTE, "18: -unhealthy gpu-lost"),
    ("asked", poll(recovery_action=1), FINE, "6: -unhealthy recovery-reset"),
    ("asked, driver cannot say now", poll(recovery_action=1), MUTE, ""),
    ("asked, then drain", poll(recovery_action=1), poll(recovery_action=3), ""),
    ("unhealthy", 94, FINE, "6: -unhealthy xid-94"),
    ("unhealthy, driver cannot say", 94, MUTE, "18: -unhealthy xid-94"),
    ("reset", 95, FINE, "6: -unhealthy xid-95"),
    ("reset, driver cannot say", 95, MUTE, ""),
    ("reboot", 79, FINE, "6: -unhealthy xid-79"),
    ("reboot, driver cannot say", 79, MUTE, ""),
    ("not good", 94, poll(recovery_action=5), ""),
    ("never", poll(remap_failed=True), poll(remap_failed=False), ""),
]


@pytest.mark.parametrize(("row", "fault", "then", "expected"), ENDS)
def test_it_ends_when_the_table_says(
    row: str, fault: gpu.Poll | int, then: gpu.Poll, expected: str
) -> None:
    story = Story()
    _ = story.xid(fault) if isinstance(fault, int) else story.see(fault)
    ends = [change for change in story.polls(then, 100) if "-" in change.split()[1][:1]]
    assert ends == ([expected] if expected else []), row


def test_every_end_says_why_it_is_believed() -> None:
    story = Story()
    story.xid(94)
    story.polls(FINE, 6)
    assert story.changes[-1].reason == (
        "xid-94 is over: 6 good polls in a row, no fault for 60 s, the driver requests no action"
    )
    assert story.changes[-1].policy == story.changes[0].policy
    story.xid(94, MIG3)
    story.polls(MUTE, 18)
    assert story.changes[-1].reason == (
        "xid-94 is over: 18 good polls in a row, no fault for 180 s, "
        "the driver cannot report a recovery action"
    )


def test_where_the_driver_cannot_say_a_reset_is_believed_from_what_it_does() -> None:
    away, restarted = Story(), Story()
    away.xid(95)
    away.polls(LOST, 1)
    assert away.polls(MUTE, 6) == ["6: -unhealthy xid-95"]
    assert away.changes[-1].reason.endswith(
        "the driver cannot report a recovery action, it disappeared and came back"
    )
    restarted.see(poll(recovery_action=None, ecc_uncorrected=2))
    restarted.xid(95)
    assert restarted.polls(poll(recovery_action=None), 6) == ["6: -unhealthy xid-95"]
    assert restarted.changes[-1].reason.endswith("its error counter was reset")


def test_a_gpu_that_was_lost_before_its_xid_was_reported_came_back_all_the_same() -> None:
    story = Story()
    story.polls(LOST, 1)
    story.xid(95)
    assert "6: -unhealthy xid-95" in story.polls(MUTE, 20)
    story.xid(119)
    assert story.polls(MUTE, 200) == [], "since then it was not away"


def test_a_reboot_is_not_believed_from_a_gpu_that_came_back() -> None:
    story = Story()
    story.xid(79)
    story.polls(LOST, 2)
    assert story.polls(MUTE, 200) == ["18: -unhealthy gpu-lost"]
    assert story.effects() == {BAD}


def test_a_second_fault_begins_quiet_again() -> None:
    story = Story()
    story.xid(94)
    assert story.polls(FINE, 5) == []
    assert story.xid(94) == []
    assert story.polls(FINE, 6) == ["6: -unhealthy xid-94"]


def test_another_fault_of_the_same_part_begins_quiet_again() -> None:
    story = Story()
    story.xid(94, MIG3)
    story.polls(FINE, 5)
    assert story.xid(95) == ["+unhealthy xid-95"]
    assert story.polls(FINE, 6) == ["6: -unhealthy xid-94 on gi 3", "6: -unhealthy xid-95"]


def test_a_fault_of_an_application_does_not_begin_quiet_again() -> None:
    story = Story()
    story.xid(94)
    story.polls(FINE, 5)
    story.xid(13)
    assert story.polls(FINE, 1) == ["1: -unhealthy xid-94"]


def test_a_fault_of_one_mig_instance_leaves_the_other_and_its_quiet_alone() -> None:
    story = Story()
    story.xid(94, MIG3)
    assert (story.effects(MIG3), story.effects(MIG5), story.effects()) == ({BAD}, set(), {BAD})
    story.polls(FINE, 5)
    story.xid(94, MIG5)
    assert story.polls(FINE, 1) == ["1: -unhealthy xid-94 on gi 3"]
    assert story.polls(FINE, 5) == ["5: -unhealthy xid-94 on gi 5"]


def test_an_unanswered_poll_begins_the_good_ones_again_but_is_no_fault() -> None:
    story = Story()
    story.xid(94)
    story.polls(FINE, 5)
    story.polls(UNKNOWN, 1)
    assert story.polls(FINE, 3) == ["3: -unhealthy xid-94"]


def test_nothing_ends_without_a_poll() -> None:
    story = Story()
    story.see(FINE)
    story.xid(94)
    story.polls(FINE, 5)
    story.tick()
    story.now += 10_000
    assert story.take(story.machine.tick(story.now)) == []
    assert story.effects() == {BAD, BLIND}


def test_whose_policy_degrades_sees_the_same_road_back() -> None:
    story = Story(DEGRADES_94)
    assert story.xid(94) == ["+degraded xid-94"]
    assert story.polls(FINE, 6) == ["6: -degraded xid-94"]


# Reported repairs


def test_what_a_person_calls_repaired_ends_with_one_good_poll() -> None:
    story = Story()
    story.xid(79)
    story.polls(LOST, 1)
    assert story.see(gpu.RepairReported(gpu="GPU-a", at=START, by="a person")) == []
    assert story.polls(FINE, 1) == ["1: -unhealthy xid-79", "1: -unhealthy gpu-lost"]
    assert (
        story.changes[-1].reason
        == "gpu-lost is over: reported as repaired by a person, and the GPU answers"
    )


def test_what_is_good_already_ends_at_once_by_a_person_s_word() -> None:
    story = Story()
    story.xid(79)
    story.polls(MUTE, 1)
    assert story.see(gpu.RepairReported(gpu="GPU-a", at=START, by="a person")) == [
        "-unhealthy xid-79"
    ]


def test_a_person_s_word_is_void_while_nvml_says_otherwise() -> None:
    story = Story()
    story.polls(LOST, 1)
    story.see(gpu.RepairReported(gpu="GPU-a", at=START, by="a person"))
    story.polls(LOST, 1)
    assert story.polls(FINE, 6) == ["6: -unhealthy gpu-lost"]


def test_a_person_s_word_about_one_xid_leaves_the_others() -> None:
    story = Story()
    story.xid(94)
    story.xid(95)
    story.polls(FINE, 1)
    assert story.see(gpu.RepairReported(gpu="GPU-a", at=START, by="script", xid=95)) == [
        "-unhealthy xid-95"
    ]


def test_a_failed_remap_is_repaired_by_no_word() -> None:
    story = Story()
    story.see(poll(remap_failed=True))
    story.see(gpu.RepairReported(gpu="GPU-a", at=START, by="a person"))
    assert story.polls(FINE, 100) == []


# Flapping


def test_what_goes_bad_again_soon_needs_twice_the_quiet_each_time() -> None:
    story = Story()
    ends = []
    for _ in range(8):
        story.xid(94, after=5)
        fell = story.now
        while story.holding:
            story.polls(FINE, 1)
        ends.append(story.now - fell)
    assert ends == [60, 120, 240, 480, 960, 1920, 1920, 1920]


def test_a_flap_is_named_in_the_evidence() -> None:
    story = Story()
    story.xid(94)
    story.polls(FINE, 6)
    story.xid(95, after=25)
    assert story.changes[-1].evidence[-1] == vocabulary.Evidence(
        source="muster", observed="unhealthy again 25 s after it recovered"
    )


def test_what_was_well_for_long_has_no_history() -> None:
    story = Story()
    for _ in range(3):
        story.xid(94)
        assert story.polls(FINE, 6) == ["6: -unhealthy xid-94"]
        story.polls(FINE, int(faults.FLAP_WINDOW_S) // 10)


@pytest.mark.parametrize(
    ("cooldown_s", "doublings", "is_proven", "needed"),
    [
        (60, 0, True, 60),
        (60, 0, False, 180),
        (60, 5, True, 1920),
        (60, 5, False, 3600),
        (0, 5, False, 0),
        (7200, 0, True, 7200),
        (7200, 0, False, 21_600),
        (7200, 5, True, 21_600),
    ],
)
def test_quiet_is_bounded(
    cooldown_s: float,
    doublings: int,
    is_proven: bool,  # noqa: FBT001  # a column
    needed: float,
) -> None:
    changes = faults.required_quiet_s(cooldown_s, doublings=doublings, has_evidence=is_proven)
    assert changes == needed


# Scans


def scan(*polls: gpu.Poll, **error_text: object) -> gpu.Scan:
    changes = gpu.Scan(
        gpus=tuple(vocabulary.Gpu(uuid=change.gpu, product="X") for change in polls), polls=polls
    )
    return msgspec.structs.replace(changes, **error_text)


def test_what_nvml_calls_bad_is_bad_at_the_first_look() -> None:
    story = Story()
    other = msgspec.structs.replace(LOST, gpu="GPU-b")
    assert story.see(scan(FINE, other)) == ["+unhealthy gpu-lost"]
    assert (story.effects(A), story.effects(B)) == (set(), {BAD})


def test_a_restart_forgets_what_nvml_does_not_say() -> None:
    story = Story()
    story.xid(94)
    assert Story().see(scan(FINE)) == []


def test_a_known_gpu_that_cannot_be_read_is_evaluated_by_the_error() -> None:
    story = Story()
    story.see(scan(FINE))
    lost = gpu.UnreadableGpu(index=0, error="GPU_IS_LOST", uuid="GPU-a")
    assert story.see(gpu.Scan(unreadable=(lost,)), after=10) == ["+unhealthy gpu-lost"]
    strange = gpu.UnreadableGpu(index=0, error="UNKNOWN", uuid="GPU-a")
    for _ in range(2):
        assert story.see(gpu.Scan(unreadable=(strange,)), after=10) == []
    changes = story.see(gpu.Scan(unreadable=(strange,)), after=10)
    assert changes == ["+unmonitored unanswered"]


@pytest.mark.parametrize(
    ("without", "is_gone"),
    [
        (gpu.Scan(), True),
        (gpu.Scan(driver=gpu.Driver.NOT_LOADED, problem="unloaded"), True),
        (gpu.Scan(driver=gpu.Driver.SILENT, problem="no answer"), False),
        (gpu.Scan(driver=gpu.Driver.FAILED, problem="999"), False),
        (gpu.Scan(driver=gpu.Driver.NO_LIBRARY, problem="no library"), False),
        (gpu.Scan(unreadable=(gpu.UnreadableGpu(index=0, error="UNKNOWN"),)), False),
    ],
)
def test_a_gpu_that_was_gone_and_is_back_was_reset(without: gpu.Scan, is_gone: bool) -> None:  # noqa: FBT001  # a column
    story = Story()
    story.see(scan(MUTE))
    story.xid(95)
    story.see(without)
    assert (story.machine.next_deadline() is None) is is_gone
    story.see(scan(MUTE), after=10)
    assert story.polls(MUTE, 20) == (["5: -unhealthy xid-95"] if is_gone else [])


def test_of_a_gpu_that_is_gone_nobody_says_that_it_is_not_polled() -> None:
    story = Story()
    story.see(scan(FINE))
    story.tick()
    assert story.see(gpu.Scan(), after=1) == ["-unmonitored unpolled"]
    assert story.machine.next_deadline() is None


# Disabled checks


def test_with_all_checks_disabled_nothing_is_taken_and_everything_still_reported() -> None:
    story = Story(xid_policy.Policy(KNOWN, COMPATIBLE, disable="all"))
    assert story.xid(95) == []
    assert story.see(LOST) == ["+degraded gpu-lost"]
    assert story.changes[-1].policy == (
        "DP_DISABLE_HEALTHCHECKS=all overrides polled/gpu-lost: unhealthy (NVML error GPU_IS_LOST)"
    )
    assert story.polls(FINE, 6) == ["6: -degraded gpu-lost"]


# Which devices an XID affects. Origin: k8s-device-plugin internal/rm/health_test.go,
# TestMatchesMigEvent: device (gi, ci), event (gi, ci), expected

MATCHES = [
    ((3, 0), (3, 0), True),
    ((3, 0), (3, None), True),
    ((5, 0), (3, None), False),
    ((3, 0), (None, 0), True),
    ((3, 1), (None, 0), True),  # NVIDIA: False; without a GPU instance, it is about the GPU
    ((3, 0), (None, None), True),
    # further cases
    ((3, 1), (3, 0), False),
    ((None, None), (3, 0), True),
]


@pytest.mark.parametrize(("device", "event", "expected"), MATCHES)
def test_an_xid_affects_the_devices_that_nvidia_s_plugin_marks(
    device: tuple[int | None, int | None],
    event: tuple[int | None, int | None],
    expected: bool,  # noqa: FBT001  # a column
) -> None:
    story = Story()
    story.xid(95, gpu.Part(gpu="GPU-a", gi=event[0], ci=event[1]))
    assert bool(story.effects(gpu.Part(gpu="GPU-a", gi=device[0], ci=device[1]))) is expected


# What holds after any sequence of observations

PARTS = st.sampled_from([A, MIG3, MIG5, gpu.Part(gpu="GPU-a", gi=3)])
MAYBE = st.sampled_from([None, True, False])
POLLS = st.builds(
    gpu.Poll,
    gpu=st.just("GPU-a"),
    at=st.just(START),
    error=st.sampled_from(["", "", "", "", "GPU_IS_LOST", "RESET_REQUIRED", "UNKNOWN"]),
    recovery_action=st.sampled_from([None, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]),
    ecc_uncorrected=st.sampled_from([None, 0, 1, 5]),
    remap_pending=MAYBE,
    remap_failed=st.sampled_from([None, False, False, False, True]),
    retired_pending=MAYBE,
    slowdowns=st.sampled_from([None, (), ("HW_THERMAL",)]),
    nvlinks_down=st.sampled_from([None, (), (1,)]),
    fabric=st.sampled_from([None, "not_supported", "completed", "failed", "in_progress"]),
)
GOOD_POLLS = st.sampled_from([FINE, FINE, FINE, MUTE])
XIDS = st.builds(gpu.Xid, part=PARTS, xid=st.sampled_from([13, 79, 94, 95]), at=st.just(START))
WATCHES = st.builds(
    gpu.MonitoringChanged,
    gpu=st.just("GPU-a"),
    at=st.just(START),
    problem=st.sampled_from(["", "deaf"]),
)
RESETS = st.builds(
    gpu.RepairReported, gpu=st.just("GPU-a"), at=st.just(START), by=st.just("a person")
)
LOOKS = st.sampled_from(
    [
        gpu.Scan(),
        gpu.Scan(driver=gpu.Driver.NOT_LOADED),
        gpu.Scan(driver=gpu.Driver.SILENT),
        scan(FINE),
        gpu.Scan(unreadable=(gpu.UnreadableGpu(index=0, error="UNKNOWN", uuid="GPU-a"),)),
    ]
)
WAITS = st.sampled_from([0.0, 1.0, 10.0, 10.0, 30.0, 61.0, 700.0])
ANYTHING = st.lists(
    st.tuples(WAITS, st.one_of(GOOD_POLLS, GOOD_POLLS, POLLS, XIDS, WATCHES, RESETS, LOOKS)),
    max_size=60,
)
Steps = list[tuple[float, gpu.Scan | gpu.Observation]]


def stamped(event: gpu.Scan | gpu.Observation, now: float) -> gpu.Scan | gpu.Observation:
    at = START + timedelta(seconds=now)
    if isinstance(event, gpu.Scan):
        polls = tuple(msgspec.structs.replace(change, at=at) for change in event.polls)
        return msgspec.structs.replace(event, polls=polls)
    return msgspec.structs.replace(event, at=at)


@given(ANYTHING)
@settings(max_examples=100, deadline=None)
def test_every_finding_begins_once_ends_once_and_says_why(steps: Steps) -> None:
    story = Story()
    for wait, event in steps:
        story.see(event, after=wait)
        due = story.machine.next_deadline()
        assert due is None or due > story.now
    assert all(change.reason and change.policy for change in story.changes)


@given(ANYTHING)
@settings(max_examples=100, deadline=None)
def test_never_healthy_while_a_fault_holds_or_is_fresh(steps: Steps) -> None:
    """Check the rules of recovery against the whole history of observations."""
    story = Story()
    past: Steps = []
    for wait, event in steps:
        before = len(story.changes)
        story.see(event, after=wait)
        past.append((story.now, event))
        if isinstance(event, gpu.Poll) and is_bad(event):
            assert BAD in story.effects(), "NVML calls it bad"
        if isinstance(event, gpu.Xid) and event.xid != 13:
            assert BAD in story.effects(event.part), "an XID took it"
        for change in story.changes[before:]:
            if isinstance(change, gpu.FaultEnded) and change.effect is BAD:
                assert_believable(change, past)


def is_bad(change: gpu.Poll) -> bool:
    return bool(
        change.error in {"GPU_IS_LOST", "RESET_REQUIRED"}
        or (not change.error and change.recovery_action in {1, 2, 4, 6, 7})
        or (
            not change.error and (change.remap_failed or change.fabric in {"failed", "in_progress"})
        )
    )


def is_good(change: gpu.Poll) -> bool:
    return not change.error and change.recovery_action in {0, None} and not change.remap_failed


def assert_believable(ended: gpu.FaultEnded, past: Steps) -> None:
    polls = [p for _, e in past for p in (e.polls if isinstance(e, gpu.Scan) else (e,))]
    answered = [change for change in polls if isinstance(change, gpu.Poll)]
    assert is_good(answered[-1]), "the last that was seen is good"
    assert ended.code != gpu_faults.REMAP_FAILED
    if any(isinstance(event, gpu.RepairReported) for _, event in past):
        return
    assert all(map(is_good, answered[-TOLD.good :])), "good polls in a row"
    if ended.code == gpu_faults.FABRIC:
        return
    now = past[-1][0]
    faults = [at for at, event in past if is_fault(event, ended.part)]
    assert now - max(faults, default=0.0) >= TOLD.cooldown_s, "no fault for the cool-down"
    if ended.code == "xid-79":
        assert all(change.recovery_action == 0 for change in answered[-TOLD.good :])


def is_fault(event: gpu.Scan | gpu.Observation, part: gpu.Part) -> bool:
    if isinstance(event, gpu.Poll):
        health_rules = {"GPU_IS_LOST", "RESET_REQUIRED"}
        return event.error in health_rules or (not event.error and not is_good(event))
    return isinstance(event, gpu.Xid) and event.xid != 13 and event.part.covers(part)


@given(ANYTHING, ANYTHING)
@settings(max_examples=100, deadline=None)
def test_a_fault_of_one_gpu_is_nothing_to_another(change: Steps, other: Steps) -> None:
    steps = [(wait, event) for wait, event in change if not isinstance(event, gpu.Scan)]
    apart = Story()
    together = Story()
    for at, (wait, event) in enumerate(steps):
        for machine in (apart, together):
            machine.wait(wait)
        if at < len(other) and not isinstance(other[at][1], gpu.Scan):
            observation = stamped(of_b(other[at][1]), together.now)
            together.take(together.machine.receive(observation, together.now))
        for machine in (apart, together):
            machine.take(machine.machine.receive(stamped(event, machine.now), machine.now))
    assert [changes for changes in together.changes if changes.part.gpu == "GPU-a"] == apart.changes


def of_b(event: gpu.Scan | gpu.Observation) -> gpu.Scan | gpu.Observation:
    if isinstance(event, gpu.Scan):
        return event
    if isinstance(event, gpu.Xid):
        part = msgspec.structs.replace(event.part, gpu="GPU-b")
        return msgspec.structs.replace(event, part=part)
    return msgspec.structs.replace(event, gpu="GPU-b")


@given(
    st.lists(
        st.one_of(
            st.sampled_from([MUTE, UNKNOWN, FINE, poll(error="NOT_SUPPORTED")]),
            WATCHES,
            st.sampled_from([gpu.Scan(), gpu.Scan(driver=gpu.Driver.SILENT), scan(MUTE)]),
        ),
        max_size=40,
    )
)
@settings(deadline=None)
def test_what_is_not_known_never_makes_unhealthy(
    events: list[gpu.Scan | gpu.Observation],
) -> None:
    story = Story()
    for event in events:
        story.see(event, after=25)
        assert story.effects() <= {BLIND}


@given(ANYTHING)
@settings(max_examples=100, deadline=None)
def test_a_gpu_that_is_well_again_is_found_to_be_so(steps: Steps) -> None:
    story = Story()
    for wait, event in steps:
        story.see(event, after=wait)
    story.see(gpu.MonitoringChanged(gpu="GPU-a", at=START))
    well = poll(remap_pending=False, remap_failed=False, retired_pending=False, fabric="completed")
    story.polls(well, 10, every=1000)
    left = {code for _, code in story.holding}
    assert left <= {gpu_faults.REMAP_FAILED}
