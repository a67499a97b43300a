"""Pure: the fleet as columns of JSON, for the script that draws its cells.

A column has one value per node, and repeated texts are stored once: 10,000 nodes need less than a
tenth of the size of a list of objects.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from muster import escaping
from muster.fleet import model

LEVELS = tuple(model.Level)
"""All levels; a node's level is sent as its index in this tuple."""

PODS_MAX: Final = 12_000
"""The approximate maximum number of pod names; each node with pods gets an equal part."""

Resource = tuple[str, int, int, bool]
"""A resource's name, how many of its devices pods may use, how many there are, and whether the
plugins that serve it work.
"""


class Columns(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes as columns; several columns contain indexes into `texts` or `kinds`."""

    names: tuple[str, ...]
    levels: str
    """One digit per node: the index of its level in `LEVELS`."""
    texts: tuple[str, ...]
    kinds: tuple[tuple[Resource, ...], ...]
    verdict: tuple[int, ...]
    """Each node's label (its verdict or the kind of its alert), as an index into `texts`."""
    plugin: tuple[int, ...]
    pool: tuple[int, ...]
    zone: tuple[int, ...]
    kind: tuple[int, ...]
    """Each node's resources with their counts, as an index into `kinds`."""
    since: tuple[int, ...]
    """When each node got its current label, in Unix seconds; 0 if unknown."""
    alerts: tuple[int, ...]
    silenced: tuple[int, ...]
    pods: Mapping[int, tuple[str, ...]]
    """The pods that each node's alerts name, by the node's index; nodes without any are omitted."""
    removed: tuple[str, ...] = ()
    revision: int
    instance: str = ""
    """The id of the console's process; a revision is valid only within one process."""


def columns(
    nodes: Iterable[model.NodeSummary],
    *,
    revision: int,
    instance: str = "",
    removed: tuple[str, ...] = (),
) -> Columns:
    """Return nodes as columns."""
    every = tuple(nodes)
    pods_max = max(1, PODS_MAX // max(1, sum(bool(node.pods) for node in every)))
    texts: dict[str, int] = {}
    kinds: dict[tuple[Resource, ...], int] = {}

    def text(value: str) -> int:
        return texts.setdefault(value, len(texts))

    def kind(node: model.NodeSummary) -> int:
        resources = tuple((name, *counts) for name, counts in sorted(node.resources.items()))
        return kinds.setdefault(resources, len(kinds))

    return Columns(
        names=tuple(escaping.plain(node.name) for node in every),
        levels="".join(str(LEVELS.index(node.level)) for node in every),
        verdict=tuple(text(node.label) for node in every),
        plugin=tuple(text(node.plugin) for node in every),
        pool=tuple(text(node.pool) for node in every),
        zone=tuple(text(node.zone) for node in every),
        kind=tuple(kind(node) for node in every),
        since=tuple(int(node.since.timestamp()) if node.since else 0 for node in every),
        alerts=tuple(node.alerts for node in every),
        silenced=tuple(node.silenced for node in every),
        pods={
            number: tuple(map(escaping.plain, node.pods[:pods_max]))
            for number, node in enumerate(every)
            if node.pods
        },
        texts=tuple(map(escaping.plain, texts)),
        kinds=tuple(tuple((escaping.plain(r[0]), *r[1:]) for r in kind) for kind in kinds),
        removed=removed,
        revision=revision,
        instance=instance,
    )


def encode(value: Columns) -> bytes:
    """Return columns as JSON."""
    return msgspec.json.encode(value)
