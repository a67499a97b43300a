"""Pure: permissions on the bus: which subjects each role may publish and subscribe to.

A plugin publishes only for its own node, under listed names, on subjects that are enumerated, so
that their number is bounded; it makes no JetStream requests: it only adds to a stream.
Only the service that draws a conclusion may publish it. Each user has its own inboxes.

`accounts_conf` writes them as nats-server's configuration for users with passwords; the module
`accounts` writes the same rights as signed tokens.
"""

import dataclasses
import json
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from muster.nats import streams

ACCOUNT: Final = "MUSTER"
PLUGINS: Final = "PLUGINS"
"""Plugins have an account of their own. JetStream sends its acknowledgement to any subject that a
message names, without checking rights: within one account a plugin could write to any bucket."""
AUTH: Final = "AUTH"
"""The account of the gate, and of clients that it has not admitted yet."""
CALLOUT: Final = "$SYS.REQ.USER.AUTH"
"""The subject on which nats-server asks about unknown clients (server/auth_callout.go; 2.15)."""
CONNECTIONS: Final = "muster.gate.connections"
"""Where the gate asks each server what the connections of plugins have sent (CONNZ)."""
TRAFFIC: Final = "muster.gate.traffic"
"""Where all gates receive what servers answer to any of them."""
DISCONNECT: Final = "muster.gate.disconnect"
"""Where the gate has a server close a connection; the next token is the server (KICK)."""
CLOSED: Final = "muster.gate.closed"
"""Where the gate receives what a closed connection of a plugin had sent."""
PENALTIES: Final = "muster.gate.penalties"
"""Where gates announce to each other which nodes they refuse."""
LIMITED: Final = "muster.sys.*.node.limited"
"""Where the gate says in muster's account which node it refuses."""
DURABLES: Final = ("notifier",)
OWN_INBOX: Final = "_INBOX.{{name()}}.>"
ANSWER_S: Final = 10
PLUGIN: Final = "device-plugin"
"""The name that the plugins of every node may use."""
PLUGIN_NAMES_MAX: Final = 8
"""How many names the plugins of one node may use."""
PLUGIN_PAYLOAD_MAX: Final = 65_536
PLUGIN_SUBSCRIPTIONS_MAX: Final = 16
"""Limits of each connection of a plugin; nats-server enforces them by the account."""
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
)
"""The types of the events that plugins publish, as in `vocabulary`."""
_USER: Final = re.compile(r"[A-Za-z0-9_-]{1,300}")
_NODE: Final = re.compile(r"[a-z0-9]([-a-z0-9_]{0,251}[a-z0-9])?")
_PLUGIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The rights of a user; denied subjects are exceptions to the allowed ones."""

    user: str
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    publish_denied: tuple[str, ...] = ()
    subscribe_denied: tuple[str, ...] = ()
    account: str = ACCOUNT
    answers: bool = False
    """Whether the user may answer a request once, on any reply subject, within ANSWER_S."""


def inbox(user: str) -> str:
    """Return the inbox prefix of a user: `_INBOX` and a token of its own."""
    return f"_INBOX.{re.sub('[^A-Za-z0-9_-]', '_', user)}" if user else "_INBOX"


def plugin(node: str, names: Collection[str] = (PLUGIN,)) -> Grant:
    """Return the rights of the plugins on one node, by its token (`vocabulary.node_token`).

    Raises ValueError for anything that is not the token of a node, or not a name of a plugin.
    """
    if not _NODE.fullmatch(node):
        raise ValueError(f"{node!r} is not the token of a node")
    return _plugin(plugin_user(node), node, check_names(names))


def plugin_user(node: str) -> str:
    """Return the user of the plugins on one node, by its token."""
    return f"plugin_{node}"


def check_names(names: Collection[str]) -> tuple[str, ...]:
    """Return the names that the plugins of a node may use. Raises ValueError."""
    if not 0 < len(names) <= PLUGIN_NAMES_MAX:
        raise ValueError(f"{len(names)} names of plugins; there may be 1 to {PLUGIN_NAMES_MAX}")
    for name in names:
        if not _PLUGIN.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a plugin: [a-z0-9-], 1 to 63 characters")
    return tuple(names)


def any_plugin() -> Grant:
    """Return the rights of all plugins together, for an installation where they share one user."""
    return _plugin("plugin", "*", (PLUGIN,))


def each_plugin() -> Grant:
    """Return the rights of the plugins on the node that a user's tag `node` names.

    The tags `plugin` are more names for them. nats-server fills in `{{name()}}` and `{{tag(x)}}`,
    which have to be whole tokens, and drops what a missing tag makes invalid
    (server/auth.go, processUserPermissionsTemplate; 2.15).
    """
    return dataclasses.replace(
        _plugin("plugin", "{{tag(node)}}", (PLUGIN, "{{tag(plugin)}}")),
        subscribe=("muster.rpc.{{tag(node)}}.>", OWN_INBOX),
    )


def each_reader() -> Grant:
    """Return the rights of an outside tool of any name."""
    return dataclasses.replace(reader(""), subscribe=("muster.heartbeat.>", OWN_INBOX))


def health() -> Grant:
    """Return the rights of health."""
    return _grant(
        "health",
        publish=(
            *("muster.verdict.>", "muster.alert.>", "muster.sys.>", "muster.rpc.>"),
            "$JS.API.INFO",
            *_reads(streams.EVENTS.name),
            *_reads(streams.ALERTS.name),
            *_writes(streams.STATE),
            *_reads(f"KV_{streams.STATE.name}"),
            *_holds(streams.LEADER),
            *_keeps_streams(),
        ),
        publish_denied=_of_others(streams.EVENTS, ""),
        subscribe=("muster.heartbeat.>", "muster.nats.>", "muster.sys.*.node.limited"),
    )


def labeler() -> Grant:
    """Return the rights of the labeler."""
    return _grant(
        "labeler",
        publish=(
            "muster.label.>",
            *_reads(streams.EVENTS.name),
            *_reads(streams.ALERTS.name),
        ),
        publish_denied=(*_of_others(streams.EVENTS, ""), *_of_others(streams.ALERTS, "")),
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
            *(f"$JS.API.DIRECT.GET.{letters}.>", f"$JS.API.STREAM.PURGE.{letters}"),
            *_writes(streams.LEDGER),
            *_holds(streams.TENURE),
            *_reads(f"KV_{streams.LEDGER.name}"),
            *_reads(f"KV_{streams.SILENCES.name}"),
            f"$JS.API.CONSUMER.CREATE.{outbox}.>",
            f"$JS.API.CONSUMER.DELETE.{outbox}.*",
            f"$JS.API.CONSUMER.MSG.NEXT.{outbox}.*",
            f"$JS.ACK.{outbox}.>",
            f"$JS.API.DIRECT.GET.{outbox}.>",
            f"$JS.API.STREAM.INFO.{outbox}",
            f"$JS.API.STREAM.PURGE.{outbox}",
        ),
        publish_denied=_of_others(streams.ALERTS, "notifier"),
    )


def reader(name: str) -> Grant:
    """Return the rights of an outside tool: to receive events and heartbeats, nothing else."""
    return _grant(
        f"reader_{name}" if name else "reader",
        publish=tuple(
            right for stream in (streams.EVENTS, streams.ALERTS) for right in _reads(stream.name)
        ),
        publish_denied=tuple(
            right for stream in (streams.EVENTS, streams.ALERTS) for right in _of_others(stream, "")
        ),
        subscribe=("muster.heartbeat.>",),
    )


def admin() -> Grant:
    """Return the rights of an administrator: everything in muster's account, with one exception.

    An administrator may not subscribe to a plugin's requests: NATS would then not report that there
    is no responder, and health would call a dead plugin slow.
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
    """Return the rights of the services and tools with a single user."""
    return (health(), labeler(), notifier(), reader(""), admin())


