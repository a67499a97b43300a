"""Adapter for NATS: reads the traffic of plugins' connections; closes connections of noisy nodes.

Every gate reads the reports of all servers, even reports that another gate requested, and
`rate_limiter` decides. Closing a connection that is already closed has no effect, so several gates
may do so.
"""

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Final

import msgspec
import nats.aio.client
import prometheus_client

from muster import codec, vocabulary
from muster.nats import connection
from muster.nats.auth import permissions
from muster.service import logs
from muster_gate import config, rate_limiter

_PRODUCER: Final = "services/gate"
_NOBODY: Final = f"{permissions.inbox('gate')}.nobody"
_REQUEST: Final = msgspec.json.encode({"auth": True, "limit": 1_000_000})
_PENDING_BYTES_MAX: Final = 256 * 1024 * 1024
_PENALTIES_MAX: Final = 500
_ANNOUNCE_S: Final = 5.0
_CONNECTIONS_PER_S: Final = 5_000
"""The maximum number of connections read per second: 1,500 cost 0.6 % of a core."""
_JITTER: Final = 0.2
"""The share of a period that is random, so that gates seldom send requests at the same time."""
_WATCHED: Final = 4
"""The factor by which connections are read more often while a node is watched."""
_UNANSWERED_S: Final = 30.0
_UNANSWERED_WAIT_S: Final = 60.0
"""The pause between requests while no server answers."""

DISCONNECTED: Final = prometheus_client.Counter(
    "muster_gate_disconnected_total", "Connections that a server closed at the gate's request."
)
LIMITED: Final = prometheus_client.Counter(
    "muster_gate_nodes_limited_total", "Nodes refused because they exceeded a rate limit."
)
REFUSED: Final = prometheus_client.Gauge(
    "muster_gate_nodes_refused", "Nodes that are refused at present."
)
READ: Final = prometheus_client.Gauge(
    "muster_gate_connections_read_timestamp_seconds",
    "When a server last reported its connections.",
)


_Time = Annotated[datetime, msgspec.Meta(tz=True)]


class _Connection(msgspec.Struct, frozen=True):
    cid: int
    start: _Time
    in_msgs: int = 0
    in_bytes: int = 0
    authorized_user: str = ""
    tags: tuple[str, ...] = ()


class _Connections(msgspec.Struct, frozen=True):
    server_id: str
    now: _Time
    connections: tuple[_Connection, ...] = ()


class _Report(msgspec.Struct, frozen=True):
    """A server's report on its connections: nats-server server/monitor.go, Connz (2.15)."""

    data: _Connections


class _Server(msgspec.Struct, frozen=True):
    id: str


class _Client(msgspec.Struct, frozen=True):
    id: int
    start: _Time
    stop: _Time
    user: str = ""
    tags: tuple[str, ...] = ()


class _Sent(msgspec.Struct, frozen=True):
    msgs: int = 0
    bytes: int = 0


class _Closed(msgspec.Struct, frozen=True):
    """A server's report on a closed connection: server/events.go, DisconnectEventMsg (2.15)."""

    server: _Server
    client: _Client
    sent: _Sent


class _Penalty(msgspec.Struct, frozen=True):
    node: str
    rest_s: float


_REPORT: Final = msgspec.json.Decoder(_Report)
_CLOSED: Final = msgspec.json.Decoder(_Closed)
_PENALTIES: Final = msgspec.json.Decoder(tuple[_Penalty, ...])


