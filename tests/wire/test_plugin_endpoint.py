"""The plugin's server on one socket, seen from outside."""

import asyncio
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc.aio
import pytest

from muster.local import kubelet as stand_in
from muster.pb import deviceplugin_pb2 as dp
from muster.pb import rpc
from muster_plugin.inventory import inventory
from muster_plugin.kubelet import allocation, registration_signals, server
from tests.worlds import plugin_process


class Nobody:
    """An observer for which all paths exist, and which expects no allocation."""

    async def missing_paths(self, paths: Sequence[str]) -> str:
        del paths
        return ""

    async def existing_paths(self, paths: Sequence[str]) -> frozenset[str]:
        return frozenset(paths)

    def on_allocated(self, resource: str, device_ids: tuple[str, ...]) -> None:
        raise AssertionError(f"unexpected allocation of {device_ids} of {resource}")

    def on_list_sent(self) -> None:
        pass


@pytest.fixture
def root() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="mu-"))
    yield path
    shutil.rmtree(path)


def served(
    path: Path, signals: list[registration_signals.Signal], figures: server.Counters | None = None
) -> server.Endpoint:
    devices = inventory.Inventory(node="n1", plugin="p")
    service = server.Service(
        resource="a.com/x",
        devices=devices,
        allocator=allocation.Allocator(devices, "a.com/x"),
        counters=figures or server.Counters(),
    )
    return server.Endpoint(path, 1, service, send=signals.append, observer=Nobody())


def test_a_probe_that_another_instance_answers_has_failed(root: Path) -> None:
    async def story() -> None:
        signals: list[registration_signals.Signal] = []
        ours, other = served(root / "a.sock", signals), served(root / "b.sock", signals)
        async with asyncio.timeout(30):
            await ours.start()
            assert await ours.probe() > 0
            await other.start()
            (root / "b.sock").rename(root / "a.sock")
            with pytest.raises(server.ProbeFailed, match=r"^another server answers on a.sock$"):
                await ours.probe()
            assert ours.is_socket_lost
            await ours.stop()
            await other.stop()
        assert signals == []

    asyncio.run(story())


def test_a_stream_that_the_kubelet_did_not_open_may_come_and_go(root: Path) -> None:
    async def story() -> None:
        signals: list[registration_signals.Signal] = []
        figures = server.Counters()
        ours = served(root / "a.sock", signals, figures)
        await ours.start()
        channels = [grpc.aio.insecure_channel(f"unix:{ours.path}") for _ in range(3)]
        async with asyncio.timeout(30):
            for channel in channels:
                stream = rpc.DevicePluginClient(channel).list_and_watch(dp.Empty())
                assert await stream.read() == dp.ListAndWatchResponse()
                assert signals == [registration_signals.StreamOpened(1)]
            for channel in reversed(channels):
                assert signals == [registration_signals.StreamOpened(1)]
                await channel.close()
            while len(signals) < 2:
                await asyncio.sleep(0)
            await ours.stop()
        assert signals == [
            registration_signals.StreamOpened(1),
            registration_signals.StreamClosed(1),
        ]
        # lists that other clients receive do not count as sent to the kubelet
        assert figures.sends == 1

    asyncio.run(story())


def test_the_reason_why_a_socket_cannot_be_made_is_reported(root: Path) -> None:
    async def story() -> None:
        ours = served(root / "none/a.sock", [])
        with pytest.raises(OSError, match=r"/none/a\.sock: No such file or directory$"):
            await ours.start()
        await ours.stop()

    asyncio.run(story())


def test_a_failure_that_changes_is_logged_again(root: Path) -> None:
    async def story() -> None:
        (root / "device-plugins").mkdir()
        file = plugin_process.written(
            root / "c.json", plugin_process.resource("a.example/x", "/dev/null")
        )
        async with plugin_process.plugin(root, file) as process:
            missing = "UNAVAILABLE: kubelet.sock is missing"
            assert (await process.said("register_failed"))["error"] == missing
            async with stand_in.Kubelet(directory=root, node="node-a") as kubelet:
                kubelet.accept_registrations(accepts=False)
                while "switched" not in (await process.said("register_failed"))["error"]:
                    pass
                kubelet.accept_registrations(accepts=True)
                await process.said("registered")
            errors = [
                lines["error"] for lines in process.log if lines["event"] == "register_failed"
            ]
            assert len(errors) == len(set(errors))

    plugin_process.run(story)
