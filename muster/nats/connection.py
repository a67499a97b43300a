"""Adapter for NATS: one connection that recovers from every outage.

A lost server is redialled with jitter. A client that nats-py closed permanently (as it does after
most `-ERR`) is replaced, and subscriptions are restored. Errors are counted by kind; an outage is
logged once when it begins and once when it ends; refusals and dropped messages are always logged.
"""

import asyncio
import contextlib
import random
import re
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, Self

import nats.aio.client
import nats.aio.msg
import nats.errors
import prometheus_client

from muster import codec, pacing
from muster.nats import compat, credentials
from muster.nats.auth import permissions
from muster.service import logs, metrics, runtime

Message = nats.aio.msg.Msg
Handler = Callable[[Message], Awaitable[None]]
Prepare = Callable[[nats.aio.client.Client], Awaitable[None]]
Make = Callable[[], nats.aio.client.Client]

LOST: Final = compat.LOST
"""The errors that nats-py raises when a server is unreachable or slow, or refuses a request."""
BACKOFF: Final = pacing.Backoff(first_s=0.05, max_s=5.0, jitter=0.5)
"""How long to wait before a failed request to NATS is repeated."""

_REDIAL_WAIT_S: Final = (0.1, 0.5)
_CLIENT_TIMEOUT_S: Final = 2
_CHECK_S: Final = 5.0
_IDLE_CHECKS_MAX: Final = 2
_PREPARE_S: Final = 60.0
_PING_S: Final = 5
_PINGS_MAX: Final = 2
_PENDING_MESSAGES_MAX: Final = 100_000
_PENDING_BYTES_MAX: Final = 64 * 1024 * 1024

PUBLISHED: Final = metrics.counter(
    "muster_bus_published_total",
    "Messages published to NATS, by outcome.",
    "outcome",
    (
        *("stored", "repeat", "retried", "refused", "id_taken", "no_longer_leader", "dropped"),
        *("shortened", "oversized", "invalid", "heartbeat", "heartbeat_skipped"),
    ),
)
RECEIVED: Final = metrics.counter(
    "muster_bus_received_total",
    "Messages received from NATS, by outcome.",
    "outcome",
    (
        *("event", "heartbeat", "heartbeat_skipped"),
        *(f"malformed_{reason}" for reason in codec.MalformedReason),
    ),
)
_ERRORS = prometheus_client.Counter(
    "muster_bus_errors_total", "Errors nats-py reported, by kind.", ["kind"]
)
_CONNECTED = prometheus_client.Gauge("muster_bus_connected", "1 while connected to NATS.")
_CERTIFICATE_ENDS: Final = prometheus_client.Gauge(
    "muster_bus_certificate_ends_timestamp_seconds",
    "When the certificate of the connected NATS server expires; 0 without TLS.",
)


