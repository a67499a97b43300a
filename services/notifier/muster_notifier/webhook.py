"""Door to HTTP receivers: one POST on one connection, within a time; says what was answered.

The answer's head is read and its body is not: a receiver that talks slowly or for ever costs no
more than the timeout. The URL may hold a secret, so only its host is ever told.
"""

import asyncio
import base64
import contextlib
import ssl
import urllib.parse
from typing import Final

import muster
from muster_notifier import answers, message

_HEAD_BYTES_MAX: Final = 64 * 1024
_CONTINUE: Final = 100
_SUCCESS: Final = 200


class Webhook:
    """One URL that notifications are posted to."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """Raise ValueError if the URL names no host that can be, or no port."""
        split = urllib.parse.urlsplit(url)
        if not split.hostname:
            raise ValueError(f"{split.scheme}: a URL without a host")
        self._host = split.hostname
        self._tls = ssl.create_default_context() if split.scheme == "https" else None
        self._port = split.port or (443 if self._tls else 80)
        user, _, authority = split.netloc.rpartition("@")
        self._headers = [f"Host: {authority.encode('idna').decode()}"]
        if user:
            token = base64.b64encode(urllib.parse.unquote(user).encode()).decode()
            self._headers.append(f"Authorization: Basic {token}")
        path = urllib.parse.quote(split.path or "/", safe="/%:@!$&'()*+,;=~")
        query = urllib.parse.quote(split.query, safe="/?%:@!$&'()*+,;=~")
        self._target = f"{path}?{query}" if query else path
        self._timeout_s = timeout_s

    async def send(self, sent: message.Message) -> answers.Answer:
        """Post one message and return what became of it.

        A timeout leaves unknown whether it arrived: it is tried again under the same
        `Idempotency-Key`, by which a receiver can drop the repeat.
        """
        where = f"{self._host}:{self._port}"
        try:
            async with asyncio.timeout(self._timeout_s):
                status, headers = await self._exchange(sent)
        except TimeoutError:
            detail = f"{where}: no answer within {self._timeout_s:g} s"
        except asyncio.IncompleteReadError:
            detail = f"{where}: closed the connection without an answer"
        except OSError as error:
            detail = f"{where}: {error.strerror or error}"
        except (asyncio.LimitOverrunError, ValueError):
            detail = f"{where}: the answer is not HTTP"
        else:
            return answers.of_status(status, headers)
        return answers.Answer(kind=answers.Kind.TEMPORARY, detail=detail)

    async def _exchange(self, sent: message.Message) -> tuple[int, dict[str, str]]:
        reader, writer = await asyncio.open_connection(
            self._host, self._port, ssl=self._tls, limit=_HEAD_BYTES_MAX
        )
        try:
            writer.write(self._head(sent) + sent.body)
            # a receiver may refuse early and stop reading; its answer is there all the same
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            status = _CONTINUE
            while status < _SUCCESS:
                status, headers = _parse(await reader.readuntil(b"\r\n\r\n"))
            return status, headers
        finally:
            writer.transport.abort()

    def _head(self, sent: message.Message) -> bytes:
        lines = (
            f"POST {self._target} HTTP/1.1",
            *self._headers,
            f"User-Agent: muster-notifier/{muster.__version__}",
            f"Content-Type: {message.CONTENT_TYPE}; charset=utf-8",
            f"Content-Length: {len(sent.body)}",
            f"Idempotency-Key: {sent.key}",
            "Connection: close",
        )
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _parse(head: bytes) -> tuple[int, dict[str, str]]:
    """Return status and headers of an answer's head. Raises ValueError."""
    first, *rest = head.decode("latin-1").split("\r\n")
    version, _, status = first.partition(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(f"not HTTP: {first[:100]!r}")
    headers = {}
    for line in rest:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(status[:3]), headers
