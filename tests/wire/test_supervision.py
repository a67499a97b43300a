"""`muster up` restarts programs that end, soon if that may help, and shows their errors."""

import asyncio
import contextlib
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from muster.local import processes, supervision

PROGRAM: Final = """
import pathlib, sys, time
text = pathlib.Path(sys.argv[2]).read_text()
if text == "ends":
    sys.exit(0)
if text != "works":
    print(text, file=sys.stderr)
    sys.exit(2)
print('{"event": "listening"}', flush=True)
time.sleep(600)
"""


class Supervised:
    """A program that works if its settings say so, and the lines that are shown about it."""

    def __init__(self, directory: Path) -> None:
        self.settings = directory / "settings"
        self.settings.write_text("works")
        (directory / "a_program.py").write_text(PROGRAM)
        self.process = processes.Process(
            processes.Program(
                "notifier",
                "a_program",
                ("--config", str(self.settings)),
                {"PYTHONPATH": str(directory)},
            ),
            directory / "log",
        )
        self._shown: list[str] = []
        self._is_shown = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self.supervisor = supervision.Supervisor(
            show=self._show, changed=lambda: None, is_held=lambda _: False
        )

    def _show(self, line: str) -> None:
        self._shown.append(re.sub("pid .*", "pid 1", line))
        task = asyncio.create_task(self._wake())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _wake(self) -> None:
        async with self._is_shown:
            self._is_shown.notify_all()

    async def shown(self, count: int) -> list[str]:
        """Return the lines once there are `count`."""
        async with asyncio.timeout(30), self._is_shown:
            await self._is_shown.wait_for(lambda: len(self._shown) >= count)
        return self._shown


@contextlib.asynccontextmanager
async def supervised(directory: Path) -> AsyncIterator[Supervised]:
    made = Supervised(directory)
    await made.process.start()
    made.supervisor.add("notifier", made.process, restart=True)
    try:
        yield made
    finally:
        await made.supervisor.end()
        await made.process.end()


def test_refused_settings_are_shown_and_a_change_of_the_file_is_tried_at_once(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with supervised(tmp_path) as made:
            made.settings.write_text("receiver slack: /etc/slack: No such file or directory")
            made.process.signal(signal.SIGKILL)
            refused = "notifier ended with 2: receiver slack: /etc/slack: No such file or directory"
            # the file has changed since the program read it
            assert await made.shown(2) == [
                "notifier ended with -9; restarting in 1 s",
                f"{refused}; restarting in 1 s",
            ]
            await made.shown(4)
            made.settings.write_text("works")
            assert (await made.shown(5))[2:] == [
                f"{refused}; restarting in 2 s",
                f"{refused}; restarting in 4 s",
                "notifier runs again, pid 1",
            ]

    asyncio.run(story())


def test_a_program_that_ends_without_an_error_is_started_soon_each_time(tmp_path: Path) -> None:
    async def story() -> None:
        async with supervised(tmp_path) as made:
            made.settings.write_text("ends")
            made.process.signal(signal.SIGKILL)
            assert (await made.shown(4))[1:] == ["notifier ended with 0; restarting in 1 s"] * 3

    asyncio.run(story())


def test_of_a_log_line_the_event_and_the_error_are_shown(tmp_path: Path) -> None:
    async def story() -> None:
        async with supervised(tmp_path) as made:
            made.settings.write_text('{"event": "crashed", "level": "error", "error": "no disk"}')
            made.process.signal(signal.SIGKILL)
            shown = await made.shown(2)
            assert shown[1] == "notifier ended with 2: crashed: no disk; restarting in 1 s"

    asyncio.run(story())
