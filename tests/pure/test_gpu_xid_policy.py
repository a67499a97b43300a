"""What an XID does: the data, the presets, the user's file, and NVIDIA's two lists."""

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import muster_plugin
from muster.service import settings
from muster_plugin.config import gpus
from muster_plugin.gpu import simulated, xid_policy
from muster_plugin.model import gpu

HERE = Path(muster_plugin.__file__).parent
KNOWN = xid_policy.catalogue((HERE / xid_policy.CATALOGUE).read_bytes())
PRESETS = {
    preset: xid_policy.preset((HERE / xid_policy.preset_file(preset)).read_bytes())
    for preset in gpus.Preset
}
COMPATIBLE, CATALOGUE = gpus.Preset.NVIDIA_COMPATIBLE, gpus.Preset.CATALOGUE
PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu-health.md"
SIX = {13, 31, 43, 45, 68, 109}
"""The XIDs that NVIDIA's plugin ignores (internal/rm/health.go)."""


def policy_of(
    preset: gpus.Preset = COMPATIBLE,
    *,
    file: object = None,
    disable: str = "",
    enable: str = "",
) -> xid_policy.Policy:
    overrides = None if file is None else settings.validate(xid_policy.Overrides, file)
    return xid_policy.Policy(
        KNOWN, PRESETS[preset], overrides=overrides, disable=disable, enable=enable
    )


def left_in_use(policy: xid_policy.Policy, xids: range | set[int] = range(1, 1000)) -> set[int]:
    return {xid for xid in xids if not policy.rule(xid).action.is_unhealthy}


# The data


def test_the_data_names_every_column_and_every_source() -> None:
    assert KNOWN.columns == xid_policy.CatalogueEntry.__struct_fields__
    assert set(KNOWN.sources) == set(KNOWN.where) == set(KNOWN.columns) - {"title", "then"}
    assert list(KNOWN.xids) == list(range(1, 174))


@pytest.mark.parametrize("preset", gpus.Preset)
def test_a_preset_is_named_as_it_is_chosen_and_its_sources_are_known(
    preset: gpus.Preset,
) -> None:
    read = PRESETS[preset]
    sources = {rule.source for rule in (*read.rules, read.otherwise)}
    assert (read.preset, read.version) == (preset, 1)
    assert sources <= set(KNOWN.sources)
    assert all(rule.xids for rule in read.rules)


def test_what_the_data_calls_ignored_by_nvidia_s_plugins_are_the_six() -> None:
    assert {xid for xid, entry in KNOWN.xids.items() if entry.plugin == "ignored"} == SIX
    assert {xid for xid, entry in KNOWN.xids.items() if entry.dra == "no taint"} == SIX


def test_the_compatible_preset_takes_what_nvidia_s_plugin_takes() -> None:
    assert left_in_use(policy_of()) == SIX


def test_the_catalogue_preset_does_what_each_bucket_says() -> None:
    expected = {
        "RESTART_APP": "ignore",
        "IGNORE": "ignore",
        "WORKFLOW_XID_45": "ignore",
        "XID_154": "ignore",
        "RESET_GPU": "reset",
        "WORKFLOW_XID_48": "reset",
        "RESTART_BM": "reboot",
        "RESTART_VM": "reboot",
        "WORKFLOW_NVLINK_ERR": "unhealthy",
        "CHECK_MECHANICALS": "unhealthy",
        "WORKFLOW_NVLINK5_ERR": "degrade",
        "CONTACT_SUPPORT": "degrade",
        "UPDATE_SWFW": "degrade",
        "CHECK_UVM": "degrade",
        "": "degrade",
    }
    policy = policy_of(CATALOGUE)
    by_bucket = {entry.nvidia: set[str]() for entry in KNOWN.xids.values()}
    for xid, entry in KNOWN.xids.items():
        if xid != 173:  # NVIDIA does not list it at all
            by_bucket[entry.nvidia].add(policy.rule(xid).action)
    assert by_bucket == {bucket: {action} for bucket, action in expected.items()}


DEFENSIBLE = {46, 48, 54, 62, 64, 74, 79, 95, 110, 119, 120, 136, 140, 143, 155, 156, 158}
"""XIDs that every source could justify as fatal, though not all of them do."""


@pytest.mark.parametrize("preset", gpus.Preset)
def test_every_preset_takes_what_every_source_can_defend_as_fatal(preset: gpus.Preset) -> None:
    assert left_in_use(policy_of(preset), DEFENSIBLE) == set()


@pytest.mark.parametrize("preset", gpus.Preset)
@pytest.mark.parametrize("xid", [173, 174, 555, 999])
def test_what_nobody_knows_is_taken_seriously(preset: gpus.Preset, xid: int) -> None:
    assert policy_of(preset).rule(xid).action is xid_policy.Action.UNHEALTHY


