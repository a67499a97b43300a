"""Adapter: HTTP: one request on one connection, within a time; says what was answered.

Names are looked up once, every address is checked, and the connection goes to a checked one.
Redirects are not followed. The URL may hold a secret, so only its host is ever told.
"""

import asyncio
import base64
import contextlib
import contextvars
import dataclasses
import enum
import functools
import ipaddress
import socket
import ssl
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import muster
from muster_notifier import blocking
from muster_notifier.config import receiver_settings
from muster_notifier.receivers import result, ssrf_guard

RAISED: Final = (OSError, EOFError, ValueError, asyncio.LimitOverrunError)
"""What can be raised while somebody is asked; every one is temporary."""


def meaning(
    error: Exception, *, where: str, timeout_s: float, language: str, is_sent: bool
) -> result.Result:
    """Return what it means that an attempt ended without an answer.

    `is_sent` says that all had been sent by then.
    """
    match error:
        case TimeoutError():
            outcome, detail = result.Outcome.TIMED_OUT, f"no answer within {timeout_s:g} s"
        case ssl.SSLCertVerificationError():
            outcome = result.Outcome.NOT_TRUSTED
            detail = f"its certificate is not believed: {error.verify_message}"
        case ssl.SSLError():
            outcome, detail = result.Outcome.NOT_TRUSTED, f"TLS: {error.reason or error}"
        case socket.gaierror():
            outcome, detail = result.Outcome.NO_SUCH_HOST, error.strerror or str(error)
        case EOFError() | ConnectionResetError() | BrokenPipeError():
            outcome, detail = result.Outcome.CLOSED, "closed the connection without an answer"
        case OSError():
            outcome, detail = result.Outcome.UNREACHABLE, error.strerror or str(error)
        case _:
            outcome, detail = result.Outcome.NONSENSE, f"the answer is not {language}"
    return result.Result(outcome=outcome, detail=f"{where}: {detail}", is_unknown=is_sent)


class Host:
    """One host and port; a name server that hangs holds up nobody else."""

    def __init__(self, name: str, port: int) -> None:
        self._name = name
        self._port = port
        self._lane = blocking.Lane()

    async def addresses(self) -> list[str]:
        """Return the addresses, each once. Raises OSError."""
        try:
            return [str(ipaddress.ip_address(self._name))]
        except ValueError:
            pass
        ask = functools.partial(socket.getaddrinfo, self._name, self._port, type=socket.SOCK_STREAM)
        found = await self._lane.run(ask)
        return list(dict.fromkeys(str(one[4][0]) for one in found))


_HEAD_BYTES_MAX: Final = 64 * 1024
_BODY_BYTES_MAX: Final = 64 * 1024
_SAID_MAX: Final = 300
_CONTINUE: Final = 100
_SUCCESS: Final = 200
_TAKEN: Final = 2
_REFUSAL_S: Final = 1.0
"""What a refusal says is worth no longer wait."""


class Refused(Exception):
    """The guard does not let us ask; the text says why."""


