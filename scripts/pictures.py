"""Adapter for tmux and Chromium: makes the pictures of the README and docs (`make pictures`).

It runs `muster up`, injects faults with `muster break`, and takes pictures: of the console in
Chromium, and of `muster top` and a recording in a terminal (tmux). The hashes of the files that
decide how each picture looks are stored in docs/pictures/made.json; a test fails when one of these
files has changed.
"""

import ast
import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from muster.local import running
from scripts import terminal_drawing
from scripts.terminal_drawing import Frame, Row, Run

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / "docs/pictures"
MADE: Final = FOLDER / "made.json"
BYTES_MAX: Final = 200_000
_CHROMIUM: Final = Path("/usr/bin/chromium")
_WIDTH: Final = 1280
_DEVICE: Final = "main a[href*='device=GPU']"
_PAGES: Final = {
    "fleet": ("", "", 720),
    "node": ("node/node-a", "", 900),
    "device": ("node/node-a", _DEVICE, 900),
    "alerts": ("alerts", "", 800),
    "events": ("events", "", 600),
    "plots": ("plots", "", 720),
}
"""Each page's path, the link to follow on it, and the maximum height of its picture."""
_SAME_EVERYWHERE: Final = (
    "--disable-lcd-text",
    "--font-render-hinting=none",
    "--force-color-profile=srgb",
)
_LIMIT_S: Final = 180.0
_SHOWN_WAIT_S: Final = 7.0
"""How many seconds of a wait the recording shows."""
_COLUMNS: Final = 96
_HEIGHTS: Final = {"upper": 24, "lower": 9}
_PORTS: Final = range(9000, 9900, 100)
_EDGE: Final[Row] = (Run(0, "─" * _COLUMNS, "dim"),)

_CONSOLE: Final = "services/console/muster_console"
_EVERY_PAGE: Final = tuple(
    f"{_CONSOLE}/{name}"
    for name in ("static/console.css", "templates/base.html", "templates/macros.html")
)
_NODE: Final = (*_EVERY_PAGE, f"{_CONSOLE}/templates/node*.html", f"{_CONSOLE}/timeline.py")
_TOP: Final = ("muster/cli/top*.py",)
SOURCES: Final[dict[str, tuple[str, ...]]] = {
    "console-fleet": (
        *_EVERY_PAGE,
        f"{_CONSOLE}/templates/fleet*.html",
        f"{_CONSOLE}/static/fleet.js",
    ),
    "console-node": _NODE,
    "console-device": _NODE,
    "console-alerts": (*_EVERY_PAGE, f"{_CONSOLE}/templates/alerts.html"),
    "console-events": (*_EVERY_PAGE, f"{_CONSOLE}/templates/events.html"),
    "console-plots": (*_EVERY_PAGE, f"{_CONSOLE}/templates/plots.html", f"{_CONSOLE}/plots.py"),
    "top": _TOP,
    "demo": (*_TOP, "muster/cli/breaking.py"),
}
"""The files that decide how each picture looks."""


def files(name: str) -> tuple[str, ...]:
    """Return the names of a picture's files: two for a page, light and dark; one for a terminal."""
    if name.startswith("console-"):
        return tuple(f"{name}-{scheme}.png" for scheme in ("light", "dark"))
    return (f"{name}.svg",)


def digest(name: str) -> str:
    """Return a hash of the files that decide how a picture looks, without docstrings."""
    total = hashlib.sha256()
    for pattern in SOURCES[name]:
        for path in sorted(ROOT.glob(pattern)):
            text = path.read_text("utf-8")
            total.update(f"{path.relative_to(ROOT)}\0".encode())
            total.update((_without_docstrings(text) if path.suffix == ".py" else text).encode())
    return total.hexdigest()


def _without_docstrings(text: str) -> str:
    """Return a module without the lines of its docstrings, which no picture shows."""
    lines = text.split("\n")
    dropped: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            dropped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return "\n".join(line for number, line in enumerate(lines, 1) if number not in dropped)


class Failed(Exception):
    """The pictures cannot be made; the message gives the reason."""


