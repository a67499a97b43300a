"""A plugin takes over from another on the same node: the kubelet's list is never empty for long."""

import asyncio
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.local import kubelet as stand_in
from muster_plugin.kubelet import handover
from tests.worlds import plugin_process
from tests.worlds.plugin_process import resource, until_allocatable, written

ONE, TWO = "a.example/one", "a.example/two"
WAITS = {"MUSTER_PLUGIN__HANDOVER_S": "20"}


@pytest.fixture
def root() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="mu-"))
    (path / "device-plugins").mkdir()
    yield path
    shutil.rmtree(path)


def both(root: Path) -> Path:
    resources = (resource(ONE, "/dev/null"), resource(TWO, "/dev/zero"))
    return written(root / "plugin.json", *resources)


def test_a_successor_is_listed_before_the_predecessor_ends(root: Path) -> None:
    async def story() -> None:
        file = both(root)
        async with (
            stand_in.Kubelet(directory=root, node="node-a") as kubelet,
            plugin_process.plugin(root, file) as first,
        ):
            await until_allocatable(kubelet, ONE, 1)
            await until_allocatable(kubelet, TWO, 1)
            async with plugin_process.plugin(root, file, **WAITS) as second:
                started = await second.said("handover_started")
                assert started["predecessor"] == socket.gethostname()
                await second.said("handover_finished")
                await first.said("resources_handed_over", successor=socket.gethostname())
                await until_allocatable(kubelet, ONE, 1)
                await until_allocatable(kubelet, TWO, 1)
                await first.stop()
                assert first.process.returncode == 0
                # the locks are the successor's: a third plugin that does not wait is refused
                async with plugin_process.plugin(root, file) as third:
                    code, problem = await third.ended()
                    assert (code, f"process {second.process.pid})" in problem) == (2, True)
                state = kubelet.state()
                assert [state.resources[name].streams_open for name in (ONE, TWO)] == [1, 1]

    plugin_process.run(story)


def test_a_predecessor_serves_again_when_its_successor_dies(root: Path) -> None:
    async def story() -> None:
        file = both(root)
        async with (
            stand_in.Kubelet(directory=root, node="node-a") as kubelet,
            plugin_process.plugin(root, file) as first,
        ):
            await until_allocatable(kubelet, ONE, 1)
            for _ in range(2):
                async with plugin_process.plugin(root, file, **WAITS) as second:
                    await second.said("handover_finished")
                    second.process.send_signal(signal.SIGKILL)
                    await second.process.wait()
                    await first.said("successor_lost")
                    again = {(await first.said("registered"))["resource"] for _ in range(2)}
                    assert again == {ONE, TWO}
            await until_allocatable(kubelet, ONE, 1)
            await until_allocatable(kubelet, TWO, 1)

    plugin_process.run(story)


def test_a_holder_that_does_not_listen_yet_is_asked_again(root: Path) -> None:
    async def story() -> None:
        file = both(root)
        listens, aside = root / "device-plugins/muster/device-plugin.sock", root / "aside"
        async with (
            stand_in.Kubelet(directory=root, node="node-a") as kubelet,
            plugin_process.plugin(root, file),
        ):
            await until_allocatable(kubelet, ONE, 1)
            while not listens.exists():
                await asyncio.sleep(0.01)
            listens.rename(aside)
            async with plugin_process.plugin(root, file, **WAITS) as second:
                waiting = await second.said("waiting_for_other_plugin")
                assert waiting["reason"] == (
                    "the handover request failed: [Errno 2] No such file or directory"
                )
                aside.rename(listens)
                await second.said("handover_finished")

    plugin_process.run(story)


def test_a_plugin_that_can_hand_over_to_nobody_serves_all_the_same(root: Path) -> None:
    async def story() -> None:
        (root / "device-plugins/muster/device-plugin.sock").mkdir(parents=True)
        async with (
            stand_in.Kubelet(directory=root, node="node-a") as kubelet,
            plugin_process.plugin(root, both(root)) as plugin,
        ):
            await until_allocatable(kubelet, ONE, 1)
            await plugin.said("handover_not_possible")
            await kubelet.restart()
            await until_allocatable(kubelet, ONE, 1)

    plugin_process.run(story)


def test_nobody_takes_back_what_was_taken_over(root: Path) -> None:
    async def story() -> None:
        file = both(root)
        async with (
            stand_in.Kubelet(directory=root, node="node-a") as kubelet,
            plugin_process.plugin(root, file) as first,
        ):
            await until_allocatable(kubelet, ONE, 1)
            async with plugin_process.plugin(root, file, **WAITS) as second:
                await second.said("handover_finished")
                first.process.send_signal(signal.SIGKILL)
                async with plugin_process.plugin(root, file, **WAITS) as restarted:
                    waiting = await restarted.said("waiting_for_other_plugin")
                    assert waiting["reason"] == "it took over from this pod"

    plugin_process.run(story)


class _Served:
    """A stand-in for the resources of a holder, which records the calls."""

    def __init__(self) -> None:
        self.done: asyncio.Queue[str] = asyncio.Queue()

    async def hand_over(self) -> tuple[str, ...]:
        self.done.put_nowait("hand over")
        return ("/a.sock",)

    async def end_handed_over(self) -> None:
        self.done.put_nowait("end")

    async def take_back(self) -> None:
        self.done.put_nowait("take back")


@pytest.mark.parametrize(("answer", "asks"), [(b"", 5), (b"nonsense\n", 1)])
def test_a_holder_that_ends_the_connection_is_asked_a_limited_number_of_times(
    root: Path, answer: bytes, asks: int
) -> None:
    async def story() -> None:
        connections = 0

        async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            await reader.readline()
            writer.write(answer)
            writer.close()

        path = root / "h.sock"
        async with await asyncio.start_unix_server(end, path):
            successor = handover.Handover(path, _Served(), ask_again_s=0.01)
            while successor.can_ask:
                assert await successor.request() != ""
        assert connections == asks

    plugin_process.run(story)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"", []),
        (b"nonsense\n", []),
        (b'{"type": "finish"}\n', []),
        (b'{"type": "request", "host": 7}\n', []),
        (b"x" * 300_000, []),
        (b'{"type": "request", "host": "b"}\n', ["hand over", "end", "take back"]),
        (b'{"type": "request", "host": "b"}\nnonsense\n', ["hand over", "end", "take back"]),
        (
            b'{"type": "request", "host": "b"}\n{"type": "finish"}\n',
            ["hand over", "end", "end", "take back"],
        ),
    ],
)
def test_whatever_a_successor_sends_the_resources_stay_served(
    root: Path, sent: bytes, expected: list[str]
) -> None:
    async def story() -> None:
        path = root / "h.sock"
        served = _Served()
        holder = handover.Handover(path, served)
        listening = asyncio.create_task(holder.listen())
        while not path.exists():
            await asyncio.sleep(0)
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(sent)
        writer.write_eof()
        await reader.read()
        writer.close()
        await writer.wait_closed()
        assert [await served.done.get() for _ in expected] == expected
        assert served.done.empty()
        # the next successor is answered
        successor = handover.Handover(path, served)
        async with asyncio.timeout(10):
            while await successor.request():
                await asyncio.sleep(0.01)
        assert successor.sockets == {"/a.sock"}
        successor.close()
        listening.cancel()
        await asyncio.wait([listening])

    plugin_process.run(story)
