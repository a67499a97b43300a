import asyncio
import contextlib
import pathlib
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Self

import aiohttp
import grpc
import grpc.aio
import orjson
import pytest

from muster.local import httpd, kubelet
from muster.local.kubelet import server
from muster.pb import deviceplugin_pb2 as dp
from muster.pb import pluginregistration_pb2 as pr
from muster.pb import podresources_pb2 as podres
from muster.pb import rpc

FUSE = "muster.dev/fuse"
OWN_POOL = [("grpc.use_local_subchannel_pool", 1)]


class Toy:
    """A simple device plugin that records its calls."""

    def __init__(self, path: pathlib.Path, *ids: str, preferred: bool = False) -> None:
        self.path = path
        self.options = dp.DevicePluginOptions(get_preferred_allocation_available=preferred)
        self.devices = [dp.Device(ID=id_, health="Healthy") for id_ in ids]
        self.prefer: list[str] = []
        self.refusal = ""
        self.calls: list[str] = []
        self.info = pr.PluginInfo(type="DevicePlugin", name=FUSE, supported_versions=["v1beta1"])
        self.notified = asyncio.Event()
        self.listing = asyncio.Event()
        self.ended = asyncio.Event()
        self._change = asyncio.Event()

    async def __aenter__(self) -> Self:
        self.server = grpc.aio.server()
        self.server.add_generic_rpc_handlers(
            [rpc.device_plugin_handler(self), rpc.plugin_watcher_handler(self)]
        )
        self.server.add_insecure_port(f"unix:{self.path}")
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(None)

    def advertise(self, **healths: str) -> None:
        self.devices = [dp.Device(ID=id_, health=health) for id_, health in healths.items()]
        self._change.set()

    async def get_device_plugin_options(
        self, _request: dp.Empty, _context: rpc.Context[dp.Empty, dp.DevicePluginOptions]
    ) -> dp.DevicePluginOptions:
        self.calls.append("options")
        return self.options

    async def list_and_watch(
        self, _request: dp.Empty, _context: rpc.Context[dp.Empty, dp.ListAndWatchResponse]
    ) -> AsyncIterator[dp.ListAndWatchResponse]:
        self.calls.append("list")
        self.listing.set()
        try:
            while True:
                yield dp.ListAndWatchResponse(devices=self.devices)
                await self._change.wait()
                self._change.clear()
        finally:
            self.ended.set()

    async def get_preferred_allocation(
        self,
        request: dp.PreferredAllocationRequest,
        _context: rpc.Context[dp.PreferredAllocationRequest, dp.PreferredAllocationResponse],
    ) -> dp.PreferredAllocationResponse:
        (wish,) = request.container_requests
        self.calls.append(f"prefer {wish.allocation_size} of {sorted(wish.available_deviceIDs)}")
        return dp.PreferredAllocationResponse(
            container_responses=[dp.ContainerPreferredAllocationResponse(deviceIDs=self.prefer)]
        )

    async def allocate(
        self,
        request: dp.AllocateRequest,
        context: rpc.Context[dp.AllocateRequest, dp.AllocateResponse],
    ) -> dp.AllocateResponse:
        self.calls.append(f"allocate {[sorted(r.devices_ids) for r in request.container_requests]}")
        if self.refusal:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, self.refusal)
        return dp.AllocateResponse(
            container_responses=[dp.ContainerAllocateResponse(envs={"TOY": str(self.path)})]
        )

    async def pre_start_container(
        self,
        _request: dp.PreStartContainerRequest,
        _context: rpc.Context[dp.PreStartContainerRequest, dp.PreStartContainerResponse],
    ) -> dp.PreStartContainerResponse:
        return dp.PreStartContainerResponse()

    async def get_info(
        self, _request: pr.InfoRequest, _context: rpc.Context[pr.InfoRequest, pr.PluginInfo]
    ) -> pr.PluginInfo:
        return self.info

    async def notify_registration_status(
        self,
        request: pr.RegistrationStatus,
        _context: rpc.Context[pr.RegistrationStatus, pr.RegistrationStatusResponse],
    ) -> pr.RegistrationStatusResponse:
        self.calls.append(f"notified {request.plugin_registered} {request.error}".strip())
        self.notified.set()
        return pr.RegistrationStatusResponse()


