"""Pure: What the entries of a group find, laid side by side: each row is a unit.

There are as many rows as the shortest list allows when each of its matches is used `limit` times,
and no more than the longest list has matches. An optional entry that finds nothing is left out; one
that finds something counts as any other (generic-device-plugin's meaning, deviceplugin/path.go).
"""

from collections.abc import Iterator, Mapping

from muster_plugin.config import resources
from muster_plugin.discovery import matching

Row = Mapping[int, tuple[resources.Nodes, matching.Match]]
"""By the number of its entry, each match."""
Columns = Mapping[int, tuple[resources.Nodes, tuple[matching.Match, ...]]]


def columns(group: resources.Group, seen: matching.Names, *, every_name: bool) -> Columns:
    """Return what each entry of a group finds; an optional one that finds nothing is left out."""
    found = {
        number: (entry, matching.matches(entry, seen, every_name=every_name))
        for number, entry in enumerate(group.devices)
    }
    return {n: column for n, column in found.items() if column[1] or not column[0].optional}


def rows(columns: Columns) -> Iterator[Row]:
    """Lay the matches of a group's entries side by side."""
    for at in range(_length(columns)):
        yield {n: (entry, met[at % len(met)]) for n, (entry, met) in columns.items()}


def shrinking(columns: Columns) -> Iterator[str]:
    """Say which optional entry, now that it is there, leaves fewer units than without it."""
    length = _length(columns)
    for number, (entry, met) in columns.items():
        if entry.optional and len(met) * entry.limit == length:
            without = _length({n: column for n, column in columns.items() if n != number})
            if without > length:
                yield (
                    f"devices[{number}]: optional, and yet it is what leaves {length} of {without} "
                    "devices; raise its limit"
                )


def _length(columns: Columns) -> int:
    reusable = min((len(met) * entry.limit for entry, met in columns.values()), default=0)
    return min(reusable, max((len(met) for _, met in columns.values()), default=0))
