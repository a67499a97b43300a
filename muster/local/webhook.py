"""Adapter for HTTP: a webhook receiver that records requests, and fails on request.

Every POST is recorded; GET /received returns the recorded requests; POST /behave makes the next
responses slow or erroneous.
"""

import argparse
import asyncio
import contextlib
import datetime as dt
import itertools
import pathlib
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated, BinaryIO, Self

import msgspec
import orjson
from aiohttp import web

from muster.local import httpd

BODY_BYTES_MAX = 256 * 1024
KEPT_MAX = 1000
WAIT_S_MAX = 60.0


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """One POST: `index` counts from 0, `status` is the response's, header names are lower case.

    `body` is the received text; bytes that are not UTF-8 are replaced.
    """

    index: int
    at: dt.datetime
    path: str
    headers: dict[str, str]
    body: str
    status: int

    def json(self) -> object:
        """Return the decoded body. Raises orjson.JSONDecodeError if it is not JSON."""
        parsed: object = orjson.loads(self.body)
        return parsed


class Behaviour(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the next `times` POSTs are answered."""

    status: Annotated[int, msgspec.Meta(ge=200, le=599)] = 200
    times: Annotated[int, msgspec.Meta(ge=0)] = 1
    delay_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0
    headers: dict[str, str] = {}

    def __post_init__(self) -> None:
        """Reject headers that cannot be sent (msgspec adds the path)."""
        if any(not text.isprintable() for pair in self.headers.items() for text in pair):
            raise ValueError("headers must contain only printable characters")


class WebhookReceiver:
    """The receiver as an asynchronous context manager: `async with WebhookReceiver() as hook`.

    `file` gets one JSON line for each POST.
    """

    def __init__(
        self, *, http: httpd.Address = httpd.LOCAL, file: pathlib.Path | None = None
    ) -> None:
        self.url = ""
        self._address = http
        self._file = file
        self._written: BinaryIO | None = None
        self._count = itertools.count()
        self._kept: deque[Received] = deque(maxlen=KEPT_MAX)
        self._behaviour = Behaviour(times=0)
        self._changed = asyncio.Condition()
        self._closing = False
        self._open = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        application = web.Application(client_max_size=BODY_BYTES_MAX)
        application.router.add_get("/received", self._list)
        application.router.add_post("/behave", self._behave)
        application.router.add_post("/{path:.*}", self._receive)
        for probe in ("/healthz", "/readyz"):
            application.router.add_get(probe, _ok)
        if self._file is not None:
            try:
                self._written = self._open.enter_context(self._file.open("ab", buffering=0))
            except OSError as error:
                raise httpd.UsageError(f"cannot write {self._file}: {error.strerror}") from error
        try:
            listening = httpd.listening(application, self._address)
            self.url = await self._open.enter_async_context(listening)
        except BaseException:
            await self._open.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing = True
        async with self._changed:
            self._changed.notify_all()
        await self._open.aclose()

    def behave(self, behaviour: Behaviour) -> None:
        """Answer the next POSTs with this behaviour, which replaces the previous behaviour."""
        self._behaviour = behaviour

    def received(self, since: int = 0) -> list[Received]:
        """Return the recorded POSTs from index `since` on."""
        return [received for received in self._kept if received.index >= since]

    async def wait_for(
        self, matches: Callable[[Sequence[Received]], bool], *, timeout_s: float
    ) -> list[Received]:
        """Wait until the recorded POSTs match, and return them. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(lambda: matches(self.received()))
            return self.received()

    async def _receive(self, request: web.Request) -> web.Response:
        body = await request.read()
        behaviour = Behaviour()
        if self._behaviour.times > 0:
            behaviour = self._behaviour
            self._behaviour = msgspec.structs.replace(behaviour, times=behaviour.times - 1)
        received = Received(
            index=next(self._count),
            at=dt.datetime.now(dt.UTC),
            path=request.path,
            headers={_clean(key.lower()): _clean(text) for key, text in request.headers.items()},
            body=body.decode(errors="replace"),
            status=behaviour.status,
        )
        self._kept.append(received)
        if self._written is not None:
            self._written.write(orjson.dumps(_as_json(received)) + b"\n")
        async with self._changed:
            self._changed.notify_all()
        await asyncio.sleep(behaviour.delay_s)
        return web.Response(status=behaviour.status, headers=behaviour.headers)

    async def _list(self, request: web.Request) -> web.Response:
        try:
            since = int(request.query.get("since", "0"))
            wait_s = float(request.query.get("wait", "0"))
        except ValueError as error:
            return web.Response(status=400, text=f"since and wait must be numbers: {error}\n")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(max(0.0, wait_s), WAIT_S_MAX)), self._changed:
                await self._changed.wait_for(lambda: self._closing or self.received(since))
        return httpd.json_response([_as_json(received) for received in self.received(since)])

    async def _behave(self, request: web.Request) -> web.Response:
        try:
            self.behave(msgspec.json.decode(await request.read(), type=Behaviour))
        except msgspec.MsgspecError as error:
            return web.Response(status=400, text=f"behave: {error}\n")
        return web.Response(status=204)


def _as_json(received: Received) -> dict[str, object]:
    """Return a POST as JSON: its body as JSON if it is JSON, else as text."""
    fields: dict[str, object] = msgspec.to_builtins(received)
    with contextlib.suppress(orjson.JSONDecodeError):
        fields["body"] = received.json()
    return fields


def _clean(header: str) -> str:
    """Return the header without invalid UTF-8, which aiohttp turns into surrogates."""
    return header.encode(errors="replace").decode()


async def _ok(_: web.Request) -> web.Response:
    return web.Response(text="ok")


async def _serve(options: argparse.Namespace) -> None:
    stopped = httpd.stop_on_signals()
    async with WebhookReceiver(http=options.http, file=options.file) as receiver:
        httpd.log("listening", service="webhook", http=receiver.url)
        await stopped.wait()


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code."""
    parser = httpd.Parser(prog="muster.local.webhook", description=__doc__)
    parser.add_argument("--http", type=httpd.address, default=httpd.LOCAL, metavar="HOST:PORT")
    parser.add_argument("--file", type=pathlib.Path, metavar="PATH")
    return httpd.run(parser.prog, _serve(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
