from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster_plugin.gpu.nvml import decode
from muster_plugin.model import gpu

A100_40GB = 42505273344
"""The total memory that NVML reports for an A100-SXM4-40GB (go-nvml mock/gpus/a100.go)."""
A100_80GB = 85899345920
A30 = 25769803776
H100_80GB = 85520809984


@pytest.mark.parametrize(
    ("code", "name"), [(0, "SUCCESS"), (15, "GPU_IS_LOST"), (999, "UNKNOWN"), (77, "77")]
)
def test_a_return_code_has_nvmls_name_or_its_number(code: int, name: str) -> None:
    assert decode.error_name(code) == name


@pytest.mark.parametrize(
    ("gi", "ci", "memory_mib", "total", "name"),
    [
        # MIG user guide, tables of profiles; numbers are NVML_*_INSTANCE_PROFILE_*
        (0, 0, 4864, A100_40GB, "1g.5gb"),
        (7, 0, 4864, A100_40GB, "1g.5gb+me"),
        (9, 0, 9856, A100_40GB, "1g.10gb"),
        (1, 1, 9856, A100_40GB, "2g.10gb"),
        (2, 2, 19968, A100_40GB, "3g.20gb"),
        (2, 0, 19968, A100_40GB, "1c.3g.20gb"),
        (2, 1, 19968, A100_40GB, "2c.3g.20gb"),
        (3, 3, 19968, A100_40GB, "4g.20gb"),
        (4, 4, 40192, A100_40GB, "7g.40gb"),
        (4, 8, 40192, A100_40GB, "7g.40gb"),
        (0, 0, 9728, A100_80GB, "1g.10gb"),
        (4, 4, 81069, A100_80GB, "7g.80gb"),
        (0, 0, 5952, A30, "1g.6gb"),
        (8, 1, 12032, A30, "2g.12gb+me"),
        (3, 3, 24192, A30, "4g.24gb"),
        (0, 0, 9984, H100_80GB, "1g.10gb"),
        (9, 0, 19968, H100_80GB, "1g.20gb"),
        (10, 0, 24192, 102_641_958_912, "1g.24gb+gfx"),
        (13, 0, 24192, 102_641_958_912, "1g.24gb-me"),
        (15, 0, 24192, 102_641_958_912, "1g.24gb+me.all"),
    ],
)
def test_a_mig_profile_is_called_as_nvidias_tools_call_it(
    gi: int, ci: int, memory_mib: int, total: int, name: str
) -> None:
    assert decode.profile(gi, ci, memory_mib=memory_mib, total_bytes=total) == name


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "1g.10gb"),
        ("NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb", "1c.3g.20gb"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me.all", "1g.10gb+me.all"),
        ("NVIDIA B200 MIG 1g.23gb-me", "1g.23gb-me"),
        ("NVIDIA A100-SXM4-40GB", ""),
        ("MIG 1g.10gb; rm -rf", ""),
        ("", ""),
    ],
)
def test_a_mig_devices_name_ends_with_its_profile(name: str, profile: str) -> None:
    assert decode.named_profile(name) == profile


@pytest.mark.parametrize(
    ("bus_id", "name"),
    [
        ("00000000:1A:00.0", "0000:1a:00.0"),
        ("0000:1A:00.0", "0000:1a:00.0"),
        ("00000001:00:00.0", "0001:00:00.0"),
        ("0001:00:00.0", "0001:00:00.0"),
        ("00003E5C:00:00.0", "3e5c:00:00.0"),
        ("3E5C:00:00.0", "3e5c:00:00.0"),
        ("00010000:00:00.0", "00010000:00:00.0"),
    ],
)
def test_a_bus_id_names_a_directory_of_sysfs(bus_id: str, name: str) -> None:
    assert decode.sysfs_name(bus_id) == name


def test_the_capabilities_of_mig_are_read_and_never_computed() -> None:
    text = (
        "config 1\nmonitor 2\ngpu0/gi3/access 30\ngpu0/gi3/ci0/access 31\n\nnonsense\na b c\nx -1\n"
    )
    assert decode.capabilities(text) == {
        "config": 1,
        "monitor": 2,
        "gpu0/gi3/access": 30,
        "gpu0/gi3/ci0/access": 31,
    }


@given(st.text())
def test_no_text_of_capabilities_breaks_the_reader(text: str) -> None:
    assert all(number >= 0 for number in decode.capabilities(text).values())


