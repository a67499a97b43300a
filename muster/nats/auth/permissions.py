"""Pure: the permissions of each role on the bus; those of a plugin are limited to its node.

A plugin publishes only for its own node and under listed names; the number of subjects on which its
messages are stored is bounded. It makes no JetStream requests and only adds messages to streams.
Only the service that draws a conclusion, and admin, may publish it. Each user has its own inboxes.

`server_conf` writes permissions as nats-server's configuration for users with passwords, and
`accounts` as signed tokens.
"""

import dataclasses
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from muster.nats import streams

ACCOUNT: Final = "MUSTER"
PLUGINS: Final = "PLUGINS"
READERS: Final = "READERS"
LABELER: Final = "LABELER"
"""The accounts of plugins, outside tools and the labeler. JetStream sends acknowledgements and
answers to any reply subject without checking rights: in muster's account, these users could write
to any bucket and delete any stream.
"""
READING: Final = (READERS, LABELER)
"""The accounts that import requests to JetStream."""
API: Final = "$JS.API"
IMPORTED_API: Final = "$JS.muster.API"
"""The prefix of requests to JetStream in `READING`, as in a JetStream domain `muster`."""
MANY_ANSWERS: Final = ".CONSUMER.MSG.NEXT."
"""Part of the subject of requests that JetStream answers with several messages."""
LABELS: Final = "muster.label.>"
HEARTBEATS: Final = "muster.heartbeat.>"
"""READERS exports these as a service to MUSTER: nats-server does not export as a stream what an
account received through a service (server/client.go, processMsgResults; 2.15)."""
READER_PAYLOAD_MAX: Final = 16_384
READER_SUBSCRIPTIONS_MAX: Final = 20
"""Limits for each connection of a reader. A request for a consumer with thousands of filters would
block JetStream for many seconds."""
AUTH: Final = "AUTH"
"""The account of the gate, and of clients that it has not admitted yet."""
CALLOUT: Final = "$SYS.REQ.USER.AUTH"
"""The subject of requests about unknown clients (nats-server, server/auth_callout.go; 2.15)."""
CALLOUT_S: Final = 4
"""How long nats-server waits for the gate; clients wait for 2 s and then retry."""
CONNECTIONS: Final = "muster.gate.connections"
"""The subject of the gate's requests for the traffic of plugins' connections (CONNZ)."""
TRAFFIC: Final = "muster.gate.traffic"
"""The subject of the answers to these requests; every gate receives the answers to all gates."""
DISCONNECT: Final = "muster.gate.disconnect"
"""The subject of the gate's requests to close a connection (KICK); a server's id follows."""
CLOSED: Final = "muster.gate.closed"
"""The subject on which the gate receives the traffic of a plugin's closed connection."""
PENALTIES: Final = "muster.gate.penalties"
"""The subject on which gates announce refused nodes to each other."""
REPORTS: Final = ("muster.heartbeat.>", "muster.event.>", "muster.inventory.>")
"""The subjects that plugins publish to muster's account. Heartbeats are exported as a service
although there are no replies: for an imported stream, nats-server does not count delivered messages
and would ignore a subscription's message limit (server/client.go, addShadowSub; 2.15).
"""
LIMITED: Final = "muster.sys.*.node.limited"
"""The subject on which the gate announces a refused node in muster's account."""
RECEIVERS: Final = "muster.notification.*.receivers.configured"
"""The subject on which the notifier publishes its receivers."""
DURABLES: Final = ("notifier",)
OWN_INBOX: Final = "_INBOX.{{name()}}.>"
ANSWER_S: Final = 10
PLUGIN: Final = "device-plugin"
"""The name that the plugins of every node may use."""
PLUGIN_NAMES_MAX: Final = streams.PLUGINS_MAX
"""The maximum number of plugin names on one node."""
PLUGIN_PAYLOAD_MAX: Final = 65_536
PLUGIN_SUBSCRIPTIONS_MAX: Final = 16
"""Limits for each connection of a plugin; nats-server enforces them through the account."""
PLUGIN_EVENTS: Final = (
    "plugin.started",
    "plugin.registered",
    "plugin.deregistered",
    "plugin.stopping",
    "inventory.reported",
    "device.added",
    "device.removed",
    "device.health_changed",
    "device.condition_changed",
    "allocation.observed",
    "expectation.changed",
    "configuration.applied",
    "configuration.refused",
    "problem.changed",
    "plugin.observed",
)
"""The event types that any plugin may publish, as in `vocabulary`."""
FUSE_BROKER: Final = "fuse-broker"
FUSE_EVENTS: Final = ("fuse.mounted", "fuse.refused", "fuse.mount_changed", "fuse.aborted")
"""The event types that only the FUSE broker may publish: each permitted subject costs storage."""
_USER: Final = re.compile(r"[A-Za-z0-9_-]{1,300}")
_NODE: Final = re.compile(r"[a-z0-9]([-a-z0-9_]{0,251}[a-z0-9])?")
_PLUGIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The rights of a user; denied subjects are exceptions to allowed subjects."""

    user: str
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    publish_denied: tuple[str, ...] = ()
    subscribe_denied: tuple[str, ...] = ()
    account: str = ACCOUNT
    answers: bool = False
    """Whether the user may answer each request once, on any reply subject, within ANSWER_S."""


def inbox(user: str) -> str:
    """Return the inbox prefix of a user: `_INBOX.<user>`, or `_INBOX` if `user` is empty."""
    return f"_INBOX.{re.sub('[^A-Za-z0-9_-]', '_', user)}" if user else "_INBOX"


def plugin(node: str, names: Collection[str] = (PLUGIN,)) -> Grant:
    """Return the rights of the plugins on the node with this token (`vocabulary.node_token`).

    Raises ValueError for an invalid node token or plugin name.
    """
    if not _NODE.fullmatch(node):
        raise ValueError(f"{node!r} is not a node's token")
    return _plugin(plugin_user(node), node, check_names(names))


def plugin_user(node: str) -> str:
    """Return the user name of the plugins on the node with this token."""
    return f"plugin_{node}"


def node_tag(node: str) -> str:
    """Return the tag in the credentials of the plugins on the node with this token."""
    return f"node:{node}"


def check_names(names: Collection[str]) -> tuple[str, ...]:
    """Return the plugin names of a node. Raises ValueError if any of them is invalid."""
    if not 0 < len(names) <= PLUGIN_NAMES_MAX:
        raise ValueError(f"{len(names)} plugin names; expected 1 to {PLUGIN_NAMES_MAX}")
    for name in names:
        if not _PLUGIN.fullmatch(name):
            raise ValueError(f"{name!r} is not a plugin name: 1 to 63 of a-z, 0-9, and - inside")
    return tuple(names)


def each_plugin() -> Grant:
    """Return the rights of the plugins on the node that a user's tag `node` names.

    The tags `plugin` name additional plugins. nats-server fills in `{{name()}}` and
    `{{tag(x)}}`, which must be whole tokens, and drops subjects that a missing tag makes invalid
    (server/auth.go, processUserPermissionsTemplate; 2.15).
    """
    return dataclasses.replace(
        _plugin("plugin", "{{tag(node)}}", (PLUGIN, "{{tag(plugin)}}")),
        subscribe=("muster.rpc.{{tag(node)}}.>", OWN_INBOX),
    )


def each_reader() -> Grant:
    """Return the rights of an outside tool with any name."""
    return dataclasses.replace(reader(""), subscribe=("muster.heartbeat.>", OWN_INBOX))


def health() -> Grant:
    """Return the rights of health."""
    return _grant(
        "health",
        publish=(
            *("muster.verdict.>", "muster.alert.>", "muster.sys.>", "muster.rpc.>"),
            *_follows(),
            *_writes(streams.STATE),
            *_reads(f"KV_{streams.STATE.name}"),
            *_holds(streams.LEADER),
            *_keeps_streams(),
        ),
        publish_denied=(*_of_others(streams.EVENTS, ""), *_of_others(streams.INVENTORY, "")),
        subscribe=("muster.heartbeat.>", "muster.nats.>", "muster.sys.*.node.limited", RECEIVERS),
    )


def labeler() -> Grant:
    """Return the rights of the labeler."""
    return _grant(
        "labeler",
        account=LABELER,
        publish=(LABELS, *imported_requests(LABELER)),
        publish_denied=_of_durables(),
    )


def notifier() -> Grant:
    """Return the rights of the notifier."""
    outbox, letters = streams.OUTBOX.name, streams.DEAD_LETTERS.name
    return _grant(
        "notifier",
        publish=(
            *("muster.notification.>", "muster.outbox.>", "muster.dlq.>"),
            *_durable(streams.ALERTS, "notifier"),
            *_reads(streams.ALERTS.name),
            *_reads(letters),
            f"$JS.API.STREAM.PURGE.{letters}",
            *_writes(streams.LEDGER),
            *_holds(streams.TENURE),
            *_reads(f"KV_{streams.LEDGER.name}"),
            *_reads(f"KV_{streams.SILENCES.name}"),
            f"$JS.API.CONSUMER.CREATE.{outbox}.>",
            f"$JS.API.CONSUMER.DELETE.{outbox}.*",
            f"$JS.API.CONSUMER.MSG.NEXT.{outbox}.*",
            f"$JS.ACK.{outbox}.>",
            f"$JS.API.STREAM.MSG.GET.{outbox}",
            f"$JS.API.STREAM.INFO.{outbox}",
            f"$JS.API.STREAM.PURGE.{outbox}",
        ),
        publish_denied=_of_others(streams.ALERTS, "notifier"),
    )


def reader(name: str) -> Grant:
    """Return an outside tool's rights: to read heartbeats, silences and streams except OUTBOX."""
    return _grant(
        f"reader_{name}" if name else "reader",
        account=READERS,
        publish=imported_requests(READERS),
        publish_denied=_of_durables(),
        subscribe=(HEARTBEATS,),
    )


