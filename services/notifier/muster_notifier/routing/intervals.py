"""Pure: time intervals as Alertmanager has them: times of day, weekdays, days, months, years.

An interval holds when each part that is set holds; a part holds when one of its ranges does.
Source: prometheus/alertmanager timeinterval/timeinterval.go, ContainsTime.
"""

import calendar
import re
import zoneinfo
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from typing import Final

Range = tuple[int, int]
"""First and last, both included; times of day in minutes, their end not included."""

_WEEKDAYS: Final = ("sunday", "monday", "tuesday", "wednesday", "thursday", "friday", "saturday")
_MONTHS: Final = tuple(calendar.month_name[number].lower() for number in range(1, 13))
_CLOCK: Final = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])|24:00")
_DAYS_MAX: Final = 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """One interval; an empty part always holds. Days of a month below 0 count from its end."""

    times: tuple[Range, ...] = ()
    weekdays: tuple[Range, ...] = ()
    days_of_month: tuple[Range, ...] = ()
    months: tuple[Range, ...] = ()
    years: tuple[Range, ...] = ()
    zone: tzinfo = UTC

    def contains(self, at: datetime) -> bool:
        """Return whether it contains this moment."""
        here = at.astimezone(self.zone)
        minute = here.hour * 60 + here.minute
        return (
            (not self.times or any(first <= minute < end for first, end in self.times))
            and _within(self.weekdays, here.isoweekday() % 7)
            and self._has_day(here)
            and _within(self.months, here.month)
            and _within(self.years, here.year)
        )

    def _has_day(self, here: datetime) -> bool:
        if not self.days_of_month:
            return True
        length = calendar.monthrange(here.year, here.month)[1]
        for first, last in self.days_of_month:
            begin = first if first > 0 else length + first + 1
            end = last if last > 0 else length + last + 1
            if begin <= length and max(begin, 1) <= here.day <= min(end, length):
                return True
        return False


def interval(
    *,
    times: Sequence[tuple[str, str]] = (),
    weekdays: Sequence[str] = (),
    days_of_month: Sequence[str] = (),
    months: Sequence[str] = (),
    years: Sequence[str] = (),
    location: str = "UTC",
) -> Interval:
    """Return the interval that these texts describe. Raises ValueError.

    Ranges are written `monday:friday`, `1:5`, `-3:-1`; times are (`09:00`, `17:00`).
    """
    return Interval(
        times=tuple(_times(first, end) for first, end in times),
        weekdays=tuple(_range("weekdays", text, _weekday) for text in weekdays),
        days_of_month=tuple(_days(text) for text in days_of_month),
        months=tuple(_range("months", text, _month) for text in months),
        years=tuple(_range("years", text, int) for text in years),
        zone=_zone(location),
    )


def _within(ranges: Sequence[Range], number: int) -> bool:
    return not ranges or any(first <= number <= last for first, last in ranges)


def _times(first: str, end: str) -> Range:
    for text in (first, end):
        if not _CLOCK.fullmatch(text):
            raise ValueError(f"times: {text!r} is no time of day such as 09:30")
    ranges = _minutes(first), _minutes(end)
    if ranges[0] >= ranges[1]:
        raise ValueError(f"times: {first} is not before {end}; use two ranges across midnight")
    return ranges


def _minutes(text: str) -> int:
    hours, _, minutes = text.partition(":")
    return int(hours) * 60 + int(minutes)


def _days(text: str) -> Range:
    ranges = _range("days_of_month", text, int, ordered=False)
    for day in ranges:
        if day == 0 or abs(day) > _DAYS_MAX:
            raise ValueError(f"days_of_month: {day} is no day of a month")
    if (ranges[0] < 0) == (ranges[1] < 0) and ranges[0] > ranges[1]:
        raise ValueError(f"days_of_month: {text!r} ends before it begins")
    if ranges[0] < 0 < ranges[1]:
        raise ValueError(f"days_of_month: {text!r}: the end must be negative if the start is")
    return ranges


def _range(name: str, text: str, read: Callable[[str], int], *, ordered: bool = True) -> Range:
    first, colon, last = text.strip().lower().partition(":")
    try:
        numbers = read(first), read(last if colon else first)
    except (ValueError, IndexError):
        raise ValueError(f"{name}: {text!r} is none of these, nor a range of two") from None
    if ordered and numbers[0] > numbers[1]:
        raise ValueError(f"{name}: {text!r} ends before it begins")
    return numbers


def _weekday(text: str) -> int:
    return _WEEKDAYS.index(text)


def _month(text: str) -> int:
    number = int(text) if text.isdigit() else _MONTHS.index(text) + 1
    if not 1 <= number <= len(_MONTHS):
        raise ValueError(text)
    return number


def _zone(location: str) -> tzinfo:
    if location in {"", "UTC"}:
        return UTC
    try:
        return zoneinfo.ZoneInfo(location)
    except (ValueError, OSError, zoneinfo.ZoneInfoNotFoundError):
        raise ValueError(f"location: no time zone {location!r} is known here") from None
