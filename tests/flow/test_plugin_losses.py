"""Each way in which a kubelet loses a plugin: the plugin registers again and logs the reason."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from pathlib import Path

import grpc.aio
import pytest

from muster.pb import deviceplugin_pb2 as dp
from muster.pb import rpc
from tests.worlds import kubelets


async def restart(world: kubelets.World) -> None:
    await world.do("/restart")


async def drop_stream(world: kubelets.World) -> None:
    await world.do(f"/drop-stream?resource={kubelets.FUSE}")


async def remove_own_socket(world: kubelets.World) -> None:
    kubelets.own_socket(world).unlink()


async def steal_own_socket(world: kubelets.World) -> None:
    path = kubelets.own_socket(world)
    with socket.socket(socket.AF_UNIX) as thief:
        thief.bind(str(path.with_name("thief.sock")))
        path.with_name("thief.sock").rename(path)


async def replace_kubelet_socket_only(world: kubelets.World) -> None:
    """Make kubelet.sock look new, as if a kubelet had restarted without removing our socket."""
    path = world.directory / "device-plugins" / "kubelet.sock"
    path.rename(path.with_name("kept.sock"))
    path.with_name("kept.sock").rename(path)
    os.utime(path)


LOSSES = [
    ("the kubelet restarts", restart, "kubelet_socket_replaced"),
    ("the kubelet drops the stream", drop_stream, "stream_closed"),
    ("our socket is removed", remove_own_socket, "own_socket_lost"),
    ("our socket is taken over", steal_own_socket, "own_socket_lost"),
    ("kubelet.sock is another", replace_kubelet_socket_only, "kubelet_socket_replaced"),
]


def first_seen(loss: Callable[[kubelets.World], Awaitable[None]]) -> set[str]:
    """Return the other reasons that the plugin may detect first, during a longer loss."""
    return {"stream_closed", "own_socket_lost"} if loss is restart else set()


@pytest.mark.parametrize("kind", kubelets.WORLDS)
@pytest.mark.parametrize(
    ("loss", "reason"), [loss[1:] for loss in LOSSES], ids=[loss[0] for loss in LOSSES]
)
def test_the_plugin_is_registered_again_with_the_reason(
    kind: kubelets.Worlds, loss: Callable[[kubelets.World], Awaitable[None]], reason: str
) -> None:
    async def story() -> None:
        async with kind() as world, kubelets.plugin(world) as process:
            assert (await process.said("registered"))["reason"] == "start"
            await kubelets.offered(world, 1)
            before = kubelets.own_socket(world)
            await loss(world)
            async with asyncio.timeout(kubelets.BOUND_S):
                assert (await process.said("deregistered"))["reason"] in {reason, *first_seen(loss)}
                assert (await process.said("registered"))["reason"] == reason
            await kubelets.offered(world, 1)
            assert kubelets.own_socket(world) != before

    asyncio.run(story())


HARMS = [
    # on a busy machine the probe may notice first
    ("its server ends by itself", signal.SIGUSR1, {"server_ended", "probe_failed"}),
    ("no process listens on its socket, which still exists", signal.SIGUSR2, {"probe_failed"}),
]


@pytest.mark.parametrize("kind", kubelets.WORLDS)
@pytest.mark.parametrize(
    ("harm", "reasons"), [harm[1:] for harm in HARMS], ids=[harm[0] for harm in HARMS]
)
def test_losses_of_the_plugin_itself_are_detected_and_repaired(
    kind: kubelets.Worlds, harm: signal.Signals, reasons: Collection[str]
) -> None:
    async def story() -> None:
        async with kind() as world, kubelets.plugin(world, program=kubelets.SABOTAGED) as process:
            await process.said("registered")
            await process.said("listening")
            await kubelets.offered(world, 1)
            process.process.send_signal(harm)
            async with asyncio.timeout(kubelets.BOUND_S):
                reason = (await process.said("deregistered"))["reason"]
                assert reason in reasons
                assert (await process.said("registered"))["reason"] == reason
            await kubelets.offered(world, 1)

    asyncio.run(story())


@pytest.mark.parametrize("kind", kubelets.WORLDS)
def test_a_change_without_an_inotify_event_is_detected_all_the_same(kind: kubelets.Worlds) -> None:
    async def story() -> None:
        async with kind() as world, kubelets.plugin(world, program=kubelets.SABOTAGED) as process:
            await process.said("registered")
            await process.said("listening")
            await kubelets.offered(world, 1)
            process.process.send_signal(signal.SIGWINCH)
            await process.said("deaf")
            await remove_own_socket(world)
            async with asyncio.timeout(kubelets.BOUND_S):
                assert (await process.said("deregistered"))["reason"] == "own_socket_lost"
                assert (await process.said("registered"))["reason"] == "own_socket_lost"
            await kubelets.offered(world, 1)

    asyncio.run(story())


class Kubelet:
    """A minimal kubelet; if it `forgets`, it opens no stream for the first registration."""

    def __init__(self, directory: Path, *, forgets: bool = False) -> None:
        self.directory = directory
        self.node = "node-a"
        self._sockets = directory / "device-plugins"
        self._opens_from = 2 if forgets else 1
        self._channels: list[grpc.aio.Channel] = []

    async def register(
        self, request: dp.RegisterRequest, context: rpc.Context[dp.RegisterRequest, dp.Empty]
    ) -> dp.Empty:
        del context
        self._channels.append(grpc.aio.insecure_channel(f"unix:{self._sockets / request.endpoint}"))
        if len(self._channels) >= self._opens_from:
            stream = rpc.DevicePluginClient(self._channels[-1]).list_and_watch(dp.Empty())
            assert await stream.read()
        return dp.Empty()

    async def allocatable(self) -> int:
        return int(len(self._channels) >= self._opens_from)

    async def do(self, what: str) -> None:
        raise AssertionError(f"no way to inject {what}")

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[kubelets.World]:
        self._sockets.mkdir()
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((rpc.registration_handler(self),))
        server.add_insecure_port(f"unix:{self._sockets / 'kubelet.sock'}")
        await server.start()
        try:
            yield self
        finally:
            for channel in self._channels:
                await channel.close()
            await server.stop(None)


def test_a_registration_that_brings_no_stream_is_repeated() -> None:
    async def story(root: Path) -> None:
        kubelet = Kubelet(root, forgets=True)
        async with kubelet.serving() as world, kubelets.plugin(world) as process:
            async with asyncio.timeout(kubelets.BOUND_S):
                assert (await process.said("deregistered"))["reason"] == "no_stream"
                assert (await process.said("registered"))["reason"] == "no_stream"
            await kubelets.offered(world, 1)

    with tempfile.TemporaryDirectory(prefix="mu-") as root:
        asyncio.run(story(Path(root)))


def test_a_directory_of_sockets_that_is_gone_is_used_again_when_it_is_back() -> None:
    async def story(root: Path) -> None:
        async with Kubelet(root).serving() as world, kubelets.plugin(world) as process:
            await process.said("registered")
            async with asyncio.timeout(kubelets.BOUND_S):
                shutil.rmtree(root / "device-plugins")
                assert (await process.said("deregistered"))["reason"] == "own_socket_lost"
                await process.said("serve_failed")
                async with Kubelet(root).serving():
                    assert (await process.said("registered"))["reason"] in {
                        "own_socket_lost",
                        "kubelet_socket_replaced",
                    }

    with tempfile.TemporaryDirectory(prefix="mu-") as root:
        asyncio.run(story(Path(root)))


@pytest.mark.parametrize("kind", kubelets.WORLDS)
def test_the_successor_of_a_killed_plugin_repairs_everything(
    kind: kubelets.Worlds,
) -> None:
    async def story() -> None:
        async with kind() as world:
            async with kubelets.plugin(world) as process:
                await process.said("registered")
                await kubelets.offered(world, 1)
                await process.end(signal.SIGKILL)
            left = kubelets.own_socket(world)
            await kubelets.offered(world, 0)
            async with kubelets.plugin(world) as process:
                entry = await process.said("stale_socket_removed")
                assert entry["socket"] == left.name
                await process.said("registered", reason="start")
                await kubelets.offered(world, 1)
                assert kubelets.own_socket(world) != left

    asyncio.run(story())


def test_a_new_kubelets_plugin_watcher_finds_the_plugin_again() -> None:
    async def story() -> None:
        async with (
            kubelets.stand_in("--plugin-watcher") as world,
            kubelets.plugin(world, "watcher") as process,
        ):
            assert (await process.said("registered"))["reason"] == "start"
            await kubelets.offered(world, 1)
            path = kubelets.own_socket(world)
            assert path.parent.name == "plugins_registry"
            await restart(world)
            await kubelets.offered(world, 1)
            await drop_stream(world)
            async with asyncio.timeout(kubelets.BOUND_S):
                await process.said("deregistered", reason="stream_closed")
                await process.said("registered", reason="stream_closed")
            await kubelets.offered(world, 1)

    asyncio.run(story())


def test_where_register_is_refused_the_plugin_watcher_is_used() -> None:
    async def story() -> None:
        async with kubelets.stand_in("--plugin-watcher") as world:
            await world.do("/registration?accept=false")
            async with kubelets.plugin(world, "auto") as process, asyncio.timeout(kubelets.BOUND_S):
                await process.said("register_failed")
                await process.said("registered", reason="register_failed")
                assert kubelets.own_socket(world).parent.name == "plugins_registry"
                await kubelets.offered(world, 1)

    asyncio.run(story())


def test_a_registration_that_is_refused_after_a_loss_is_retried_until_it_is_accepted() -> None:
    async def story() -> None:
        async with kubelets.stand_in() as world, kubelets.plugin(world) as process:
            await process.said("registered")
            async with asyncio.timeout(kubelets.BOUND_S):
                await world.do("/registration?accept=false")
                await drop_stream(world)
                await process.said("deregistered", reason="stream_closed")
                await process.said("register_failed")
                await world.do("/registration?accept=true")
                await process.said("registered", reason="stream_closed")
            await kubelets.offered(world, 1)

    asyncio.run(story())
