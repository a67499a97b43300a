"""Adapter for HTTP: serves the pages on one address while the process runs."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Generator
from typing import Final

import uvicorn
from starlette import types
from uvicorn.protocols.http import h11_impl

from muster import commands
from muster.nats import bus
from muster.service import probes, runtime
from muster_console import config, live, pages, security

_CONNECTIONS_PER_PAGE: Final = 3
"""The connections of one open page: one for its stream, the others for its requests."""
_CONNECTIONS_MORE: Final = 100
"""The maximum number of connections in addition to those of open pages."""
_RESERVED: Final = 50
"""How many connections a single address leaves to others."""
_UNREAD_MS: Final = 60_000
"""The time after which the kernel closes a connection whose client reads nothing."""
_REQUEST_S: Final = 10.0
"""The time limit for receiving a full request, after the connection or the last answer."""
_BACKLOG: Final = 128
_HEAD_BYTES_MAX: Final = 16 * 1024
_END_S: Final = 2.0
"""How long shutdown waits for each of: the server, its requests, the last audit events."""


class _Server(uvicorn.Server):
    """A server that does not handle signals itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Install no signal handlers."""
        yield


class _Protocol(h11_impl.H11Protocol):
    """Closes a connection on which no request arrives in time, because connections are limited.

    Uvicorn's own time limit already ends with the first byte of a request.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit for a request, or close the connection if its peer has too many."""
        super().connection_made(transport)
        self.loop.call_later(_REQUEST_S, self._close_unused, None)
        if self.client and self.limit_concurrency:
            ours = (each for each in self.connections if isinstance(each, _Protocol))
            peers = [each.client[0] for each in ours if each.client]
            if peers.count(self.client[0]) > self.limit_concurrency - _RESERVED:
                transport.close()

    def on_response_complete(self) -> None:
        """Start the time limit for the next request."""
        self.loop.call_later(_REQUEST_S, self._close_unused, self.cycle)
        super().on_response_complete()

    def _close_unused(self, last: object) -> None:
        if self.cycle is last:
            self.transport.close()


@contextlib.asynccontextmanager
async def serving(settings: config.Settings, *, root_url: str | None = None) -> AsyncIterator[str]:
    """Serve until the block ends; yield the address. Raises CannotStart if it cannot be used."""
    listening = _listening(settings.http.host, settings.http.port)
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    async with bus.Bus(
        settings.bus.url, producer="services/console", name="muster-console"
    ) as connected:
        current = live.Live(connected.link, health=settings.health)
        server = _Server(
            uvicorn.Config(
                _application(settings, current, connected),
                log_config=None,
                access_log=False,
                log_level="critical",
                lifespan="off",
                interface="asgi3",
                ws="none",
                http=_Protocol,
                limit_concurrency=settings.pages_max * _CONNECTIONS_PER_PAGE + _CONNECTIONS_MORE,
                h11_max_incomplete_event_size=_HEAD_BYTES_MAX,
                timeout_graceful_shutdown=1,
                server_header=False,
                proxy_headers=False,
            )
        )
        # a task that fails ends the others, and the process
        async with contextlib.AsyncExitStack() as more, asyncio.TaskGroup() as tasks:
            if settings.metrics:
                at = settings.metrics
                await more.enter_async_context(probes.serve(at.host, at.port, ready=probes.always))
            serving = tasks.create_task(server.serve(sockets=[listening]))
            reading = tasks.create_task(current.run())
            try:
                yield root_url or f"http://{shown}:{port}"
            finally:
                # on SIGTERM, the group cancels its tasks after this block: end them in order first
                await _end_requests(server, serving)
                reading.cancel()
                await connected.flush(_END_S)


async def _end_requests(server: _Server, serving: asyncio.Task[None]) -> None:
    """End the server and its requests; a cancelled act still queues its audit event."""
    server.should_exit = True
    await asyncio.wait([serving], timeout=_END_S)
    requests = [*server.server_state.tasks]
    for request in requests:
        request.cancel()
    if requests:
        await asyncio.wait(requests, timeout=_END_S)


def _application(
    settings: config.Settings, current: live.Live, connected: bus.Bus
) -> types.ASGIApp:
    """Return the application with the pages and, if people may act, the forms."""
    shown = pages.Pages(current, pages_max=settings.pages_max, grafana_url=settings.grafana_url)
    if not settings.writing.is_on:
        return security.Guard(
            shown.application(), hosts=settings.hosts, pages_max=settings.pages_max
        )
    from muster_console import acts, authorization, forms  # noqa: PLC0415  # most only show

    known = authorization.Visitors(settings.writing, user=commands.user_name())
    acting = forms.Forms(shown, current, acts.Acts(connected), known)
    hosts = [*settings.hosts, *known.hosts]
    application = known.around(shown.application(acting.routes()))
    return security.Guard(
        application,
        hosts=hosts,
        pages_max=settings.pages_max,
        posts=forms.POSTS,
        header=settings.writing.header,
    )


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise runtime.CannotStart(f"http: {host}:{port}: {error.strerror or error}") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_MS)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise runtime.CannotStart(f"http: {host}:{port}: {reason}") from None
    return listening
