"""Pure: Who may say and hear what on the bus: the subjects of each role.

A plugin speaks for one node, and never asks JetStream for anything: it only adds to a stream.
Nobody but who concludes may write what is concluded. Answers come to inboxes of one user's own.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Final

from muster.nats import streams

ACCOUNT: Final = "MUSTER"
PLUGINS: Final = "PLUGINS"
"""Plugins have an account of their own. JetStream sends its acknowledgement wherever a message asks
it to, with nobody's rights: within one account a plugin could have it written to any bucket."""
DURABLES: Final = ("notifier",)
OWN_INBOX: Final = "_INBOX.{{name()}}.>"
ANSWER_S: Final = 10
_USER: Final = re.compile(r"[A-Za-z0-9_-]{1,300}")
_NODE: Final = re.compile(r"[a-z0-9]([-a-z0-9_]{0,251}[a-z0-9])?")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What one user may do, and nothing else. What is denied is taken from what is allowed."""

    user: str
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    publish_denied: tuple[str, ...] = ()
    subscribe_denied: tuple[str, ...] = ()
    account: str = ACCOUNT
    answers: bool = False
    """Whether a request may be answered, once, wherever the answer is to go, within ANSWER_S."""


def inbox(user: str) -> str:
    """Return the prefix of the inboxes of a user: a token of its own behind `_INBOX`."""
    return f"_INBOX.{re.sub('[^A-Za-z0-9_-]', '_', user)}" if user else "_INBOX"


def plugin(node: str) -> Grant:
    """Return the rights of the plugins on one node, by its token (`vocabulary.node_token`).

    Raises ValueError for what is no token of a node.
    """
    if not _NODE.fullmatch(node):
        raise ValueError(f"{node!r} is no node's token")
    return _plugin(plugin_user(node), node)


def plugin_user(node: str) -> str:
    """Return the user that the plugins on one node are, by its token."""
    return f"plugin_{node}"


def any_plugin() -> Grant:
    """Return the rights of all plugins together, where they cannot be told from one another."""
    return _plugin("plugin", "*")


def each_plugin() -> Grant:
    """Return the rights of the plugins on the node that a user's tag `node` names.

    nats-server fills in `{{name()}}` and `{{tag(x)}}`, which have to be whole tokens
    (server/auth.go, processUserPermissionsTemplate; 2.15).
    """
    return dataclasses.replace(
        _plugin("plugin", "{{tag(node)}}"), subscribe=("muster.rpc.{{tag(node)}}.>", OWN_INBOX)
    )


def each_reader() -> Grant:
    """Return the rights of an outside tool, by whatever name."""
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
        subscribe=("muster.heartbeat.>", "muster.nats.>"),
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
    """Return the rights of an outside tool: to hear every event and beat, to say nothing."""
    return _grant(
        f"reader_{name}" if name else "reader",
        publish=tuple(
            right for one in (streams.EVENTS, streams.ALERTS) for right in _reads(one.name)
        ),
        publish_denied=tuple(
            right for one in (streams.EVENTS, streams.ALERTS) for right in _of_others(one, "")
        ),
        subscribe=("muster.heartbeat.>",),
    )


def admin() -> Grant:
    """Return the rights of who mends things by hand: everything in muster's account but one.

    Who listened to requests too would be taken for the plugin: one that is dead would be called
    slow, because NATS no longer said that nobody is there.
    """
    return Grant(user="admin", publish=(">",), subscribe=(">",), subscribe_denied=("muster.rpc.>",))


def central() -> tuple[Grant, ...]:
    """Return those of which there is one each."""
    return (health(), labeler(), notifier(), reader(""), admin())


def _plugin(user: str, node: str) -> Grant:
    return _grant(
        user,
        account=PLUGINS,
        publish=(f"muster.heartbeat.{node}.>", f"muster.event.{node}.>"),
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
        raise ValueError(f"{user!r} is no user: letters, digits, '-' and '_'")
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
    """Return what a look at a stream by a passing consumer takes; the server names those itself."""
    return (
        f"$JS.API.STREAM.INFO.{stream}",
        f"$JS.API.STREAM.MSG.GET.{stream}",
        f"$JS.API.CONSUMER.CREATE.{stream}",
        f"$JS.API.CONSUMER.MSG.NEXT.{stream}.*",
    )


def _of_others(stream: streams.Stream, own: str) -> tuple[str, ...]:
    """Return what would take messages from the durable consumers of the services."""
    return tuple(
        f"$JS.API.CONSUMER.MSG.NEXT.{stream.name}.{name}" for name in DURABLES if name != own
    )


def _writes(bucket: streams.Bucket) -> tuple[str, ...]:
    return (f"$KV.{bucket.name}.>",)


def _holds(lock: streams.Bucket) -> tuple[str, ...]:
    """Return what taking a lock and leaving it takes."""
    stream = f"KV_{lock.name}"
    return (
        *_writes(lock),
        f"$JS.API.STREAM.MSG.GET.{stream}",
        f"$JS.API.STREAM.PURGE.{stream}",
    )


def _keeps_streams() -> tuple[str, ...]:
    """Return what making and changing streams takes, and sweeping them; not removing them.

    One role alone has this: what a stream takes in, and how long it keeps it, is everything.
    """
    names = [one.name for one in streams.STREAMS] + [f"KV_{b.name}" for b in streams.BUCKETS]
    kept = [
        f"$JS.API.STREAM.{verb}.{name}" for name in names for verb in ("INFO", "CREATE", "UPDATE")
    ]
    swept = [
        f"$JS.API.CONSUMER.{verb}"
        for stream in (streams.EVENTS, streams.ALERTS)
        for verb in (f"LIST.{stream.name}", f"DELETE.{stream.name}.*")
    ]
    return (*kept, *swept)
