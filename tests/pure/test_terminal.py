"""No text of a plugin controls a terminal: everything that is printed is escaped."""

import ast
import datetime as dt
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from muster import codec, escaping, vocabulary
from muster.cli import output

ROOT: Final = Path(__file__).resolve().parents[2]
T0: Final = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
HOSTILE: Final = (
    "\x00 \x07 \x08 \r \x1b[2J \x1b]0;title\x07 \x7f \x9b31m \x85 \xad \u061c \u200b \u200f \u202e "
    "\u2028 \u2029 \u2066 \ufeff \U000e0041 \ud800"
)
TEXT: Final = st.text(st.characters(codec=None), max_size=9) | st.sampled_from(HOSTILE.split(" "))
WHOLE: Final = TEXT.map(lambda text: text.encode("utf-16", "ignore").decode("utf-16", "ignore"))

MAY_PRINT: Final = {
    # the functions with which every command prints
    "muster/cli/output.py": {"sys.stdout", "sys.stderr", "os.write", "rich.console.Console"},
    # opens the standard streams of every process, and escapes tracebacks
    "muster/commands.py": {"sys.stderr"},
    # settings, and the reason why a service does not start
    "muster/service/entry.py": {"sys.stdout", "sys.stderr"},
    # the log
    "muster/service/logs.py": {"sys.stdout", "os.write"},
    # the log of the stand-ins
    "muster/local/httpd.py": {"sys.stdout", "sys.stderr"},
    # a line of constants, from an init container
    "services/fuse/muster_fuse/nri/device_check.py": {"sys.stderr"},
    # files
    "services/fuse/muster_fuse/kernel/self_test.py": {"os.write"},
    "services/fuse/muster_fuse/watch/connections.py": {"os.write"},
    "services/notifier/muster_notifier/receivers/local.py": {"os.write"},
    "services/plugin/muster_plugin/kubelet/plugin_sockets.py": {"os.write"},
}
STREAMS: Final = {"stdout", "stderr", "__stdout__", "__stderr__"}
PRINTING: Final = {
    *("print", "input", "breakpoint", "os.write", "os.writev", "os.system", "os.popen"),
    *("traceback.print_exc", "traceback.print_exception", "traceback.print_stack"),
    *("logging.StreamHandler", "logging.basicConfig", "pprint.pprint", "pprint.pp", "rich.print"),
    *("rich.console.Console", "rich.get_console", "warnings.showwarning", "faulthandler.enable"),
    *("structlog.PrintLogger", "structlog.PrintLoggerFactory", "structlog.WriteLogger"),
}
WORDS: Final = re.compile(
    r"\b(?:print|input|breakpoint)\(|sys\.(?:__)?std(?:out|err)|from sys|os\.(?:writ|syst|pope)"
    r"|traceback\.|logging\.|pprint|rich|showwarning|faulthandler|structlog\.|/dev/(?:std|tty|fd|con)"
)
"""A pattern that each of these contains, so that not every module has to be parsed."""
DEVICES: Final = {
    "/dev/stdout",
    "/dev/stderr",
    "/dev/tty",
    "/dev/fd/1",
    "/dev/fd/2",
    "/dev/console",
}


