"""Pure. What agents reported, as one ConfigMap: the commands read it, and need no bus.

Products are written once and referred to by number, so that ten thousand nodes take some 300 kB of
the 1 MiB that a ConfigMap holds.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from muster_labeler import sources

CONFIG_MAP: Final = "muster-inventory"
NAMESPACE: Final = "muster"
KEY: Final = "inventory.json"
BYTES_MAX: Final = 900_000


class Unreadable(ValueError):
    """What stands there is no inventory of ours."""


class _Product(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True):
    name: str
    memory_mib: int | None = None
    is_mig: bool = False
    is_vgpu: bool = False


class _Inventory(msgspec.Struct, frozen=True):
    products: list[_Product]
    nodes: dict[str, dict[str, int]]
    """How many of which product, by its number."""
    simulated: list[str] = []


def encoded(nodes: Mapping[str, sources.Kinds], simulated: frozenset[str] = frozenset()) -> str:
    """Return the nodes' kinds of GPU as text; the same nodes, always the same text."""
    kinds = sorted({p for found in nodes.values() for p in found}, key=repr)
    number = {product: index for index, product in enumerate(kinds)}
    written = _Inventory(
        [_Product(p.name, p.memory_mib, p.is_mig, p.is_vgpu) for p in kinds],
        {
            name: {str(number[p]): count for p, count in sorted(nodes[name].items(), key=repr)}
            for name in sorted(nodes)
        },
        sorted(simulated & nodes.keys()),
    )
    return msgspec.json.encode(written).decode()


def decoded(text: str) -> tuple[dict[str, sources.Kinds], frozenset[str]]:
    """Return the GPUs by node, and which nodes are simulated. Raises Unreadable."""
    try:
        found = msgspec.json.decode(text, type=_Inventory)
        kinds = [sources.Product(p.name, p.memory_mib, p.is_mig, p.is_vgpu) for p in found.products]
        nodes: dict[str, sources.Kinds] = {
            name: {kinds[int(number)]: count for number, count in counts.items()}
            for name, counts in found.nodes.items()
        }
    except (msgspec.MsgspecError, IndexError, ValueError) as error:
        raise Unreadable(str(error)) from None
    return nodes, frozenset(found.simulated)
