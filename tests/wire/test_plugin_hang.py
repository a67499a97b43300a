"""A file system that hangs, as NFS does without its server, affects only its own devices.

The tests use one in user space that never answers, and are skipped where it cannot be mounted.
"""

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
import orjson
import pytest

from muster import blocking
from muster.local import kubelet as stand_in
from muster.pb import deviceplugin_pb2 as dp
from muster.pb import rpc
from muster_plugin.config import resources
from muster_plugin.discovery import devfs, host_scanner, inotify

# answers FUSE_INIT, and nothing after it (Linux, include/uapi/linux/fuse.h)
SERVER: Final = """
import ctypes, os, struct, sys
fuse = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"hang", sys.argv[1].encode(), b"fuse", 6, options):
    sys.exit(os.strerror(ctypes.get_errno()))
unique = struct.unpack_from("<IIQ", os.read(fuse, 1 << 17))[2]
body = struct.pack("<IIIIHHIIHH", 7, 31, 65536, 0, 12, 10, 65536, 1, 0, 0).ljust(64, bytes(1))
os.write(fuse, struct.pack("<IiQ", 16 + len(body), 0, unique) + body)
print("mounted", flush=True)
sys.stdin.read()
"""
DETACH: Final = 2
"""Linux, MNT_DETACH in include/linux/fs.h."""


@contextlib.contextmanager
def hung(path: Path) -> Iterator[None]:
    """Mount a file system that never answers on a directory."""
    pipe = subprocess.PIPE
    command = (sys.executable, "-c", SERVER, str(path))
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as server:
        try:
            assert server.stdout is not None
            if server.stdout.readline() != b"mounted\n":
                pytest.skip("a file system in user space cannot be mounted here")
            yield
        finally:
            server.kill()
            ctypes.CDLL(None).umount2(os.fsencode(path), DETACH)


@pytest.fixture
def root() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="mu-"))
    (path / "device-plugins").mkdir()
    (path / "mnt").mkdir()
    (path / "mnt/lib").write_text("")
    yield path
    shutil.rmtree(path)


