"""Pure: stores the newest events as pages show them, up to a maximum number and size."""

import collections
import fnmatch
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Final

import msgspec

from muster import codec, escaping, vocabulary
from muster.cli import event_texts
from muster_console import device_names

EVENTS_MAX: Final = 2_000
_BYTES_MAX: Final = 8 * 1024 * 1024
_TEXT_MAX: Final = 300
_PATTERN_MAX: Final = 100
"""The maximum length of a pattern, which is limited because compiled patterns are cached."""
_NEWS: Final = (
    vocabulary.VerdictChanged,
    vocabulary.AlertChanged,
    vocabulary.DeviceHealthChanged,
    vocabulary.RemediationDecided,
    vocabulary.PluginDeregistered,
    vocabulary.ConfigurationRefused,
    vocabulary.NotificationFailed,
)


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One event, as one line of text (`text`) and as CloudEvents JSON (`encoded`)."""

    number: int
    """The number of the event, in order of arrival."""
    id: str
    time: datetime
    type: str
    node: str
    text: str
    is_news: bool
    """Whether the page of the fleet lists the event among the latest changes."""
    encoded: bytes
    order: datetime
    """The event's time, but not later than its arrival, because a node's clock may be ahead."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line in the list of events."""

    id: str
    time: datetime
    type: str
    node: str
    text: str


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """A filter of events: shell patterns for type and node; an empty pattern matches all."""

    type: str = ""
    node: str = ""

    def matches(self, entry: Entry) -> bool:
        """Return whether an event is to be shown."""
        return all(
            not pattern or fnmatch.fnmatchcase(value, pattern)
            for pattern, value in ((self.type, entry.type), (self.node, entry.node))
        )


class After(msgspec.Struct, frozen=True, kw_only=True):
    """The events that a page has not shown yet."""

    entries: tuple[Entry, ...]
    left_out: int
    """How many older matching events are not in `entries`."""
    dropped: int
    """How many older events are no longer stored; it is unknown whether they match."""


class EventLog:
    """Stores the newest events; above a maximum number or size, the oldest are dropped."""

    def __init__(self) -> None:
        self.last = 0
        """The number of the newest event."""
        self._entries: collections.OrderedDict[str, Entry] = collections.OrderedDict()
        self._bytes = 0

    def receive(self, event: codec.CloudEvent, *, at: datetime | None = None) -> None:
        """Add an event that arrived at the time `at`; ignore an event that is already stored."""
        if event.id in self._entries:
            return
        self.last += 1
        entry = Entry(
            number=self.last,
            id=event.id,
            time=event.time,
            type=event.type,
            node=event.node,
            text=line_of(event),
            is_news=isinstance(event.data, _NEWS),
            encoded=codec.dump(event),
            order=min(event.time, at) if at else event.time,
        )
        self._entries[event.id] = entry
        self._bytes += len(entry.encoded)
        while len(self._entries) > EVENTS_MAX or self._bytes > _BYTES_MAX:
            _, oldest = self._entries.popitem(last=False)
            self._bytes -= len(oldest.encoded)

    def get(self, event_id: str) -> Entry | None:
        """Return an event by its id; None if it is not stored."""
        return self._entries.get(event_id)

    def newest(self, wanted: Filter, *, most: int) -> list[Entry]:
        """Return the newest matching events by time, the newest first."""
        matching = [entry for entry in self._entries.values() if wanted.matches(entry)]
        return sorted(matching, key=lambda entry: (entry.order, entry.number), reverse=True)[:most]

    def after(self, number: int, wanted: Filter, *, most: int) -> After:
        """Return the newest matching events with a greater number, and how many are left out."""
        later = [*_reversed_until(self._entries, number)]
        oldest = later[-1].number if later else self.last + 1
        matching = [entry for entry in reversed(later) if wanted.matches(entry)]
        return After(
            entries=tuple(matching[-most:]),
            left_out=max(0, len(matching) - most),
            dropped=max(0, oldest - number - 1) if number else 0,
        )


def filter_of(query: Mapping[str, str]) -> Filter:
    """Return the filter in the parameters of an address."""
    type_, node = (query.get(name, "").strip()[:_PATTERN_MAX] for name in ("type", "node"))
    return Filter(type=type_, node=node)


def line(entry: Entry) -> Line:
    """Return an event's line in the list of events."""
    return Line(id=entry.id, time=entry.time, type=entry.type, node=entry.node, text=entry.text)


def line_of(event: codec.CloudEvent) -> str:
    """Return one line of text about an event, without its time and node."""
    text = device_names.shortened(event_texts.change_text(event).removeprefix(f"{event.type} "))
    return text if len(text) <= _TEXT_MAX else f"{text[: _TEXT_MAX - 3]}..."


def pretty(encoded: bytes, *, characters_max: int | None) -> tuple[str, int]:
    """Return an event as indented JSON, cut if too long, and its full length (0 if not cut)."""
    text = escaping.json_text(msgspec.json.format(encoded, indent=2))
    if characters_max is None or len(text) <= characters_max:
        return text, 0
    return f"{text[:characters_max]}\n... (cut)", len(text)


def _reversed_until(entries: collections.OrderedDict[str, Entry], number: int) -> Iterator[Entry]:
    for entry in reversed(entries.values()):
        if entry.number <= number:
            return
        yield entry
