"""Adapter: people: `muster events` prints what happens on the bus."""

import asyncio
import sys
from collections.abc import AsyncIterator
from datetime import datetime, timedelta

from muster import client, codec
from muster.service import runtime


def run(
    types: str,
    *,
    node: str,
    since: datetime | timedelta | None,
    follow: bool,
    as_json: bool,
    url: str | None,
) -> int:
    """Print events until Ctrl-C, or until the past is told; return the exit code."""
    asked = client.events(types, node=node, since=since, url=url, follow=follow)
    try:
        asyncio.run(runtime.run(_print(asked, as_json=as_json)))
    except ValueError as error:
        print(f"muster events: {error}", file=sys.stderr)
        return 2
    except ConnectionError as error:
        print(f"muster events: {error}", file=sys.stderr)
        return 1
    return 0


async def _print(asked: AsyncIterator[codec.CloudEvent], *, as_json: bool) -> None:
    async for event in asked:
        text = codec.dump(event).decode() if as_json else event_line(event)
        print(text, flush=True)


def event_line(event: codec.CloudEvent) -> str:
    """Return an event as one line for people, in the local time zone."""
    return f"{event.time.astimezone():%H:%M:%S} {str(event).partition(' ')[2]}"