Story = Callable[[pathlib.Path], Awaitable[None]]


@pytest.fixture
def root() -> Iterator[pathlib.Path]:
    directory = pathlib.Path(tempfile.mkdtemp(prefix="mu-"))
    yield directory
    shutil.rmtree(directory)


def play(story: Awaitable[None]) -> None:
    async def within_limit() -> None:
        async with asyncio.timeout(100):
            await story

    asyncio.run(within_limit())


async def register(
    stand_in: kubelet.Kubelet, endpoint: str, *, name: str = FUSE, version: str = "v1beta1"
) -> tuple[grpc.StatusCode, str]:
    request = dp.RegisterRequest(version=version, endpoint=endpoint, resource_name=name)
    async with grpc.aio.insecure_channel(f"unix:{stand_in.socket}", OWN_POOL) as channel:
        try:
            await rpc.RegistrationClient(channel).register(request)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


OK = grpc.StatusCode.OK, ""


def shows(capacity: int, allocatable: int) -> Callable[[server.State], bool]:
    def holds(state: server.State) -> bool:
        resource = state.resources.get(FUSE, server.Resource())
        return (resource.capacity, resource.allocatable) == (capacity, allocatable)

    return holds


def sockets(directory: pathlib.Path) -> set[str]:
    return {p.name for p in directory.rglob("*") if stat.S_ISSOCK(p.lstat().st_mode)}


def test_a_plugins_options_are_read_before_register_returns(root: pathlib.Path) -> None:
    async def story() -> None:
        async with (
            kubelet.Kubelet(directory=root, node="n") as stand_in,
            Toy(stand_in.plugins_directory / "toy.sock", "0", "1") as toy,
        ):
            assert await register(stand_in, "toy.sock") == OK
            assert toy.calls[:1] == ["options"]
            state = await stand_in.until(shows(2, 2))
            assert toy.calls == ["options", "list"]
            assert state.resources == {
                FUSE: server.Resource(
                    registered=1,
                    endpoint="toy.sock",
                    socket=str(toy.path),
                    streams_open=1,
                    capacity=2,
                    allocatable=2,
                    devices={"0": "Healthy", "1": "Healthy"},
                )
            }
        assert sockets(root) == set()

    play(story())


def test_the_plugin_notices_a_dropped_stream_which_is_never_dialled_again(
    root: pathlib.Path,
) -> None:
    async def story() -> None:
        async with (
            kubelet.Kubelet(directory=root, node="n", stop_grace_s=0.3, status_period_s=0.05) as it,
            Toy(it.plugins_directory / "toy.sock", "0") as toy,
        ):
            await register(it, "toy.sock")
            await it.until(shows(1, 1))
            assert await it.drop_stream(FUSE)
            await toy.ended.wait()
            assert shows(1, 0)(it.state())
            await it.until(shows(0, 0))
            assert toy.calls == ["options", "list"]
            assert not await it.drop_stream(FUSE)
            assert await register(it, "toy.sock") == OK
            await it.until(shows(1, 1))

    play(story())


