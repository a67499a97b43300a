"""Adapter: processes: restarts the programs of a stack, and records them after each change.

A program that ends by itself is started again with a growing delay, as Kubernetes would. A program
that is held (`running.hold`) stays ended until it is released.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from muster.local import nats, processes, running

_RESTART_S: Final = (1.0, 30.0)
_HELD_POLL_S: Final = 0.1

Process = processes.Process | nats.NatsServer


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
            task = asyncio.create_task(self._keep_running(name, program))
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
        """Restart nothing from now on."""
        for task in self._restarters:
            task.cancel()
        await asyncio.gather(*self._restarters, return_exceptions=True)

    async def _keep_running(self, name: str, program: _Supervised) -> None:
        shortest_s, longest_s = _RESTART_S
        delay_s = shortest_s
        while True:
            code = await program.process.wait()
            if self._is_held(name):
                self._say(name, program, f"ended with {code}; kept from restarting")
                delay_s = shortest_s
            else:
                self._say(name, program, f"ended with {code}; restarting in {delay_s:g} s")
                await asyncio.sleep(delay_s)
                delay_s = min(longest_s, delay_s * 2)
            while self._is_held(name):  # noqa: ASYNC110  # another process changes this
                await asyncio.sleep(_HELD_POLL_S)
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