def api(user: str) -> str:
    """Return the prefix of a user's requests to JetStream."""
    is_reader = user == "reader" or user.startswith("reader_")
    return IMPORTED_API if is_reader or user == "labeler" else API


def imported_requests(account: str) -> tuple[str, ...]:
    """Return the JetStream requests that an account imports, as subjects of muster's account."""
    if account == LABELER:
        return _follows()
    letters = streams.DEAD_LETTERS.name
    return (
        *_follows(),
        *_reads(f"KV_{streams.SILENCES.name}"),
        *(f"{API}.STREAM.INFO.{letters}", f"{API}.STREAM.MSG.GET.{letters}"),
    )


def local_subject(request: str) -> str:
    """Return the subject of an imported request in the account that imports it."""
    return request.replace(API, IMPORTED_API, 1)


def console() -> Grant:
    """Return the rights of a console in which people may act: those of a reader, and more.

    It adds silences, puts dead letters back into the outbox, and publishes who did so.
    """
    return _grant(
        "console",
        publish=(
            *imported_requests(READERS),
            *_writes(streams.SILENCES),
            *("muster.outbox.>", "muster.audit.>"),
            f"$JS.API.STREAM.PURGE.{streams.DEAD_LETTERS.name}",
        ),
        publish_denied=_of_durables(),
        subscribe=("muster.heartbeat.>",),
    )


