"""Pure: How the configuration's problems are told: one text for all of them, each with its key."""

from collections.abc import Iterable, Iterator

from muster.service import validation


def raise_if_any(problems: Iterable[str]) -> None:
    """Raise ValueError if there are problems; it holds every one."""
    texts = [*problems]
    if texts:
        raise validation.Refused(texts)


def prefixed(key: str, problems: Iterable[str]) -> Iterator[str]:
    """Put the key before each problem."""
    return (f"{key}: {problem}" for problem in problems)


def duplicates(values: list[str]) -> Iterator[str]:
    """Give each value that stands there twice, once."""
    once: set[str] = set()
    yielded: set[str] = set()
    for value in values:
        if value in once and value not in yielded:
            yielded.add(value)
            yield value
        once.add(value)


quoted = validation.quoted
"""What the user wrote, short enough for a line."""


def path_problems(path: str) -> Iterator[str]:
    """Say why a path could mean different places, or none."""
    parts = path.split("/")
    if not path.startswith("/") or "\0" in path:
        yield f"{quoted(path)} is not an absolute path"
    elif any(part in {"", ".", ".."} for part in parts[1:]):
        yield f"{quoted(path)} is not the shortest way to write this path"
