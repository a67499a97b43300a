"""Pure: formats counts and lists of names in texts for people."""

from collections.abc import Iterable, Sequence


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 pod" or "3 pods"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def name_list(names: Iterable[str], most: int = 5) -> str:
    """Return the first names in alphabetical order, and the number of others."""
    return listed(sorted(set(names)), most)


def listed(texts: Sequence[str], most: int = 3) -> str:
    """Return the first texts in the given order, and the number of others."""
    rest = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + rest
