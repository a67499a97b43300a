"""Adapter: the terminal: the live view of a fleet."""

import rich.console
import rich.live
import rich.table
from rich.console import Group
from rich.markup import escape
from rich.text import Text

from muster import codec, vocabulary
from muster.cli import fleet

_GOOD = {"", vocabulary.Verdict.HEALTHY, vocabulary.Verdict.MAINTENANCE}
_EVENTS_MIN = 3
_FRAME_LINES = 11


def view(found: fleet.Fleet, *, is_connected: bool, height: int) -> Group:
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
    newest = "\n".join(event_line(event) for event in list(found.recent)[-left:])
    recent = Text(newest, style="dim", no_wrap=True, overflow="ellipsis")
    return Group(banner, nodes, alerts, recent)


def event_line(event: codec.CloudEvent) -> str:
    """Return an event as one line for people, in the local time zone."""
    return f"{event.time.astimezone():%H:%M:%S} {str(event).partition(' ')[2]}"
