"""Adapter: HTTP: the streams that keep open pages up to date."""

import asyncio
import re
from datetime import UTC, datetime
from typing import Final

from starlette import requests, responses, types

from muster_console import event_log, live, subscribers

_SEND_S: Final = 30.0
"""A page that reads nothing for this long is disconnected; its browser connects again."""
_RETRY_S: Final = 5
"""When a page that was refused may connect again; the script waits up to twice as long."""


class Streams:
    """The streams of all open pages."""

    def __init__(self, current: live.Live, *, pages_max: int) -> None:
        self._live = current
        self._pages_max = pages_max
        self._open = 0

    async def changes(self, request: requests.Request) -> responses.Response:
        """Answer with the stream of changes of one open page."""
        if self._open >= self._pages_max:
            text = f"{self._open} pages are open already; close one\n"
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
        return _Stream(self, self._live, subscriber)

    def enter(self) -> None:
        """Count an open page."""
        self._open += 1

    def leave(self) -> None:
        """Count a closed page."""
        self._open -= 1


class _Stream(responses.Response):
    """Sends changes until the page is closed or stops reading."""

    def __init__(
        self, streams: Streams, current: live.Live, subscriber: subscribers.Subscriber
    ) -> None:
        super().__init__()
        self._streams = streams
        self._live = current
        self._subscriber = subscriber

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        """Send the stream."""
        head = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body", "body": b""})
            return
        self._streams.enter()
        closed = asyncio.create_task(_closed(receive))
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
            self._streams.leave()


def number(text: str | None) -> int | None:
    """Return the number in a parameter; None if it is missing or not a number."""
    return int(text) if text and re.fullmatch(r"[0-9]{1,15}", text) else None


async def _closed(receive: types.Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
