"""Door to NATS for the command: silences are added, listed and expired."""

import asyncio
import sys
import uuid
from collections.abc import Coroutine, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec
import rich.console
import rich.table
from rich.markup import escape

from muster import bus, client, silences, streams, user, workqueue

_BUS_S: Final = 5.0


def add(
    matchers: Sequence[str],
    *,
    duration: timedelta,
    comment: str,
    author: str | None,
    url: str | None,
) -> int:
    """Write a silence that begins now; print its id."""
    now = datetime.now(UTC)
    given = {
        "id": uuid.uuid4().hex[:12],
        "matchers": tuple(matchers),
        "starts_at": now,
        "ends_at": now + duration,
        "author": author or user.name(),
        "comment": comment,
    }
    try:
        silence = msgspec.convert(given, silences.Silence)
    except msgspec.ValidationError as error:
        return _mistake(str(error))
    return _run(_write(silence, url))


def expire(silence_id: str, *, url: str | None) -> int:
    """End a silence now."""
    return _run(_expire(silence_id, url))


def show(*, everything: bool, as_json: bool, url: str | None) -> int:
    """Print the silences that last, or all that are remembered."""
    return _run(_show(url, everything=everything, as_json=as_json))


def _run(asked: Coroutine[object, object, int]) -> int:
    async def within() -> int:
        async with asyncio.timeout(_BUS_S):
            return await asked

    try:
        return asyncio.run(within())
    except TimeoutError:
        print("muster silence: NATS does not answer", file=sys.stderr)
        return 1


def _bus(url: str | None) -> bus.Bus:
    return bus.Bus(
        url or client.DEFAULT_URL, producer="clients/silence", name="silence", owner=True
    )


async def _write(silence: silences.Silence, url: str | None) -> int:
    async with _bus(url) as connected:
        await connected.remember(streams.SILENCES, silence.id, silences.encode(silence))
    print(silence.id)
    return 0


async def _expire(silence_id: str, url: str | None) -> int:
    async with _bus(url) as connected:
        found = await _all(connected)
        if silence_id not in found:
            return _mistake(f"no silence is called {silence_id}")
        ended = found[silence_id].expired(datetime.now(UTC))
        await connected.remember(streams.SILENCES, silence_id, silences.encode(ended))
    return 0


async def _show(url: str | None, *, everything: bool, as_json: bool) -> int:
    async with _bus(url) as connected:
        found = await _all(connected)
    now = datetime.now(UTC)
    shown = sorted(
        (silence for silence in found.values() if everything or now < silence.ends_at),
        key=lambda silence: silence.ends_at,
    )
    if as_json:
        for silence in shown:
            print(silences.encode(silence).decode())
        return 0
    table = rich.table.Table("id", "what", "until", "author", "comment")
    for silence in shown:
        until = f"{silence.ends_at.astimezone():%Y-%m-%d %H:%M}"
        ended = "" if now < silence.ends_at else " (over)"
        what = escape(" ".join(silence.matchers))
        table.add_row(
            silence.id, what, until + ended, escape(silence.author), escape(silence.comment)
        )
    rich.console.Console().print(table if shown else "no silences")
    return 0


async def _all(connected: bus.Bus) -> dict[str, silences.Silence]:
    found = {}
    async for change in workqueue.follow(connected.link, streams.SILENCES):
        if change is None:
            break
        key, value = change
        if value:
            found[key] = silences.decode(value)
    return found


def _mistake(problem: str) -> int:
    print(f"muster silence: {problem}", file=sys.stderr)
    return 2
