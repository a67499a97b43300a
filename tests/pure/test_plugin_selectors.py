"""References to GPUs: NVIDIA's forms and patterns, restated as data, and invariants.

Origin: NVIDIA/k8s-device-plugin api/config/v1/replicas_test.go (TestReplicaDeviceRef, the lists of
TestUnmarshalReplicaDevices) and resources_test.go (TestResourcePatternMatches), v0.20.
"""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster_plugin.model import gpu

GPU = "GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c"
MIG = "MIG-3eb87630-93d5-b2b6-b8ff-9b359caf4ee2"

FORMS: list[tuple[int | str, gpu.Selector | None]] = [
    ("0", gpu.Index(0)),
    (0, gpu.Index(0)),
    ("0:0", gpu.Index(0, 0)),
    (GPU, gpu.Uuid(GPU.lower())),
    (GPU.upper(), gpu.Uuid(GPU.lower())),
    (MIG, gpu.Uuid(MIG.lower())),
    (f"MIG-{GPU}/10/0", gpu.Instance(GPU.lower(), 10, 0)),
    (f"MIG-{GPU}/0/0", gpu.Instance(GPU.lower(), 0, 0)),
    (-1, None),
    ("-1", None),
    ("not-all", None),
    ("invalid-UUID", None),
    ("GPU-UUID", None),
    ("MIG-UUID", None),
    (f"MIG-{GPU}", None),
    # further cases
    ("", None),
    ("0:", None),
    ("0:1:2", None),
    ("2.0", None),
    ("٣", None),
    ("1024", None),
    (99_999, None),
]


@pytest.mark.parametrize(("expected_text", "meant"), FORMS, ids=lambda value: str(value)[:30])
def test_a_selector_is_read_as_nvidia_reads_it(
    expected_text: int | str, meant: gpu.Selector | None
) -> None:
    if meant is not None:
        assert gpu.parse_selector(expected_text) == meant
        return
    with pytest.raises(ValueError, match=r"does not name a device|an index is at most"):
        gpu.parse_selector(expected_text)


PATTERNS = [
    ("1g.24gb", "1g.24gb", True),
    ("1g.24gb", "2g.48gb", False),
    ("1g.24gb", "1g.24gb-me", False),
    ("1g.24gb", "1g.24gb+me.all", False),
    ("1g.24gb", "x1g.24gb", False),
    ("1g.24gb-me", "1g.24gb-me", True),
    ("1g.24gb+me.all", "1g.24gb+me.all", True),
    ("*", "1g.24gb-me", True),
    ("1g.*", "1g.24gb", True),
    ("1g.*", "2g.48gb", False),
    ("1g.24gb+gfx", "1g.24gb+gfx", True),
    ("1g.24gb", "1g.24gb+gfx", False),
    ("1g.24gb+gfx", "1g.24gb", False),
    ("1g.24gb+gfx", "1g.24gb-me", False),
    ("2g.48gb+gfx", "2g.48gb+gfx", True),
    ("2g.48gb", "2g.48gb+gfx", False),
    ("*gb", "1g.24gb", True),
    ("*gb", "1g.24gb-me", False),
    # further cases
    ("a*a", "a", False),
    ("*A100*40GB", "NVIDIA A100-SXM4-40GB", True),
    ("**", "", True),
]


@pytest.mark.parametrize(("pattern", "text", "expected"), PATTERNS)
def test_a_pattern_matches_the_whole_text(pattern: str, text: str, *, expected: bool) -> None:
    assert gpu.matches_pattern(pattern, text) is expected


SHORT = st.text("ab*.", max_size=8)


@given(pattern=SHORT, text=SHORT)
def test_a_star_stands_for_anything_and_nothing_else_is_special(pattern: str, text: str) -> None:
    slow = ".*".join(re.escape(part) for part in pattern.split("*"))
    assert gpu.matches_pattern(pattern, text) is bool(re.fullmatch(slow, text, re.DOTALL))


@given(wide=SHORT, narrow=SHORT, text=st.text("ab.", max_size=8))
def test_a_pattern_that_matches_a_pattern_matches_all_that_it_does(
    wide: str, narrow: str, text: str
) -> None:
    if gpu.matches_pattern(wide, narrow) and gpu.matches_pattern(narrow, text):
        assert gpu.matches_pattern(wide, text)


def test_a_pattern_of_stars_takes_no_time() -> None:
    assert not gpu.matches_pattern("*a" * 128 + "b", "a" * 10_000)


@given(
    expected_text=st.integers()
    | st.text()
    | st.from_regex(r"(GPU|MIG)-[0-9a-f-]{0,40}(/[0-9]{0,3})*")
)
def test_any_text_or_number_is_a_selector_or_is_refused(expected_text: int | str) -> None:
    for products in (False, True):
        try:
            gpu.parse_selector(expected_text, products=products)
        except ValueError as error:
            assert "\n" not in str(error)  # noqa: PT017  # most are references


DEVICE = gpu.Device(part=gpu.Part(gpu=GPU, gi=3, ci=0), uuid=MIG, index="2:1", minor=5)


@pytest.mark.parametrize(
    ("expected_text", "expected"),
    [
        (2, True),
        ("2", True),
        (5, False),
        ("2:1", True),
        ("2:0", False),
        (GPU, True),
        (MIG, True),
        (f"MIG-{GPU}/3/0", True),
        (f"MIG-{GPU}/0/3", False),
        ("NVIDIA H100*", True),
        ("H100*", False),
    ],
)
def test_what_names_a_gpu_names_its_mig_devices_too(
    expected_text: int | str, *, expected: bool
) -> None:
    meant = gpu.parse_selector(expected_text, products=True)
    assert gpu.selects(meant, DEVICE, "NVIDIA H100 80GB HBM3") is expected


def test_everything_wrong_with_a_list_is_reported() -> None:
    expected_text: list[int | str] = [
        0,
        "0",
        "0:1",
        GPU,
        f"MIG-{GPU}/1/0",
        "*T4*",
        "Tesla T4",
        "GPU-1",
        "3090 Ti",
    ]
    assert [*gpu.selector_problems(expected_text, products=True)] == [
        "[1]: '0' is already named by [0]",
        "[2]: '0:1' is already named by [0]",
        f"[4]: 'MIG-{GPU}/1/0' is already named by [3]",
        "[6]: 'Tesla T4' is already named by [5]",
        (
            "[7]: 'GPU-1' does not name a device; write 0, \"0:1\", GPU-<uuid>, MIG-<uuid> or "
            "MIG-GPU-<uuid>/<gi>/<ci>, or the name of a product with * as a wildcard"
        ),
    ]