class Connection:
    """A connection to NATS that is kept open; entering the context never waits for the server.

    `url` is one address, or several addresses of a cluster separated by commas.

    `prepare` is called with every newly connected client before `client` returns it; `make` creates
    the clients.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str,
        prepare: Prepare | None = None,
        make: Make = compat.TolerantClient,
    ) -> None:
        self.epoch = 0
        """How many times the connection was established; 0 means never."""
        self.unread: weakref.WeakKeyDictionary[object, str] = weakref.WeakKeyDictionary()
        """The readers whose stream is currently unreadable, each with the reason."""
        self._url = url
        self._shown_url = re.sub(r"//[^/,]*@", "//", url)
        self._name = name
        self._prepare = prepare
        self._log = logs.logger()
        self._make = make
        self._client = make()
        self._connected = False
        self._attempts = 0
        """How many dials of new clients have failed; while it grows, a client is still trying."""
        self._outage_logged = False
        self._changed = asyncio.Condition()
        self._subscriptions: list[tuple[str, Handler]] = []
        self._subscribed = 0
        """How many of `_subscriptions` the current client already has."""
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Start connecting."""
        self._task = asyncio.create_task(self._stay_connected())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connection."""
        assert self._task is not None, "exited without being entered"
        self._outage_logged = True
        await runtime.end(self._task)
        await compat.close(self._client)

    @property
    def is_connected(self) -> bool:
        """Whether the current client is prepared and connected."""
        return self._connected and self._client.is_connected

    def problem(self) -> str | None:
        """Return why events may currently be missed; otherwise None."""
        if not self.is_connected:
            return "not connected to NATS"
        return next(iter(self.unread.values()), None)

    async def client(self) -> nats.aio.client.Client:
        """Return the client once it is connected."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.is_connected)
        return self._client

    def live_client(self) -> nats.aio.client.Client | None:
        """Return the client if it is connected now; otherwise None."""
        return self._client if self.is_connected else None

    async def changes(self) -> AsyncIterator[bool]:
        """Yield the current state, then every change: True if connected, False if disconnected.

        Each True after the first value means a new connection. A loss and a reconnect between two
        values become a single True.
        """
        last: tuple[bool, int] | None = None
        while True:
            async with self._changed:
                while (self._connected, self.epoch) == last:
                    await self._changed.wait()
                last = (self._connected, self.epoch)
            yield last[0]

    async def subscribe(self, subject: str, handler: Handler) -> None:
        """Call `handler` with each message, one after the other, across reconnects."""
        self._subscriptions.append((subject, handler))
        if self._client.is_connected:
            await self._subscribe_missing()

    async def probe_connect(self, name: str, timeout_s: float) -> bool:
        """Open and close a second connection with this client name; return whether it opened."""
        client = compat.TolerantClient()
        dial = _connect(
            client, self._url, name=name, allow_reconnect=False, error_cb=compat.ignore_error
        )
        try:
            return await runtime.attempt(dial, limit_s=timeout_s) is None
        finally:
            await compat.close(client)

    async def prepare(self, client: nats.aio.client.Client) -> None:
        """Call the `prepare` of the constructor, if there is one. Raises one of LOST."""
        if self._prepare is not None:
            await self._prepare(client)

    async def _stay_connected(self) -> None:
        """Dial forever, each time with a new client.

        nats-py runs in separate tasks, so its errors and waits cannot end or block this task.
        """
        retry = runtime.Retry(BACKOFF)
        while True:
            epoch = self.epoch
            if error := await self._one_client():
                await self._on_error(error)
            await self._set_connected(state=False)
            await compat.close(self._client)
            if self.epoch != epoch:
                retry.reset()
            await retry.wait()

    async def _one_client(self) -> BaseException | None:
        """Dial, and wait until the client must be replaced; return an unreported error, or None."""
        given_up = asyncio.Event()
        dial = asyncio.create_task(self._dial(given_up))

        def on_dialled(dial: asyncio.Task[None]) -> None:
            if runtime.failure(dial) is not None:
                given_up.set()

        dial.add_done_callback(on_dialled)
        try:
            await self._until_given_up(given_up)
            return (
                runtime.failure(dial)
                if given_up.is_set()
                else TimeoutError("stopped reading or dialling")
            )
        finally:
            await runtime.end(dial)

    async def _until_given_up(self, given_up: asyncio.Event) -> None:
        """Wait until the client is closed, or has been idle for so long that it must be replaced.

        During the first dial, failed attempts count as activity. Later, an unexpected error ends
        nats-py's reconnection task without calling any callback (client.py,
        _attempt_reconnect, _close; 2.16).
        """
        idle = attempts = 0
        while not given_up.is_set() and idle < _IDLE_CHECKS_MAX:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_S):
                    await given_up.wait()
            if self._client.is_connected:
                is_idle = not compat.is_reading(self._client)
            else:
                is_idle = self._attempts == attempts
            idle, attempts = idle + 1 if is_idle else 0, self._attempts

    async def _dial(self, given_up: asyncio.Event) -> None:
        has_dialled = False

        async def on_closed() -> None:
            given_up.set()

        async def on_error(error: Exception) -> None:
            # nats-py would keep using the certificates that it began with; while it dials for the
            # first time, only an exception ends that (client.py, connect; 2.16)
            is_tls = type(error).__module__ == "ssl"
            if is_tls and not has_dialled:
                raise error
            self._attempts += not has_dialled
            if not has_dialled or compat.is_redialling(client):
                compat.drop_socket(client)
            await self._on_error(error)
            if is_tls:
                given_up.set()

        # a replaced client may still be closing; ignore it
        async def on_disconnected() -> None:
            if client is self._client:
                await self._set_connected(state=False)

        async def on_reconnected() -> None:
            if error := await runtime.attempt(self._use(client)):
                await self._on_error(error)
                given_up.set()

        compat.ignore_tls_eof()
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
            reconnect_time_wait=random.uniform(*_REDIAL_WAIT_S),  # noqa: S311
            drain_timeout=_CLIENT_TIMEOUT_S,
            ping_interval=_PING_S,
            max_outstanding_pings=_PINGS_MAX,
        )
        has_dialled = True
        await self._use(client)

    async def _subscribe_missing(self) -> None:
        """Add the subscriptions that the current client lacks, for example after an outage."""
        while self._subscribed < len(self._subscriptions):
            subject, handler = self._subscriptions[self._subscribed]
            self._subscribed += 1
            with contextlib.suppress(nats.errors.ConnectionClosedError):
                await self._client.subscribe(
                    subject,
                    cb=handler,
                    pending_msgs_limit=_PENDING_MESSAGES_MAX,
                    pending_bytes_limit=_PENDING_BYTES_MAX,
                )

    async def _use(self, client: nats.aio.client.Client) -> None:
        """Subscribe with a connected client, prepare its server, and make the client available.

        Every client is prepared, because its server may have lost its disk. Raises nats-py's Error
        if the client must be replaced.
        """
        if client is not self._client:
            # the client was replaced, but its dial could not be ended
            await compat.close(client)
            return
        error = await runtime.attempt(self._subscribe_missing(), limit_s=_PREPARE_S)
        if error is not None:
            raise nats.errors.Error(f"cannot subscribe: {error!r}") from error
        retry = runtime.Retry(BACKOFF)
        while client.is_connected:
            error = await runtime.attempt(self.prepare(client), limit_s=_PREPARE_S)
            if error is None:
                break
            await self._on_error(error)
            await retry.wait()
        if client.is_connected:
            _CERTIFICATE_ENDS.set(certificate_ends(client))
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
            self._log.info("bus_connected", url=self._shown_url, connections_total=self.epoch)
        else:
            self._log_outage("connection lost")

    def _log_outage(self, error: str) -> None:
        if not self._outage_logged:
            self._outage_logged = True
            self._log.warning("bus_disconnected", url=self._shown_url, error=error)

    async def _on_error(self, error: BaseException) -> None:
        kind = type(error).__name__
        _ERRORS.labels(kind).inc()
        text = str(error) or kind
        is_dropped = isinstance(error, nats.errors.SlowConsumerError)
        is_refused = "permissions violation" in text.lower()
        # any other error that is not LOST comes from a handler that failed
        if is_dropped or is_refused or not isinstance(error, LOST):
            self._log.error("bus_error", kind=kind, error=text)
        elif not self.is_connected:
            self._log_outage(text)


async def _connect(client: nats.aio.client.Client, url: str, **options: Any) -> None:
    """Connect a client with this process's credentials. Raises one of LOST."""
    if isinstance(client, compat.TolerantClient):
        client.api = permissions.api(credentials.user(url))
    await compat.connect(
        client,
        url.split(","),
        **credentials.options(url),
        connect_timeout=_CLIENT_TIMEOUT_S,
        # a publisher whose buffer is full must not wait forever for a replaced client
        flush_timeout=_CLIENT_TIMEOUT_S,
        **options,
    )


def certificate_ends(client: nats.aio.client.Client) -> float:
    """Return when the server's certificate expires, in Unix seconds; 0 without TLS.

    After that time clients cannot connect.
    """
    end = compat.certificate_end(client)
    if end is None:
        return 0.0
    # load OpenSSL only in a process that uses TLS, because it costs memory
    import ssl  # noqa: PLC0415

    return float(ssl.cert_time_to_seconds(end))