class Process:
    """The plugin as a process, with its log."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def said(self, event: str, **facts: object) -> dict[str, object]:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            said: dict[str, object] = orjson.loads(line)
            if said.items() >= {"event": event, **facts}.items():
                return said
        assert self.process.stderr is not None
        raise AssertionError(f"ended without {event}: {await self.process.stderr.read()!r}")


def written(root: Path, **more: object) -> Path:
    groups = {"null": "/dev/null", "zero": "/dev/zero"}
    resources = [
        {"name": f"a.example/{name}", "groups": [{"devices": [{"path": path}]}]}
        for name, path in groups.items()
    ]
    mount = {"path": str(root / "mnt/lib"), "type": "Mount"}
    library = {"name": "a.example/lib", "preStart": True, "groups": [{"devices": [mount]}]}
    configuration = {
        "node": "node-a",
        "bus": {"url": "nats://127.0.0.1:1"},
        "kubelet": {"directory": str(root)},
        "resources": [resources[0], library],
    }
    if more:
        configuration["resources"] = [*resources, library]
    file = root / "plugin.json"
    file.write_bytes(orjson.dumps(configuration))
    return file


@contextlib.asynccontextmanager
async def plugin(root: Path) -> AsyncIterator[Process]:
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "muster_plugin", "--config", str(written(root)))
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    try:
        yield Process(process)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            _, errors = await process.communicate()
        assert (process.returncode, errors) == (0, b"")
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(100):
            await story()

    asyncio.run(limited())


async def until_allocatable(kubelet: stand_in.Kubelet, name: str, count: int) -> None:
    await kubelet.until(
        lambda state: name in state.resources and state.resources[name].allocatable == count
    )


async def code_of(call: Awaitable[object]) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_a_mount_that_hangs_at_the_start_hides_only_its_own_devices(root: Path) -> None:
    async def story() -> None:
        with hung(root / "mnt"):
            async with (
                stand_in.Kubelet(directory=root, node="node-a") as kubelet,
                plugin(root) as process,
            ):
                said = await process.said("device_problem_detected")
                lib = root / "mnt/lib"
                assert said["problem"] == f"{lib}: the scan hangs; the last result is used"
                await until_allocatable(kubelet, "a.example/null", 1)
                await until_allocatable(kubelet, "a.example/lib", 0)

    run(story)


def test_a_mount_that_begins_to_hang_fails_only_its_own_allocations_in_time(root: Path) -> None:
    async def story() -> None:
        async with (
            stand_in.Kubelet(directory=root, node="node-a") as kubelet,
            plugin(root) as process,
        ):
            await until_allocatable(kubelet, "a.example/lib", 1)
            await until_allocatable(kubelet, "a.example/null", 1)
            state = kubelet.state().resources["a.example/lib"]
            (device_id,) = state.devices
            path = kubelet.plugins_directory / str(state.endpoint)
            with hung(root / "mnt"):
                async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
                    client = rpc.DevicePluginClient(channel)
                    container = dp.ContainerAllocateRequest(devices_ids=[device_id])
                    calls = (
                        client.allocate(dp.AllocateRequest(container_requests=[container])),
                        client.pre_start_container(
                            dp.PreStartContainerRequest(devices_ids=[device_id])
                        ),
                    )
                    late = grpc.StatusCode.DEADLINE_EXCEEDED
                    assert [await code_of(call) for call in calls] == [late, late]
                (allocated,) = await kubelet.allocate(name="pod", resources={"a.example/null": 1})
                assert [device.host_path for device in allocated.answer.devices] == ["/dev/null"]
                written(root, zero=True)
                await process.said("configuration_applied", added=["a.example/zero"])
                await until_allocatable(kubelet, "a.example/zero", 1)
                assert kubelet.state().resources["a.example/lib"].allocatable == 1

    run(story)


def test_while_a_look_hangs_the_last_answer_stands_and_is_not_waited_for_again() -> None:
    async def story() -> None:
        look, release = blocking.Latest(0), threading.Event()

        def hang() -> int:
            assert release.wait(20)
            return 2

        assert await look.refresh(lambda: 1, timeout_s=5) == 1
        assert (await look.refresh(hang, timeout_s=0.05), look.is_hanging) == (1, True)
        async with asyncio.timeout(30):
            assert (await look.refresh(lambda: 3, timeout_s=60), look.is_hanging) == (1, True)
        release.set()
        while (await look.refresh(lambda: 3, timeout_s=5)) != 3:
            await asyncio.sleep(0)
        assert not look.is_hanging

    asyncio.run(story())


def test_a_device_that_appears_during_a_late_scan_is_found_soon_after_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else changes afterwards, so no event of inotify causes another scan."""
    entries = [resources.Entry(path=f"{root}/hot*")]
    release, scan = threading.Event(), devfs.scan

    def late(wanted: Iterable[resources.Entry]) -> devfs.Scan:
        release.wait(20)
        return scan(wanted)

    async def story() -> None:
        scanner = host_scanner.HostScanner()
        scans = 0
        async with scanner.scan_times(list) as times, asyncio.timeout(10):
            async for _ in times:
                scans += 1
                if (await scanner.scan(entries)).nodes:
                    break
                if scans == 2:
                    monkeypatch.setattr(host_scanner, "_ELSEWHERE_TIMEOUT_S", 0.05)
                    monkeypatch.setattr(devfs, "scan", late)
                    (root / "hot0").symlink_to("/dev/zero")
                if scans == 3:
                    monkeypatch.setattr(devfs, "scan", scan)
                    release.set()

    run(story)


def test_directories_that_come_and_go_do_not_exceed_the_share(tmp_path: Path) -> None:
    """A directory that is watched for the first time is scanned at once, but within the budget."""

    async def story() -> int:
        scans = 0
        folder = tmp_path / "0"
        folder.mkdir()
        times = inotify.scan_times(lambda: [folder], period_s=30, share=0.01)
        with contextlib.suppress(TimeoutError):
            async with contextlib.aclosing(times), asyncio.timeout(4):
                async for _ in times:
                    scans += 1
                    if scans == 15:
                        break
                    folder.rmdir()
                    folder = tmp_path / str(scans)
                    folder.mkdir()
                    began = time.process_time()
                    while time.process_time() - began < 0.1:
                        pass
        return scans

    # after half a second of work, the next pause is longer than the test
    assert asyncio.run(story()) < 15
