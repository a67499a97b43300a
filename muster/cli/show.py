"""Door to the terminal: the live view of a fleet."""

import rich.console
import rich.live
import rich.table
from rich.console import Group
from rich.markup import escape
from rich.text import Text

from muster import codec, vocabulary
from muster.cli import fleet

_GOOD = {"", vocabulary.Verdict.HEALTHY, vocabulary.Verdict.MAINTENANCE}
_EVENT_WIDTH = 160


def view(found: fleet.Fleet) -> Group:
    """Return the fleet as tables."""
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
        alerts.add_row(f"{alert.starts_at:%H:%M:%S}", alert.severity, escape(alert.summary))
    if not found.alerts:
        alerts.add_row("-", "-", "nothing")
    recent = Text("\n".join(event_line(e)[:_EVENT_WIDTH] for e in found.recent), style="dim")
    return Group(nodes, alerts, recent)


def event_line(event: codec.CloudEvent) -> str:
    """Return an event as one line for people, in the local time zone."""
    return f"{event.time.astimezone():%H:%M:%S} {str(event).partition(' ')[2]}"
