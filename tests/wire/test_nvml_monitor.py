"""The NVML adapters against the fake library, while GPUs fail, hang and change."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from muster_plugin.model import gpu
from tests.worlds.nvml import fake, followed, scenes


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> fake.Fake:
    return followed.here(tmp_path / "state", monkeypatch)


# GPUs that are lost


def test_one_of_eight_that_is_lost_from_the_start_disturbs_no_other(node: fake.Fake) -> None:
    node.write(scenes.h100x8().also("lost 2"))

    async def story() -> None:
        async with followed.followed(node) as (story, scan):
            assert scan.driver is gpu.Driver.READY
            assert [device.index for device in scan.gpus] == [0, 1, 3, 4, 5, 6, 7]
            assert scan.unreadable == (gpu.UnreadableGpu(index=2, error="GPU_IS_LOST"),)
            assert {poll.error for poll in scan.polls} == {""}
            assert (await story.xid(7, 31)).part == gpu.Part(gpu=followed.UUIDS[7])
            node.drop("lost")
            later_scan = await story.until(gpu.Scan)
            assert (len(later_scan.gpus), later_scan.unreadable) == (8, ())
            await story.xid(2, 32)

    asyncio.run(story())


def test_one_lost_at_the_start_that_is_known_by_name_is_reported_as_lost(node: fake.Fake) -> None:
    node.write(scenes.h100x8().also("error call=nvmlDeviceGetMemoryInfo gpu=2 code=15"))

    async def story() -> None:
        async with followed.followed(node) as (_, scan):
            lost = gpu.UnreadableGpu(index=2, error="GPU_IS_LOST", uuid=followed.UUIDS[2])
            assert scan.unreadable == (lost,)
            assert len(scan.gpus) == 7

    asyncio.run(story())


def test_one_lost_while_it_runs_is_reported_and_left_out_and_nothing_spins(node: fake.Fake) -> None:
    node.write(scenes.h100x8())

    async def story() -> None:
        async with followed.followed(node) as (story, _):
            await story.polled(0)
            before = dict(node.counts())
            node.add("lost 3")
            lost = await story.until(gpu.Poll, is_it=lambda poll: bool(poll.error))
            assert (lost.gpu, lost.error) == (followed.UUIDS[3], "GPU_IS_LOST")
            unwatched = await story.had(gpu.MonitoringChanged)
            assert (unwatched.gpu, unwatched.problem) == (
                followed.UUIDS[3],
                "it is lost: GPU_IS_LOST",
            )
            await story.polled(0, times=5)
            assert (await story.xid(4, 31)).part == gpu.Part(gpu=followed.UUIDS[4])
            errors = {poll.gpu for poll in story.of(gpu.Poll) if poll.error}
            assert errors == {followed.UUIDS[3]}
            counts = node.counts()
            # two waits for each poll, and a new event set after the loss; without pauses, thousands
            assert counts["nvmlEventSetWait_v2"] - before["nvmlEventSetWait_v2"] < 200
            assert counts["nvmlEventSetCreate"] - before["nvmlEventSetCreate"] <= 3
            assert story.of(gpu.Scan) == []

    asyncio.run(story())


def test_one_that_is_back_is_watched_again(node: fake.Fake) -> None:
    node.write(scenes.h100x8())

    async def story() -> None:
        async with followed.followed(node) as (story, _):
            node.add("lost 3")
            await story.until(gpu.MonitoringChanged, is_it=lambda watch: watch.problem != "")
            node.drop()
            watched = await story.until(gpu.MonitoringChanged)
            assert (watched.gpu, watched.problem) == (followed.UUIDS[3], "")
            assert (await story.polled(3)).error == ""
            await story.xid(3, 31)

    asyncio.run(story())


def test_all_lost_at_once_are_reported_each(node: fake.Fake) -> None:
    node.write(scenes.h100x8())

    async def story() -> None:
        async with followed.followed(node) as (story, _):
            node.add(*(f"lost {n}" for n in range(8)))
            while {poll.gpu for poll in story.of(gpu.Poll) if poll.error} != {*followed.UUIDS}:
                await story.until(gpu.Poll, is_it=lambda poll: bool(poll.error))
            before = node.counts()["nvmlEventSetWait_v2"]
            await story.polled(0, times=5)
            assert node.counts()["nvmlEventSetWait_v2"] - before < 200

    asyncio.run(story())


# NVML hangs


def test_a_gpu_that_hangs_is_unwatched_and_the_loop_and_the_others_go_on(node: fake.Fake) -> None:
    node.write(scenes.h100x8())

    async def story() -> None:
        async with followed.followed(node) as (story, _):
            node.add("hang call=nvmlDeviceGetTemperature gpu=6")
            unwatched = await story.until(gpu.MonitoringChanged)
            assert (unwatched.gpu, unwatched.problem) == (
                followed.UUIDS[6],
                "NVML has not answered for 0.3 s",
            )
            story.observations.clear()
            checked_at = story.nvml.checked_at["gpu_poll"]
            # the call hangs until it is released below: anything that waited for it would not end
            for number in (0, 7):
                await story.polled(number, times=3)
            assert {poll.gpu for poll in story.of(gpu.Poll)} == {*followed.UUIDS} - {
                followed.UUIDS[6]
            }
            assert story.nvml.checked_at["gpu_poll"] == checked_at
            await story.xid(1, 31)
            node.drop()
            watched = await story.until(gpu.MonitoringChanged)
            assert (watched.gpu, watched.problem) == (followed.UUIDS[6], "")
            await story.polled(6)
            assert story.nvml.checked_at["gpu_poll"] > checked_at
            assert node.peak() >= 2

    asyncio.run(story())


def test_a_wait_for_events_that_hangs_leaves_all_unwatched(node: fake.Fake) -> None:
    node.write(scenes.h100x8())

    async def story() -> None:
        async with followed.followed(node) as (story, _):
            node.add("hang call=nvmlEventSetWait_v2")
            await story.of_each(gpu.MonitoringChanged)
            assert {watch.problem for watch in story.of(gpu.MonitoringChanged)} == {
                "the wait for GPU events has not returned for 0.35 s"
            }
            story.observations.clear()
            node.drop()
            await story.of_each(gpu.MonitoringChanged)
            assert {watch.problem for watch in story.of(gpu.MonitoringChanged)} == {""}
            await story.xid(0, 31)

    asyncio.run(story())


def test_nvml_that_hangs_as_a_whole_ends_in_time_without_a_shutdown(node: fake.Fake) -> None:
    node.write(scenes.h100x8())

    async def story() -> None:
        timeouts = msgspec.structs.replace(followed.TIMEOUTS, close_s=0.3)
        async with followed.followed(node, timeouts=timeouts) as (story, _):
            node.add("hang")
            await story.of_each(gpu.MonitoringChanged)
            # the call hangs until it is released below
            await story.nvml.close()
            assert "nvmlShutdown" not in node.counts()
            node.drop()

    asyncio.run(story())


# Events


def test_an_xid_is_reported_with_the_instance_that_it_names(node: fake.Fake) -> None:
    scene = scenes.a100_mig()
    node.write(scene)
    uuids = [device.uuid for device in scene.gpus]

    async def story() -> None:
        async with followed.followed(node) as (story, _):
            assert (await story.xid(0, 13, gi=3, ci=0)).part == gpu.Part(gpu=uuids[0], gi=3, ci=0)
            assert (await story.xid(0, 14, gi=3)).part == gpu.Part(gpu=uuids[0], gi=3)
            assert (await story.xid(0, 79)).part == gpu.Part(gpu=uuids[0])
            # a GPU without MIG has no instances, whatever the driver fills in
            assert (await story.xid(2, 31, gi=0, ci=0)).part == gpu.Part(gpu=uuids[2])

    asyncio.run(story())


def test_after_an_xid_its_gpu_is_polled_at_once(node: fake.Fake) -> None:
    node.write(scenes.h100x8())

    async def story() -> None:
        async with followed.followed(node) as (story, _):
            node.write(node.scene.but(4, recovery=1))
            await story.xid(4, 154)
            poll = await story.until(gpu.Poll, is_it=lambda poll: poll.gpu == followed.UUIDS[4])
            assert poll.recovery_action == 1

    asyncio.run(story())


def test_an_event_of_an_unknown_device_lets_all_be_polled(node: fake.Fake) -> None:
    node.write(scenes.h100x8())

    async def story() -> None:
        async with followed.followed(node) as (story, _):
            await story.polled(7)
            story.observations.clear()
            node.xid(0, 31, more="nowhere=1")
            await story.of_each(gpu.Poll)
            assert story.of(gpu.Xid) == []

    asyncio.run(story())


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (
            "error call=nvmlDeviceRegisterEvents gpu=1 code=3",
            "its events cannot be registered: NOT_SUPPORTED",
        ),
        (
            "error call=nvmlDeviceRegisterEvents gpu=1 code=999",
            "its events cannot be registered: UNKNOWN",
        ),
        (
            "error call=nvmlDeviceGetSupportedEventTypes gpu=1 code=3",
            "its events cannot be registered: NOT_SUPPORTED",
        ),
    ],
)
def test_a_gpu_whose_events_are_refused_is_unwatched_alone(
    node: fake.Fake, line: str, problem: str
) -> None:
    node.write(scenes.h100x8().also(line))

    async def story() -> None:
        async with followed.followed(node) as (story, scan):
            assert len(scan.gpus) == 8
            unwatched = await story.until(gpu.MonitoringChanged)
            assert (unwatched.gpu, unwatched.problem) == (followed.UUIDS[1], problem)
            await story.xid(0, 31)
            await story.xid(2, 32)
            assert {watch.gpu for watch in story.of(gpu.MonitoringChanged)} == {followed.UUIDS[1]}
            assert (await story.polled(1)).error == ""

    asyncio.run(story())


def test_a_gpu_that_reports_no_xids_is_unwatched(node: fake.Fake) -> None:
    node.write(scenes.h100x8().but(1, events=2))

    async def story() -> None:
        async with followed.followed(node) as (story, _):
            unwatched = await story.until(gpu.MonitoringChanged)
            assert (unwatched.gpu, unwatched.problem) == (
                followed.UUIDS[1],
                "the driver does not report its XIDs",
            )

    asyncio.run(story())


def test_a_refusal_that_passes_is_tried_again(node: fake.Fake) -> None:
    node.write(scenes.h100x8().also("error call=nvmlDeviceRegisterEvents gpu=1 code=999 times=1"))

    async def story() -> None:
        async with followed.followed(node) as (story, _):
            watched = await story.until(
                gpu.MonitoringChanged, is_it=lambda watch: watch.problem == ""
            )
            assert watched.gpu == followed.UUIDS[1]
            await story.xid(1, 31)

    asyncio.run(story())


def test_waits_that_fail_or_are_cut_short_do_not_spin(node: fake.Fake) -> None:
    node.write(scenes.h100x8().also("error call=nvmlEventSetWait_v2 code=999"))

    async def story() -> None:
        async with followed.followed(node) as (story, _):
            await story.of_each(gpu.MonitoringChanged)
            assert {watch.problem for watch in story.of(gpu.MonitoringChanged)} == {
                "NVML reports no events: UNKNOWN"
            }
            await story.polled(0, times=5)
            assert node.counts()["nvmlEventSetWait_v2"] < 50
            node.drop()
            node.add("wait_cut 1")
            watched = await story.until(gpu.MonitoringChanged)
            assert watched.problem == ""
            before = node.counts()["nvmlEventSetWait_v2"]
            await story.polled(0, times=5)
            assert node.counts()["nvmlEventSetWait_v2"] - before < 200
            await story.xid(0, 31)

    asyncio.run(story())


def test_a_call_that_never_returns_is_abandoned_and_the_others_are_watched_again(
    node: fake.Fake, tmp_path: Path
) -> None:
    kernel = tmp_path / "proc/driver/nvidia/gpus"
    (kernel / "0000:1b:00.0").mkdir(parents=True)
    node.write(scenes.h100x8())
    hasty = msgspec.structs.replace(followed.TIMEOUTS, abandon_s=0.2)

    async def story() -> None:
        async with followed.followed(node, timeouts=hasty) as (here, _):
            await here.of_each(gpu.Poll)
            node.add("hang call=nvmlDeviceGetTemperature gpu=6 times=1")
            await here.until(gpu.MonitoringChanged, is_it=lambda device: device.problem != "")
            # the kernel has another GPU now, so NVML has to be initialised again
            (kernel / "0000:1c:00.0").mkdir()
            await here.until(gpu.Scan)
            for uuid in followed.UUIDS:
                await here.until(gpu.Poll, is_it=lambda poll, uuid=uuid: poll.gpu == uuid)  # type: ignore[misc]
            node.drop("hang")
            (kernel / "0000:1d:00.0").mkdir()
            await here.until(gpu.Scan)
        assert node.misuses() == {}
        assert node.counts()["nvmlShutdown"] >= node.counts()["nvmlInitWithFlags"] - 1

    asyncio.run(story())


# GPUs that change


def test_a_gpu_repartitioned_is_scanned_again(node: fake.Fake) -> None:
    scene = scenes.a100_mig()
    node.write(scene)

    async def story() -> None:
        async with followed.followed(node) as (story, scan):
            node.write(scene.whole(1))
            again = await story.until(gpu.Scan)
            assert again.gpus[1] == msgspec.structs.replace(scan.gpus[1], mig=(), mig_enabled=False)
            assert (again.gpus[0], again.gpus[2]) == (scan.gpus[0], scan.gpus[2])
            node.write(scene.carved(2, *scene.gpus[0].mig))
            again = await story.until(gpu.Scan)
            assert [device.profile for device in again.gpus[2].mig] == [
                device.profile for device in scan.gpus[0].mig
            ]
            # NVML was not initialised again for it
            assert node.counts()["nvmlInitWithFlags"] == 1

    asyncio.run(story())


def test_gpus_that_come_and_go_are_observed_without_a_restart_of_the_process(
    node: fake.Fake,
) -> None:
    scene = scenes.h100x8().also("hotplug 1")
    node.write(scene.without(7))

    async def story() -> None:
        async with followed.followed(node) as (story, scan):
            assert len(scan.gpus) == 7
            node.write(scene)
            more = await story.until(gpu.Scan)
            assert [device.uuid for device in more.gpus] == [*followed.UUIDS]
            await story.xid(7, 31)
            node.write(scene.without(0))
            less = await story.until(gpu.Scan, is_it=lambda observation: len(observation.gpus) == 7)
            assert [device.uuid for device in less.gpus] == [*followed.UUIDS[1:]]

    asyncio.run(story())


def test_a_driver_without_gpus_is_scanned_until_there_is_one(node: fake.Fake) -> None:
    node.write(scenes.Scene().also("hotplug 1"))

    async def story() -> None:
        async with followed.followed(node) as (story, scan):
            assert (scan.driver, scan.gpus) == (gpu.Driver.READY, ())
            for _ in range(3):
                before = dict(story.nvml.checked_at)
                while any(at <= before[what] for what, at in story.nvml.checked_at.items()):
                    await asyncio.sleep(0.01)
            node.write(scenes.t4().also("hotplug 1"))
            later_scan = await story.until(gpu.Scan)
            assert [device.product for device in later_scan.gpus] == ["Tesla T4"]

    asyncio.run(story())


def test_a_gpu_that_the_kernel_lets_go_is_noticed_though_nvml_counts_it(
    node: fake.Fake, tmp_path: Path
) -> None:
    scene = scenes.h100x8()
    node.write(scene)
    kernel = tmp_path / "proc/driver/nvidia/gpus"
    followed.write(kernel / "0000:1b:00.0/information", "")
    followed.write(kernel / "0000:1c:00.0/information", "")

    async def story() -> None:
        async with followed.followed(node) as (story, _):
            (kernel / "0000:1b:00.0").rename(tmp_path / "gone")
            await story.until(gpu.Scan)
            assert node.counts()["nvmlInitWithFlags"] == 2

    asyncio.run(story())


def test_a_stale_handle_is_replaced_by_initialising_again(node: fake.Fake) -> None:
    node.write(scenes.h100x8())

    async def story() -> None:
        async with followed.followed(node) as (story, _):
            node.add("error gpu=5 code=2")
            scan = await story.until(gpu.Scan)
            assert [device.uuid for device in scan.gpus] == [*followed.UUIDS]
            assert scan.polls[5].error == "INVALID_ARGUMENT"
            begun = node.counts()["nvmlInitWithFlags"]
            await story.polled(5, times=4)
            # the GPU still fails, but NVML is not initialised again and again because of it
            assert node.counts()["nvmlInitWithFlags"] <= begun + 1
            node.drop()
            await story.until(
                gpu.Poll, is_it=lambda poll: poll.gpu == followed.UUIDS[5] and not poll.error
            )

    asyncio.run(story())


def test_a_link_that_goes_down_or_was_never_up_as_on_the_others_is_reported(
    node: fake.Fake,
) -> None:
    node.write(scenes.h100x8().also("nvlink 6 5 state=0"))

    async def story() -> None:
        async with followed.followed(node) as (story, scan):
            assert [poll.nvlinks_down for poll in scan.polls] == [()] * 6 + [(5,), ()]
            node.add("nvlink 2 17 state=0")
            poll = await story.until(gpu.Poll, is_it=lambda poll: poll.gpu == followed.UUIDS[2])
            while not poll.nvlinks_down:
                poll = await story.polled(2, times=1)
            assert poll.nvlinks_down == (17,)

    asyncio.run(story())


def test_a_close_during_a_beginning_that_hangs_ends_in_time(node: fake.Fake) -> None:
    node.write(scenes.h100x8().also("hang call=nvmlInitWithFlags"))

    async def story() -> None:
        timeouts = msgspec.structs.replace(followed.TIMEOUTS, close_s=0.2)
        async with followed.followed(node, timeouts=timeouts, first_s=0.1) as (story, scan):
            assert scan.driver is gpu.Driver.SILENT
            # the call hangs until it is released below
            await story.nvml.close()
            node.drop()
            # an initialisation that finishes after the close is ended by the next close
            await story.until(gpu.Scan)

    asyncio.run(story())


def test_one_gpu_that_talks_nonsense_is_reported_and_the_others_go_on(node: fake.Fake) -> None:
    scene = scenes.h100x8()
    node.write(scene)
    raw = scene.text().encode().replace(b"gpu 3 uuid=GPU", b"gpu 3 uuid=\xff\xfe")
    node.state_file.write_bytes(raw)

    async def story() -> None:
        async with followed.followed(node) as (story, scan):
            assert scan.driver is gpu.Driver.READY, scan.problem
            assert scan.unreadable == (gpu.UnreadableGpu(index=3, error="not UTF-8"),)
            assert len(scan.gpus) == 7
            await story.until(gpu.Poll)

    asyncio.run(story())
