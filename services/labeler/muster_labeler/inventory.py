"""Pure: What agents reported, as one ConfigMap: the commands read it, and need no bus.

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
_KINDS_MAX: Final = 32
_NAME_MAX: Final = 300


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
    """Return the nodes' kinds of GPU as text; the same nodes, always the same text.

    What one node says in too many words is left out, and what does not fit: of a node that is not
    there nothing is claimed. So no node can keep the others' from being written.
    """
    modest = {name: kinds for name, kinds in nodes.items() if _is_modest(kinds)}
    text = _encoded(modest, simulated)
    while len(text.encode()) > BYTES_MAX:
        modest = dict(sorted(modest.items())[: len(modest) * 9 // 10])
        text = _encoded(modest, simulated)
    return text


def _is_modest(kinds: sources.Kinds) -> bool:
    return len(kinds) <= _KINDS_MAX and all(len(kind.name) <= _NAME_MAX for kind in kinds)


def _encoded(nodes: Mapping[str, sources.Kinds], simulated: frozenset[str]) -> str:
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


def _index(number: str) -> int:
    if not (number.isascii() and number.isdecimal()):
        raise ValueError(f"{number!r} is no number of a product")
    return int(number)


def decoded(text: str) -> tuple[dict[str, sources.Kinds], frozenset[str]]:
    """Return the GPUs by node, and which nodes are simulated. Raises Unreadable."""
    try:
        found = msgspec.json.decode(text, type=_Inventory)
        kinds = [sources.Product(p.name, p.memory_mib, p.is_mig, p.is_vgpu) for p in found.products]
        nodes: dict[str, sources.Kinds] = {
            name: {kinds[_index(number)]: count for number, count in counts.items()}
            for name, counts in found.nodes.items()
        }
    except (msgspec.MsgspecError, IndexError, ValueError) as error:
        raise Unreadable(str(error)) from None
    return nodes, frozenset(found.simulated)
