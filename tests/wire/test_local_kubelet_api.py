import asyncio
import pathlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import grpc.aio
import msgspec
import pytest

from muster.local import httpd, kubelet, kubernetes
from muster.local.kubelet import node_status
from muster.pb import deviceplugin_pb2 as dp
from muster.pb import rpc

FUSE = "muster.dev/fuse"
NODE = "/api/v1/nodes/node-a"
PODS = "/api/v1/namespaces/default/pods"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/node-a"
PERIOD_S = 0.05


class Toy:
    """A plugin with two devices; it refuses to allocate while `refuses` is set."""

    def __init__(self) -> None:
        self.refuses = False

    async def get_device_plugin_options(
        self, _request: dp.Empty, _context: rpc.Context[dp.Empty, dp.DevicePluginOptions]
    ) -> dp.DevicePluginOptions:
        return dp.DevicePluginOptions()

    async def list_and_watch(
        self, _request: dp.Empty, _context: rpc.Context[dp.Empty, dp.ListAndWatchResponse]
    ) -> AsyncIterator[dp.ListAndWatchResponse]:
        devices = [dp.Device(ID=id_, health="Healthy") for id_ in ("0", "1")]
        yield dp.ListAndWatchResponse(devices=devices)
        await asyncio.Event().wait()

    async def get_preferred_allocation(
        self,
        _request: dp.PreferredAllocationRequest,
        _context: rpc.Context[dp.PreferredAllocationRequest, dp.PreferredAllocationResponse],
    ) -> dp.PreferredAllocationResponse:
        return dp.PreferredAllocationResponse()

    async def allocate(
        self,
        _request: dp.AllocateRequest,
        context: rpc.Context[dp.AllocateRequest, dp.AllocateResponse],
    ) -> dp.AllocateResponse:
        if self.refuses:
            await context.abort(grpc.StatusCode.INTERNAL, "out of order")
        return dp.AllocateResponse(container_responses=[dp.ContainerAllocateResponse()])

    async def pre_start_container(
        self,
        _request: dp.PreStartContainerRequest,
        _context: rpc.Context[dp.PreStartContainerRequest, dp.PreStartContainerResponse],
    ) -> dp.PreStartContainerResponse:
        return dp.PreStartContainerResponse()


class Status(msgspec.Struct):
    phase: str = ""
    reason: str = ""
    message: str = ""
    capacity: dict[str, str] = {}
    allocatable: dict[str, str] = {}
    conditions: list[dict[str, str]] = []


class Metadata(msgspec.Struct):
    labels: dict[str, str] = {}


class Object(msgspec.Struct):
    metadata: Metadata = msgspec.field(default_factory=Metadata)
    status: Status = msgspec.field(default_factory=Status)
    spec: dict[str, object] = {}

    @property
    def fuse(self) -> tuple[str | None, str | None]:
        return self.status.capacity.get(FUSE), self.status.allocatable.get(FUSE)


@pytest.fixture
def root() -> Iterator[pathlib.Path]:
    directory = pathlib.Path(tempfile.mkdtemp(prefix="mu-"))
    yield directory
    shutil.rmtree(directory)


Scene = Callable[[kubelet.Kubelet, node_status.Api, Toy], Awaitable[None]]


def play(root: pathlib.Path, scene: Scene) -> None:
    """Run a scene with an API, a kubelet of node-a, and a plugin that has registered."""

    async def story() -> None:
        async with asyncio.timeout(100), kubernetes.KubernetesApi() as server:
            api = node_status.Api(server.url)
            try:
                async with kubelet.Kubelet(
                    directory=root, node="node-a", api=server.url, status_period_s=PERIOD_S
                ) as stand_in:
                    await _with_plugin(stand_in, api, scene)
            finally:
                await api.close()

    asyncio.run(story())


async def _with_plugin(stand_in: kubelet.Kubelet, api: node_status.Api, scene: Scene) -> None:
    toy = Toy()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([rpc.device_plugin_handler(toy)])
    server.add_insecure_port(f"unix:{stand_in.plugins_directory}/toy.sock")
    await server.start()
    request = dp.RegisterRequest(version="v1beta1", endpoint="toy.sock", resource_name=FUSE)
    try:
        async with grpc.aio.insecure_channel(f"unix:{stand_in.socket}") as channel:
            await rpc.RegistrationClient(channel).register(request)
        await scene(stand_in, api, toy)
    finally:
        await server.stop(None)


async def until(
    api: node_status.Api, path: str, holds: Callable[[Object], bool], *, code: int = 200
) -> Object:
    """Read an object again and again until it is as expected; the scene's limit ends it."""
    while True:
        value, raw = await api.send("GET", path)
        if value == code:
            read = msgspec.convert(raw, Object)
            if code != 200 or holds(read):
                return read
        await asyncio.sleep(PERIOD_S / 5)


def pod(name: str, count: str) -> dict[str, object]:
    container = {"name": "c", "image": "i", "resources": {"limits": {FUSE: count, "cpu": "500m"}}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"nodeName": "node-a", "containers": [container]},
    }


def running(pod: Object) -> bool:
    return pod.status.phase == "Running"


