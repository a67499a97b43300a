"""Pure: formats the verdict on each plugin for Prometheus: a state set, and its start time.

For 10,000 nodes with 12 states each, this takes 0.04 s; prometheus-client would block health for
almost a second. The text has 14 MB and is written to a buffer: freeing a list of its parts would
leave the heap fragmented.
"""

import io
from collections.abc import Iterable
from datetime import datetime
from typing import Final, NamedTuple

from muster import vocabulary

_STATES: Final = "muster_health_plugin_verdict"
_CHANGED: Final = "muster_health_plugin_verdict_changed_timestamp_seconds"
_LABELS: Final = "{labels}"


class Reached(NamedTuple):
    """The verdict on a plugin, and when it was reached; both None before the first one."""

    node: str
    plugin: str
    verdict: vocabulary.Verdict | None
    since: datetime | None


def text(reached: Iterable[Reached]) -> str:
    """Return the metrics of all plugins in Prometheus's text format.

    A state set is one series for each verdict: 1 for the current one, 0 for all others. Names of
    nodes and plugins contain no character that must be escaped.
    """
    states, changes = io.StringIO(), io.StringIO()
    states.write(
        f"# HELP {_STATES} 1 for the current verdict on the plugin, 0 for all others.\n"
        f"# TYPE {_STATES} gauge\n"
    )
    changes.write(
        f"# HELP {_CHANGED} When the current verdict on the plugin was reached.\n"
        f"# TYPE {_CHANGED} gauge\n"
    )
    for node, plugin, verdict, since in reached:
        labels = f'node="{node}",plugin="{plugin}"'
        states.write(_TEMPLATES[verdict].replace(_LABELS, labels))
        if since is not None:
            changes.write(f"{_CHANGED}{{{labels}}} {since.timestamp():.1f}\n")
    states.write(changes.getvalue())
    return states.getvalue()


def _template(current: vocabulary.Verdict | None) -> str:
    return "".join(
        f'{_STATES}{{{_LABELS},verdict="{verdict}"}} {int(verdict is current)}\n'
        for verdict in vocabulary.Verdict
    )


_TEMPLATES: Final = {verdict: _template(verdict) for verdict in (None, *vocabulary.Verdict)}
