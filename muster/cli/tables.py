"""Adapter: the terminal: tables of what others wrote."""

import sys
from collections.abc import Iterable, Sequence
from typing import Final

import rich.console
import rich.table
from rich.markup import escape

from muster.cli import status

_WIDTH_MAX: Final = 10_000
"""Of a line in a pipe or a file, where nothing is cut off."""


def show(names: Sequence[str], rows: Iterable[Sequence[str]], *, nothing: str) -> None:
    """Print a table, or say that there is nothing in it."""
    table = rich.table.Table(*names)
    for row in rows:
        table.add_row(*(escape(status.plain(cell)) for cell in row))
    width = None if sys.stdout.isatty() else _WIDTH_MAX
    rich.console.Console(width=width).print(table if table.row_count else nothing)
