"""Pure: What nats-server tells of connections, in our words: who came, who went, which server ends.

An advisory names its client by user and by a name that the client chose. A plugin's reads
`<plugin> <node>`; a user of that form is believed first, because the server has checked it. Where
the user says which node's plugin it is, nobody believes a name of another node.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from muster import vocabulary
from muster.nats.auth import permissions
from muster_health.model import signals

_PREFIX: Final = "muster.nats."
CONNECT: Final = "muster.nats.connect"
DISCONNECT: Final = "muster.nats.disconnect"
LAMEDUCK: Final = "muster.nats.lameduck.*"
SHUTDOWN: Final = "muster.nats.shutdown.*"
SUBJECTS: Final = (CONNECT, DISCONNECT, LAMEDUCK, SHUTDOWN)
"""Where the account of muster imports them to; docs/health.md has the server's configuration."""

_LEAF: Final = "Leafnode"
_TEXT_MAX: Final = 256


class _Server(msgspec.Struct, frozen=True):
    id: str
    name: str = ""


class _Client(msgspec.Struct, frozen=True):
    """`id` counts from 1 on each server; `name` is the client's choice, `user` is not."""

    id: int
    name: str = ""
    user: str = ""
    kind: str = "Client"


class _Advisory(msgspec.Struct, frozen=True):
    """nats-server server/events.go ConnectEventMsg, DisconnectEventMsg (2.15)."""

    server: _Server
    client: _Client | None = None
    reason: str = ""


_DECODER: Final = msgspec.json.Decoder(_Advisory)

Told = signals.Connected | signals.Disconnected | signals.ServerEvent


@dataclass(frozen=True, slots=True)
class Other:
    """A client that is no plugin, by the name it gave itself; it came, or (not `is_there`) went."""

    name: str
    is_there: bool


class Unreadable(Exception):
    """An advisory that is none."""


def decode(subject: str, payload: bytes) -> Told | Other:
    """Return what an advisory says. Raises Unreadable."""
    kind, _, server = subject.removeprefix(_PREFIX).partition(".")
    if server:
        return signals.ServerEvent(server=server[:_TEXT_MAX], what=kind)
    try:
        found = _DECODER.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Unreadable(str(error)) from None
    if found.client is None:
        raise Unreadable(f"{subject}: no client")
    is_there = subject == CONNECT
    if found.client.kind == _LEAF and not is_there:
        # a leaf that dies takes its clients along and is all that is told of them
        return signals.ServerEvent(server=found.client.name[:_TEXT_MAX], what="leaf_lost")
    who = _plugin((found.client.user, found.client.name))
    if who is None or not _may_be(who[1], found.client.user):
        return Other(found.client.name[:_TEXT_MAX], is_there)
    plugin, node = who
    server, client = _same(found.server.id[:_TEXT_MAX]), found.client.id
    if is_there:
        return signals.Connected(node=node, plugin=plugin, server=server, client=client)
    return signals.Disconnected(
        node=node, plugin=plugin, server=server, client=client, reason=found.reason[:_TEXT_MAX]
    )


@functools.lru_cache(maxsize=64)
def _same(server: str) -> str:
    """Return one string for all who are connected to a server, instead of one for each."""
    return server


def _may_be(node: str, user: str) -> bool:
    """Tell whether a user may be a plugin of this node; most users say nothing of nodes."""
    is_of_one = user.startswith(permissions.plugin_user(""))
    return not is_of_one or user == permissions.plugin_user(vocabulary.node_token(node))


def _plugin(names: Sequence[str]) -> tuple[str, str] | None:
    """Return (plugin, node) of the first name that is a plugin's."""
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
