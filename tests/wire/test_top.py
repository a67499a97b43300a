"""`muster top` in textual: keys of a terminal reach the page, and its lines reach the screen."""

import asyncio
import contextlib
import os
import pty
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest
from textual.pilot import Pilot

from muster.cli import __main__ as cli
from muster.cli import top, top_page, top_rows
from muster.fleet import health_state, model
from muster.nats import bus

NOBODY = "nats://127.0.0.1:1"
HOSTILE = "[red]evil[/red]\x1b]0;title\x07"


@contextlib.asynccontextmanager
async def piloted(width: int = 80, height: int = 24) -> AsyncIterator[Pilot[None]]:
    """Run the program without a terminal, with one node, and neither health nor NATS."""
    known = model.FleetModel()
    node = health_state.Plugin(node=HOSTILE, plugin="p", verdict="HEALTHY")
    state = health_state.State(
        plugins=(node,), fleet=health_state.Fleet(), service=health_state.Service(revision=1)
    )
    known.receive_page(state, after="", now=0.0, at=datetime.now(UTC))
    page = top_page.Page(known)
    async with bus.Bus(NOBODY, producer="clients/top", name="top") as connected:
        source = top.Source(page, known, ["http://127.0.0.1:1"], connected, ["refused"])
        terminal = top.Terminal(page, source)
        async with terminal.run_test(size=(width, height)) as pilot:
            reading = asyncio.create_task(source.run())
            try:
                yield pilot
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)


def shown(pilot: Pilot[None]) -> str:
    """Return what is on the screen."""
    (lines,) = pilot.app.query("_Lines")
    return "\n".join(strip.text for strip in map(lines.render_line, range(lines.size.height)))


async def until(pilot: Pilot[None], text: str, *, is_there: bool = True) -> None:
    """Wait until the screen has a text, or no longer has it."""
    async with asyncio.timeout(60):
        while (text in shown(pilot)) is not is_there:
            await pilot.pause(0.02)


def test_keys_of_the_terminal_reach_the_page() -> None:
    async def play() -> None:
        async with piloted(200, 50) as pilot:
            await until(pilot, "[red]evil[/red]�]0;title�")
            await pilot.press("question_mark")
            await until(pilot, "the next or previous row")
            await pilot.press("escape", "slash", "z", "z")
            await until(pilot, "/ zz_")
            await until(pilot, "nothing passes the filter 'zz'")
            await pilot.press("escape", "2")
            await until(pilot, "no alert is firing")
            assert "KIND" in shown(pilot)
            await pilot.resize_terminal(80, 24)
            await until(pilot, "KIND", is_there=False)

    asyncio.run(play())


def test_it_says_that_health_and_nats_are_away_also_for_one_node() -> None:
    async def play() -> None:
        async with piloted() as pilot:
            await until(pilot, "NATS not connected: refused")
            await until(pilot, "(old)")
            await pilot.press("enter")
            await until(pilot, "note: health does not answer")

    asyncio.run(play())


@pytest.mark.parametrize("key", ["q", "ctrl+c", "ctrl+q"])
def test_the_keys_that_quit_end_the_program(key: str) -> None:
    async def play() -> bool:
        async with piloted() as pilot:
            await pilot.press(key)
            async with asyncio.timeout(60):
                while pilot.app.is_running:
                    await asyncio.sleep(0)
            return True

    assert asyncio.run(play())


@pytest.mark.parametrize("terminal", ["dumb", "xterm"])
def test_without_a_capable_terminal_the_status_is_printed_once(terminal: str) -> None:
    command = (sys.executable, "-m", "muster.cli", "top", "--health", "http://127.0.0.1:1")
    environment = {**os.environ, "TERM": terminal}
    if terminal == "dumb":
        ours, theirs = pty.openpty()
        with os.fdopen(ours, "rb", buffering=0) as reading:
            done = subprocess.run(
                command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, check=False
            )
            os.close(theirs)
            output = reading.read(1000)
    else:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            check=False,
        )
        output = done.stdout
    assert done.returncode == 1
    assert output.startswith(b"muster status: health does not answer: http://127.0.0.1:1")
    assert b"\x1b" not in output


def test_a_process_that_a_signal_has_suspended_says_so() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]) as running:
        process = top_rows.Process("health", running.pid, "http://127.0.0.1:1", 0)
        assert top.with_suspension(process) == process
        running.send_signal(signal.SIGSTOP)
        os.waitpid(running.pid, os.WUNTRACED)
        assert top.with_suspension(process) == process._replace(problem="suspended")
        failing = process._replace(problem="ended with 1")
        assert top.with_suspension(failing) == failing
        running.kill()
    assert top.with_suspension(process) == process


def test_an_invalid_address_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top, "is_terminal", lambda: True)
    assert cli.call(["top", "--health", "ftp://x"]) == 2
    assert capsys.readouterr().err.startswith("muster top: 'ftp://x' is not the address of")
