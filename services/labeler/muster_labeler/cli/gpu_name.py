"""Adapter: the command line: `muster gpu-name`, what muster would call a product, and why."""

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from muster.cli import output
from muster_labeler.cli import options
from muster_labeler.naming import accelerators

_LINES_MAX: Final = 100_000
_LINE_CHARS_MAX: Final = 4096
_MEMORY: Final = re.compile(r"0*[1-9][0-9]{0,11}")


class _Answer(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    product: str
    memory_mib: int | None
    value: str | None
    reason: str
    is_shared: bool = False


def run(
    product: str | None, *, memory_mib: int | None, is_mig: bool, as_json: bool, file: Path | None
) -> int:
    """Print the name of a product, or of each product on stdin; raises UsageError."""
    aliases = options.aliases(file)
    if product is None:
        answers = list(_from_lines(sys.stdin, aliases, is_mig=is_mig))
    else:
        answers = [_answer(product, memory_mib, aliases, is_mig=is_mig)]
    if as_json:
        output.print_json(answers if product is None else answers[0], indent=2)
        return 0
    for answer in answers:
        cells = [answer.value or "-", answer.reason]
        if product is None:
            cells.append(answer.product)
        sys.stdout.write("\t".join(map(output.plain, cells)) + "\n")
    return 0


def _from_lines(
    lines: Iterable[str], aliases: Mapping[str, str], *, is_mig: bool
) -> Iterable[_Answer]:
    """Read lines of `product<TAB>memory MiB`. Raises UsageError that names the line."""
    for number, line in enumerate(lines, start=1):
        if number > _LINES_MAX:
            raise options.UsageError(f"more than {_LINES_MAX} lines")
        text = line.rstrip("\r\n")
        if not text.strip():
            continue
        product, _, memory = text[:_LINE_CHARS_MAX].partition("\t")
        memory = memory.strip()
        if memory and not _MEMORY.fullmatch(memory):
            raise options.UsageError(f"line {number}: {memory[:40]!r} is no memory in MiB")
        yield _answer(product, int(memory) if memory else None, aliases, is_mig=is_mig)


def _answer(
    product: str, memory_mib: int | None, aliases: Mapping[str, str], *, is_mig: bool
) -> _Answer:
    name = accelerators.name(product, memory_mib, is_mig=is_mig, aliases=aliases)
    return _Answer(product, memory_mib, name.value, name.reason, name.is_shared)
