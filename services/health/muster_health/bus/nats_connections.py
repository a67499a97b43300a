"""Adapter: receives nats-server's advisories about connecting and disconnecting clients.

An advisory names a client by its user and by a name that the client chose itself. A plugin's name
is `<plugin> <node>`; a user of that form takes precedence, because the server has checked it. If
the user belongs to one node's plugin, a client name with another node is ignored. The name of a
client that cannot be a plugin is ignored, too: otherwise, a client that has only read permission
could hide that a plugin's process has ended.

Whether advisories arrive depends on the server's configuration (docs/health.md), and nothing
indicates that a server sends none. Health therefore opens a test connection periodically, and
checks that it is reported. Advisories can be lost, so they only raise suspicions.
"""

import asyncio
import contextlib
import functools
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import prometheus_client

from muster import codec, vocabulary
from muster.nats.auth import permissions
from muster.service import logs, metrics
from muster_health.model import signals

_PREFIX: Final = "muster.nats."
CONNECT: Final = "muster.nats.connect"
DISCONNECT: Final = "muster.nats.disconnect"
_OF_SERVERS: Final = ("lameduck", "shutdown")
SUBJECTS: Final = f"{_PREFIX}>"
"""The subjects of advisories in muster's account; docs/health.md shows the configuration.

Because of the wildcard, no reader can forge advisories: a reader's consumers can push messages only
to a subject that has a subscription without a wildcard (nats-server, server/consumer.go; 2.15).
"""

_LEAF: Final = "Leafnode"
_TEXT_MAX: Final = 256
_NO_PLUGINS: Final = frozenset(grant.user for grant in permissions.central())
"""The users of services and tools, if users log in with passwords."""


class _Server(msgspec.Struct, frozen=True):
    id: str
    name: str = ""


class _Client(msgspec.Struct, frozen=True):
    """A client in an advisory: its `id` is unique on its server; it chooses its own `name`."""

    id: int
    name: str = ""
    user: str = ""
    kind: str = "Client"
    tags: tuple[str, ...] = ()
    """The tags in its credentials, if any; a client with credentials chooses its `user`."""
    acc: str = ""
    """The key of its account if accounts are signed, else the account's name."""
    name_tag: str = ""
    """The name of its account."""


class _Message(msgspec.Struct, frozen=True):
    """An advisory: nats-server server/events.go, ConnectEventMsg, DisconnectEventMsg (2.15)."""

    server: _Server
    client: _Client | None = None
    reason: str = ""


_DECODER: Final = msgspec.json.Decoder(_Message)

Advisory = signals.Connected | signals.Disconnected | signals.ServerEvent


@dataclass(frozen=True, slots=True)
class OtherClient:
    """An advisory about a client that is not a plugin; the client chose its `name` itself."""

    name: str
    is_connected: bool


class Unreadable(Exception):
    """The message is not a valid advisory."""


def decode(subject: str, payload: bytes) -> Advisory | OtherClient:
    """Return an advisory's content. Raises Unreadable."""
    kind, _, server = subject.removeprefix(_PREFIX).partition(".")
    if kind in _OF_SERVERS and server:
        return signals.ServerEvent(server=server[:_TEXT_MAX], what=kind)
    if subject not in {CONNECT, DISCONNECT}:
        raise Unreadable(f"{subject}: not the subject of an advisory")
    try:
        message = _DECODER.decode(payload)
    except codec.UNREADABLE as error:
        raise Unreadable(str(error)) from None
    if message.client is None:
        raise Unreadable(f"{subject}: no client")
    return _client_advisory(
        message.client,
        server=message.server.id,
        reason=message.reason,
        is_connected=subject == CONNECT,
    )


def _client_advisory(
    client: _Client, *, server: str, reason: str, is_connected: bool
) -> Advisory | OtherClient:
    if client.kind == _LEAF and not is_connected:
        # when a leaf server dies, its clients are not reported one by one
        return signals.ServerEvent(server=client.name[:_TEXT_MAX], what="leaf_lost")
    identity = _plugin_and_node((client.user, client.name))
    if identity is None or not _may_be_on(identity[1], client):
        return OtherClient(client.name[:_TEXT_MAX], is_connected)
    plugin, node = identity
    server = _interned(server[:_TEXT_MAX])
    if is_connected:
        return signals.Connected(node=node, plugin=plugin, server=server, client=client.id)
    return signals.Disconnected(
        node=node, plugin=plugin, server=server, client=client.id, reason=reason[:_TEXT_MAX]
    )


@functools.lru_cache(maxsize=64)
def _interned(server: str) -> str:
    """Return the same string for all clients of a server, instead of a copy for each."""
    return server