def test_a_restart_wipes_sockets_and_shows_zero_until_the_plugin_is_back(
    root: pathlib.Path,
) -> None:
    async def story() -> None:
        async with (
            kubelet.Kubelet(directory=root, node="n") as stand_in,
            Toy(stand_in.plugins_directory / "toy.sock", "0", "1") as toy,
        ):
            await register(stand_in, "toy.sock")
            await stand_in.until(shows(2, 2))
            await stand_in.allocate(name="pod", resources={FUSE: 1})
            await stand_in.restart()
            await toy.ended.wait()
            state = stand_in.state()
            assert sockets(stand_in.plugins_directory) == {"kubelet.sock"}
            assert shows(0, 0)(state)
            assert (state.restarts, state.pods) == (1, ("default/pod",))
            async with Toy(stand_in.plugins_directory / "again.sock", "0", "1"):
                assert await register(stand_in, "again.sock") == OK
                await stand_in.until(shows(2, 2))
                (other,) = await stand_in.allocate(name="other", resources={FUSE: 1})
                assert other.ids == ("1",)

    play(story())


def test_a_new_process_finds_the_checkpoint_of_the_one_before(root: pathlib.Path) -> None:
    async def story() -> None:
        async with (
            kubelet.Kubelet(directory=root, node="n") as before,
            Toy(before.plugins_directory / "toy.sock", "0"),
        ):
            await register(before, "toy.sock")
            await before.until(shows(1, 1))
            await before.allocate(name="pod", resources={FUSE: 1})
        async with kubelet.Kubelet(directory=root, node="n") as after:
            assert after.state().resources == {
                FUSE: server.Resource(
                    is_stopped=True,
                    allocations=(
                        server.Allocation(
                            namespace="default", pod="pod", container="main", ids=("0",)
                        ),
                    ),
                )
            }

    play(story())


def test_registrations_can_be_switched_off(root: pathlib.Path) -> None:
    async def story() -> None:
        async with (
            kubelet.Kubelet(directory=root, node="n") as stand_in,
            Toy(stand_in.plugins_directory / "toy.sock", "0"),
        ):
            stand_in.accept_registrations(accepts=False)
            code, _ = await register(stand_in, "toy.sock")
            assert code is grpc.StatusCode.UNAVAILABLE
            stand_in.accept_registrations(accepts=True)
            assert await register(stand_in, "toy.sock") == OK

    play(story())


def test_podresources_list_the_devices_of_each_pod(root: pathlib.Path) -> None:
    async def story() -> None:
        async with (
            kubelet.Kubelet(directory=root, node="n") as stand_in,
            Toy(stand_in.plugins_directory / "toy.sock", "0", "1"),
            grpc.aio.insecure_channel(f"unix:{stand_in.podresources_socket}", OWN_POOL) as channel,
        ):
            await register(stand_in, "toy.sock")
            await stand_in.until(shows(2, 2))
            await stand_in.allocate(name="pod", resources={FUSE: 1})
            client = rpc.PodResourcesClient(channel)
            held = podres.PodResources(
                name="pod",
                namespace="default",
                containers=[
                    podres.ContainerResources(
                        name="main",
                        devices=[podres.ContainerDevices(resource_name=FUSE, device_ids=["0"])],
                    )
                ],
            )
            listed = await client.list(podres.ListPodResourcesRequest())
            assert list(listed.pod_resources) == [held]
            got = await client.get(
                podres.GetPodResourcesRequest(pod_name="pod", pod_namespace="default")
            )
            assert got.pod_resources == held
            healthy = await client.get_allocatable_resources(podres.AllocatableResourcesRequest())
            assert [list(entry.device_ids) for entry in healthy.devices] == [["0"], ["1"]]
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await client.get(podres.GetPodResourcesRequest(pod_name="x", pod_namespace="y"))
            assert error.value.code() is grpc.StatusCode.UNKNOWN
            assert error.value.details() == "pod x in namespace y not found"

    play(story())


def test_a_second_kubelet_in_the_same_directory_is_refused(root: pathlib.Path) -> None:
    async def story() -> None:
        async with kubelet.Kubelet(directory=root, node="n") as first:
            with pytest.raises(httpd.UsageError, match="another kubelet serves"):
                async with kubelet.Kubelet(directory=root, node="m"):
                    pass
            assert sockets(first.plugins_directory) == {"kubelet.sock"}

    play(story())


