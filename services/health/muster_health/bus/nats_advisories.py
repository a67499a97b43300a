"""Pure: decodes nats-server's advisories: plugins that connect or disconnect, servers that stop.

An advisory names a client by its user and by a name that the client chose itself. A plugin's name
is `<plugin> <node>`; a user of that form takes precedence, because the server has checked it. If
the user belongs to one node's plugin, a client name with another node is ignored.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from muster import codec, vocabulary
from muster.nats.auth import permissions
from muster_health.model import signals

_PREFIX: Final = "muster.nats."
CONNECT: Final = "muster.nats.connect"
DISCONNECT: Final = "muster.nats.disconnect"
LAMEDUCK: Final = "muster.nats.lameduck.*"
SHUTDOWN: Final = "muster.nats.shutdown.*"
SUBJECTS: Final = (CONNECT, DISCONNECT, LAMEDUCK, SHUTDOWN)
"""Where muster's account imports them to; docs/health.md has the server's configuration."""

_LEAF: Final = "Leafnode"
_TEXT_MAX: Final = 256


class _Server(msgspec.Struct, frozen=True):
    id: str
    name: str = ""


class _Client(msgspec.Struct, frozen=True):
    """A client in an advisory: its `id` is unique on its server; it chooses its own `name`."""

    id: int
    name: str = ""
    user: str = ""
    kind: str = "Client"


class _Message(msgspec.Struct, frozen=True):
    """An advisory: nats-server server/events.go, ConnectEventMsg, DisconnectEventMsg (2.15)."""

    server: _Server
    client: _Client | None = None
    reason: str = ""


_DECODER: Final = msgspec.json.Decoder(_Message)

Advisory = signals.Connected | signals.Disconnected | signals.ServerEvent


@dataclass(frozen=True, slots=True)
class OtherClient:
    """A client other than a plugin connected or disconnected; its name is its own claim."""

    name: str
    is_connected: bool


class Unreadable(Exception):
    """The message is not a valid advisory."""


def decode(subject: str, payload: bytes) -> Advisory | OtherClient:
    """Return what an advisory says. Raises Unreadable."""
    kind, _, server = subject.removeprefix(_PREFIX).partition(".")
    if server:
        return signals.ServerEvent(server=server[:_TEXT_MAX], what=kind)
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
        # the clients of a leaf that dies are not reported one by one
        return signals.ServerEvent(server=client.name[:_TEXT_MAX], what="leaf_lost")
    identity = _plugin_and_node((client.user, client.name))
    if identity is None or not _may_be_on(identity[1], client.user):
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
    """Return one string for all clients of a server, instead of a copy for each client."""
    return server


def _may_be_on(node: str, user: str) -> bool:
    """Return whether a user may be a plugin on this node; most users are not tied to a node."""
    is_node_user = user.startswith(permissions.plugin_user(""))
    return not is_node_user or user == permissions.plugin_user(vocabulary.node_token(node))


def _plugin_and_node(names: Sequence[str]) -> tuple[str, str] | None:
    """Return plugin and node from the first name that belongs to a plugin."""
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
