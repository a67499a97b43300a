"""What containers get: allocations, CDI specs, and answers to invalid requests."""

import asyncio
import random
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
from muster_plugin.config import settings as config_settings
from muster_plugin.kubelet import plugin_sockets
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


def test_a_container_gets_what_it_requested_and_the_allocation_is_published(root: Path) -> None:
    async def story() -> None:
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(fuse(root, gpus=2)) as (_, published),
        ):
            await until_allocatable(kubelet, 1)
            await until_allocatable(kubelet, 2, GPU)
            device, gpu = await kubelet.allocate(name="pod", resources={FUSE: 1, GPU: 1})
            path = str(root / "fuse")
            spec = dp.DeviceSpec(container_path=path, host_path=path, permissions="rw")
            assert list(device.answer.devices) == [spec]
            assert dict(device.answer.envs) == {advertised.environment_variable(FUSE): path}
            assert dict(gpu.answer.envs) == {"NVIDIA_VISIBLE_DEVICES": gpu.ids[0]}
            observed = [e for e in published.events if isinstance(e, vocabulary.AllocationObserved)]
            assert [(e.resource, e.device_ids) for e in observed] == [
                (FUSE, device.ids),
                (GPU, gpu.ids),
            ]

    run(story)


def test_podresources_show_which_pod_holds_a_device(root: Path) -> None:
    async def story() -> None:
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(fuse(root)) as (node, published),
        ):
            await until_allocatable(kubelet, 1)
            (device,) = await kubelet.allocate(name="pod", resources={FUSE: 1})
            events = await published.of_kind(vocabulary.AllocationObserved, 2)
            assert [(event.pod, event.device_ids) for event in events] == [
                ("", device.ids),
                ("default/pod", device.ids),
            ]
            (state,) = node.statuses()
            assert (state.allocated, state.mismatch) == (1, "")

    run(story)


def test_a_device_that_is_gone_is_advertised_so_before_its_allocation_fails(root: Path) -> None:
    async def story() -> None:
        settings = fuse(root, "one")
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(settings, watches=False) as (node, published),
        ):
            await published.registered(1)
            await until_allocatable(kubelet, 1)
            path = socket_of(node, kubelet.plugins_directory)
            (root / "one").unlink()
            device_id = advertised.device_id(str(root / "one"), 0)
            request = dp.AllocateRequest(
                container_requests=[dp.ContainerAllocateRequest(devices_ids=[device_id])]
            )
            async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await rpc.DevicePluginClient(channel).allocate(request)
            gone = f"{root / 'one'}: no such file or directory"
            assert (caught.value.code(), caught.value.details()) == (
                grpc.StatusCode.FAILED_PRECONDITION,
                f"{FUSE}: {gone}",
            )
            await until_allocatable(kubelet, 0)

    run(story)


def explained(root: Path) -> config_settings.Settings:
    """Return settings that advertise a resource with a CDI spec."""
    resource = msgspec.structs.replace(fuse(root).resources[0], cdi=True)
    return config_settings.Settings(
        kubelet=config_settings.Kubelet(directory=str(root)),
        cdi=config_settings.Cdi(directory=str(root / "cdi")),
        resources=(resource,),
    )


def test_a_cdi_spec_has_what_a_container_gets_and_stays_for_its_next_start(
    root: Path,
) -> None:
    async def story() -> None:
        (root / "cdi").mkdir()
        for name in ("muster-a.example_old.json", "vendor.json"):
            (root / "cdi" / name).touch()
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(explained(root)),
        ):
            await until_allocatable(kubelet, 1)
            (allocated,) = await kubelet.allocate(name="pod", resources={FUSE: 1})
            names = [device.name for device in allocated.answer.cdi_devices]
            file, others = sorted((root / "cdi").iterdir())
            assert (file.name, others.name) == ("muster-smarter-devices_fuse.json", "vendor.json")
            spec = msgspec.json.decode(file.read_bytes())
            assert names == [f"{spec['kind']}={spec['devices'][0]['name']}"]
            assert not allocated.answer.devices
        assert file.exists()

    run(story)


