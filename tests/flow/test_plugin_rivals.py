"""Another plugin registers our resource: ours takes it back once, and then waits."""

import asyncio
import contextlib
import functools
import urllib.error
import urllib.request
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from muster.pb import deviceplugin_pb2 as dp
from muster.pb import rpc
from tests.worlds import device_plugin, kubelets

WORLDS = [
    *kubelets.WORLDS,
    pytest.param(functools.partial(kubelets.stand_in, "--version", "1.34"), id="stand-in-1.34"),
]


@contextlib.asynccontextmanager
async def rival(world: kubelets.World) -> AsyncIterator[device_plugin.DevicePlugin]:
    """Serve another plugin with two devices; yield it."""
    path = world.directory / "device-plugins" / "rival.sock"
    async with device_plugin.DevicePlugin(path, kubelets.FUSE, "x", "y") as plugin:
        yield plugin


async def register(world: kubelets.World, plugin: device_plugin.DevicePlugin) -> None:
    """Register the other plugin, and wait until the kubelet has opened its stream."""
    streams = len(plugin.streams)
    path = world.directory / "device-plugins" / "kubelet.sock"
    request = dp.RegisterRequest(
        version="v1beta1", endpoint=plugin.path.name, resource_name=kubelets.FUSE
    )
    async with grpc.aio.insecure_channel(f"unix:{path}", options=device_plugin.OWN_POOL) as channel:
        await rpc.RegistrationClient(channel).register(request)
    async with asyncio.timeout(kubelets.BOUND_S):
        while len(plugin.streams) == streams:
            await asyncio.sleep(0.02)


async def refusal(url: str) -> str:
    """Return the text of a failed readiness probe."""

    def ask() -> str:
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(url, timeout=10)  # noqa: S310  # ours
        with refused.value as answer:
            return answer.read().decode()

    return await asyncio.to_thread(ask)


@pytest.mark.parametrize("kind", WORLDS)
def test_a_resource_that_another_plugin_registered_and_left_is_registered_again(
    kind: kubelets.Worlds,
) -> None:
    async def story() -> None:
        async with kind() as world, kubelets.plugin(world) as process:
            assert (await process.said("registered"))["reason"] == "start"
            await kubelets.offered(world, 1)
            async with rival(world) as other:
                await register(world, other)
            async with asyncio.timeout(kubelets.BOUND_S):
                assert (await process.said("deregistered"))["reason"] in {
                    "displaced",
                    # up to 1.36, a kubelet may end our stream when the other plugin's ends
                    "stream_closed",
                }
                await process.said("registered")
            await kubelets.offered(world, 1)

    asyncio.run(story())


@pytest.mark.parametrize("kind", WORLDS)
def test_a_resource_is_taken_back_once_and_then_when_the_other_plugin_has_gone(
    kind: kubelets.Worlds,
) -> None:
    async def story() -> None:
        async with kind() as world, kubelets.plugin(world) as process:
            await process.said("registered")
            readyz = f"{(await process.said('listening'))['http']}/readyz"
            await kubelets.offered(world, 1)
            async with rival(world) as other:
                await register(world, other)
                async with asyncio.timeout(kubelets.BOUND_S):
                    lost = await process.said("deregistered")
                    assert lost["reason"] == "displaced"
                    assert "the kubelet lists x, y, which the plugin does not" in lost["detail"]
                    assert (await process.said("registered"))["reason"] == "displaced"
                await kubelets.offered(world, 1)
                async with rival_again(world) as defended:
                    await register(world, defended)
                    async with asyncio.timeout(kubelets.BOUND_S):
                        assert (await process.said("deregistered"))["reason"] == "displaced"
                    await kubelets.offered(world, 2)
                    assert "another plugin registered it (" in await refusal(readyz)
                left_at = asyncio.get_running_loop().time()
                async with asyncio.timeout(kubelets.BOUND_S):
                    assert (await process.said("registered"))["reason"] == "displaced"
                assert asyncio.get_running_loop().time() - left_at < 5
                await kubelets.offered(world, 1)

    asyncio.run(story())


@contextlib.asynccontextmanager
async def rival_again(world: kubelets.World) -> AsyncIterator[device_plugin.DevicePlugin]:
    """Serve the other plugin on a new socket, as after its restart; yield it."""
    path = world.directory / "device-plugins" / "rival-2.sock"
    async with device_plugin.DevicePlugin(path, kubelets.FUSE, "x", "y") as plugin:
        yield plugin
