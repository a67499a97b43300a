"""Adapter for HTTP: refuses requests that our own pages never send, and adds security headers.

The pages show texts that come from plugins, drivers and people. They are escaped; in addition, the
headers below keep browsers from running a script in such a text, and other sites from embedding our
pages.
"""

import ipaddress
import time
from collections.abc import Collection
from typing import Final

from starlette import types

from muster import pacing
from muster_console import config, identities

_HEADERS: Final = (
    (
        b"content-security-policy",
        (
            b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
            b"connect-src 'self'; font-src 'self'; form-action 'self'; base-uri 'none'; "
            b"frame-ancestors 'none'"
        ),
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    # with `no-referrer`, browsers would also hide the origin of a form (Origin: null)
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
QUERY_BYTES_MAX: Final = 2_048
PATH_BYTES_MAX: Final = 1_024
_CLIENTS_MAX: Final = 1_000
_BURST: Final = 200
_PER_S: Final = 50.0
_BURST_PER_PAGE: Final = 10
"""How many requests a browser sends to open a page; after a restart, all pages open again."""
_PER_S_PER_PAGE: Final = 2.0
"""The maximum number of requests per second of an open page."""
_PEER: Final = "muster.peer"


class Guard:
    """An ASGI application that checks requests before it passes them to another application."""

    def __init__(
        self,
        inner: types.ASGIApp,
        *,
        hosts: Collection[str],
        pages_max: int,
        posts: Collection[str] = (),
        header: config.TrustedHeader | None = None,
    ) -> None:
        self._inner = inner
        self._header = header
        self._posts = frozenset(posts)
        """The paths to which forms are posted."""
        self._hosts = frozenset(host.lower().strip("[]") for host in hosts)
        # all pages may come from one address: through a proxy, or `kubectl port-forward`
        self._rates: pacing.KeyedBuckets[str] = pacing.KeyedBuckets(
            per_s=_PER_S + pages_max * _PER_S_PER_PAGE,
            burst=_BURST + pages_max * _BURST_PER_PAGE,
            keys_max=_CLIENTS_MAX,
        )
        self._rates_of_people: pacing.KeyedBuckets[str] = pacing.KeyedBuckets(
            per_s=_PER_S, burst=_BURST, keys_max=_CLIENTS_MAX
        )

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        """Answer a request, or pass it on if it is allowed."""
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return

        async def send_with_headers(message: types.Message) -> None:
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message["headers"]}
                more = [each for each in _HEADERS if each[0] not in names]
                if b"cache-control" not in names:
                    more.append((b"cache-control", b"no-store"))
                message["headers"] = [*message["headers"], *more]
            await send(message)

        refusal = self._refusal(scope)
        if refusal is None:
            await self._inner(scope, receive, send_with_headers)
            return
        status, text, headers = refusal
        body = f"{text}\n".encode()
        head = [
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", str(len(body)).encode()),
            *headers,
        ]
        await send_with_headers({"type": "http.response.start", "status": status, "headers": head})
        is_head = scope["method"] == "HEAD"
        await send({"type": "http.response.body", "body": b"" if is_head else body})

    def _refusal(self, scope: types.Scope) -> tuple[int, str, list[tuple[bytes, bytes]]] | None:
        is_form = scope["method"] == "POST" and scope["path"] in self._posts
        if scope["method"] not in {"GET", "HEAD"} and not is_form:
            return 405, "this address can only be read: use GET", [(b"allow", b"GET, HEAD")]
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        host = hosts[0].decode("latin-1") if len(hosts) == 1 else ""
        if not is_known_host(host, self._hosts):
            text = "this host name is not in the console's settings; add it to `hosts` there"
            return 421, text, []
        if len(scope["query_string"]) > QUERY_BYTES_MAX or len(scope["path"]) > PATH_BYTES_MAX:
            return 414, "the address is too long", []
        if not self._try_take(scope):
            return 429, "too many requests; try again in a second", [(b"retry-after", b"1")]
        return None

    def _try_take(self, scope: types.Scope) -> bool:
        """Return whether the peer may send a request now; store the peer in the scope."""
        peer = scope["client"][0] if scope["client"] else ""
        person = self._person(scope, peer)
        if person:
            # not an address, whatever people are called
            scope[_PEER] = f"person {person}"
            return self._rates_of_people.try_take(person, time.monotonic())
        scope[_PEER] = peer
        return self._rates.try_take(peer, time.monotonic())

    def _person(self, scope: types.Scope, peer: str) -> str:
        """Return the person whom a trusted proxy names; empty if none does."""
        if self._header is None:
            return ""
        headers = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in scope["headers"]]
        try:
            return identities.by_header(headers, peer, self._header).name
        except identities.Unknown:
            return ""


def peer_of(scope: types.Scope) -> str:
    """Return `person NAME` if a trusted proxy names a person, or else the address of the client."""
    peer: str = scope.get(_PEER, "")
    return peer


def is_known_host(header: str, hosts: Collection[str]) -> bool:
    """Return whether a Host header has a known name, or an address instead of a name.

    A malicious page can point its own name at this console (DNS rebinding), but not an address.
    """
    name, _, port = header.rpartition(":") if not header.endswith("]") else (header, "", "")
    if not name or not port.isdigit():
        name, port = header, ""
    name = name.lower().strip("[]").removesuffix(".")
    if name == "localhost" or name in hosts:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
