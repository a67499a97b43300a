"""Pure: lists of a text page: kept in order and filtered, and laid out for a terminal's width.

A list changes item by item, so a fleet of 10,000 nodes is not sorted again when one of them
changes. Only the rows that are on the screen are turned into text.
"""

import bisect
import enum
import types
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Generic, NamedTuple, TypeVar

from muster import escaping

T = TypeVar("T")

FILTER_MAX: Final = 100
_GAP: Final = 2
_FIT_MAX: Final = 1_000
"""The number of characters of a text that are processed; no terminal shows more on one line."""
_LINES_MAX: Final = 5_000
_LINE_MAX: Final = 2_000
_REBUILT_FROM: Final = 8
"""Sort a list again if more than one in this many of its items change at the same time."""


class Tone(enum.StrEnum):
    """The style of a text, which adds no meaning of its own."""

    PLAIN = "plain"
    DIM = "dim"
    STRONG = "strong"
    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"
    CHOSEN = "chosen"
    """The row of the cursor, or the view that is open."""


class Part(NamedTuple):
    """A text and its tone."""

    text: str
    tone: Tone = Tone.PLAIN


Line = tuple[Part, ...]


class Context(NamedTuple):
    """The data that rows need in addition to their item."""

    now: datetime
    width: int
    """The width of the page."""
    widest: int = 0
    """The width of the longest name of a node."""
    label_width: int = 0
    """The width of the longest verdict or kind of alert of a node."""
    has_places: bool = False
    """Whether pools or zones are known."""
    in_use: Mapping[tuple[str, str], int] = types.MappingProxyType({})
    """How many devices pods use, by node and resource, where this is known."""


class Column(NamedTuple):
    """A column: its heading, its width, and the smallest page width at which it is shown.

    The remaining width is divided among the columns in proportion to their `weight`.
    """

    heading: str
    width: int
    weight: int = 0
    is_right: bool = False
    shown_from: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind(Generic[T]):
    """A kind of list: how its items are identified, filtered, sorted and shown."""

    key: Callable[[T], str]
    node: Callable[[T], str]
    """The node that an item concerns; empty if there is none."""
    words: Callable[[T], str]
    """The text that a filter searches."""
    sorts: Sequence[tuple[str, Callable[[T], tuple[object, ...]]]]
    """The name and sort key of each order; no two items have the same sort key."""
    columns: "Callable[[Context], Sequence[Column]]"
    cells: "Callable[[T, Context], Sequence[Part]]"
    empty: str
    """What is shown if there are no items."""
    follows: bool = False
    """Whether a cursor on the last item moves to newer items, as in the tail of a log."""