class TrafficMonitor:
    """Uses the gate's own connection to measure the nodes' traffic and to enforce the limits."""

    def __init__(self, limiter: rate_limiter.RateLimiter, rates: config.Rates) -> None:
        self._limiter = limiter
        self._rates = rates
        self._client: nats.aio.client.Client | None = None
        self._instance = uuid.uuid4().hex[:16]
        self._sequence = 0
        self._announced_at = float("-inf")
        self._asked_at = float("-inf")
        """When this gate or another one last requested reports."""
        self._answered_at = float("-inf")
        self._is_answered = True

    async def subscribe(self, client: nats.aio.client.Client) -> None:
        """Subscribe on a new client; nats-py keeps subscriptions when it reconnects."""
        if client is self._client:
            return
        for subject, handler in (
            (permissions.TRAFFIC, self._read),
            (permissions.CLOSED, self._read_closed),
            (permissions.PENALTIES, self._adopt_penalties),
        ):
            await client.subscribe(subject, cb=handler, pending_bytes_limit=_PENDING_BYTES_MAX)
        self._client = client

    async def ask(self) -> None:
        """Request all servers' reports periodically, unless another gate has just done so."""
        self._answered_at = self._now()
        while True:
            wait_s = self._asked_at + self._period_s() - self._now()
            if wait_s > 0:
                await asyncio.sleep(wait_s * random.uniform(1, 1 + _JITTER))  # noqa: S311
                continue
            self._asked_at = self._now()
            await self._publish(permissions.CONNECTIONS, _REQUEST, reply=permissions.TRAFFIC)
            penalties = self._limiter.penalties(self._now())
            REFUSED.set(len(penalties))
            if penalties and self._now() - self._announced_at >= _ANNOUNCE_S:
                await self._announce(penalties)
            self._check_answers()

    def _period_s(self) -> float:
        if not self._is_answered:
            return _UNANSWERED_WAIT_S
        read_s = self._rates.read_s
        if self._limiter.is_watched(self._now()):
            read_s /= _WATCHED
        return max(read_s, self._limiter.connections() / _CONNECTIONS_PER_S)

    def _check_answers(self) -> None:
        """Log once if no server answers; the usual cause is outdated account settings."""
        if self._client is None or not self._client.is_connected:
            self._answered_at = self._now()
        elif self._is_answered and self._now() - self._answered_at > _UNANSWERED_S:
            self._is_answered = False
            logs.logger().error("connection_reports_missing", hint="run `muster auth accounts`")

    async def _read(self, message: connection.Message) -> None:
        try:
            report = _REPORT.decode(message.data).data
        except codec.UNREADABLE as error:
            logs.logger().error("connection_report_unreadable", error=str(error)[:200])
            return
        self._is_answered = True
        self._answered_at = self._asked_at = self._now()
        READ.set(time.time())
        traffic = [
            rate_limiter.Traffic(
                each.cid,
                node_of(each.authorized_user, each.tags),
                each.in_msgs,
                each.in_bytes,
                (report.now - each.start).total_seconds(),
            )
            for each in report.connections
        ]
        server = report.server_id
        decision = self._limiter.read(server, [t for t in traffic if t.node], now=self._now())
        for violation in decision.violations:
            await self._limit(violation)
        for number in decision.disconnect:
            DISCONNECTED.inc()
            request = msgspec.json.encode({"cid": number})
            # a server ignores a request without a reply subject
            await self._publish(f"{permissions.DISCONNECT}.{server}", request, reply=_NOBODY)

    async def _read_closed(self, message: connection.Message) -> None:
        try:
            event = _CLOSED.decode(message.data)
        except codec.UNREADABLE:
            return
        client, sent = event.client, event.sent
        if not (node := node_of(client.user, client.tags)):
            return
        open_s = (client.stop - client.start).total_seconds()
        traffic = rate_limiter.Traffic(client.id, node, sent.msgs, sent.bytes, open_s)
        violation = self._limiter.closed(event.server.id, traffic, now=self._now())
        if violation is not None:
            await self._limit(violation)

    async def _adopt_penalties(self, message: connection.Message) -> None:
        try:
            penalties = _PENALTIES.decode(message.data)
        except codec.UNREADABLE:
            return
        for each in penalties:
            penalty = rate_limiter.Penalty(node=each.node, rest_s=each.rest_s)
            self._limiter.adopt(penalty, now=self._now())

    async def _limit(self, violation: rate_limiter.Violation) -> None:
        """Log and publish that a node is refused, and announce it to the other gates."""
        LIMITED.inc()
        node = vocabulary.node_of(violation.node)
        logs.logger().warning(
            "node_limited",
            node=node,
            messages=violation.messages,
            bytes=violation.bytes,
            seconds=round(violation.seconds, 1),
            refused_s=violation.refused_s,
            reason=violation.reason,
        )
        await self._announce(self._limiter.penalties(self._now()))
        try:
            event = vocabulary.NodeLimited(
                node=node,
                at=datetime.now(UTC),
                messages=violation.messages,
                bytes=violation.bytes,
                seconds=violation.seconds,
                refused_s=violation.refused_s,
                reason=violation.reason,
            )
        except ValueError:
            # a token signed by hand, whose name is not a valid node name: limited, but not reported
            return
        self._sequence += 1
        payload = codec.encode(
            event,
            event_id=f"{self._instance}:{self._sequence}",
            producer=_PRODUCER,
            instance=self._instance,
            sequence=self._sequence,
            boot="",
        )
        await self._publish(event.subject, payload)

    async def _announce(self, penalties: Iterable[rate_limiter.Penalty]) -> None:
        """Announce penalties to the other gates, the longest first."""
        self._announced_at = self._now()
        longest = sorted(penalties, key=lambda penalty: -penalty.rest_s)[:_PENALTIES_MAX]
        listed = [_Penalty(each.node, each.rest_s) for each in longest]
        await self._publish(permissions.PENALTIES, msgspec.json.encode(listed))

    async def _publish(self, subject: str, payload: bytes, *, reply: str = "") -> None:
        """Publish a message; drop it while NATS is disconnected."""
        if self._client is not None and self._client.is_connected:
            with contextlib.suppress(*connection.LOST):
                await self._client.publish(subject, payload, reply=reply)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def node_of(user: str, tags: Iterable[str]) -> str:
    """Return the node whose plugin opened a connection, as nats-server verified it; "" if none.

    A user with credentials has tags, and may have any name; a user that a gate admitted has the
    name that the gate assigned, and no tags.
    """
    for tag in tags:
        if tag.startswith(permissions.node_tag("")):
            return tag.removeprefix(permissions.node_tag(""))
    prefix = permissions.plugin_user("")
    return user.removeprefix(prefix) if user.startswith(prefix) else ""
