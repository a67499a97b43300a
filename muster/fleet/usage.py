"""Pure: counts the devices that pods may use; those of a failed plugin are unconfirmed.

The node's status keeps listing the devices of such a plugin, but a pod might not get one.
"""

from collections.abc import Iterable

import msgspec

from muster.fleet import health_state, model


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """How many devices of a resource the fleet advertises, and how many are usable by pods."""

    resource: str
    nodes: int
    usable: int
    """According to the nodes' status, including the `unconfirmed` devices."""
    total: int
    unconfirmed: int
    """How many of the usable devices belong to a plugin that does not work at present."""
    nodes_short: int
    """How many nodes offer fewer devices than they advertise."""
    nodes_with_fewer: int
    """`nodes_short`, and the nodes whose plugin does not work at present."""


def of_plugin(plugin: health_state.Plugin, resource: str) -> str:
    """Return a plugin's device count as text; `3 of 20` means that pods may use only 3."""
    total = plugin.devices[resource]
    usable = plugin.allocatable.get(resource, total)
    text = f"{usable} of {total}" if usable < total else str(total)
    return f"{text} listed, unconfirmed" if usable and not plugin.is_confirmed else text


def of_fleet(nodes: Iterable[model.NodeSummary]) -> list[Usage]:
    """Return the usage of each resource; the one with the most unusable devices comes first."""
    sums: dict[str, list[int]] = {}
    for node in nodes:
        for name, (usable, total, is_confirmed) in node.resources.items():
            counted = sums.setdefault(name, [0, 0, 0, 0, 0, 0])
            counted[0] += 1
            counted[1] += usable
            counted[2] += total
            counted[3] += 0 if is_confirmed else usable
            counted[4] += usable < total
            counted[5] += usable < total or not is_confirmed
    every = [
        Usage(
            resource=name,
            nodes=counted[0],
            usable=counted[1],
            total=counted[2],
            unconfirmed=counted[3],
            nodes_short=counted[4],
            nodes_with_fewer=counted[5],
        )
        for name, counted in sums.items()
    ]
    return sorted(every, key=lambda each: (each.usable - each.total, each.resource))