def test_a_cdi_spec_that_is_removed_is_written_again(root: Path) -> None:
    async def story() -> None:
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(explained(root)) as (node, _),
        ):
            await until_allocatable(kubelet, 1)
            (file,) = (root / "cdi").iterdir()
            content = file.read_bytes()
            file.unlink()
            while not file.exists():
                await asyncio.sleep(0)
            assert (file.read_bytes(), node.statuses()[0].problem) == (content, "")

    run(story)


def test_a_cdi_spec_is_written_only_for_resources_that_no_other_plugin_serves(root: Path) -> None:
    async def story() -> None:
        other = plugin_sockets.ResourceLocks(root / config_settings.SOCKET_DIRECTORY)
        assert other.acquire(FUSE) == ""
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(explained(root)) as (node, _),
        ):
            while not (node.statuses() and "serves it" in node.statuses()[0].problem):
                await asyncio.sleep(0)
            assert not (root / "cdi").exists()
            other.release_all()
            await until_allocatable(kubelet, 1)
            assert len([*(root / "cdi").iterdir()]) == 1

    run(story)


def test_a_cdi_spec_that_cannot_be_written_is_a_problem_of_its_resource(root: Path) -> None:
    async def story() -> None:
        (root / "cdi").write_text("no directory")
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(explained(root)) as (node, published),
        ):
            await until_allocatable(kubelet, 1)
            await published.registered(1)
            (state,) = node.statuses()
            path = root / "cdi/muster-smarter-devices_fuse.json"
            assert state.problem == f"its CDI spec {path} cannot be written: Not a directory"
            node.heartbeat_due.clear()
            (root / "cdi").unlink()
            await node.scan_devices()
            assert (node.statuses()[0].problem, node.heartbeat_due.is_set()) == ("", True)

    run(story)


def test_an_unknown_id_fails_with_a_helpful_text(root: Path) -> None:
    async def story() -> None:
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(fuse(root)) as (node, published),
        ):
            await published.registered(1)
            path = socket_of(node, kubelet.plugins_directory)
            request = dp.AllocateRequest(
                container_requests=[dp.ContainerAllocateRequest(devices_ids=["nope"])]
            )
            async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await rpc.DevicePluginClient(channel).allocate(request)
            device_id = advertised.device_id(str(root / "fuse"), 0)
            assert (caught.value.code(), caught.value.details()) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                f"{FUSE} has no device 'nope'; it has {device_id}",
            )

    run(story)


def arbitrary_ids(chance: random.Random, device_id: str) -> list[str]:
    kinds = (device_id, "", "x" * 5000, "nope", "\u2028\u0000", device_id + "0")
    return [chance.choice(kinds) for _ in range(chance.randrange(6))]


def says(answer: object) -> int | str:
    """Return the number of containers in an answer, or the status code of an error."""
    if isinstance(answer, grpc.aio.AioRpcError):
        return answer.code().name
    assert isinstance(answer, dp.AllocateResponse)
    return len(answer.container_responses)


def test_no_request_breaks_the_plugin_or_stops_its_stream(root: Path) -> None:
    async def story() -> None:
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(fuse(root)) as (node, published),
        ):
            await published.registered(1)
            device_id = advertised.device_id(str(root / "fuse"), 0)
            path, chance = socket_of(node, kubelet.plugins_directory), random.Random(1)  # noqa: S311  # the same requests every time
            async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
                client = rpc.DevicePluginClient(channel)
                for _ in range(200):
                    wanted = [arbitrary_ids(chance, device_id) for _ in range(chance.randrange(4))]
                    container = [dp.ContainerAllocateRequest(devices_ids=names) for names in wanted]
                    is_known = all(name == device_id for names in wanted for name in names)
                    request = dp.AllocateRequest(container_requests=container)
                    answer = await asyncio.gather(client.allocate(request), return_exceptions=True)
                    assert says(answer[0]) == (len(wanted) if is_known else "INVALID_ARGUMENT")
                    preferred = dp.ContainerPreferredAllocationRequest(
                        available_deviceIDs=arbitrary_ids(chance, device_id),
                        must_include_deviceIDs=arbitrary_ids(chance, device_id),
                        allocation_size=chance.choice([-(2**31), -1, 0, 1, 5, 2**31 - 1]),
                    )
                    await client.get_preferred_allocation(
                        dp.PreferredAllocationRequest(container_requests=[preferred])
                    )
            assert kubelet.state().resources[FUSE].streams_open == 1
            assert published.lost() == []

    run(story)
