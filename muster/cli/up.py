"""Adapter: people: `muster up` runs the whole of muster here and shows what happens."""

import asyncio
import contextlib
import os
import signal
import sys
from datetime import UTC, datetime

import rich.console
import rich.live

from muster import codec, vocabulary
from muster.cli import fleet, show, watch
from muster.local import nats, processes, stack
from muster.service import runtime

_REDRAW_S = 0.25


def run(*, plain: bool) -> int:
    """Run until Ctrl-C or SIGTERM; return the exit code."""
    # a closed terminal is a Ctrl-C too
    signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        asyncio.run(runtime.run(_up(plain=plain)))
    except (nats.NatsUnavailable, processes.ProgramFailed) as error:
        print(f"muster up: {error}", file=sys.stderr)
        return 1
    print("everything has ended")
    return 0


async def _up(*, plain: bool) -> None:
    console = rich.console.Console()
    live = console.is_terminal and not plain
    console.print("starting muster on this machine; Ctrl-C ends it")

    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True)

    started = datetime.now(UTC)
    running = stack.Stack(say=say, restart=True, nats_url=os.environ.get("NATS_URL"))
    try:
        async with running:
            say(f"settings, logs  {running.directory}")
            say(f"events          {sys.argv[0]} events --url {running.nats_url}")
            found = fleet.Fleet()
            if live:
                await _draw(console, running.nats_url, found, started)
            else:
                await _tell(console, running.nats_url, found, started)
    finally:
        say("ending everything")


async def _draw(
    console: rich.console.Console, url: str, found: fleet.Fleet, since: datetime
) -> None:
    """Redraw the tables while anything changes."""

    def hear(told: watch.Told) -> None:
        if isinstance(told, codec.CloudEvent):
            found.apply(told)
        else:
            found.beat(told)

    async with watch.everything(url, hear, since=since) as connected:
        with rich.live.Live(console=console, auto_refresh=False, transient=True) as live:
            while True:
                is_connected, height = connected.link.is_connected, console.height
                shown = show.view(found, is_connected=is_connected, height=height)
                live.update(shown, refresh=True)
                await asyncio.sleep(_REDRAW_S)


async def _tell(
    console: rich.console.Console, url: str, found: fleet.Fleet, since: datetime
) -> None:
    """Print one line an event: what a pipe or a log can take."""

    def hear(told: watch.Told) -> None:
        if isinstance(told, vocabulary.Heartbeat):
            found.beat(told)
            return
        found.apply(told)
        with contextlib.suppress(BrokenPipeError):
            console.print(show.event_line(told), highlight=False, soft_wrap=True, markup=False)

    async with watch.everything(url, hear, since=since):
        await asyncio.Event().wait()
