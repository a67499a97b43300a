"""Pure: joins the pages of inventories that `muster.inventory_pages` split.

A reader uses an inventory only when it has every page of one version. Pages of an incomplete
version are discarded when another version begins. If too many pages are waiting, the node with the
most of them loses its oldest incomplete inventory.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from muster import codec, vocabulary

WAITING_MAX: Final = 256
"""The maximum number of pages of incomplete inventories that a reader retains."""


class _Version(NamedTuple):
    source: str
    instance: str
    number: int
    pages: int


class _Incomplete(NamedTuple):
    version: _Version
    events: dict[int, codec.CloudEvent]


class Assembler:
    """Joins the pages of one stream in the order of their arrival."""

    def __init__(self) -> None:
        self._incomplete: dict[tuple[str, str], _Incomplete] = {}
        self._waiting = 0
        self.forgotten = 0
        """The number of discarded pages of inventories that never became complete."""

    def add(self, event: codec.CloudEvent) -> codec.CloudEvent | None:
        """Return the event, or the inventory that this page completes; otherwise None.

        A complete inventory has the id of page 0, and the position of the page that arrived last.
        """
        page = event.data
        if not isinstance(page, vocabulary.InventoryReported):
            return event
        key = page.node, page.plugin
        if page.page >= page.pages:
            self.forgotten += 1
            return None
        if page.pages == 1:
            self._forget(key)
            return event
        version = _Version(event.source, event.instance, page.version, page.pages)
        waiting = self._incomplete.get(key)
        if waiting is None or waiting.version != version:
            self._forget(key)
            waiting = self._incomplete[key] = _Incomplete(version, {})
        self._waiting += page.page not in waiting.events
        waiting.events[page.page] = event
        if len(waiting.events) == page.pages:
            del self._incomplete[key]
            self._waiting -= page.pages
            return _whole([waiting.events[number] for number in range(page.pages)], event)
        if self._waiting > WAITING_MAX:
            self._forget(self._largest())
        return None

    def _largest(self) -> tuple[str, str]:
        """Return the key of the oldest inventory of the node with the most waiting pages."""
        held: dict[str, int] = {}
        for (node, _), waiting in self._incomplete.items():
            held[node] = held.get(node, 0) + len(waiting.events)
        most = max(held, key=lambda node: held[node])
        return next(key for key in self._incomplete if key[0] == most)

    def _forget(self, key: tuple[str, str]) -> None:
        waiting = self._incomplete.pop(key, None)
        if waiting is not None:
            self._waiting -= len(waiting.events)
            self.forgotten += len(waiting.events)


def _whole(events: Sequence[codec.CloudEvent], last: codec.CloudEvent) -> codec.CloudEvent:
    pages = [e.data for e in events if isinstance(e.data, vocabulary.InventoryReported)]
    parts = [page.gpus for page in pages if page.gpus is not None]
    gpus = (
        msgspec.structs.replace(
            parts[0],
            gpus=tuple(gpu for part in parts for gpu in part.gpus),
            resources=tuple(resource for part in parts for resource in part.resources),
        )
        if parts
        else None
    )
    data = msgspec.structs.replace(
        pages[0],
        devices=tuple(device for page in pages for device in page.devices),
        resources=tuple(name for page in pages for name in page.resources),
        fuse_mounts=tuple(mount for page in pages for mount in page.fuse_mounts),
        watched=tuple(watched for page in pages for watched in page.watched),
        gpus=gpus,
        page=0,
        pages=1,
    )
    return msgspec.structs.replace(events[0], data=data, position=last.position)
