"""Adapter: NATS: one connection that heals for ever.

A lost server is redialled with jitter; a client that nats-py closed for good (it does so on most
`-ERR`) is replaced; subscriptions come back by themselves. Errors are counted by kind; an outage is
logged once when it begins and once when it ends; refusals and dropped messages are always logged.
"""

import asyncio
import contextlib
import logging
import random
import re
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Final, Self

import nats.aio.client
import nats.aio.msg
import nats.errors
import prometheus_client

from muster.nats import credentials
from muster.service import logs, runtime

Message = nats.aio.msg.Msg
Handler = Callable[[Message], Awaitable[None]]
Prepare = Callable[[nats.aio.client.Client], Awaitable[None]]
Make = Callable[[], nats.aio.client.Client]

LOST: Final = (OSError, TimeoutError, nats.errors.Error)
"""What nats-py raises when a server is away, slow or unwilling."""

_DIAL_WAIT_S: Final = (0.1, 0.5)
_CLIENT_TIMEOUT_S: Final = 2
_CANCEL_AGAIN_S: Final = 0.1
_LOOK_S: Final = 5.0
_LOOKS_AWAY_MAX: Final = 2
_PING_S: Final = 5
_PINGS_MAX: Final = 2
_PENDING_MESSAGES_MAX: Final = 100_000
_PENDING_BYTES_MAX: Final = 64 * 1024 * 1024

_ERRORS = prometheus_client.Counter(
    "muster_bus_errors_total", "Errors nats-py reported, by kind.", ["kind"]
)
_CONNECTED = prometheus_client.Gauge("muster_bus_connected", "1 while connected to NATS.")


class Backoff:
    """Delays in seconds: doubling from 0.05 to 5, with jitter, starting over after a success."""

    def __init__(self) -> None:
        self._next_s = 0.05

    async def wait(self) -> None:
        """Sleep for the next delay."""
        delay_s = self._next_s * random.uniform(0.5, 1.0)  # noqa: S311  # jitter, not a secret
        self._next_s = min(5.0, self._next_s * 2)
        await asyncio.sleep(delay_s)

    def reset(self) -> None:
        """Start over with the shortest delay."""
        self._next_s = 0.05


