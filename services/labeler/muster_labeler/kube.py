"""Door to the Kubernetes API: one request and its answer, all pages of a list, a watch's lines.

Raw requests of `kubernetes.aio`: its generated models would cost more memory than everything else
here. What the API refuses is answered, not raised; every wait has an end.
"""

import asyncio
import contextlib
import email.utils
import os
import pathlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from types import TracebackType
from typing import Final, Self

import aiohttp
import msgspec
import prometheus_client
import yaml
from kubernetes.aio.client import ApiClient, ApiException, Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

LOST: Final = (OSError, TimeoutError, aiohttp.ClientError, ApiException)
JSON: Final = "application/json"
APPLY: Final = "application/apply-patch+yaml"
MERGE: Final = "application/merge-patch+json"
PASSING: Final = frozenset({0, 408, 429, 500, 502, 503, 504})

_TRY_AGAIN_S: Final = 0.1
_WAIT_MAX_S: Final = 30.0
_TEXT_MAX: Final = 1000
_LINE_BYTES_MAX: Final = 8 * 1024 * 1024
_PAGE: Final = 500

_REQUESTS: Final = prometheus_client.Counter(
    "muster_labeler_api_requests_total", "Requests to the Kubernetes API.", ["verb", "status"]
)


class NoCluster(Exception):
    """The settings lead to no Kubernetes API; the text says what was tried."""


