"""Pure: reports problems of the configuration; a problem of one setting begins with its key."""

import collections
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from muster.service import validation


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """A section whose fields must be consistent; it is rejected with all its problems."""

    def __post_init__(self) -> None:
        """Raise Refused if there are problems."""
        raise_if_any(self.problems())

    def problems(self) -> Iterator[str]:
        """Yield the problems of this section; a problem of one setting begins with its key."""
        raise NotImplementedError


class CheckedInParts(msgspec.Struct, frozen=True, kw_only=True):
    """A section like `Checked` whose valid fields are checked even if others are invalid."""

    def __post_init__(self) -> None:
        """Raise Refused if there are problems."""
        validation.refuse(self)

    def demands(self) -> Iterator[validation.Demand]:
        """Yield the consistency checks of this section."""
        raise NotImplementedError


def raise_if_any(problems: Iterable[str]) -> None:
    """Raise Refused with all problems, if there are any."""
    texts = [*problems]
    if texts:
        raise validation.Refused(texts)


def prefixed(key: str, problems: Iterable[str]) -> Iterator[str]:
    """Prefix each problem with the key."""
    return (f"{key}: {problem}" for problem in problems)


def duplicates(values: list[str]) -> Iterator[str]:
    """Yield, once, each value that is listed more than once."""
    return (value for value, count in collections.Counter(values).items() if count > 1)


quoted = validation.quoted
"""Returns the user's value as YAML, short enough for a line."""


def listed(items: Sequence[str], *, most: int) -> str:
    """Return the first `most` items as text, and the number of the others."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return f"{', '.join(items[:most])}{more}"


def path_problems(path: str) -> Iterator[str]:
    """Yield a problem if a path is not absolute or not in its shortest form."""
    parts = path.split("/")
    if not path.startswith("/") or "\0" in path:
        yield f"{quoted(path)} is not an absolute path"
    elif any(part in {"", ".", ".."} for part in parts[1:]):
        yield f"{quoted(path)} is not the shortest form of this path"
