"""Pure: decides whether inhibition, silences, maintenance or mute times mute an alert now.

Inhibition: a firing alert mutes other alerts that are only its consequences. A rule has matchers
for the source, matchers for the target, and labels that must be equal in both; a label that both
lack is equal. An alert that matches both sides of a rule is not inhibited by another that matches
both sides, and so never by itself (prometheus/alertmanager inhibit/inhibit.go).

Time intervals are Alertmanager's: times of day, weekdays, days of the month, months, years. A
moment is in an interval if it matches each part that is set; it matches a part if it is in one of
the part's ranges (prometheus/alertmanager timeinterval/timeinterval.go, ContainsTime).
"""

import calendar
import enum
import re
import zoneinfo
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from typing import Final

import msgspec

from muster import matching, vocabulary
from muster_notifier.routing import routes

Range = tuple[int, int]
"""A first and a last value, both included; a range of times, in minutes, excludes its end."""

_WEEKDAYS: Final = ("sunday", "monday", "tuesday", "wednesday", "thursday", "friday", "saturday")
_MONTHS: Final = tuple(calendar.month_name[number].lower() for number in range(1, 13))
_CLOCK: Final = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])|24:00")
_DAYS_MAX: Final = 31
_MATCHING_MAX: Final = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """One interval; an empty part always matches. Negative days of a month count from its end."""

    times: tuple[Range, ...] = ()
    weekdays: tuple[Range, ...] = ()
    days_of_month: tuple[Range, ...] = ()
    months: tuple[Range, ...] = ()
    years: tuple[Range, ...] = ()
    zone: tzinfo = UTC

    def contains(self, at: datetime) -> bool:
        """Return whether the interval contains this moment."""
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

    Ranges are written as `monday:friday`, `1:5` or `-3:-1`, times as (`09:00`, `17:00`).
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
            raise ValueError(f"times: {text!r} is not a time of day such as 09:30")
    ranges = _minutes(first), _minutes(end)
    if ranges[0] >= ranges[1]:
        raise ValueError(f"times: {first} is not before {end}; use two ranges to cross midnight")
    return ranges


def _minutes(text: str) -> int:
    hours, _, minutes = text.partition(":")
    return int(hours) * 60 + int(minutes)


