"""Adapter for processes: starts the measured processes, and reads their CPU time and memory."""

import array
import asyncio
import compileall
import contextlib
import mmap
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from muster.local import nats
from muster.nats import bus

_END_S = 10.0
_PRESENT = 1 << 63
_FRAME = (1 << 55) - 1
"""The bits of an entry of /proc/PID/pagemap that contain the page frame number."""
_USER_PAGES = (1 << 47) // mmap.PAGESIZE


@contextlib.asynccontextmanager
async def arena(producer: str, *packages: ModuleType) -> AsyncIterator[tuple[Path, str]]:
    """Yield a directory and a bus's URL; compile the packages first, as an installation does."""
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
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    errors: int | None = None,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a program with stderr to `errors`; at the end, terminate it, or kill it after 10 s."""
    process = await asyncio.create_subprocess_exec(
        *command,
        env=os.environ
        | {"PYTHONDONTWRITEBYTECODE": "", "GRPC_VERBOSITY": "ERROR"}
        | {**(environment or {})},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=errors,
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


async def bare_interpreter() -> tuple[float, float]:
    """Return the cost of Python alone: seconds of `import asyncio`, and its resident MiB."""
    code = "import asyncio, sys; sys.stdout.write('.'); sys.stdout.flush(); sys.stdin.read()"
    started = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None, "the stream is a pipe"
    await process.stdout.readexactly(1)
    seconds, memory = time.perf_counter() - started, resident_mib(process.pid)
    await process.communicate(b"")
    return seconds, memory


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def proportional_mib(pid: int) -> float:
    """Return the memory of a process, with its share of pages shared with others (PSS)."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    line = next(line for line in rollup.splitlines() if line.startswith("Pss:"))
    return int(line.split()[1]) / 1024


def distinct_mib(pids: Sequence[int]) -> float:
    """Return the memory of processes, counting each page once (as root only)."""
    pages: set[int] = set()
    for pid in pids:
        with Path(f"/proc/{pid}/pagemap").open("rb") as pagemap:
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                first, last = (
                    int(text, 16) // mmap.PAGESIZE for text in line.split()[0].split("-")
                )
                if last > _USER_PAGES:
                    continue
                pagemap.seek(first * 8)
                entries = array.array("Q", pagemap.read((last - first) * 8))
                pages.update(entry & _FRAME for entry in entries if entry & _PRESENT)
    return len(pages) * mmap.PAGESIZE / 2**20


def whole_cpu_s(pid: int) -> float:
    """Return the CPU time of a process, including threads that have ended."""
    # the id of a process's CPU clock, as in clock_getcpuclockid(3)
    return time.clock_gettime((~pid << 3) | 2)


def cpu_s(pid: int) -> float:
    """Return the CPU time of all threads, to the nanosecond (/proc/PID/stat counts in 10 ms)."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def descriptors(pid: int) -> int:
    """Return the number of open files of a process."""
    return len([*Path(f"/proc/{pid}/fd").iterdir()])
