"""Adapter for the Kubernetes API: sends requests, and reads pages of lists and lines of watches.

Bodies are not decoded: the library's generated models would use more memory than the rest of a
service. An error response is returned, not raised; every wait is bounded. The client library is
imported only if a cluster is needed, which saves 19 MiB in a service without a cluster.
"""

import asyncio
import contextlib
import email.utils
import itertools
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Self

import aiohttp
import msgspec
import prometheus_client

from muster import codec, pacing

if TYPE_CHECKING:
    from muster.kubernetes import client

LOST: Final = (OSError, TimeoutError, aiohttp.ClientError)
UNREADABLE: Final = codec.UNREADABLE
JSON: Final = "application/json"
APPLY: Final = "application/apply-patch+yaml"
MERGE: Final = "application/merge-patch+json"
STRATEGIC: Final = "application/strategic-merge-patch+json"
PASSING: Final = frozenset({0, 408, 429, 500, 502, 503, 504})

_BACKOFF: Final = pacing.Backoff(first_s=0.1, max_s=5.0)
_WAIT_MAX_S: Final = 60.0
_CREDENTIALS_S: Final = 30.0
_ACCEPT_S: Final = 10.0
_TEXT_MAX: Final = 300
_MESSAGE_MAX: Final = 1000
"""The limit is high, because the API's message names each owner of each conflicting field."""
_LINE_BYTES_MAX: Final = 8 * 1024 * 1024
_BODY_BYTES_MAX: Final = 64 * 1024 * 1024
_PAGE: Final = 500
_PAGES_MAX: Final = 1000

_REQUESTS: Final = prometheus_client.Counter(
    "muster_kubernetes_requests_total", "Requests to the Kubernetes API.", ["verb", "status"]
)


class NoCluster(Exception):
    """These settings give no usable API address or credentials.

    The message names the source of the settings and the error.
    """


class Refused(Exception):
    """A list, a watch or a WebSocket failed; `answer` has the reason."""

    def __init__(self, answer: "Answer") -> None:
        super().__init__(answer.problem)
        self.answer = answer


class _Status(msgspec.Struct, frozen=True):
    message: str = ""


