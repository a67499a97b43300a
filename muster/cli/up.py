"""Adapter: the terminal: `muster up` runs all of muster on this machine and shows what happens."""

import asyncio
import collections
import os
import signal
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

import cyclopts
import rich.console
import rich.live
import rich.table
from rich.console import Group

from muster import codec, vocabulary
from muster.cli import events, output
from muster.local import nats, processes, stack
from muster.service import runtime

app = cyclopts.App(name="up")

_REDRAW_S: Final = 0.25
_HEALTHY: Final = {"", vocabulary.Verdict.HEALTHY, vocabulary.Verdict.MAINTENANCE}
_EVENTS_MIN: Final = 3
_FRAME_LINES: Final = 11
_RECENT_MAX: Final = 12


@app.default
def up(*, plain: output.Flag = False) -> int:
    """Run all of muster on this machine until Ctrl-C: NATS, services, simulated nodes.

    Parameters
    ----------
    plain
        Print one line per event instead of a live view.

    """
    # closing the terminal has the same effect as Ctrl-C
    signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        asyncio.run(runtime.run(_up(plain=plain)))
    except (nats.NatsUnavailable, processes.ProgramFailed) as error:
        return output.fail("up", str(error), code=1)
    output.show("everything has stopped")
    return 0


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
    """The current state of a fleet, from its messages; messages of one node arrive in order."""

    verdicts: dict[tuple[str, str], vocabulary.VerdictChanged] = field(default_factory=dict)
    heartbeats: dict[tuple[str, str], vocabulary.Heartbeat] = field(default_factory=dict)
    alerts: dict[str, vocabulary.AlertChanged] = field(default_factory=dict)
    recent: collections.deque[codec.CloudEvent] = field(
        default_factory=lambda: collections.deque(maxlen=_RECENT_MAX)
    )

    async def receive(self, message: events.Message) -> None:
        """Update the state from an event or a heartbeat."""
        if isinstance(message, vocabulary.Heartbeat):
            self.heartbeats[message.node, message.plugin] = message
            return
        self.recent.append(message)
        match message.data:
            case vocabulary.VerdictChanged() as verdict:
                self.verdicts[verdict.node, verdict.plugin] = verdict
            case vocabulary.AlertChanged(state=vocabulary.AlertState.FIRING) as alert:
                self.alerts[alert.fingerprint] = alert
            case vocabulary.AlertChanged() as alert:
                self.alerts.pop(alert.fingerprint, None)
            case _:
                pass

    def rows(self) -> list[Row]:
        """Return the rows by node, plugin and resource name."""
        return [
            self._row(heartbeat, resource)
            for _, heartbeat in sorted(self.heartbeats.items())
            for resource in heartbeat.resources
        ]

    def firing(self) -> list[vocabulary.AlertChanged]:
        """Return the firing alerts, oldest first."""
        return sorted(self.alerts.values(), key=lambda alert: (alert.starts_at, alert.fingerprint))

    def _row(self, heartbeat: vocabulary.Heartbeat, resource: vocabulary.ResourceBeat) -> Row:
        verdict = self.verdicts.get((heartbeat.node, heartbeat.plugin))
        unhealthy = resource.devices - resource.healthy
        return Row(
            node=heartbeat.node,
            resource=resource.name,
            healthy=resource.healthy,
            devices=resource.devices,
            allocated=resource.allocated,
            verdict=verdict.verdict if verdict else "",
            problem=resource.problem or (f"{unhealthy} Unhealthy" if unhealthy else ""),
        )


async def _up(*, plain: bool) -> None:
    output.show("starting muster on this machine; Ctrl-C stops it")
    console, show = output.console(), output.show
    started = datetime.now(UTC)
    running = stack.Stack(show=show, restart=True, nats_url=os.environ.get("NATS_URL"))
    try:
        async with running:
            show(f"settings, logs  {running.directory}")
            show(f"events          {sys.argv[0]} events --url {running.nats_url}")
            if console.is_terminal and not plain:
                await _draw(console, running.nats_url, started)
            else:
                await _print_events(running.nats_url, started)
    finally:
        show("stopping everything")


async def _draw(console: rich.console.Console, url: str, since: datetime) -> None:
    """Redraw the tables several times a second."""
    fleet = Fleet()
    async with events.subscribe_all(url, fleet.receive, since=since) as connected:
        with rich.live.Live(console=console, auto_refresh=False, transient=True) as live:
            while True:
                is_connected, height = connected.link.is_connected, console.height
                live.update(view(fleet, is_connected=is_connected, height=height), refresh=True)
                await asyncio.sleep(_REDRAW_S)


async def _print_events(url: str, since: datetime) -> None:
    """Print one line for each event, for a pipe or a log."""
    messages: asyncio.Queue[events.Message] = asyncio.Queue()
    async with events.subscribe_all(url, messages.put, since=since):
        while True:
            message = await messages.get()
            if isinstance(message, codec.CloudEvent):
                output.show(events.event_line(message))


def view(fleet: Fleet, *, is_connected: bool, height: int) -> Group:
    """Return the fleet as tables, with as many of the newest events as fit into `height` lines.

    Without a connection to NATS, the view is marked as out of date.
    """
    nodes = rich.table.Table("node", "resource", "devices", "in use", "verdict", "problem")
    for row in fleet.rows():
        colour = "green" if row.verdict in _HEALTHY and row.healthy == row.devices else "red"
        nodes.add_row(
            output.styled(row.node),
            output.styled(row.resource),
            output.styled(f"{row.healthy}/{row.devices}", colour),
            str(row.allocated),
            output.styled(row.verdict or "-", "green" if row.verdict in _HEALTHY else "red"),
            output.styled(row.problem),
        )
    alerts = rich.table.Table("firing since", "severity", "summary", title_justify="left")
    for alert in fleet.firing():
        alerts.add_row(
            f"{alert.starts_at.astimezone():%H:%M:%S}",
            alert.severity,
            output.styled(alert.summary),
        )
    if not fleet.alerts:
        alerts.add_row("-", "-", "none")
    banner = output.styled("" if is_connected else "disconnected from NATS: out of date", "red")
    left = max(_EVENTS_MIN, height - nodes.row_count - alerts.row_count - _FRAME_LINES)
    newest = "\n".join(events.event_line(event) for event in list(fleet.recent)[-left:])
    recent = output.styled(newest, "dim")
    recent.no_wrap, recent.overflow = True, "ellipsis"
    return Group(banner, nodes, alerts, recent)