class Refused(Exception):
    """The API did not give a list or a watch."""

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
    """What the API said; status 0 is nothing, and `body` then why.

    `date` is its own clock. `wait_s` is how long it wants to be left alone.
    """

    what: str
    status: int
    body: bytes
    date: datetime | None = None
    wait_s: float = 0.0

    @property
    def is_ok(self) -> bool:
        """Tell whether it did what was asked."""
        return HTTPStatus.OK <= self.status < HTTPStatus.MULTIPLE_CHOICES

    @property
    def is_forbidden(self) -> bool:
        """Tell whether we have not the right."""
        return self.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}

    @property
    def is_passing(self) -> bool:
        """Tell whether it may go otherwise another time."""
        return self.status in PASSING

    @property
    def problem(self) -> str:
        """Say what was not done, in the API's own words; empty if it was."""
        if self.is_ok:
            return ""
        text = self.body[:_LINE_BYTES_MAX].decode("utf-8", "replace")
        if self.status:
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                text = msgspec.json.decode(self.body, type=_Status).message
        short = " ".join(text.split())[:_TEXT_MAX]
        status = f"HTTP {self.status} " if self.status else ""
        return f"{self.what}: {status}{short}".strip()


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a list: undecoded objects, and the version that the list is of."""

    items: list[msgspec.Raw]
    version: str


async def find(*, kubeconfig: str | None, context: str | None) -> "Api":
    """Return the API of a kubeconfig, else of the cluster this runs in. Raises NoCluster."""
    configuration = Configuration()
    where = kubeconfig or "the cluster this runs in"
    try:
        if kubeconfig is not None:
            # the library prints a warning for a missing file, and complains of its content
            for file in kubeconfig.split(os.pathsep):
                await asyncio.to_thread(pathlib.Path(file).read_bytes)
            await load_kube_config(  # type: ignore[no-untyped-call]  # as the library has it
                config_file=kubeconfig, context=context, client_configuration=configuration
            )
        else:
            load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise NoCluster(f"kubernetes: {where}: {error.strerror or error}") from None
    except (ConfigException, ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        raise NoCluster(f"kubernetes: {where}: {' '.join(str(error).split())}") from None
    return Api(configuration)


class Api:
    """The API of one cluster; an async context manager."""

    def __init__(self, configuration: Configuration) -> None:
        self._api = ApiClient(configuration)
        self._behind_s: float | None = None
        self.server = str(configuration.host)

    def now(self) -> datetime:
        """Return what the API server's own clock says now; ours until it was heard."""
        return datetime.fromtimestamp(datetime.now(UTC).timestamp() + (self._behind_s or 0.0), UTC)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await self._api.close()  # type: ignore[no-untyped-call]

    async def ask(
        self,
        verb: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: object | None = None,
        content: str = JSON,
        timeout_s: float,
        attempts: int = 4,
    ) -> Answer:
        """Return the API's answer; what may pass is asked again while there is time."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        pause_s = _TRY_AGAIN_S
        answer = Answer(what=f"{verb.lower()} {path}", status=0, body=b"no answer")
        for attempt in range(1, attempts + 1):
            left_s = deadline - clock()
            if left_s <= 0:
                break
            answer = await self._once(verb, path, query or {}, body, content, timeout_s=left_s)
            wait_s = max(pause_s, answer.wait_s)
            if not answer.is_passing or attempt == attempts or wait_s >= deadline - clock():
                break
            await asyncio.sleep(wait_s)
            pause_s *= 2
        return answer

    async def pages(
        self, path: str, *, query: Mapping[str, str] | None = None, timeout_s: float
    ) -> AsyncGenerator[Page, None]:
        """Give a list, page by page. Raises Refused, with 410 if the list expired between pages."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        token = ""
        while True:
            asked = {**(query or {}), "limit": str(_PAGE)} | ({"continue": token} if token else {})
            answer = await self.ask(
                "GET", path, query=asked, timeout_s=max(0.001, deadline - clock())
            )
            if not answer.is_ok:
                raise Refused(answer)
            try:
                page = msgspec.json.decode(answer.body, type=_List)
            except msgspec.MsgspecError as error:
                text = f"unreadable: {error}".encode()
                raise Refused(Answer(what=answer.what, status=0, body=text)) from None
            yield Page(page.items or [], page.metadata.resource_version)
            token = page.metadata.continue_
            if not token:
                return

    async def watch(
        self, path: str, query: Mapping[str, str], *, idle_s: float
    ) -> AsyncGenerator[bytes, None]:
        """Give the lines of a watch until it ends. Raises Refused, and what `LOST` names.

        A watch that says nothing for `idle_s`, no bookmark either, is lost: TimeoutError.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=idle_s, sock_read=idle_s)
        response = await self._send("GET", path, query, None, JSON, timeout)
        try:
            if response.status != HTTPStatus.OK:
                body = await response.content.read(64 * 1024)
                raise Refused(_answer(f"watch {path}", response, body))
            _REQUESTS.labels("watch", str(response.status)).inc()
            rest = b""
            async for chunk in response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line:
                        yield line
                if len(rest) > _LINE_BYTES_MAX:
                    raise ConnectionError(f"watch {path}: a line of more than {_LINE_BYTES_MAX}")
        finally:
            response.close()

    async def _once(
        self,
        verb: str,
        path: str,
        query: Mapping[str, str],
        body: object | None,
        content: str,
        *,
        timeout_s: float,
    ) -> Answer:
        what = f"{verb.lower()} {path}"
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            response = await self._send(verb, path, query, body, content, timeout)
            answer = _answer(what, response, await response.read())
            if answer.date is not None:
                self._behind_s = (answer.date - datetime.now(UTC)).total_seconds()
        except LOST as error:
            why = str(error) or f"no answer within {timeout_s:.1f} s"
            answer = Answer(what=what, status=0, body=why.encode())
        _REQUESTS.labels(verb.lower(), str(answer.status) if answer.status else "no_answer").inc()
        return answer

    async def _send(
        self,
        verb: str,
        path: str,
        query: Mapping[str, str],
        body: object | None,
        content: str,
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109  # aiohttp's own, of several parts
    ) -> aiohttp.ClientResponse:
        request = await self._api.param_serialize(
            method=verb,
            resource_path=path,
            query_params=list(query.items()),
            header_params={"Accept": JSON}
            | ({"Content-Type": content} if body is not None else {}),
            body=body,
            auth_settings=["BearerToken"],
        )
        # declared as a number, handed to aiohttp as it is
        found = await self._api.call_api(*request, _request_timeout=timeout)
        response: aiohttp.ClientResponse = found.response
        return response


def _answer(what: str, response: aiohttp.ClientResponse, body: bytes) -> Answer:
    date: datetime | None = None
    with contextlib.suppress(TypeError, ValueError):
        date = email.utils.parsedate_to_datetime(response.headers.get("Date", ""))
    wait_s = 0.0
    with contextlib.suppress(ValueError):
        wait_s = min(_WAIT_MAX_S, max(0.0, float(response.headers.get("Retry-After", "0"))))
    return Answer(what=what, status=response.status, body=body, date=date, wait_s=wait_s)