def test_the_node_shows_what_the_plugins_advertise(root: pathlib.Path) -> None:
    async def scene(stand_in: kubelet.Kubelet, api: node_status.Api, _toy: Toy) -> None:
        node = await until(api, NODE, lambda node: node.fuse == ("2", "2"))
        assert node.metadata.labels["kubernetes.io/hostname"] == "node-a"
        assert [(c["type"], c["status"]) for c in node.status.conditions] == [("Ready", "True")]
        assert await stand_in.drop_stream(FUSE)
        await until(api, NODE, lambda node: node.fuse == ("2", "0"))
        lease = await until(api, LEASE, lambda _: True)
        assert lease.spec["holderIdentity"] == "node-a"

    play(root, scene)


def test_conditions_of_others_survive_a_status_update(root: pathlib.Path) -> None:
    async def scene(_stand_in: kubelet.Kubelet, api: node_status.Api, _toy: Toy) -> None:
        await until(api, NODE, lambda node: node.fuse == ("2", "2"))
        foreign = {"status": {"conditions": [{"type": "DevicesReady", "status": "True"}]}}
        await api.send("PATCH", f"{NODE}/status", foreign, kind=node_status.STRATEGIC_PATCH)
        away = {"status": {"capacity": {FUSE: "7"}}}
        await api.send("PATCH", f"{NODE}/status", away, kind=node_status.MERGE_PATCH)
        node = await until(api, NODE, lambda node: node.fuse == ("2", "2"))
        assert {c["type"] for c in node.status.conditions} == {"Ready", "DevicesReady"}

    play(root, scene)


def test_a_pod_gets_its_devices_runs_and_frees_them_when_deleted(root: pathlib.Path) -> None:
    async def scene(stand_in: kubelet.Kubelet, api: node_status.Api, _toy: Toy) -> None:
        await stand_in.until(lambda state: bool(state.resources[FUSE].devices))
        await api.send("POST", PODS, pod("one", "2"))
        await until(api, f"{PODS}/one", running)
        (held,) = stand_in.state().resources[FUSE].allocations
        assert (held.namespace, held.pod, held.container, held.ids) == (
            "default",
            "one",
            "c",
            ("0", "1"),
        )
        await api.send("DELETE", f"{PODS}/one", {"gracePeriodSeconds": 0})
        await stand_in.until(lambda state: state.resources[FUSE].allocations == ())
        await api.send("POST", PODS, pod("two", "1"))
        await until(api, f"{PODS}/two", running)

    play(root, scene)


def test_a_refused_pod_fails_with_the_plugins_text_and_frees_its_devices(
    root: pathlib.Path,
) -> None:
    async def scene(stand_in: kubelet.Kubelet, api: node_status.Api, toy: Toy) -> None:
        await stand_in.until(lambda state: bool(state.resources[FUSE].devices))
        toy.refuses = True
        await api.send("POST", PODS, pod("one", "2"))
        failed = await until(api, f"{PODS}/one", lambda pod: pod.status.phase == "Failed")
        assert (failed.status.reason, failed.status.message) == (
            "UnexpectedAdmissionError",
            (
                "Pod was rejected: Allocate failed due to "
                "rpc error: code = Internal desc = out of order, which is unexpected"
            ),
        )
        toy.refuses = False
        await api.send("POST", PODS, pod("two", "2"))
        await until(api, f"{PODS}/two", running)

    play(root, scene)


def test_pods_keep_running_over_a_restart_and_deletions_meanwhile_are_noticed(
    root: pathlib.Path,
) -> None:
    async def scene(stand_in: kubelet.Kubelet, api: node_status.Api, _toy: Toy) -> None:
        await stand_in.until(lambda state: bool(state.resources[FUSE].devices))
        await api.send("POST", PODS, pod("one", "1"))
        await until(api, f"{PODS}/one", running)
        await stand_in.restart()
        assert stand_in.state().pods == ("default/one",)
        await until(api, NODE, lambda node: node.fuse == ("0", "0"))
        assert running(await until(api, f"{PODS}/one", lambda _: True))
        await api.send("DELETE", f"{PODS}/one", {"gracePeriodSeconds": 0})
        await stand_in.until(lambda state: state.pods == ())

    play(root, scene)


def test_an_unavailable_api_is_logged_once_and_never_fatal(root: pathlib.Path) -> None:
    async def story() -> None:
        logged: asyncio.Queue[str] = asyncio.Queue()
        async with kubernetes.KubernetesApi() as gone:
            url = gone.url
        async with (
            asyncio.timeout(100),
            kubelet.Kubelet(
                directory=root,
                node="node-a",
                api=url,
                status_period_s=PERIOD_S,
                log=lambda event, **_: logged.put_nowait(event),
            ),
        ):
            away = {await logged.get(), await logged.get()}
            assert away == {"pods not followed", "node status not written"}
            address = httpd.address(url.removeprefix("http://"))
            async with kubernetes.KubernetesApi(http=address):
                back = {await logged.get(), await logged.get()}
                assert back == {"pods followed again", "node status written again"}

    asyncio.run(story())
