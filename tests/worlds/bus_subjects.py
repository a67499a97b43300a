"""Subjects that a client might try to publish or subscribe to, for tests of permissions."""

import asyncio
import contextlib
import re
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import nats.aio.client
from hypothesis import strategies as st

from muster.nats import connection
from tests.worlds import nats_links

TYPES = (
    *("plugin.started", "plugin.registered", "plugin.deregistered", "plugin.stopping"),
    *("inventory.reported", "device.added", "device.removed", "device.health_changed"),
    *("device.condition_changed", "allocation.observed", "expectation.changed"),
    *("configuration.applied", "configuration.refused", "problem.changed"),
    "plugin.observed",
)
OF_BROKER = ("fuse.mounted", "fuse.refused", "fuse.mount_changed", "fuse.aborted")
OWN = (
    "muster.heartbeat.node-a.device-plugin",
    *(f"muster.event.node-a.device-plugin.{type_}" for type_ in TYPES),
    *(f"muster.event.node-a.fuse-broker.{type_}" for type_ in OF_BROKER),
)
RECEIVED = ("muster.rpc.node-a.", "_INBOX.plugin_node-a.")

_TOKENS = st.one_of(
    st.sampled_from(
        (  # noqa: SIM905
            "node-a node-b node-a_x _fleet device-plugin * > health critical muster heartbeat "
            "event inventory verdict alert label notification sys rpc cmd nats dlq outbox lease "
            "$JS API "
            "$KV $SYS ACK STREAM CONSUMER DELETE PURGE CREATE MSG NEXT GET INFO DIRECT REQ USER "
            "AUTH ACCOUNT CLAIMS UPDATE MUSTER_EVENTS MUSTER_ALERTS KV_muster_state muster_state "
            "muster_leader _INBOX _R_ {{tag(node)}} plugin_node-a plugin_node-b "
        ).split()
    ),
    st.from_regex(r"[a-zA-Z0-9_$-]{1,12}", fullmatch=True),
)
_KINDS = st.sampled_from(
    ["heartbeat", "event", "inventory", "rpc", "verdict", "alert", "sys", "lease", "cmd"]
)
SUBJECTS = st.one_of(
    st.lists(_TOKENS, min_size=1, max_size=6).map(".".join),
    st.sampled_from(OWN),
    st.tuples(_KINDS, _TOKENS, st.lists(_TOKENS, max_size=3)).map(
        lambda drawn: ".".join(["muster", drawn[0], drawn[1], *drawn[2]])
    ),
)
"""Subjects and filters, many of them similar to those in use."""

WRITES = [
    *("$KV.muster_state.node-a.device-plugin", "$KV.muster_leader.health", "$KV.muster_silences.a"),
    *("$JS.API.STREAM.DELETE.MUSTER_EVENTS", "$JS.API.STREAM.PURGE.MUSTER_EVENTS"),
    *("$JS.API.STREAM.UPDATE.MUSTER_EVENTS", "$JS.API.STREAM.CREATE.OTHER", "$JS.API.INFO"),
    *("$JS.API.CONSUMER.DELETE.MUSTER_EVENTS.health", "$JS.API.STREAM.MSG.DELETE.MUSTER_EVENTS"),
    *("$JS.API.CONSUMER.CREATE.MUSTER_EVENTS.health", "$JS.ACK.MUSTER_EVENTS.health.1.1.1.1.1"),
    *("$JS.API.CONSUMER.MSG.NEXT.MUSTER_ALERTS.notifier", "muster.nats.disconnect"),
    *("muster.verdict.node-a.device-plugin.x", "muster.alert.node-a.critical.x.y"),
]
"""Subjects that only the central services and administrators may publish."""


def may_publish(subject: str) -> bool:
    """Return whether a plugin on node-a may publish, independently of the configuration."""
    kind, _, page = subject.partition("muster.inventory.node-a.device-plugin.")
    return subject in OWN or (not kind and "." not in page and page != "")


def may_subscribe(subject: str) -> bool:
    """Return whether a plugin on node-a may subscribe, independently of the configuration."""
    return subject.startswith(RECEIVED)


def is_filter(subject: str) -> bool:
    """Return whether this is a valid filter for nats-server."""
    return ">" not in subject.split(".")[:-1]


class Client:
    """A plain client of nats-py, and the refusals that it received."""

    def __init__(self) -> None:
        self.raw = nats.aio.client.Client()
        self.refused: list[str] = []

    async def request(
        self, subject: str, payload: bytes, headers: dict[str, str] | None = None
    ) -> connection.Message:
        """Send a request; return the answer (the default timeout of nats-py is 0.5 s)."""
        return await self.raw.request(subject, payload, timeout=30, headers=headers)

    async def flush(self) -> None:
        """Wait until the server has received everything that was sent."""
        await nats_links.flushed(self.raw)

    async def note(self, error: Exception) -> None:
        """Remember a refusal."""
        self.refused.append(str(error).lower())


