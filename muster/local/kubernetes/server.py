"""Adapter for HTTP: a stand-in for the Kubernetes API that its real clients and kubectl can use.

`objects`, `writes`, `resources` and `scheduling` make the decisions. Responses are JSON: objects,
or for kubectl the `tables` of pods, nodes and events (not in a watch). Request bodies are JSON or
YAML: `kubectl create -f` works, `kubectl create namespace` sends protobuf and is refused. There is
no TLS. A user with a token can be denied rights (`requests`), and paths with a prefix can be
refused, as by an overloaded server. `fieldValidation` is ignored.

Watches are long-running responses with each change, bookmarks, and `410 Expired`. A watch has a
version, not a queue: it reads the store's log from that version on. A client whose watch falls
behind the start of the log gets 410 and must list again, as with the real API server.
"""

import asyncio
import contextlib
import json
import os
import pathlib
import time
import urllib.parse
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Self

import orjson
from aiohttp import typedefs, web

from muster.local import httpd
from muster.local.kubernetes import (
    objects,
    port_forward,
    refusals,
    requests,
    resources,
    scheduling,
    trees,
    writes,
)

DEFAULT_TIMEOUT_S = 1800
"""The minimum of the random timeout that the API server uses if the client sets none."""

WATCHES_MAX = 1000
_ENDED = "k8s.io/initial-events-end"
_ANNOTATIONS = ("object", "metadata", "annotations")
BODY_BYTES_MAX = 3 * 1024 * 1024
"""The API server's own limit for a request's body."""

VERSION = {"major": "1", "minor": "36", "gitVersion": "v1.36.0+muster", "platform": "linux/amd64"}
_OPENAPI_V2 = b"\n\x032.0\x12\x0c\n\x06muster\x12\x02v1"
"""An openapi.v2.Document without definitions: kubectl reads it before it applies a `List`."""
_PLAIN = {"/readyz": "ok", "/healthz": "ok", "/livez": "ok"}


@contextlib.contextmanager
def auditing(path: pathlib.Path) -> Iterator[typedefs.Middleware]:
    """Yield a middleware that logs each modifying request as a line of JSON.

    The lines have the fields of an `audit.k8s.io/v1` Event that are needed to count requests (level
    Metadata, stage RequestReceived).
    """
    with path.open("ab", buffering=0) as log:

        @web.middleware
        async def record(request: web.Request, handler: typedefs.Handler) -> web.StreamResponse:
            verb = requests.WRITES.get(request.method)
            if verb is not None:
                at = httpd.timestamp(fraction=True)
                line = {"verb": verb, "requestURI": request.path_qs, "requestReceivedTimestamp": at}
                log.write(orjson.dumps(line) + b"\n")
            return await handler(request)

        yield record


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
        """Wake every watch, so that it reads the log."""
        self._written.set()
        self._written = asyncio.Event()

    def end(self) -> None:
        """End every open watch, as a restarting server does."""
        self._ends += 1
        self.wake()

    async def serve(self, request: web.Request, selection: objects.Selection) -> web.StreamResponse:
        """Answer a request with a watch, until its timeout or until either side ends it."""
        version = requests.number(request, "resourceVersion")
        timeout_s = requests.number(request, "timeoutSeconds") or DEFAULT_TIMEOUT_S
        bookmarks = requests.flag(request, "allowWatchBookmarks")
        wants_initial = requests.flag(request, "sendInitialEvents")
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
        """Return the first events: the existing objects, or the changes after `version`.

        `wants_initial` requests client-go's streaming list: the existing objects, then a bookmark
        with the annotation `k8s.io/initial-events-end`.
        """
        if wants_initial:
            marked = trees.with_value(self.bookmark(), {_ENDED: "true"}, *_ANNOTATIONS)
            return [*self._store.initial(self._selection), marked]
        if not version:
            return self._store.initial(self._selection)
        self._version = version
        return self.changes()

    def changes(self) -> list[trees.Tree]:
        """Return the changes since the last call; an ERROR event if the log has lost some."""
        try:
            events = self._store.since(self._selection, self._version)
        except refusals.RequestError as error:
            self.expired = True
            return [{"type": "ERROR", "object": trees.from_json(orjson.dumps(error.status()))}]
        self._version = self._store.version
        return events

    def bookmark(self) -> trees.Tree:
        """Return a bookmark event with the version up to which the client has read."""
        resource = self._selection.place.resource
        metadata: trees.Tree = {"resourceVersion": str(self._version), "creationTimestamp": None}
        bookmark = resource.view({"metadata": metadata})
        return {"type": "BOOKMARK", "object": bookmark}


