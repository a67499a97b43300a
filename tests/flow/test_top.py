"""`muster up` and `muster top` in a terminal (tmux), at 80x24 and at 200x50."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest

from muster.local import running
from tests.worlds.muster_command import muster

LIMIT_S: Final = 120.0
TMUX: Final = shutil.which("tmux")
COMMAND: Final = (sys.executable, "-P", "-m", "muster.cli")


class Tmux:
    """A separate tmux server; each session is a terminal."""

    def __init__(self, socket: Path, environment: Mapping[str, str]) -> None:
        self._server = ("-S", str(socket), "-f", os.devnull)
        # the terminal's size must take precedence over these variables
        sizes = {"COLUMNS": "70", "LINES": "10"}
        self._environment = {**environment, **sizes, "LC_ALL": "C.UTF-8"}

    def open(self, name: str, width: int, height: int, *command: str) -> None:
        """Run a command in a new terminal, which shows its exit code at the end."""
        size = ("-x", str(width), "-y", str(height))
        program = subprocess.list2cmdline(command)
        self._run("new-session", "-d", *size, "-s", name, f"{program}; echo code=$?; read x")

    def screen(self, name: str) -> list[str]:
        """Return the lines on a terminal."""
        return self._run("capture-pane", "-p", "-t", name).split("\n")[:-1]

    def press(self, name: str, *keys: str) -> None:
        """Press keys."""
        self._run("send-keys", "-t", name, *keys)

    def until(self, name: str, *texts: str) -> list[str]:
        """Wait until the texts are on a terminal; return its lines."""
        end = time.monotonic() + LIMIT_S
        while not all(text in "\n".join(lines := self.screen(name)) for text in texts):
            assert time.monotonic() < end, "\n".join([f"waited for {texts}:", *lines])
            time.sleep(0.05)
        return lines

    def end(self) -> None:
        """End the server and all terminals."""
        subprocess.run([str(TMUX), *self._server, "kill-server"], check=False)

    def _run(self, *words: str) -> str:
        done = subprocess.run(
            [str(TMUX), *self._server, *words],
            env=self._environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout


@pytest.fixture
def tmux(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tmux]:
    if TMUX is None:
        pytest.skip("tmux is not installed")
    monkeypatch.delenv("NATS_URL", raising=False)
    with tempfile.TemporaryDirectory(prefix="mt-") as directory:  # a socket's path must be short
        monkeypatch.setenv("TMPDIR", directory)
        monkeypatch.setattr(tempfile, "tempdir", None)
        server = Tmux(Path(directory, "tmux"), os.environ)
        try:
            yield server
        finally:
            for record in running.here():
                os.kill(record.owner, signal.SIGTERM)
            until(lambda: not running.here())
            server.end()


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def row(lines: Sequence[str], name: str) -> list[str]:
    """Return the cells of the row that begins with a name; empty if there is none."""
    return next((line.split() for line in lines if line.startswith(f" {name} ")), [])


def test_muster_up_and_muster_top_are_played_at_80x24_and_at_200x50(tmux: Tmux) -> None:
    tmux.open("small", 80, 24, *COMMAND, "up", "--nodes", "2", "--gpus", "2")
    lines = tmux.until("small", "2 nodes: 2 ok", "verdict device-plugin: HEALTHY")
    assert lines[2].split() == ["NODE", "STATE", "VERDICT", "SINCE", "ALERTS", "DEVICES"]
    assert lines[-1] == " enter why   / filter   s sort   ? help, addresses   q stop all"

    code, _, errors = muster("break", "xid", "node-b")
    assert (code, errors) == (0, "")
    lines = tmux.until("small", "1 critical", "XID 79", "1/2")
    assert lines[3].split()[:2] == ["node-b", "CRITICAL"]
    tmux.press("small", "Enter")
    tmux.until("small", "fleet > why node-b", "faulty     nvidia.com/gpu")
    tmux.press("small", "Escape")
    tmux.until("small", "1/2 by urgency")

    tmux.open("large", 200, 50, *COMMAND, "top")
    lines = tmux.until("large", "1 critical", "PROBLEM", "XID 79")
    assert "has fallen off" in lines[3]
    tmux.press("large", "/", "node-a", "Enter")
    tmux.until("large", "1/1 with 'node-a' by urgency")
    tmux.press("large", "Escape")
    tmux.until("large", "1/2 by urgency")
    tmux.press("large", "3")
    tmux.until("large", "alert firing critical device_unhealthy")

    silencing = ("--duration", "1h", "--comment", "known", "--author", "ann")
    assert muster("silence", "add", 'node="node-b"', *silencing)[0] == 0
    tmux.press("large", "2")
    tmux.until("large", "1 alert firing (1 silenced)", "by ann] nvidia.com/gpu GPU-")

    assert muster("break", "health")[0] == 0
    tmux.until("large", "1 ok (old)", " OLD  health has not answered for")
    assert muster("mend", "health")[0] == 0
    tmux.press("small", "5")
    tmux.until("small", "PROCESS", "plugin-node-b")
    (stack,) = running.here()
    labeler = stack.program("labeler")
    assert labeler is not None
    assert labeler.pid is not None
    os.kill(labeler.pid, signal.SIGKILL)
    until(lambda: row(tmux.screen("small"), "labeler")[2:3] == ["1"])
    assert row(tmux.screen("small"), "labeler")[1] != str(labeler.pid)
    until(lambda: "(old)" not in tmux.screen("large")[0])

    tmux.press("large", "q")
    tmux.until("large", "code=0")
    tmux.press("small", "q")
    tmux.until("small", "everything has stopped", "code=0")


def test_a_signal_restores_the_terminal(tmux: Tmux) -> None:
    nowhere = ("--health", "http://127.0.0.1:1", "--url", "nats://127.0.0.1:1")
    tmux.open("only", 80, 24, *COMMAND, "top", *nowhere)
    tmux.until("only", "WAIT health has not answered yet", "NATS not connected")
    command = "\0".join((*COMMAND, "top", *nowhere)).encode()
    (pid,) = (
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if path.exists() and path.read_bytes().startswith(command)
    )
    os.kill(pid, signal.SIGTERM)
    lines = tmux.until("only", "code=")
    assert [line for line in lines if line] == ["code=0"]
