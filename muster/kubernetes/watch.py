"""Adapter for the Kubernetes API: lists all objects of one kind, then watches them for changes.

A watch that ends is resumed at its resource version; objects are listed again only if that version
has expired (410). An unreadable object is counted and skipped.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, Generic, TypeVar

import msgspec
import prometheus_client

from muster import pacing
from muster.kubernetes import api
from muster.service import logs, runtime

Shape = TypeVar("Shape")
Kept = TypeVar("Kept")

_LIST_S: Final = 60.0
_PAGE_S: Final = 10.0
"""A list counts as hung if no page arrives for this long."""
_WATCH_S: Final = 24.0
"""The timeout of a watch: a watch that ends in time is known to work. The API server's bookmarks
are a minute apart (apiserver cacher, bookmarkFrequency), with one more 2 s before the end. Resuming
a watch costs one request, and no list.
"""
_IDLE_S: Final = 27.0
"""A watch that neither sends a line nor ends for this long counts as hung."""
_STEADY_S: Final = 5.0
"""After a watch that lasted at least this long, the next watch begins immediately."""
_BACKOFF: Final = pacing.Backoff(first_s=0.2, max_s=5.0, jitter=0.5)
_FORBIDDEN: Final = pacing.Backoff(first_s=1.0, max_s=60.0)
"""An API server that has just started refuses all requests until it has read the roles."""
_WATCH_JITTER: Final = (0.75, 1.0)

_UNREADABLE: Final = prometheus_client.Counter(
    "muster_kubernetes_unreadable_total", "Objects of the Kubernetes API that could not be read."
)
_LISTS: Final = prometheus_client.Counter(
    "muster_kubernetes_lists_total", "Complete lists read, by kind.", ["kind"]
)


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""


class _WatchEvent(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw = msgspec.Raw()


class _Common(msgspec.Struct, frozen=True):
    """The fields that every object has, errors included."""

    metadata: _Metadata = _Metadata()
    code: int = 0
    message: str = ""


class _Expired(Exception):
    """The resource version has expired, so all objects must be listed again."""


@dataclass(frozen=True, slots=True)
class Sink(Generic[Shape, Kept]):
    """Receives all objects together, then each new, changed or deleted object.

    `keep` reduces each object to the part that is stored, so that the complete objects are never in
    memory together.
    """

    keep: Callable[[Shape], Kept]
    replace: Callable[[list[Kept]], None]
    put: Callable[[Kept], None]
    drop: Callable[[Kept], None]


class Reflector(Generic[Shape, Kept]):
    """Updates a sink with one kind of object while `run` runs."""

    def __init__(
        self,
        api: api.Api,
        path: str,
        shape: type[Shape],
        sink: Sink[Shape, Kept],
        *,
        query: Mapping[str, str] | None = None,
    ) -> None:
        self.problem = ""
        """Why the sink is out of date; empty if it is up to date."""
        self.listed = asyncio.Event()
        """Set after the first complete list."""
        self.tried = asyncio.Event()
        """Set after the first complete list or error."""
        self._api = api
        self._path = path
        self._kind = path.rpartition("/")[2]
        self._query = dict(query or {})
        self._decoder = msgspec.json.Decoder(shape)
        self._sink = sink
        self._version = ""
        self._retry = runtime.Retry(_BACKOFF)
        self._refusals = 0
        """How many times in a row the permission was missing."""

    async def run(self) -> None:
        """List and watch in a loop until cancelled."""
        while True:
            try:
                if not self._version:
                    await self._list()
                await self._watch()
                await self._retry.wait()
            except _Expired:
                self._version = ""
                await self._retry.wait()
            except api.Refused as error:
                if error.answer.status == HTTPStatus.GONE:
                    self._version = ""
                    await self._retry.wait()
                else:
                    await self._wait(error.answer)
            except api.LOST as error:
                text = str(error) or type(error).__name__
                await self._wait(
                    api.Answer(what=f"watch {self._path}", status=0, body=text.encode())
                )

    def list_again(self) -> None:
        """List all objects again after the next line, or the end, of the current watch."""
        self._version = ""

    async def _list(self) -> None:
        items: list[Kept] = []
        version = ""
        pages = self._api.pages(self._path, query=self._query, timeout_s=_LIST_S)
        clock = asyncio.get_running_loop().time
        async with contextlib.aclosing(pages), asyncio.timeout(_PAGE_S) as limit:
            async for page in pages:
                items.extend(filter(None, map(self._read, page.items)))
                version = page.version
                limit.reschedule(clock() + _PAGE_S)
        _LISTS.labels(self._kind).inc()
        self._version = version
        self._sink.replace(items)
        self.listed.set()
        self.tried.set()
        self._note_available()

    async def _watch(self) -> None:
        query = {
            **self._query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            # servers end watches after about this time anyway; jitter keeps them from all ending at
            # once
            "timeoutSeconds": str(int(_WATCH_S * random.uniform(*_WATCH_JITTER))),  # noqa: S311
        }
        clock = asyncio.get_running_loop().time
        began = clock()
        lines = self._api.watch(self._path, query, idle_s=_IDLE_S)
        async with contextlib.aclosing(lines):
            async for line in lines:
                if not line:
                    self._note_available()
                elif self._apply(line):
                    self._on_line()
                if not self._version:
                    raise _Expired
        if clock() - began >= _STEADY_S:
            self._on_line()

    def _apply(self, line: bytes) -> bool:
        """Apply a line of the watch; return False if it cannot be read."""
        try:
            event = msgspec.json.decode(line, type=_WatchEvent)
            common = msgspec.json.decode(event.object, type=_Common)
        except api.UNREADABLE:
            _UNREADABLE.inc()
            return False
        if event.type == "ERROR":
            if common.code == HTTPStatus.GONE:
                raise _Expired
            raise ConnectionError(f"{common.code} {common.message}")
        if self._version:
            self._version = common.metadata.resource_version or self._version
        item = None if event.type == "BOOKMARK" else self._read(event.object)
        if item is not None and event.type == "DELETED":
            self._sink.drop(item)
        elif item is not None:
            self._sink.put(item)
        return True

    def _read(self, raw: msgspec.Raw) -> Kept | None:
        try:
            return self._sink.keep(self._decoder.decode(raw))
        except api.UNREADABLE:
            _UNREADABLE.inc()
            return None

    def _on_line(self) -> None:
        self._retry.reset()
        self._note_available()

    def _note_available(self) -> None:
        self._refusals = 0
        if self.problem:
            self.problem = ""
            logs.logger().info("kubernetes_api_available", path=self._path)

    async def _wait(self, answer: api.Answer) -> None:
        """Log the first failure in a row, and wait; wait longer while the permission is missing."""
        if not self.problem:
            error = answer.problem
            logs.logger().warning("kubernetes_api_unavailable", path=self._path, error=error)
        self.problem = answer.problem
        self.tried.set()
        self._refusals = self._refusals + 1 if answer.is_forbidden else 0
        at_least_s = max(answer.wait_s, _FORBIDDEN.delay_s(self._refusals))
        await self._retry.wait(at_least_s=at_least_s)