def admin() -> Grant:
    """Return the rights of an administrator: everything in muster's account, with one exception.

    An administrator may not subscribe to the requests to plugins: NATS would then not report a
    missing responder, and health would mistake a stopped plugin for a slow plugin.
    """
    return Grant(user="admin", publish=(">",), subscribe=(">",), subscribe_denied=("muster.rpc.>",))


def gate() -> Grant:
    """Return the rights of the gate: to answer servers, and to watch and close connections."""
    return _grant(
        "gate",
        account=AUTH,
        publish=(CONNECTIONS, f"{DISCONNECT}.*", PENALTIES, LIMITED),
        subscribe=(CALLOUT, TRAFFIC, CLOSED, PENALTIES),
        answers=True,
    )


def central() -> tuple[Grant, ...]:
    """Return the rights of the services and tools that have a single user."""
    return (health(), labeler(), notifier(), reader(""), console(), admin())


def _plugin(user: str, node: str, names: Sequence[str]) -> Grant:
    heartbeats = [f"muster.heartbeat.{node}.{name}" for name in names]
    events = [f"muster.event.{node}.{name}.{type_}" for name in names for type_ in PLUGIN_EVENTS]
    events += [f"muster.event.{node}.{FUSE_BROKER}.{type_}" for type_ in FUSE_EVENTS]
    # the inventory stream stores no more pages than one inventory may have
    inventories = [f"muster.inventory.{node}.{name}.*" for name in names]
    return _grant(
        user,
        account=PLUGINS,
        publish=(*heartbeats, *events, *inventories),
        subscribe=(f"muster.rpc.{node}.>",),
        answers=True,
    )


