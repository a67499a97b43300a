"""Adapter for standard output and standard error: prints the output of every command.

All printing goes through this module, so that every text is escaped (`muster.escaping`).
"""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from cyclopts import Parameter

from muster import escaping
from muster.cli import texts

if TYPE_CHECKING:
    import rich.console
    import rich.text

Json = Annotated[
    bool, Parameter(name="--json", negative="", show_default=False, help="Print JSON.")
]
"""The option `--json`, the same for every command."""
Flag = Annotated[bool, Parameter(negative="", show_default=False)]
"""An option without a value."""

# services use these under this module's name
plain = texts.plain
aligned = texts.aligned


class Unwritable(Exception):
    """Standard output cannot be written to; `is_closed` is True if its reader has closed it."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror or str(error))
        self.is_closed = error.errno in {errno.EPIPE, errno.ECONNRESET}


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Raise Unwritable for the first failure to write to standard output inside the block.

    An OSError would look like a failure of NATS or of a file. Output is flushed at the end. After a
    failure, nothing more is written.
    """
    stdout: TextIO | None = sys.stdout
    if stdout is None:
        # the caller has closed standard output
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield
        return
    stdout.flush()
    guard = io.TextIOWrapper(
        io.BufferedWriter(_Guard(stdout.fileno(), "w", closefd=False)),
        encoding=stdout.encoding,
        errors="backslashreplace",
        line_buffering=stdout.isatty(),
    )
    sys.stdout = guard
    try:
        try:
            yield
        finally:
            guard.flush()
    finally:
        sys.stdout = stdout
        with contextlib.suppress(Unwritable):
            guard.close()


class _Guard(io.FileIO):
    """Standard output that raises Unwritable on the first failure and drops all later output."""

    _has_failed = False

    def write(self, data: Any) -> int:
        """Write data, or drop it after a failure."""
        if self._has_failed:
            return len(data)
        try:
            return super().write(data) or 0
        except OSError as error:
            self._has_failed = True
            raise Unwritable(error) from None


def table(names: Sequence[str], rows: Iterable[Sequence[str]], *, nothing: str) -> None:
    """Print a table: drawn on a terminal, aligned text in a pipe; without rows, print `nothing`."""
    cells = [[texts.plain(cell) for cell in row] for row in rows]
    if not cells:
        show(nothing)
    elif sys.stdout.isatty():
        _draw(names, cells)
    else:
        show(*texts.aligned([[name.upper() for name in names], *cells]))


def show(*lines: str) -> None:
    """Print lines; a line feed inside a line does not start a new line."""
    for line in lines:
        sys.stdout.write(escaping.plain(line, keep="\t") + "\n")
    sys.stdout.flush()


def print_json(value: object, *, indent: int = 0) -> None:
    """Print a value as JSON: on one line, or indented."""
    sys.stdout.write(escaping.json_of(value, indent=indent) + "\n")
    sys.stdout.flush()


def print_yaml(tree: object) -> None:
    """Print a tree as YAML."""
    sys.stdout.write(escaping.yaml_of(tree))


def print_raw(content: bytes) -> bool:
    """Print bytes unchanged; return False, and print nothing, if standard output is a terminal."""
    if sys.stdout.isatty():
        return False
    sys.stdout.flush()
    sys.stdout.buffer.write(content)
    return True


def warn(command: str, text: str) -> None:
    """Print to standard error, each line preceded by the command's name."""
    name = f"muster {command}" if command else "muster"
    with contextlib.suppress(OSError):
        for line in text.splitlines():
            sys.stderr.write(f"{name}: {texts.plain(line)}\n")


def may_write(command: str, losses: Sequence[str], *, accepted: bool) -> bool:
    """Print to standard error what an import loses; return whether its result may be written."""
    if losses:
        warn(command, "\n".join([f"Lost: {len(losses)}", *(f"  {loss}" for loss in losses)]))
        if not accepted:
            warn(command, "nothing is written; --accept-losses writes the result anyway")
    return accepted or not losses


def ask(question: str) -> None:
    """Print a question to standard error, without a line feed."""
    sys.stderr.write(f"{texts.plain(question)} ")
    sys.stderr.flush()


def progress(text: str) -> None:
    """Replace the last line on standard error, if that is a terminal; an empty text removes it."""
    if sys.stderr.isatty():
        sys.stderr.flush()
        os.write(sys.stderr.fileno(), f"\r\x1b[K{texts.plain(text)}".encode())


def fail(command: str, problem: str, *, code: int = 2) -> int:
    """Print a problem to standard error; return the exit code, by default 2 for a usage error."""
    warn(command, problem)
    return code


def _draw(names: Sequence[str], cells: Iterable[Sequence[str]]) -> None:
    import rich.table  # noqa: PLC0415  # 40 ms, and only on a terminal

    drawn = rich.table.Table(*names)
    for row in cells:
        drawn.add_row(*map(styled, row))
    console().print(drawn)


def console() -> "rich.console.Console":
    """Return a console on standard output; texts from outside must be `styled` first."""
    import rich.console  # noqa: PLC0415  # as above

    return rich.console.Console()


def styled(text: str, style: str = "") -> "rich.text.Text":
    """Return a text for the console; markup inside the text has no effect."""
    import rich.text  # noqa: PLC0415  # as above

    return rich.text.Text(escaping.plain(text, keep="\n"), style=style)
