"""Pure: decides which nodes exceed their rate limits, and for how long they are refused.

nats-server reports how much each connection has sent. All connections of a node share two limits,
for messages and for bytes: each is a rate, with a reserve of that rate times `burst_s`.

| the node is | and | it becomes | the gates |
|---|---|---|---|
| free | sends within its rates | free | |
| free | exceeds a rate for longer than its reserve lasts | refused | disconnect and announce it |
| refused | has a connection | refused | disconnect it |
| refused | its penalty is over | free, with the reserve that it has regained | |
| free | another gate announces it | refused, until the later end | disconnect it |

Every penalty lasts only `refuse_s`: an attacker on the node has the same token as its plugin, which
must be admitted again soon after the flood. So a node's traffic after a penalty is limited by its
reserve, and by how often connections are read after the penalty (`is_watched`).

Every gate decides independently. Announcements between gates can arrive twice, late or never; if
they contain different ends for a node's penalty, the latest counts.

`now` is monotonic. Only nodes and connections that gates admitted are counted.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from muster_gate import config

_SERVER_GONE_S: Final = 60.0
_SERVERS_MAX: Final = 64
_NODES_MAX: Final = 20_000
_TOLERANCE_S: Final = 1.0
"""The tolerated delay of messages from other gates and from servers.