def _grant(
    user: str,
    *,
    publish: Iterable[str],
    subscribe: Sequence[str] = (),
    publish_denied: Iterable[str] = (),
    answers: bool = False,
    account: str = ACCOUNT,
) -> Grant:
    if not _USER.fullmatch(user):
        raise ValueError(f"{user!r} is not a user name: use only letters, digits, '-' and '_'")
    if account in READING:
        publish, publish_denied = (map(local_subject, each) for each in (publish, publish_denied))
    return Grant(
        user=user,
        publish=tuple(dict.fromkeys(publish)),
        subscribe=(*subscribe, f"{inbox(user)}.>"),
        publish_denied=tuple(publish_denied),
        account=account,
        answers=answers,
    )


def _durable(stream: streams.Stream, name: str) -> tuple[str, ...]:
    return (
        f"$JS.API.CONSUMER.CREATE.{stream.name}.{name}",
        f"$JS.API.CONSUMER.MSG.NEXT.{stream.name}.{name}",
        f"$JS.ACK.{stream.name}.{name}.>",
    )


def _reads(stream: str) -> tuple[str, ...]:
    """Return the rights to read a stream with an ephemeral consumer, which the server names."""
    return (
        f"{API}.STREAM.INFO.{stream}",
        f"{API}.STREAM.MSG.GET.{stream}",
        f"{API}.CONSUMER.CREATE.{stream}",
        f"{API}.CONSUMER.MSG.NEXT.{stream}.*",
    )


def _follows() -> tuple[str, ...]:
    return tuple(right for stream in streams.FOLLOWED for right in _reads(stream.name))


def _of_durables() -> tuple[str, ...]:
    return tuple(right for s in streams.FOLLOWED for right in _of_others(s, ""))


def _of_others(stream: streams.Stream, own: str) -> tuple[str, ...]:
    """Return the subjects that would pull messages from other services' durable consumers."""
    return tuple(
        f"{API}.CONSUMER.MSG.NEXT.{stream.name}.{name}" for name in DURABLES if name != own
    )


def _writes(bucket: streams.Bucket) -> tuple[str, ...]:
    return (f"$KV.{bucket.name}.>",)


def _holds(lock: streams.Bucket) -> tuple[str, ...]:
    """Return the rights to claim and release a lock."""
    stream = f"KV_{lock.name}"
    return (
        *_writes(lock),
        f"$JS.API.STREAM.MSG.GET.{stream}",
        f"$JS.API.STREAM.PURGE.{stream}",
    )


def _keeps_streams() -> tuple[str, ...]:
    """Return the rights to create and change streams, and to list and remove their consumers.

    Only one service has these rights: a stream's configuration determines which messages it accepts
    and how long it keeps them.
    """
    names = [s.name for s in streams.STREAMS] + [f"KV_{b.name}" for b in streams.BUCKETS]
    kept = [
        f"$JS.API.STREAM.{verb}.{name}" for name in names for verb in ("INFO", "CREATE", "UPDATE")
    ]
    swept = [
        f"$JS.API.CONSUMER.{verb}"
        for stream in streams.FOLLOWED
        for verb in (f"LIST.{stream.name}", f"DELETE.{stream.name}.*")
    ]
    return (*kept, *swept)
