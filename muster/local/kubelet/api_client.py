"""Adapter: the Kubernetes API over plain HTTP, as far as a kubelet needs it."""

import datetime as dt
from collections.abc import AsyncIterator, Mapping
from typing import Protocol

import aiohttp
import orjson

MERGE_PATCH = "application/merge-patch+json"
# Lists such as a node's conditions are merged by their key: others write there too.
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
_REQUEST_TIMEOUT_S = 10.0
_WATCH_TIMEOUT_S = 60
_BODY_BYTES_MAX = 4 * 1024 * 1024


class ApiAway(Exception):
    """The API did not answer, or not as it should; try again later."""


class Gone(Exception):
    """The version to watch from is too old: list again."""


class Log(Protocol):
    """Writes one line."""

    def __call__(self, event: str, **facts: object) -> None:
        """Write the event and its facts."""


class Api:
    """One API server; `url` without a trailing slash. Close it when done."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._session = aiohttp.ClientSession(
            read_bufsize=_BODY_BYTES_MAX, timeout=aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> tuple[int, object]:
        """Read an object or a list: HTTP status and body."""
        return await self._send("GET", path, params=params)

    async def post(self, path: str, body: object) -> tuple[int, object]:
        """Create an object."""
        return await self._send("POST", path, body=body)

    async def patch(self, path: str, body: object, *, kind: str) -> tuple[int, object]:
        """Change an object; `kind` is the patch's content type."""
        return await self._send("PATCH", path, body=body, kind=kind)

    async def delete(self, path: str, body: object) -> tuple[int, object]:
        """Delete an object."""
        return await self._send("DELETE", path, body=body)

    async def watch(self, path: str, params: Mapping[str, str]) -> AsyncIterator[object]:
        """Yield watch events until the server ends the watch; Gone on 410, ApiAway on trouble."""
        query = {**params, "watch": "1", "timeoutSeconds": str(_WATCH_TIMEOUT_S)}
        limit = aiohttp.ClientTimeout(total=_WATCH_TIMEOUT_S + _REQUEST_TIMEOUT_S)
        try:
            async with self._session.get(self._url + path, params=query, timeout=limit) as answer:
                if answer.status == 410:  # noqa: PLR2004 (HTTP's Gone)
                    raise Gone
                if answer.status >= 400:  # noqa: PLR2004 (HTTP's errors)
                    raise ApiAway(f"GET {path}: {answer.status}")
                async for line in answer.content:
                    if line.strip():
                        yield orjson.loads(line)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ApiAway(f"watch {path}: {error!r}") from error

    async def _send(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: object = None,
        kind: str = "application/json",
    ) -> tuple[int, object]:
        data = None if body is None else orjson.dumps(body)
        headers = {"Accept": "application/json"} | ({"Content-Type": kind} if data else {})
        try:
            async with self._session.request(
                method, self._url + path, params=params, data=data, headers=headers
            ) as answer:
                return answer.status, orjson.loads(await answer.read() or b"null")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ApiAway(f"{method} {path}: {error!r}") from error


def now(*, fraction: bool = False) -> str:
    """Write the present moment as the API does."""
    pattern = "%Y-%m-%dT%H:%M:%S.%fZ" if fraction else "%Y-%m-%dT%H:%M:%SZ"
    return dt.datetime.now(dt.UTC).strftime(pattern)
