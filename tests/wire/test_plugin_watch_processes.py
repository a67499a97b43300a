"""The state of a process that serves a socket: waiting in the kernel, stopped, or running."""

import asyncio
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster_plugin.kubelet import unary_client
from muster_plugin.watch import observation, prober, processes, socket_files

SOCKET = "device-plugins/x.sock"
WAITS = """
import os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.bind(sys.argv[1])
    server.listen()
    # until the child executes its program, which waits for a writer, the parent is in state D
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[
        (os.POSIX_SPAWN_OPEN, 0, sys.argv[2], os.O_RDONLY, 0)])
"""


@pytest.fixture
def root() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="mu-"))
    (path / "device-plugins").mkdir()
    yield path
    shutil.rmtree(path)


async def probed(root: Path) -> observation.Probed:
    """Probe the only socket once."""
    results: list[observation.Probed] = []
    watch = processes.ProcessWatch(lambda _: None)
    probing = prober.Prober(
        root, watch, on_result=results.append, on_problem=pytest.fail, timeout_s=0.2
    )
    (file,) = socket_files.scan(root).sockets
    await probing.probe(file)
    watch.close()
    return results[0]


def test_a_process_that_waits_in_the_kernel_is_named_where_it_does_not_answer(root: Path) -> None:
    async def story() -> observation.Probed:
        pipe = root / "pipe"
        os.mkfifo(pipe)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", WAITS, str(root / SOCKET), str(pipe)
        )
        stat = Path(f"/proc/{process.pid}/stat")
        try:
            async with asyncio.timeout(20):
                while ") D " not in stat.read_text():
                    await asyncio.sleep(0.005)
            return await probed(root)
        finally:
            # let the child continue
            writer = os.open(pipe, os.O_RDWR)
            await process.wait()
            os.close(writer)

    result = asyncio.run(story())
    assert (result.answer, result.detail) == (
        observation.Answer.SILENT,
        (
            "no answer to GetDevicePluginOptions within 0.2 s; "
            "its process waits for a driver or a disk (state D)"
        ),
    )


@pytest.mark.parametrize(
    ("states", "halted", "is_waiting"),
    [
        ("S", "", False),
        ("T", "stopped", False),
        ("t", "stopped by a debugger", False),
        ("Z", "a zombie", False),
        ("ZS", "", False),
        ("D", "", True),
        ("SRD", "", True),
        ("ZD", "", True),
        ("", "", False),
    ],
)
def test_a_process_is_judged_by_the_states_of_its_threads(
    root: Path, states: str, halted: str, *, is_waiting: bool
) -> None:
    folder = root / str(os.getpid())
    for number, state in enumerate(states):
        thread = folder / "task" / str(number)
        thread.mkdir(parents=True)
        (thread / "stat").write_text(f"1 (x) D) {state} 0")
    folder.mkdir(exist_ok=True)
    (folder / "stat").write_text(f"1 (x) D) {states[:1]} 0")

    async def story() -> tuple[dict[str, str], bool]:
        watch = processes.ProcessWatch(lambda _: None, proc=root)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(root / SOCKET))
            server.listen()
            with unary_client.connected(root / SOCKET) as connection:
                watch.peer(connection, SOCKET)
        seen = watch.halted(), watch.is_waiting(SOCKET)
        watch.close()
        return seen

    assert asyncio.run(story()) == ({SOCKET: halted} if halted else {}, is_waiting)
