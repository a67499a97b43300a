"""`muster up` leaves nothing behind if it is interrupted, and no process if it is killed."""

import asyncio
import contextlib
import json
import os
import pty
import re
import signal
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import yaml

from muster.local import nats, running

COMMAND = (sys.executable, "-P", "-m", "muster.cli", "up", "--plain")


def children(directory: Path) -> set[int]:
    """Return the processes whose command line names a stack's directory."""
    pids = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if os.fsencode(directory) in line:
                pids.add(int(entry.name))
    return pids


async def started(process: asyncio.subprocess.Process) -> Path:
    """Return the directory of a stack once it is up."""
    assert process.stdout is not None
    async for line in process.stdout:
        match = re.match(rb"settings, logs\s+(\S+)", line)
        if match:
            return Path(match[1].decode())
    raise AssertionError("muster up ended before it was up")


async def gone(pids: set[int]) -> None:
    """Wait until all of these processes have ended."""
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        await asyncio.sleep(0.02)


async def nothing(_: Path) -> None:
    """Do nothing before the signal."""


async def doctor_is_content(directory: Path) -> None:
    """Wait until `muster doctor` finds no problem; it can check all but pods and images."""
    url, health = (address(directory, service) for service in ("url", "http"))
    while True:
        options = ("doctor", "--json", "--within", "1m", "--url", url, "--health", health)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "muster.cli", *options), stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
        findings = {each["check"]: each["level"] for each in json.loads(out)["findings"]}
        unseen = {check for check, level in findings.items() if level == "NOT CHECKED"}
        if process.returncode == 0:
            assert unseen == {"pods", "images"}
            return


def address(directory: Path, of: str) -> str:
    """Return health's HTTP address, or the URL of its NATS server."""
    if of == "url":
        return str(yaml.safe_load((directory / "health.yaml").read_text())["bus"]["url"])
    listening = next(
        line for line in (directory / "health.log").read_text().splitlines() if "listening" in line
    )
    return str(json.loads(listening)["http"])


async def story(
    number: signal.Signals,
    temporary: Path,
    meanwhile: Callable[[Path], Awaitable[None]] = nothing,
) -> tuple[int, list[Path]]:
    """Run a stack, send it a signal; return the exit code and the directories that are left."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, stdout=asyncio.subprocess.PIPE, env=environment(temporary)
    )
    async with asyncio.timeout(100):
        directory = await started(process)
        pids = children(directory)
        assert len(pids) >= 9, "NATS, the Kubernetes API, three kubelets and the services"
        await meanwhile(directory)
        process.send_signal(number)
        assert process.stdout is not None
        await process.stdout.read()
        code = await process.wait()
        await gone(pids)
    return code, list(temporary.iterdir())


def environment(temporary: Path) -> dict[str, str]:
    """Return the environment of a command that sees only the stacks in a directory."""
    return {**os.environ, "NATS_URL": "", "TMPDIR": str(temporary)}


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Yield a directory for stacks; its path is short enough for their sockets."""
    with tempfile.TemporaryDirectory(prefix="up-") as directory:
        yield Path(directory)


def free_ports() -> int:
    """Return the first of twenty consecutive free ports."""
    while True:
        first = nats.free_port()
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError, OverflowError):
            for port in range(first, first + 20):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


async def closed_terminal(temporary: Path) -> str:
    """Run a small stack in a terminal, and close the terminal; return the output."""
    ours, theirs = pty.openpty()
    size = ("--nodes", "1", "--gpus", "1", "--port", str(free_ports()))
    process = await asyncio.create_subprocess_exec(
        *(*COMMAND[:-1], *size),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(temporary) | {"COLUMNS": "200", "TERM": "xterm"},
        start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(theirs), os.O_RDWR)),
    )
    os.close(theirs)
    shown = b""
    async with asyncio.timeout(100):
        while b"HEALTHY" not in shown:
            shown += await asyncio.to_thread(os.read, ours, 65_536)
        (directory,) = temporary.iterdir()
        record = json.loads((directory / running.RECORD).read_bytes())
        pids = {program["pid"] for program in record["programs"]}
        assert len(pids) >= 8, "NATS, the Kubernetes API, the webhook, three services, one node"
        os.close(ours)
        await process.wait()
        await gone(pids)
    return shown.decode()


def test_the_doctor_finds_the_whole_stack_well_and_ctrl_c_leaves_nothing_of_it(
    temporary: Path,
) -> None:
    assert asyncio.run(story(signal.SIGINT, temporary, doctor_is_content)) == (0, [])


def test_a_crash_leaves_no_process_and_the_next_run_removes_its_directory(
    temporary: Path,
) -> None:
    code, left = asyncio.run(story(signal.SIGKILL, temporary))
    assert (code, len(left)) == (-signal.SIGKILL, 1)
    shown = asyncio.run(closed_terminal(temporary))
    assert f"removed {left[0]}, left over from a killed run" in shown
    assert list(temporary.iterdir()) == [], "closing the terminal ends everything, too"
