"""Adapter: HTTP. A stand-in for the Kubernetes API that its real clients and kubectl can use.

What it does is in `muster.local.objects`, `writes` and `resources`; this module speaks HTTP for
them. Answers are JSON whatever the client prefers (kubectl asks for tables and takes what it
gets), and bodies are JSON or YAML: `kubectl create -f` works, `kubectl create namespace` sends
protobuf and is refused. No TLS; rights can be taken from who comes with a token (`access`), and
what begins with some path can be refused, as by an overloaded server; `fieldValidation` is ignored.
"""

import argparse
import asyncio
import contextlib
import datetime as dt
import json
import os
import pathlib
import random
import time
import urllib.parse
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Self

import orjson
from aiohttp import typedefs, web

from muster.local import httpd
from muster.local.kubernetes import (
    access,
    audit,
    bodies,
    discovery,
    objects,
    refusals,
    resources,
    trees,
    watches,
    writes,
)
from muster.local.kubernetes import selectors as selecting

BODY_BYTES_MAX = 3 * 1024 * 1024
"""The API server's own limit for a request's body."""

MANAGER_LENGTH_MAX = 128
VERSION = {"major": "1", "minor": "36", "gitVersion": "v1.36.0+muster", "platform": "linux/amd64"}

_SUFFIX_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
_PLAIN = {"/readyz": "ok", "/healthz": "ok", "/livez": "ok"}


class KubernetesApi:
    """The API as an asynchronous context manager: `async with KubernetesApi() as api: api.url`.

    `bookmark_period_s` is how often a watch that asked for bookmarks gets one; `audit_log` a file;
    `namespaces` are there beside those of every cluster.
    """

    def __init__(
        self,
        *,
        http: httpd.Address = httpd.LOCAL,
        bookmark_period_s: float = 5.0,
        limits: objects.Limits | None = None,
        audit_log: pathlib.Path | None = None,
        namespaces: Sequence[str] = (),
    ) -> None:
        self.url = ""
        # after a restart every version of the former life is older than the log: 410, and relist
        version = int(time.time() * 1000)
        self._store = objects.Store(at=_now(), version=version, limits=limits, more=namespaces)
        self._address = http
        self._audit_log = audit_log
        self._refused: dict[str, refusals.Reason] = {}
        self._users = access.Users()
        self._closing = asyncio.Event()
        self._watches = watches.Watches(
            self._store, bookmark_period_s=bookmark_period_s, closing=self._closing
        )
        self._documents = {
            path: orjson.dumps(document) for path, document in discovery.documents().items()
        }
        self._documents["/version"] = orjson.dumps(VERSION)
        self._open = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        middlewares: list[typedefs.Middleware] = [_statuses]
        if self._audit_log is not None:
            middlewares.insert(0, self._open.enter_context(audit.recording(self._audit_log)))
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
        """Write a kubeconfig file that leads here, for the administrator or another user."""
        if token:
            self._users.add(token)
        config = access.kubeconfig(self.url, token)
        # JSON is YAML, and nobody reads half a file
        half = path.with_name(f".{path.name}.{os.getpid()}")
        half.write_text(json.dumps(config, indent=2) + "\n")
        half.replace(path)

    def refuse(self, path: str, reason: refusals.Reason) -> None:
        """Refuse every request below a path, from now on, and end the watches that run."""
        self._refused[path] = reason
        self._watches.end()

    def allow(self, path: str) -> None:
        """Refuse no more what `refuse` named."""
        del self._refused[path]

    def deny(self, token: str, verb: str, plural: str) -> None:
        """Take a right from a user, such as `patch` `nodes`; `*` is any verb or all resources."""
        self._users.deny(token, verb, plural)

    def grant(self, token: str, verb: str, plural: str) -> None:
        """Give a right back that `deny` took."""
        self._users.grant(token, verb, plural)

    def compact(self) -> None:
        """Forget all history: every watch from an older version is answered with 410."""
        self._store.compact()
        self._watches.wake()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path.rstrip("/")
        if path in _PLAIN:
            return web.Response(text=_PLAIN[path])
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        self._users.refuse_stranger(token)
        if path in self._documents:
            return web.Response(body=self._documents[path], content_type="application/json")
        for refused, reason in self._refused.items():
            if path.startswith(refused):
                raise refusals.RequestError(reason, f"{request.method} {path}: not now")
        if path == access.REVIEWS and request.method == "POST":
            asked = bodies.decoded(await request.read(), request.content_type)
            return _json(self._users.review(token, asked), status=201)
        raw = request.rel_url.raw_path.strip("/").split("/")
        place = resources.place([urllib.parse.unquote(segment) for segment in raw])
        verb = access.verb(request.method, place, is_watch=_flag(request, "watch"))
        self._users.refuse_forbidden(token, verb, place)
        return await self._do(request, place)

    async def _do(self, request: web.Request, place: resources.Place) -> web.StreamResponse:
        match request.method:
            case "GET" if not place.name:
                return await self._many(request, place)
            case "GET":
                return _json(self._store.get(place))
            case "POST" | "PUT" | "PATCH":
                return await self._write(request, place)
            case "DELETE" if not place.subresource:
                return await self._delete(request, place)
            case _:
                raise _wrong_method(request)

    async def _many(self, request: web.Request, place: resources.Place) -> web.StreamResponse:
        selection = _selection(request, place)
        if _flag(request, "watch"):
            return await self._watches.serve(request, selection)
        limit = watches.number(request, "limit") or 0
        return _json(
            self._store.page(selection, limit=limit, token=request.query.get("continue", ""))
        )

    async def _write(self, request: web.Request, place: resources.Place) -> web.Response:
        body, media_type = await request.read(), request.content_type
        write = _write(request, place)
        created = False
        match request.method:
            case "POST" if not place.name:
                shown, created = (
                    self._store.create(bodies.decoded(body, media_type), write),
                    True,
                )
            case "PUT" if place.name:
                shown, created = self._store.update(bodies.decoded(body, media_type), write)
            case "PATCH" if place.name:
                tree, patch_format = bodies.patch(body, media_type)
                if patch_format is writes.PatchFormat.APPLY:
                    _refuse_nameless(request)
                shown, created = self._store.patch(tree, patch_format, write)
            case _:
                raise _wrong_method(request)
        self._watches.wake()
        return _json(shown, status=201 if created else 200)

    async def _delete(self, request: web.Request, place: resources.Place) -> web.Response:
        body = await request.read()
        options = bodies.decoded(body, request.content_type) if body else None
        dry_run = _dry_run(request) or (isinstance(options, dict) and bool(options.get("dryRun")))
        if place.name:
            gone = self._store.delete(place, options, dry_run=dry_run)
        else:
            gone = self._store.delete_all(_selection(request, place), dry_run=dry_run)
        self._watches.wake()
        # pods and collections are returned, of other objects only that they are gone
        if not place.name or place.resource == resources.PODS:
            return _json(gone)
        details = {"name": place.name, "kind": place.resource.plural}
        details["uid"] = trees.text(gone, "metadata", "uid")
        status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
        return _json({**status, "details": details})


