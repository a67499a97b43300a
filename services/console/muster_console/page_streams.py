"""Adapter for HTTP: the streams that keep open pages up to date."""

import asyncio
import re
from datetime import UTC, datetime
from typing import Final

from starlette import requests, responses, types

from muster_console import event_log, live, security, subscribers

_SEND_S: Final = 30.0
"""A page that reads nothing for this long is disconnected; its browser connects again."""
_RETRY_S: Final = 5
"""The delay before a refused page may connect again; the script waits up to twice as long."""


class Streams:
    """The streams of all open pages.

    If the maximum number is open, a new stream replaces the oldest stream of the peer that has the
    most, if that peer then still has at least as many streams as the new stream's peer. Otherwise
    the new stream is refused.
    """

    def __init__(self, current: live.Live, *, pages_max: int) -> None:
        self._live = current
        self._pages_max = pages_max
        self._open: dict[str, list[asyncio.Future[None]]] = {}
        """By peer: a future for each stream, which is cancelled to close it; the oldest first."""

    async def changes(self, request: requests.Request) -> responses.Response:
        """Answer with the stream of changes for one open page, or 503 if too many are open."""
        peer = security.peer_of(request.scope)
        if not self._has_room(peer):
            text = f"{self._count()} pages are open already; close one\n"
            return responses.PlainTextResponse(text, 503, headers={"retry-after": f"{_RETRY_S}"})
        query, feed = request.query_params, self._live.feed
        # browsers name what they received before they lost the connection; our script does, too
        last = request.headers.get("last-event-id") or query.get("position", "")
        position = subscribers.position_of(last)
        instance = position.instance if position else query.get("instance", feed.instance)
        revision, alerts = number(query.get("after")), number(query.get("alerts"))
        event = number(query.get("event")) or 0
        if instance != feed.instance:
            # the numbers are those of another process; the page loads again when it learns of it
            revision, alerts, event = -1, -1, feed.log.last
        elif position:
            revision, alerts, event = position.revision, position.alerts, position.event
        events = event_log.filter_of(query) if query.get("events") else None
        subscriber = subscribers.Subscriber(
            feed, revision=revision, events=events, event=event, alerts=alerts
        )
        return _Stream(self, self._live, subscriber, peer)

    def enter(self, peer: str) -> "asyncio.Future[None]":
        """Count a new stream of a peer; return a future that is done when it must be closed."""
        end = asyncio.get_running_loop().create_future()
        if self._count() >= self._pages_max and (crowded := self._crowded(peer)):
            oldest = self._open[crowded][0]
            oldest.cancel()
            self.leave(crowded, oldest)
        self._open.setdefault(peer, []).append(end)
        return end

    def leave(self, peer: str, end: "asyncio.Future[None]") -> None:
        """Stop counting a stream that was closed."""
        ends = self._open.get(peer, [])
        if end in ends:
            ends.remove(end)
        if not ends:
            self._open.pop(peer, None)

    def _count(self) -> int:
        return sum(map(len, self._open.values()))

    def _has_room(self, peer: str) -> bool:
        return self._count() < self._pages_max or self._crowded(peer) is not None

    def _crowded(self, peer: str) -> str | None:
        """Return the peer with the most streams, or None if it may keep all of them."""
        most = max(self._open, key=lambda each: len(self._open[each]))
        is_unfair = len(self._open[most]) > len(self._open.get(peer, ())) + 1
        return most if is_unfair else None


class _Stream(responses.Response):
    """Sends changes until the page is closed or stops reading."""

    def __init__(
        self, streams: Streams, current: live.Live, subscriber: subscribers.Subscriber, peer: str
    ) -> None:
        super().__init__()
        self._streams = streams
        self._live = current
        self._subscriber = subscriber
        self._peer = peer

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        """Send the stream."""
        head = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body", "body": b""})
            return
        end = self._streams.enter(self._peer)
        closed = asyncio.create_task(_closed(receive))
        end.add_done_callback(lambda _: closed.cancel())
        try:
            while not closed.done():
                messages = self._subscriber.take(self._live.now(), datetime.now(UTC))
                body = b"".join(map(subscribers.encode, messages))
                if body:
                    async with asyncio.timeout(_SEND_S):
                        await send({"type": "http.response.body", "body": body, "more_body": True})
                await self._live.ticked_or(closed)
        except TimeoutError:
            pass  # the page does not read: its connection is closed
        finally:
            closed.cancel()
            self._streams.leave(self._peer, end)


def number(text: str | None) -> int | None:
    """Return the number in a parameter; None if it is missing or not a number."""
    return int(text) if text and re.fullmatch(r"[0-9]{1,15}", text) else None


async def _closed(receive: types.Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
