"""Registration with the kubelet: the plugin repairs every loss, and reports its reason."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from muster.local import kubelet as stand_in
from muster.pb import deviceplugin_pb2 as dp
from muster.pb import rpc
from muster.vocabulary import RegistrationReason as Reason
from muster_plugin import node as plugin_node
from muster_plugin.kubelet import kubelet_socket, plugin_sockets
from muster_plugin.model import advertised
from tests.worlds import plugin_on_kubelet
from tests.worlds.plugin_on_kubelet import (
    FUSE,
    GPU,
    QUICK,
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


def test_a_resource_is_listed_with_its_first_message(root: Path) -> None:
    async def story() -> None:
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(fuse(root)) as (node, published),
        ):
            event = await published.registered(1)
            await until_allocatable(kubelet, 1)
            events = kubelet.state().resources[FUSE]
            assert (event.reason, event.registrations) == (Reason.START, 1)
            assert event.endpoint == events.endpoint
            assert (events.registered, events.streams_open) == (1, 1)
            device_id = advertised.device_id(str(root / "fuse"), 0)
            assert events.devices == {device_id: "Healthy"}
            (state,) = node.statuses()
            while not state.probe_ok:
                await asyncio.sleep(0.01)
                (state,) = node.statuses()
            assert (state.problem, state.streams, state.registrations) == ("", 1, 1)
            assert (state.devices, state.healthy, state.allocated) == (1, 1, 0)
            assert min(state.registered_age_s, state.last_send_age_s, state.probe_age_s) >= 0
            assert state.probe_ms > 0
            assert node.resource_plugins.kubelet_socket == kubelet_socket.identity(kubelet.socket)

    run(story)


async def restart(kubelet: stand_in.Kubelet, _: plugin_node.Node) -> None:
    await kubelet.restart()


async def drop_stream(kubelet: stand_in.Kubelet, _: plugin_node.Node) -> None:
    assert await kubelet.drop_stream(FUSE)


async def remove_socket(kubelet: stand_in.Kubelet, node: plugin_node.Node) -> None:
    socket_of(node, kubelet.plugins_directory).unlink()


async def steal_socket(kubelet: stand_in.Kubelet, node: plugin_node.Node) -> None:
    path = socket_of(node, kubelet.plugins_directory)
    thief = socket.socket(socket.AF_UNIX)
    thief.bind(str(path.with_name("thief.sock")))
    path.with_name("thief.sock").rename(path)
    thief.close()


async def end_server(_: stand_in.Kubelet, node: plugin_node.Node) -> None:
    endpoint = node.resource_plugins[FUSE]._endpoint
    assert endpoint is not None
    await endpoint._server.stop(None)


@pytest.mark.parametrize(
    ("loss", "reasons"),
    [
        (restart, {Reason.KUBELET_SOCKET_REPLACED}),
        (drop_stream, {Reason.STREAM_CLOSED}),
        (remove_socket, {Reason.OWN_SOCKET_LOST}),
        (steal_socket, {Reason.OWN_SOCKET_LOST}),
        # gRPC unlinks the socket of a server that ends: either may be seen first
        (end_server, {Reason.SERVER_ENDED, Reason.OWN_SOCKET_LOST}),
    ],
)
def test_every_loss_is_repaired_and_has_its_reason(
    root: Path,
    loss: Callable[[stand_in.Kubelet, plugin_node.Node], Awaitable[None]],
    reasons: set[Reason],
) -> None:
    async def story() -> None:
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(fuse(root)) as (node, published),
        ):
            first = await published.registered(1)
            await until_allocatable(kubelet, 1)
            await loss(kubelet, node)
            again = await published.registered(2)
            await until_allocatable(kubelet, 1)
            assert again.reason in reasons
            assert again.endpoint != first.endpoint
            assert len(published.lost()) == 1
            events = kubelet.state().resources[FUSE]
            assert (events.streams_open, events.endpoint) == (1, again.endpoint)

    run(story)


def test_a_refused_registration_is_reported_and_retried_until_it_is_accepted(root: Path) -> None:
    async def story() -> None:
        async with stand_in.Kubelet(directory=root, node="n1") as kubelet:
            kubelet.accept_registrations(accepts=False)
            async with plugin(fuse(root)) as (node, published):
                refused = "kubelet refuses registration (UNAVAILABLE: registrations are switched"
                while not (node.statuses() and node.statuses()[0].problem.startswith(refused)):
                    await asyncio.sleep(0)
                kubelet.accept_registrations(accepts=True)
                event = await published.registered(1)
                assert published.lost() == []
                assert (event.reason, event.registrations) == (Reason.REGISTER_FAILED, 1)

    run(story)


def test_a_kubelet_that_starts_later_is_registered_with(root: Path) -> None:
    async def story() -> None:
        async with plugin(fuse(root)) as (node, published):
            missing = "kubelet refuses registration (UNAVAILABLE: kubelet.sock is missing)"
            while not (node.statuses() and node.statuses()[0].problem.startswith(missing)):
                await asyncio.sleep(0)
            async with stand_in.Kubelet(directory=root, node="n1") as kubelet:
                await published.registered(1)
                await until_allocatable(kubelet, 1)
                assert published.lost() == []

    run(story)


class Forgetful:
    """A stand-in for a kubelet that opens no stream after the first registration."""

    def __init__(self, sockets: Path) -> None:
        self._sockets = sockets
        self._channels: list[grpc.aio.Channel] = []
        self.endpoints: list[str] = []

    async def register(
        self, request: dp.RegisterRequest, context: rpc.Context[dp.RegisterRequest, dp.Empty]
    ) -> dp.Empty:
        del context
        self.endpoints.append(request.endpoint)
        if len(self.endpoints) > 1:
            channel = grpc.aio.insecure_channel(f"unix:{self._sockets / request.endpoint}")
            self._channels.append(channel)
            stream = rpc.DevicePluginClient(channel).list_and_watch(dp.Empty())
            assert await stream.read()
        return dp.Empty()

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


def test_a_registration_that_brings_no_stream_is_repeated(root: Path) -> None:
    async def story() -> None:
        sockets = root / "device-plugins"
        forgetful = Forgetful(sockets)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((rpc.registration_handler(forgetful),))
        server.add_insecure_port(f"unix:{sockets / 'kubelet.sock'}")
        await server.start()
        async with plugin(fuse(root)) as (_, published):
            event = await published.registered(1)
            assert (event.reason, event.registrations) == (Reason.NO_STREAM, 2)
            assert published.lost() == [(Reason.NO_STREAM, FUSE)]
            assert len(set(forgetful.endpoints)) == 2
        await forgetful.close()
        await server.stop(None)

    run(story)


def test_the_self_probe_detects_a_loss_without_any_event(root: Path) -> None:
    async def story() -> None:
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(fuse(root), timing=QUICK, watches=False) as (node, published),
        ):
            await published.registered(1)
            socket_of(node, kubelet.plugins_directory).unlink()
            event = await published.registered(2)
            assert (event.reason, published.lost()) == (
                Reason.PROBE_FAILED,
                [(Reason.PROBE_FAILED, FUSE)],
            )

    run(story)


def test_a_resource_that_cannot_register_delays_no_other(root: Path) -> None:
    async def story() -> None:
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(fuse(root, gpus=2)) as (_, published),
        ):
            await published.registered(1, GPU)
            await published.registered(1, FUSE)
            await kubelet.drop_stream(FUSE)
            await published.registered(2, FUSE)
            assert published.lost() == [(Reason.STREAM_CLOSED, FUSE)]
            assert kubelet.state().resources[GPU].registered == 1

    run(story)


def test_a_heartbeat_is_sent_at_once_when_a_new_kubelet_refuses_the_registration(
    root: Path,
) -> None:
    async def story() -> None:
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(fuse(root)) as (node, published),
        ):
            await published.registered(1)
            kubelet.accept_registrations(accepts=False)
            await kubelet.restart()
            (state,) = node.statuses()
            while not state.problem or state.kubelet_away:
                await node.heartbeat_due.wait()
                node.heartbeat_due.clear()
                (state,) = node.statuses()
            assert "kubelet refuses registration" in state.problem

    run(story)


def test_only_dead_sockets_of_muster_plugins_are_removed_at_start(root: Path) -> None:
    sockets = root / "device-plugins"
    bound = {}
    for name in ("muster-a_b-1-1.sock", "muster-a_b-2-1.sock", "other.sock"):
        bound[name] = socket.socket(socket.AF_UNIX)
        bound[name].bind(str(sockets / name))
    bound["muster-a_b-2-1.sock"].listen()
    bound["muster-a_b-1-1.sock"].close()
    assert plugin_sockets.remove_stale([sockets]) == ["muster-a_b-1-1.sock"]
    assert sorted(path.name for path in sockets.iterdir()) == ["muster-a_b-2-1.sock", "other.sock"]
    for made in bound.values():
        made.close()
