"""Adapter for HTTP: decodes and authorizes requests to the API stand-in.

A bearer token identifies a user; a request without a token comes from the administrator. Users may
do everything that was not denied. The error texts are those of the real API server (apiserver
`pkg/endpoints/handlers/responsewriters/errors.go`, `pkg/authorization`).
"""

import contextlib
import random
import uuid
from collections.abc import Mapping

import orjson
import yaml
from aiohttp import web

from muster.local import httpd
from muster.local.kubernetes import objects, refusals, resources, selectors, tables, trees, writes

YAML_BYTES_MAX = 256 * 1024
"""Parsing a megabyte of YAML takes seconds, and blocks all other requests."""

_MANAGER_LENGTH_MAX = 128
_SUFFIX_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
SELF = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
ADMINISTRATOR = "kubernetes-admin"

WRITES: Mapping[str, str] = {
    "POST": "create",
    "PUT": "update",
    "PATCH": "patch",
    "DELETE": "delete",
}


class Users:
    """The valid tokens, each with its denied rights: verb and plural, `*` for any."""

    def __init__(self) -> None:
        self._denied: dict[str, set[tuple[str, str]]] = {}

    def add(self, token: str) -> None:
        """Add the user with this token."""
        self._denied.setdefault(token, set())

    def deny(self, token: str, verb: str, plural: str) -> None:
        """Deny a user a right, such as `patch` `nodes`; `*` matches any verb or resource."""
        self._denied.setdefault(token, set()).add((verb, plural))

    def grant(self, token: str, verb: str, plural: str) -> None:
        """Undo a denial with the same arguments."""
        self._denied[token].discard((verb, plural))

    def refuse_unknown(self, token: str) -> None:
        """Raise 401 for an unknown token."""
        if token and token not in self._denied:
            raise refusals.RequestError(refusals.Reason.UNAUTHORIZED, "Unauthorized")

    def refuse_forbidden(self, token: str, verb: str, place: resources.Place) -> None:
        """Raise 403 for a denied right."""
        if self._may(token, verb, place.right):
            return
        scope = "at the cluster scope"
        where = f'in the namespace "{place.namespace}"' if place.namespace else scope
        named = f' "{place.name}"' if place.name else ""
        raise refusals.RequestError(
            refusals.Reason.FORBIDDEN,
            f'{place.resource.qualified}{named} is forbidden: User "{token}" cannot {verb} '
            f'resource "{place.right}" in API group "{place.resource.group}" {where}',
            kind=place.resource.plural,
            name=place.name,
        )

    def review(self, token: str, body: trees.Json) -> trees.Tree:
        """Return the answer to a SelfSubjectAccessReview."""
        review = body if isinstance(body, dict) else {}
        verb = trees.string_at(review, "spec", "resourceAttributes", "verb")
        plural = trees.string_at(review, "spec", "resourceAttributes", "resource")
        part = trees.string_at(review, "spec", "resourceAttributes", "subresource")
        right = f"{plural}/{part}" if part else plural
        return {**review, "status": {"allowed": self._may(token, verb, right)}}

    def _may(self, token: str, verb: str, plural: str) -> bool:
        denied = self._denied.get(token, set())
        return not denied & {(verb, plural), ("*", plural), (verb, "*")}


def verb(method: str, place: resources.Place, *, is_watch: bool) -> str:
    """Return the RBAC verb of a request."""
    if method == "GET":
        return "get" if place.name else "watch" if is_watch else "list"
    if method == "DELETE" and not place.name:
        return "deletecollection"
    return WRITES.get(method, method.lower())


def kubeconfig(url: str, token: str = "") -> dict[str, object]:
    """Return a kubeconfig for the stand-in: with a user's token, or for the administrator."""
    context = {"cluster": "muster", "user": "muster"}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "muster",
        "clusters": [{"name": "muster", "cluster": {"server": url}}],
        "users": [{"name": "muster", "user": {"token": token} if token else {}}],
        "contexts": [{"name": "muster", "context": context}],
    }


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
        raise refusals.bad_request(f"the body is not YAML with JSON's types: {error}") from error
    return trees.from_json(spelled)


class _Loader(yaml.SafeLoader):
    """YAML's JSON subset: no aliases (a few lines could expand to gigabytes), no dates."""

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


def write(request: web.Request, place: resources.Place) -> writes.Write:
    """Return the target, writer and options of a write."""
    # without a fieldManager, the API server uses the program's name
    program = request.headers.get("User-Agent", "").partition("/")[0]
    manager = request.query.get("fieldManager") or program.encode("ascii", "replace").decode()
    if len(manager) > _MANAGER_LENGTH_MAX or not manager.isprintable():
        raise refusals.bad_request(
            f"fieldManager: must be at most {_MANAGER_LENGTH_MAX} characters, all printable"
        )
    return writes.Write(
        place=place,
        manager=manager or "unknown",
        at=httpd.timestamp(),
        uid=str(uuid.uuid4()),
        suffix="".join(random.choices(_SUFFIX_LETTERS, k=5)),  # noqa: S311 - no secret
        force=flag(request, "force"),
        dry_run=dry_run(request),
    )


def selection(request: web.Request, place: resources.Place) -> objects.Selection:
    """Return the selection of a list or a watch: its place and its selectors."""
    fields = selectors.fields(request.query.get("fieldSelector", ""))
    place.resource.refuse_unknown_fields(fields.keys())
    labels = selectors.labels(request.query.get("labelSelector", ""))
    return objects.Selection(place=place, labels=labels, fields=fields)


def as_asked(request: web.Request, resource: resources.Resource, shown: trees.Tree) -> trees.Tree:
    """Return an object or a list as a table if the client requests one and the resource has one."""
    if tables.ACCEPT in request.headers.get("Accept", "") and tables.has_table(resource):
        return tables.table(resource, shown, now=httpd.timestamp())
    return shown


def flag(request: web.Request, name: str) -> bool:
    """Return whether a query parameter is `true` or `1`."""
    return request.query.get(name, "").lower() in {"true", "1"}


def dry_run(request: web.Request) -> bool:
    """Return whether the request is a dry run, which stores nothing."""
    value = request.query.get("dryRun", "")
    if value not in {"", "All"}:
        raise refusals.bad_request(f"dryRun: must be All, not {value!r}")
    return value == "All"


def refuse_nameless(request: web.Request) -> None:
    """Refuse an apply without a field manager."""
    if not request.query.get("fieldManager"):
        cause = refusals.Cause(
            field="fieldManager",
            message="Required value: is required for apply patch",
            reason="FieldValueRequired",
        )
        raise refusals.invalid("PatchOptions", "", cause)


def number(request: web.Request, name: str) -> int | None:
    """Return a parameter that must be a whole number; None if it is absent."""
    value = request.query.get(name, "")
    if not value:
        return None
    if not (value.isascii() and value.isdigit() and len(value) < len(str(2**63))):
        raise refusals.bad_request(f"Invalid value: {value!r}: {name} must be a whole number")
    return int(value)
