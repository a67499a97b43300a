"""Adapter for HTTP: serves /healthz, /readyz, /metrics and the routes that a service adds."""

import asyncio
import contextlib
import functools
import os
import urllib.parse
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final

import prometheus_client

from muster import escaping
from muster.service import metrics, runtime

Answer = tuple[int, str, bytes]
Route = Callable[[], Answer]
QueriedRoute = Callable[[Mapping[str, str]], Answer]
"""A route that receives the fields of the URL's query."""

_REQUEST_BYTES_MAX: Final = 8192
_REQUEST_TIMEOUT_S: Final = 5.0
_CONNECTIONS_MAX: Final = 64
_FIELDS_MAX: Final = 10
_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Unavailable",
}


def always() -> str | None:
    """Return None: the check of a probe that always passes."""
    return None


def check(problem: Callable[[], str | None]) -> Route:
    """Return a probe's route: 200 if `problem` returns None, otherwise 503 with the problem."""

    def answer() -> Answer:
        reason = problem()
        if reason is None:
            return 200, "text/plain", b"ok\n"
        return 503, "text/plain", f"{escaping.plain(reason)}\n".encode()

    return answer


def bad_request(problem: str) -> Answer:
    """Return the answer to an invalid request."""
    return 400, "text/plain", f"{escaping.plain(problem)}\n".encode()


@contextlib.asynccontextmanager
async def serve(
    host: str,
    port: int,
    *,
    ready: Callable[[], str | None],
    healthy: Callable[[], str | None] = always,
    registry: prometheus_client.CollectorRegistry = prometheus_client.REGISTRY,
    more: Mapping[str, Route] | None = None,
    queried: Mapping[str, QueriedRoute] | None = None,
) -> AsyncIterator[str]:
    """Serve until the block ends; yield the address, `http://host:port`. Port 0 means a free port.

    `ready` and `healthy` return a problem, or None. `more` adds routes, such as `/state`, and
    `queried` adds routes with a query. Raises CannotStart if the address cannot be used.
    """
    unqueried: dict[str, Route] = {
        "/healthz": check(healthy),
        "/readyz": check(ready),
        "/metrics": lambda: (200, *metrics.exported(registry)),
        **(more or {}),
    }
    routes: dict[str, QueriedRoute] = {
        **{path: functools.partial(_ignoring_query, route) for path, route in unqueried.items()},
        **(queried or {}),
    }
    clients: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "streams run this as a task"
        if len(clients) >= _CONNECTIONS_MAX:
            # the oldest connection is the least likely to be a probe
            _abort(clients.pop(next(iter(clients))))
        clients[task] = writer
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(_respond(routes, head))
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass  # the connection of a client that disconnects or does not send HTTP is closed
        finally:
            clients.pop(task, None)
            _abort(writer)

    try:
        server = await asyncio.start_server(answer, host, port, limit=_REQUEST_BYTES_MAX)
    except OSError as error:
        # asyncio rewords system errors differently in each version
        number = error.errno or 0
        reason = os.strerror(number) if number > 0 else error.strerror or str(error)
        raise runtime.CannotStart(f"http: {host}:{port}: {reason}") from None
    try:
        bound = server.sockets[0].getsockname()[1]
        yield f"http://{host}:{bound}"
    finally:
        server.close()
        open_tasks = list(clients)
        for writer in clients.values():
            _abort(writer)
        await asyncio.gather(*open_tasks, return_exceptions=True)


def _abort(writer: asyncio.StreamWriter) -> None:
    """End a connection immediately."""
    # a transport that ended while it was being closed no longer has a loop, which abort ignores
    # (CPython 3.11, asyncio/selector_events.py, _force_close after _write_ready)
    with contextlib.suppress(AttributeError):
        writer.transport.abort()


def _ignoring_query(route: Route, _: Mapping[str, str]) -> Answer:
    return route()


def _respond(routes: Mapping[str, QueriedRoute], head: bytes) -> bytes:
    method, _, rest = head.partition(b" ")
    target = rest.split(b" ", 1)[0].decode("latin-1")
    path, _, query = target.partition("?")
    if path not in routes:
        status, kind, body = 404, "text/plain", "\n".join((*routes, "")).encode()
    elif method not in {b"GET", b"HEAD"}:
        status, kind, body = 405, "text/plain", b"use GET or HEAD\n"
    else:
        try:
            fields = urllib.parse.parse_qsl(
                query, keep_blank_values=True, max_num_fields=_FIELDS_MAX
            )
        except ValueError as error:
            status, kind, body = bad_request(str(error))
        else:
            status, kind, body = routes[path](dict(fields))
    lines = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\n"
    lines += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return lines.encode() + (b"" if method == b"HEAD" else body)