class Connection:
    """A connection that is there or will be; entering the context never waits for the server.

    `url` is one address, or several of a cluster with commas between.

    `prepare` is called with every newly connected client before anybody else may use it; `make`
    makes them.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str,
        prepare: Prepare | None = None,
        make: Make = nats.aio.client.Client,
    ) -> None:
        self.epoch = 0
        """How often we have connected; 0 is never."""
        self.unread: weakref.WeakKeyDictionary[object, str] = weakref.WeakKeyDictionary()
        """Who of our readers goes on being refused what it reads, and what the server says."""
        self._url = url
        self._shown_url = re.sub(r"//[^/,]*@", "//", url)
        self._name = name
        self._prepare = prepare
        self._log = logs.logger()
        self._make = make
        self._client = make()
        self._connected = False
        self._outage_logged = False
        self._changed = asyncio.Condition()
        self._subscriptions: list[tuple[str, Handler]] = []
        self._subscribed = 0
        """How many of these our present client has."""
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Start connecting."""
        self._task = asyncio.create_task(self._stay_connected())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Close the connection."""
        assert self._task is not None, "left without being entered"
        self._outage_logged = True
        # see runtime.end_if_cancelled
        while not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task], timeout=_CANCEL_AGAIN_S)
        await _close(self._client)

    @property
    def is_connected(self) -> bool:
        """Whether the server was there when we last looked."""
        return self._connected and self._client.is_connected

    def problem(self) -> str | None:
        """Return why not all is heard that should be, or None."""
        if not self.is_connected:
            return "not connected to NATS"
        return next(iter(self.unread.values()), None)

    async def client(self) -> nats.aio.client.Client:
        """Return the client once it is connected."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.is_connected)
        return self._client

    def live_client(self) -> nats.aio.client.Client | None:
        """Return the client if it is connected now."""
        return self._client if self.is_connected else None

    async def changes(self) -> AsyncIterator[bool]:
        """Give the present state, then every change: True connected, False lost.

        A loss and return that nobody looked at in between is given as one True: each True stands
        for a connection not seen before.
        """
        seen: tuple[bool, int] | None = None
        while True:
            async with self._changed:
                while (self._connected, self.epoch) == seen:
                    await self._changed.wait()
                seen = (self._connected, self.epoch)
            yield seen[0]

    async def subscribe(self, subject: str, handler: Handler) -> None:
        """Call `handler` with each message, one after the other, across reconnects."""
        self._subscriptions.append((subject, handler))
        if self._client.is_connected:
            await self._subscribe_missing()

    async def knock(self, name: str, timeout_s: float) -> bool:
        """Open a second connection under this name and close it; tell whether it opened."""
        client = nats.aio.client.Client()
        try:
            async with asyncio.timeout(timeout_s):
                await _connect(
                    client,
                    self._url,
                    name=name,
                    allow_reconnect=False,
                    error_cb=_overhear,
                    connect_timeout=_CLIENT_TIMEOUT_S,
                )
            runtime.end_if_cancelled()
        except LOST:
            return False
        finally:
            await _close(client)
        return True

    async def _stay_connected(self) -> None:
        backoff = Backoff()
        while True:
            closed = asyncio.Event()
            epoch = self.epoch
            try:
                await self._dial(closed)
                await self._until_given_up(closed)
            except LOST as error:
                await self._on_error(error)
            await self._set_connected(state=False)
            await _close(self._client)
            if self.epoch != epoch:
                backoff.reset()
            await backoff.wait()

    async def _until_given_up(self, closed: asyncio.Event) -> None:
        """Return when our client is closed, or has been away for so long that we dial ourselves.

        Where nats-py meets an error that it does not expect, its task ends and nobody is told
        (client.py, _attempt_reconnect, _close; 2.16).
        """
        looks = 0
        while not closed.is_set() and looks < _LOOKS_AWAY_MAX:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await closed.wait()
            looks = 0 if self._client.is_connected else looks + 1

    async def _dial(self, closed: asyncio.Event) -> None:
        has_dialled = False

        async def on_closed() -> None:
            closed.set()

        async def on_error(error: Exception) -> None:
            # nats-py would go on for ever with the certificates that it began with; where it dials
            # first, only raising ends that (nats-py client.py, connect; 2.16)
            distrusts = type(error).__module__ == "ssl"
            if distrusts and not has_dialled:
                raise error
            await self._on_error(error)
            if distrusts:
                closed.set()

        # one that was replaced may still be closing: what becomes of it is no news
        async def on_disconnected() -> None:
            if client is self._client:
                await self._set_connected(state=False)

        async def on_reconnected() -> None:
            if client is self._client:
                await self._subscribe_missing()
                await self._use(client)

        # nats-py's streams do not know that they speak TLS: each that ends is a line on stderr
        logging.getLogger("asyncio").addFilter(_is_no_end_of_tls)
        client = self._client = self._make()
        self._subscribed = 0
        await _connect(
            client,
            self._url,
            name=self._name,
            error_cb=on_error,
            closed_cb=on_closed,
            disconnected_cb=on_disconnected,
            reconnected_cb=on_reconnected,
            max_reconnect_attempts=-1,
            reconnect_time_wait=random.uniform(*_DIAL_WAIT_S),  # noqa: S311
            connect_timeout=_CLIENT_TIMEOUT_S,
            drain_timeout=_CLIENT_TIMEOUT_S,
            ping_interval=_PING_S,
            max_outstanding_pings=_PINGS_MAX,
        )
        has_dialled = True
        await self._subscribe_missing()
        await self._use(client)

    async def _subscribe_missing(self) -> None:
        """Give our client what it has not: all at first, then what was asked for in an outage."""
        while self._subscribed < len(self._subscriptions):
            subject, handler = self._subscriptions[self._subscribed]
            self._subscribed += 1
            await _subscribe(self._client, subject, handler)

    async def prepare(self, client: nats.aio.client.Client) -> None:
        """Do what `prepare` was given for, again. Raises one of LOST."""
        if self._prepare is not None:
            await self._prepare(client)

    async def _use(self, client: nats.aio.client.Client) -> None:
        """Hand a connected client to its users; a server that lost its disk is prepared again."""
        backoff = Backoff()
        while client.is_connected:
            try:
                await self.prepare(client)
                break
            except LOST as error:
                await self._on_error(error)
                await backoff.wait()
        if client.is_connected:
            _note_certificate(client)
            await self._set_connected(state=True)

    async def _set_connected(self, *, state: bool) -> None:
        if state == self._connected:
            return
        async with self._changed:
            self._connected = state
            self.epoch += state
            self._changed.notify_all()
        _CONNECTED.set(state)
        if state:
            self._outage_logged = False
            self._log.info("bus_connected", url=self._shown_url, connections=self.epoch)
        else:
            self._log_outage("lost")

    def _log_outage(self, error: str) -> None:
        if not self._outage_logged:
            self._outage_logged = True
            self._log.warning("bus_away", url=self._shown_url, error=error)

    async def _on_error(self, error: Exception) -> None:
        kind = type(error).__name__
        _ERRORS.labels(kind).inc()
        text = str(error) or kind
        dropped = isinstance(error, nats.errors.SlowConsumerError)
        refused = "permissions violation" in text.lower()
        # what else reaches us here is a handler of ours that failed
        if dropped or refused or not isinstance(error, LOST):
            self._log.error("bus_error", kind=kind, error=text)
        elif not self.is_connected:
            self._log_outage(text)


