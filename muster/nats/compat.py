"""Adapter for nats-py: the only module that relies on the library's private parts.

Written for the nats-py version `KNOWN`; pyproject.toml allows no other minor version, and
tests/pure/test_bounds.py fails if the two disagree. Before raising the versions, reread in nats-py:
`aio/client.py` (`_close`, `_attempt_reconnect`, `_read_loop`, `_process_headers`, `_process_msg`),
`aio/subscription.py`, `aio/transport.py`, and `protocol/parser.py`.
"""

import asyncio
import contextlib
import logging
from typing import Any, Final

import nats.errors
import nats.js
from nats.aio.client import DEFAULT_BUFFER_SIZE, Client
from nats.aio.msg import Msg
from nats.protocol import parser

from muster.nats.auth import permissions
from muster.service import runtime

KNOWN: Final = "2.16"
LOST: Final = (OSError, TimeoutError, nats.errors.Error)
"""The errors that nats-py raises when a server is unreachable or slow, or refuses a request."""
READ_BYTES: Final = DEFAULT_BUFFER_SIZE
"""The size of nats-py's reads; after a full read there may be more data."""

_VERSION: Final = b"NATS/1.0"
_SHOWN_MAX: Final = 100
_CLOSE_TIMEOUT_S: Final = 2
_SHORT_REPLY: Final = 9
_TAKEN_AT_ONCE: Final = 20
_LOOKS: Final = 8
"""How many times during its timeout a waiting reader checks whether its client was closed."""


class TolerantClient(Client):
    """A client that continues to read after a malformed message.

    nats-server does not check headers and subjects. An error while nats-py decodes them would end
    its reading task, and nats-py would neither report that nor reconnect (`_read_loop`).
    """

    api = permissions.API
    """The prefix of requests to JetStream."""

    def jetstream(self, **options: Any) -> nats.js.JetStreamContext:
        """Return a context whose requests have the prefix `api`."""
        return super().jetstream(**{"prefix": self.api, **options})

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        with contextlib.suppress(UnicodeDecodeError, IndexError):
            if not headers or (headers.startswith(_VERSION) and headers.decode()):
                return await super()._process_headers(headers)
        await self._error_cb(MalformedMessage(f"nats: malformed headers {headers[:_SHOWN_MAX]!r}"))
        return None

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        try:
            await super()._process_msg(sid, _utf8(subject), _utf8(reply), data, headers)
        except Exception as error:  # noqa: BLE001  # the next message can still be read
            await self._error_cb(MalformedMessage(f"nats: {error!r}"))


class MalformedMessage(nats.errors.Error):
    """A message that nats-py cannot decode."""


def api(client: Client) -> str:
    """Return the prefix of a client's requests to JetStream."""
    return client.api if isinstance(client, TolerantClient) else permissions.API


class Parser(parser.Parser):
    """Replaces a client's parser, for which nats-py has no public interface."""

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self._client = client
        client._ps = self  # noqa: SLF001

    def has_unread(self) -> bool:
        """Return whether data has arrived that nats-py has not read yet."""
        reader = getattr(self._client._transport, "_io_reader", None)  # noqa: SLF001
        return bool(getattr(reader, "_buffer", b""))

    async def pause_reading(self, pause_s: float) -> None:
        """Pause reading the socket, so that arriving data does not wake the process."""
        writer = getattr(self._client._transport, "_io_writer", None)  # noqa: SLF001
        if pause_s > 0 and writer is not None:
            writer.transport.pause_reading()
            await asyncio.sleep(pause_s)
            writer.transport.resume_reading()


class Received:
    """The messages of a subscription whose callback is `put`.

    nats-py's `next_msg` takes five rounds of the event loop and 20 us for each message.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._messages: asyncio.Queue[Msg] = asyncio.Queue()
        self._taken = 0

    async def put(self, message: Msg) -> None:
        """Add a message."""
        self._messages.put_nowait(message)

    async def next(self, *, timeout_s: float) -> Msg:
        """Return the next message. Raises nats-py's TimeoutError or ConnectionClosedError."""
        self._taken += 1
        if self._taken % _TAKEN_AT_ONCE == 0:
            # let other tasks run too, however many messages have arrived
            await asyncio.sleep(0)
        if not self._messages.empty():
            return self._messages.get_nowait()
        for _ in range(_LOOKS):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s / _LOOKS):
                    return await self._messages.get()
            if self._client.is_closed:
                raise nats.errors.ConnectionClosedError
        raise nats.errors.TimeoutError


def _utf8(text: bytes) -> bytes:
    """Return the bytes with every invalid UTF-8 sequence replaced."""
    return text if text.isascii() else text.decode(errors="replace").encode()


