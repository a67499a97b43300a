"""The NVML adapters against the fake library: what they discover, and why they fail."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from muster_plugin.model import gpu
from tests.worlds.nvml import fake, followed, scenes


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> fake.Fake:
    return followed.here(tmp_path / "state", monkeypatch)


# Discovery


def test_the_first_look_reports_each_gpu_with_what_kernel_and_driver_know_of_it(
    node: fake.Fake, tmp_path: Path
) -> None:
    node.write(scenes.h100x8())
    pci = tmp_path / "sys/bus/pci/devices/0000:1b:00.0"
    followed.write(pci / "numa_node", "1\n")
    followed.write(pci / "class", "0x030200\n")
    followed.write(tmp_path / "sys/bus/pci/devices/0000:1c:00.0/numa_node", "-1\n")
    followed.write(tmp_path / "sys/class/dmi/id/product_name", "DGX H100\n")
    followed.write(
        tmp_path / "proc/driver/nvidia-caps/mig-minors", "config 1\ngpu3/gi2/access 30\n"
    )

    async def story() -> None:
        async with followed.followed(node) as (_, scan):
            first = scan.gpus[0]
            assert (scan.driver, scan.problem) == (gpu.Driver.READY, "")
            assert (scan.driver_version, scan.cuda_version) == ("580.95.05", "13.0")
            assert (scan.machine, scan.caps) == ("DGX H100", {"config": 1, "gpu3/gi2/access": 30})
            assert [device.uuid for device in scan.gpus] == [*followed.UUIDS]
            assert scan.unreadable == ()
            assert (first.product, first.memory_mib) == ("NVIDIA H100 80GB HBM3", 81559)
            assert (first.index, first.minor, first.compute_capability) == (0, 3, "9.0")
            assert (first.numa_node, first.pci_class) == (1, "0x030200")
            assert (first.pci_bus_id, first.mig_enabled, first.mig) == (
                "00000000:1B:00.0",
                False,
                (),
            )
            assert scan.gpus[1].numa_node is None
            assert [poll.error for poll in scan.polls] == [""] * 8
            assert scan.polls[0].recovery_action == 0
            assert scan.links[followed.UUIDS[0], followed.UUIDS[1]] == gpu.Link(
                level=gpu.TopologyLevel.SWITCHES
            )
            assert scan.links[followed.UUIDS[0], followed.UUIDS[7]] == gpu.Link(
                level=gpu.TopologyLevel.SYSTEM
            )

    asyncio.run(story())


def test_mig_devices_have_nvidias_profile_names_and_holes_are_skipped(node: fake.Fake) -> None:
    node.write(scenes.a100_mig())

    async def story() -> None:
        async with followed.followed(node) as (_, scan):
            mixed, sevenths, whole = scan.gpus
            assert [device.profile for device in mixed.mig] == [
                "1g.5gb",
                "2g.10gb",
                "1c.3g.20gb",
                "2c.3g.20gb",
            ]
            assert {device.profile for device in sevenths.mig} == {"1g.5gb"}
            assert len(sevenths.mig) == 7
            assert (mixed.mig_enabled, whole.mig_enabled, whole.mig) == (True, False, ())
            assert (mixed.mig[1].gi, mixed.mig[1].ci, mixed.mig[1].gi_slices) == (3, 0, 2)

    asyncio.run(story())


def test_direct_nvlinks_are_counted_between_the_gpus_they_join(node: fake.Fake) -> None:
    scene = scenes.dgx1()
    node.write(scene)
    uuids = [device.uuid for device in scene.gpus]

    async def story() -> None:
        async with followed.followed(node) as (_, scan):
            expected = {
                (link.a, link.b): scan.links[uuids[link.a], uuids[link.b]].nvlinks
                for link in scene.links
            }
            assert expected == {(link.a, link.b): link.nvlinks for link in scene.links}
            assert sum(expected.values()) == 8 * 6 / 2  # six links a GPU, each seen from both ends

    asyncio.run(story())


def test_what_a_product_lacks_is_unknown_and_nothing_is_wrong_with_it(node: fake.Fake) -> None:
    node.write(scenes.h100x8().also("error call=nvmlDeviceGetFieldValues code=3"))
    for call in (
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetRetiredPagesPendingStatus",
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetTemperatureThreshold",
        "nvmlDeviceGetGpuFabricInfoV",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetSerial",
    ):
        node.add(f"error call={call} code=3")

    async def story() -> None:
        async with followed.followed(node) as (_, scan):
            first = scan.gpus[0]
            assert (first.memory_mib, first.mig_enabled, first.serial) == (None, None, None)
            poll = scan.polls[0]
            assert poll == gpu.Poll(gpu=followed.UUIDS[0], at=poll.at, nvlinks_down=())
            assert (scan.problem, scan.unreadable) == ("", ())

    asyncio.run(story())


def test_of_two_gpus_with_one_uuid_the_first_counts_and_that_is_reported(node: fake.Fake) -> None:
    first = followed.UUIDS[0]
    node.write(scenes.h100x8().having(2, scenes.h100x8().gpus[0]))

    async def story() -> None:
        async with followed.followed(node) as (_, scan):
            assert [device.uuid for device in scan.gpus] == [
                first,
                followed.UUIDS[1],
                *followed.UUIDS[3:],
            ]
            assert scan.problem == f"GPU 2 is left out: its uuid {first} is also that of GPU 0"

    asyncio.run(story())


# No driver


@pytest.mark.parametrize(
    ("code", "driver", "expected"),
    [
        (9, gpu.Driver.NOT_LOADED, "DRIVER_NOT_LOADED: the kernel module is not loaded"),
        (4, gpu.Driver.NO_PERMISSION, "NO_PERMISSION: not permitted; let this container open"),
        (17, gpu.Driver.NO_PERMISSION, "OPERATING_SYSTEM: the operating system denies"),
        (13, gpu.Driver.TOO_OLD, "FUNCTION_NOT_FOUND: the driver lacks a function"),
        (
            18,
            gpu.Driver.REPLACED,
            "LIB_RM_VERSION_MISMATCH: the loaded driver and the library have different versions",
        ),
        (999, gpu.Driver.FAILED, "UNKNOWN: a frequent cause is that"),
        (4242, gpu.Driver.FAILED, "4242: muster will try again"),
    ],
)
def test_why_nvml_cannot_begin_is_reported_and_it_begins_by_itself_once_it_can(
    node: fake.Fake, code: int, driver: gpu.Driver, expected: str
) -> None:
    node.write(scenes.h100x8().also(f"init {code}"))

    async def story() -> None:
        async with followed.followed(node) as (story, scan):
            assert (scan.driver, scan.gpus) == (driver, ())
            assert scan.problem.startswith(f"nvmlInit failed with {expected}")
            node.drop()
            # on a busy machine, NVML may first count as silent
            ready = await story.until(
                gpu.Scan, is_it=lambda expected: expected.driver is gpu.Driver.READY
            )
            assert len(ready.gpus) == 8

    asyncio.run(story())


def test_a_driver_that_stays_away_is_asked_for_with_pauses_and_reported_of_once(
    node: fake.Fake,
) -> None:
    async def story() -> None:
        async with followed.followed(node) as (story, scan):
            assert scan.driver is gpu.Driver.NOT_LOADED
            while node.counts()["nvmlInitWithFlags"] < 5:
                await asyncio.sleep(0.01)
            # without pauses there would be thousands of calls
            assert node.counts()["nvmlInitWithFlags"] < 50
            assert story.observations == []

    asyncio.run(story())


def test_a_beginning_that_hangs_is_silence_until_it_returns(node: fake.Fake) -> None:
    node.write(scenes.h100x8().also("hang call=nvmlDeviceGetName gpu=3"))

    async def story() -> None:
        async with followed.followed(node, first_s=0.2) as (story, scan):
            assert scan == gpu.Scan(
                driver=gpu.Driver.SILENT, problem="NVML has not answered for 0.2 s"
            )
            node.drop()
            ready = await story.until(
                gpu.Scan, is_it=lambda expected: expected.driver is gpu.Driver.READY
            )
            assert len(ready.gpus) == 8

    asyncio.run(story())


def test_a_driver_loaded_again_is_initialised_again(node: fake.Fake) -> None:
    node.write(scenes.h100x8())

    async def story() -> None:
        async with followed.followed(node) as (story, _):
            node.add("epoch 1")
            scan = await story.until(gpu.Scan)
            assert (scan.driver, len(scan.gpus)) == (gpu.Driver.READY, 8)
            await story.xid(5, 48)
            node.unload()
            scan = await story.until(gpu.Scan)
            assert (scan.driver, scan.gpus) == (gpu.Driver.NOT_LOADED, ())

    asyncio.run(story())


# No library

BEGIN: Final = """
import sys
from muster_plugin.config import gpus
from muster_plugin.gpu.nvml import library
rules = gpus.Gpus(library=sys.argv[1], given=gpus.ContainerOptions(driver_root=sys.argv[2]))
try:
    library.shut_down(library.initialise(rules))
    print("begun")
