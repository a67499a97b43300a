"""One story for each way in which a kubelet loses a plugin: all heal, and each says its reason.

The plugin is a process, and so is the kubelet: the stand-in, or with `-m kubelet` a real one, which
MUSTER_KUBELET_DIR and KUBECONFIG name (docs/real-kubelet.md).
"""

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import orjson
import pytest

FUSE = "muster.example/fuse"
BOUND_S = 25
"""A real kubelet tells the API of a change with its next status, every 10 s."""


class Program:
    """A process that logs JSON lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def said(self, event: str, **facts: object) -> dict[str, Any]:
        """Read the log until this event with these facts."""
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            said: dict[str, Any] = orjson.loads(line)
            if said.items() >= {"event": event, **facts}.items():
                return said
        raise AssertionError(f"ended without {event}")

    async def end(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        await self.process.communicate()


@contextlib.asynccontextmanager
async def running(module: str, *arguments: str) -> AsyncIterator[Program]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments), stdout=asyncio.subprocess.PIPE
    )
    try:
        yield Program(process)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


class World(Protocol):
    """A kubelet, and what can be done to it."""

    directory: Path
    node: str

    async def allocatable(self) -> int:
        """How many devices the node offers."""

    async def do(self, what: str) -> None:
        """Do to the kubelet what happens to kubelets; skips what this one cannot suffer."""


class StandIn:
    """The stand-in, told over HTTP."""

    def __init__(self, directory: Path, http: str) -> None:
        self.directory = directory
        self.node = "node-a"
        self._http = http

    async def allocatable(self) -> int:
        state = orjson.loads(await asyncio.to_thread(self._call, "GET", "/state"))
        return int(state["resources"].get(FUSE, {}).get("allocatable", 0))

    async def do(self, what: str) -> None:
        await asyncio.to_thread(self._call, "POST", what)

    def _call(self, method: str, path: str) -> bytes:
        request = urllib.request.Request(self._http + path, method=method)  # noqa: S310  # ours
        with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310  # ours
            read: bytes = answer.read()
            return read


class Real:
    """A real kubelet; `kubectl` shows what its node offers, and a command of yours restarts it."""

    def __init__(self, directory: Path, node: str) -> None:
        self.directory = directory
        self.node = node

    async def allocatable(self) -> int:
        found = orjson.loads(await output("kubectl", "get", "node", self.node, "-o", "json"))
        return int(found["status"]["allocatable"].get(FUSE, "0"))

    async def do(self, what: str) -> None:
        restart = os.environ.get("MUSTER_KUBELET_RESTART", "")
        if what != "/restart" or not restart:
            pytest.skip(f"{what} cannot be done to this kubelet")
        await output(*shlex.split(restart))


async def output(*command: str) -> bytes:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert process.returncode == 0, command
    return out


@contextlib.asynccontextmanager
async def stand_in(*more: str) -> AsyncIterator[World]:
    root = Path(tempfile.mkdtemp(prefix="mu-"))
    try:
        arguments = ("--node", "node-a", "--dir", str(root), *more)
        async with running("muster.local.kubelet", *arguments) as kubelet:
            yield StandIn(root, (await kubelet.said("listening"))["http"])
    finally:
        shutil.rmtree(root)


@contextlib.asynccontextmanager
async def real() -> AsyncIterator[World]:
    directory = os.environ.get("MUSTER_KUBELET_DIR", "")
    if not directory or "KUBECONFIG" not in os.environ:
        pytest.skip("no real kubelet: set MUSTER_KUBELET_DIR and KUBECONFIG (docs/real-kubelet.md)")
    nodes = orjson.loads(await output("kubectl", "get", "nodes", "-o", "json"))["items"]
    name = os.environ.get("MUSTER_KUBELET_NODE", nodes[0]["metadata"]["name"])
    yield Real(Path(directory), name)


@contextlib.asynccontextmanager
async def plugin(world: World, registration: str = "register") -> AsyncIterator[Program]:
    file = Path(tempfile.mkdtemp(prefix="mu-")) / "plugin.json"
    groups = [{"devices": [{"path": "/dev/null"}]}]
    resource = {"name": FUSE, "groups": groups, "registration": registration}
    told = {
        "node": world.node,
        "bus": {"url": "nats://127.0.0.1:1"},
        "kubelet": {"directory": str(world.directory)},
        "resources": [resource],
    }
    file.write_bytes(orjson.dumps(told))
    try:
        async with running("muster_plugin", "--config", str(file)) as process:
            yield process
    finally:
        shutil.rmtree(file.parent)


def own_socket(world: World) -> Path:
    (path,) = world.directory.glob("*/muster-muster.example_fuse-*.sock")
    return path


async def offered(world: World, count: int) -> None:
    async with asyncio.timeout(BOUND_S):
        while await world.allocatable() != count:
            await asyncio.sleep(0.1)


async def restart(world: World) -> None:
    await world.do("/restart")


async def drop_stream(world: World) -> None:
    await world.do(f"/drop-stream?resource={FUSE}")


async def remove_own_socket(world: World) -> None:
    own_socket(world).unlink()


async def steal_own_socket(world: World) -> None:
    path = own_socket(world)
    with socket.socket(socket.AF_UNIX) as thief:
        thief.bind(str(path.with_name("thief.sock")))
        path.with_name("thief.sock").rename(path)


async def replace_kubelet_socket_only(world: World) -> None:
    """Do what a kubelet would that forgets us and leaves our socket: the file alone is new."""
    if isinstance(world, Real):
        pytest.skip("the socket of a real kubelet is not ours to replace")
    path = world.directory / "device-plugins" / "kubelet.sock"
    path.rename(path.with_name("kept.sock"))
    path.with_name("kept.sock").rename(path)
    os.utime(path)


async def refuse_for_a_while(world: World) -> None:
    await world.do("/registration?accept=false")
    await world.do(f"/drop-stream?resource={FUSE}")
    await asyncio.sleep(1.5)
    await world.do("/registration?accept=true")


LOSSES = [
    ("the kubelet restarts", restart, {"kubelet_socket_replaced"}),
    ("the kubelet drops the stream", drop_stream, {"stream_closed"}),
    ("our socket is removed", remove_own_socket, {"own_socket_lost"}),
    ("our socket is taken over", steal_own_socket, {"own_socket_lost"}),
    ("kubelet.sock is another", replace_kubelet_socket_only, {"kubelet_socket_replaced"}),
    ("the kubelet refuses for a while", refuse_for_a_while, {"stream_closed", "register_failed"}),
]
WORLDS = [
    pytest.param(stand_in, id="stand-in"),
    pytest.param(real, id="real", marks=[pytest.mark.kubelet, pytest.mark.timeout(180)]),
]
Worlds = Callable[[], contextlib.AbstractAsyncContextManager[World]]


@pytest.mark.parametrize("worlds", WORLDS)
@pytest.mark.parametrize(
    ("loss", "reasons"), [loss[1:] for loss in LOSSES], ids=[loss[0] for loss in LOSSES]
)
def test_the_plugin_is_registered_again_and_says_why(
    worlds: Worlds, loss: Callable[[World], Awaitable[None]], reasons: set[str]
) -> None:
    async def story() -> None:
        async with worlds() as world, plugin(world) as process:
            assert (await process.said("registered"))["reason"] == "start"
            await offered(world, 1)
            before = own_socket(world)
            await loss(world)
            async with asyncio.timeout(BOUND_S):
                assert (await process.said("deregistered"))["reason"] in reasons
                assert (await process.said("registered"))["reason"] in reasons
            await offered(world, 1)
            assert own_socket(world) != before

    asyncio.run(story())


@pytest.mark.parametrize("worlds", WORLDS)
def test_a_killed_plugin_leaves_nothing_that_its_successor_does_not_mend(worlds: Worlds) -> None:
    async def story() -> None:
        async with worlds() as world:
            async with plugin(world) as process:
                await process.said("registered")
                await offered(world, 1)
                await process.end(signal.SIGKILL)
            left = own_socket(world)
            await offered(world, 0)
            async with plugin(world) as process:
                said = await process.said("stale_socket_removed")
                assert said["socket"] == left.name
                await process.said("registered", reason="start")
                await offered(world, 1)
                assert own_socket(world) != left

    asyncio.run(story())


def test_a_plugin_that_is_found_is_found_again_by_a_new_kubelet() -> None:
    async def story() -> None:
        async with stand_in("--plugin-watcher") as world, plugin(world, "watcher") as process:
            assert (await process.said("registered"))["reason"] == "start"
            await offered(world, 1)
            path = own_socket(world)
            assert path.parent.name == "plugins_registry"
            await restart(world)
            await offered(world, 1)
            await drop_stream(world)
            async with asyncio.timeout(BOUND_S):
                await process.said("deregistered", reason="stream_closed")
                await process.said("registered", reason="stream_closed")
            await offered(world, 1)

    asyncio.run(story())


def test_where_register_is_refused_the_other_way_is_taken() -> None:
    async def story() -> None:
        async with stand_in("--plugin-watcher") as world:
            await world.do("/registration?accept=false")
            async with plugin(world, "auto") as process, asyncio.timeout(BOUND_S):
                await process.said("register_failed")
                await process.said("registered", reason="register_failed")
                assert own_socket(world).parent.name == "plugins_registry"
                await offered(world, 1)

    asyncio.run(story())