def place(message: Msg) -> tuple[int, int]:
    """Return a message's position in its stream, and the number of messages still to be delivered.

    nats-py's `metadata` takes 7 us. The reply subject is `$JS.ACK.` with 7 tokens, or with 9 and a
    random token (NATS' ADR-15). Raises NotJSMessageError.
    """
    words = message.reply.split(".")
    last = len(words) - (1 if len(words) <= _SHORT_REPLY else 2)
    try:
        return int(words[last - 3]), int(words[last])
    except (ValueError, IndexError):
        raise nats.errors.NotJSMessageError from None


def certificate_end(client: Client) -> str | None:
    """Return when the server's certificate expires, in OpenSSL's format; None without TLS."""
    writer = getattr(client._transport, "_io_writer", None)  # noqa: SLF001
    certificate = writer.get_extra_info("peercert") if writer else None
    return certificate.get("notAfter") if certificate else None


def ignore_tls_eof() -> None:
    """Suppress the message that asyncio logs whenever a TLS connection of nats-py ends."""
    logging.getLogger("asyncio").addFilter(_is_no_tls_eof)


async def connect(client: Client, servers: list[str], **options: Any) -> None:
    """Connect a client. Raises one of LOST, even if the answer does not come from NATS."""
    try:
        await client.connect(servers, **options)
    except LOST:
        raise
    except Exception as error:
        # for input that is not NATS, nats-py may raise any error from its parser
        raise nats.errors.Error(f"{type(error).__name__}: {error}") from error
    if not client.is_connected:
        # nats-py takes any line for an answer, such as a PING that the server sent before it
        # accepted this client, and would then neither connect nor try again (_process_connect_init)
        raise TimeoutError("NATS has not accepted the connection")


async def send(client: Client, lines: bytes) -> None:
    """Send protocol lines, such as subscriptions that nats-py does not manage."""
    await client._send_command(lines)  # noqa: SLF001
    await client._flush_pending()  # noqa: SLF001


async def close(client: Client) -> None:
    """Close a client completely, even if nats-py fails while closing it."""
    client._error_cb = ignore_error  # noqa: SLF001
    if await runtime.attempt(client.close(), limit_s=_CLOSE_TIMEOUT_S) is not None:
        # nats-py marks the client as closed and stops half-way if the remaining data cannot be
        # sent, or the socket does not close; without a socket a second call gets past that (_close)
        drop_socket(client)
        client._status = client.DISCONNECTED  # noqa: SLF001
        await runtime.attempt(client.close(), limit_s=_CLOSE_TIMEOUT_S)
    for subscription in client._subs.values():  # noqa: SLF001
        if subscription._wait_for_msgs_task is not None:  # noqa: SLF001
            subscription._wait_for_msgs_task.cancel()  # noqa: SLF001
    abort(client)


def abort(client: Client) -> None:
    """Abort the socket, because closing it could wait for the peer without limit."""
    # TLS, then the socket below it: Python 3.11.2 cannot abort TLS that was closed twice, which
    # happens if nats-py closes a connection that the server has ended (sslproto.py)
    tls, bare = (getattr(client._transport, n, None) for n in ("_io_writer", "_bare_io_writer"))  # noqa: SLF001
    for writer in (tls, bare):
        if writer is not None:
            with contextlib.suppress(AttributeError):
                writer.transport.abort()
    if tls is not None and bare is not None and tls.transport is None:
        # the server ended the connection just when TLS began: asyncio then returns no transport
        # (start_tls), and a writer without one raises when it is deleted (StreamWriter.__del__)
        tls._transport = bare.transport  # noqa: SLF001


def drop_socket(client: Client) -> None:
    """Abort the socket of a failed dial, so that nats-py does not wait for its closure.

    After a failed TLS handshake, asyncio never reports that the socket is closed (3.11), and
    nats-py would wait for that without limit before it dials again (`connect`, `_close`). After a
    lost connection, nats-py would leave the socket open (`_attempt_reconnect`).
    """
    abort(client)
    client._transport = None  # noqa: SLF001


def is_redialling(client: Client) -> bool:
    """Return whether the current task is nats-py's reconnection task."""
    return asyncio.current_task() is client._reconnection_task  # noqa: SLF001


def is_reading(client: Client) -> bool:
    """Return whether a connected client's reading task runs; nats-py does not report its end."""
    task = client._reading_task  # noqa: SLF001
    return task is not None and not task.done()


async def ignore_error(_: Exception) -> None:
    """Ignore an error: the callback of a client whose errors do not matter."""


def _is_no_tls_eof(record: logging.LogRecord) -> bool:
    # nats-py's stream protocol does not know that it runs on TLS
    return "eof_received() has no effect when using ssl" not in str(record.msg)