def dotted(node: ast.expr) -> str:
    """Return the dotted name of an expression such as `a.b.c`; empty if it has none."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{dotted(value)}.{name}"
    return ""


def ways_out(source: str) -> list[str]:
    """Return every expression of a module that may print."""
    if not WORDS.search(source):
        return []
    ways, asked = [], set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=stream, attr="isatty")):
                asked.add(id(stream))
            case ast.Call(func=func) if dotted(func) in PRINTING:
                ways.append(dotted(func))
            case ast.Attribute(value=ast.Name(id="sys"), attr=name) if name in STREAMS:
                # `ast.walk` yields a call before the attribute that is called
                ways += [] if id(node) in asked else [f"sys.{name}"]
            case ast.ImportFrom(module=str(module), names=names):
                imported = {f"{module}.{alias.name}" for alias in names}
                ways += sorted(imported & (PRINTING | {f"sys.{name}" for name in STREAMS}))
            case ast.Constant(value=str(text)) if text in DEVICES:
                ways.append(text)
    return ways


def test_only_these_modules_print() -> None:
    ways_of = {
        str(path.relative_to(ROOT)): set(ways)
        for folder in ("muster", "services")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (ways := ways_out(path.read_text("utf-8")))
    }
    assert ways_of == MAY_PRINT


@pytest.mark.parametrize(
    "source",
    [
        "print('x')",
        "import sys; sys.stdout.write('x')",
        "import sys; file = sys.stderr",
        "from sys import stderr",
        "import os; os.write(1, b'x')",
        "import traceback; traceback.print_exc()",
        "import rich.console; rich.console.Console().print('x')",
        "open('/dev/tty', 'w')",
    ],
)
def test_each_way_to_print_is_noticed(source: str) -> None:
    assert len(ways_out(source)) == 1
    assert ways_out("import sys; sys.stdout.isatty()") == []


@given(text=TEXT)
def test_a_printed_text_has_no_character_that_controls_a_terminal(text: str) -> None:
    shown = escaping.plain(text)
    assert shown.isprintable()
    assert len(shown) == len(text)
    assert escaping.plain(shown) == shown


@given(tree=st.dictionaries(TEXT, st.lists(TEXT, max_size=2), max_size=2))
def test_json_says_the_same_without_such_characters(tree: dict[str, list[str]]) -> None:
    for indent in (0, 2):
        shown = escaping.json_of(tree, indent=indent)
        assert all(line.isprintable() for line in shown.split("\n"))
        assert json.loads(shown) == json.loads(json.dumps(tree))


@given(tree=st.dictionaries(WHOLE, st.lists(WHOLE, max_size=2), max_size=2))
def test_yaml_says_the_same_without_such_characters(tree: dict[str, list[str]]) -> None:
    shown = escaping.yaml_of(tree)
    assert all(line.isprintable() for line in shown.split("\n"))
    assert yaml.safe_load(shown) == tree


@given(body=st.binary())
def test_invalid_bytes_are_shown_too(body: bytes) -> None:
    assert all(line.isprintable() for line in escaping.json_text(body).split("\n"))


def test_a_line_cannot_pretend_to_be_two(capsys: pytest.CaptureFixture[str]) -> None:
    output.show("node-a is STUCK\nnode-a is HEALTHY", "a\tb")
    output.warn("why", "first\x1b[1A\nsecond\x9b2K")
    printed = capsys.readouterr()
    assert printed.out == "node-a is STUCK\ufffdnode-a is HEALTHY\na\tb\n"
    assert printed.err == "muster why: first\ufffd[1A\nmuster why: second\ufffd2K\n"


def test_a_dead_letters_bytes_go_to_no_terminal() -> None:
    program = "from muster.cli import output; import sys; sys.exit(output.print_raw(b'\\x1b[2J'))"
    leader, terminal = pty.openpty()
    with os.fdopen(terminal, "wb") as stdout:
        shown = subprocess.run([sys.executable, "-c", program], stdout=stdout, check=False)
    assert shown.returncode == 0
    os.close(leader)
    piped = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (piped.returncode, piped.stdout) == (1, b"\x1b[2J")


def test_tables_and_the_live_view_on_a_terminal_draw_no_foreign_controls() -> None:
    program = (
        "from muster.cli import output; import json;"
        f"text = json.loads({json.dumps(json.dumps(HOSTILE))});"
        "output.table(('[red]name',), [(text + '[bold]x',)], nothing='')"
    )
    leader, terminal = pty.openpty()
    environment = os.environ | {"NO_COLOR": "1", "COLUMNS": "200"}
    with os.fdopen(terminal, "wb") as stdout:
        subprocess.run([sys.executable, "-c", program], stdout=stdout, check=True, env=environment)
    drawn = os.read(leader, 65_536).decode()
    os.close(leader)
    assert "[bold]x" in drawn
    row = next(line for line in drawn.split("\r\n") if "[bold]x" in line)
    assert escaping.plain(row).replace("\ufffd", "") != ""
    assert row.isprintable(), ascii(row)


def test_a_traceback_is_escaped() -> None:
    program = (
        "from muster import commands\n"
        "class Hostile(Exception): pass\n"
        "def fail(extra): raise Hostile('\x1b[2J \x9b31m')\n"
        "commands.missing = fail\n"
        "commands.muster()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.stderr.decode().splitlines()[-1] == "Hostile: \ufffd[2J \ufffd31m"


def test_a_log_line_is_printable_json() -> None:
    program = (
        "import json; from muster.service import logs; logs.configure('x');"
        f"text = json.loads({json.dumps(json.dumps(HOSTILE))});"
        "logs.logger().info('e', whole=text[:-1], half=text);"
        "logs.logger().info('e', whole=text[:-1])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    lines = done.stdout.decode().splitlines()
    assert [json.loads(line)["whole"] for line in lines] == [HOSTILE[:-1]] * 2
    assert all(line.isprintable() for line in lines)


def test_an_event_is_one_printable_line() -> None:
    alert = vocabulary.AlertChanged(
        node="node-a",
        at=T0,
        plugin="device-plugin",
        kind=vocabulary.AlertKind.STUCK,
        severity=vocabulary.Severity.CRITICAL,
        state=vocabulary.AlertState.FIRING,
        fingerprint="0" * 16,
        summary=f"[red]{HOSTILE}",
        starts_at=T0,
    )
    event = codec.CloudEvent(
        id="1", source="/s", type="t", time=T0, instance="i", sequence=1, boot="", data=alert
    )
    assert str(event).isprintable()
