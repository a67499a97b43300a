"""Door to the Kubernetes API: one request and its answer, one watch and its lines; in bytes.

Raw requests of `kubernetes.aio`: its generated models would cost more memory than everything else
here. What the API refuses is answered, not raised; every wait has an end.
"""

import asyncio
import contextlib
import email.utils
import pathlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
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

_TRY_AGAIN_S: Final = 0.1
_WAIT_MAX_S: Final = 60.0
_PASSING: Final = frozenset({0, 408, 429, 500, 502, 503, 504})
_TEXT_MAX: Final = 300
_LINE_BYTES_MAX: Final = 8 * 1024 * 1024

_REQUESTS: Final = prometheus_client.Counter(
    "muster_health_api_requests_total", "Requests to the Kubernetes API.", ["verb", "status"]
)


class NoCluster(Exception):
    """The settings lead to no Kubernetes API; the text says what was tried."""


class WatchRefused(Exception):
    """The API did not open a watch."""

    def __init__(self, answer: "Answer") -> None:
        super().__init__(answer.problem)
        self.answer = answer


class _Status(msgspec.Struct, frozen=True):
    message: str = ""


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
    def problem(self) -> str:
        """Say what was not done, in the API's own words; empty if it was."""
        if self.is_ok:
            return ""
        text = self.body[:_LINE_BYTES_MAX].decode("utf-8", "replace")
        if self.status:
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                text = msgspec.json.decode(self.body, type=_Status).message or text
        short = " ".join(text.split())[:_TEXT_MAX]
        return (
            f"{self.what}: HTTP {self.status} {short}" if self.status else f"{self.what}: {short}"
        )


async def find(*, kubeconfig: str | None, context: str | None) -> "Api":
    """Return the API of a kubeconfig, else of the cluster this runs in. Raises NoCluster."""
    configuration = Configuration()
    where = kubeconfig or "the cluster this runs in"
    try:
        if kubeconfig is not None:
            # the library prints a warning for a missing file, and complains of its content
            await asyncio.to_thread(pathlib.Path(kubeconfig).read_bytes)
            await load_kube_config(  # type: ignore[no-untyped-call]  # as the library has it
                config_file=kubeconfig, context=context, client_configuration=configuration
            )
        else:
            load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise NoCluster(f"kubernetes: {where}: {error.strerror or error}") from None
    except (ConfigException, ValueError, TypeError, yaml.YAMLError) as error:
        raise NoCluster(f"kubernetes: {where}: {' '.join(str(error).split())}") from None
    return Api(configuration)


class Api:
    """The API of one cluster; an async context manager."""

    def __init__(self, configuration: Configuration) -> None:
        self._api = ApiClient(configuration)
        self._told: tuple[datetime, float] | None = None
        """What its clock said, and when on ours."""

    def now(self) -> datetime | None:
        """Return what the API server's own clock says now, within a second; None if unheard."""
        if self._told is None:
            return None
        date, at = self._told
        return date + timedelta(seconds=asyncio.get_running_loop().time() - at)

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
        timeout_s: float,
    ) -> Answer:
        """Return the API's answer; what may pass is asked again while there is time."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        pause_s = _TRY_AGAIN_S
        answer = Answer(what=f"{verb} {path}", status=0, body=b"no answer")
        while True:
            left_s = deadline - asyncio.get_running_loop().time()
            if left_s <= 0:
                return answer
            answer = await self._once(verb, path, query or {}, body, timeout_s=left_s)
            wait_s = max(pause_s, answer.wait_s)
            if answer.status not in _PASSING or wait_s >= left_s:
                return answer
            await asyncio.sleep(wait_s)
            pause_s *= 2

    async def post(self, path: str, body: object, *, timeout_s: float) -> str:
        """Create an object; return what went wrong in words, or nothing."""
        return (await self.ask("POST", path, body=body, timeout_s=timeout_s)).problem

    async def watch(
        self, path: str, query: Mapping[str, str], *, idle_s: float
    ) -> AsyncGenerator[bytes, None]:
        """Give the lines of a watch until it ends. Raises WatchRefused, and what `LOST` names.

        A watch that says nothing for `idle_s`, no bookmark either, is lost: TimeoutError.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=idle_s, sock_read=idle_s)
        response = await self._send("GET", path, query, None, timeout)
        try:
            if response.status != HTTPStatus.OK:
                body = await response.content.read(64 * 1024)
                raise WatchRefused(_answer(f"watch {path}", response, body))
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
        *,
        timeout_s: float,
    ) -> Answer:
        what = f"{verb.lower()} {path}"
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            response = await self._send(verb, path, query, body, timeout)
            answer = _answer(what, response, await response.read())
            if answer.date is not None:
                self._told = answer.date, asyncio.get_running_loop().time()
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
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109  # aiohttp's own, of several parts
    ) -> aiohttp.ClientResponse:
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        request = await self._api.param_serialize(
            method=verb,
            resource_path=path,
            query_params=list(query.items()),
            header_params=headers,
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
