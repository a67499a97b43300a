"""The watch is bounded and correct, whatever is in the kubelet's directory."""

import asyncio
import contextlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import grpc
import pytest

from muster.pb import deviceplugin_pb2 as dp
from muster_fuse.kernel import syscalls
from muster_plugin.watch import (
    checkpoint,
    expectation,
    observation,
    prober,
    processes,
    socket_files,
)
from tests.worlds import device_plugin

Answer = observation.Answer
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
SETTINGS = b"\0\0\0\4\0\0\0\0\0"
TIMEOUT_S = 0.3


@pytest.fixture
def root() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="mu-"))
    (path / "device-plugins").mkdir()
    yield path
    shutil.rmtree(path)


@contextlib.asynccontextmanager
async def serving(path: Path, serve: Serve) -> AsyncIterator[list[int]]:
    """Serve a socket; yield a list with an entry for each connection."""
    sent: list[int] = []
    connections: list[asyncio.Task[None]] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent.append(0)
        task = asyncio.current_task()
        assert task is not None
        connections.append(task)
        # asyncio would report a cancelled task as a failure of the server
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await serve(reader, writer)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            writer.close()
            await writer.wait_closed()

    server = await asyncio.start_unix_server(connected, path)
    try:
        yield sent
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections)


async def probed(
    root: Path, timeout_s: float = TIMEOUT_S, problems: list[str] | None = None
) -> observation.Probed:
    """Scan, and probe the only socket; without `problems`, there must be no problem."""
    results: list[observation.Probed] = []
    noted: list[str] = []
    watch = processes.ProcessWatch(lambda _: None)
    probing = prober.Prober(
        root, watch, on_result=results.append, on_problem=noted.append, timeout_s=timeout_s
    )
    (file,) = socket_files.scan(root).sockets
    async with asyncio.timeout(30):
        await probing.probe(file)
    watch.close()
    if problems is None:
        assert noted == []
    else:
        problems += noted
    return results[0]


def outcome(root: Path, serve: Serve) -> tuple[Answer, str]:
    async def story() -> tuple[Answer, str]:
        async with serving(root / "device-plugins/x.sock", serve) as sent:
            result = await probed(root)
            assert len(sent) <= 1
            return result.answer, result.detail

    return asyncio.run(story())


