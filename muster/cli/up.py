"""Adapter: people: `muster up` runs the whole of muster here and shows what happens."""

import asyncio
import collections
import os
import signal
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

import rich.console
import rich.live
import rich.table
from rich.console import Group
from rich.markup import escape
from rich.text import Text

from muster import codec, vocabulary
from muster.cli import bus_client, events
from muster.local import nats, processes, stack
from muster.service import runtime

_REDRAW_S = 0.25
_GOOD = {"", vocabulary.Verdict.HEALTHY, vocabulary.Verdict.MAINTENANCE}
_EVENTS_MIN = 3
_FRAME_LINES = 11
_RECENT_MAX: Final = 12


@dataclass(frozen=True, slots=True)
class Row:
    """One resource of one node, ready to be shown."""

    node: str
    resource: str
    healthy: int
    devices: int
    allocated: int
    verdict: str
    problem: str


@dataclass(slots=True)
class Fleet:
    """The present state; `apply` and `beat` fold news into it, order within one node kept."""

    verdicts: dict[tuple[str, str], vocabulary.VerdictChanged] = field(default_factory=dict)
    beats: dict[tuple[str, str], vocabulary.Heartbeat] = field(default_factory=dict)
    alerts: dict[str, vocabulary.AlertChanged] = field(default_factory=dict)
    labels: dict[str, vocabulary.LabelEvent] = field(default_factory=dict)
    recent: collections.deque[codec.CloudEvent] = field(
        default_factory=lambda: collections.deque(maxlen=_RECENT_MAX)
    )

    def beat(self, beat: vocabulary.Heartbeat) -> None:
        """Take a sign of life."""
        self.beats[beat.node, beat.plugin] = beat

    def apply(self, event: codec.CloudEvent) -> None:
        """Take an event."""
        self.recent.append(event)
        match event.data:
            case vocabulary.VerdictChanged() as verdict:
                self.verdicts[verdict.node, verdict.plugin] = verdict
            case vocabulary.AlertChanged(state=vocabulary.AlertState.FIRING) as alert:
                self.alerts[alert.fingerprint] = alert
            case vocabulary.AlertChanged() as alert:
                self.alerts.pop(alert.fingerprint, None)
            case vocabulary.LabelEvent() as labels:
                self.labels[labels.node] = labels
            case _:
                pass

    def rows(self) -> list[Row]:
        """Return the rows by node, plugin and resource name."""
        return [
            self._row(beat, resource)
            for _, beat in sorted(self.beats.items())
            for resource in beat.resources
        ]

    def firing(self) -> list[vocabulary.AlertChanged]:
        """Return the alerts that fire, oldest first."""
        return sorted(self.alerts.values(), key=lambda alert: (alert.starts_at, alert.fingerprint))

    def _row(self, beat: vocabulary.Heartbeat, resource: vocabulary.ResourceBeat) -> Row:
        verdict = self.verdicts.get((beat.node, beat.plugin))
        return Row(
            node=beat.node,
            resource=resource.name,
            healthy=resource.healthy,
            devices=resource.devices,
            allocated=resource.allocated,
            verdict=verdict.verdict if verdict else "",
            problem=resource.problem or _unhealthy(resource),
        )


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
            if live:
                await _draw(console, running.nats_url, started)
            else:
                await _print_events(console, running.nats_url, started)
    finally:
        say("ending everything")


async def _draw(console: rich.console.Console, url: str, since: datetime) -> None:
    """Redraw the tables while anything changes."""
    found = Fleet()

    def hear(told: bus_client.Told) -> None:
        if isinstance(told, codec.CloudEvent):
            found.apply(told)
        else:
            found.beat(told)

    async with bus_client.everything(url, hear, since=since) as connected:
        with rich.live.Live(console=console, auto_refresh=False, transient=True) as live:
            while True:
                is_connected, height = connected.link.is_connected, console.height
                shown = view(found, is_connected=is_connected, height=height)
                live.update(shown, refresh=True)
                await asyncio.sleep(_REDRAW_S)


async def _print_events(console: rich.console.Console, url: str, since: datetime) -> None:
    """Print one line an event: what a pipe or a log can take."""
    received: asyncio.Queue[codec.CloudEvent] = asyncio.Queue()

    def keep(told: bus_client.Told) -> None:
        if isinstance(told, codec.CloudEvent):
            received.put_nowait(told)

    async with bus_client.everything(url, keep, since=since):
        while True:
            line = events.event_line(await received.get())
            console.print(line, highlight=False, soft_wrap=True, markup=False)


def view(found: Fleet, *, is_connected: bool, height: int) -> Group:
    """Return the fleet as tables and the newest events, to fill `height` lines.

    Without a connection to NATS nothing can be known, and the view says so.
    """
    nodes = rich.table.Table("node", "resource", "devices", "in use", "verdict", "problem")
    for row in found.rows():
        colour = "green" if row.verdict in _GOOD and row.healthy == row.devices else "red"
        nodes.add_row(
            row.node,
            row.resource,
            Text(f"{row.healthy}/{row.devices}", style=colour),
            str(row.allocated),
            Text(row.verdict or "-", style="green" if row.verdict in _GOOD else "red"),
            escape(row.problem),
        )
    alerts = rich.table.Table("firing since", "severity", "what", title_justify="left")
    for alert in found.firing():
        alerts.add_row(
            f"{alert.starts_at.astimezone():%H:%M:%S}", alert.severity, escape(alert.summary)
        )
    if not found.alerts:
        alerts.add_row("-", "-", "nothing")
    banner = Text("" if is_connected else "NATS is away: this is what was last known", style="red")
    left = max(_EVENTS_MIN, height - nodes.row_count - alerts.row_count - _FRAME_LINES)
    newest = "\n".join(events.event_line(event) for event in list(found.recent)[-left:])
    recent = Text(newest, style="dim", no_wrap=True, overflow="ellipsis")
    return Group(banner, nodes, alerts, recent)


def _unhealthy(resource: vocabulary.ResourceBeat) -> str:
    count = resource.devices - resource.healthy
    return f"{count} Unhealthy" if count else ""
