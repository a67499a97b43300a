"""Adapter for NATS: `muster silence` adds, lists and expires silences."""

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated

import cyclopts
import msgspec
from cyclopts import Parameter

from muster import commands, matching
from muster.cli import events, output, texts
from muster.fleet import writing
from muster.nats import jetstream

silence_app = cyclopts.App(
    name="silence", help="Suppress the notifications for some alerts for a limited time."
)


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
    try:
        silence = matching.new_silence(
            uuid.uuid4().hex[:12],
            expressions,
            starts_at=datetime.now(UTC),
            lasts=lasts,
            author=author or commands.user_name(),
            comment=comment,
        )
    except ValueError as error:
        return output.fail("silence", str(error))
    return events.run_within("silence", _add(silence, url))


@silence_app.command(name="list")
def list_silences(
    *,
    all: output.Flag = False,  # noqa: A002  # the option's name
    json: output.Json = False,
    url: events.Url = None,
) -> int:
    """Print the silences that have not expired.

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
        try:
            _warn(await writing.add_silence(connected.link, silence))
        except jetstream.Refused as error:
            return output.fail("silence", f"NATS refused the silence: {error}", code=1)
    output.show(silence.id)
    return 0


async def _expire(silence_id: str, url: str | None) -> int:
    async with events.connect("silence", url) as connected:
        silence, unreadable = await writing.expire_silence(
            connected.link, silence_id, datetime.now(UTC)
        )
    _warn(unreadable)
    if silence is None:
        return output.fail("silence", f"there is no silence {silence_id}")
    return 0


async def _list_silences(url: str | None, *, everything: bool, as_json: bool) -> int:
    async with events.connect("silence", url) as connected:
        by_id, unreadable = await writing.read_silences(connected.link)
    _warn(unreadable)
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


def _warn(unreadable: Mapping[str, str]) -> None:
    for key, problem in unreadable.items():
        output.warn("silence", f"silence {key} cannot be read: {problem}")