class _ListMetadata(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(name="continue", default="")


class _List(msgspec.Struct, frozen=True):
    metadata: _ListMetadata = _ListMetadata()
    items: list[msgspec.Raw] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The API's answer; status 0 means no answer, with the reason in `body`.

    `date` is the API server's time, `wait_s` the requested wait (Retry-After).
    """

    what: str
    status: int
    body: bytes
    date: datetime | None = None
    wait_s: float = 0.0

    @property
    def is_ok(self) -> bool:
        """Whether the request succeeded."""
        return HTTPStatus.OK <= self.status < HTTPStatus.MULTIPLE_CHOICES

    @property
    def is_forbidden(self) -> bool:
        """Whether the request failed because credentials are invalid or a permission is missing."""
        return self.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}

    @property
    def is_passing(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status in PASSING

    @property
    def problem(self) -> str:
        """Why the request failed, as the API reports it; empty if it succeeded."""
        if self.is_ok:
            return ""
        text = self.body[: 4 * _TEXT_MAX].decode("utf-8", "replace")[:_TEXT_MAX]
        if self.status:
            with contextlib.suppress(*UNREADABLE):
                text = msgspec.json.decode(self.body, type=_Status).message or text
        short = " ".join(text.split())[:_MESSAGE_MAX]
        status = f"HTTP {self.status} " if self.status else ""
        return f"{self.what}: {status}{short}".strip()


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a list: undecoded objects, and the resource version of the list."""

    items: list[msgspec.Raw]
    version: str


async def find(
    *,
    kubeconfig: str | None,
    context: str | None,
    attempts: int | None = None,
    timeout_s: float = _CREDENTIALS_S,
) -> "Api":
    """Return the API of a kubeconfig, or of the cluster of this process. Raises NoCluster."""
    from muster.kubernetes import client  # noqa: PLC0415  # see above

    try:
        where = await client.where(kubeconfig=kubeconfig, context=context, timeout_s=timeout_s)
    except client.NoCluster as error:
        raise NoCluster(str(error)) from None
    return Api(where, attempts=attempts)


class Api:
    """The API of one cluster; an async context manager.

    A request that fails for a temporary reason is repeated, up to `attempts` attempts in total or,
    without this limit, until its timeout.
    """

    def __init__(self, where: "client.Where", *, attempts: int | None = None) -> None:
        self._api = where.open()
        self._lost = where.lost
        self._attempts = attempts
        self._server_time: tuple[datetime, float] | None = None
        """The latest time received from the API server, and when it was received, in seconds of the
        event loop's clock.
        """
        self.server = str(where.configuration.host)
        self.context = where.context

    @property
    def name(self) -> str:
        """The cluster, for people: the address of the server, and the context."""
        return f"{self.server} (context {self.context})" if self.context else self.server

    def now(self) -> datetime | None:
        """Return the API server's time, to within a second; None if it is unknown."""
        if self._server_time is None:
            return None
        date, at = self._server_time
        return date + timedelta(seconds=asyncio.get_running_loop().time() - at)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._api.close()  # type: ignore[no-untyped-call]

    async def request(
        self,
        verb: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: object | None = None,
        content: str = JSON,
        timeout_s: float,
        attempts: int | None = None,
        body_bytes_max: int = _BODY_BYTES_MAX,
    ) -> Answer:
        """Send a request and return the answer; retry while success is possible and time is left.

        A body of more than `body_bytes_max` is an error.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        what = f"{verb.lower()} {path}"
        answer = Answer(what=what, status=0, body=b"no answer")
        last = attempts or self._attempts
        for attempt in itertools.count(1):
            left_s = deadline - clock()
            if left_s <= 0:
                break
            timeout = aiohttp.ClientTimeout(total=left_s)
            try:
                response = await self._send(verb, path, query or {}, body, content, timeout)
                answer = _answer(what, response, await _body(response, body_bytes_max))
                status = str(answer.status)
            except LOST as error:
                status = "no_answer"
                # the previous answer is more informative than an attempt cut short by the deadline
                if attempt == 1 or not isinstance(error, TimeoutError):
                    why = str(error) or f"no answer within {left_s:.1f} s"
                    answer = Answer(what=what, status=0, body=why.encode())
            if answer.date is not None:
                self._server_time = answer.date, clock()
            _REQUESTS.labels(verb.lower(), status).inc()
            wait_s = max(_BACKOFF.delay_s(attempt), answer.wait_s)
            if not answer.is_passing or attempt == last or wait_s >= deadline - clock():
                break
            await asyncio.sleep(wait_s)
        return answer

    async def post(self, path: str, body: object, *, timeout_s: float) -> str:
        """Create an object; return the error, or an empty text on success."""
        return (await self.request("POST", path, body=body, timeout_s=timeout_s)).problem

    async def pages(
        self, path: str, *, query: Mapping[str, str] | None = None, timeout_s: float
    ) -> AsyncGenerator[Page, None]:
        """Yield a list page by page. Raises Refused, with 410 if the list expired between pages."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        token = ""
        for _ in range(_PAGES_MAX):
            page_query = {**(query or {}), "limit": str(_PAGE)}
            if token:
                page_query["continue"] = token
            answer = await self.request(
                "GET", path, query=page_query, timeout_s=max(0.001, deadline - clock())
            )
            if not answer.is_ok:
                raise Refused(answer)
            try:
                page = msgspec.json.decode(answer.body, type=_List)
            except UNREADABLE as error:
                text = f"unreadable: {error}".encode()
                raise Refused(Answer(what=answer.what, status=0, body=text)) from None
            if not page.metadata.resource_version:
                raise Refused(Answer(what=answer.what, status=0, body=b"unreadable: no list"))
            yield Page(page.items or [], page.metadata.resource_version)
            token = page.metadata.continue_
            if not token:
                return
        raise Refused(Answer(what=f"get {path}", status=0, body=b"too many pages"))

    async def watch(
        self, path: str, query: Mapping[str, str], *, idle_s: float
    ) -> AsyncGenerator[bytes, None]:
        """Yield the lines of a watch until it ends. Raises Refused and the exceptions in `LOST`.

        The first line is empty: it means that the server has accepted the watch, which may then be
        silent for a long time. Raises TimeoutError if the watch is not accepted within 10 s (or
        `idle_s`, if shorter), or if no line, not even a bookmark, arrives for `idle_s`.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_read=idle_s)
        async with asyncio.timeout(min(_ACCEPT_S, idle_s)):
            response = await self._send("GET", path, query, None, JSON, timeout)
        try:
            if response.status != HTTPStatus.OK:
                body = await response.content.read(64 * 1024)
                raise Refused(_answer(f"watch {path}", response, body))
            _REQUESTS.labels("watch", str(response.status)).inc()
            yield b""
            rest = b""
            async for chunk in response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line:
                        yield line
                if len(rest) > _LINE_BYTES_MAX:
                    raise ConnectionError(f"watch {path}: over {_LINE_BYTES_MAX} bytes in a line")
        finally:
            response.close()

    async def connect(
        self, path: str, query: Mapping[str, str], *, protocol: str, timeout_s: float
    ) -> aiohttp.ClientWebSocketResponse:
        """Open a WebSocket. Raises Refused, without the API's message, and the errors in `LOST`."""
        from muster.kubernetes import client  # noqa: PLC0415  # see above

        try:
            async with asyncio.timeout(timeout_s):
                return await client.websocket(self._api, path, query, protocol)
        except aiohttp.WSServerHandshakeError as error:
            text = error.message.encode()
            answer = Answer(what=f"connect {path}", status=error.status, body=text)
            raise Refused(answer) from None

    async def _send(
        self,
        verb: str,
        path: str,
        query: Mapping[str, str],
        body: object | None,
        content: str,
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109  # aiohttp's own, of several parts
    ) -> aiohttp.ClientResponse:
        try:
            request = await self._api.param_serialize(
                method=verb,
                resource_path=path,
                query_params=list(query.items()),
                header_params={"Accept": JSON}
                | ({"Content-Type": content} if body is not None else {}),
                body=body,
                auth_settings=["BearerToken"],
            )
            # declared as a number, but passed to aiohttp unchanged
            called = await self._api.call_api(*request, _request_timeout=timeout)
        except self._lost as error:
            raise ConnectionError(str(error)) from error
        response: aiohttp.ClientResponse = called.response
        return response


async def _body(response: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    """Read a whole body. Raises ConnectionError if it is too large."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > bytes_max:
            response.close()
            raise ConnectionError(f"the body has more than {bytes_max} bytes")
    return bytes(body)


def _answer(what: str, response: aiohttp.ClientResponse, body: bytes) -> Answer:
    date: datetime | None = None
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        date = email.utils.parsedate_to_datetime(response.headers.get("Date", ""))
        # RFC 5322 3.3: "-0000" is a time in UTC, for which Python returns no time zone
        date = date if date.tzinfo else date.replace(tzinfo=UTC)
    wait_s = 0.0
    with contextlib.suppress(ValueError):
        wait_s = min(_WAIT_MAX_S, max(0.0, float(response.headers.get("Retry-After", "0"))))
    return Answer(what=what, status=response.status, body=body, date=date, wait_s=wait_s)
