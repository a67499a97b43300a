"""Fuzz targets for answers of receivers over real sockets: HTTP, Slack's API, a mail relay."""

import asyncio
import functools
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from muster import vocabulary
from muster_notifier.config import receiver_settings
from muster_notifier.receivers import chat, endpoint, message, results, webhook
from muster_notifier.receivers import email as mail
from muster_notifier.routing import notifications
from tests.fuzz.target import split, target

_AT: Final = datetime(2026, 1, 2, tzinfo=UTC)
_TIMEOUT_S: Final = 2.0
_LOOPBACK: Final = receiver_settings.Reach.LOOPBACK
_ALERT: Final = vocabulary.AlertChanged(
    node="node-a",
    at=_AT,
    plugin="device-plugin",
    kind=vocabulary.AlertKind.STUCK,
    severity=vocabulary.Severity.CRITICAL,
    state=vocabulary.AlertState.FIRING,
    fingerprint="0123456789abcdef",
    summary="stuck",
    starts_at=_AT,
    evidence=(vocabulary.Evidence(source="probe", observed="no answer"),),
)
_NOTE: Final = notifications.create(
    after="",
    receiver="ops",
    group="g",
    labels={"kind": "stuck"},
    reason=vocabulary.NotificationReason.FIRST,
    firing=(_ALERT,),
    resolved=(),
    send_resolved=True,
    at=_AT,
)


class _Relay:
    """A server on this machine that answers every connection with the same bytes, then hangs up."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.answer = b""
        self._server = self.runner.run(self._start())
        self.port: int = self._server.sockets[0].getsockname()[1]

    async def _start(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(self.answer)
            await writer.drain()
            writer.write_eof()
            # a close with unread bytes would reset the connection, and so hide the answer
            async with asyncio.timeout(_TIMEOUT_S):
                while await reader.read(65_536):
                    pass
        except (OSError, TimeoutError):
            pass
        finally:
            writer.transport.abort()


@functools.cache
def _relay() -> _Relay:
    return _Relay()


def _endpoint() -> endpoint.Endpoint:
    url = f"http://127.0.0.1:{_relay().port}/x"
    return endpoint.Endpoint(url, timeout_s=_TIMEOUT_S, reach=_LOOPBACK)


def _slack() -> results.Send:
    return chat.SlackChannel(
        _endpoint(),
        token="t",
        channel="#ops",
        composer=message.PLAIN,
        pace_s=0.0,
    ).send


def _json() -> results.Send:
    def encode(*_: object) -> bytes:
        return b"{}"

    return endpoint.JsonReceiver(_endpoint(), message.PLAIN, encode).send


_WAYS: Final[dict[str, Callable[[], results.Send]]] = {
    "slack": _slack,
    "pagerduty": _json,
    "webhook": lambda: webhook.Webhook(_endpoint()).send,
}


def _http() -> Iterator[bytes]:
    ok = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
    for body in (b'{"ok":true,"ts":"1.2","channel":"C1"}', b'{"ok":false,"error":"ratelimited"}'):
        yield b"slack\n" + ok % (len(body), body)
    yield b'slack\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"ok"\r\n6\r\n:true}\r\n0\r\n\r\n'
    yield b"pagerduty\nHTTP/1.1 202 Accepted\r\nContent-Length: 2\r\n\r\n{}"
    yield b'pagerduty\nHTTP/1.1 429 Too Many\r\nRetry-After: 3\r\n\r\n{"message":"slow down"}'
    yield b"webhook\nHTTP/1.1 503 No\r\nRetry-After: Fri, 02 Jan 2026 00:01:00 GMT\r\nDate: Fri, 02 Jan 2026 00:00:00 GMT\r\n\r\n"
    yield b"webhook\nHTTP/1.1 302 Found\r\nLocation: https://u:p@elsewhere.example/secret\r\n\r\n"


@target(
    seeds=_http,
    words=(
        *(
            "HTTP/1.1 ",
            "HTTP/1.0 200",
            "Retry-After: ",
            "Content-Length: ",
            "Transfer-Encoding: chunked",
        ),
        *(
            "Content-Encoding: gzip",
            "\\x0d\\x0a\\x0d\\x0a",
            "Location: ",
            '"error":',
            '"ts":',
            "100 Continue",
        ),
    ),
)
def http_answers(data: bytes) -> None:
    """Check that any answer of an HTTP receiver gives a valid result with one short line."""
    make, answer = split(data, _WAYS)
    if make is None:
        return
    relay = _relay()
    relay.answer = answer
    _check(relay.runner.run(make()(_NOTE, {})))


def _check(result: Any) -> None:
    assert isinstance(result, results.Result)
    assert isinstance(result.outcome, results.Outcome)
    assert "\n" not in result.detail
    assert len(result.detail) < 2000
    assert result.retry_after_s is None or 0 <= result.retry_after_s <= 3600
    assert results.delay_s(1, result, chance=0.5) >= 0
    msgspec.json.encode(dict(result.data))


def _replies() -> Iterator[bytes]:
    yield b"220 hi\r\n250-mail\r\n250 SIZE 9\r\n250 ok\r\n250 ok\r\n354 go\r\n250 taken\r\n221 bye\r\n"
    yield b"220 hi\r\n250 mail\r\n250 ok\r\n451 later\r\n"
    yield b"554 no\r\n"
    yield b"220 hi\r\n502 no\r\n250 ok\r\n"


@target(
    seeds=_replies, words=("220 ", "250-", "250 ", "354 ", "451 ", "550 ", "421 ", "\\x0d\\x0a")
)
def smtp_replies(data: bytes) -> None:
    """Check that any replies of a mail relay give a valid result with one short line."""
    relay = _relay()
    relay.answer = data
    settings = receiver_settings.Email(
        host="127.0.0.1",
        port=relay.port,
        sender="a@example.com",
        to=("b@example.com", "c@example.com"),
        tls=receiver_settings.Tls.NONE,
        timeout_s=_TIMEOUT_S,
    )
    receiver = mail.Email(settings, password="", composer=message.PLAIN)
    _check(relay.runner.run(receiver.send(_NOTE, {})))


@target(
    seeds=lambda: iter((b"3\nFri, 02 Jan 2026 00:00:00 GMT", b"Fri, 02 Jan 2026 00:01:00 -0000\n")),
    words=("Mon, ", " Jan ", " GMT", " +0000", ":", "99999999999999"),
)
def retry_after(data: bytes) -> None:
    """Check that a receiver can delay the next attempt by at most an hour."""
    wait, _, date = data.decode("utf-8", "replace").partition("\n")
    for status in (200, 302, 429, 503, 999):
        headers = {"retry-after": wait, "date": date, "location": wait}
        _check(results.of_status(status, headers))
