"""Pure: the charts of the page of plots, computed from events and health's state."""

import bisect
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import date
from typing import Final, NamedTuple

import msgspec

from muster.fleet import model, usage
from muster_console import detection_delays, heartbeat_ages

WIDTH: Final = 480.0
HEIGHT: Final = 130.0
_BASE: Final = 108.0
"""The vertical position of the axis."""
_TOP: Final = 14.0
_LEFT: Final = 34.0
_RESOURCES_MAX: Final = 12
_OLDEST_MAX: Final = 5
_LABELS_MAX: Final = 8
_TOP_MIN: Final = 2
_HEIGHT_MIN: Final = 1.5
"""The minimum height of a part, so that a small count is still visible."""
_DELAYS_S: Final = (1, 2, 5, 10, 30, 60, 300)
_DELAY_NAMES: Final = (
    "<1 s",
    "1-2 s",
    "2-5 s",
    "5-10 s",
    "10-30 s",
    "30-60 s",
    "1-5 min",
    ">5 min",
)
_AGES: Final = (1, 2, 3, 5, math.inf)
_AGE_NAMES: Final = ("<1", "1-2", "2-3", "3-5", ">5", "none")
_AGE_LEVELS: Final = ("ok", "ok", "notice", "warning", "critical", "unknown")


class Series(NamedTuple):
    """One series of a stacked column chart: its name, and the level that sets its colour."""

    name: str
    level: str


_SEVERITIES: Final = (
    Series("critical", "critical"),
    Series("warning", "warning"),
    Series("info", "notice"),
)
_DELAYS: Final = (Series("silent plugins", "accent"), Series("device faults", "second"))


class Rect(msgspec.Struct, frozen=True, kw_only=True):
    """A rectangle in a chart: the part of a column that shows one series."""

    x: float
    y: float
    width: float
    height: float
    level: str
    title: str


class Label(msgspec.Struct, frozen=True, kw_only=True):
    """A text in a chart, with its position."""

    x: float
    y: float
    text: str


class Plot(msgspec.Struct, frozen=True, kw_only=True):
    """A column chart, and its values as the rows of a table."""

    rects: tuple[Rect, ...]
    labels: tuple[Label, ...]
    top: int
    """The value at the upper grid line."""
    rows: tuple[tuple[str, str], ...]
    legend: tuple[Series, ...]
    summary: str = ""


class _Column(NamedTuple):
    name: str
    """The label below the column."""
    full: str
    """The name of the column in the table."""
    counts: tuple[int, ...]
    """The counts, in the order of the series."""


def alerts_per_day(days: Sequence[tuple[date, Mapping[str, int]]]) -> Plot:
    """Return the plot of how many alerts began on each day, by severity."""
    columns = [
        _Column(
            f"{day:%d %b}",
            f"{day:%Y-%m-%d}",
            tuple(counts.get(each.name, 0) for each in _SEVERITIES),
        )
        for day, counts in days
    ]
    return _plot(columns, _SEVERITIES)


def delays(every: Collection[detection_delays.Delay]) -> Plot:
    """Return the plot of how many faults were detected within each range of seconds."""
    counts = [[0, 0] for _ in _DELAY_NAMES]
    for each in every:
        counts[bisect.bisect_right(_DELAYS_S, each.seconds)][each.is_device] += 1
    columns = [
        _Column(name, name, tuple(pair)) for name, pair in zip(_DELAY_NAMES, counts, strict=True)
    ]
    parts = []
    for is_device, series in enumerate(_DELAYS):
        seconds = [each.seconds for each in every if each.is_device == bool(is_device)]
        if seconds:
            median, longest = statistics.median(seconds), max(seconds)
            parts.append(f"{series.name}: half within {median:.1f} s, all within {longest:.1f} s")
    return msgspec.structs.replace(_plot(columns, _DELAYS), summary="; ".join(parts))


def ages(by_node: Mapping[str, heartbeat_ages.Age]) -> Plot:
    """Return the plot of nodes by the age of their last heartbeat, in intervals."""
    counts = [0] * len(_AGE_NAMES)
    for age in by_node.values():
        counts[bisect.bisect_right(_AGES, age.intervals)] += 1
    series = tuple(map(Series, _AGE_NAMES, _AGE_LEVELS))
    columns = [
        _Column(
            name,
            f"{name} intervals" if name != "none" else name,
            tuple(count if each.name == name else 0 for each in series),
        )
        for name, count in zip(_AGE_NAMES, counts, strict=True)
    ]
    return msgspec.structs.replace(_plot(columns, series), legend=())


def oldest(by_node: Mapping[str, heartbeat_ages.Age]) -> tuple[tuple[str, float], ...]:
    """Return the nodes with the most overdue heartbeats and their ages in seconds, worst first."""
    late = [(name, age) for name, age in by_node.items() if 2 <= age.intervals < math.inf]  # noqa: PLR2004  # one is due
    late.sort(key=lambda each: (-each[1].intervals, each[0]))
    return tuple((name, age.seconds) for name, age in late[:_OLDEST_MAX])


def resources(nodes: Iterable[model.NodeSummary]) -> tuple[tuple[usage.Usage, ...], int]:
    """Return how much of each resource pods may use, and how many resources are left out."""
    every = usage.of_fleet(nodes)
    return tuple(every[:_RESOURCES_MAX]), max(0, len(every) - _RESOURCES_MAX)


def bar_width(part: int, whole: int, width: float = 100.0) -> float:
    """Return the width of a bar; only a part that equals the whole has the full width."""
    if not whole:
        return 0.0
    exact = width * part / whole
    return round(min(exact, width * 0.985), 1) if part < whole else width


def _plot(columns: Sequence[_Column], series: Sequence[Series]) -> Plot:
    """Return a plot of stacked columns, with one part per series."""
    top = _round_up(max((sum(column.counts) for column in columns), default=0))
    step = (WIDTH - _LEFT) / max(1, len(columns))
    every = 1 if len(columns) <= _LABELS_MAX else 2
    rects, labels = [], []
    for number, column in enumerate(columns):
        x, y = _LEFT + number * step, _BASE
        for each, count in zip(series, column.counts, strict=True):
            height = max(_HEIGHT_MIN, (_BASE - _TOP) * count / top) if count else 0.0
            y -= height
            if count:
                rects.append(
                    Rect(
                        x=round(x + 3, 1),
                        y=round(y, 1),
                        width=round(step - 6, 1),
                        height=round(height, 1),
                        level=each.level,
                        title=f"{column.full}: {count} {each.name}",
                    )
                )
        # the last column always has its label
        if (len(columns) - 1 - number) % every == 0:
            x = min(x + step / 2, WIDTH - 20)
            labels.append(Label(x=round(x, 1), y=_BASE + 15, text=column.name))
    return Plot(
        rects=tuple(rects),
        labels=tuple(labels),
        top=top,
        rows=tuple((column.full, _counted(column, series)) for column in columns),
        legend=tuple(series),
    )


def _counted(column: _Column, series: Sequence[Series]) -> str:
    if sum(column.counts) and any(each.name == column.name for each in series):
        return str(sum(column.counts))
    parts = [f"{n} {each.name}" for n, each in zip(column.counts, series, strict=True) if n]
    return ", ".join(parts) or "none"


def _round_up(value: int) -> int:
    """Round up to an even number that is 1, 2, 4, 6 or 8 times a power of ten."""
    if value <= _TOP_MIN:
        return _TOP_MIN
    power: int = 10 ** int(math.log10(value))
    return next(step * power for step in (1, 2, 4, 6, 8, 10) if step * power >= value)
