"""Adapter: HTTP watches: long-running answers with each change, bookmarks, and `410 Expired`.

A watch has a version, not a queue: it reads the store's log from there on. One that falls behind by
more than the log gets 410 and must list again, as with the real API server.
"""

import asyncio
import contextlib
import time

import orjson
from aiohttp import web

from muster.local.kubernetes import objects, refusals, trees

DEFAULT_TIMEOUT_S = 1800
"""The lower end of what the API server picks where the client names none."""

WATCHES_MAX = 1000
_ENDED = "k8s.io/initial-events-end"


class Watches:
    """All open watches of one store; `wake` them after each write."""

    def __init__(
        self, store: objects.Store, *, bookmark_period_s: float, closing: asyncio.Event
    ) -> None:
        self._store = store
        self._bookmark_period_s = bookmark_period_s
        self._closing = closing
        self._written = asyncio.Event()
        self._open = 0
        self._ends = 0

    def wake(self) -> None:
        """Have every watch read the log."""
        self._written.set()
        self._written = asyncio.Event()

    def end(self) -> None:
        """End every open watch, as a server that restarts does."""
        self._ends += 1
        self.wake()

    async def serve(self, request: web.Request, selection: objects.Selection) -> web.StreamResponse:
        """Answer a request with a watch, until its timeout or until either side ends it."""
        version = number(request, "resourceVersion")
        timeout_s = number(request, "timeoutSeconds") or DEFAULT_TIMEOUT_S
        bookmarks = request.query.get("allowWatchBookmarks") in {"true", "1"}
        wants_initial = request.query.get("sendInitialEvents") in {"true", "1"}
        if self._open >= WATCHES_MAX:
            raise refusals.RequestError(
                refusals.Reason.TOO_MANY_REQUESTS, f"{WATCHES_MAX} watches are open"
            )
        watch = _Watch(self._store, selection, bookmarks=bookmarks)
        events = watch.begin(version or 0, wants_initial=wants_initial)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        self._open += 1
        try:
            await response.prepare(request)
            await self._send(response, watch, events, time.monotonic() + timeout_s)
            await response.write_eof()
        except ConnectionResetError:
            pass  # the client has disconnected in the middle of a line
        finally:
            self._open -= 1
        return response

    async def _send(
        self,
        response: web.StreamResponse,
        watch: "_Watch",
        events: list[trees.Tree],
        until: float,
    ) -> None:
        bookmark_at = time.monotonic() + self._bookmark_period_s
        ends = self._ends
        while True:
            if events:
                await response.write(b"".join(orjson.dumps(event) + b"\n" for event in events))
            now = time.monotonic()
            if watch.expired or self._closing.is_set() or now >= until or self._ends != ends:
                break
            if watch.bookmarks and now >= bookmark_at:
                await response.write(orjson.dumps(watch.bookmark()) + b"\n")
                bookmark_at = now + self._bookmark_period_s
            written = self._written
            events = watch.changes()
            if not events:
                wake_at = min(until, bookmark_at) if watch.bookmarks else until
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, wake_at - now)):
                        await written.wait()
        if watch.bookmarks and not watch.expired:
            await response.write(orjson.dumps(watch.bookmark()) + b"\n")


class _Watch:
    """The position of one watch in the log."""

    def __init__(
        self, store: objects.Store, selection: objects.Selection, *, bookmarks: bool
    ) -> None:
        self.bookmarks = bookmarks
        self.expired = False
        self._store = store
        self._selection = selection
        self._version = store.version

    def begin(self, version: int, *, wants_initial: bool) -> list[trees.Tree]:
        """Return the first events: what exists, or what happened after `version`.

        `wants_initial` is the streaming list of client-go: what exists, then a marked bookmark.
        """
        if wants_initial:
            marked = trees.with_value(self.bookmark(), {_ENDED: "true"}, *_ANNOTATIONS)
            return [*self._store.initial(self._selection), marked]
        if not version:
            return self._store.initial(self._selection)
        self._version = version
        return self.changes()

    def changes(self) -> list[trees.Tree]:
        """Return what happened since the last call; an ERROR if the log has lost a part of it."""
        try:
            events = self._store.since(self._selection, self._version)
        except refusals.RequestError as error:
            self.expired = True
            return [{"type": "ERROR", "object": trees.from_json(orjson.dumps(error.status()))}]
        self._version = self._store.version
        return events

    def bookmark(self) -> trees.Tree:
        """Return the event with the version up to which a client has read."""
        resource = self._selection.place.resource
        metadata: trees.Tree = {"resourceVersion": str(self._version), "creationTimestamp": None}
        bookmark = resource.view({"metadata": metadata})
        return {"type": "BOOKMARK", "object": bookmark}


_ANNOTATIONS = ("object", "metadata", "annotations")


def number(request: web.Request, name: str) -> int | None:
    """Return a parameter that must be a whole number, or None where it is absent."""
    value = request.query.get(name, "")
    if not value:
        return None
    if not (value.isascii() and value.isdigit() and len(value) < len(str(2**63))):
        raise refusals.bad_request(f"Invalid value: {value!r}: {name} must be a whole number")
    return int(value)
