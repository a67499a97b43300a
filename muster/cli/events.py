"""Adapter: the terminal: `muster events` prints what happens on the bus."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

import cyclopts
from cyclopts import Parameter

from muster import client, codec
from muster.cli import bus_client, output, texts
from muster.service import runtime

app = cyclopts.App(name="events")


@app.default
def print_events(
    type: Annotated[str, Parameter(name=["--type", "-t"])] = "*",  # noqa: A002  # the option's name
    *,
    node: str = "*",
    since: str | None = None,
    follow: bool = True,
    json: output.Json = False,
    url: bus_client.Url = None,
) -> int:
    """Print what happens on the bus, one line an event, until Ctrl-C.

    Parameters
    ----------
    type
        Event types, as a shell pattern: `device.*`, `alert.changed`.
    node
        Nodes, as a shell pattern.
    since
        Start in the past: `90s`, `15m`, `2h`, `7d`, or a time such as `2026-11-21T10:00:00Z`.
    follow
        Continue with new events; `--no-follow` ends after the past ones.

    """
    try:
        start = None if since is None else texts.since(since)
    except ValueError as error:
        return output.fail("events", f"--since: {error}")
    events = client.events(type, node=node, since=start, url=url, follow=follow)
    try:
        asyncio.run(runtime.run(_print(events, as_json=json)))
    except ValueError as error:
        return output.fail("events", str(error))
    except ConnectionError as error:
        return output.fail("events", str(error), code=1)
    return 0


def event_line(event: codec.CloudEvent) -> str:
    """Return an event as one line for people, in the local time zone."""
    return f"{event.time.astimezone():%H:%M:%S} {str(event).partition(' ')[2]}"


async def _print(events: AsyncIterator[codec.CloudEvent], *, as_json: bool) -> None:
    async for event in events:
        text = codec.dump(event).decode() if as_json else event_line(event)
        print(text, flush=True)
