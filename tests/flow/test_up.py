"""`muster up` ends without a trace, whether it is asked to or killed."""

import asyncio
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

COMMAND = (sys.executable, "-P", "-m", "muster.cli", "up", "--plain")


def children(directory: Path) -> set[int]:
    """Return the processes whose command line or working files name a stack's directory."""
    pids = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().decode()
            except OSError:
                continue
            if str(directory) in line:
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
    """Return when none of the processes is there any more."""
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        await asyncio.sleep(0.02)


async def story(number: signal.Signals, tmp_path: Path) -> tuple[int, bool]:
    """Start, send a signal; return the exit code and whether the directory is left."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, env={**os.environ, "NATS_URL": ""}
    )
    async with asyncio.timeout(100):
        directory = await started(process)
        pids = children(directory)
        assert len(pids) >= 9, "NATS, the Kubernetes API, three kubelets and the services"
        process.send_signal(number)
        assert process.stdout is not None
        await process.stdout.read()
        code = await process.wait()
        await gone(pids)
    is_left = directory.exists()
    shutil.rmtree(directory, ignore_errors=True)
    return code, is_left


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_and_leaves_nothing(
    number: signal.Signals, tmp_path: Path
) -> None:
    assert asyncio.run(story(number, tmp_path)) == (0, False)


def test_no_process_outlives_a_crash_of_the_command(tmp_path: Path) -> None:
    assert asyncio.run(story(signal.SIGKILL, tmp_path)) == (-signal.SIGKILL, True)
