"""What a fuzz target is: one parser of foreign bytes, and what may come out of it.

A target calls the parser as its service does, swallows the errors that the parser documents, and
asserts what must hold for whatever was accepted: an encoder gives it back, no control character is
printed. Anything else that it raises is a defect, and so is a run that takes too long.
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
    """One parser, and examples of valid input, made by the real encoders where there are any.

    `words` are what mutation alone would hardly invent. `long` returns valid input of about this
    many parts: with it, a test shows that the cost does not grow with the square of the size.
    """

    name: str
    run: Run
    seeds: Callable[[], Iterable[bytes]]
    words: tuple[str, ...] = ()
    long: Callable[[int], bytes] | None = None

    def corpus(self) -> list[bytes]:
        """Return the seeds, and what earlier runs left in the tree."""
        file = CORPUS / f"{self.name}.txt"
        lines = file.read_text("ascii").splitlines() if file.exists() else []
        return list(dict.fromkeys([*self.seeds(), *map(from_line, lines)]))


def target(
    *,
    seeds: Callable[[], Iterable[bytes]],
    words: Iterable[str] = (),
    long: Callable[[int], bytes] | None = None,
) -> Callable[[Run], Run]:
    """Make a function a target, under its own name."""

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
    """Yield subject and payload of the messages that earlier versions wrote."""
    for file in sorted(RECORDED.rglob("*.json")):
        if file.stem in names or not names:
            for message in json.loads(file.read_bytes()):
                yield message["subject"], compact(message["body"])


def split(data: bytes, kinds: Mapping[str, Any]) -> tuple[Any, bytes]:
    """Return what the first line of an input names, and the rest; None if it names nothing."""
    name, _, rest = data.partition(b"\n")
    return kinds.get(name.decode("latin-1")), rest


def in_file(data: bytes) -> Path:
    """Return a file with this content, in memory where that is possible; always the same file."""
    file = Path(_directory().name) / "input"
    file.write_bytes(data)
    return file


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)
