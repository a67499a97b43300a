"""Pure: Which entries of a configuration surely find the same device nodes, as rules alone tell."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from muster_plugin.model import patterns

if TYPE_CHECKING:
    from muster_plugin.config import resources


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """One entry, the number and name of the resource it belongs to, and where it stands."""

    at: int
    resource: str
    key: str
    nodes: resources.Nodes


def overlaps(claims: Sequence[Claim]) -> Iterator[tuple[Claim, Claim]]:
    """Give each pair of entries of different resources of which the second finds all of the first.

    Patterns that differ are compared with single paths and single USB devices only; whether two of
    them meet shows on the node.
    """
    first: dict[bytes, Claim] = {}
    for claim in claims:
        found = first.setdefault(_identity(claim.nodes), claim)
        if found.at != claim.at:
            yield claim, found
    narrow = [claim for claim in claims if claim.nodes.is_one]
    for wide in claims:
        if not wide.nodes.is_one:
            for one in narrow:
                if one.at != wide.at and _covers(wide.nodes, one.nodes):
                    yield one, wide


def _covers(wide: resources.Nodes, one: resources.Nodes) -> bool:
    if wide.usb and one.usb:
        return (wide.usb.vendor, wide.usb.product) == (one.usb.vendor, one.usb.product)
    if not one.path or any(patterns.glob(glob).fullmatch(one.path) for glob in wide.exclude):
        return False
    if wide.regex:
        below = one.path.removeprefix("/dev/")
        return below != one.path and patterns.regex_matches(wide.regex, below)
    return bool(wide.path) and patterns.overlap(wide.path, one.path)


def _identity(nodes: resources.Nodes) -> bytes:
    """Return what is equal for two entries that find the same nodes."""
    exclude = () if nodes.is_literal else sorted(nodes.exclude)
    found_by = (nodes.path, nodes.regex, nodes.udev, nodes.usb, exclude)
    return msgspec.json.encode(found_by, order="sorted")
