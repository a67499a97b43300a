"""Adapter for an HTTP client: one request per connection, with a time limit and checked addresses.

A host is resolved once for each request. All its addresses are passed to `check`, and the client
connects only to one of these, whatever the name server answers later (DNS rebinding). An IP address
in the URL is checked in the same way. Redirects are not followed, proxies in the environment are
not used, and only the beginning of a response body is read. The URL may contain a secret, so errors
name only host and port.
"""

import asyncio
import base64
import contextlib
import enum
import functools
import ipaddress
import socket
import ssl
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import aiohttp
import aiohttp.abc
import aiohttp.http
import aiohttp.payload
import yarl

from muster import blocking

BODY_BYTES_MAX: Final = 64 * 1024
_HEAD_BYTES_MAX: Final = 64 * 1024
_REFUSAL_S: Final = 1.0
"""The longest wait for the body of an error response."""
_BRIEF_S: Final = 0.3
"""The longest wait for the body of a successful response, which may still report an error."""
_SUCCESS: Final = 2
_NO_URL: Final = "expected a URL such as https://host/path"

Check = Callable[[Sequence[str]], str | None]
"""Returns why connecting to these addresses is forbidden, or None if it is allowed."""


class ForbiddenAddress(Exception):
    """The check refused an address of the host; the text names the address and the reason."""


class Unanswered(OSError):
    """No response arrived.

    `reason` is the cause, as an exception of the standard library: a TimeoutError, an OSError
    (`socket.gaierror`, `ssl.SSLError`, ConnectionError, ...), an EOFError when the connection was
    closed, or a ValueError when the response is not HTTP. `is_sent` says whether the whole request
    was sent, so that it may have been processed.
    """

    def __init__(self, reason: Exception, *, is_sent: bool) -> None:
        super().__init__(str(reason) or type(reason).__name__)
        self.reason = reason
        self.is_sent = is_sent


class Read(enum.Enum):
    """Which response bodies are read: all (BODY), those of errors (REFUSAL), or none (NOTHING).

    BRIEF reads all, but waits only briefly. REFUSAL and NOTHING are for bodies that may never end.
    """

    BODY = enum.auto()
    BRIEF = enum.auto()
    REFUSAL = enum.auto()
    NOTHING = enum.auto()