An announcement extends a known penalty only if the new end is later by more than this. A connection
counts as opened before its server's last report only if it is older by more than this.
"""


@dataclass(frozen=True, slots=True)
class Traffic:
    """A connection's total traffic, and for how long it has been (or was) open."""

    id: int
    node: str
    messages: int
    bytes: int
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalty:
    """The penalty of a node, which is refused for another `rest_s` seconds."""

    node: str
    rest_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A node exceeded a rate: its traffic within `seconds`, and the penalty."""

    node: str
    messages: int
    bytes: int
    seconds: float
    reason: str
    refused_s: float


@dataclass(frozen=True, slots=True)
class Decision:
    """The consequences of a report: connections to close on that server, and new violations."""

    disconnect: tuple[int, ...]
    violations: tuple[Violation, ...]


@dataclass(slots=True)
class _Node:
    """The state of a node: how much of its reserve is used, and until when it is refused."""

    updated_at: float
    since: float
    """When the node began to use its reserve."""
    used_messages: float = 0.0
    used_bytes: float = 0.0
    messages: int = 0
    bytes: int = 0
    """The bytes that the node has sent since `since`."""
    until: float = float("-inf")


class RateLimiter:
    """The state machine for all nodes; each server reports its own connections."""

    def __init__(self, rates: config.Rates) -> None:
        self._rates = rates
        self._nodes: dict[str, _Node] = {}
        """The nodes that are refused or have used part of their reserve; the oldest change first.
        """
        self._servers: dict[str, tuple[float, dict[int, Traffic]]] = {}
        """The open connections of each server, and when the server reported them."""

    def read(self, server: str, traffic: Iterable[Traffic], *, now: float) -> Decision:
        """Evaluate a server's report on all its connections; return the consequences."""
        since_s = self._since_s(server, now)
        read_at, known = self._servers.pop(server, (now, {}))
        others = {k: v for k, v in self._servers.items() if now - v[0] < _SERVER_GONE_S}
        if len(others) >= _SERVERS_MAX:
            return Decision((), ())
        reported = {connection.id: connection for connection in traffic}
        before = {id_: known.get(id_) or _opened(c, since_s) for id_, c in reported.items()}
        violations = [
            self._charge(c, before[c.id], since=read_at, now=now)
            for c in reported.values()
            if not self._is_quiet(c, before[c.id], now - read_at)
        ]
        refused = {c.id for c in reported.values() if self.refused_s(c.node, now) > 0}
        self._servers = {**others, server: (now, reported)}
        excess = self._excess(reported.values())
        self._forget(now)
        return Decision(
            disconnect=tuple(sorted(refused | excess)),
            violations=tuple(o for o in violations if o is not None),
        )

    def closed(self, server: str, traffic: Traffic, *, now: float) -> Violation | None:
        """Charge a closed connection's traffic since the last report; return any violation."""
        since_s = self._since_s(server, now)
        read_at, known = self._servers.get(server, (now, {}))
        before = known.pop(traffic.id, None) or _opened(traffic, since_s)
        return self._charge(traffic, before, since=read_at, now=now)

    def adopt(self, penalty: Penalty, *, now: float) -> None:
        """Apply a penalty that another gate announced."""
        rest_s = min(penalty.rest_s, self._rates.refuse_s)
        if rest_s <= 0:
            return
        node = self._node(penalty.node, now, read_at=now)
        if now + rest_s > node.until + _TOLERANCE_S:
            node.until = now + rest_s

    def connections(self) -> int:
        """Return the number of known open connections."""
        return sum(len(known) for _, known in self._servers.values())

    def refused_s(self, node: str, now: float) -> float:
        """Return for how much longer a node is refused; 0 if it is not refused."""
        known = self._nodes.get(node)
        return 0.0 if known is None else max(0.0, known.until - now)

    def is_watched(self, now: float) -> bool:
        """Return whether any node is refused, or was refused recently and may flood again."""
        return any(now - node.until < self._rates.burst_s for node in self._nodes.values())

    def penalties(self, now: float) -> Sequence[Penalty]:
        """Return the penalties that have not expired."""
        return [
            Penalty(node=name, rest_s=node.until - now)
            for name, node in self._nodes.items()
            if node.until > now
        ]

    def _since_s(self, server: str, now: float) -> float | None:
        """Return how long ago a server last reported; None if never."""
        held = self._servers.get(server)
        return None if held is None else now - held[0]

    def _is_quiet(self, new: Traffic, known: Traffic | None, since_s: float) -> bool:
        """Return whether a connection needs no charge.

        This is so if the node has its full reserve, and the connection sent at most its share of
        the node's rates.
        """
        if known is None or new.node in self._nodes:
            return False
        share_s = since_s / self._rates.connections
        return (
            new.messages - known.messages <= self._rates.messages_per_s * share_s
            and new.bytes - known.bytes <= self._rates.bytes_per_s * share_s
        )

    def _excess(self, reported: Collection[Traffic]) -> set[int]:
        """Return the excess connections of each node: the oldest, which are most likely stale."""
        counts = Counter(c.node for _, known in self._servers.values() for c in known.values())
        limit = self._rates.connections
        over = {node: count - limit for node, count in counts.items() if count > limit}
        excess: set[int] = set()
        for connection in sorted((c for c in reported if c.node in over), key=lambda c: -c.age_s):
            if over[connection.node] > 0:
                over[connection.node] -= 1
                excess.add(connection.id)
        return excess

    def _charge(
        self, new: Traffic, known: Traffic | None, *, since: float, now: float
    ) -> Violation | None:
        """Charge a node's reserve with a connection's new traffic; return a violation or None."""
        rates = self._rates
        messages, bytes_ = new.messages, new.bytes
        # a connection without an earlier report may have used the node's rates since it was opened
        covered_s = new.age_s
        if known is None:
            since = now - new.age_s
        else:
            messages, bytes_, covered_s = messages - known.messages, bytes_ - known.bytes, 0.0
        if messages <= 0 and bytes_ <= 0:
            return None
        node = self._node(new.node, now, read_at=now if known is None else since)
        if node.until > now:
            return None
        if not node.messages and not node.bytes:
            node.since = since
        node.messages += messages
        node.bytes += bytes_
        node.used_messages += max(0.0, messages - rates.messages_per_s * covered_s)
        node.used_bytes += max(0.0, bytes_ - rates.bytes_per_s * covered_s)
        if node.used_messages > rates.messages_per_s * rates.burst_s:
            reason = f"more than {rates.messages_per_s:g} messages a second"
        elif node.used_bytes > rates.bytes_per_s * rates.burst_s:
            reason = f"more than {rates.bytes_per_s:g} bytes a second"
        else:
            return None
        return self._penalize(new.node, node, reason, now)

    def _penalize(self, name: str, node: _Node, reason: str, now: float) -> Violation:
        rates = self._rates
        self._nodes[name] = _Node(
            updated_at=now,
            since=now,
            used_messages=min(node.used_messages, rates.messages_per_s * rates.burst_s),
            used_bytes=min(node.used_bytes, rates.bytes_per_s * rates.burst_s),
            until=now + rates.refuse_s,
        )
        return Violation(
            node=name,
            messages=node.messages,
            bytes=node.bytes,
            seconds=now - node.since,
            reason=reason,
            refused_s=rates.refuse_s,
        )

    def _node(self, name: str, now: float, *, read_at: float) -> _Node:
        """Return the state of a node, with its reserve refilled up to now.

        Traffic since `read_at` is not charged yet, and its exact time is unknown. So the reserve
        gains that period's allowance in full, even beyond its size, until the traffic is charged.
        """
        node = self._nodes.pop(name, None) or _Node(updated_at=read_at, since=now)
        if len(self._nodes) >= _NODES_MAX:
            del self._nodes[next(iter(self._nodes))]
        self._nodes[name] = node
        if now > node.updated_at:
            unread_s = min(now - read_at, now - node.updated_at)
            gained_s = now - node.updated_at - unread_s
            messages = max(0.0, node.used_messages - self._rates.messages_per_s * gained_s)
            bytes_ = max(0.0, node.used_bytes - self._rates.bytes_per_s * gained_s)
            if not messages and not bytes_:
                node.messages = node.bytes = 0
            node.used_messages = messages - self._rates.messages_per_s * unread_s
            node.used_bytes = bytes_ - self._rates.bytes_per_s * unread_s
            node.updated_at = now
        return node

    def _forget(self, now: float) -> None:
        """Remove the nodes that were neither refused nor charged within the last `burst_s`."""
        self._nodes = {
            name: node
            for name, node in self._nodes.items()
            if now - max(node.updated_at, node.until) < self._rates.burst_s
        }


def _opened(connection: Traffic, since_s: float | None) -> Traffic | None:
    """Return zero traffic for a connection opened after its server's last report, else None.

    All connections of a node share the allowance since then. If each connection had its own, a node
    with many short connections could send many times as much. An older connection is already
    closed: its closure was announced before the report that still lists it.
    """
    if since_s is None or connection.age_s > since_s + _TOLERANCE_S:
        return None
    return Traffic(connection.id, connection.node, 0, 0, 0.0)
