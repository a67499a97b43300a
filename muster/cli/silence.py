"""Adapter: NATS: `muster silence` adds, lists and expires silences."""

import uuid
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final

import cyclopts
import msgspec
from cyclopts import Parameter

from muster import commands, matching
from muster.cli import events, output, texts
from muster.nats import bus, storage, streams

silence_app = cyclopts.App(
    name="silence", help="Suppress the notifications for some alerts for a while."
)

_KEPT: Final = timedelta(days=5)
"""How long an expired silence can still be listed, as in Alertmanager."""


@silence_app.command
def add(
    *expressions: str,
    duration: str = "1h",
    comment: str,
    author: str | None = None,
    url: events.Url = None,
) -> int:
    """Silence the alerts that match every matcher, from now on; print the silence's id.

    Parameters
    ----------
    expressions
        Matchers as Alertmanager writes them: `node=node-a`, `'kind=~"stuck|missing"'`.
    duration
        The duration of the silence: `90s`, `15m`, `1h30m`, `7d`; at most a year.
    comment
        Why the alerts are silenced.
    author
        The author of the silence; by default the logged-in user.

    """
    try:
        lasts = texts.duration(duration)
    except ValueError as error:
        return output.fail("silence", f"--duration: {error}")
    if not expressions:
        return output.fail("silence", "name what to silence, such as node=node-a")
    try:
        parsed = matching.parse_all(expressions)
    except ValueError as error:
        return output.fail("silence", str(error))
    doubts = [f"{matcher}: {doubt}" for matcher in parsed if (doubt := matching.doubt(matcher))]
    if doubts:
        return output.fail("silence", "; ".join(doubts))
    now = datetime.now(UTC)
    fields = {
        "id": uuid.uuid4().hex[:12],
        "matchers": expressions,
        "starts_at": now,
        "ends_at": now + lasts,
        "author": author or commands.user_name(),
        "comment": comment,
    }
    try:
        silence = msgspec.convert(fields, matching.Silence)
    except msgspec.ValidationError as error:
        return output.fail("silence", str(error))
    return events.run_within("silence", _add(silence, url))


@silence_app.command(name="list")
def list_silences(
    *,
    all: output.Flag = False,  # noqa: A002  # the option's name
    json: output.Json = False,
    url: events.Url = None,
) -> int:
    """Print the active silences.

    Parameters
    ----------
    all
        Also print expired silences.

    """
    return events.run_within("silence", _list_silences(url, everything=all, as_json=json))


@silence_app.command
def expire(
    silence_id: Annotated[str, Parameter(name="SILENCE-ID")], /, *, url: events.Url = None
) -> int:
    """End a silence now.

    Parameters
    ----------
    silence_id
        The silence's id.

    """
    return events.run_within("silence", _expire(silence_id, url))


async def _add(silence: matching.Silence, url: str | None) -> int:
    async with events.connect("silence", url) as connected:
        await _write(connected, silence)
        for key, old in (await _read_silences(connected)).items():
            if old.ends_at < silence.starts_at - _KEPT:
                await storage.put(connected.link, streams.SILENCES, key, b"")
    output.show(silence.id)
    return 0


async def _expire(silence_id: str, url: str | None) -> int:
    async with events.connect("silence", url) as connected:
        by_id = await _read_silences(connected)
        if silence_id not in by_id:
            return output.fail("silence", f"there is no silence {silence_id}")
        await _write(connected, by_id[silence_id].expired(datetime.now(UTC)))
    return 0


async def _list_silences(url: str | None, *, everything: bool, as_json: bool) -> int:
    async with events.connect("silence", url) as connected:
        by_id = await _read_silences(connected)
    now = datetime.now(UTC)
    shown = sorted(
        (silence for silence in by_id.values() if everything or now < silence.ends_at),
        key=lambda silence: silence.ends_at,
    )
    if as_json:
        for silence in shown:
            output.print_json(msgspec.Raw(matching.encode_silence(silence)))
        return 0
    rows = [
        (
            silence.id,
            " ".join(silence.matchers),
            f"{silence.ends_at.astimezone():%Y-%m-%d %H:%M}"
            + ("" if now < silence.ends_at else " (expired)"),
            silence.author,
            silence.comment,
        )
        for silence in shown
    ]
    output.table(("id", "matchers", "until", "author", "comment"), rows, nothing="no silences")
    return 0


async def _write(connected: bus.Bus, silence: matching.Silence) -> None:
    await storage.put(
        connected.link, streams.SILENCES, silence.id, matching.encode_silence(silence)
    )


async def _read_silences(connected: bus.Bus) -> dict[str, matching.Silence]:
    """Return the silences by id; report unreadable silences."""
    by_id = {}
    async for change in storage.follow(connected.link, streams.SILENCES):
        if change is None:
            break
        key, value = change
        if value:
            try:
                by_id[key] = matching.decode_silence(value)
            except matching.MalformedSilence as error:
                output.warn("silence", f"silence {key} cannot be read: {error}")
    return by_id
