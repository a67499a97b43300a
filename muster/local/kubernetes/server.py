"""Adapter: HTTP: a stand-in for the Kubernetes API that its real clients and kubectl can use.

What it does is decided in `objects`, `writes` and `resources`. Answers are JSON whatever the client
prefers (kubectl asks for tables and accepts what it gets), and bodies are JSON or YAML: `kubectl
create -f` works, `kubectl create namespace` sends protobuf and is refused. No TLS. Rights can be
withdrawn from a user with a token (`access`), and paths with some prefix can be refused, as by an
overloaded server; `fieldValidation` is ignored.
"""

import asyncio
import contextlib
import json
import os
import pathlib
import random
import time
import urllib.parse
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Self

import orjson
import yaml
from aiohttp import typedefs, web

from muster.local import httpd
from muster.local.kubernetes import access, objects, refusals, resources, trees, watches, writes
from muster.local.kubernetes import selectors as selecting

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
YAML_BYTES_MAX = 256 * 1024
"""The YAML reader takes seconds for a megabyte, and blocks all other requests."""

BODY_BYTES_MAX = 3 * 1024 * 1024
"""The API server's own limit for a request's body."""

MANAGER_LENGTH_MAX = 128
VERSION = {"major": "1", "minor": "36", "gitVersion": "v1.36.0+muster", "platform": "linux/amd64"}
_SUFFIX_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
_PLAIN = {"/readyz": "ok", "/healthz": "ok", "/livez": "ok"}


@contextlib.contextmanager
def auditing(path: pathlib.Path) -> Iterator[typedefs.Middleware]:
    """Return a middleware that logs each modifying request as a line of JSON.

    The lines have those fields of an `audit.k8s.io/v1` Event by which requests can be counted
    (level Metadata, stage RequestReceived).
    """
    with path.open("ab", buffering=0) as log:

        @web.middleware
        async def record(request: web.Request, handler: typedefs.Handler) -> web.StreamResponse:
            verb = _VERBS.get(request.method)
            if verb is not None:
                at = httpd.timestamp(fraction=True)
                line = {"verb": verb, "requestURI": request.path_qs, "requestReceivedTimestamp": at}
                log.write(orjson.dumps(line) + b"\n")
            return await handler(request)

        yield record


def decode_object(body: bytes, media_type: str) -> trees.Json:
    """Decode a body: an object, or the options of a DELETE."""
    # aiohttp's octet-stream stands for no media type; the API server then expects JSON
    if media_type in {"application/json", "application/octet-stream"}:
        return trees.from_json(body)
    if media_type in {"application/yaml", "application/x-yaml"}:
        return _from_yaml(body)
    raise _unsupported(media_type, ["application/json", "application/yaml"])


def decode_patch(body: bytes, media_type: str) -> tuple[trees.Json, writes.PatchFormat]:
    """Decode a patch; also return its format."""
    try:
        patch_format = writes.PatchFormat(media_type)
    except ValueError as error:
        raise _unsupported(media_type, list(writes.PatchFormat)) from error
    if patch_format is writes.PatchFormat.APPLY:
        return _from_yaml(body), patch_format
    return trees.from_json(body), patch_format


def _from_yaml(body: bytes) -> trees.Json:
    """Decode YAML (or JSON) with JSON's types only."""
    with contextlib.suppress(orjson.JSONDecodeError):
        value: trees.Json = orjson.loads(body)
        trees.refuse_depth(value)
        return value
    if len(body) > YAML_BYTES_MAX:
        raise refusals.bad_request(f"YAML of more than {YAML_BYTES_MAX} bytes; send JSON")
    try:
        loaded: object = yaml.load(body, Loader=_Loader)  # noqa: S506 - a SafeLoader with less
        spelled = orjson.dumps(loaded)
    except (yaml.YAMLError, RecursionError, TypeError, ValueError) as error:
        raise refusals.bad_request(f"the body is not YAML for JSON: {error}") from error
    return trees.from_json(spelled)


