"""Processes on the node that attack the watch of plugins, with real sockets and files."""

import asyncio
import contextlib
import os
import resource
import shutil
import socket
import tempfile
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from muster import vocabulary
from muster.pb import pluginregistration_pb2 as pr
from muster.pb import podresources_pb2 as podres
from muster_plugin.kubelet import podresources, unary_call, unary_client
from muster_plugin.watch import expectation, observation, prober, processes, socket_files

Answer = observation.Answer
LEARNED = expectation.encode(expectation.Memory(expected={"a.com/x": 1}))


@pytest.fixture
def root() -> Iterator[Path]:
    """Yield a kubelet's directory, whose path is short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="mu-"))
    (path / "device-plugins").mkdir()
    (path / "plugins_registry").mkdir()
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("file", ["watched.new", "watched.json.new", "watched.json"])
def test_what_is_learned_is_written_through_no_link(root: Path, file: str) -> None:
    memory = root / "device-plugins" / "muster"
    memory.mkdir()
    victim = root / "victim"
    victim.write_text("precious")
    (memory / file).symlink_to(victim)
    socket_files.write_memory(root, LEARNED)
    assert victim.read_text() == "precious"
    assert socket_files.read_memory(root).expected == {"a.com/x": 1}


def test_what_is_learned_is_neither_written_nor_read_in_a_linked_folder(root: Path) -> None:
    elsewhere = root / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "watched.json").write_bytes(b"precious")
    (root / "device-plugins" / "muster").symlink_to(elsewhere)
    for call in (
        lambda: socket_files.write_memory(root, LEARNED),
        lambda: socket_files.read_memory(root),
    ):
        with pytest.raises(OSError, match="Not a directory"):
            call()
    assert [path.name for path in elsewhere.iterdir()] == ["watched.json"]
    assert (elsewhere / "watched.json").read_bytes() == b"precious"


@pytest.mark.parametrize("kind", ["fifo", "directory"])
def test_a_file_of_another_kind_in_the_place_of_what_is_learned_is_an_error(
    root: Path, kind: str
) -> None:
    memory = root / "device-plugins" / "muster" / "watched.json"
    memory.parent.mkdir()
    if kind == "fifo":
        os.mkfifo(memory)
    else:
        memory.mkdir()
    with pytest.raises((OSError, ValueError), match=r"not a regular file|Is a directory"):
        socket_files.read_memory(root)


# Probes


def answer(message: bytes = b"") -> bytes:
    """Return the HTTP/2 frames of an answer: settings, headers, a message, and trailing headers."""
    frame = unary_call._frame
    body = b"\0" + len(message).to_bytes(4) + message
    return (
        frame(4, 0, 0, b"") + frame(1, 4, 1, b"\x88") + frame(0, 0, 1, body) + frame(1, 5, 1, b"")
    )


@contextlib.asynccontextmanager
async def serving(path: Path, answer: bytes) -> AsyncIterator[list[int]]:
    """Serve a socket that gives this answer; yield a list with an entry for each connection."""
    connections: list[int] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(1)
        writer.write(answer)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(connected, path):
        yield connections


async def probed(
    root: Path, meanwhile: Callable[[], object] = lambda: None
) -> list[observation.Probed]:
    """Probe every socket once; `meanwhile` is called between the scan and the probes."""
    results: list[observation.Probed] = []
    problems: list[str] = []
    ended: list[observation.ProcessEnded] = []
    watch = processes.ProcessWatch(ended.append)
    probes = prober.Prober(root, watch, on_result=results.append, on_problem=problems.append)
    files = socket_files.scan(root).sockets
    meanwhile()
    for file in files:
        await probes.probe(file)
    watch.close()
    return results


def test_a_socket_that_is_replaced_by_a_link_before_the_probe_is_not_connected_to(
    root: Path,
) -> None:
    async def story() -> None:
        path = root / "device-plugins" / "x.sock"
        async with serving(path, answer()), serving(root / "other", answer()) as connections:

            def replace() -> None:
                path.unlink()
                path.symlink_to(root / "other")

            (result,) = await probed(root, replace)
        assert (result.answer, connections) == (Answer.INCONCLUSIVE, [])

    asyncio.run(story())


@pytest.mark.parametrize(
    "endpoint", ["/tmp/none.sock", "{root}/../none.sock", "x", "{root}", "{root}/plugins/a\0b"]
)
def test_an_endpoint_that_only_the_node_can_see_says_nothing(root: Path, endpoint: str) -> None:
    async def story() -> None:
        info = pr.PluginInfo(
            type="CSIPlugin", name="csi.example", endpoint=endpoint.format(root=root)
        )
        path = root / "plugins_registry" / "x-reg.sock"
        async with serving(path, answer(info.SerializeToString())):
            (result,) = await probed(root)
        assert (result.answer, result.detail) == (Answer.ANSWERED, "")

    asyncio.run(story())


def test_an_endpoint_below_the_kubelets_directory_is_connected_to(root: Path) -> None:
    async def story() -> None:
        (root / "plugins" / "csi.example").mkdir(parents=True)
        endpoint = root / "plugins" / "csi.example" / "csi.sock"
        info = pr.PluginInfo(type="CSIPlugin", name="csi.example", endpoint=str(endpoint))
        path = root / "plugins_registry" / "x-reg.sock"
        async with serving(path, answer(info.SerializeToString())):
            async with serving(endpoint, b"") as connections:
                (result,) = await probed(root)
                assert result.answer is Answer.ANSWERED
                async with asyncio.timeout(5):
                    while not connections:
                        await asyncio.sleep(0)
            # Python 3.13 removes the socket of a closed server; a killed one leaves it
            endpoint.unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX) as killed:
                killed.bind(str(endpoint))
            (result,) = await probed(root)
        assert result.answer is Answer.REFUSED
        assert result.driver is not None
        assert result.driver.kind is vocabulary.WatchedKind.CSI_DRIVER

    asyncio.run(story())


@pytest.mark.parametrize("name", ["nvidia.com/gpu", "..", "-x", "X Y", "a.com/\u202e"])
def test_a_driver_says_a_name_that_a_driver_can_have(root: Path, name: str) -> None:
    async def story() -> None:
        info = pr.PluginInfo(type="DRAPlugin", name=name, endpoint="")
        async with serving(root / "plugins_registry" / "x.sock", answer(info.SerializeToString())):
            (result,) = await probed(root)
        assert result.answer is Answer.WRONG

    asyncio.run(story())


def test_without_free_descriptors_a_probe_says_nothing(root: Path) -> None:
    async def story() -> None:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        async with serving(root / "device-plugins" / "x.sock", answer()):
            lowest = os.open(root, os.O_RDONLY)
            os.close(lowest)
            use_up = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))  # noqa: E731
            try:
                (result,) = await probed(root, use_up)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            (again,) = await probed(root)
        assert (result.answer, again.answer) == (Answer.INCONCLUSIVE, Answer.ANSWERED)

    asyncio.run(story())


def test_a_process_that_makes_ever_new_sockets_is_looked_up_for_a_limited_number(
    root: Path,
) -> None:
    async def story() -> None:
        (root / str(os.getpid())).mkdir()
        (root / str(os.getpid()) / "stat").write_text("1 (x) T 0")
        watch = processes.ProcessWatch(lambda _: None, proc=root)
        async with serving(root / "x", b""):
            with unary_client.connected(root / "x") as connection:
                for number in range(600):
                    watch.peer(connection, f"device-plugins/{number}.sock")
        assert len(watch.halted()) == 512
        watch.close()

    asyncio.run(story())


def test_what_the_kubelet_lists_takes_part_of_the_memory_limit_only() -> None:
    ids = [f"{number:05}" for number in range(50_000)]
    devices = podres.ContainerDevices(resource_name="a.com/x", device_ids=ids)
    answer = podres.AllocatableResourcesResponse(devices=[devices])
    size = answer.ByteSize()
    tracemalloc.start()
    try:
        podresources.listing(podres.ListPodResourcesResponse(), answer)
        ratio = tracemalloc.get_traced_memory()[1] / size
    finally:
        tracemalloc.stop()
    assert ratio * podresources.MESSAGE_BYTES_MAX < 128 * 1024 * 1024
