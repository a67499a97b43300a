"""Pure: draws captured screens of a terminal as SVG: one screen, or an animated recording.

A screen is what `tmux capture-pane -e -p` prints: lines with escape sequences for colours. The
picture has dark or light colours, as the reader prefers. For readers who prefer reduced motion, a
recording is a still picture.
"""

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final, NamedTuple

_CELL: Final = 8.0
_LINE: Final = 18
_MARGIN: Final = 14
_TOKEN: Final = re.compile(r"\x1b\[(?P<codes>[0-9;:]*)m|\x1b\][^\x1b\x07]*(?:\x1b\\|\x07)")
_PARTS: Final = re.compile(r"\S+(?: \S+)*")
"""Matches text without two consecutive spaces; the text after them is positioned separately."""
_COLORS: Final = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_FOREGROUND: Final = {
    str(base + number): color for base in (30, 90) for number, color in enumerate(_COLORS)
}
_ATTRIBUTES: Final = {"1": "bold", "2": "dim", "7": "reverse"}
_ENDS: Final = {"22": {"bold", "dim"}, "27": {"reverse"}, "39": {*_COLORS}}
_STYLE: Final = """\
svg{--page:#fff;--text:#1f2328;--edge:#d0d7de}
text{font:13.3px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;\
fill:var(--text)}
.page{fill:var(--page);stroke:var(--edge)}.edge{stroke:var(--edge)}.mark{fill:var(--text)}
.bold{font-weight:700}.dim{opacity:.65}
.red{fill:#c21a28}.green{fill:#1a7f37}.yellow{fill:#8a5a00}.blue{fill:#0969da}\
.magenta{fill:#8250df}.cyan{fill:#0f6b7c}
text .reverse{fill:var(--page)}
@media (prefers-color-scheme: dark) {
svg{--page:#0d1117;--text:#e6edf3;--edge:#30363d}
.red{fill:#ff7b72}.green{fill:#3fb950}.yellow{fill:#e3b341}.blue{fill:#58a6ff}\
.magenta{fill:#bc8cff}.cyan{fill:#39c5cf}
}
"""


class Run(NamedTuple):
    """Consecutive characters of one style; `style` contains the names of CSS classes."""

    column: int
    text: str
    style: str


Row = tuple[Run, ...]


class Frame(NamedTuple):
    """The rows that the terminals show from `at` on, in seconds since the recording began."""

    at: float
    rows: tuple[Row, ...]


def rows(captured: str) -> tuple[Row, ...]:
    """Return the rows of a captured screen. A style applies until it changes, even across rows."""
    style: frozenset[str] = frozenset()
    drawn = []
    for line in captured.removesuffix("\n").split("\n"):
        runs: list[Run] = []
        column = position = 0
        for match in [*_TOKEN.finditer(line), None]:
            text = line[position : match.start() if match else None]
            if text.strip() or "reverse" in style:
                name = " ".join(sorted(style))
                if runs and runs[-1].style == name:
                    last = runs.pop()
                    text = last.text.ljust(column - last.column) + text
                    column = last.column
                runs.append(Run(column, text, name))
            column += len(text)
            if match is not None:
                position = match.end()
                if match["codes"] is not None:
                    style = _styled(style, match["codes"])
        drawn.append(tuple(runs))
    return tuple(drawn)


def plain(row: Row) -> str:
    """Return the text of a row."""
    text = ""
    for run in row:
        text = text.ljust(run.column) + run.text
    return text


def _styled(style: frozenset[str], codes: str) -> frozenset[str]:
    """Return the style after an escape sequence; numbered and background colours are ignored."""
    for code in codes.split(";"):
        if code in {"", "0"}:
            style = frozenset()
        elif code in {"38", "48"}:
            break
        elif code in _ATTRIBUTES:
            style |= {_ATTRIBUTES[code]}
        elif code in _ENDS:
            style -= _ENDS[code]
        elif code in _FOREGROUND:
            style = style - {*_COLORS} | {_FOREGROUND[code]}
    return style