async def silent(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def garbage(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(os.urandom(4096))
    await writer.drain()


async def web(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
    await writer.drain()


async def huge(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(SETTINGS + b"\0\x40\0\0\0\0\0\0\1" + b"\0\6\0\0\0")
    for _ in range(100):
        writer.write(bytes(1_000_000))
        await writer.drain()


async def dripping(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(SETTINGS)
    while True:
        writer.write(b"\0\0\1\2\0\0\0\0\1\0")
        await writer.drain()
        await asyncio.sleep(0.01)


async def closing(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    pass


@pytest.mark.parametrize(
    ("serve", "answer", "detail"),
    [
        (silent, Answer.SILENT, "no answer to GetDevicePluginOptions within 0.3 s"),
        (dripping, Answer.SILENT, "no answer to GetDevicePluginOptions within 0.3 s"),
        (garbage, Answer.WRONG, "it does not speak HTTP/2"),
        (web, Answer.WRONG, "it does not speak HTTP/2"),
        (huge, Answer.WRONG, "it sends a message of 100663296 bytes"),
        (closing, Answer.WRONG, ""),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_socket_answers_is_bounded(
    root: Path, serve: Serve, answer: Answer, detail: str
) -> None:
    began = time.monotonic()
    got = outcome(root, serve)
    assert got[0] is answer
    assert got[1] == detail or serve is closing
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
    ],
)
def test_an_error_is_an_answer_of_a_server_that_works(root: Path, code: grpc.StatusCode) -> None:
    async def story() -> observation.Probed:
        path = root / "device-plugins/x.sock"
        plugin = device_plugin.DevicePlugin(path, "a.com/x", "1")
        plugin.options_refusal, plugin.options_code = "no", code
        async with plugin:
            return await probed(root, timeout_s=10)

    result = asyncio.run(story())
    assert (result.answer, result.detail) == (Answer.ANSWERED, "")


def test_a_method_that_hangs_is_silence_though_its_server_has_a_deadline_too(root: Path) -> None:
    async def story() -> observation.Probed:
        path = root / "device-plugins/x.sock"
        async with device_plugin.DevicePlugin(path, "a.com/x", "1") as plugin:
            plugin.options_held.clear()
            return await probed(root)

    assert asyncio.run(story()).answer is Answer.SILENT


def test_a_socket_that_may_not_be_connected_to_says_nothing(root: Path) -> None:
    async def story() -> tuple[observation.Probed, list[str]]:
        path = root / "device-plugins/x.sock"
        problems: list[str] = []
        async with serving(path, silent) as connections:
            path.chmod(0)
            # as the agent, which is root without capabilities
            syscalls.drop_capabilities()
            try:
                result = await probed(root, problems=problems)
            finally:
                syscalls.restore_capabilities()
            assert connections == []
        return result, problems

    result, problems = asyncio.run(story())
    path = root / "device-plugins/x.sock"
    assert result.answer is Answer.INCONCLUSIVE
    assert problems == [f"cannot connect to {path}: Permission denied"]


def test_a_plugin_is_asked_once_and_its_process_is_known(root: Path) -> None:
    async def story() -> tuple[observation.Probed, list[str]]:
        path = root / "device-plugins/x.sock"
        async with device_plugin.DevicePlugin(path, "a.com/x", "1") as plugin:
            plugin.options = dp.DevicePluginOptions(pre_start_required=True)
            return await probed(root, timeout_s=10), plugin.calls

    result, calls = asyncio.run(story())
    assert (result.answer, calls) == (Answer.ANSWERED, ["options"])
    assert result.process is not None
    assert result.process.pid == os.getpid()


def test_a_queue_that_nobody_empties_is_silence(root: Path) -> None:
    with contextlib.ExitStack() as stack:
        path = str(root / "device-plugins/x.sock")
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(path)
        server.listen(0)
        client = stack.enter_context(socket.socket(socket.AF_UNIX))
        client.connect(path)
        result = asyncio.run(probed(root))
    assert (result.answer, result.detail) == (
        Answer.SILENT,
        "its backlog of connections is full",
    )


def test_a_datagram_socket_is_no_plugin(root: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(root / "device-plugins/x.sock"))
        result = asyncio.run(probed(root))
    assert (result.answer, result.detail) == (Answer.WRONG, "it is not a stream socket")


def test_a_socket_that_was_replaced_is_not_asked(root: Path) -> None:
    async def story() -> observation.Probed:
        path = root / "device-plugins/x.sock"
        results: list[observation.Probed] = []
        watch = processes.ProcessWatch(lambda _: None)
        probing = prober.Prober(root, watch, on_result=results.append, on_problem=print)
        async with serving(path, silent) as sent:
            (file,) = socket_files.scan(root).sockets
            path.unlink()
            path.symlink_to(root / "elsewhere")
            await probing.probe(file)
            assert sent == []
        return results[0]

    assert asyncio.run(story()).answer is Answer.INCONCLUSIVE


def test_only_sockets_are_looked_at(root: Path) -> None:
    folder = root / "device-plugins"
    os.mkfifo(folder / "pipe.sock")
    (folder / "loop.sock").symlink_to(folder / "loop.sock")
    (folder / "folder.sock").mkdir()
    (folder / "file.sock").touch()
    with contextlib.ExitStack() as stack:
        for name in ("a\nb.sock", "kubelet.sock", "muster-a.com_x-1-1.sock", "x.sock"):
            bound = stack.enter_context(socket.socket(socket.AF_UNIX))
            bound.bind(str(folder / name))
        (folder / "link.sock").symlink_to(folder / "x.sock")
        scanned = socket_files.scan(root)
    assert [file.path for file in scanned.sockets] == ["device-plugins/x.sock"]
    assert scanned.ours == {"a.com_x"}
    assert scanned.kubelet_age_s is not None


def test_ten_thousand_dead_sockets_are_read_quickly(root: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(root / "device-plugins/0.sock"))
    for at in range(1, 10_000):
        os.link(root / "device-plugins/0.sock", root / f"device-plugins/{at}.sock")
    began = time.monotonic()
    assert len(socket_files.scan(root).sockets) == 10_000
    assert time.monotonic() - began < 5


def test_a_checkpoint_of_any_size_or_kind_is_refused_or_read(root: Path) -> None:
    path = root / "device-plugins/kubelet_internal_checkpoint"
    assert socket_files.read_checkpoint(root) is None
    path.write_bytes(b'{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{"a.com/x":["1"]}},')
    with pytest.raises(ValueError, match="truncated"):
        socket_files.read_checkpoint(root)
    os.truncate(path, 50 * 1024 * 1024)
    with pytest.raises(ValueError, match="52428800 bytes are more than 4194304"):
        socket_files.read_checkpoint(root)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="not a regular file"):
        socket_files.read_checkpoint(root)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(OSError, match="symbolic links"):
        socket_files.read_checkpoint(root)
    path.unlink()
    path.write_bytes(
        b'{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{"a.com/x":["1"]}},"Checksum":1}'
    )
    assert socket_files.read_checkpoint(root) == checkpoint.Checkpoint({"a.com/x": 1}, ())


def test_what_was_learned_is_kept_in_a_file(root: Path) -> None:
    memory = expectation.Memory(expected={"a.com/x": 8})
    assert socket_files.read_memory(root) == expectation.Memory()
    socket_files.write_memory(root, expectation.encode(memory))
    assert socket_files.read_memory(root) == memory