@dataclass(frozen=True, slots=True)
class Response:
    """An answer; `headers` have lower-case names, `body` is its beginning."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""


ASKED: Final = contextvars.ContextVar[list[str] | None]("ASKED", default=None)
"""Where requests are written down, if somebody wants to see them."""


class Read(enum.Enum):
    """What of an answer is read beside its head: a receiver may talk slowly, or for ever."""

    BODY = enum.auto()
    REFUSAL = enum.auto()
    NOTHING = enum.auto()


@dataclass(slots=True)
class _Trace:
    """How far a request came."""

    is_sent: bool = False


class Endpoint:
    """One URL, and how to ask it."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        reach: receiver_settings.Reach,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Raise ValueError if the URL names no host that can be, or no port."""
        split = urllib.parse.urlsplit(url)
        if split.scheme not in {"http", "https"} or not split.hostname:
            raise ValueError("a URL such as https://host/path is expected")
        self._host = split.hostname
        self._tls = (tls or _tls()) if split.scheme == "https" else None
        self._port = split.port or (443 if self._tls else 80)
        self._names = Host(self._host, self._port)
        user, _, authority = split.netloc.rpartition("@")
        self._fixed = {"Host": authority.encode("idna").decode()}
        if user:
            token = base64.b64encode(urllib.parse.unquote(user).encode()).decode()
            self._fixed["Authorization"] = f"Basic {token}"
        path = urllib.parse.quote(split.path or "/", safe="/%:@!$&'()*+,;=~")
        query = urllib.parse.quote(split.query, safe="/?%:@!$&'()*+,;=~")
        self._path, self._query = path, query
        self._timeout_s = timeout_s
        self._reach = reach
        self.where = f"{self._host}:{self._port}"

    async def ask(
        self,
        method: str,
        *,
        below: str = "",
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        read: Read = Read.BODY,
    ) -> Response | result.Result:
        """Send one request; an Answer says why there is no response.

        `below` is added to the URL's path.
        """
        trace = _Trace()
        asked = ASKED.get()
        if asked is not None:
            where = f"{method} {self._host}:{self._port}{self._path.rstrip('/')}{below}"
            asked.append(f"{where}\n{body.decode('utf-8', 'replace')}")
        try:
            async with asyncio.timeout(self._timeout_s):
                request = self._head(method, below, headers, body) + body
                return await self._exchange(request, read, trace)
        except Refused as refused:
            return result.Result(
                outcome=result.Outcome.FORBIDDEN_ADDRESS, detail=f"{self.where}: {refused}"
            )
        except RAISED as error:
            return meaning(
                error,
                where=self.where,
                timeout_s=self._timeout_s,
                language="HTTP",
                is_sent=trace.is_sent,
            )

    async def _exchange(self, request: bytes, read: Read, trace: _Trace) -> Response:
        reader, writer = await self._connect()
        try:
            writer.write(request)
            # a receiver may refuse early and stop reading; its answer is there all the same
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            trace.is_sent = True
            status = _CONTINUE
            while status < _SUCCESS:
                status, headers = _parse(await reader.readuntil(b"\r\n\r\n"))
            body = b""
            if read is Read.BODY:
                body = await _body(reader, headers)
            elif read is Read.REFUSAL and status // 100 != _TAKEN:
                with contextlib.suppress(*RAISED):
                    async with asyncio.timeout(_REFUSAL_S):
                        body = await _body(reader, headers)
            return Response(status, headers, body)
        finally:
            writer.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the first checked address that answers."""
        found = await self._names.addresses()
        problem = ssrf_guard.refusal(found, self._reach)
        if problem is not None:
            raise Refused(problem)
        failure = OSError(f"{self._host} has no address")
        for address in found:
            try:
                # one that swallows everything must leave time for the others
                async with asyncio.timeout(self._timeout_s / len(found)):
                    return await asyncio.open_connection(
                        address,
                        self._port,
                        ssl=self._tls,
                        server_hostname=self._host if self._tls else None,
                        limit=_HEAD_BYTES_MAX,
                    )
            except OSError as error:
                failure = error
        raise failure

    def _head(
        self, method: str, below: str, headers: Mapping[str, str] | None, body: bytes
    ) -> bytes:
        path = self._path if not below else self._path.rstrip("/") + below
        query = f"?{self._query}" if self._query and "?" not in below else ""
        told = {
            **self._fixed,
            "User-Agent": f"muster-notifier/{muster.__version__}",
            "Content-Length": str(len(body)),
            **(headers or {}),
            "Connection": "close",
        }
        lines = [f"{method} {path}{query} HTTP/1.1"]
        lines += [f"{name}: {_value(value)}" for name, value in told.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


@functools.cache
def _tls() -> ssl.SSLContext:
    """Return the context of everybody: each would hold all certificates of the machine."""
    return ssl.create_default_context()


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    """Return the beginning of a body: chunked, of a length, or until the end."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        found = b""
        while len(found) < _BODY_BYTES_MAX:
            size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
            if size == 0:
                break
            found += await reader.readexactly(min(size, _BODY_BYTES_MAX))
            if size > _BODY_BYTES_MAX:
                break
            await reader.readexactly(2)
        return found[:_BODY_BYTES_MAX]
    if "content-length" in headers:
        return await reader.readexactly(min(int(headers["content-length"]), _BODY_BYTES_MAX))
    found = b""
    while len(found) < _BODY_BYTES_MAX and (more := await reader.read(_BODY_BYTES_MAX)):
        found += more
    return found[:_BODY_BYTES_MAX]


def _parse(head: bytes) -> tuple[int, dict[str, str]]:
    """Return status and headers of an answer's head. Raises ValueError."""
    first, *rest = head.decode("latin-1").split("\r\n")
    version, _, status = first.partition(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(f"not HTTP: {first[:100]!r}")
    headers = {}
    for text in rest:
        name, _, value = text.partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(status[:3]), headers


def _value(text: str) -> str:
    """Return a header's value on one line: a secret from a file may end with a newline."""
    return " ".join(text.split())


async def post_json(
    site: Endpoint, body: bytes, *, below: str = "", headers: Mapping[str, str] | None = None
) -> result.Result:
    """Post JSON; what a refusal says is told as well."""
    told = {"Content-Type": "application/json", **(headers or {})}
    answer = await site.ask("POST", below=below, headers=told, body=body, read=Read.REFUSAL)
    if isinstance(answer, result.Result):
        return answer
    found = result.of_status(answer.status, answer.headers)
    if found.kind is result.Kind.TAKEN:
        return found
    said = " ".join(answer.body[:_SAID_MAX].decode("utf-8", "replace").split())
    return dataclasses.replace(found, detail=f"{found.detail} {said}".strip())