def _is_no_end_of_tls(record: logging.LogRecord) -> bool:
    return "eof_received() has no effect when using ssl" not in str(record.msg)


async def _overhear(_: Exception) -> None:
    """Leave it at that: whether it opened is all that is asked."""


async def _connect(client: nats.aio.client.Client, url: str, **options: Any) -> None:
    """Connect. Raises one of LOST, whatever it is that answers at that address."""
    try:
        # who publishes while too much waits is not to wait for ever for a client that was replaced
        await client.connect(
            url.split(","), **credentials.options(url), flush_timeout=_CLIENT_TIMEOUT_S, **options
        )
    except LOST:
        raise
    except Exception as error:
        # of lines that are no NATS, nats-py raises whatever its parser does
        raise nats.errors.Error(f"{type(error).__name__}: {error}") from error
    if not client.is_connected:
        # nats-py takes any line for an answer, such as a server's PING that came before it has
        # decided on us, and would neither connect nor try again (client.py,
        # _process_connect_init; 2.16)
        raise TimeoutError("NATS has not let us in")


async def _close(client: nats.aio.client.Client) -> None:
    """Close a client; nothing of it is left, whatever that meets."""
    client._error_cb = _overhear  # noqa: SLF001
    if not await _try_to_close(client):
        # nats-py calls itself closed and stops half-way where what was left to send cannot be sent
        # any more; then nothing is left (client.py, _close; 2.16)
        client._status = client.DISCONNECTED  # noqa: SLF001
        await _try_to_close(client)
    for subscription in client._subs.values():  # noqa: SLF001
        if subscription._wait_for_msgs_task is not None:  # noqa: SLF001
            subscription._wait_for_msgs_task.cancel()  # noqa: SLF001
    _abort(client)


async def _try_to_close(client: nats.aio.client.Client) -> bool:
    """Close a client, but not for ever; tell whether that came to an end."""
    try:
        async with asyncio.timeout(_CLIENT_TIMEOUT_S):
            await client.close()
    except asyncio.CancelledError:
        # it is that of a socket whose end somebody waited for, or our own
        runtime.end_if_cancelled()
    except (AssertionError, TimeoutError):
        # nats-py asserts that a client has dialled, which one with a bad address never did; and of
        # some sockets asyncio never says that they are closed (3.11)
        pass
    except LOST:
        return False
    return True


def _abort(client: nats.aio.client.Client) -> None:
    """Give up the socket, on which a close would wait for as long as the other side likes."""
    writer = getattr(client._transport, "_io_writer", None)  # noqa: SLF001
    if writer is not None:
        writer.transport.abort()


async def _subscribe(client: nats.aio.client.Client, subject: str, handler: Handler) -> None:
    with contextlib.suppress(nats.errors.ConnectionClosedError):
        await client.subscribe(
            subject,
            cb=handler,
            pending_msgs_limit=_PENDING_MESSAGES_MAX,
            pending_bytes_limit=_PENDING_BYTES_MAX,
        )


PUBLISHED: Final = prometheus_client.Counter(
    "muster_bus_published_total", "Messages given to NATS, by outcome.", ["outcome"]
)
RECEIVED: Final = prometheus_client.Counter(
    "muster_bus_received_total", "Messages taken from NATS, by outcome.", ["outcome"]
)


_CERTIFICATE_ENDS: Final = prometheus_client.Gauge(
    "muster_bus_certificate_ends_timestamp_seconds",
    "When the certificate of the NATS server ends to which we are connected; 0 without TLS.",
)


def _note_certificate(client: nats.aio.client.Client) -> None:
    """Read when the certificate of a connection ends."""
    # nats-py shows its socket nowhere (2.16)
    writer = getattr(client._transport, "_io_writer", None)  # noqa: SLF001
    shown = writer.get_extra_info("peercert") if writer else None
    ends = shown.get("notAfter") if shown else None
    if ends is None:
        _CERTIFICATE_ENDS.set(0)
        return
    # OpenSSL costs memory: only who speaks TLS has loaded it
    import ssl  # noqa: PLC0415

    _CERTIFICATE_ENDS.set(ssl.cert_time_to_seconds(ends))
