"""Adapter: people: `muster gpu-name`, what muster would call a product, and why."""

import argparse
import pathlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec
import yaml

from muster_labeler import accelerators, reports

_FILE_BYTES_MAX: Final = 1024 * 1024
_LINES_MAX: Final = 100_000
_LINE_MAX: Final = 4096
_MEMORY: Final = re.compile(r"0*[1-9][0-9]{0,11}")


class BadAliases(Exception):
    """The alias file cannot be used; the text says why."""


class _Answer(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    product: str
    memory_mib: int | None
    value: str | None
    reason: str
    is_shared: bool = False


def aliases(file: pathlib.Path | None) -> dict[str, str]:
    """Return the reviewed names in a YAML file of `product: name`. Raises BadAliases."""
    if file is None:
        return {}
    try:
        with file.open("rb") as opened:
            found = yaml.safe_load(opened.read(_FILE_BYTES_MAX).decode())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadAliases(f"{file}: {' '.join(str(error).split())}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise BadAliases(f"{file}: not a mapping of products to names")
    for product, name in found.items():
        if not (isinstance(product, str) and isinstance(name, str) and accelerators.is_name(name)):
            raise BadAliases(f"{file}: {product!r}: {name!r} is no accelerator name")
    return found


def run(chosen: argparse.Namespace) -> int:
    """Print what each product would be called; return the exit code."""
    try:
        known = aliases(chosen.aliases)
    except BadAliases as error:
        return _mistake(str(error))
    if chosen.memory_mib is not None and chosen.memory_mib <= 0:
        return _mistake("--memory-mib: more than 0")
    if chosen.tsv == (chosen.product is not None):
        return _mistake("name one product, or give --tsv and products on standard input")
    if not chosen.tsv:
        answers = [_answer(chosen.product, chosen.memory_mib, known, is_mig=chosen.mig)]
    else:
        try:
            answers = list(_lines(sys.stdin, known, is_mig=chosen.mig))
        except ValueError as error:
            return _mistake(str(error))
    sys.stdout.write(_written(answers, as_json=chosen.json, is_list=chosen.tsv))
    return 0


def _written(answers: Sequence[_Answer], *, as_json: bool, is_list: bool) -> str:
    if as_json:
        document = msgspec.json.encode(answers if is_list else answers[0])
        return msgspec.json.format(document).decode() + "\n"
    lines = [[one.value or "-", one.reason, *([one.product] if is_list else [])] for one in answers]
    return "".join("\t".join(reports.plain(word) for word in line) + "\n" for line in lines)


def _lines(lines: Iterable[str], known: Mapping[str, str], *, is_mig: bool) -> Iterable[_Answer]:
    """Read `product<TAB>memory MiB` lines. Raises ValueError that names the line."""
    for number, line in enumerate(lines, start=1):
        if number > _LINES_MAX:
            raise ValueError(f"more than {_LINES_MAX} lines")
        text = line.rstrip("\r\n")
        if not text.strip():
            continue
        product, _, memory = text[:_LINE_MAX].partition("\t")
        memory = memory.strip()
        if memory and not _MEMORY.fullmatch(memory):
            raise ValueError(f"line {number}: {memory[:40]!r} is no memory in MiB")
        yield _answer(product, int(memory) if memory else None, known, is_mig=is_mig)


def _answer(
    product: str, memory_mib: int | None, known: Mapping[str, str], *, is_mig: bool
) -> _Answer:
    name = accelerators.name(product, memory_mib, is_mig=is_mig, aliases=known)
    return _Answer(product, memory_mib, name.value, name.reason, name.is_shared)


def _mistake(text: str) -> int:
    sys.stderr.write(f"muster gpu-name: {reports.plain(text)}\n")
    return 2