def test_an_event_names_the_rule_the_action_and_the_source() -> None:
    assert str(policy_of().rule(79)) == (
        "nvidia-compatible/reboot v1: reboot (NVIDIA XID catalogue 2025-10-29: RESTART_BM)"
    )
    assert str(policy_of(CATALOGUE).rule(48)) == (
        "catalogue/double-bit-ecc v1: reset (NVIDIA/NVSentinel 6f8b0fc: WORKFLOW_XID_48, fatal)"
    )
    assert str(policy_of().rule(999)) == (
        "nvidia-compatible/any-other v1: unhealthy (NVIDIA/k8s-device-plugin 1b826ac: unhealthy)"
    )
    assert policy_of().rule(999).title == "unknown XID"


@pytest.mark.parametrize(
    ("xid", "action", "effect"),
    [
        (13, "ignore", None),
        (94, "unhealthy", gpu.Effect.UNHEALTHY),
        (95, "reset", gpu.Effect.UNHEALTHY),
        (79, "reboot", gpu.Effect.UNHEALTHY),
    ],
)
def test_an_action_has_an_effect(xid: int, action: str, effect: gpu.Effect | None) -> None:
    rule = policy_of().rule(xid)
    assert (rule.action, rule.action.effect) == (action, effect)
    assert rule.title == KNOWN.xids[xid].title


def test_degrade_does_not_take_the_gpu_out_of_use() -> None:
    assert policy_of(file=DEGRADE_94).rule(94).action.effect is gpu.Effect.DEGRADED


# The user's file

DEGRADE_94 = {"rules": [{"xids": [94], "action": "degrade", "why": "we drain by hand"}]}


def test_the_user_s_file_goes_before_the_preset_xid_by_xid() -> None:
    policy = policy_of(file=DEGRADE_94)
    assert str(policy.rule(94)) == "policy file rules[0]: degrade (we drain by hand)"
    assert policy.rule(95) == policy_of().rule(95)


def test_everything_wrong_with_the_user_s_file_is_reported_at_once() -> None:
    file = {
        "version": 2,
        "rule": [],
        "rules": [
            {"xids": [], "action": "ignore"},
            {"xids": [0], "action": "ignore"},
            {"xids": [94], "action": "explode"},
            {"xids": "all", "action": "ignore", "reason": "typo"},
            {"action": "ignore"},
            "94",
        ],
    }
    with pytest.raises(settings.BadSettings) as caught:
        policy_of(file=file)
    keys = [problem.split(":")[0] for problem in caught.value.problems]
    assert keys == [
        "version",
        "rule",
        "rules[0].xids",
        "rules[1].xids[0]",
        "rules[2].action",
        "rules[3].xids",
        "rules[3].reason",
        "rules[4].xids",
        "rules[5]",
    ]


def test_two_rules_for_one_xid_are_refused() -> None:
    file = {
        "rules": [
            {"xids": [94, 63, 94], "action": "ignore"},
            {"xids": [63], "action": "reset"},
        ]
    }
    with pytest.raises(settings.BadSettings) as caught:
        policy_of(file=file)
    assert caught.value.problems == [
        "rules[0].xids: 94 is listed twice",
        "rules[1].xids: 63 is also in rules[0]",
    ]


# NVIDIA's two lists. Origin: k8s-device-plugin internal/rm/health_test.go

PARSED = [
    # TestNewHealthCheckXIDs, its ten cases
    ("", set[int]()),
    (",", set[int]()),
    ("not-an-int", set[int]()),
    ("68", {68}),
    ("-68", set[int]()),
    ("68  ", {68}),
    ("68,", {68}),
    (",68", {68}),
    ("68,67", {67, 68}),
    ("68,not-an-int,67", {67, 68}),
    # further texts, as Go's ParseUint and the code around it read them
    ("+68", set[int]()),
    ("6_8", set[int]()),
    ("٦٨", set[int]()),
    ("99999999999999999999999", set[int]()),
    ("068", {68}),
    ("\t68\n, 67", {67, 68}),
]


@pytest.mark.parametrize(("text", "numbers"), PARSED)
def test_a_list_is_read_as_nvidia_reads_it(text: str, numbers: set[int]) -> None:
    assert xid_policy.parse_lists(text, "").disabled == numbers
    assert xid_policy.parse_lists("", text).enabled == numbers


def test_what_is_left_out_of_a_list_is_named() -> None:
    assert xid_policy.parse_lists("68,not-an-int, -5", "0").problems == (
        "DP_DISABLE_HEALTHCHECKS: 'not-an-int' is not an XID; ignored",
        "DP_DISABLE_HEALTHCHECKS: '-5' is not an XID; ignored",
        "DP_ENABLE_HEALTHCHECKS: '0' is not an XID; ignored",
    )
    assert policy_of(disable="x").problems == (
        "DP_DISABLE_HEALTHCHECKS: 'x' is not an XID; ignored",
    )