@contextlib.asynccontextmanager
async def client(url: str, **options: Any) -> AsyncIterator[Client]:
    """Connect without retries, and yield the client.

    The timeout is longer than the time that nats-server waits for the gate.
    """
    made = Client()
    options = {"error_cb": made.note, "allow_reconnect": False, "connect_timeout": 10, **options}
    try:
        await made.raw.connect(url, **options)
        if not made.raw.is_connected:
            # see connection._connect
            raise TimeoutError("not let in")
        yield made
    finally:
        await made.raw.close()


async def until(holds: Callable[[], bool], *, limit_s: float = 30) -> None:
    """Wait until a condition holds; other tasks of this event loop run meanwhile."""
    async with asyncio.timeout(limit_s):
        while not holds():
            await asyncio.sleep(0.001)


async def check_limits(
    connect: Callable[[], contextlib.AbstractAsyncContextManager[Client]],
) -> None:
    """Check that nats-server closes a plugin's connection that exceeds a limit, not one at it."""
    async with connect() as plugin:
        await plugin.raw.publish(OWN[0], b"x" * 65_536)
        await plugin.flush()
        await plugin.raw.publish(OWN[0], b"x" * 65_537)
        await until(lambda: plugin.raw.is_closed)
        assert "maximum payload" in str(plugin.raw.last_error).lower()
    async with connect() as plugin:
        for number in range(16):
            await plugin.raw.subscribe(f"muster.rpc.node-a.p.{number}")
        await plugin.flush()
        await plugin.raw.subscribe("muster.rpc.node-a.p.16")
        await until(lambda: plugin.raw.is_closed)
        assert "maximum subscriptions" in str(plugin.raw.last_error).lower()


async def check_publishing(subjects: Sequence[str], *, hearing: Client, plugin: Client) -> None:
    """Check to which of these subjects a plugin on node-a can publish.

    `hearing` is a client that may subscribe to everything.
    """
    received: list[str] = []
    mark = uuid.uuid4().bytes

    async def receive(message: connection.Message) -> None:
        if message.data == mark:
            received.append(message.subject)

    for everything in (">", "$SYS.>"):
        await hearing.raw.subscribe(everything, cb=receive)
    await hearing.flush()
    for subject in subjects:
        await plugin.raw.publish(subject, mark)
    await plugin.flush()
    await hearing.flush()
    await until(lambda: len(received) >= sum(map(may_publish, subjects)))
    assert received == [s for s in subjects if may_publish(s)]
    others = [s for s in subjects if not may_publish(s)]
    await until(lambda: len(plugin.refused) >= len(others))
    assert [
        f'publish to "{s.lower()}"' in r for s, r in zip(others, plugin.refused, strict=True)
    ] == [True] * len(others)


async def check_subscribing(subjects: Sequence[str], *, speaker: Client, plugin: Client) -> None:
    """Check to which of these subjects a plugin on node-a can subscribe.

    `speaker` is a client that may publish to everything.
    """
    received: list[str] = []
    # more would be too many subscriptions
    many = [s for s in subjects if may_subscribe(s)][12:]
    subjects = [s for s in subjects if s not in many]

    async def receive(message: connection.Message) -> None:
        received.append(message.subject)

    for subject in subjects:
        await plugin.raw.subscribe(subject, cb=receive)
    await plugin.flush()
    others = [s for s in subjects if not may_subscribe(s)]
    await until(lambda: len(plugin.refused) >= len(others))
    assert len(plugin.refused) == len(others)
    for subject in subjects:
        await speaker.raw.publish(re.sub(r"(?<=\.)[*>]", "x", subject), b"")
    for node in ("node-a", "node-b"):
        await speaker.raw.publish(f"muster.rpc.{node}.device-plugin.probe", b"")
        await speaker.raw.publish(f"muster.event.{node}.device-plugin.x", b"")
    await speaker.flush()
    await plugin.flush()
    assert [s for s in received if not may_subscribe(s)] == []


async def check_replies(*, hearing: Client, plugin: Client) -> None:
    """Check that acknowledgements of a plugin's events do not reach subjects forbidden to it.

    The plugin, on node-a, names such subjects as the reply subjects of its events. The stream of
    events must exist; `hearing` is a client that may subscribe to everything.
    """
    targets = [*WRITES, "muster.outbox.x.y", "_INBOX.health.x"]
    targets += [f"muster.{kind}.node-b.p.x" for kind in ("event", "heartbeat", "rpc")]
    received: list[str] = []

    async def receive(message: connection.Message) -> None:
        received.append(message.subject)

    await hearing.raw.subscribe(">", cb=receive)
    await hearing.flush()
    for target in targets:
        await plugin.raw.publish(
            "muster.event.node-a.device-plugin.device.added", b"{}", reply=target
        )
    # the last event is acknowledged last
    await plugin.raw.jetstream().publish("muster.event.node-a.device-plugin.device.added", b"{}")
    # nats-server itself refuses the subject of an acknowledgement as a reply subject
    stored = len(targets) + 1 - len(plugin.refused)
    assert len(plugin.refused) == sum(target.startswith("$JS.ACK.") for target in targets)
    await until(lambda: received.count("muster.event.node-a.device-plugin.device.added") == stored)
    await hearing.flush()
    assert [s for s in received if s in targets] == []
