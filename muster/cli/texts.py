"""Pure: texts for a terminal: aligned columns, no control characters, durations and times."""

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from muster import escaping

plain = escaping.plain

NAME_CLUSTER: Final = "name a cluster with --context CONTEXT"
"""What to do if health or NATS is not on this machine."""

_GAP: Final = "  "
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800, "y": 31_536_000}
_YEAR: Final = timedelta(days=366)


def duration(text: str, *, longest: timedelta = _YEAR) -> timedelta:
    """Parse a duration such as `1h30m`. Raises ValueError, also for 0 and above `longest`."""
    if not re.fullmatch(r"(\d{1,9}[smhdwy])+", text):
        raise ValueError(f"{text!r} is not a duration such as 2h or 1h30m")
    parts = re.findall(r"(\d+)([smhdwy])", text)
    seconds = sum(int(count) * _UNITS[unit] for count, unit in parts)
    if not 0 < seconds <= longest.total_seconds():
        raise ValueError(f"{text!r} is not between 1 s and {longest.days} days")
    return timedelta(seconds=seconds)


def since(text: str) -> datetime | timedelta:
    """Parse an age or a time; a time without a zone is UTC. Raises ValueError."""
    if re.fullmatch(r"[0-9smhdwy]+", text) and text[-1:].isalpha():
        return duration(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither an age such as 15m nor an ISO time") from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns; the last column is not padded."""
    cells = [[plain(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        _GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
