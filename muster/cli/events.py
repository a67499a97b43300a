"""Door to people: `muster events` prints what happens on the bus."""

import asyncio
import sys
from datetime import datetime, timedelta

from muster import client, codec, runtime
from muster.cli import show


def run(
    types: str, *, node: str, since: datetime | timedelta | None, as_json: bool, url: str | None
) -> int:
    """Print events until Ctrl-C; return the exit code."""
    try:
        asyncio.run(runtime.run(_print(types, node, since, as_json=as_json, url=url)))
    except ValueError as error:
        print(f"muster events: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0
    return 0


async def _print(
    types: str, node: str, since: datetime | timedelta | None, *, as_json: bool, url: str | None
) -> None:
    async for event in client.events(types, node=node, since=since, url=url):
        text = codec.dump(event).decode() if as_json else show.event_line(event)
        print(text, flush=True)
