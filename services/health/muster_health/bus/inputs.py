"""Adapter: NATS, where all comes from that health hears: beats, reports, its memory, who leads."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Final

from muster import codec, vocabulary
from muster.nats import buckets, connection, consumers, heartbeat_stream, lock, streams
from muster.service import logs, runtime
from muster_health import metrics
from muster_health.model import signals, snapshot

Inbox = asyncio.Queue[runtime.Delivery[signals.Input]]
Put = Callable[[signals.Input], Awaitable[None]]
"""Puts an input into the inbox, when there is room."""

_REPORTS: Final = tuple(
    f"muster.event.*.*.{kind}.*" for kind in ("plugin", "inventory", "device", "expectation")
)


class Inputs:
    """Puts everything that is heard into one detector's inbox."""

    def __init__(
        self,
        link: connection.Connection,
        beats: heartbeat_stream.HeartbeatStream,
        leading: lock.Lock,
        inbox: Inbox,
    ) -> None:
        self._link = link
        self._pulse = beats
        self._leading = leading
        self._inbox = inbox
        self._remembers = False

    async def put(self, event: signals.Input) -> None:
        """Put an input in, when there is room."""
        await self._inbox.put(runtime.Delivery(event))

    async def listen(self) -> None:
        """Put in what we knew before our restart, then every beat and every report."""
        await self.put(signals.BusLost())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_link())
            position = await self._remembered()
            tasks.create_task(self._lead())
            await self._pulse.follow(self._beats)
            if not position:
                # without a memory the last word of each kind is enough; all of the past is not news
                position = await self._catch_up()
            reports = consumers.follow(self._link, streams.EVENTS, filters=_REPORTS, after=position)
            async for told in reports:
                await self.put(_report(told, position=told.position))

    async def _lead(self) -> None:
        """Put in who leads; who begins to lead is given first what was remembered."""
        async for revision in self._leading.terms():
            if revision is not None:
                await self._remembered()
                await self._fires_still()
            await self.put(signals.Leadership(revision=revision))

    async def _fires_still(self) -> None:
        """Put in what alerts were told and not ended, where all memory of them is gone."""
        if self._remembers:
            return
        told = [
            event.data
            for event in await consumers.newest(self._link, streams.ALERTS, "muster.alert.>")
        ]
        firing = [event for event in told if isinstance(event, vocabulary.AlertChanged)]
        for known in snapshot.of_alerts(firing):
            await self.put(signals.Restored(state=known))

    async def _remembered(self) -> int:
        """Put in what is remembered; return how far in the stream of events that goes."""
        position = 0
        values = await buckets.recall(self._link, streams.STATE)
        self._remembers = bool(values)
        for key, value in values.items():
            try:
                known = snapshot.decode(value)
            except ValueError as error:
                logs.logger().warning("state_unreadable", key=key, error=str(error))
                continue
            position = max(position, known.position)
            await self.put(signals.Restored(state=known))
        return position

    async def _catch_up(self) -> int:
        """Put in the newest report of each subject; return where the next ones begin."""
        newest = [
            told
            for kind in _REPORTS
            for told in await consumers.newest(self._link, streams.EVENTS, kind)
        ]
        for told in sorted(newest, key=lambda told: told.position):
            await self.put(_report(told, position=told.position))
        return max((told.position for told in newest), default=0)

    async def _beats(self, beats: Sequence[vocabulary.Heartbeat]) -> None:
        """Put beats in, and return when they are dealt with: more can wait in NATS."""
        done = asyncio.Event()

        async def ack() -> None:
            done.set()

        await self._inbox.put(runtime.Delivery(signals.Beats(heartbeats=beats), ack))
        await done.wait()
        metrics.BEATS.labels("taken").inc(len(beats))

    async def _watch_link(self) -> None:
        """We hear while both of our connections are there."""
        links = (self._link, self._pulse.link)
        there: set[connection.Connection] = set()

        async def watch(link: connection.Connection) -> None:
            async for is_there in link.changes():
                (there.add if is_there else there.discard)(link)
                hears = len(there) == len(links)
                await self.put(
                    signals.BusBack(at=datetime.now(UTC)) if hears else signals.BusLost()
                )

        async with asyncio.TaskGroup() as tasks:
            for link in links:
                tasks.create_task(watch(link))


def _report(told: codec.CloudEvent, *, position: int) -> signals.FromPlugin:
    return signals.FromPlugin(
        event=told.data, instance=told.instance, sequence=told.sequence, position=position
    )
