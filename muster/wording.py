"""Pure: how a number of things, or a list of names, is written in a text for people.

Shorter than other modules: it is only what every service needs to write a sentence.
"""

from collections.abc import Iterable, Sequence


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 pod" or "3 pods"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def name_list(names: Iterable[str], most: int = 5) -> str:
    """Return the first names by alphabet, and how many more there are."""
    return listed(sorted(set(names)), most)


def listed(texts: Sequence[str], most: int = 3) -> str:
    """Return the first texts in the given order, and how many more there are."""
    rest = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + rest
