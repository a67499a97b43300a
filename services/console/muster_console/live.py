"""Adapter for the event loop: keeps fleet, events and history up to date for all pages."""

import asyncio
import collections
import contextlib
import dataclasses
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

import msgspec

from muster import codec, vocabulary
from muster.fleet import dead_letters, health_client, model, reader, writing
from muster.nats import connection
from muster.service import logs
from muster_console import (
    alert_history,
    detection_delays,
    event_log,
    heartbeat_ages,
    node_page,
    subscribers,
)

_TICK_S: Final = 1.0
"""The minimum time between two messages to a page."""
_IDLE_S: Final = 5.0
_COLLECT_S: Final = 0.05
"""How long changes are collected before the first message about them."""
_PAST_RETRY_S: Final = 10.0
_PAST_EVENTS_MAX: Final = 20_000
_NODE_EVENTS_MAX: Final = 10_000
_NODE_READS_MAX: Final = 4
_NODE_WAIT_S: Final = 10.0
_MISSING: Final = "changes, pods, devices and the timeline are missing"
_KEPT_S: Final = 1.0
"""How long the data read about a node is reused for other pages that show the node."""
_PAST_KEPT_S: Final = 30.0
_KEPT_MAX: Final = 20
_LETTERS_MAX: Final = 100
_LETTERS_EVERY_S: Final = 30.0
_LETTERS_WAIT_S: Final = 10.0


class _Kept(NamedTuple):
    """A finished or running read of a node, its start, and the version of the data at that time."""

    at: float
    version: tuple[int, int, int]
    reading: asyncio.Task[node_page.Sources]


