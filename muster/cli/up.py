"""Adapter for the terminal: `muster up` runs all of muster on this machine and shows the events."""

import asyncio
import collections
import os
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import cyclopts
from cyclopts import Parameter

from muster import codec, commands
from muster.cli import events, output, top, top_rows
from muster.local import nats, processes, running, stack
from muster.service import runtime

app = cyclopts.App(name="up")

_KEPT_MAX: Final = 100
"""The maximum number of stored lines that the page has not taken yet."""


@app.default
def up(
    *,
    nodes: Annotated[int, Parameter(show_default=False)] = len(stack.NODES),
    gpus: Annotated[int | None, Parameter(show_default=False)] = None,
    port: Annotated[int | None, Parameter(show_default=False)] = None,
    receivers: Annotated[Path | None, Parameter(show_default=False)] = None,
    plain: output.Flag = False,
) -> int:
    """Run all of muster on this machine until Ctrl-C: NATS, services, simulated nodes.

    Parameters
    ----------
    nodes
        Number of simulated nodes, node-a to node-t: 1 to 20; by default 3. A node takes about
        100 MB of memory.
    gpus
        Number of GPUs of each node: 1 to 16; by default 8, 4 and 2.
    port
        The first port: the console gets it, NATS gets the next port, and all other programs get
        the ports after these. By default, NATS gets 4222 and the other programs get free ports.
    receivers
        A directory with further receivers of the notifier; it is created if needed, and kept.
        `muster notify setup KIND --directory` writes to it. The default directory is removed.
    plain
        Print one line per event instead of the page of `muster top`.

    """
    for option, value, smallest, largest in (
        ("--nodes", nodes, 1, stack.NODES_MAX),
        ("--gpus", gpus, 1, stack.GPUS_MAX),
        ("--port", port, *stack.PORTS),
    ):
        if value is not None and not smallest <= value <= largest:
            return output.fail("up", f"{option} {value}: use a number from {smallest} to {largest}")
    if receivers is not None:
        try:
            receivers.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            return output.fail("up", f"--receivers {receivers}: {error.strerror}")
    # closing the terminal has the same effect as Ctrl-C
    signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    lines = Lines()
    wanted = stack.Stack(
        show=lines.show,
        restart=True,
        has_console=commands.missing("console") is None,
        nodes=stack.nodes(nodes, gpus),
        port=port,
        nats_url=os.environ.get("NATS_URL"),
        receivers=receivers.absolute() if receivers else None,
    )
    try:
        with events.outages_hidden("up" if plain else None, everything=True):
            asyncio.run(runtime.run(_up(wanted, lines, plain=plain)))
    except (nats.NatsUnavailable, processes.ProgramFailed) as error:
        return output.fail("up", str(error), code=1)
    output.show("everything has stopped")
    return 0


class Lines:
    """Stores the log lines of a stack; also prints them unless the page of `muster top` is open."""

    def __init__(self) -> None:
        self.is_page_open = False
        self._kept: collections.deque[str] = collections.deque(maxlen=_KEPT_MAX)

    def show(self, line: str) -> None:
        """Store a line; also print it unless the page is open."""
        self._kept.append(line)
        if not self.is_page_open:
            output.show(line)

    def take(self) -> list[str]:
        """Return the stored lines, and delete them."""
        kept = list(self._kept)
        self._kept.clear()
        return kept


async def _up(wanted: stack.Stack, lines: Lines, *, plain: bool) -> None:
    output.show("starting muster on this machine; Ctrl-C stops it")
    for directory in running.remove_left_over():
        output.show(f"removed {directory}, left over from a killed run")
    started = datetime.now(UTC)
    try:
        async with wanted:
            lines.show(f"settings, logs  {wanted.directory}")
            lines.show(f"events          {sys.argv[0]} events")
            lines.show(f"faults          {sys.argv[0]} break")
            if top.is_terminal() and not plain:
                await _show_page(wanted, lines)
            else:
                await _print_events(wanted.nats_url, started)
    finally:
        output.show("stopping everything")


async def _show_page(wanted: stack.Stack, lines: Lines) -> None:
    """Show the page of `muster top` until the user closes it."""

    def processes() -> list[top_rows.Process]:
        return [
            top_rows.Process(
                name=program.name,
                pid=program.pid,
                address=program.http or wanted.nats_url,
                restarts=program.restarts,
                problem=program.problem,
                log=program.log,
            )
            for program in wanted.programs()
        ]

    lines.is_page_open = True
    try:
        local = top.Local(processes=processes, lines=lines.take, about=lines.take())
        await top.show([wanted.http("health")], wanted.nats_url, local=local)
    finally:
        lines.is_page_open = False


async def _print_events(url: str, since: datetime) -> None:
    """Print one line for each event, for a pipe or a log."""
    messages: asyncio.Queue[events.Message] = asyncio.Queue()
    async with events.subscribe_all(url, messages.put, since=since):
        while True:
            message = await messages.get()
            if isinstance(message, codec.CloudEvent):
                output.show(events.event_line(message))