def _plugin(user: str, node: str, names: Sequence[str]) -> Grant:
    heartbeats = [f"muster.heartbeat.{node}.{name}" for name in names]
    events = [f"muster.event.{node}.{name}.{type_}" for name in names for type_ in PLUGIN_EVENTS]
    return _grant(
        user,
        account=PLUGINS,
        publish=(*heartbeats, *events),
        subscribe=(f"muster.rpc.{node}.>",),
        answers=True,
    )


def _grant(
    user: str,
    *,
    publish: Sequence[str],
    subscribe: Sequence[str] = (),
    publish_denied: Sequence[str] = (),
    answers: bool = False,
    account: str = ACCOUNT,
) -> Grant:
    if not _USER.fullmatch(user):
        raise ValueError(f"{user!r} is not a user name: letters, digits, '-' and '_'")
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
        f"$JS.API.STREAM.INFO.{stream}",
        f"$JS.API.STREAM.MSG.GET.{stream}",
        f"$JS.API.CONSUMER.CREATE.{stream}",
        f"$JS.API.CONSUMER.MSG.NEXT.{stream}.*",
    )


def _of_others(stream: streams.Stream, own: str) -> tuple[str, ...]:
    """Return the subjects that would take messages from other services' durable consumers."""
    return tuple(
        f"$JS.API.CONSUMER.MSG.NEXT.{stream.name}.{name}" for name in DURABLES if name != own
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
    """Return the rights to create, change and clean streams, but not to remove them.

    Only one role has this: the configuration of a stream decides what it accepts and for how long.
    """
    names = [s.name for s in streams.STREAMS] + [f"KV_{b.name}" for b in streams.BUCKETS]
    kept = [
        f"$JS.API.STREAM.{verb}.{name}" for name in names for verb in ("INFO", "CREATE", "UPDATE")
    ]
    swept = [
        f"$JS.API.CONSUMER.{verb}"
        for stream in (streams.EVENTS, streams.ALERTS)
        for verb in (f"LIST.{stream.name}", f"DELETE.{stream.name}.*")
    ]
    return (*kept, *swept)


EXPORTS: Final = """\
    exports: [
      {stream: "$SYS.ACCOUNT.*.CONNECT", account_token_position: 3}
      {stream: "$SYS.ACCOUNT.*.DISCONNECT", account_token_position: 3}
      {stream: "$SYS.SERVER.*.LAMEDUCK", accounts: [MUSTER]}
      {stream: "$SYS.SERVER.*.SHUTDOWN", accounts: [MUSTER]}
    ]
"""
"""The exports of the system account; each account gets only events about its own clients."""
IMPORTS: Final = """\
    imports: [
      {stream: {account: SYS, subject: "$SYS.ACCOUNT.MUSTER.CONNECT"}, to: muster.nats.connect}
      {stream: {account: SYS, subject: "$SYS.ACCOUNT.MUSTER.DISCONNECT"}
       to: muster.nats.disconnect}
      {stream: {account: SYS, subject: "$SYS.SERVER.*.LAMEDUCK"}, to: muster.nats.lameduck.*}
      {stream: {account: SYS, subject: "$SYS.SERVER.*.SHUTDOWN"}, to: muster.nats.shutdown.*}
    ]
"""
"""The subjects on which muster receives these exports."""
_PLUGINS_LIMITS: Final = f"""\
    # of each connection
    limits: {{max_payload: {PLUGIN_PAYLOAD_MAX}, max_subscriptions: {PLUGIN_SUBSCRIPTIONS_MAX}}}
"""
REPORTS: Final = ("muster.heartbeat.>", "muster.event.>")
"""What plugins publish to muster's account. Heartbeats are a service, too, although nobody answers:
for an imported stream, nats-server does not count what it delivers, and would ignore the number
after which a subscription ends (server/client.go, addShadowSub; 2.15)."""
_PLUGINS_SHARES: Final = """\
    exports: [
      {service: "muster.rpc.>", accounts: [MUSTER]}
    ]
    imports: [
      {service: {account: MUSTER, subject: "muster.heartbeat.>"}}
      {service: {account: MUSTER, subject: "muster.event.>"}}
    ]
"""
_TO_PLUGINS: Final = """\
    exports: [
      {service: "muster.heartbeat.>", accounts: [PLUGINS]}
      {service: "muster.event.>", accounts: [PLUGINS]}
    ]
"""
_MORE_EXPORTS: Final = """\
      {stream: "$SYS.ACCOUNT.PLUGINS.CONNECT", accounts: [MUSTER]}
      {stream: "$SYS.ACCOUNT.PLUGINS.DISCONNECT", accounts: [MUSTER]}
"""
_MORE_IMPORTS: Final = """\
      {stream: {account: SYS, subject: "$SYS.ACCOUNT.PLUGINS.CONNECT"}, to: muster.nats.connect}
      {stream: {account: SYS, subject: "$SYS.ACCOUNT.PLUGINS.DISCONNECT"}
       to: muster.nats.disconnect}
      {service: {account: PLUGINS, subject: "muster.rpc.>"}}
"""


def accounts_conf(grants: Iterable[Grant]) -> str:
    """Return the accounts for nats-server; each password is in the environment, see `variable`."""
    held = tuple(grants)
    return (
        "# made by scripts/manifests.py from muster/nats/auth/permissions.py\n"
        "system_account: SYS\naccounts {\n  SYS {\n"
        f"{_longer(EXPORTS, _MORE_EXPORTS)}  }}\n"
        f"  {PLUGINS} {{\n{_PLUGINS_LIMITS}{_users(PLUGINS, held)}{_PLUGINS_SHARES}  }}\n"
        f"  {ACCOUNT} {{\n    jetstream: enabled\n{_users(ACCOUNT, held)}"
        f"{_TO_PLUGINS}{_longer(IMPORTS, _MORE_IMPORTS)}  }}\n}}\n"
    )


def password_variable(user: str) -> str:
    """Return the environment variable that holds a user's password."""
    return f"NATS_PASSWORD_{re.sub('[^A-Z0-9]', '_', user.upper())}"


def _longer(block: str, lines: str) -> str:
    """Append lines to the list that a block contains."""
    return block.removesuffix("    ]\n") + lines + "    ]\n"


def _users(account: str, grants: Iterable[Grant]) -> str:
    users = "".join(_user(grant) for grant in grants if grant.account == account)
    return f"    users: [\n{users}    ]\n"


def _user(grant: Grant) -> str:
    who = f"user: {json.dumps(grant.user)}, password: ${password_variable(grant.user)}"
    lines = [f"      {{{who}, permissions: {{"]
    for verb, allowed, denied in (
        ("publish", grant.publish, grant.publish_denied),
        ("subscribe", grant.subscribe, grant.subscribe_denied),
    ):
        lines.append(f"        {verb}: {{")
        lines.append(_list("allow", allowed))
        if denied:
            lines.append(_list("deny", denied))
        lines.append("        }")
    if grant.answers:
        lines.append(f'        allow_responses: {{max: 1, expires: "{ANSWER_S}s"}}')
    lines.append("      }}")
    return "".join(f"{line}\n" for line in lines)


def _list(word: str, subjects: Iterable[str]) -> str:
    inside = "".join(f"            {json.dumps(subject)}\n" for subject in subjects)
    return f"          {word}: [\n{inside}          ]"
