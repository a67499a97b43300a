"""Door to NATS for outside tools: the events of a muster, as they happen or from a time on."""

import asyncio
import contextlib
import fnmatch
import os
from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from typing import Final

from muster import bus, codec, streams, vocabulary

DEFAULT_URL: Final = "nats://127.0.0.1:4222"
_QUEUE_MAX: Final = 1_000


async def events(
    types: str = "*",
    *,
    node: str = "*",
    since: datetime | timedelta | None = None,
    url: str | None = None,
) -> AsyncGenerator[codec.CloudEvent, None]:
    """Give every event whose type and node match two shell patterns, for ever.

    `since` starts in the past (a time, or that long ago), else at now. `url` is where NATS is, by
    default `NATS_URL` or this machine. A lost connection heals by itself, without gaps; order holds
    within what plugins report and within what muster concludes, not between the two.

    Raises ValueError when no event type matches, or no node can.
    """
    filters = vocabulary.subject_filters(types, node)
    start = datetime.now(UTC) - since if isinstance(since, timedelta) else since
    found: asyncio.Queue[codec.CloudEvent] = asyncio.Queue(_QUEUE_MAX)
    target = url or os.environ.get("NATS_URL") or DEFAULT_URL

    async def follow(stream: streams.Stream, subjects: list[str]) -> None:
        async for event in connected.follow(stream, filters=subjects, since=start):
            await found.put(event)

    async with bus.Bus(target, producer="clients/subscriber", name="subscriber") as connected:
        by_stream: dict[streams.Stream, list[str]] = {}
        for subject in filters:
            stream = streams.stream_of(subject)
            assert stream is not None, f"no stream keeps {subject}"
            by_stream.setdefault(stream, []).append(subject)
        following = [asyncio.create_task(follow(s, f)) for s, f in by_stream.items()]
        try:
            while True:
                event = await _next(found, following)
                if fnmatch.fnmatchcase(event.node, node):
                    yield event
        finally:
            for task in following:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*following, return_exceptions=True)


async def _next(
    found: asyncio.Queue[codec.CloudEvent], following: list[asyncio.Task[None]]
) -> codec.CloudEvent:
    """Return the next event, or raise what ended one of the followers."""
    getting = asyncio.ensure_future(found.get())
    try:
        await asyncio.wait([getting, *following], return_when=asyncio.FIRST_COMPLETED)
        for task in following:
            if task.done():
                task.result()
        return await getting
    finally:
        getting.cancel()