def picture(title: str, shown: Sequence[Row], columns: int) -> str:
    """Return the picture of a screen as SVG."""
    return _document(title, [_row(number, row) for number, row in enumerate(shown)], columns, shown)


def recording(title: str, frames: Sequence[Frame], columns: int, *, still_at: float) -> str:
    """Return a recording as an SVG that repeats it endlessly.

    `still_at` is the time of the frame that is shown to readers who prefer reduced motion.
    """
    end = frames[-1].at
    still = max(number for number, frame in enumerate(frames) if frame.at <= still_at)
    parts: list[str] = []
    rules: dict[str, str] = {}
    for (number, row), shown in _spans(frames).items():
        drawn = _row(number, row)
        if shown == [(0, len(frames) - 1)]:
            parts.append(drawn)
            continue
        steps = _steps([(frames[start].at / end, frames[stop].at / end) for start, stop in shown])
        name = rules.setdefault(steps, f"k{len(rules)}")
        is_still = any(start <= still < stop for start, stop in shown)
        parts.append(f'<g class="{name}{" still" if is_still else ""}">{drawn}</g>')
    style = (
        "g{visibility:hidden}.still{visibility:visible}\n"
        "@media (prefers-reduced-motion: no-preference) {\n"
        f"g{{animation:{end:.1f}s step-end infinite}}"
        + "".join(f".{name}{{animation-name:{name}}}" for name in rules.values())
        + "}\n"
        + "\n".join(f"@keyframes {name}{{{steps}}}" for steps, name in rules.items())
        + "\n"
    )
    return _document(title, parts, columns, frames[-1].rows, style)


def _spans(frames: Sequence[Frame]) -> dict[tuple[int, Row], list[tuple[int, int]]]:
    """Return the ranges of frames in which each row is shown; the last frame is only the end."""
    spans: dict[tuple[int, Row], list[tuple[int, int]]] = {}
    for index, frame in enumerate(frames[:-1]):
        for place in enumerate(frame.rows):
            if place[1]:
                parts = spans.setdefault(place, [])
                if parts and parts[-1][1] == index:
                    parts[-1] = (parts[-1][0], index + 1)
                else:
                    parts.append((index, index + 1))
    return spans


def _steps(shown: Iterable[tuple[float, float]]) -> str:
    """Return the CSS keyframes of an element that is visible in these parts of the animation."""
    steps: list[str] = []
    for start, stop in shown:
        if start > 0 and not steps:
            steps.append("0%{visibility:hidden}")
        steps.append(f"{_percent(start)}{{visibility:visible}}")
        if stop < 1:
            steps.append(f"{_percent(stop)}{{visibility:hidden}}")
    return "".join(steps)


def _percent(part: float) -> str:
    return f"{part * 100:.2f}".rstrip("0").rstrip(".") + "%"


def _row(number: int, row: Row) -> str:
    """Return the SVG of a row: its text, and rectangles behind characters in reverse video."""
    top = _MARGIN + number * _LINE
    marks, spans = [], []
    for run in row:
        if "reverse" in run.style:
            x, width = _MARGIN + run.column * _CELL, len(run.text) * _CELL
            marks.append(
                f'<rect class="mark" x="{x:g}" y="{top}" width="{width:g}" height="{_LINE}"/>'
            )
        style = f' class="{run.style}"' if run.style else ""
        for part in _PARTS.finditer(run.text):
            x = _MARGIN + (run.column + part.start()) * _CELL
            width = len(part[0]) * _CELL
            spans.append(
                f'<tspan x="{x:g}" textLength="{width:g}"{style}>{escape(part[0])}</tspan>'
            )
    text = f'<text y="{top + 13}">{"".join(spans)}</text>' if spans else ""
    return "".join(marks) + text


def _document(
    title: str, parts: Iterable[str], columns: int, shown: Sequence[Row], style: str = ""
) -> str:
    width, height = columns * _CELL + 2 * _MARGIN, len(shown) * _LINE + 2 * _MARGIN
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{_STYLE}{style}</style>",
            f'<rect class="page" width="{width:g}" height="{height}" rx="8"/>',
            *filter(None, parts),
            "</svg>\n",
        )
    )