def _may_be_on(node: str, client: _Client) -> bool:
    """Return whether a client may be a plugin on this node; most clients are not tied to a node."""
    # where accounts are signed, plugins have their own account; elsewhere all clients may share one
    is_central = client.name_tag == permissions.ACCOUNT != client.acc
    if is_central or client.user in _NO_PLUGINS:
        return False
    token = vocabulary.node_token(node)
    bound = [tag for tag in client.tags if tag.startswith(permissions.node_tag(""))]
    if bound:
        return bound == [permissions.node_tag(token)]
    is_node_user = client.user.startswith(permissions.plugin_user(""))
    return not is_node_user or client.user == permissions.plugin_user(token)


def _plugin_and_node(names: Sequence[str]) -> tuple[str, str] | None:
    """Return plugin and node from the first name that belongs to a plugin; None if none does."""
    for name in names:
        plugin, _, node = name.partition(" ")
        try:
            msgspec.convert(plugin, vocabulary.PluginName)
            vocabulary.node_token(node)
        except (msgspec.ValidationError, ValueError):
            continue
        if node != vocabulary.FLEET:
            return plugin, node
    return None


_REPORTED_WITHIN_S: Final = 2.0
_CHECK_S: Final = 300.0
_RETRY_S: Final = 30.0

_ADVISORIES: Final = metrics.counter(
    "muster_health_advisories_total",
    "Advisories received from nats-server, by kind.",
    "kind",
    ("connected", "disconnected", "serverevent", "other", "unreadable"),
)
_FLOWING: Final = prometheus_client.Gauge(
    "muster_health_advisories_flowing",
    "1 while nats-server reports connections; otherwise, only missing heartbeats reveal a crash.",
)

Handler = Callable[[str, bytes], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Link:
    """The parts of the bus used here: `Bus.listen`, `Connection.probe_connect`, `.changes`."""

    listen: Callable[[str, Handler], Awaitable[None]]
    probe_connect: Callable[[str, float], Awaitable[bool]]
    changes: Callable[[], AsyncIterator[bool]]


class ConnectionMonitor:
    """Receives nats-server's advisories, and calls `put` with those about plugins and servers.

    `name` identifies this process.
    """

    def __init__(
        self, link: Link, put: Callable[[Advisory], Awaitable[None]], *, name: str
    ) -> None:
        self.is_flowing: bool | None = None
        """Whether advisories arrive; None if unknown (at the start or without NATS)."""
        self._link = link
        self._put = put
        self._name = name
        self._numbers = itertools.count(1)
        self._test_client = ""
        self._test_reported = asyncio.Event()

    @property
    def problem(self) -> str:
        """Why advisories do not arrive; empty if they arrive, or if that is unknown."""
        if self.is_flowing is not False:
            return ""
        return (
            "nats-server does not report connections, so only missing heartbeats reveal a crash; "
            "docs/health.md shows how to configure the account"
        )

    async def run(self) -> None:
        """Receive advisories forever."""
        await self._link.listen(SUBJECTS, self._receive)
        async with asyncio.TaskGroup() as tasks:
            checking: asyncio.Task[None] | None = None
            async for is_connected in self._link.changes():
                if checking is not None:
                    checking.cancel()
                self._set(flowing=None)
                if is_connected:
                    checking = tasks.create_task(self._check())

    async def _receive(self, subject: str, payload: bytes) -> None:
        try:
            advisory = decode(subject, payload)
        except Unreadable:
            _ADVISORIES.labels("unreadable").inc()
            return
        if not isinstance(advisory, OtherClient):
            _ADVISORIES.labels(type(advisory).__name__.lower()).inc()
            await self._put(advisory)
            return
        _ADVISORIES.labels("other").inc()
        if advisory.is_connected and advisory.name == self._test_client:
            self._test_reported.set()

    async def _check(self) -> None:
        """Check periodically whether NATS reports a test connection."""
        while True:
            self._test_reported.clear()
            self._test_client = f"{self._name} #{next(self._numbers)}"
            if await self._link.probe_connect(self._test_client, _REPORTED_WITHIN_S):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_REPORTED_WITHIN_S):
                        await self._test_reported.wait()
                self._set(flowing=self._test_reported.is_set())
            await asyncio.sleep(_CHECK_S if self.is_flowing else _RETRY_S)

    def _set(self, *, flowing: bool | None) -> None:
        was, self.is_flowing = self.is_flowing, flowing
        _FLOWING.set(bool(flowing))
        if flowing is False and was is not False:
            logs.logger().warning("nats_advisories_missing", problem=self.problem)
