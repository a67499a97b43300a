"""Door to the processes under measurement: start them, and read what they cost."""

import asyncio
import compileall
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import ModuleType

from muster.local import nats
from muster.nats import bus

_END_S = 10.0


@contextlib.asynccontextmanager
async def arena(producer: str, *packages: ModuleType) -> AsyncIterator[tuple[Path, str]]:
    """Give a directory and the URL of a bus; the packages are compiled, as they are installed."""
    for package in packages:
        compileall.compile_dir(Path(package.__file__ or "").parent, quiet=2)
    root = Path(tempfile.mkdtemp(prefix="mu-"))
    try:
        async with (
            nats.NatsServer(root / "nats") as server,
            bus.Bus(server.url, producer=producer, name="bench", owner=True) as owner,
        ):
            await owner.link.client()
            yield root, server.url
    finally:
        shutil.rmtree(root)


@contextlib.asynccontextmanager
async def running(
    command: Sequence[str], **environment: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a program; end it in order, or by force."""
    process = await asyncio.create_subprocess_exec(
        *command,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": ""} | environment,
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(_END_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def cpu_s(pid: int) -> float:
    """CPU time of all threads, to the nanosecond: /proc/PID/stat counts in 10 ms."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def descriptors(pid: int) -> int:
    """Return how many files a process has open."""
    return len([*Path(f"/proc/{pid}/fd").iterdir()])
