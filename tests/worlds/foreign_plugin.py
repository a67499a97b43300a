"""Third-party device plugins: `tests/programs/foreign_plugin.py` as a process."""

import contextlib
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from tests.worlds import kubelets

PROBE: Final = "muster-watch"
"""The user agent of a probe."""


async def until_exit(directory: Path, name: str, resource: str, count: int) -> int:
    """Run a plugin that exits when it is probed; return its exit status."""
    arguments = (str(directory), name, resource, str(count), PROBE)
    async with kubelets.running("-m", "tests.programs.foreign_plugin", *arguments) as program:
        return await program.process.wait()


@contextlib.asynccontextmanager
async def running(
    directory: Path, name: str, resource: str, count: int
) -> AsyncIterator[kubelets.Program]:
    """Run a plugin as a process; yield it once it is registered."""
    arguments = (str(directory), name, resource, str(count))
    async with kubelets.running("-m", "tests.programs.foreign_plugin", *arguments) as program:
        await program.said("registered")
        yield program


async def log(program: kubelets.Program) -> list[dict[str, Any]]:
    """End the process; return what it logged after it registered."""
    with contextlib.suppress(ProcessLookupError):
        program.process.send_signal(signal.SIGCONT)
        program.process.kill()
    out, _ = await program.process.communicate()
    return [json.loads(line) for line in out.splitlines()]
