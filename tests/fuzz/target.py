"""Defines fuzz targets: functions that call a parser of untrusted bytes and check its result.

A target calls the parser as its service does, ignores the errors that the parser documents, and
asserts properties of accepted input: for example, it survives a round trip, or no control character
is printed. Any other exception is a defect, and so is a run that takes too long.
"""

import functools
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

CORPUS: Final = Path(__file__).parent / "corpus"
"""One file for each target; a line is an input, in Python's notation for bytes."""
RECORDED: Final = Path(__file__).parents[1] / "recorded"
TARGETS: Final[dict[str, "Target"]] = {}

Run = Callable[[bytes], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A target, with seeds: examples of valid input, made by the real encoders if they exist.

    `words` are texts that mutation alone would hardly create. `long` returns valid input with about
    that many parts; a test uses it to show that the cost does not grow quadratically.
    """

    name: str
    run: Run
    seeds: Callable[[], Iterable[bytes]]
    words: tuple[str, ...] = ()
    long: Callable[[int], bytes] | None = None

    def corpus(self) -> list[bytes]:
        """Return the seeds, and the inputs that earlier runs added to the tree."""
        file = CORPUS / f"{self.name}.txt"
        lines = file.read_text("ascii").splitlines() if file.exists() else []
        return list(dict.fromkeys([*self.seeds(), *map(from_line, lines)]))


def target(
    *,
    seeds: Callable[[], Iterable[bytes]],
    words: Iterable[str] = (),
    long: Callable[[int], bytes] | None = None,
) -> Callable[[Run], Run]:
    """Return a decorator that registers a function as a target, under its own name."""

    def register(run: Run) -> Run:
        name = run.__name__
        TARGETS[name] = Target(name=name, run=run, seeds=seeds, words=tuple(words), long=long)
        return run

    return register


def to_line(data: bytes) -> str:
    """Return an input as a line of a corpus file."""
    return data.decode("latin-1").encode("unicode_escape").decode("ascii")


def from_line(line: str) -> bytes:
    """Return the input in a line of a corpus file."""
    return line.encode("ascii").decode("unicode_escape").encode("latin-1")


def compact(tree: object) -> bytes:
    """Return a tree as JSON without spaces."""
    return json.dumps(tree, separators=(",", ":"), ensure_ascii=False).encode()


def recorded(*names: str) -> Iterator[tuple[str, bytes]]:
    """Yield subject and payload of messages that earlier versions wrote, by default all of them."""
    for file in sorted(RECORDED.rglob("*.json")):
        if file.stem in names or not names:
            for message in json.loads(file.read_bytes()):
                yield message["subject"], compact(message["body"])


def split(data: bytes, kinds: Mapping[str, Any]) -> tuple[Any, bytes]:
    """Return the member of `kinds` that the first line names, or None, and the other lines."""
    name, _, rest = data.partition(b"\n")
    return kinds.get(name.decode("latin-1")), rest


def in_file(data: bytes) -> Path:
    """Write a file with this content, in memory if possible; return its path, always the same."""
    file = Path(_directory().name) / "input"
    file.write_bytes(data)
    return file


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)
