"""Adapter: the Kubernetes API: all objects of one kind, listed once and watched from there.

A watch that ends is opened again where it stood; only if the API has forgotten that place (410)
everything is listed anew. An object that cannot be read is counted and left out.
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

from muster.kubernetes import api
from muster.service import logs

Shape = TypeVar("Shape")
Kept = TypeVar("Kept")

_LIST_S: Final = 60.0
_WATCH_S: Final = 300.0
_IDLE_S: Final = 150.0
"""The API server sends a bookmark about every minute (apiserver cacher, bookmarkFrequency)."""
_WAIT_S: Final = (0.2, 30.0)
_FORBIDDEN_S: Final = 60.0
_JITTER: Final = (0.5, 1.0)

_UNREADABLE: Final = prometheus_client.Counter(
    "muster_kubernetes_unreadable_total", "Objects of the Kubernetes API that could not be read."
)
_LISTS: Final = prometheus_client.Counter(
    "muster_kubernetes_lists_total", "Times that all objects of a kind were read.", ["kind"]
)


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""


class _Told(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw = msgspec.Raw()


class _Bare(msgspec.Struct, frozen=True):
    """What every object has, and an error too."""

    metadata: _Metadata = _Metadata()
    code: int = 0
    message: str = ""


class _Expired(Exception):
    """The API does not know our place any more."""


@dataclass(frozen=True, slots=True)
class Sink(Generic[Shape, Kept]):
    """Who wants to know: of everything at once, of one that is new or changed, of one gone.

    `keep` makes of an object what is kept of it, one by one, so that never all are there whole.
    """

    keep: Callable[[Shape], Kept]
    replace: Callable[[list[Kept]], None]
    put: Callable[[Kept], None]
    drop: Callable[[Kept], None]


class Reflector(Generic[Shape, Kept]):
    """Keeps a sink up to date for ever; `run` it."""

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
        """Why this is not up to date, in words; empty if it is."""
        self.listed = asyncio.Event()
        """That there was a whole list once."""
        self.tried = asyncio.Event()
        """That there was one, or why there was none."""
        self._api = api
        self._path = path
        self._kind = path.rpartition("/")[2]
        self._query = dict(query or {})
        self._decoder = msgspec.json.Decoder(shape)
        self._sink = sink
        self._version = ""
        self._wait_s = _WAIT_S[0]

    async def run(self) -> None:
        """List, watch, and begin again, for ever."""
        while True:
            try:
                if not self._version:
                    await self._list()
                await self._watch()
                await self._pause()
            except _Expired:
                self._version = ""
                await self._pause()
            except api.Refused as error:
                if error.answer.status == HTTPStatus.GONE:
                    self._version = ""
                    await self._pause()
                else:
                    await self._wait(error.answer)
            except api.LOST as error:
                text = str(error) or type(error).__name__
                await self._wait(
                    api.Answer(what=f"watch {self._path}", status=0, body=text.encode())
                )

    def list_again(self) -> None:
        """Read everything again when the present watch ends."""
        self._version = ""

    async def _list(self) -> None:
        items: list[Kept] = []
        version = ""
        pages = self._api.pages(self._path, query=self._query, timeout_s=_LIST_S)
        async with contextlib.aclosing(pages):
            async for page in pages:
                items.extend(filter(None, map(self._read, page.items)))
                version = page.version
        _LISTS.labels(self._kind).inc()
        self._version = version
        self._sink.replace(items)
        self.listed.set()
        self.tried.set()
        self._say_well()

    async def _watch(self) -> None:
        query = {
            **self._query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            # servers end watches about then anyway, and not all at once
            "timeoutSeconds": str(int(_WATCH_S * random.uniform(*_JITTER))),  # noqa: S311  # jitter
        }
        lines = self._api.watch(self._path, query, idle_s=_IDLE_S)
        async with contextlib.aclosing(lines):
            async for line in lines:
                if self._take(line):
                    self._well()
                if not self._version:
                    raise _Expired

    def _take(self, line: bytes) -> bool:
        """Do what a line says; False if it says nothing that can be understood."""
        try:
            told = msgspec.json.decode(line, type=_Told)
            bare = msgspec.json.decode(told.object, type=_Bare)
        except api.UNREADABLE:
            _UNREADABLE.inc()
            return False
        if told.type == "ERROR":
            if bare.code == HTTPStatus.GONE:
                raise _Expired
            raise ConnectionError(f"{bare.code} {bare.message}")
        if self._version:
            self._version = bare.metadata.resource_version or self._version
        item = None if told.type == "BOOKMARK" else self._read(told.object)
        if item is not None and told.type == "DELETED":
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

    def _well(self) -> None:
        self._wait_s = _WAIT_S[0]
        self._say_well()

    def _say_well(self) -> None:
        if self.problem:
            self.problem = ""
            logs.logger().info("kubernetes_api_back", path=self._path)

    async def _wait(self, answer: api.Answer) -> None:
        """Name what is wrong once, and wait; longest where we have no right."""
        if not self.problem:
            logs.logger().warning("kubernetes_api_away", path=self._path, error=answer.problem)
        self.problem = answer.problem
        self.tried.set()
        await self._pause(_FORBIDDEN_S if answer.is_forbidden else answer.wait_s)

    async def _pause(self, least_s: float = 0.0) -> None:
        """Wait, longer each time until the watch tells something: no server makes us spin."""
        wait_s = max(self._wait_s, least_s)
        self._wait_s = min(_WAIT_S[1], self._wait_s * 2)
        await asyncio.sleep(wait_s * random.uniform(*_JITTER))  # noqa: S311  # jitter
