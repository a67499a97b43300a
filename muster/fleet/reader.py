"""Adapter for HTTP and NATS: keeps a `FleetModel` current, and passes on the events of the bus.

All nodes are read continuously, page by page. An event about a node makes the reader read that node
immediately; if many nodes change together, it reads all pages without pauses instead (`rounds`).
"""

import asyncio
import contextlib
import functools
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from muster import blocking, codec, matching, vocabulary
from muster.fleet import health_client, health_state, model, rounds
from muster.nats import connection, consumers, storage, streams

PAGE_NODES: Final = 500
_RETRY_S: Final = (0.5, 5.0)
_SETTLE_S: Final = 0.3
"""How long to wait before the nodes of events are read: health must process the events first."""
_READ_S: Final = 10.0
_PAST: Final = timedelta(hours=1)
_NOT_OF_INTEREST: Final = (vocabulary.InventoryReported, vocabulary.WatchdogTicked)
_NO_CHANGE: Final = (
    vocabulary.LabelEvent,
    vocabulary.NotificationEvent,
    vocabulary.AllocationObserved,
    vocabulary.OperatorActed,
)
"""Events that change nothing in health's state."""


@dataclass(frozen=True, slots=True)
class Listeners:
    """Functions called on the event loop: after each change of the model, and with each event."""

    on_change: Callable[[], None]
    on_event: Callable[[codec.CloudEvent], None]
    on_state: Callable[[health_state.State], None] = lambda _: None
    """Called with each page or node that was read, for data that the model does not keep."""


class FleetReader:
    """Reads the fleet's state while `run` runs, through outages of health and of NATS."""

    def __init__(
        self,
        fleet: model.FleetModel,
        *,
        health: Sequence[str],
        link: connection.Connection,
        listeners: Listeners,
    ) -> None:
        self.fleet = fleet
        self._replicas = health_client.Replicas(health)
        self._link = link
        self._listeners = listeners
        self._reading = blocking.Serial()
        self._clock = asyncio.get_running_loop().time
        self._changed = rounds.ChangedNodes()
        self._has_changed = asyncio.Event()
        self._rounds = rounds.Rounds(self._clock())
        self._is_round_wanted = asyncio.Event()

    @property
    def is_bus_connected(self) -> bool:
        """Whether events arrive at present."""
        return self._link.is_connected

    async def run(self) -> None:
        """Read until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read_all())
            tasks.create_task(self._read_changed())
            tasks.create_task(self._follow_silences())
            for stream in streams.FOLLOWED:
                if stream is not streams.INVENTORY:
                    tasks.create_task(self._follow(stream))

    async def node(self, name: str) -> health_state.State:
        """Return the state of one node in full. Raises ConnectionError or UnreadableState."""
        return await self._read(f"node={urllib.parse.quote(name, safe='')}")

    async def past_events(
        self, *, types: str = "*", node: str = "*", age: timedelta, events_max: int
    ) -> list[codec.CloudEvent]:
        """Return the events up to this age, oldest first; at most `events_max` from each stream.

        Raises ValueError for a pattern that nothing can match, and ConnectionError if NATS does not
        answer.
        """
        by_stream: dict[streams.Stream, list[str]] = {}
        for subject in vocabulary.subject_filters(types, node):
            by_stream.setdefault(streams.required(subject), []).append(subject)
        since = datetime.now(UTC) - age
        reading = [
            consumers.past(self._link, stream, filters=filters, since=since, events_max=events_max)
            for stream, filters in by_stream.items()
        ]
        try:
            async with asyncio.timeout(_READ_S):
                events = [event for part in await asyncio.gather(*reading) for event in part]
        except TimeoutError:
            raise ConnectionError(f"NATS has not answered for {_READ_S:g} s") from None
        return sorted(events, key=lambda event: event.time)

    async def _read(self, query: str) -> health_state.State:
        try:
            return await self._reading.run(
                functools.partial(self._replicas.read, query), timeout_s=_READ_S
            )
        except TimeoutError:
            raise ConnectionError(f"no answer within {_READ_S:g} s") from None

    async def _page(self, after: str) -> health_state.State:
        """Return the page of nodes after a name. Raises ConnectionError or UnreadableState."""
        quoted = urllib.parse.quote(after, safe="")
        page = await self._read(f"nodes={PAGE_NODES}&after={quoted}")
        if page.next and page.next <= after:
            # such pages would never end
            problem = f"health's page after {after!r} ends before that node"
            raise health_client.UnreadableState(problem)
        return page

    async def _read_all(self) -> None:
        """Read page after page; after a failure, read the same page again."""
        wait_s = _RETRY_S[0]
        while True:
            await self._pause()
            after = self._rounds.next_page(self._clock())
            if not self._rounds.is_wanted:
                self._is_round_wanted.clear()
            try:
                page = await self._page(after)
            except (ConnectionError, health_client.UnreadableState) as error:
                self.fleet.receive_failure(str(error), now=self._clock())
                self._listeners.on_change()
                await asyncio.sleep(wait_s)
                wait_s = min(_RETRY_S[1], wait_s * 2)
                continue
            now, at = self._clock(), datetime.now(UTC)
            self.fleet.receive_page(page, after=after, now=now, at=at)
            self._listeners.on_state(page)
            self._listeners.on_change()
            self._rounds.receive_page(page.next)
            wait_s = _RETRY_S[0]

    async def _pause(self) -> None:
        """Wait before the next page, for a shorter time if a fast round is wanted."""
        if not self._rounds.is_wanted:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._rounds.pause_s(self._clock())):
                    await self._is_round_wanted.wait()
        if self._rounds.is_wanted:
            await asyncio.sleep(self._rounds.pause_s(self._clock()))

    async def _read_changed(self) -> None:
        """Read the nodes that events concern."""
        while True:
            await self._has_changed.wait()
            await asyncio.sleep(_SETTLE_S)
            self._has_changed.clear()
            names = self._changed.take()
            if names is None or not await self._read_nodes(names):
                self._rounds.want()
                self._is_round_wanted.set()

    async def _read_nodes(self, names: Sequence[str]) -> bool:
        """Read these nodes; return whether all could be read."""
        for name in names:
            try:
                state = await self.node(name)
            except (ConnectionError, health_client.UnreadableState):
                return False
            self.fleet.receive_node(state, name, now=self._clock(), at=datetime.now(UTC))
            self._listeners.on_state(state)
            self._listeners.on_change()
        return True

    async def _follow(self, stream: streams.Stream) -> None:
        since = datetime.now(UTC) - _PAST
        events = consumers.follow(
            self._link, stream, filters=stream.subjects, since=since, wants=_is_of_interest
        )
        async for event in events:
            if isinstance(event.data, _NOT_OF_INTEREST):
                continue
            self._listeners.on_event(event)
            if not isinstance(event.data, _NO_CHANGE):
                self._changed.add(event.node)
                self._has_changed.set()

    async def _follow_silences(self) -> None:
        async for change in storage.follow(self._link, streams.SILENCES):
            if change is None:
                continue
            key, value = change
            silence = None
            if value:
                with contextlib.suppress(matching.MalformedSilence):
                    silence = matching.decode_silence(value)
            self.fleet.receive_silence(key, silence, at=datetime.now(UTC))
            self._listeners.on_change()


def _is_of_interest(subject: str, _: int) -> bool:
    """Return whether to decode a message; the watchdog's frequent messages are not decoded."""
    return not subject.endswith(".watchdog.ticked")
