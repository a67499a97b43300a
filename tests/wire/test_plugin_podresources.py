"""The poller of the podresources socket: answers, errors, and no answer."""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NoReturn

import grpc
import grpc.aio
import pytest

from muster.pb import podresources_pb2 as podres
from muster.pb import rpc
from muster_plugin.kubelet import podresources

HELD = podresources.Listing(holders={("a.com/x", "0"): "default/pod"}, allocatable={})


class Kubelet:
    """A stand-in for the podresources service of a kubelet."""

    def __init__(self) -> None:
        self.refuses: grpc.StatusCode | None = None
        self.refusals = 0
        self.knows_allocatable = True

    async def list(
        self,
        request: podres.ListPodResourcesRequest,
        context: rpc.Context[podres.ListPodResourcesRequest, podres.ListPodResourcesResponse],
    ) -> podres.ListPodResourcesResponse:
        del request
        if self.refuses is not None:
            self.refusals += 1
            await context.abort(self.refuses, "no")
        devices = podres.ContainerDevices(resource_name="a.com/x", device_ids=["0"])
        container = podres.ContainerResources(name="main", devices=[devices])
        pod = podres.PodResources(name="pod", namespace="default", containers=[container])
        return podres.ListPodResourcesResponse(pod_resources=[pod])

    async def get_allocatable_resources(
        self,
        request: podres.AllocatableResourcesRequest,
        context: rpc.Context[
            podres.AllocatableResourcesRequest, podres.AllocatableResourcesResponse
        ],
    ) -> podres.AllocatableResourcesResponse:
        del request
        if not self.knows_allocatable:
            # pkg/kubelet/apis/podresources/server_v1.go, 1.22
            text = "Pod Resources API GetAllocatableResources disabled"
            await context.abort(grpc.StatusCode.UNKNOWN, text)
        return podres.AllocatableResourcesResponse()

    async def get(
        self,
        request: podres.GetPodResourcesRequest,
        context: rpc.Context[podres.GetPodResourcesRequest, podres.GetPodResourcesResponse],
    ) -> NoReturn:
        raise AssertionError(f"unexpected Get of one pod: {request} {context}")


@pytest.fixture
def socket() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="mu-"))
    yield folder / "kubelet.sock"
    shutil.rmtree(folder)


@contextlib.asynccontextmanager
async def serving(kubelet: Kubelet, socket: Path) -> AsyncIterator[None]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((rpc.pod_resources_handler(kubelet),))
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    yield
    await server.stop(None)


def test_a_kubelet_without_allocatable_resources_still_lists_pods(
    socket: Path,
) -> None:
    async def story() -> podresources.Listing:
        kubelet = Kubelet()
        kubelet.knows_allocatable = False
        async with serving(kubelet, socket):
            return await podresources.query(socket)

    assert asyncio.run(story()) == podresources.Listing(holders=HELD.holders, allocatable=None)


def test_an_answer_stays_valid_while_the_kubelet_is_busy_but_not_for_ever(socket: Path) -> None:
    async def story() -> list[podresources.Listing | None]:
        listings: list[podresources.Listing | None] = []
        turned = asyncio.Event()

        async def heard(listing: podresources.Listing | None) -> None:
            if not listings or listings[-1] != listing:
                listings.append(listing)
                turned.set()

        async def turn() -> None:
            await turned.wait()
            turned.clear()

        kubelet = Kubelet()
        async with asyncio.timeout(100), serving(kubelet, socket):
            pods = podresources.PodResourcesPoller(socket, heard)
            following = asyncio.create_task(pods.run(period_s=0.02))
            await turn()
            kubelet.refuses = grpc.StatusCode.RESOURCE_EXHAUSTED
            await turn()
            assert kubelet.refusals >= 3
            kubelet.refuses = None
            await turn()
            kubelet.refuses = grpc.StatusCode.INTERNAL
            await turn()
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        return listings

    assert asyncio.run(story()) == [HELD, None, HELD, None]


def test_without_the_socket_nothing_is_known(socket: Path) -> None:
    async def story() -> None:
        heard: asyncio.Queue[podresources.Listing | None] = asyncio.Queue()
        pods = podresources.PodResourcesPoller(socket, heard.put)
        following = asyncio.create_task(pods.run(period_s=60))
        async with asyncio.timeout(30):
            assert await heard.get() is None
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(story())
