"""Pure: how a number of things, or a list of names, is written in a text for people.

Shorter than other modules: it is only what every service needs to write a sentence.
"""

from collections.abc import Iterable


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 pod" or "3 pods"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def name_list(names: Iterable[str], most: int = 5) -> str:
    """Return the first names as text, and how many more there are."""
    ordered = sorted(set(names))
    rest = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + rest