class Live:
    """The data that the pages show, kept up to date while `run` runs."""

    def __init__(self, link: connection.Connection, *, health: Sequence[str]) -> None:
        self.fleet = model.FleetModel()
        self.history = alert_history.AlertHistory()
        self.log = event_log.EventLog()
        self.delays = detection_delays.DetectionDelays()
        self.ages = heartbeat_ages.HeartbeatAges()
        listeners = reader.Listeners(
            on_change=self._on_change, on_event=self._on_event, on_state=self.ages.receive
        )
        self.reader = reader.FleetReader(self.fleet, health=health, link=link, listeners=listeners)
        self.feed = subscribers.Feed(
            self.fleet,
            self.history,
            self.log,
            instance=uuid.uuid4().hex[:12],
            is_connected=lambda: self.reader.is_bus_connected,
        )
        self._clock = asyncio.get_running_loop().time
        self._link = link
        self._has_changed = asyncio.Event()
        self._letters_changed = asyncio.Event()
        self._tick = asyncio.Event()
        self._reads = asyncio.Semaphore(_NODE_READS_MAX)
        self._nodes: collections.OrderedDict[tuple[str, timedelta], _Kept] = (
            collections.OrderedDict()
        )

    async def run(self) -> None:
        """Keep all data up to date until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.reader.run())
                tasks.create_task(self._read_past())
                tasks.create_task(self._read_dead_letters())
                tasks.create_task(self._beat())
        finally:
            for kept in self._nodes.values():
                kept.reading.cancel()

    def now(self) -> float:
        """Return the monotonic time in seconds, which the model uses."""
        return self._clock()

    async def ticked(self) -> None:
        """Wait for the next tick, which follows a change or `_IDLE_S`; at most one a second."""
        await self._tick.wait()

    async def ticked_or(self, end: "asyncio.Future[None]") -> None:
        """Wait as `ticked` does, but at most until `end` is done."""
        ticked = asyncio.ensure_future(self.ticked())
        try:
            await asyncio.wait([ticked, end], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ticked.cancel()

    def read_dead_letters_again(self) -> None:
        """Cause the dead letters to be read again soon, because one was sent again."""
        self._letters_changed.set()

    async def sources(
        self, node: str, age: timedelta, *, is_past: bool = False
    ) -> node_page.Sources:
        """Return a node's state from health, and its events up to this age; pages share the reads.

        A page about the past (`is_past`) may get an older answer.
        """
        key = node, age
        version = self.fleet.revision, self.log.last, self.history.revision
        kept = self._nodes.get(key)
        is_new = is_past or (kept is not None and kept.version == version)
        kept_s = _PAST_KEPT_S if is_past else _KEPT_S
        if kept is None or not is_new or self._clock() - kept.at > kept_s:
            reading = asyncio.create_task(self._read_node(node, age))
            self._nodes[key] = kept = _Kept(self._clock(), version, reading)
            self._nodes.move_to_end(key)
            while len(self._nodes) > _KEPT_MAX:
                self._nodes.popitem(last=False)
        return await asyncio.shield(kept.reading)

    async def _read_node(self, node: str, age: timedelta) -> node_page.Sources:
        problems: list[str] = []
        state, events = None, None
        try:
            async with asyncio.timeout(_NODE_WAIT_S), self._reads:
                try:
                    state = await self.reader.node(node)
                except (ConnectionError, health_client.UnreadableState) as error:
                    problems.append(f"health does not answer: {error}; verdicts are missing")
                if self.reader.is_bus_connected:
                    events = await self._past_of(node, age, problems)
                else:
                    problems.append(f"no connection to NATS; {_MISSING}")
        except TimeoutError:
            problems.append(f"not all data was read within {_NODE_WAIT_S:g} s; reload the page")
        return node_page.Sources(state=state, events=events, problems=tuple(problems))

    async def _past_of(
        self, node: str, age: timedelta, problems: list[str]
    ) -> list[codec.CloudEvent] | None:
        try:
            return await self.reader.past_events(node=node, age=age, events_max=_NODE_EVENTS_MAX)
        except ConnectionError as error:
            problems.append(f"{error}; {_MISSING}")
            return None

    def _on_change(self) -> None:
        self._has_changed.set()

    def _on_event(self, event: codec.CloudEvent) -> None:
        at = datetime.now(UTC)
        self.log.receive(event, at=at)
        self.history.receive(event, at=at)
        self.delays.receive(event)
        if isinstance(event.data, vocabulary.NotificationFailed):
            self._letters_changed.set()
        self._has_changed.set()

    async def _beat(self) -> None:
        """Inform pages of changes: soon after a change, but at most once a second."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_IDLE_S):
                    await self._has_changed.wait()
            await asyncio.sleep(_COLLECT_S)
            self._has_changed.clear()
            self.feed.observe()
            tick, self._tick = self._tick, asyncio.Event()
            tick.set()
            await asyncio.sleep(_TICK_S - _COLLECT_S)

    async def _read_dead_letters(self) -> None:
        """Read the dead letters after each failed notification, and periodically."""
        letters = writing.NewestLetters(self._link, dead_letters.NOTIFICATIONS, most=_LETTERS_MAX)
        while True:
            self._letters_changed.clear()
            try:
                async with asyncio.timeout(_LETTERS_WAIT_S):
                    newest, total = await letters.read()
            except TimeoutError:
                known = self.history.dead_letters
                problem = f"NATS has not answered for {_LETTERS_WAIT_S:g} s"
                now_dead = msgspec.structs.replace(known, problem=problem)
            else:
                # the bodies are not shown, and thousands of them would take much memory
                shown = tuple(dataclasses.replace(each, body=b"") for each in newest)
                now_dead = alert_history.DeadLetters(letters=shown, total=total, problem="")
            self.history.receive_dead_letters(now_dead)
            self._on_change()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LETTERS_EVERY_S):
                    await self._letters_changed.wait()
            await asyncio.sleep(_TICK_S)

    async def _read_past(self) -> None:
        """Read the alerts, notifications, verdicts and faults from before this process started."""
        reads = (
            ("alert.*", timedelta(days=alert_history.DAYS)),
            ("alert.*", alert_history.KEPT),
            ("notification.*", alert_history.KEPT),
            ("verdict.changed", detection_delays.KEPT),
            ("device.health_changed", detection_delays.KEPT),
        )
        is_logged = False
        for types, age in reads:
            while True:
                try:
                    events = await self.reader.past_events(
                        types=types, age=age, events_max=_PAST_EVENTS_MAX
                    )
                    break
                except ConnectionError as error:
                    if not is_logged:
                        logs.logger().warning("history_unreadable", types=types, error=str(error))
                    is_logged = True
                    await asyncio.sleep(_PAST_RETRY_S)
            at = datetime.now(UTC)
            for event in events:
                self.history.receive(event, at=at)
                self.delays.receive(event)
            if len(events) >= _PAST_EVENTS_MAX:
                self.history.is_cut = True
            # other tasks run between the reads
            await asyncio.sleep(0)
        self.history.is_loaded = True
        self._on_change()