class Listing(Generic[T]):
    """Items in order, those that pass the filter, and a cursor.

    The cursor follows its item, with two exceptions: on the first row it stays on the first row,
    and on the last row of a list with `follows` it stays on the last row.
    """

    def __init__(self, kind: Kind[T]) -> None:
        self.kind = kind
        self.filter = ""
        self.cursor = 0
        self.first = 0
        """The first row on the screen."""
        self.widest = 0
        """The width of the longest name of a node."""
        self._sort = 0
        self._hidden: set[str] = set()
        """The names of the columns that `lines` did not show when it was last called."""
        self._required: list[str] = []
        self._refused: list[str] = []
        self._items: dict[str, T] = {}
        self._shown: list[T] = []

    def __len__(self) -> int:
        """Return the number of items that pass the filter."""
        return len(self._shown)

    @property
    def total(self) -> int:
        """The number of all items."""
        return len(self._items)

    @property
    def order(self) -> str:
        """The name of the order by which the items are sorted."""
        return self.kind.sorts[self._sort][0]

    @property
    def _sort_key(self) -> Callable[[T], tuple[object, ...]]:
        return self.kind.sorts[self._sort][1]

    @property
    def chosen(self) -> T | None:
        """The item at the cursor; None if no item is shown."""
        return self._shown[self.cursor] if self._shown else None

    @property
    def is_at_end(self) -> bool:
        """Whether the cursor is on the last row."""
        return self.cursor >= len(self._shown) - 1

    def rows(self, start: int, count: int) -> list[T]:
        """Return the items of `count` rows from row `start` on."""
        return self._shown[start : start + count]

    def items(self) -> Iterable[T]:
        """Return all items, in no particular order."""
        return self._items.values()

    def replace(self, items: Iterable[T]) -> None:
        """Replace all items."""
        chosen, was_at_end = self.chosen, self.is_at_end
        self._items, self.widest = {}, 0
        self._put(items)
        self._rebuild(chosen, was_at_end=was_at_end)

    def update(self, changed: Sequence[T], removed: Iterable[str] = ()) -> None:
        """Add or replace some items, and remove others."""
        chosen = self.chosen
        was_at_end = self.is_at_end
        for key in removed:
            self._take_out(self._items.pop(key, None))
        if len(changed) * _REBUILT_FROM > len(self._items):
            self._put(changed)
            self._rebuild(chosen, was_at_end=was_at_end)
            return
        for item in changed:
            key = self.kind.key(item)
            self._take_out(self._items.get(key))
            self._put([item])
            if self._passes(item):
                bisect.insort(self._shown, item, key=self._sort_key)
        self._restore(chosen, was_at_end=was_at_end)

    def set_filter(self, text: str) -> None:
        """Show only items that contain every word of the text, and no word that follows a `!`."""
        chosen, was_at_end = self.chosen, self.is_at_end
        self.filter = text
        words = text.lower().split()
        self._refused = [word[1:] for word in words if word[0] == "!" and word[1:]]
        self._required = [word for word in words if word[0] != "!" or not word[1:]]
        self._rebuild(chosen, was_at_end=was_at_end)

    def next_order(self) -> None:
        """Sort by the next order; orders by a column that is not shown are skipped."""
        self._sort = (self._sort + 1) % len(self.kind.sorts)
        while self.order in self._hidden:
            self._sort = (self._sort + 1) % len(self.kind.sorts)
        self.cursor = self.first = 0
        self._rebuild(None, was_at_end=False)

    def move(self, steps: int) -> None:
        """Move the cursor by some rows, at most to the first or the last."""
        self.cursor = max(0, min(self.cursor + steps, len(self._shown) - 1))

    def scroll(self, height: int) -> None:
        """Choose the first row so that the cursor is visible and the items fill the screen."""
        self.first = min(self.first, self.cursor, max(0, len(self._shown) - height))
        self.first = max(self.first, self.cursor - height + 1, 0)

    def lines(self, context: Context, height: int) -> list[Line]:
        """Return the headings and the rows around the cursor."""
        context = context._replace(widest=self.widest)
        columns = self.kind.columns(context)
        width = context.width
        self._hidden = {column.heading.lower() for column in columns if column.shown_from > width}
        headings = [Part(column.heading, Tone.DIM) for column in columns]
        lines = [row_line(columns, headings, context.width)]
        self.scroll(height - 1)
        first = self.first
        for row, item in enumerate(self.rows(first, height - 1), first):
            line = row_line(columns, self.kind.cells(item, context), context.width)
            if row == self.cursor:
                line = tuple(Part(part.text, Tone.CHOSEN) for part in line)
            lines.append(line)
        if not len(self):
            text = self.filter
            empty = (
                f"nothing passes the filter {text!r}; esc clears it" if text else self.kind.empty
            )
            lines.append(fit_line([Part(f" {empty}", Tone.DIM)], context.width))
        return lines

    def lines_of(self, context: Context, items: Iterable[T]) -> list[Line]:
        """Return these items as rows, without headings and cursor."""
        context = context._replace(widest=self.widest)
        columns = self.kind.columns(context)
        return [row_line(columns, self.kind.cells(item, context), context.width) for item in items]

    def shows(self, key: str) -> bool:
        """Return whether there is an item with this key, and it passes the filter."""
        item = self._items.get(key)
        return item is not None and self._passes(item)

    def _position(self, item: T) -> int | None:
        """Return the row of an item; None if it is not shown."""
        row = bisect.bisect_left(self._shown, self._sort_key(item), key=self._sort_key)
        is_here = row < len(self._shown) and self._shown[row] is item
        return row if is_here else None

    def _take_out(self, item: T | None) -> None:
        row = None if item is None else self._position(item)
        if row is not None:
            del self._shown[row]

    def _put(self, items: Iterable[T]) -> None:
        for item in items:
            self._items[self.kind.key(item)] = item
            self.widest = max(self.widest, width_of(self.kind.node(item)))

    def _rebuild(self, chosen: T | None, *, was_at_end: bool) -> None:
        items = self._items.values()
        passing = filter(self._passes, items) if self.filter else items
        self._shown = sorted(passing, key=self._sort_key)
        self._restore(chosen, was_at_end=was_at_end)

    def _restore(self, chosen: T | None, *, was_at_end: bool) -> None:
        """Move the cursor to the item that was chosen before, or keep it at the end of the list."""
        if self.kind.follows and was_at_end:
            self.cursor = max(0, len(self._shown) - 1)
        elif self.cursor > 0 and chosen is not None:
            now = self._items.get(self.kind.key(chosen))
            row = None if now is None else self._position(now)
            if row is not None:
                # what is on the screen stays there, unless the page shows the top
                self.first += row - self.cursor if self.first else 0
                self.cursor = row
        self.move(0)

    def _passes(self, item: T) -> bool:
        words = self.kind.words(item).lower()
        has_all = all(word in words for word in self._required)
        return has_all and not any(word in words for word in self._refused)