@pytest.mark.parametrize(
    ("library", "driver_root", "first", "number"),
    [
        ("/opt/libnvidia-ml.so.1", "/run/nvidia/driver", "/opt/libnvidia-ml.so.1", 1),
        ("", "/", "/driver-root/usr/lib64/libnvidia-ml.so.1", 6),
        ("", "/run/nvidia/driver/", "/run/nvidia/driver/usr/lib64/libnvidia-ml.so.1", 12),
        ("", "/driver-root", "/driver-root/usr/lib64/libnvidia-ml.so.1", 6),
    ],
)
def test_the_library_is_searched_where_it_is_reported_to_be(
    library: str, driver_root: str, first: str, number: int
) -> None:
    paths = decode.library_paths(library, driver_root)
    assert (paths[0], len(paths), len(set(paths))) == (first, number, number)
    assert {PurePosixPath(path).name for path in paths} == {decode.LIBRARY}


def test_where_the_library_was_searched_in_vain_is_reported_with_what_to_do() -> None:
    expected = decode.library_problem("", "/run/nvidia/driver", "cannot open shared object file")
    assert expected.startswith(
        "libnvidia-ml.so.1 is neither below /run/nvidia/driver or /driver-root"
    )
    assert expected.endswith("mount it into this container, or set gpus.library")
    named = decode.library_problem("/opt/x.so", "/", "/opt/x.so: invalid ELF header")
    assert named == (
        "/opt/x.so: invalid ELF header; only this path was tried; "
        "correct or remove gpus.library, which sets it"
    )


@pytest.mark.parametrize(
    ("number", "version"), [(12080, "12.8"), (13000, "13.0"), (11020, "11.2"), (9010, "9.1")]
)
def test_a_cuda_version_has_two_parts(number: int, version: str) -> None:
    assert decode.cuda_version(number) == version


@pytest.mark.parametrize(
    ("state", "status", "expected"),
    [
        (0, 0, "not_supported"),
        (1, 0, "not_started"),
        (2, 0, "in_progress"),
        (3, 0, "completed"),
        (3, 999, "failed"),
        (9, 0, None),
    ],
)
def test_a_gpus_way_into_its_fabric_is_reported(
    state: int, status: int, expected: str | None
) -> None:
    assert decode.fabric(state, status) == expected


def test_a_clique_is_that_of_a_fabric_the_gpu_is_in() -> None:
    cluster = bytes(range(16))
    assert decode.clique(3, 0, cluster, 7) == "00010203-0405-0607-0809-0a0b0c0d0e0f.7"
    assert decode.clique(2, 0, cluster, 7) == ""
    assert decode.clique(3, 1, cluster, 7) == ""
    assert decode.clique(3, 0, bytes(16), 7) == ""


def test_links_whose_state_is_unknown_are_neither_up_nor_down() -> None:
    assert decode.links_down({}) == ()
    assert decode.links_down({0: True, 1: True}) == ()
    assert decode.links_down({0: True, 1: None}) is None
    assert decode.links_down({0: False, 1: None}) == (0,)


def test_only_what_slows_a_gpu_down_against_its_will_is_a_slowdown() -> None:
    assert decode.slowdowns(0x1 | 0x2 | 0x4 | 0x10 | 0x100) == ()
    assert decode.slowdowns(0x08 | 0x20 | 0x40 | 0x80) == (
        "HW_SLOWDOWN",
        "SW_THERMAL",
        "HW_THERMAL",
        "POWER_BRAKE",
    )


def test_what_is_not_known_of_the_way_between_two_gpus_counts_as_far() -> None:
    assert decode.topology_level(10) is gpu.TopologyLevel.ONE_SWITCH
    assert decode.topology_level(11) is gpu.TopologyLevel.SYSTEM


@pytest.mark.parametrize(
    ("gi", "ci", "part"),
    [
        (decode.NO_INSTANCE, decode.NO_INSTANCE, gpu.Part(gpu="GPU-a")),
        (3, decode.NO_INSTANCE, gpu.Part(gpu="GPU-a", gi=3)),
        (3, 0, gpu.Part(gpu="GPU-a", gi=3, ci=0)),
    ],
)
def test_an_event_names_the_instance_that_it_names_or_none(
    gi: int, ci: int, part: gpu.Part
) -> None:
    assert decode.event_part("GPU-a", gi, ci) == part


def test_a_link_should_be_up_if_it_was_or_if_it_is_on_most_gpus_alike() -> None:
    products = dict.fromkeys("abc", "H100") | {"d": "T4"}
    active = {"a": {0, 1}, "b": {0}, "c": {0, 1}, "d": set[int]()}
    assert decode.expected_links(active, products, {"d": {5}}) == {
        "a": frozenset({0, 1}),
        "b": frozenset({0, 1}),
        "c": frozenset({0, 1}),
        "d": frozenset({5}),
    }


def test_half_of_the_gpus_are_no_measure_for_the_other_half() -> None:
    # two of four GPUs are joined by a bridge
    products = dict.fromkeys("abcd", "H100 PCIe")
    active = {"a": {0, 1}, "b": {0, 1}, "c": set[int](), "d": set[int]()}
    assert decode.expected_links(active, products, {})["c"] == frozenset()