class Terminals:
    """Two terminals, one above the other, and a recording of what they show."""

    def __init__(self, socket_path: Path, environment: dict[str, str]) -> None:
        self.frames: list[Frame] = []
        self._tmux = ("tmux", "-S", str(socket_path), "-f", os.devnull)
        self._environment = environment
        self._began = time.monotonic()
        for name, height in _HEIGHTS.items():
            size = ("-x", str(_COLUMNS), "-y", str(height))
            shell = "env 'PS1=$ ' bash --norc --noprofile"
            self._run("new-session", "-d", *size, "-s", name, shell)

    def start(self) -> None:
        """Start the recording, once both shells are ready."""
        _until("the shells are ready", lambda: self._look().count("$") == len(_HEIGHTS))
        self.frames.clear()
        self._began = time.monotonic()
        self._look()

    def type(self, name: str, command: str) -> None:
        """Type a command as slowly as a person does, and press Enter."""
        for start in range(0, len(command), 3):
            self._run("send-keys", "-t", name, "-l", "--", command[start : start + 3])
            self.pause(0.08)
        self.pause(0.3)
        self.press(name, "Enter")

    def press(self, name: str, key: str) -> None:
        """Press a key."""
        self._run("send-keys", "-t", name, key)

    def pause(self, seconds: float) -> None:
        """Record the terminals for some seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._look()
            time.sleep(0.05)

    def until(self, text: str) -> None:
        """Wait until a text is shown; the recording shortens a long wait. Raises Failed."""
        began = time.monotonic()
        while text not in (
            shown := self._look(is_recorded=time.monotonic() - began < _SHOWN_WAIT_S)
        ):
            if time.monotonic() - began > _LIMIT_S:
                raise Failed(f"waited {_LIMIT_S:g} s for {text!r}; the terminals show:\n{shown}")
            time.sleep(0.05)
        self._began += max(0.0, time.monotonic() - began - _SHOWN_WAIT_S)

    def screen(self, name: str) -> tuple[Row, ...]:
        """Return the rows of a terminal."""
        return terminal_drawing.rows(self._run("capture-pane", "-e", "-p", "-t", name))

    def end(self) -> None:
        """End both terminals."""
        subprocess.run([*self._tmux, "kill-server"], check=False, capture_output=True)  # noqa: S603

    def _look(self, *, is_recorded: bool = True) -> str:
        """Return the text that the terminals show; record their screens."""
        both = (*self.screen("upper"), _EDGE, *self.screen("lower"))
        if is_recorded and (not self.frames or self.frames[-1].rows != both):
            self.frames.append(Frame(time.monotonic() - self._began, both))
        return "\n".join(map(terminal_drawing.plain, both))

    def _run(self, *words: str) -> str:
        done = subprocess.run(  # noqa: S603  # fixed words, no shell
            [*self._tmux, *words],
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout


@contextlib.contextmanager
def _terminals() -> Iterator[tuple[Terminals, Path]]:
    """Open the terminals; at the end of the block, end all programs that were started in them."""
    with tempfile.TemporaryDirectory(prefix="demo-") as directory:
        os.environ["TMPDIR"] = directory  # `muster break` acts on the `muster up` of this directory
        tempfile.tempdir = None
        environment = {
            **{name: value for name, value in os.environ.items() if name != "NATS_URL"},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "KUBECONFIG": f"{directory}/kubeconfig",
            "LC_ALL": "C.UTF-8",
            "HISTFILE": os.devnull,
        }
        opened = Terminals(Path(directory, "tmux"), environment)
        try:
            yield opened, Path(directory)
        finally:
            for stack in running.here():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(stack.owner, signal.SIGTERM)
            _until("everything has stopped", lambda: not running.here())
            opened.end()


def _until(what: str, holds: Callable[[], object]) -> None:
    end = time.monotonic() + _LIMIT_S
    while not holds():
        if time.monotonic() > end:
            raise Failed(f"waited {_LIMIT_S:g} s until {what}")
        time.sleep(0.1)


def _play(terminals: Terminals, directory: Path) -> tuple[list[Frame], float]:
    """Play the demo; return the recording, and the time of the frame that shows it best."""
    terminals.start()
    terminals.type("upper", f"muster up --nodes 6 --gpus 4 --port {_free_port()}")
    terminals.until("6 nodes: 6 ok")
    (stack,) = running.here()
    (directory / "kubeconfig").symlink_to(f"{stack.directory}/kubeconfig")
    terminals.pause(1.5)
    terminals.type("lower", "kubectl apply -f examples/pod.yaml")
    terminals.until("pod/training created")
    terminals.pause(1)
    terminals.type("lower", "muster break xid")
    terminals.until("1 critical")
    terminals.pause(2)
    terminals.press("upper", "Enter")
    terminals.until("why node-a")
    terminals.pause(4)
    still_at = terminals.frames[-1].at
    terminals.press("upper", "Escape")
    terminals.type("lower", "muster mend xid")
    terminals.type("lower", "muster break freeze node-c")
    terminals.until("STUCK")
    terminals.pause(2)
    terminals.type("lower", "muster mend freeze node-c")
    terminals.until("6 nodes: 6 ok")
    terminals.pause(2)
    last = terminals.frames[-1]
    return [*terminals.frames, Frame(last.at + 1.5, last.rows)], still_at


def _free_port() -> int:
    """Return the first of 30 consecutive free ports. Raises Failed."""
    for first in _PORTS:
        try:
            for port in range(first, first + 30):
                with socket.socket() as free:
                    free.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise Failed("no range of free ports")


def _break_again(terminals: Terminals) -> str:
    """Inject several faults, and silence one; return the console's address."""
    for command in (
        "clear",
        "muster break xid",
        "muster break freeze node-c",
        "muster break stream node-e",
        "muster break kill node-f",
        "muster silence add 'node=\"node-f\"' --duration 2h --comment 'rebooting' --author ann",
    ):
        terminals.press("lower", "C-l")
        terminals.type("lower", command)
        terminals.pause(0.2)
    for verdict in ("STUCK", "DEREGISTERED", "PLUGIN_DOWN", "silenced"):
        terminals.until(verdict)
    (stack,) = running.here()
    console = stack.program("console")
    if console is None:
        raise Failed("muster up runs no console: pip install '.[console]'")
    return console.http