def width_of(text: str) -> int:
    """Return how many cells of a terminal a text occupies."""
    return len(text) if text.isascii() else sum(map(_cells, text))


def fit(text: str, width: int, *, is_right: bool = False) -> str:
    """Return the text in exactly `width` cells: padded, or cut off with an ellipsis."""
    text = escaping.plain(text[:_FIT_MAX])
    missing = width - width_of(text)
    if missing >= 0:
        return " " * missing + text if is_right else text + " " * missing
    left = width - 1
    kept = 0
    for kept, character in enumerate(text):  # noqa: B007  # the first that does not fit
        left -= _cells(character)
        if left < 0:
            break
    shown = text[:kept] + "…" * (width > 0)
    return shown + " " * (width - width_of(shown))


def fit_line(parts: Iterable[Part], width: int) -> Line:
    """Return the parts in exactly `width` cells."""
    fitted = []
    for text, tone in parts:
        left = min(width, width_of(escaping.plain(text[:_FIT_MAX])))
        fitted.append(Part(fit(text, left), tone))
        width -= left
    return (*fitted, Part(" " * width)) if width else tuple(fitted)


def laid_out(columns: Sequence[Column], width: int) -> list[int]:
    """Return the width of each column; 0 for a column that is not shown."""
    shown = [column.shown_from <= width for column in columns]
    fixed = sum(
        column.width + _GAP for column, is_shown in zip(columns, shown, strict=True) if is_shown
    )
    weights = sum(c.weight for c, is_shown in zip(columns, shown, strict=True) if is_shown)
    left = max(0, width - fixed + _GAP - 2)
    widths = []
    for column, is_shown in zip(columns, shown, strict=True):
        more = left * column.weight // weights if weights else 0
        widths.append(column.width + more if is_shown else 0)
    return widths


def row_line(columns: Sequence[Column], cells: Sequence[Part], width: int) -> Line:
    """Return one row of a table."""
    parts = [Part(" ")]
    for column, cell, cell_width in zip(columns, cells, laid_out(columns, width), strict=True):
        if cell_width:
            text = fit(cell.text, cell_width, is_right=column.is_right)
            parts += [Part(text, cell.tone), Part(" " * _GAP)]
    return fit_line(parts[:-1], width)


def wrapped(text: str, width: int, *, most: int = _LINES_MAX) -> list[str]:
    """Return a text as lines of at most `width` cells; later lines are indented.

    Only words longer than half a line are split. If there are more than `most` lines, the last one
    returned ends with an ellipsis.
    """
    text = escaping.plain(text)
    indent = len(text) - len(text.lstrip()) + 4
    if indent * 2 > width:
        indent = 0
    lines: list[str] = []
    while width_of(text) > width:
        if len(lines) == most - 1:
            return [*lines, fit(text, width)]
        end = _cut(text, width)
        space = text.rfind(" ", indent + 1, end + 1)
        end = space if space > end // 2 else end
        lines.append(text[:end])
        text = " " * indent + text[end:].lstrip()
    return [*lines, text]


def wrapped_parts(parts: Iterable[Part], width: int, *, most: int) -> list[Line]:
    """Return each part as at most `most` lines of `width` cells."""
    return [
        fit_line([Part(line, part.tone)], width)
        for part in parts
        for line in wrapped(part.text, width, most=most)
    ]


def _cut(text: str, width: int) -> int:
    """Return how many characters fit into `width` cells, at least one."""
    left = width
    for count, character in enumerate(text):
        left -= _cells(character)
        if left < 0:
            return max(count, 1)
    return len(text)


def _cells(character: str) -> int:
    if character.isascii():
        return 1
    if unicodedata.category(character) in {"Mn", "Me"}:
        return 0
    return 2 if unicodedata.east_asian_width(character) in {"W", "F"} else 1
