"""Adapter for processes: restarts the programs of a stack, and records them after each change.

A program that ends by itself is started again with a growing delay, as Kubernetes would. The delay
is reset if a program ended without an error or after it had run for a while; a change of its
settings file ends the delay. A program that is held (`running.hold`) stays ended until it is
released.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from muster.local import nats, processes, running

_RESTART_S: Final = (1.0, 30.0)
_POLL_S: Final = 0.1

Process = processes.Process | nats.NatsServer
_Version = tuple[int, int, int] | None


@dataclass(slots=True)
class _Supervised:
    process: Process
    restarts: int = 0
    problem: str = ""


class Supervisor:
    """The programs of a stack by name; `changed` is called after each change.

    `show` is called with one line for each end and each restart; `is_held` returns whether a
    program must not be started now.
    """

    def __init__(
        self,
        *,
        show: Callable[[str], None],
        changed: Callable[[], None],
        is_held: Callable[[str], bool],
    ) -> None:
        self._show = show
        self._is_held = is_held
        self._changed = changed
        self._programs: dict[str, _Supervised] = {}
        self._restarters: list[asyncio.Task[None]] = []

    def add(self, name: str, process: Process, *, restart: bool) -> None:
        """Record a program that has been started; with `restart`, start it again when it ends."""
        program = self._programs[name] = _Supervised(process)
        self._changed()
        if restart:
            read = _version(process.settings)
            task = asyncio.create_task(self._keep_running(name, program, read))
            self._restarters.append(task)

    def programs(self) -> tuple[running.Program, ...]:
        """Return all programs, in the order in which they were added."""
        return tuple(
            running.Program(
                name=name,
                pid=program.process.pid if program.process.is_running else None,
                http=program.process.addresses.get("http", ""),
                log=str(program.process.log),
                restarts=program.restarts,
                problem=program.problem,
            )
            for name, program in self._programs.items()
        )

    async def end(self) -> None:
        """Stop restarting programs."""
        for task in self._restarters:
            task.cancel()
        await asyncio.gather(*self._restarters, return_exceptions=True)

    async def _keep_running(self, name: str, program: _Supervised, read: _Version) -> None:
        """Start the program whenever it has ended; `read` is the version of its settings file."""
        clock = asyncio.get_running_loop().time
        shortest_s, longest_s = _RESTART_S
        delay_s, began_at = shortest_s, clock()
        while True:
            code = await program.process.wait()
            if code == 0 or clock() - began_at > longest_s:
                delay_s = shortest_s
            ended = f"ended with {code}"
            if self._is_held(name):
                self._say(name, program, f"{ended}; kept from restarting")
                delay_s = shortest_s
            else:
                # a program that was killed printed nothing about it
                why = f": {program.process.error}" if code > 0 and program.process.error else ""
                self._say(name, program, f"{ended}{why}; restarting in {delay_s:g} s")
                is_changed = await _changes(program.process.settings, read, within_s=delay_s)
                delay_s = shortest_s if is_changed else min(longest_s, delay_s * 2)
            while self._is_held(name):  # noqa: ASYNC110  # another process changes this
                await asyncio.sleep(_POLL_S)
            read, began_at = _version(program.process.settings), clock()
            try:
                await program.process.start()
            except (processes.ProgramFailed, nats.NatsUnavailable) as error:
                program.problem = str(error)
                continue
            program.restarts += 1
            program.problem = ""
            self._changed()
            self._show(f"{name} runs again, pid {program.process.pid}")

    def _say(self, name: str, program: _Supervised, problem: str) -> None:
        program.problem = problem
        self._changed()
        self._show(f"{name} {problem}")


async def _changes(settings: Path | None, read: _Version, *, within_s: float) -> bool:
    """Wait until the settings differ from those that were read; return False after `within_s`."""
    try:
        async with asyncio.timeout(within_s):
            while _version(settings) == read:  # noqa: ASYNC110  # people change this
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        return False
    return True


def _version(settings: Path | None) -> _Version:
    """Return a value that differs after each write of a file; None if the file does not exist."""
    with contextlib.suppress(OSError):
        if settings is not None:
            status = settings.stat()
            return status.st_mtime_ns, status.st_size, status.st_ino
    return None