@contextlib.contextmanager
def _chromium() -> Iterator["Browser"]:
    from playwright.sync_api import sync_playwright  # noqa: PLC0415  # only for pictures

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage", *_SAME_EVERYWHERE]
        browser = playwright.chromium.launch(executable_path=str(_CHROMIUM), args=arguments)
        try:
            yield browser
        finally:
            browser.close()


def _picture_pages(browser: "Browser", address: str) -> dict[str, bytes]:
    """Return pictures of the console's pages, light and dark."""
    pictures = {}
    for scheme in ("light", "dark"):
        context = browser.new_context(
            color_scheme="light" if scheme == "light" else "dark",
            timezone_id="UTC",
            locale="en-GB",
            reduced_motion="reduce",
        )
        page = context.new_page()
        page.set_default_timeout(_LIMIT_S * 1000)
        for name, (path, link, height) in _PAGES.items():
            page.set_viewport_size({"width": _WIDTH, "height": height})
            page.goto(f"{address}/{path}")
            if link:
                page.locator(link).first.click()
                page.wait_for_url("**device=**")
            page.wait_for_selector("#live[data-state=live]")
            if name == "fleet":
                page.wait_for_selector("body[data-ready]")
            bottom = page.evaluate("document.querySelector('main').getBoundingClientRect().bottom")
            page.set_viewport_size({"width": _WIDTH, "height": min(height, round(bottom) + 20)})
            pictures[f"console-{name}-{scheme}.png"] = page.screenshot()
        context.close()
    return pictures


def make() -> dict[str, bytes]:
    """Return every picture, by the name of its file."""
    with _terminals() as (terminals, directory), _chromium() as browser:
        frames, still_at = _play(terminals, directory)
        address = _break_again(terminals)
        pictures = _picture_pages(browser, address)
        shown = terminals.screen("upper")
        terminals.press("upper", "q")
        terminals.until("everything has stopped")
    top = terminal_drawing.picture("muster top shows a fleet with faults", shown, _COLUMNS)
    title = "muster up, a fault of a GPU under a pod, and a plugin that hangs: both are noticed"
    demo = terminal_drawing.recording(title, frames, _COLUMNS, still_at=still_at)
    return {**pictures, "top.svg": top.encode(), "demo.svg": demo.encode()}


def main() -> int:
    """Make the pictures and write them; if that fails, keep the old ones. Return the exit code."""
    missing = [name for name in ("tmux", "bash", "kubectl") if shutil.which(name) is None]
    missing += [] if _CHROMIUM.exists() else [str(_CHROMIUM)]
    missing += [] if importlib.util.find_spec("playwright") else ["playwright (pip)"]
    if missing:
        print(f"make pictures needs {', '.join(missing)}", file=sys.stderr)
        return 2
    began = time.monotonic()
    digests = {name: digest(name) for name in SOURCES}
    try:
        pictures = make()
    except Failed as failed:
        print(failed, file=sys.stderr)
        return 1
    large = {name: len(content) for name, content in pictures.items() if len(content) > BYTES_MAX}
    if large:
        print(f"larger than {BYTES_MAX:,} bytes: {large}", file=sys.stderr)
        return 1
    for name, content in sorted(pictures.items()):
        (FOLDER / name).write_bytes(content)
        print(f"wrote docs/pictures/{name}: {len(content):,} bytes")
    MADE.write_text(json.dumps(digests, indent=2) + "\n", encoding="utf-8")
    print(f"{time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
