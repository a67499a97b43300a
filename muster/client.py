"""Adapter for the SDK: follows a fleet's events over NATS, from now or from an earlier time."""

import asyncio
import contextlib
import fnmatch
import os
import re
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec

from muster import codec, vocabulary
from muster.nats import bus, consumers, stream_info, streams
from muster.service import sections

DEFAULT_URL: Final = "nats://127.0.0.1:4222"
_QUEUE_MAX: Final = 1_000
_HISTORY_MAX: Final = 10_000
_QUIET_S: Final = 0.5
_READ_S: Final = 10.0
"""The time limit for reading the stored events of all streams."""
REACH_S: Final = 3.0
"""How long a command waits for an answer from NATS if it should not wait indefinitely."""


async def events(
    types: str = "*",
    *,
    node: str = "*",
    since: datetime | timedelta | None = None,
    url: str | None = None,
    follow: bool = True,
) -> AsyncGenerator[codec.CloudEvent, None]:
    """Yield every event whose type and node match two shell patterns, until closed.

    `since` is the start, as a time or an age; the default is now. Up to 10,000 past events are
    ordered by time; with `follow` False the iteration ends after them. `url` is the address of
    NATS, by default `NATS_URL` or this machine. After a lost connection, no event is missed.

    Raises ValueError if no event type matches, if no node can match, or if `url` is not a NATS
    address; with `follow` False also ConnectionError if NATS does not answer in time, or if a
    stream does not exist or is not read in time.
    """
    by_stream: dict[streams.Stream, list[str]] = {}
    for subject in vocabulary.subject_filters(types, node):
        by_stream.setdefault(streams.required(subject), []).append(subject)
    start = datetime.now(UTC) - since if isinstance(since, timedelta) else since
    target = url or os.environ.get("NATS_URL") or DEFAULT_URL
    try:
        msgspec.convert({"url": target}, sections.Bus)
    except msgspec.ValidationError:
        raise ValueError(f"{target!r} is not a NATS address such as {DEFAULT_URL}") from None
    async with bus.Bus(target, producer="clients/subscriber", name="subscriber") as connected:
        read = _followed if follow else _stored
        async with contextlib.aclosing(read(connected, target, by_stream, start)) as selected:
            async for event in selected:
                if fnmatch.fnmatchcase(event.node, node):
                    yield event


async def _followed(
    connected: bus.Bus,
    target: str,
    filters: Mapping[streams.Stream, Sequence[str]],
    since: datetime | None,
) -> AsyncGenerator[codec.CloudEvent, None]:
    """Yield the events since `since` (None: now): past ones ordered by time, then new ones."""
    queue: asyncio.Queue[codec.CloudEvent] = asyncio.Queue(_QUEUE_MAX)

    async def keep(stream: streams.Stream, subjects: Sequence[str]) -> None:
        async for event in consumers.follow(connected.link, stream, filters=subjects, since=since):
            await queue.put(event)

    following = [asyncio.create_task(keep(*each)) for each in filters.items()]
    try:
        await reach(connected, target, timeout_s=None)
        for event in await _history(queue, following) if since else []:
            yield event
        while True:
            yield await _next(queue, following)
    finally:
        await _cancel(following)


async def _cancel(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel the tasks that are still running, and wait until all tasks are done."""
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)


async def reach(connected: bus.Bus, target: str, *, timeout_s: float | None = REACH_S) -> None:
    """Wait until NATS is connected. Raises ConnectionError after `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            await connected.link.client()
    except TimeoutError:
        text = f"NATS at {without_password(target)} has not answered for {timeout_s:g} s"
        raise ConnectionError(text) from None


def without_password(target: str) -> str:
    """Return the addresses without users and passwords."""
    return re.sub(r"//[^/,]*@", "//", target)


async def _stored(
    connected: bus.Bus,
    target: str,
    filters: Mapping[streams.Stream, Sequence[str]],
    since: datetime | None,
) -> AsyncGenerator[codec.CloudEvent, None]:
    """Yield the stored events since `since`, ordered by time. Raises ConnectionError.

    If `since` is None, no event is yielded.
    """
    await reach(connected, target)
    if since is None:
        return
    reading = {
        stream.name: asyncio.create_task(
            consumers.past(
                connected.link,
                stream,
                filters=subjects,
                since=since,
                events_max=_HISTORY_MAX,
                waits_for_stream=False,
            )
        )
        for stream, subjects in filters.items()
    }
    try:
        await asyncio.wait(reading.values(), timeout=_READ_S)
    finally:
        await _cancel(reading.values())
    events: list[codec.CloudEvent] = []
    for name, task in sorted(reading.items()):
        if task.cancelled():
            text = f"NATS at {without_password(target)} has not served {name} within {_READ_S:g} s"
            raise ConnectionError(text)
        error = task.exception()
        if error is not None and stream_info.is_no_stream(error):
            text = f"NATS at {without_password(target)} has no stream {name}, which health creates"
            raise ConnectionError(text)
        events += task.result()
    for event in sorted(events, key=lambda event: event.time)[:_HISTORY_MAX]:
        yield event


async def _history(
    queue: asyncio.Queue[codec.CloudEvent], following: list[asyncio.Task[None]]
) -> list[codec.CloudEvent]:
    """Return the events that arrive before the first short pause, at most 10,000, by time."""
    past: list[codec.CloudEvent] = []
    with contextlib.suppress(TimeoutError):
        while len(past) < _HISTORY_MAX:
            async with asyncio.timeout(_QUIET_S):
                past.append(await _next(queue, following))
    return sorted(past, key=lambda event: event.time)


async def _next(
    queue: asyncio.Queue[codec.CloudEvent], following: list[asyncio.Task[None]]
) -> codec.CloudEvent:
    """Return the next event, or raise the error that ended a subscription."""
    getting = asyncio.ensure_future(queue.get())
    try:
        await asyncio.wait([getting, *following], return_when=asyncio.FIRST_COMPLETED)
        for task in following:
            if task.done():
                task.result()
        return await getting
    finally:
        getting.cancel()
