"""A kubelet and a plugin into which tests inject faults, such as a dropped stream.

The plugin is a process, and so is the kubelet: the stand-in, or with `-m kubelet` a real one, which
MUSTER_KUBELET_DIR and KUBECONFIG name (docs/real-kubelet.md).
"""

import asyncio
import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import socket
import stat
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final, Protocol

import orjson
import pytest

FUSE: Final = "muster.example/fuse"
BOUND_S: Final = 60.0
"""A real kubelet reports a change to the API with its next status, every 10 s."""
PLUGIN: Final = ("-m", "muster_plugin")
_SABOTAGE: Final = """
import asyncio, contextlib, ctypes, os, signal, socket, sys
import grpc.aio
from muster_plugin import __main__ as plugin

servers, make = [], grpc.aio.server

def made():
    servers.append(make())
    return servers[-1]

grpc.aio.server = made

def descriptors(kind):
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if kind in os.readlink(f"/proc/self/fd/{name}"):
                yield int(name)

def deafen(*_):
    # the loop waits for the old instances, which are gone then, and watches with the new ones
    for descriptor in [*descriptors("inotify")]:
        new = ctypes.CDLL(None).inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        os.dup2(new, descriptor, inheritable=False)
        os.close(new)
    print('{"event": "deaf"}', flush=True)

def end_servers(*_):
    deafen()
    loop = asyncio.get_running_loop()
    for server in servers:
        loop.call_soon_threadsafe(lambda: loop.create_task(server.stop(None)))

def stop_listening(*_):
    for descriptor in descriptors("socket"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
            listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens and "/muster-" in str(found.getsockname()):
                found.shutdown(socket.SHUT_RDWR)

signal.signal(signal.SIGUSR1, end_servers)
signal.signal(signal.SIGUSR2, stop_listening)
signal.signal(signal.SIGWINCH, deafen)
sys.exit(plugin.main())
"""
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_PIDFD_GETFD: Final = 438
SABOTAGED: Final = ("-c", _SABOTAGE)
"""The plugin with signal handlers that sabotage it.

SIGUSR1 stops its gRPC servers and its watches of files, SIGUSR2 stops the listening on its sockets,
and SIGWINCH stops its watches of files.
"""


class Program:
    """A process that logs JSON lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def said(self, event: str, **facts: object) -> dict[str, Any]:
        """Read the log until this event with these facts; return it."""
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
async def running(*arguments: str) -> AsyncIterator[Program]:
    """Run Python with these arguments."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE
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
        """Return how many devices the node offers."""

    async def do(self, what: str) -> None:
        """Inject a fault, a path of the stand-in's HTTP API; skip the test if it is impossible."""


class StandIn:
    """The stand-in for a kubelet, controlled over HTTP."""

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
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310  # ours
            read: bytes = answer.read()
            return read


class Real:
    """A real kubelet; the command in MUSTER_KUBELET_RESTART, if set, restarts it."""

    def __init__(self, directory: Path, node: str) -> None:
        self.directory = directory
        self.node = node

    async def allocatable(self) -> int:
        node = orjson.loads(await output("kubectl", "get", "node", self.node, "-o", "json"))
        return int(node["status"]["allocatable"].get(FUSE, "0"))

    async def do(self, what: str) -> None:
        restart = os.environ.get("MUSTER_KUBELET_RESTART", "")
        if what.startswith("/drop-stream"):
            drop_connections(own_socket(self))
        elif what == "/restart" and restart:
            await output(*shlex.split(restart))
        else:
            pytest.skip(f"{what} cannot be done to this kubelet")


def drop_connections(path: Path) -> None:
    """Shut down the connections of this machine's kubelets to a socket; needs root."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "comm").read_text().strip() != "kubelet":
                continue
            numbers = [int(file.name) for file in (folder / "fd").iterdir()]
            process = os.pidfd_open(int(folder.name))
        except OSError:
            continue
        for number in numbers:
            descriptor = _LIBC.syscall(_PIDFD_GETFD, process, number, 0)
            if descriptor >= 0:
                _shut_down(descriptor, path)
        os.close(process)


def _shut_down(descriptor: int, peer: Path) -> None:
    """Close a descriptor; shut it down first if it is connected to this socket."""
    with contextlib.suppress(OSError):
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            return
        with socket.socket(fileno=descriptor) as connection:
            if connection.getpeername() == str(peer):
                connection.shutdown(socket.SHUT_RDWR)


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
        async with running("-m", "muster.local.kubelet", *arguments) as kubelet:
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
async def plugin(
    world: World, registration: str = "register", *, program: tuple[str, ...] = PLUGIN
) -> AsyncIterator[Program]:
    """Run the plugin; with `SABOTAGED` as `program`, signals sabotage it."""
    file = Path(tempfile.mkdtemp(prefix="mu-")) / "plugin.json"
    groups = [{"devices": [{"path": "/dev/null"}]}]
    resource = {"name": FUSE, "groups": groups, "registration": registration}
    settings = {
        "node": world.node,
        "bus": {"url": "nats://127.0.0.1:1"},
        "kubelet": {"directory": str(world.directory)},
        "resources": [resource],
    }
    file.write_bytes(orjson.dumps(settings))
    try:
        async with running(*program, "--config", str(file)) as process:
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


WORLDS = [
    pytest.param(stand_in, id="stand-in"),
    pytest.param(real, id="real", marks=[pytest.mark.kubelet, pytest.mark.timeout(180)]),
]
Worlds = Callable[[], contextlib.AbstractAsyncContextManager[World]]
