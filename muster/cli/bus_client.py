"""Adapter: NATS for the commands: connections with a time limit; everything on the bus."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Annotated, Final, TypeVar

from cyclopts import Parameter

from muster import client, codec, vocabulary
from muster.cli import output
from muster.local import nats
from muster.nats import bus, consumers, streams

Url = Annotated[
    str | None,
    Parameter(env_var="NATS_URL", help="Address of NATS; by default that on this machine."),
]
Message = codec.CloudEvent | vocabulary.Heartbeat
Event = TypeVar("Event", bound=vocabulary.Event)

_TIMEOUT_S: Final = 10.0
_START_TIMEOUT_S: Final = 20.0
_KEPT_MAX: Final = 100_000


def run_within(command: str, work: Coroutine[object, object, int]) -> int:
    """Run a command's work, for ten seconds at most; return its exit code."""

    async def limited() -> int:
        async with asyncio.timeout(_TIMEOUT_S):
            return await work

    try:
        return asyncio.run(limited())
    except TimeoutError:
        return output.fail(command, "NATS does not answer", code=1)


def connect(command: str, url: str | None) -> bus.Bus:
    """Return a connection; by default to this machine's NATS."""
    return bus.Bus(
        url or client.DEFAULT_URL, producer=f"clients/{command}", name=command, owner=True
    )


class Recorder:
    """Keeps the messages it receives, each with the loop's time of arrival."""

    def __init__(self) -> None:
        self._messages: list[tuple[float, Message]] = []
        self._changed = asyncio.Condition()

    async def record(self, message: Message) -> None:
        """Keep a message; wake whoever waits for one."""
        async with self._changed:
            if len(self._messages) >= _KEPT_MAX:
                del self._messages[: _KEPT_MAX // 2]
            self._messages.append((asyncio.get_running_loop().time(), message))
            self._changed.notify_all()

    async def first(
        self, kind: type[Event], matches: Callable[[Event], bool], *, since: float
    ) -> tuple[float, Event]:
        """Return the first event of a kind that matches, received since a time; and when."""
        checked = 0
        while True:
            async with self._changed:
                for at, message in self._messages[checked:]:
                    data = message.data if isinstance(message, codec.CloudEvent) else None
                    if at >= since and isinstance(data, kind) and matches(data):
                        return at, data
                checked = len(self._messages)
                while len(self._messages) == checked:
                    await self._changed.wait()


@asynccontextmanager
async def subscribe_all(
    url: str, receive: Callable[[Message], Awaitable[None]], *, since: datetime | None = None
) -> AsyncIterator[bus.Bus]:
    """Call `receive` with every heartbeat from now on and every event since a time, else now."""

    async def follow(stream: streams.Stream) -> None:
        async for event in consumers.follow(
            connected.link, stream, filters=stream.subjects, since=since
        ):
            await receive(event)

    async with bus.Bus(url, producer="clients/muster", name="muster", owner=True) as connected:
        await connected.heartbeats(receive)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await connected.link.client()
        except TimeoutError:
            raise nats.NatsUnavailable(
                f"{url}: not ready after {_START_TIMEOUT_S:g} s; JetStream needs about 1.4 GiB of "
                "free disk"
            ) from None
        tasks = [asyncio.create_task(follow(s)) for s in (streams.EVENTS, streams.ALERTS)]
        try:
            yield connected
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
