"""Adapter: a file: who asked for which change and when, as the API server's audit log tells it.

A line of JSON for each request that changes something: those fields of an `audit.k8s.io/v1` Event
by which they can be counted, as they are received (level Metadata, stage RequestReceived).
"""

import contextlib
import datetime as dt
import pathlib
from collections.abc import Iterator

import orjson
from aiohttp import typedefs, web

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


@contextlib.contextmanager
def recording(path: pathlib.Path) -> Iterator[typedefs.Middleware]:
    """Give a middleware that writes each change that is asked for into a file, at once."""
    with path.open("ab", buffering=0) as log:

        @web.middleware
        async def record(request: web.Request, handler: typedefs.Handler) -> web.StreamResponse:
            verb = _VERBS.get(request.method)
            if verb is not None:
                at = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
                line = {"verb": verb, "requestURI": request.path_qs, "requestReceivedTimestamp": at}
                log.write(orjson.dumps(line) + b"\n")
            return await handler(request)

        yield record
