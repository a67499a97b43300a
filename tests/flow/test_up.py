"""`muster up` ends without a trace, whether it is asked to or killed."""

import asyncio
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import yaml

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


async def nothing(_: Path) -> None:
    """Do nothing before the signal."""


async def doctor_is_content(directory: Path) -> None:
    """Wait until `muster doctor` finds this stack well, and has looked at all of it."""
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
    """Return where health listens, or the NATS that it uses."""
    if of == "url":
        return str(yaml.safe_load((directory / "health.yaml").read_text())["bus"]["url"])
    listening = next(
        line for line in (directory / "health.log").read_text().splitlines() if "listening" in line
    )
    return str(json.loads(listening)["http"])


async def story(
    number: signal.Signals,
    tmp_path: Path,
    meanwhile: Callable[[Path], Awaitable[None]] = nothing,
) -> tuple[int, bool]:
    """Start, send a signal; return the exit code and whether the directory is left."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, env={**os.environ, "NATS_URL": ""}
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
    is_left = directory.exists()
    shutil.rmtree(directory, ignore_errors=True)
    return code, is_left


def test_a_signal_ends_everything_and_leaves_nothing(tmp_path: Path) -> None:
    assert asyncio.run(story(signal.SIGINT, tmp_path)) == (0, False)


def test_the_doctor_finds_the_whole_stack_well_until_it_is_ended(tmp_path: Path) -> None:
    assert asyncio.run(story(signal.SIGTERM, tmp_path, doctor_is_content)) == (0, False)


def test_no_process_outlives_a_crash_of_the_command(tmp_path: Path) -> None:
    assert asyncio.run(story(signal.SIGKILL, tmp_path)) == (-signal.SIGKILL, True)
