"""Pure: collects the changes that each open page has not received yet.

A page that reads slowly loses nothing and delays no other page: only the revision that the page has
received is stored, and all changes since then are merged when the page reads again.
"""

import re
from collections.abc import Callable
from datetime import datetime
from typing import Final

import msgspec

from muster import escaping
from muster.fleet import model
from muster_console import alert_history, event_log, fleet_json

STATE_S: Final = 10.0
"""The fleet's state is sent to each page at least this often, even if nothing changes."""
EVENTS_MAX: Final = 200
"""How many events one message may have; further ones are counted."""
_ENCODED_MAX: Final = 8
"""The maximum number of cached encodings, one per revision; up-to-date pages share one."""


_POSITION: Final = re.compile(r"([0-9a-z]{1,32})-([0-9]{1,15})-([0-9]{1,15})-([0-9]{1,15})")


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """What a page has received from the console's process `instance`."""

    instance: str
    revision: int
    alerts: int
    event: int
    """The number of the last event that was sent to the page, or left out by its filter."""

    def __str__(self) -> str:
        """Return the position as the id of a server-sent event."""
        return f"{self.instance}-{self.revision}-{self.alerts}-{self.event}"


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One server-sent event: its name, its data as JSON on one line, and its id."""

    name: str
    data: bytes
    position: Position
    """The position of the page after this message."""


class FleetState(msgspec.Struct, frozen=True, kw_only=True):
    """How many alerts fire, and why the data may be out of date (`problem` and `caveats`)."""

    instance: str
    problem: str
    caveats: tuple[str, ...]
    alerts: int
    at: datetime


class Tail(msgspec.Struct, frozen=True, kw_only=True):
    """New events for a page that follows them, and how many were skipped."""

    events: tuple[event_log.Line, ...]
    skipped: int
    dropped: int
    """How many events are no longer stored; an unknown number of them match the filter."""


class Feed:
    """The data that open pages are updated with; call `observe` before pages take messages.

    Messages are encoded once for all pages with the same revision.
    """

    def __init__(
        self,
        fleet: model.FleetModel,
        history: alert_history.AlertHistory,
        log: event_log.EventLog,
        *,
        instance: str,
        is_connected: Callable[[], bool],
    ) -> None:
        self.fleet = fleet
        self.history = history
        self.log = log
        self.instance = instance
        self.alerts_revision = 0
        """A number that grows when the alerts, their silences or their notifications change."""
        self._is_connected = is_connected
        self._seen: tuple[int, int] = (-1, -1)
        self._alerts_digest = 0
        self._encoded: dict[int, bytes] = {}
        self._encoded_for = -1

    def observe(self) -> None:
        """Increase `alerts_revision` if the alerts, silences or notifications have changed."""
        seen = (self.fleet.revision, self.history.revision)
        if seen == self._seen:
            return
        alerts = tuple((a.fingerprint, a.severity, a.summary) for a in self.fleet.alerts)
        silences = tuple((key, each.ends_at) for key, each in self.fleet.silences.items())
        digest = hash((alerts, silences, self.history.revision))
        if digest != self._alerts_digest:
            self.alerts_revision += 1
        self._seen, self._alerts_digest = seen, digest

    def state(self, now: float, at: datetime) -> FleetState:
        """Return how many alerts fire, and why the data may be out of date."""
        caveats = list(self.fleet.caveats())
        if not self._is_connected():
            caveats.append("no connection to NATS: events and silences may be out of date")
        return FleetState(
            instance=self.instance,
            problem=escaping.plain(self.fleet.problem(now)),
            caveats=tuple(caveats),
            alerts=len(self.fleet.alerts),
            at=at,
        )

    def changes_since(self, revision: int) -> bytes | None:
        """Return the changed nodes as JSON, empty if none; None if all must be read again."""
        if self._encoded_for != self.fleet.revision:
            self._encoded, self._encoded_for = {}, self.fleet.revision
        if revision not in self._encoded:
            changes = self.fleet.changed_since(revision)
            if changes.is_restart:
                return None
            columns = fleet_json.columns(
                changes.nodes, revision=self.fleet.revision, removed=changes.removed
            )
            is_empty = not (changes.nodes or changes.removed)
            if len(self._encoded) >= _ENCODED_MAX:
                self._encoded.clear()
            self._encoded[revision] = b"" if is_empty else fleet_json.encode(columns)
        return self._encoded[revision]


class Subscriber:
    """One open page, and what it has received."""

    def __init__(
        self,
        feed: Feed,
        *,
        revision: int | None,
        events: event_log.Filter | None,
        event: int = 0,
        alerts: int | None = None,
    ) -> None:
        """Set what the page has received (`revision`, `alerts`, `event`); None means everything.

        Changes since the page was rendered, or since its last connection, are sent immediately.
        """
        feed.observe()
        self._feed = feed
        self._revision = feed.fleet.revision if revision is None else revision
        self._alerts = feed.alerts_revision if alerts is None else alerts
        self._events = events
        self._event = event
        self._state: FleetState | None = None
        self._state_at = 0.0

    def take(self, now: float, at: datetime) -> list[Message]:
        """Return everything that the page has not received yet."""
        messages = []
        state = self._feed.state(now, at)
        before = msgspec.structs.replace(self._state, at=at) if self._state else None
        if state != before or now - self._state_at >= STATE_S:
            messages.append(self._message("state", msgspec.json.encode(state)))
            self._state, self._state_at = state, now
        if self._revision != self._feed.fleet.revision:
            data = self._feed.changes_since(self._revision)
            self._revision = self._feed.fleet.revision
            if data is None:
                messages.append(self._message("restart", b"{}"))
            elif data:
                messages.append(self._message("fleet", data))
        if self._alerts != self._feed.alerts_revision:
            self._alerts = self._feed.alerts_revision
            messages.append(self._message("alerts", b"{}"))
        return messages + self._tail()

    def _tail(self) -> list[Message]:
        log = self._feed.log
        if self._events is None or self._event >= log.last:
            return []
        new = log.after(self._event, self._events, most=EVENTS_MAX)
        self._event = log.last
        if not (new.entries or new.left_out or new.dropped):
            return []
        lines = tuple(map(event_log.line, new.entries))
        if self._events == event_log.Filter():
            tail = Tail(events=lines, skipped=new.left_out + new.dropped, dropped=0)
        else:
            tail = Tail(events=lines, skipped=new.left_out, dropped=new.dropped)
        return [self._message("events", msgspec.json.encode(tail))]

    def _message(self, name: str, data: bytes) -> Message:
        position = Position(
            instance=self._feed.instance,
            revision=self._revision,
            alerts=self._alerts,
            event=self._event,
        )
        return Message(name=name, data=data, position=position)


def position_of(text: str) -> Position | None:
    """Return the position in the id of a server-sent event; None if the id is not valid."""
    match = _POSITION.fullmatch(text)
    if match is None:
        return None
    revision, alerts, event = map(int, match.groups()[1:])
    return Position(instance=match[1], revision=revision, alerts=alerts, event=event)


def encode(message: Message) -> bytes:
    """Return a message in the format of server-sent events; JSON has no line breaks."""
    fields = message.name.encode(), str(message.position).encode(), message.data
    return b"event: %s\nid: %s\ndata: %s\n\n" % fields