except library.NvmlUnavailable as no:
    print(no.driver, no.problem, "pynvml" in sys.modules)
"""


def begun(library: str, driver_root: str, **environment: str) -> str:
    """Initialise NVML in a new process and return its output; a process loads only one library."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN, library, driver_root],
        env=os.environ | {"LD_LIBRARY_PATH": ""} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_a_library_is_loaded_from_where_it_is_named_or_below_the_driver_root_or_by_the_loader(
    node: fake.Fake, tmp_path: Path
) -> None:
    node.write(scenes.t4())
    root = tmp_path / "run/nvidia/driver"
    below = root / "usr/lib/x86_64-linux-gnu"
    below.mkdir(parents=True)
    (below / fake.SONAME).symlink_to(fake.built())
    named = tmp_path / "some-name.so"
    named.symlink_to(fake.built())
    assert begun(str(named), "/") == "begun"
    assert begun("", str(root)) == "begun"
    assert begun("", "/", LD_LIBRARY_PATH=str(fake.built().parent)) == "begun"


def test_without_a_library_it_is_reported_what_was_tried_and_the_binding_is_not_loaded(
    tmp_path: Path,
) -> None:
    text = tmp_path / "text.so"
    text.write_text("no library")
    expected = begun(str(text), "/")
    assert expected.startswith(f"no_library {text}: ")
    assert expected.endswith("correct or remove gpus.library, which sets it False")
    missing = str(tmp_path / "missing.so")
    assert "cannot open shared object file" in begun(missing, "/")
