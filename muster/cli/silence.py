"""Adapter: NATS for the command: silences are added, listed and expired."""

import sys
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

from muster import commands, silences
from muster import matchers as parsing
from muster.cli import bus_client, status, tables
from muster.nats import buckets, bus, streams

_BUS_S: Final = 5.0
_KEPT: Final = timedelta(days=5)
"""For how long people can see what was silenced, as in Alertmanager."""


def add(
    matchers: Sequence[str],
    *,
    duration: timedelta,
    comment: str,
    author: str | None,
    url: str | None,
) -> int:
    """Write a silence that begins now; print its id."""
    if not matchers:
        return _mistake("say what to silence, such as node=node-a")
    try:
        doubts = [f"{m}: {why}" for m in parsing.parse_all(matchers) if (why := silences.doubt(m))]
    except ValueError as error:
        return _mistake(str(error))
    if doubts:
        return _mistake("; ".join(doubts))
    now = datetime.now(UTC)
    given = {
        "id": uuid.uuid4().hex[:12],
        "matchers": tuple(matchers),
        "starts_at": now,
        "ends_at": now + duration,
        "author": author or commands.user_name(),
        "comment": comment,
    }
    try:
        silence = msgspec.convert(given, silences.Silence)
    except msgspec.ValidationError as error:
        return _mistake(str(error))
    return bus_client.run_within("silence", _write(silence, url))


def expire(silence_id: str, *, url: str | None) -> int:
    """End a silence now."""
    return bus_client.run_within("silence", _expire(silence_id, url))


def show(*, everything: bool, as_json: bool, url: str | None) -> int:
    """Print the silences that last, or all that are remembered."""
    return bus_client.run_within("silence", _show(url, everything=everything, as_json=as_json))


async def _write(silence: silences.Silence, url: str | None) -> int:
    async with bus_client.connect("silence", url) as connected:
        await buckets.remember(
            connected.link, streams.SILENCES, silence.id, silences.encode(silence)
        )
        for key, old in (await _all(connected)).items():
            if old.ends_at < silence.starts_at - _KEPT:
                await buckets.remember(connected.link, streams.SILENCES, key, b"")
    print(silence.id)
    return 0


async def _expire(silence_id: str, url: str | None) -> int:
    async with bus_client.connect("silence", url) as connected:
        found = await _all(connected)
        if silence_id not in found:
            return _mistake(f"no silence is called {silence_id}")
        ended = found[silence_id].expired(datetime.now(UTC))
        await buckets.remember(connected.link, streams.SILENCES, silence_id, silences.encode(ended))
    return 0


async def _show(url: str | None, *, everything: bool, as_json: bool) -> int:
    async with bus_client.connect("silence", url) as connected:
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
    rows = [
        (
            silence.id,
            " ".join(silence.matchers),
            (
                f"{silence.ends_at.astimezone():%Y-%m-%d %H:%M}"
                f"{'' if now < silence.ends_at else ' (over)'}"
            ),
            silence.author,
            silence.comment,
        )
        for silence in shown
    ]
    tables.show(("id", "what", "until", "author", "comment"), rows, nothing="no silences")
    return 0


async def _all(connected: bus.Bus) -> dict[str, silences.Silence]:
    found = {}
    async for change in buckets.follow(connected.link, streams.SILENCES):
        if change is None:
            break
        key, value = change
        if value:
            try:
                found[key] = silences.decode(value)
            except silences.MalformedSilence as error:
                _mistake(status.plain(f"{key} is no silence: {error}"))
    return found


def _mistake(problem: str) -> int:
    print(f"muster silence: {problem}", file=sys.stderr)
    return 2