LISTED = [
    # TestGetDisabledHealthCheckXids: disable, enable, which of {11, the six, 555} stay in use
    ("", "", SIX),
    ("all", "", {11, *SIX, 555}),
    ("xids", "", {11, *SIX, 555}),
    ("", "all", set[int]()),
    ("11", "11", SIX),
    ("", "31", SIX - {31}),
    # further cases
    ("11", "", {11, *SIX}),
    ("ALL", "", {11, *SIX, 555}),
    ("11, Xids ,12", "", {11, *SIX, 555}),
    ("all", "all", set[int]()),
    ("all", "xids", set[int]()),
    ("11", "all", set[int]()),
    # as documented; NVIDIA's code watches nothing at all in these two cases
    ("all", "555", {11, *SIX}),
    ("xids", "31", {11, 555, *SIX} - {31}),
]


@pytest.mark.parametrize(("disable", "enable", "expected"), LISTED)
def test_the_lists_do_what_nvidia_documents(disable: str, enable: str, expected: set[int]) -> None:
    policy = policy_of(disable=disable, enable=enable)
    assert left_in_use(policy, {11, *SIX, 555}) == expected


@pytest.mark.parametrize(
    ("disable", "enable", "is_off"),
    [
        ("", "", False),
        ("all", "", True),
        ("all,79", "", True),
        ("all", "79", True),
        ("all", "all", False),
        ("xids", "", False),
        ("79", "", False),
    ],
)
def test_only_all_switches_off_what_is_polled(disable: str, enable: str, is_off: bool) -> None:  # noqa: FBT001  # a column
    assert policy_of(disable=disable, enable=enable).is_off is is_off


def test_disable_all_with_enable_79_leaves_exactly_79() -> None:
    policy = policy_of(disable="all", enable="79")
    assert set(range(1, 1000)) - left_in_use(policy) == {79}
    assert policy.rule(79).action is xid_policy.Action.REBOOT


def test_the_lists_go_before_the_user_s_file() -> None:
    file = {"rules": [{"xids": [48], "action": "reset"}, {"xids": [79], "action": "ignore"}]}
    policy = policy_of(file=file, disable="48", enable="79,109")
    assert [(policy.rule(xid).action, policy.rule(xid).rule) for xid in (48, 79, 109)] == [
        ("ignore", "DP_DISABLE_HEALTHCHECKS"),
        ("reboot", "DP_ENABLE_HEALTHCHECKS"),
        ("reset", "DP_ENABLE_HEALTHCHECKS"),
    ]


def test_enabling_what_counts_already_changes_nothing() -> None:
    assert policy_of(enable="79").rule(79) == policy_of().rule(79)


@given(st.text(), st.text(), st.integers(1, 999))
def test_no_text_in_the_lists_is_an_error(disable: str, enable: str, xid: int) -> None:
    rule = policy_of(disable=disable, enable=enable).rule(xid)
    assert rule.rule
    assert rule.source


# Simulated GPUs


@pytest.mark.parametrize(
    ("xids", "error", "action"),
    [
        (set[int](), "", 0),
        ({13, 109}, "", 0),
        ({13, 95}, "", 1),
        ({13, 48}, "", 0),
        ({79}, "GPU_IS_LOST", None),
    ],
)
def test_a_simulated_gpu_answers_what_its_faults_would_make_a_real_one_answer(
    xids: set[int], error: str, action: int | None
) -> None:
    by_bucket = simulated.answer("GPU-a", xids, AT)
    assert (by_bucket.gpu, by_bucket.error, by_bucket.recovery_action) == ("GPU-a", error, action)


AT = datetime(2026, 1, 1, tzinfo=UTC)


# The page


def conflicts() -> dict[str, set[int]]:
    """Return which XIDs the sources disagree about, by the name of the conflict on the page."""
    by_bucket: dict[str, set[int]] = {
        "the catalogue leaves the GPU in use, GPUd calls it Fatal": set(),
        "the catalogue resets or reboots, GPUd does not call it Fatal": set(),
        "NVSentinel calls it fatal, NVIDIA's catalogue ignores it": set(),
        "NVIDIA's device plugin ignores it, NVSentinel or GPUd call it fatal": set(),
        "NVIDIA's device plugin takes the GPU out of use for ever, NVSentinel ignores it": set(),
    }
    lenient = {"IGNORE", "RESTART_APP"}
    for xid, entry in KNOWN.xids.items():
        gpud, sentinel = entry.gpud.startswith("Fatal"), entry.nvsentinel.endswith(", fatal")
        matched = (
            entry.nvidia in lenient and gpud,
            entry.nvidia in {"RESET_GPU", "RESTART_BM", "RESTART_VM"} and not gpud,
            sentinel and entry.nvidia == "IGNORE",
            entry.plugin == "ignored" and (sentinel or gpud),
            entry.plugin != "ignored" and entry.nvsentinel.startswith("IGNORE"),
        )
        for name, holds in zip(by_bucket, matched, strict=True):
            if holds:
                by_bucket[name].add(xid)
    return by_bucket


def test_the_page_reports_which_sources_disagree() -> None:
    rows = re.findall(r"^\| ([^|]+) \| ([0-9 ]+) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert {name: {int(x) for x in xids.split()} for name, xids in rows} == conflicts()