def _days(text: str) -> Range:
    ranges = _range("days_of_month", text, int, ordered=False)
    for day in ranges:
        if day == 0 or abs(day) > _DAYS_MAX:
            raise ValueError(f"days_of_month: {day} is not a day of a month")
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
        raise ValueError(f"{name}: {text!r} is neither a valid value nor a range") from None
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
        raise ValueError(f"location: unknown time zone {location!r}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One inhibition rule."""

    name: str
    source: tuple[matching.Matcher, ...]
    target: tuple[matching.Matcher, ...]
    equal: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Inhibited:
    """The fingerprint of the alert that inhibits another one, and the name of the rule."""

    fingerprint: str
    rule: str


class Inhibition:
    """The firing alerts that are sources of inhibition rules."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = tuple(rules)
        # for each rule: values of its equal labels -> fingerprint -> whether it is a target as well
        self._sources: list[dict[tuple[str, ...], dict[str, bool]]] = [{} for _ in rules]
        self._labels: dict[str, Mapping[str, str]] = {}

    def add_firing(self, fingerprint: str, labels: Mapping[str, str]) -> None:
        """Add a firing alert if it is a source of a rule; replace it if its labels have changed."""
        if self._labels.get(fingerprint) == labels:
            return
        self.remove(fingerprint)
        is_source = False
        for rule, sources in zip(self._rules, self._sources, strict=True):
            if matching.all_hold(rule.source, labels):
                is_target = matching.all_hold(rule.target, labels)
                sources.setdefault(_values(rule, labels), {})[fingerprint] = is_target
                is_source = True
        if is_source:
            self._labels[fingerprint] = labels

    def remove(self, fingerprint: str) -> None:
        """Remove an alert that no longer fires."""
        labels = self._labels.pop(fingerprint, None)
        if labels is None:
            return
        for rule, sources in zip(self._rules, self._sources, strict=True):
            values = _values(rule, labels)
            inhibitors = sources.get(values, {})
            inhibitors.pop(fingerprint, None)
            if not inhibitors:
                sources.pop(values, None)

    def inhibited_by(self, labels: Mapping[str, str]) -> Inhibited | None:
        """Return the alert and the rule that inhibit an alert with these labels, if any."""
        for rule, sources in zip(self._rules, self._sources, strict=True):
            if not matching.all_hold(rule.target, labels):
                continue
            is_source = matching.all_hold(rule.source, labels)
            for fingerprint, is_target in sources.get(_values(rule, labels), {}).items():
                if not (is_source and is_target):
                    return Inhibited(fingerprint, rule.name)
        return None


def _values(rule: Rule, labels: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(labels.get(name, "") for name in rule.equal)


class Cause(enum.StrEnum):
    """Why receivers are not notified of an alert or a whole group now."""

    INHIBITED = "inhibited"
    SILENCED = "silenced"
    MAINTENANCE = "maintenance"
    MUTE_TIME = "mute_time"
    NOT_ACTIVE_TIME = "not_active_time"


BY_PEOPLE: Final = frozenset({Cause.SILENCED, Cause.MAINTENANCE})
"""The causes that show that a person already works on the problem."""


class Muted(msgspec.Struct, frozen=True):
    """Why an alert is muted; `by` names the alert and rule, silence, plugin or intervals."""

    cause: Cause
    by: str


@dataclass(frozen=True, slots=True)
class SilenceChanged:
    """A silence was added, changed or, if `silence` is None, removed."""

    id: str
    silence: matching.Silence | None


class Muting:
    """The inhibitions, silences, maintenance and mute times that can mute alerts."""

    def __init__(
        self,
        rules: Sequence[Rule],
        times: Mapping[str, Sequence[Interval]],
    ) -> None:
        """Start without silences; `times` maps the names that routes use to time intervals."""
        self._inhibition = Inhibition(rules)
        self._times = dict(times)
        self._silences: dict[str, tuple[matching.Silence, tuple[matching.Matcher, ...]]] = {}
        self._matching: dict[tuple[tuple[str, str], ...], Sequence[matching.Silence]] = {}
        self._maintained: set[tuple[str, str]] = set()

    def observe_alert(self, alert: vocabulary.AlertChanged, labels: Mapping[str, str]) -> None:
        """Record an alert; while it fires, it may inhibit others."""
        if alert.state is vocabulary.AlertState.FIRING:
            self._inhibition.add_firing(alert.fingerprint, labels)
        else:
            self._inhibition.remove(alert.fingerprint)

    def observe_verdict(self, verdict: vocabulary.VerdictChanged) -> None:
        """Record a verdict; maintenance mutes a plugin's alerts, except MAINTENANCE_OVERDUE."""
        plugin = verdict.node, verdict.plugin
        if verdict.verdict is vocabulary.Verdict.MAINTENANCE:
            self._maintained.add(plugin)
        else:
            self._maintained.discard(plugin)

    def observe_silence(self, change: SilenceChanged) -> None:
        """Record that a silence was added, changed or removed."""
        self._matching.clear()
        if change.silence is None:
            self._silences.pop(change.id, None)
        else:
            parsed = matching.parse_all(change.silence.matchers)
            self._silences[change.id] = (change.silence, parsed)

    def muted_by(self, labels: Mapping[str, str], at: datetime) -> Muted | None:
        """Return why an alert with these labels is muted at this time; None if it is not."""
        inhibited = self._inhibition.inhibited_by(labels)
        if inhibited is not None:
            return Muted(Cause.INHIBITED, f"{inhibited.fingerprint} by {inhibited.rule}")
        for silence in self._silences_for(labels):
            if silence.is_active(at):
                return Muted(Cause.SILENCED, silence.id)
        plugin = labels.get("node", ""), labels.get("plugin", "")
        is_overdue = labels.get("kind") == vocabulary.AlertKind.MAINTENANCE_OVERDUE
        if plugin in self._maintained and not is_overdue:
            return Muted(Cause.MAINTENANCE, f"{plugin[1]} on {plugin[0]}")
        return None

    def route_muted_by(self, route: routes.Route, at: datetime) -> Muted | None:
        """Return why a whole route is muted at this time; None if it is not."""
        for name in route.mute_times:
            if self._contains(name, at):
                return Muted(Cause.MUTE_TIME, name)
        if route.active_times and not any(self._contains(n, at) for n in route.active_times):
            return Muted(Cause.NOT_ACTIVE_TIME, ", ".join(route.active_times))
        return None

    def active(self, at: datetime) -> list[matching.Silence]:
        """Return the silences that are active at this time."""
        return [silence for silence, _ in self._silences.values() if silence.is_active(at)]

    def _silences_for(self, labels: Mapping[str, str]) -> Sequence[matching.Silence]:
        """Return the silences that match the labels, active or not, from a cache if possible."""
        if not self._silences:
            # while there are no silences, a storm of alerts must not fill the cache
            return ()
        key = tuple(sorted(labels.items()))
        matching_silences = self._matching.get(key)
        if matching_silences is None:
            if len(self._matching) >= _MATCHING_MAX:
                self._matching.clear()
            matching_silences = tuple(
                silence
                for silence, matchers in self._silences.values()
                if matching.all_hold(matchers, labels)
            )
            self._matching[key] = matching_silences
        return matching_silences

    def _contains(self, name: str, at: datetime) -> bool:
        return any(interval.contains(at) for interval in self._times[name])