class KubernetesApi:
    """The API as an asynchronous context manager: `async with KubernetesApi() as api: api.url`.

    A watch with bookmarks gets one every `bookmark_period_s`; `audit_log` is a file for one line
    per modifying request; `namespaces` are created besides those that every cluster has. With
    `schedules`, pods are bound to nodes.
    """

    def __init__(
        self,
        *,
        http: httpd.Address = httpd.LOCAL,
        bookmark_period_s: float = 5.0,
        audit_log: pathlib.Path | None = None,
        namespaces: Sequence[str] = (),
        schedules: bool = False,
    ) -> None:
        self.url = ""
        self._schedules = schedules
        # after a restart, every older version is answered with 410, and clients list again
        version = int(time.time() * 1000)
        self._store = objects.Store(at=httpd.timestamp(), version=version, more=namespaces)
        self._address = http
        self._audit_log = audit_log
        self._refused: dict[str, refusals.Reason] = {}
        self.users = requests.Users()
        self.ports: dict[tuple[str, int], httpd.Address] = {}
        """The local addresses of pods' ports, by the pod's name and the port."""
        self.logs: dict[str, str] = {}
        """The logs of pods, by the pod's name; of former containers, by `NAME/previous`."""
        self._closing = asyncio.Event()
        self._watches = Watches(
            self._store, bookmark_period_s=bookmark_period_s, closing=self._closing
        )
        self._documents = {
            path: orjson.dumps(document) for path, document in resources.documents().items()
        }
        self._documents["/version"] = orjson.dumps(VERSION)
        self._open = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        middlewares: list[typedefs.Middleware] = [_statuses]
        if self._audit_log is not None:
            middlewares.insert(0, self._open.enter_context(auditing(self._audit_log)))
        application = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=middlewares)
        application.router.add_route("*", "/{path:.*}", self._answer)
        listening = httpd.listening(application, self._address)
        self.url = await self._open.enter_async_context(listening)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing.set()
        self._watches.wake()
        await self._open.aclose()

    def write_kubeconfig(self, path: pathlib.Path, *, token: str = "") -> None:
        """Write a kubeconfig file for this server, for the administrator or another user."""
        if token:
            self.users.add(token)
        config = requests.kubeconfig(self.url, token)
        # JSON is YAML; the rename prevents readers from seeing a partial file
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(config, indent=2) + "\n")
        partial.replace(path)

    def refuse(self, path: str, reason: refusals.Reason) -> None:
        """Refuse every request below a path from now on, and end all watches."""
        self._refused[path] = reason
        self._watches.end()

    def allow(self, path: str) -> None:
        """Undo `refuse`."""
        del self._refused[path]

    def compact(self) -> None:
        """Discard the log, so that every watch from an older version is answered with 410."""
        self._store.compact()
        self._watches.wake()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path.rstrip("/")
        if path in _PLAIN:
            return web.Response(text=_PLAIN[path])
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        self.users.refuse_unknown(token)
        if path == "/openapi/v2":
            return web.Response(body=_OPENAPI_V2)
        if path in self._documents:
            return web.Response(body=self._documents[path], content_type="application/json")
        for refused, reason in self._refused.items():
            if path.startswith(refused):
                raise refusals.RequestError(reason, f"{request.method} {path}: not now")
        if path == requests.REVIEWS and request.method == "POST":
            review = requests.decode_object(await request.read(), request.content_type)
            return httpd.json_response(self.users.review(token, review), status=201)
        if path == requests.SELF and request.method == "POST":
            name = token or requests.ADMINISTRATOR
            return httpd.json_response({"status": {"userInfo": {"username": name}}}, status=201)
        raw = request.rel_url.raw_path.strip("/").split("/")
        place = resources.place([urllib.parse.unquote(segment) for segment in raw])
        verb = requests.verb(request.method, place, is_watch=requests.flag(request, "watch"))
        self.users.refuse_forbidden(token, verb, place)
        if place.subresource == "portforward":
            # authorized twice since Kubernetes 1.35 (AuthorizePodWebsocketUpgradeCreatePermission)
            self.users.refuse_forbidden(token, "create", place)
        return await self._do(request, place)

    async def _do(self, request: web.Request, place: resources.Place) -> web.StreamResponse:
        match request.method:
            case "GET" if not place.name:
                return await self._many(request, place)
            case "GET" if place.subresource == "portforward":
                return await port_forward.serve(request, place.name, self.ports)
            case "GET" if place.subresource == "log":
                key = place.name + ("/previous" if requests.flag(request, "previous") else "")
                return web.Response(text=self.logs.get(key, ""))
            case "GET":
                shown = self._store.get(place)
                return httpd.json_response(requests.as_asked(request, place.resource, shown))
            case "POST" | "PUT" | "PATCH":
                return await self._write(request, place)
            case "DELETE" if not place.subresource:
                return await self._delete(request, place)
            case _:
                raise _wrong_method(request)

    async def _many(self, request: web.Request, place: resources.Place) -> web.StreamResponse:
        selection = requests.selection(request, place)
        if requests.flag(request, "watch"):
            return await self._watches.serve(request, selection)
        limit = requests.number(request, "limit") or 0
        page = self._store.page(selection, limit=limit, token=request.query.get("continue", ""))
        return httpd.json_response(requests.as_asked(request, place.resource, page))

    async def _write(self, request: web.Request, place: resources.Place) -> web.Response:
        body, media_type = await request.read(), request.content_type
        write = requests.write(request, place)
        created = False
        match request.method:
            case "POST" if not place.name:
                shown, created = (
                    self._store.create(requests.decode_object(body, media_type), write),
                    True,
                )
            case "PUT" if place.name:
                shown, created = self._store.update(requests.decode_object(body, media_type), write)
            case "PATCH" if place.name:
                tree, patch_format = requests.decode_patch(body, media_type)
                if patch_format is writes.PatchFormat.APPLY:
                    requests.refuse_nameless(request)
                shown, created = self._store.patch(tree, patch_format, write)
            case _:
                raise _wrong_method(request)
        self._written()
        return httpd.json_response(shown, status=201 if created else 200)

    def _written(self) -> None:
        """Schedule pods, and wake the watches."""
        if self._schedules:
            ids = iter(lambda: uuid.uuid4().hex[:16], "")
            scheduling.schedule(self._store, at=httpd.timestamp(), ids=ids)
        self._watches.wake()

    async def _delete(self, request: web.Request, place: resources.Place) -> web.Response:
        body = await request.read()
        options = requests.decode_object(body, request.content_type) if body else None
        dry_run = requests.dry_run(request) or (
            isinstance(options, dict) and bool(options.get("dryRun"))
        )
        if place.name:
            gone = self._store.delete(place, options, dry_run=dry_run)
        else:
            gone = self._store.delete_all(requests.selection(request, place), dry_run=dry_run)
        self._written()
        # deleted pods and collections are returned; for other objects, only a Status
        if not place.name or place.resource == resources.PODS:
            return httpd.json_response(gone)
        details = {"name": place.name, "kind": place.resource.plural}
        details["uid"] = trees.string_at(gone, "metadata", "uid")
        status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
        return httpd.json_response({**status, "details": details})


@web.middleware
async def _statuses(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer a refused request, or one with too large a body, with a Status object."""
    try:
        return await handler(request)
    except refusals.RequestError as error:
        return httpd.json_response(error.status(), status=error.code)
    except web.HTTPRequestEntityTooLarge as error:
        refusal = refusals.RequestError(refusals.Reason.TOO_LARGE, error.text or error.reason)
        return httpd.json_response(refusal.status(), status=refusal.code)


def _wrong_method(request: web.Request) -> refusals.RequestError:
    return refusals.RequestError(
        refusals.Reason.METHOD_NOT_ALLOWED,
        f"{request.method} is not allowed on {request.path}",
    )