class _Loader(yaml.SafeLoader):
    """YAML's JSON subset: no aliases (a few lines could stand for gigabytes), no dates."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - yaml reads it from the class
        first: [(tag, pattern) for tag, pattern in rules if tag != "tag:yaml.org,2002:timestamp"]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not accepted")
        return super().compose_node(parent, index)


def _unsupported(media_type: str, supported: list[str]) -> refusals.RequestError:
    return refusals.RequestError(
        refusals.Reason.UNSUPPORTED_MEDIA_TYPE,
        f"the body of the request was in an unknown format ({media_type}) - accepted media types "
        f"include: {', '.join(supported)}",
    )


class KubernetesApi:
    """The API as an asynchronous context manager: `async with KubernetesApi() as api: api.url`.

    A watch with bookmarks gets one every `bookmark_period_s`; `audit_log` is a file; `namespaces`
    exist besides those of every cluster.
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
        # after a restart every older version is before the log: 410, and clients list again
        version = int(time.time() * 1000)
        self._store = objects.Store(
            at=httpd.timestamp(), version=version, limits=limits, more=namespaces
        )
        self._address = http
        self._audit_log = audit_log
        self._refused: dict[str, refusals.Reason] = {}
        self._users = access.Users()
        self._closing = asyncio.Event()
        self._watches = watches.Watches(
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
        """Write a kubeconfig file for this server, of the administrator or another user."""
        if token:
            self._users.add(token)
        config = access.kubeconfig(self.url, token)
        # JSON is YAML; the rename prevents a reader from seeing half a file
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

    def deny(self, token: str, verb: str, plural: str) -> None:
        """Deny a user a right, such as `patch` `nodes`; `*` is any verb or all resources."""
        self._users.deny(token, verb, plural)

    def grant(self, token: str, verb: str, plural: str) -> None:
        """Grant a right that `deny` denied."""
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
        self._users.refuse_unknown(token)
        if path in self._documents:
            return web.Response(body=self._documents[path], content_type="application/json")
        for refused, reason in self._refused.items():
            if path.startswith(refused):
                raise refusals.RequestError(reason, f"{request.method} {path}: not now")
        if path == access.REVIEWS and request.method == "POST":
            review = decode_object(await request.read(), request.content_type)
            return httpd.json_response(self._users.review(token, review), status=201)
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
                return httpd.json_response(self._store.get(place))
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
        return httpd.json_response(
            self._store.page(selection, limit=limit, token=request.query.get("continue", ""))
        )

    async def _write(self, request: web.Request, place: resources.Place) -> web.Response:
        body, media_type = await request.read(), request.content_type
        write = _write(request, place)
        created = False
        match request.method:
            case "POST" if not place.name:
                shown, created = (
                    self._store.create(decode_object(body, media_type), write),
                    True,
                )
            case "PUT" if place.name:
                shown, created = self._store.update(decode_object(body, media_type), write)
            case "PATCH" if place.name:
                tree, patch_format = decode_patch(body, media_type)
                if patch_format is writes.PatchFormat.APPLY:
                    _refuse_nameless(request)
                shown, created = self._store.patch(tree, patch_format, write)
            case _:
                raise _wrong_method(request)
        self._watches.wake()
        return httpd.json_response(shown, status=201 if created else 200)

    async def _delete(self, request: web.Request, place: resources.Place) -> web.Response:
        body = await request.read()
        options = decode_object(body, request.content_type) if body else None
        dry_run = _dry_run(request) or (isinstance(options, dict) and bool(options.get("dryRun")))
        if place.name:
            gone = self._store.delete(place, options, dry_run=dry_run)
        else:
            gone = self._store.delete_all(_selection(request, place), dry_run=dry_run)
        self._watches.wake()
        # pods and collections are returned, of other objects only that they are gone
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
    """Answer every refusal, ours and aiohttp's, with a Status object."""
    try:
        return await handler(request)
    except refusals.RequestError as error:
        return httpd.json_response(error.status(), status=error.code)
    except web.HTTPRequestEntityTooLarge as error:
        refusal = refusals.RequestError(refusals.Reason.TOO_LARGE, error.text or error.reason)
        return httpd.json_response(refusal.status(), status=refusal.code)


def _write(request: web.Request, place: resources.Place) -> writes.Write:
    # the API server names a writer without a fieldManager after its program
    program = request.headers.get("User-Agent", "").partition("/")[0]
    manager = request.query.get("fieldManager") or program.encode("ascii", "replace").decode()
    if len(manager) > MANAGER_LENGTH_MAX or not manager.isprintable():
        raise refusals.bad_request(f"fieldManager: not {MANAGER_LENGTH_MAX} printable characters")
    return writes.Write(
        place=place,
        manager=manager or "unknown",
        at=httpd.timestamp(),
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
    value = request.query.get("dryRun", "")
    if value not in {"", "All"}:
        raise refusals.bad_request(f"dryRun: {value!r} is not All")
    return value == "All"


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