@contextlib.asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "muster.local.kubelet", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield running
    finally:
        if running.returncode is None:
            running.kill()
        await running.communicate()


def test_the_process_serves_its_control_surface_and_ends_cleanly(root: pathlib.Path) -> None:
    async def story() -> None:
        async with process("--node", "node-a", "--dir", str(root)) as running:
            assert running.stdout is not None
            hello = orjson.loads(await running.stdout.readline())
            assert {key: hello[key] for key in ("event", "service", "node")} == {
                "event": "listening",
                "service": "kubelet",
                "node": "node-a",
            }
            async with (
                Toy(root / "device-plugins" / "toy.sock", "0"),
                aiohttp.ClientSession(hello["http"]) as http,
                grpc.aio.insecure_channel(f"unix:{hello['socket']}", OWN_POOL) as channel,
            ):
                await rpc.RegistrationClient(channel).register(
                    dp.RegisterRequest(version="v1beta1", endpoint="toy.sock", resource_name=FUSE)
                )
                while orjson.loads(await running.stdout.readline()).get("allocatable") != 1:
                    pass
                body = {"name": "pod", "resources": {FUSE: 1}}
                allocated = await _answer(http, "POST", "/pods", body)
                assert allocated == (
                    201,
                    {
                        "allocated": [
                            {
                                "container": "main",
                                "resource": FUSE,
                                "ids": ["0"],
                                "answer": {"envs": {"TOY": f"{root}/device-plugins/toy.sock"}},
                            }
                        ]
                    },
                )
                assert await _answer(http, "POST", "/pods", body | {"name": "late"}) == (
                    409,
                    {
                        "reason": "UnexpectedAdmissionError",
                        "error": (
                            "Allocate failed due to requested number of devices unavailable for "
                            f"{FUSE}. Requested: 1, Available: 0, which is unexpected"
                        ),
                    },
                )
                assert (await _answer(http, "POST", "/pods", {"nome": "x"}))[0] == 400
                assert (await _answer(http, "DELETE", "/pods/default/pod"))[0] == 200
                assert (await _answer(http, "DELETE", "/pods/default/pod"))[0] == 404
                assert (await _answer(http, "POST", "/registration?accept=maybe"))[0] == 400
                assert (await _answer(http, "POST", "/registration?accept=false"))[0] == 200
                assert (await _answer(http, "POST", f"/drop-stream?resource={FUSE}"))[0] == 200
                assert (await _answer(http, "POST", f"/drop-stream?resource={FUSE}"))[0] == 404
                assert await _answer(http, "POST", "/restart") == (200, {"restarts": 1})
                _, state = await _answer(http, "GET", "/state")
                assert isinstance(state, dict)
                assert not state["accepts_registrations"]
            running.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(running.wait(), 30) == 0
        assert sockets(root) == set()

    play(story())


async def _answer(
    http: aiohttp.ClientSession, method: str, path: str, body: object = None
) -> tuple[int, object]:
    data = None if body is None else orjson.dumps(body)
    async with http.request(method, path, data=data) as answer:
        return answer.status, orjson.loads(await answer.read())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--node", "n"], "the following arguments are required: --dir"),
        (["--node", "n", "--dir", "/dev/null/x"], "cannot create /dev/null/x/device-plugins"),
        (["--node", "n", "--dir", "/tmp", "--http", "here"], "'here' is not host:port"),
        (["--node", "n", "--dir", "/tmp", "--stop-grace", "0"], "not a positive number"),
        (["--node", "n", "--dir", "/tmp/" + "x" * 100], "may have at most 107 bytes"),
    ],
)
def test_a_usage_error_is_one_line_and_exit_code_2(arguments: list[str], line: str) -> None:
    async def story() -> None:
        async with process(*arguments) as running:
            out, err = await running.communicate()
            assert (out, running.returncode) == (b"", 2)
            assert line in err.decode()
            assert err.count(b"\n") == 1

    play(story())
