"""Door to the Kubernetes API: all nodes, listed once and watched from there.

A watch that ends is opened again where it stood; only if the API has forgotten that place (410)
everything is listed anew. A node that cannot be read is counted and left out.
"""

import asyncio
import contextlib
import random
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

import msgspec
import prometheus_client

from muster import logs
from muster_labeler import facts, kube, nodes

_LIST_S: Final = 60.0
_WATCH_S: Final = 300.0
_IDLE_S: Final = 150.0
"""The API server sends a bookmark about every minute (apiserver cacher, bookmarkFrequency)."""
_WAIT_S: Final = (0.2, 30.0)
_FORBIDDEN_S: Final = 60.0
_JITTER: Final = (0.5, 1.0)

_UNREADABLE: Final = prometheus_client.Counter(
    "muster_labeler_api_unreadable_total", "Nodes of the Kubernetes API that could not be read."
)
_LISTS: Final = prometheus_client.Counter(
    "muster_labeler_api_lists_total", "Times that all nodes were listed."
)


class _Bare(msgspec.Struct, frozen=True):
    metadata: facts.Metadata = facts.Metadata()
    code: int = 0
    message: str = ""


class _Told(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw = msgspec.Raw(b"{}")


class _Expired(Exception):
    """The API does not know our place any more."""


class Reflector:
    """Keeps a sink up to date for ever; `run` it."""

    def __init__(self, api: kube.Api, sink: facts.Sink, *, selector: Mapping[str, str]) -> None:
        self.problem = "the nodes are being listed"
        """Why this is not up to date, in words; empty if it is."""
        self.tried = asyncio.Event()
        """That there was a whole list once, or why not."""
        self._api = api
        self._sink = sink
        self._selector = selector
        self._decoder = msgspec.json.Decoder(facts.RawNode)
        self._version = ""
        self._wait_s = _WAIT_S[0]
        self._is_away = False

    async def run(self) -> None:
        """List, watch, and begin again, for ever."""
        while True:
            least_s = 0.0
            try:
                if not self._version:
                    await self._list()
                await self._watch()
            except _Expired:
                self._version = ""
            except kube.Refused as error:
                if error.answer.status == HTTPStatus.GONE:
                    self._version = ""
                else:
                    self._ail(error.answer.problem)
                    least_s = _FORBIDDEN_S if error.answer.is_forbidden else error.answer.wait_s
            except kube.LOST as error:
                self._ail(f"watch {nodes.PATH}: {error or type(error).__name__}")
            await self._pause(least_s)

    async def _list(self) -> None:
        found: list[facts.Node] = []
        version = ""
        pages = self._api.pages(nodes.PATH, timeout_s=_LIST_S)
        async for page in pages:
            found.extend(filter(None, map(self._read, page.items)))
            version = page.version
        _LISTS.inc()
        self._version = version
        self._sink.replace(found)
        self.tried.set()
        self._well()

    async def _watch(self) -> None:
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            # servers end watches about then anyway, and not all at once
            "timeoutSeconds": str(int(_WATCH_S * random.uniform(*_JITTER))),  # noqa: S311  # jitter
        }
        lines = self._api.watch(nodes.PATH, query, idle_s=_IDLE_S)
        async with contextlib.aclosing(lines):
            async for line in lines:
                self._take(line)
                self._well()

    def _take(self, line: bytes) -> None:
        try:
            told = msgspec.json.decode(line, type=_Told)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            _UNREADABLE.inc()
            return
        if told.type in {"ERROR", "BOOKMARK"}:
            bare = msgspec.json.decode(told.object, type=_Bare)
            if told.type == "BOOKMARK":
                self._version = bare.metadata.resource_version or self._version
                return
            if bare.code == HTTPStatus.GONE:
                raise _Expired
            raise ConnectionError(f"{bare.code} {bare.message}")
        node = self._read(told.object)
        if node is None:
            return
        self._version = node.version or self._version
        if told.type == "DELETED":
            self._sink.drop(node.name)
        else:
            self._sink.put(node)

    def _read(self, raw: msgspec.Raw) -> facts.Node | None:
        try:
            return facts.node(self._decoder.decode(raw), self._selector)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            _UNREADABLE.inc()
            return None

    def _well(self) -> None:
        self._wait_s = _WAIT_S[0]
        self.problem = ""
        if self._is_away:
            self._is_away = False
            logs.logger().info("kubernetes_api_back")

    def _ail(self, problem: str) -> None:
        """Name what is wrong once."""
        if not self._is_away:
            logs.logger().warning("kubernetes_api_away", error=problem)
        self._is_away = True
        self.problem = problem
        self.tried.set()

    async def _pause(self, least_s: float) -> None:
        """Wait, longer each time until the watch tells something: no server makes us spin."""
        wait_s = max(self._wait_s, least_s)
        self._wait_s = min(_WAIT_S[1], self._wait_s * 2)
        await asyncio.sleep(wait_s * random.uniform(*_JITTER))  # noqa: S311  # jitter
