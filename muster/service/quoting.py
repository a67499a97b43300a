"""Pure: What a user wrote, as it is told back: in the words of YAML, on one short line."""

import difflib
import itertools
from collections.abc import Collection, Mapping
from typing import Final

_SAID_MAX: Final = 60
_ITEMS_MAX: Final = _SAID_MAX // 3
"""More than fit into what is shown."""
_DEPTH_MAX: Final = 4
_BITS_MAX: Final = 4096
_NEAR: Final = 0.5


def said(value: object) -> str:
    """Return what the user wrote as YAML says it, short enough for a line."""
    text = _said(value)
    return text if len(text) <= _SAID_MAX else text[: _SAID_MAX - 3] + "..."


def near(name: str, known: Collection[str], cutoff: float = _NEAR) -> str:
    """Ask whether the nearest of the known names was meant; empty if none is near."""
    found = difflib.get_close_matches(name[:_SAID_MAX], known, n=1, cutoff=cutoff)
    return f"did you mean {found[0]}?" if found else ""


def key(name: object) -> str:
    """Return the name of a key as it may stand in a path."""
    return name[:_SAID_MAX] if isinstance(name, str) and name.isprintable() else said(name)


def _said(value: object, depth: int = 0) -> str:
    match value:
        case None | bool():
            return "nothing" if value is None else str(value).lower()
        case str():
            return repr(value[: _SAID_MAX + 1])
        case Mapping() | list() | tuple() | set():
            return _gathered(value, depth + 1)
        case bytes():
            return "binary data"
        case int() if value.bit_length() > _BITS_MAX:
            # Python writes no number of any length, and `0xfff...` reads past its limit
            return "a number too large to show"
        case _:
            # numbers, and what YAML makes of dates
            return str(value)


def _gathered(values: Collection[object], depth: int) -> str:
    if depth > _DEPTH_MAX:
        return "..."
    some = itertools.islice(values, _ITEMS_MAX)
    if isinstance(values, Mapping):
        return f"{{{', '.join(f'{_plain(k)}: {_said(values[k], depth)}' for k in some)}}}"
    return f"[{', '.join(_said(one, depth) for one in some)}]"


def _plain(name: object) -> str:
    is_plain = isinstance(name, str) and name.isprintable()
    return str(name)[: _SAID_MAX + 1] if is_plain else _said(name, _DEPTH_MAX)
