"""Pure: the first and last lines of `muster top`: counts, names of the views, keys.

Each has variants, the longest first. The first that fits into the width is shown.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from muster import escaping, wording
from muster.cli import top_lists as lists
from muster.cli.top_lists import Line, Part, Tone
from muster.fleet import model

WIDTH_MIN: Final = 40
HEIGHT_MIN: Final = 6
"""In a smaller terminal there is no room for a row of a list."""
_RANKS_OF_KEYS: Final = 4
_NOTES_MAX: Final = 3
_NOTE_LINES: Final = 2


class Counts(NamedTuple):
    """The numbers and the address that the first line shows."""

    nodes: int
    levels: Mapping[model.Level, int]
    alerts: int
    silenced: int
    """How many of the alerts are silenced."""
    is_old: bool
    address: str
    """The address of the console; empty if it is not known."""


class Action(NamedTuple):
    """A key and what it does; if not all actions fit, those with the highest rank are omitted."""

    key: str
    what: str
    short: str = ""
    """A shorter text, if there is one."""
    rank: int = 0


def header(counts: Counts, width: int) -> Line:
    """Return the first line; other texts are shortened before the address is omitted."""
    variants = [
        _header(counts, has_address=has_address, words=words)
        for has_address in ([True, False] if counts.address else [False])
        for words in (3, 2, 1, 0)
    ]
    return lists.fit_line(_fitting(variants, width), width)


def too_small(counts: Counts, width: int, height: int) -> list[Line]:
    """Return the lines for a terminal in which no list would fit."""
    text = f"too small: {width}x{height}, needs {WIDTH_MIN}x{HEIGHT_MIN}"
    most = max(1, height)
    lines = lists.wrapped_parts([Part(text, Tone.WARNING)], width, most=most)
    summary = "".join(part.text for part in _header(counts, has_address=False, words=1)).strip()
    lines += lists.wrapped_parts([Part(summary)], width, most=most)
    lines += [lists.fit_line([], width)] * (height - len(lines))
    return lines[: max(1, height)]


def notes(texts: Sequence[Part], width: int) -> list[Line]:
    """Return lines that say why the shown state may be wrong; the most important text is first."""
    shown = [*texts]
    if len(shown) > _NOTES_MAX:
        more = wording.counted(len(shown) - _NOTES_MAX + 1, "more note")
        shown[_NOTES_MAX - 1 :] = [Part(f" NOTE and {more}: `muster status`", Tone.WARNING)]
    return lists.wrapped_parts(shown, width, most=_NOTE_LINES)


def title(text: str, width: int) -> Line:
    """Return a rule with a title."""
    rule = "─" * max(0, width - len(text) - 5)
    return lists.fit_line(
        [Part(" ─ ", Tone.DIM), Part(text, Tone.DIM), Part(f" {rule}", Tone.DIM)], width
    )


def tabs(names: Sequence[str], opened: str, positions: Sequence[str], width: int) -> Line:
    """Return a line with the names of the views, and the longest of the `positions` that fits.

    If none fits beside all names, only the open view has its name beside its number.
    """
    variants = [
        [*left, Part(" " * gap), Part(f" {position}", Tone.DIM)]
        for left in (_tabs(names, opened, short=False), _tabs(names, opened, short=True))
        for position in positions
        if (gap := width - _width(left) - lists.width_of(position) - 2) >= 0
    ]
    return lists.fit_line(variants[0] if variants else _tabs(names, opened, short=True), width)


def trail(texts: Sequence[str], position: str, width: int) -> Line:
    """Return a line that names the item shown in full, and the position in its text."""
    left = [Part(f" {escaping.plain(' > '.join(texts))}", Tone.STRONG)]
    room = width - lists.width_of(position) - 2
    return lists.fit_line([*lists.fit_line(left, room), Part(f" {position}", Tone.DIM)], width)


def keys(actions: Sequence[Action], width: int) -> Line:
    """Return the last line: as many of the actions as fit, in their order."""
    variants = [_keys(actions, gap=3), _keys(actions, gap=1)]
    short = [action._replace(what=action.short or action.what) for action in actions]
    variants += [_keys(short, gap=2), _keys(short, gap=1)]
    for rank in range(_RANKS_OF_KEYS, 0, -1):
        short = [action for action in short if action.rank < rank]
        variants.append(_keys(short, gap=1))
    return lists.fit_line(_fitting(variants, width), width)


def typing(text: str, width: int) -> Line:
    """Return the last line while a filter is typed."""
    hint = Part("   enter keeps, esc clears", Tone.DIM)
    typed = Part(f"{escaping.plain(text)}_")
    return lists.fit_line([Part(" / ", Tone.STRONG), typed, hint], width)


def _header(counts: Counts, *, has_address: bool, words: int) -> list[Part]:
    """Return the parts of the first line; with fewer `words`, less important texts are omitted."""
    listed = [
        f"{counts.levels[each]} {each}"
        for each in model.Level
        if counts.levels.get(each) and (words or each is not model.Level.OK)
    ]
    worst = next((level for level in model.Level if counts.levels.get(level)), None)
    tone = Tone.GOOD if worst is model.Level.OK else Tone.STRONG
    gap = " " * (3 if words else 2)
    parts = [Part(" muster  ", Tone.DIM) if words > 1 else Part(" ")]
    parts.append(Part(wording.counted(counts.nodes, "node"), Tone.STRONG))
    if listed:
        is_bad = worst is model.Level.CRITICAL
        parts.append(Part(f": {', '.join(listed)}", Tone.BAD if is_bad else tone))
    if counts.is_old:
        parts.append(Part(" (old)", Tone.BAD))
    parts.append(Part(f"{gap}{_alerts(counts, is_short=words < 3)}"))  # noqa: PLR2004
    if has_address:
        parts.append(Part(f"{gap}{counts.address}", Tone.DIM))
    return parts


def _alerts(counts: Counts, *, is_short: bool) -> str:
    silenced = f" ({counts.silenced} silenced)" if counts.silenced else ""
    if not counts.alerts:
        return "no alert" if is_short else "no alert is firing"
    if is_short:
        return f"{counts.alerts} firing{silenced}"
    return f"{wording.counted(counts.alerts, 'alert')} firing{silenced}"


def _tabs(names: Sequence[str], opened: str, *, short: bool) -> list[Part]:
    parts = [Part(" ")]
    for number, name in enumerate(names, 1):
        is_open = name == opened
        text = f" {number} " if short and not is_open else f" {number} {name} "
        parts += [Part(text, Tone.CHOSEN if is_open else Tone.PLAIN), Part(" ")]
    return parts


def _keys(actions: Sequence[Action], *, gap: int) -> list[Part]:
    parts = [Part(" ")]
    for number, action in enumerate(actions):
        before = " " * gap if number else ""
        parts += [Part(f"{before}{action.key}", Tone.STRONG), Part(f" {action.what}")]
    return parts


def _fitting(variants: Sequence[list[Part]], width: int) -> list[Part]:
    """Return the first of the variants that fits, or else the last."""
    return next((each for each in variants if _width(each) <= width), variants[-1])


def _width(parts: Sequence[Part]) -> int:
    return sum(lists.width_of(part.text) for part in parts)