@web.middleware
async def _statuses(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer every refusal, ours and aiohttp's, with a Status object."""
    try:
        return await handler(request)
    except refusals.RequestError as error:
        return _json(error.status(), status=error.code)
    except web.HTTPRequestEntityTooLarge as error:
        refusal = refusals.RequestError(refusals.Reason.TOO_LARGE, error.text or error.reason)
        return _json(refusal.status(), status=refusal.code)


def _json(tree: object, *, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(tree), status=status, content_type="application/json")


def _write(request: web.Request, place: resources.Place) -> writes.Write:
    # the API server names a writer that does not say who it is after its program
    program = request.headers.get("User-Agent", "").partition("/")[0]
    manager = request.query.get("fieldManager") or program.encode("ascii", "replace").decode()
    if len(manager) > MANAGER_LENGTH_MAX or not manager.isprintable():
        raise refusals.bad_request(f"fieldManager: not {MANAGER_LENGTH_MAX} printable characters")
    return writes.Write(
        place=place,
        manager=manager or "unknown",
        at=_now(),
        uid=str(uuid.uuid4()),
        suffix="".join(random.choices(_SUFFIX_LETTERS, k=5)),  # noqa: S311 - no secret
        force=_flag(request, "force"),
        dry_run=_dry_run(request),
    )


def _selection(request: web.Request, place: resources.Place) -> objects.Selection:
    fields = selecting.fields(request.query.get("fieldSelector", ""))
    place.resource.refuse_unknown_fields(fields.keys())
    labels = selecting.labels(request.query.get("labelSelector", ""))
    return objects.Selection(place=place, labels=labels, fields=fields)


def _flag(request: web.Request, name: str) -> bool:
    return request.query.get(name, "").lower() in {"true", "1"}


def _dry_run(request: web.Request) -> bool:
    written = request.query.get("dryRun", "")
    if written not in {"", "All"}:
        raise refusals.bad_request(f"dryRun: {written!r} is not All")
    return written == "All"


def _refuse_nameless(request: web.Request) -> None:
    if not request.query.get("fieldManager"):
        cause = refusals.Cause(
            field="fieldManager",
            message="Required value: is required for apply patch",
            reason="FieldValueRequired",
        )
        raise refusals.invalid("PatchOptions", "", cause)


def _wrong_method(request: web.Request) -> refusals.RequestError:
    return refusals.RequestError(
        refusals.Reason.METHOD_NOT_ALLOWED,
        f"{request.method} is not allowed on {request.path}",
    )


def _now() -> str:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def _serve(options: argparse.Namespace) -> None:
    stopped = httpd.stop_on_signals()
    async with KubernetesApi(
        http=options.http, audit_log=options.audit_log_path, namespaces=options.namespace
    ) as api:
        if options.kubeconfig is not None:
            try:
                api.write_kubeconfig(options.kubeconfig)
            except OSError as error:
                raise httpd.MistakeError(
                    f"cannot write the kubeconfig {options.kubeconfig}: {error.strerror}"
                ) from error
        httpd.say_listening("kubernetes", api.url)
        await stopped.wait()


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code."""
    parser = httpd.Parser(prog="muster.local.kubernetes", description=__doc__)
    parser.add_argument("--http", type=httpd.address, default=httpd.LOCAL, metavar="HOST:PORT")
    parser.add_argument("--kubeconfig", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--audit-log-path", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--namespace", action="append", default=[], metavar="NAME")
    options = parser.parse_args(arguments)
    try:
        asyncio.run(_serve(options))
    except httpd.MistakeError as mistake:
        return httpd.complain(parser.prog, mistake)
    return 0