@dataclass(frozen=True, slots=True)
class Response:
    """A response; `headers` have lower-case names, `body` has at most `BODY_BYTES_MAX` bytes."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""


class Endpoint:
    """One URL; `check` may refuse the addresses of its host."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        user_agent: str,
        check: Check | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Raise ValueError if `url` is not a valid HTTP URL."""
        # urllib's error texts quote parts of the URL, which may be a password
        try:
            split = urllib.parse.urlsplit(url)
        except ValueError:
            raise ValueError(_NO_URL) from None
        try:
            given_port = split.port
        except ValueError:
            raise ValueError("the port of the URL is not a number from 0 to 65535") from None
        if split.scheme not in {"http", "https"} or not split.hostname:
            raise ValueError(_NO_URL)
        self._tls = (tls or _tls()) if split.scheme == "https" else None
        self._host = split.hostname.encode("idna").decode()
        if _is_short_address(self._host):
            raise ValueError(f"{self._host} is not an IPv4 address: use four numbers from 0 to 255")
        port = given_port or (443 if self._tls else 80)
        user, _, authority = split.netloc.rpartition("@")
        authority = authority.encode("idna").decode()
        self._headers = {"Host": authority, "User-Agent": user_agent, "Connection": "close"}
        if user:
            token = base64.b64encode(urllib.parse.unquote(user).encode()).decode()
            self._headers["Authorization"] = f"Basic {token}"
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._origin = f"{split.scheme}://{host}:{port}"
        self.path = urllib.parse.quote(split.path or "/", safe="/%:@!$&'()*+,;=~")
        self._query = urllib.parse.quote(split.query, safe="/?%:@!$&'()*+,;=~")
        self._timeout_s = timeout_s
        self._resolver = _Resolver(self._host, port, check)
        self.where = f"{split.hostname}:{port}"

    async def request(
        self,
        method: str,
        *,
        below: str = "",
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        read: Read = Read.BODY,
    ) -> Response:
        """Send one request and return the response. Raises Unanswered and ForbiddenAddress.

        `below` is appended to the URL's path.
        """
        content = _Content(body)
        own = {name: " ".join(text.split()) for name, text in (headers or {}).items()}
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._resolver.refresh()
                async with (
                    self._session() as session,
                    session.request(
                        method,
                        self._url(below),
                        headers=self._headers | own,
                        data=content,
                        ssl=self._tls or True,
                        allow_redirects=False,
                    ) as answer,
                ):
                    return Response(
                        answer.status,
                        {name.lower(): value for name, value in answer.headers.items()},
                        await _body(answer, read),
                    )
        except (OSError, EOFError, ValueError, aiohttp.ClientError) as error:
            raise Unanswered(_reason(error), is_sent=content.is_sent) from None
        finally:
            content.abort()

    def _session(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            resolver=self._resolver, use_dns_cache=False, force_close=True
        )
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(),
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type"),
            auto_decompress=False,
            max_line_size=_HEAD_BYTES_MAX,
            max_field_size=_HEAD_BYTES_MAX,
        )

    def _url(self, below: str) -> yarl.URL:
        path = self.path.rstrip("/") + below if below else self.path
        query = f"?{self._query}" if self._query and "?" not in below else ""
        return yarl.URL(f"{self._origin}{path}{query}", encoded=True)


class _Resolver(aiohttp.abc.AbstractResolver):
    """Resolves the host only to the addresses that were last checked.

    A name server that does not answer occupies one thread, and does not delay other endpoints.
    """

    def __init__(self, host: str, port: int, check: Check | None) -> None:
        self._host = host
        self._port = port
        self._check = check
        self._lookups = blocking.Serial()
        self._addresses: list[str] = []

    async def refresh(self) -> None:
        """Resolve the host and check all its addresses. Raises OSError and ForbiddenAddress."""
        addresses = await self._look_up()
        refusal = self._check(addresses) if self._check is not None else None
        if refusal is not None:
            raise ForbiddenAddress(refusal)
        self._addresses = addresses

    async def _look_up(self) -> list[str]:
        try:
            return [_address_text(ipaddress.ip_address(self._host))]
        except ValueError:
            pass
        look_up = functools.partial(
            socket.getaddrinfo, self._host, self._port, type=socket.SOCK_STREAM
        )
        results = await self._lookups.run(look_up)
        return list(dict.fromkeys(str(result[4][0]) for result in results))

    async def resolve(
        self,
        host: str,
        port: int = 0,
        family: socket.AddressFamily = socket.AF_UNSPEC,  # noqa: ARG002  # aiohttp's signature
    ) -> list[aiohttp.abc.ResolveResult]:
        """Return the checked addresses."""
        assert host == self._host, f"an endpoint of {self._host} connects to {host}"
        return [
            aiohttp.abc.ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in self._addresses
        ]

    async def close(self) -> None:
        """Close nothing, because the resolver outlives the session of one request."""


class _Content(aiohttp.payload.BytesPayload):
    """A request body that records its transport, and whether it was completely written."""

    is_sent = False
    _transport: asyncio.Transport | None = None

    async def write_with_length(
        self, writer: aiohttp.abc.AbstractStreamWriter, content_length: int | None
    ) -> None:
        assert isinstance(writer, aiohttp.http.StreamWriter), f"{type(writer)} has no transport"
        self._transport = writer.transport
        await super().write_with_length(writer, content_length)
        self.is_sent = True

    def abort(self) -> None:
        """Abort the connection, which would otherwise stay open if the server does not read."""
        if self._transport is not None:
            # Python 3.11.2 fails if TLS is already closed
            with contextlib.suppress(AttributeError):
                self._transport.abort()


def _is_short_address(host: str) -> bool:
    """Return whether a host consists of numbers and dots, but is not a valid IPv4 address.

    inet_aton accepts some of these hosts, and aiohttp treats all of them as addresses: it would
    connect without asking the resolver, which checks addresses.
    """
    parts = host.rstrip(".").split(".")
    if not all(part.isascii() and part.isdecimal() for part in parts):
        return False
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return True
    return False


@functools.cache
def _tls() -> ssl.SSLContext:
    """Return the TLS context that endpoints share: every new context loads all CA certificates."""
    return ssl.create_default_context()


async def _body(answer: aiohttp.ClientResponse, read: Read) -> bytes:
    if read is Read.BODY:
        return await _beginning(answer.content)
    is_success = answer.status // 100 == _SUCCESS
    if read is Read.BRIEF or (read is Read.REFUSAL and not is_success):
        with contextlib.suppress(OSError, aiohttp.ClientError):
            async with asyncio.timeout(_BRIEF_S if is_success else _REFUSAL_S):
                return await _beginning(answer.content)
    return b""


async def _beginning(content: aiohttp.StreamReader) -> bytes:
    body = b""
    while len(body) < BODY_BYTES_MAX and (chunk := await content.read(BODY_BYTES_MAX)):
        body += chunk
    return body[:BODY_BYTES_MAX]


def _address_text(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    """Return an address as text; Python versions format IPv4-mapped addresses differently."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(address) if mapped is None else f"::ffff:{mapped}"


def _reason(error: Exception) -> Exception:
    """Convert an error from aiohttp to one of the standard library."""
    match error:
        case aiohttp.ClientConnectorCertificateError():
            return error.certificate_error
        case aiohttp.ClientConnectorError():
            return error.os_error
        case aiohttp.ClientOSError():
            # OSError becomes a subclass such as ConnectionResetError, depending on its errno
            return OSError(error.errno, error.strerror)
        case OSError():
            return error
        case aiohttp.ClientConnectionError() | aiohttp.ClientPayloadError():
            return EOFError("the connection was closed")
        case _:
            return error if isinstance(error, EOFError) else ValueError(str(error))
