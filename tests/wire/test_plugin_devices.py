"""Devices that appear, disappear or fail their checks, as the kubelet lists them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import msgspec
import pytest

from muster import vocabulary
from muster.local import kubelet as stand_in
from muster.pb import deviceplugin_pb2 as dp
from muster.pb import rpc
from muster.vocabulary import Health
from muster.vocabulary import RegistrationReason as Reason
from muster_plugin.config import resources
from muster_plugin.config import settings as config_settings
from muster_plugin.model import advertised
from tests.worlds import plugin_on_kubelet
from tests.worlds.plugin_on_kubelet import (
    FUSE,
    GPU,
    fuse,
    plugin,
    run,
    socket_of,
    until_allocatable,
)


@pytest.fixture
def root() -> Iterator[Path]:
    with plugin_on_kubelet.directory() as path:
        yield path


def test_a_device_that_goes_becomes_unhealthy_and_returns_under_the_same_id(root: Path) -> None:
    async def story() -> None:
        settings = fuse(root, "one", "two")
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(settings) as (_, published),
        ):
            await until_allocatable(kubelet, 2)
            (root / "two").unlink()
            gone = await published.until_health(Health.UNHEALTHY)
            await until_allocatable(kubelet, 1)
            assert kubelet.state().resources[FUSE].capacity == 2
            assert (gone.code, gone.reason) == ("device-missing", f"{root / 'two'} is gone")
            (root / "two").symlink_to("/dev/null")
            back = await published.until_health(Health.HEALTHY)
            await until_allocatable(kubelet, 2)
            assert (back.device_id, back.code) == (gone.device_id, "device-healthy")

    run(story)


def test_a_resource_without_devices_is_listed_empty_until_one_comes(root: Path) -> None:
    async def story() -> None:
        settings = fuse(root, "late")
        (root / "late").unlink()
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(settings) as (node, published),
        ):
            await published.registered(1)
            await kubelet.until(lambda state: state.resources[FUSE].streams_open == 1)
            (state,) = node.statuses()
            assert (state.devices, state.healthy, state.problem) == (0, 0, "")
            (root / "late").symlink_to("/dev/null")
            await until_allocatable(kubelet, 1)
            added = await published.of_kind(vocabulary.DeviceAdded, 1)
            assert [event.device for event in added] == [
                vocabulary.Device(id=advertised.device_id(str(root / "late"), 0), resource=FUSE)
            ]

    run(story)


def test_each_match_is_a_resource_that_comes_and_goes_with_it(root: Path) -> None:
    async def story() -> None:
        rule = resources.Resource(
            name="smarter-devices/*",
            per_match=True,
            groups=(
                resources.Group(devices=(resources.Entry(path=str(root / "video?")),), count=2),
            ),
            grace_s=0.05,
        )
        settings = config_settings.Settings(
            kubelet=config_settings.Kubelet(directory=str(root)), resources=(rule,)
        )
        (root / "video0").symlink_to("/dev/null")
        names = [
            f"smarter-devices/{str(root / video).strip('/').replace('/', '_')}"
            for video in ("video0", "video1")
        ]
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(settings) as (node, published),
        ):
            await until_allocatable(kubelet, 2, names[0])
            (root / "video1").symlink_to("/dev/null")
            await until_allocatable(kubelet, 2, names[1])
            reasons = [(await published.registered(1, name)).reason for name in names]
            assert reasons == [Reason.START, Reason.DEVICE_APPEARED]
            (root / "video0").unlink()
            await kubelet.until(lambda state: state.resources[names[0]].streams_open == 0)
            removed = await published.of_kind(vocabulary.DeviceRemoved, 2)
            assert [event.resource for event in removed] == [names[0]] * 2
            assert [state.name for state in node.statuses()] == [names[1]]
            assert kubelet.state().resources[names[1]].registered == 1

    run(story)


def test_fewer_devices_than_expected_are_reported_and_so_is_their_return(root: Path) -> None:
    async def story() -> None:
        (root / "one").symlink_to("/dev/null")
        rule = resources.Resource(
            name=FUSE,
            groups=(resources.Group(devices=(resources.Entry(path=str(root / "[a-z]*[oe]")),)),),
            expect=resources.Expect(min=2),
        )
        settings = config_settings.Settings(
            kubelet=config_settings.Kubelet(directory=str(root)), resources=(rule,)
        )
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(settings) as (node, published),
        ):
            await published.registered(1)
            short = "expected at least 2 devices, found 1"
            assert [state.short for state in node.statuses()] == [short]
            (root / "two").symlink_to("/dev/zero")
            await until_allocatable(kubelet, 2)
            changed = await published.of_kind(vocabulary.ExpectationChanged, 2)
            assert [event.short for event in changed] == [short, ""]

    run(story)


def examined(root: Path, **checks: object) -> config_settings.Settings:
    """Return settings that check a link to /dev/null often."""
    (root / "one").symlink_to("/dev/null")
    rule = resources.Resource(
        name=FUSE,
        groups=(resources.Group(devices=(resources.Entry(path=str(root / "one")),)),),
        checks=msgspec.convert({"period_s": 0.1, "good": 2, **checks}, resources.Checks),
    )
    return config_settings.Settings(
        kubelet=config_settings.Kubelet(directory=str(root)), resources=(rule,)
    )


def test_a_failed_check_command_makes_a_device_unhealthy_until_checks_pass(root: Path) -> None:
    async def story() -> None:
        told_by = 'test -e "${MUSTER_DEVICES%one}/well" || { echo worn out >&2; exit 3; }'
        (root / "well").touch()
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(examined(root, command=["/bin/sh", "-c", told_by])) as (_, published),
        ):
            await until_allocatable(kubelet, 1)
            (root / "well").unlink()
            bad = await published.until_health(Health.UNHEALTHY)
            assert (bad.code, bad.reason) == (
                "check-failed",
                f"{root / 'one'}: /bin/sh ended with 3: worn out",
            )
            await until_allocatable(kubelet, 0)
            (root / "well").touch()
            assert (await published.until_health(Health.HEALTHY)).code == "device-healthy"
            await until_allocatable(kubelet, 1)

    run(story)


def pipes() -> int:
    """Count the pipes that this process has open."""
    events = 0
    for link in [*Path("/proc/self/fd").iterdir()]:
        # gRPC's threads close pipes meanwhile, and the descriptor of the listing is closed
        with contextlib.suppress(FileNotFoundError):
            events += str(link.readlink()).startswith("pipe:")
    return events


def test_a_check_command_that_leaves_a_daemon_behind_has_ended_and_leaks_no_descriptor(
    root: Path,
) -> None:
    async def story() -> None:
        daemon = "setsid sleep 8 & "
        told_by = f'{daemon} test -e "${{MUSTER_DEVICES%one}}/well" || {{ echo worn >&2; exit 3; }}'
        (root / "well").touch()
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(examined(root, command=["/bin/sh", "-c", told_by])) as (_, published),
        ):
            await until_allocatable(kubelet, 1)
            before = pipes()
            (root / "well").unlink()
            bad = await published.until_health(Health.UNHEALTHY)
            assert bad.reason == f"{root / 'one'}: /bin/sh ended with 3: worn"
            (root / "well").touch()
            await published.until_health(Health.HEALTHY)
            # a check that runs at this moment has its own pipes
            assert pipes() <= before + 2

    run(story)


def test_a_check_command_that_does_not_end_is_a_failed_check(root: Path) -> None:
    async def story() -> None:
        settings = examined(root, command=["/bin/sh", "-c", "sleep 30"], timeout_s=0.05)
        async with (
            stand_in.Kubelet(directory=root, node="n1"),
            plugin(settings) as (_, published),
        ):
            bad = await published.until_health(Health.UNHEALTHY)
            assert bad.reason == f"{root / 'one'}: /bin/sh has not ended within 0.05 s"

    run(story)


def test_a_device_with_an_open_check_is_not_healthy_before_it_was_opened(root: Path) -> None:
    async def story() -> None:
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(examined(root, open=True)) as (_, published),
        ):
            assert (await published.until_health(Health.HEALTHY)).code == "device-healthy"
            await until_allocatable(kubelet, 1)

    run(story)


def test_a_scripted_xid_makes_one_gpu_unhealthy_until_it_is_cleared(root: Path) -> None:
    async def story() -> None:
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(fuse(root, gpus=4)) as (_, published),
        ):
            await until_allocatable(kubelet, 4, GPU)
            script = root / "faults"
            script.write_text('{"device": 2, "xid": 79}\n{"device": 0, "xid": 13}\n')
            event = await published.until_health(Health.UNHEALTHY)
            await until_allocatable(kubelet, 3, GPU)
            assert (event.resource, event.device_id) == (GPU, advertised.gpu_uuid("n1", 2))
            assert (event.code, event.reason) == ("xid-79", "XID 79: GPU has fallen off the bus")
            assert event.policy.startswith("nvidia-compatible/")
            assert [evaluator.source for evaluator in event.evidence] == [
                "nvml-events",
                "nvml-poll",
            ]
            with script.open("a") as appended:
                appended.write('{"device": 2, "clear": 79}\n')
            await until_allocatable(kubelet, 4, GPU)

    run(story)


def healths(message: object) -> list[str]:
    assert isinstance(message, dp.ListAndWatchResponse)
    return [device.health for device in message.devices]


def test_two_streams_each_get_the_whole_list_and_every_change(root: Path) -> None:
    async def story() -> None:
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(fuse(root)) as (node, published),
        ):
            await published.registered(1)
            path = socket_of(node, kubelet.plugins_directory)
            async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
                client = rpc.DevicePluginClient(channel)
                streams = [client.list_and_watch(dp.Empty()) for _ in range(2)]
                first = [healths(await stream.read()) for stream in streams]
                (root / "fuse").unlink()
                second = [healths(await stream.read()) for stream in streams]
            assert (first, second) == ([["Healthy"]] * 2, [["Unhealthy"]] * 2)

    run(story)
