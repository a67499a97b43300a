"""The DRA driver's process, called as the kubelet calls it; a containerd reads its CDI file."""

import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final

import grpc.aio
import pytest

from muster.pb import dra_pb2 as dra
from muster.pb import dra_rpc, rpc
from muster.pb import pluginregistration_pb2 as pr
from tests.worlds import containerd
from tests.worlds.service_process import Service

CDI_FILE: Final = "fuse.muster.dev-device.json"
CDI_NAME: Final = "fuse.muster.dev/device=fuse"
GIVEN: Final = dra.NodePrepareResourceResponse(
    devices=[dra.Device(pool_name="cluster", device_name="fuse", cdi_device_ids=[CDI_NAME])]
)
CLAIMS: Final = [
    dra.Claim(namespace="default", uid=f"uid-{number}", name=f"claim-{number}")
    for number in range(2)
]


@pytest.fixture
def folder() -> Iterator[Path]:
    # the path of a socket must be short
    with tempfile.TemporaryDirectory(prefix="dra", dir="/tmp") as name:
        (Path(name) / "registry").mkdir()
        yield Path(name)


@pytest.fixture
def service(folder: Path) -> Iterator[Service]:
    with running(folder) as started:
        yield started


def running(folder: Path) -> Service:
    return Service(
        "muster_fuse.dra",
        {
            "MUSTER_FUSE_DRA__REGISTRY": str(folder / "registry"),
            "MUSTER_FUSE_DRA__CDI": str(folder / "cdi"),
        },
    )


def socket(folder: Path) -> Path:
    return folder / "registry" / "device.fuse.muster.dev-reg.sock"


def as_kubelet(folder: Path, story: Callable[[grpc.aio.Channel], Awaitable[None]]) -> None:
    """Run a story with a new connection to the driver."""

    async def connected() -> None:
        async with (
            asyncio.timeout(60),
            grpc.aio.insecure_channel(f"unix:{socket(folder)}") as channel,
        ):
            await story(channel)

    asyncio.run(connected())


async def info(channel: grpc.aio.Channel) -> pr.PluginInfo:
    client = rpc.PluginWatcherClient(channel)
    return await client.get_info(pr.InfoRequest(), wait_for_ready=True)


async def notify(channel: grpc.aio.Channel, *, error: str = "") -> None:
    status = pr.RegistrationStatus(plugin_registered=not error, error=error)
    client = rpc.PluginWatcherClient(channel)
    await client.notify_registration_status(status, wait_for_ready=True)


async def prepared(channel: grpc.aio.Channel) -> dra.NodePrepareResourcesResponse:
    request = dra.NodePrepareResourcesRequest(claims=CLAIMS)
    return await dra_rpc.Client(channel).prepare(request, wait_for_ready=True)


def test_it_is_registered_as_a_dra_driver_on_the_socket_that_serves_it_and_is_ready_then(
    service: Service, folder: Path
) -> None:
    async def story(channel: grpc.aio.Channel) -> None:
        assert await info(channel) == pr.PluginInfo(
            type="DRAPlugin",
            name="device.fuse.muster.dev",
            endpoint=str(socket(folder)),
            supported_versions=["v1.DRAPlugin"],
        )
        assert service.get("/readyz") == (503, "the kubelet has not registered the driver\n")
        await notify(channel)
        assert service.get("/readyz") == (200, "ok\n")
        await notify(channel, error="no v1")
        problem = "the kubelet did not register the driver: no v1\n"
        assert service.get("/readyz") == (503, problem)

    as_kubelet(folder, story)


@pytest.mark.usefixtures("service")
def test_each_claim_gets_the_device_and_the_same_again_when_it_is_prepared_again(
    folder: Path,
) -> None:
    async def story(channel: grpc.aio.Channel) -> None:
        expected = dra.NodePrepareResourcesResponse(claims={"uid-0": GIVEN, "uid-1": GIVEN})
        assert await prepared(channel) == expected
        assert await prepared(channel) == expected
        request = dra.NodeUnprepareResourcesRequest(claims=CLAIMS)
        done = dra.NodeUnprepareResourceResponse()
        assert await dra_rpc.Client(channel).unprepare(
            request
        ) == dra.NodeUnprepareResourcesResponse(claims={"uid-0": done, "uid-1": done})

    as_kubelet(folder, story)


@pytest.mark.usefixtures("service")
def test_the_cdi_file_is_there_before_any_claim_and_written_again_for_each(folder: Path) -> None:
    file = folder / "cdi" / CDI_FILE

    async def story(channel: grpc.aio.Channel) -> None:
        await info(channel)
        before = file.read_bytes()
        assert json.loads(before)["kind"] == "fuse.muster.dev/device"
        # as after a reboot, or when a tmpfs was emptied
        file.unlink()
        file.parent.rmdir()
        await prepared(channel)
        assert file.read_bytes() == before
        assert [entry.name for entry in file.parent.iterdir()] == [CDI_FILE]

    as_kubelet(folder, story)


def test_a_file_that_cannot_be_written_fails_each_claim_with_the_reason(
    service: Service, folder: Path
) -> None:
    async def story(channel: grpc.aio.Channel) -> None:
        await info(channel)
        (folder / "cdi" / CDI_FILE).unlink()
        (folder / "cdi").rmdir()
        (folder / "cdi").write_text("not a folder")
        answer = await prepared(channel)
        text = f"{folder}/cdi/{CDI_FILE}: File exists"
        failed = dra.NodePrepareResourceResponse(error=text)
        assert answer == dra.NodePrepareResourcesResponse(claims={"uid-0": failed, "uid-1": failed})
        assert service.metric("muster_fuse_dra_claims_failed") == 2

    as_kubelet(folder, story)


def test_a_socket_that_was_removed_is_made_again_and_the_driver_is_not_ready_until_registered(
    service: Service, folder: Path
) -> None:
    as_kubelet(folder, notify)
    assert service.get("/readyz") == (200, "ok\n")
    socket(folder).unlink()
    lost = service.logged("driver_not_registered")["problem"]
    assert lost == f"{socket(folder)} was removed or replaced"
    assert service.get("/readyz") == (503, f"{lost}\n")
    as_kubelet(folder, notify)
    assert service.get("/readyz") == (200, "ok\n")


@pytest.mark.usefixtures("service")
def test_a_container_with_the_cdi_device_can_open_it(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if reason := containerd.missing():
        pytest.skip(reason)

    async def story(channel: grpc.aio.Channel) -> None:
        await prepared(channel)

    as_kubelet(folder, story)
    with containerd.running(tmp_path_factory.mktemp("containerd")) as runtime:
        (runtime.cdi / CDI_FILE).write_bytes((folder / "cdi" / CDI_FILE).read_bytes())
        container = runtime.pod({}).start("main", cdi=[CDI_NAME])
        assert container.execute("dd", "if=/dev/fuse", "count=0")[0] == 0
        assert "crw-rw-rw-" in container.execute("ls", "-l", "/dev/fuse")[1]
