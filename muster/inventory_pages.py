"""Pure: splits an inventory into pages, each of which fits into a message.

A node may have ten thousand devices, but a plugin's messages are small, so that one node cannot
fill a stream. `muster.nats.assembly` joins the pages.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from muster import vocabulary

PAGE_BYTES_MAX: Final = 48 * 1024
"""The maximum size of a page, including the CloudEvents attributes."""

ATTRIBUTES_BYTES: Final = 1536
"""The maximum size of the CloudEvents attributes in a message."""
_Item = (
    vocabulary.Device
    | vocabulary.Gpu
    | vocabulary.GpuResource
    | vocabulary.FuseMount
    | vocabulary.Watched
    | str
)


class TooManyPages(ValueError):
    """An inventory needs more than PAGES_MAX pages."""


def split(inventory: vocabulary.InventoryReported) -> tuple[vocabulary.InventoryReported, ...]:
    """Return the pages of an inventory, not yet numbered; there may be more than PAGES_MAX.

    An item that is longer than a page has its own page.
    """
    gpus = inventory.gpus
    head = msgspec.structs.replace(
        inventory,
        devices=(),
        resources=(),
        fuse_mounts=(),
        watched=(),
        gpus=msgspec.structs.replace(gpus, gpus=(), resources=()) if gpus else None,
    )
    room = PAGE_BYTES_MAX - ATTRIBUTES_BYTES - len(msgspec.json.encode(head))
    parts: list[list[_Item]] = [[]]
    used = 0
    for item in _items(inventory):
        size = len(msgspec.json.encode(item)) + 1
        if used and used + size > room:
            parts.append([])
            used = 0
        parts[-1].append(item)
        used += size
    if len(parts) == 1:
        return (inventory,)
    return tuple(_page(head, part) for part in parts)


def numbered(
    inventory: vocabulary.InventoryReported, version: int
) -> tuple[vocabulary.InventoryReported, ...]:
    """Return the pages to publish. Raises TooManyPages."""
    parts = split(inventory)
    if len(parts) > vocabulary.PAGES_MAX:
        raise TooManyPages(f"{len(parts)} pages, more than {vocabulary.PAGES_MAX}")
    return tuple(
        msgspec.structs.replace(part, version=version, page=page, pages=len(parts))
        for page, part in enumerate(parts)
    )


def _items(inventory: vocabulary.InventoryReported) -> Iterator[_Item]:
    yield from inventory.resources
    if inventory.gpus is not None:
        yield from inventory.gpus.resources
        yield from inventory.gpus.gpus
    yield from inventory.fuse_mounts
    yield from inventory.watched
    yield from inventory.devices


def _page(
    head: vocabulary.InventoryReported, part: Sequence[_Item]
) -> vocabulary.InventoryReported:
    gpus = head.gpus
    return msgspec.structs.replace(
        head,
        devices=tuple(item for item in part if isinstance(item, vocabulary.Device)),
        resources=tuple(item for item in part if isinstance(item, str)),
        fuse_mounts=tuple(item for item in part if isinstance(item, vocabulary.FuseMount)),
        watched=tuple(item for item in part if isinstance(item, vocabulary.Watched)),
        gpus=msgspec.structs.replace(
            gpus,
            gpus=tuple(item for item in part if isinstance(item, vocabulary.Gpu)),
            resources=tuple(item for item in part if isinstance(item, vocabulary.GpuResource)),
        )
        if gpus
        else None,
    )
