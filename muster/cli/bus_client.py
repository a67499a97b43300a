"""Adapter: NATS for the commands: connections with a time limit; everything on the bus."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Final, TypeVar

from muster import client, codec, vocabulary
from muster.local import nats
from muster.nats import bus, consumers, streams

_PATIENCE_S: Final = 10.0
Told = codec.CloudEvent | vocabulary.Heartbeat
Event = TypeVar("Event", bound=vocabulary.Event)
_KEPT_MAX: Final = 100_000
_START_S: Final = 20.0


def run_within(command: str, asked: Coroutine[object, object, int]) -> int:
    """Do what a command asks; return its exit code."""

    async def within() -> int:
        async with asyncio.timeout(_PATIENCE_S):
            return await asked

    try:
        return asyncio.run(within())
    except TimeoutError:
        print(f"muster {command}: NATS does not answer", file=sys.stderr)
        return 1


def connect(command: str, url: str | None) -> bus.Bus:
    """Return a connection; by default to this machine's NATS."""
    return bus.Bus(
        url or client.DEFAULT_URL, producer=f"clients/{command}", name=command, owner=True
    )


class Watch:
    """What has been heard since the watch began, each with the loop's time of arrival."""

    def __init__(self) -> None:
        self.heard: list[tuple[float, Told]] = []
        self._news = asyncio.Condition()

    async def hear(self, told: Told) -> None:
        """Keep one event or beat, and wake who waits for it."""
        async with self._news:
            if len(self.heard) >= _KEPT_MAX:
                del self.heard[: _KEPT_MAX // 2]
            self.heard.append((asyncio.get_running_loop().time(), told))
            self._news.notify_all()

    async def first(
        self, kind: type[Event], wanted: Callable[[Event], bool], *, since: float
    ) -> tuple[float, Event]:
        """Return when and what was first heard since a time, of a kind and as wanted."""
        seen = 0
        while True:
            async with self._news:
                for at, told in self.heard[seen:]:
                    data = told.data if isinstance(told, codec.CloudEvent) else None
                    if at >= since and isinstance(data, kind) and wanted(data):
                        return at, data
                seen = len(self.heard)
                while len(self.heard) == seen:
                    await self._news.wait()


@asynccontextmanager
async def everything(
    url: str, hear: Callable[[Told], object], *, since: datetime | None = None
) -> AsyncIterator[bus.Bus]:
    """Tell `hear` of every event since then or now, and every beat; what it returns is awaited."""

    async def told(what: Told) -> None:
        result = hear(what)
        if asyncio.iscoroutine(result):
            await result

    async def follow(stream: streams.Stream) -> None:
        async for event in consumers.follow(
            connected.link, stream, filters=stream.subjects, since=since
        ):
            await told(event)

    async with bus.Bus(url, producer="clients/muster", name="muster", owner=True) as connected:
        await connected.heartbeats(told)
        try:
            async with asyncio.timeout(_START_S):
                await connected.link.client()
        except TimeoutError:
            raise nats.NatsUnavailable(
                f"{url}: not ready after {_START_S:g} s; JetStream needs about 1.4 GiB of free disk"
            ) from None
        tasks = [asyncio.create_task(follow(s)) for s in (streams.EVENTS, streams.ALERTS)]
        try:
            yield connected
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
