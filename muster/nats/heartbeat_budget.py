"""Pure: limits how many heartbeats nats-server delivers per node, and detects noisy nodes.

Each known node has its own subscription, which nats-server ends after a number of messages (`UNSUB
<sid> <number>`). When half of these have been delivered, the subscription is renewed, but at most
once a period. So nats-server itself drops any excess, even while the reader is busy: a flood
neither delays others' heartbeats nor makes the reader a slow consumer. This works only for
subscriptions in the publisher's account or below a service import (see `auth.permissions`); if the
server delivers more nevertheless, the reader ends the subscription itself.

Unknown nodes are discovered by a subscription to all nodes, which has its own small budget. While
new nodes appear, and no single node uses most of that budget, this subscription is renewed
immediately; otherwise the intervals between renewals grow. A node that is not found in this way
becomes known through its events or the Kubernetes API.

Until a node's first subscription has delivered a heartbeat, those that the subscription to all
nodes delivers are read.

nats-server may lose a message that it delivers to a subscription that is just ending. So a node's
previous subscription ends some time after the new one has begun. Meanwhile a heartbeat may be
received twice; receivers recognise the duplicate by its number and ignore it.
"""

import itertools
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from muster import vocabulary

_ALL: Final = b"muster.heartbeat.*.*"
_FIRST_SID: Final = 1_000_000
"""The first subscription number, above the numbers that nats-py assigns."""
_NOISY_PERIODS: Final = 3
"""A node is noisy after it has exceeded its budget in this many consecutive periods."""
_DISCOVER_S: Final = 0.05
_DISCOVER_LONG_S: Final = 10.0
"""How long renewals may be immediate after a new node has appeared: twice the usual heartbeat
interval, so that every node has sent a heartbeat.
"""
_DISCOVER_BYTES_PER_S: Final = 8 * 1024 * 1024
"""The maximum rate of messages to all nodes: 10,000 heartbeats a second are less, but not a flood
from several nodes that share the budget.
"""
_QUIET_RENEWALS: Final = 4
"""Renewals per period while no new nodes appear, unless one node uses most of the budget."""
_SENDERS_MAX: Final = 8
_OVERLAP_S: Final = 0.2
"""How long a node's previous subscription continues after the new one has begun: far longer than a
busy server takes to deliver a message to the subscriptions that match it.
"""

Message = tuple[bytes, bytes, bytes]
"""A heartbeat's subject, its subscription's number, and its payload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Message limits per subscription: for a node, for all unknown nodes, for a noisy node.

    A node's subscription is renewed at most once in `period_s`. A message may have `message_bytes`:
    even `messages` plus `unknown_messages` of this size, which one node may send at once, are far
    below nats-server's `max_pending` (16 MB). If a server accepts larger messages, a node that
    sends them is limited to `noisy_messages`.
    """

    messages: int = 48
    unknown_messages: int = 96
    noisy_messages: int = 8
    message_bytes: int = 65_536
    period_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """A noisy node, how much was delivered to its subscription, and how long the budget lasted.

    `senders` are its plugins; empty for an unknown node, which shares its subscription with others.
    """

    node: str
    messages: int
    bytes: int
    seconds: float
    senders: tuple[str, ...]


@dataclass(slots=True, eq=False)
class _Subscription:
    """A subscription and its budget; `left` is negative if the server delivered too much."""

    subject: bytes
    node: str = ""
    sid: bytes = b""
    former: bytes = b""
    """The previous subscription, of which some messages may still be in flight."""
    messages_max: int = 0
    left: int = 0
    at: float = 0.0
    used_up_at: float = 0.0
    size: int = 0
    largest: int = 0
    periods_over: int = 0
    senders: dict[str, int] = field(default_factory=dict)
    """The messages after the first half of the budget, by plugin or, for unknown nodes, by node."""

    @property
    def is_new(self) -> bool:
        """Whether it has delivered nothing yet; nats-server may not even have received it."""
        return not self.former and self.left == self.messages_max


class HeartbeatBudget:
    """The subscriptions of one connection; bytes that its methods return must be sent."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._nodes: dict[str, _Subscription] = {}
        self._by_sid: dict[bytes, _Subscription] = {}
        self._low: dict[_Subscription, None] = {}
        self._ending: deque[tuple[float, bytes]] = deque()
        """The nodes' previous subscriptions, and when each must end."""
        self._sids = itertools.count(_FIRST_SID)
        # until something has been received, messages may be large
        self._all = _Subscription(_ALL, largest=limits.message_bytes + 1)
        self._unknown: set[str] = set()
        """Nodes without their own subscription that sent a heartbeat recently."""
        self._has_news = False
        self._discover_s = 0.0
        self._discover_until = 0.0

    @property
    def is_discovering(self) -> bool:
        """Whether the subscription to all nodes is renewed without pauses, to find new nodes."""
        return self._discover_s == 0.0

    def connect(self, now: float) -> bytes:
        """Return protocol lines that subscribe to all nodes and to each known node again."""
        self._by_sid.clear()
        self._low.clear()
        self._ending.clear()
        subscriptions = (self._all, *self._nodes.values())
        for subscription in subscriptions:
            subscription.sid = subscription.former = b""
        return b"".join(self._renewed(subscription, now) for subscription in subscriptions)

    def follow(self, nodes: Collection[str], now: float) -> bytes:
        """Return protocol lines that subscribe to these nodes and unsubscribe from all others."""
        lines = []
        for node in self._nodes.keys() - nodes:
            subscription = self._nodes.pop(node)
            self._low.pop(subscription, None)
            self._by_sid.pop(subscription.former, None)
            if self._by_sid.pop(subscription.sid, None) is not None:
                lines.append(b"UNSUB %b\r\n" % subscription.sid)
        lines += [self._subscribed(node, now) for node in set(nodes).difference(self._nodes)]
        return b"".join(lines)

    def follow_discovered(self, nodes: Collection[str], now: float) -> bytes:
        """Subscribe to those of `nodes` that were just discovered; faster than `follow`."""
        discovered = [node for node in self._unknown if node in nodes and node not in self._nodes]
        return b"".join(self._subscribed(node, now) for node in discovered)

    def _subscribed(self, node: str, now: float) -> bytes:
        """Return protocol lines that subscribe to another node; none if its name is malformed."""
        try:
            token = vocabulary.node_token(node)
        except ValueError:
            return b""
        subscription = self._nodes[node] = _Subscription(
            b"muster.heartbeat.%b.*" % token.encode(), node
        )
        self._has_news |= node in self._unknown
        return self._renewed(subscription, now)

    def admit(
        self, messages: Iterable[Message], now: float
    ) -> tuple[Sequence[tuple[bytes, bytes]], bytes]:
        """Return subject and payload of each message to read, and protocol lines to send.

        Of a noisy node, only the newest message on each subject is read.
        """
        kept: list[tuple[bytes, bytes]] = []
        newest: dict[bytes, bytes] = {}
        lines = []
        for subject, sid, payload in messages:
            subscription = self._by_sid.get(sid)
            if subscription is None:
                continue
            size = len(payload)
            subscription.left -= 1
            subscription.size += size
            subscription.largest = max(subscription.largest, size)
            if subscription.left <= subscription.messages_max // 2 and not self._used(
                subscription, subject, now
            ):
                if subscription.left == -1:
                    lines.append(b"UNSUB %b\r\n" % subscription.sid)
            elif subscription is self._all:
                node = _node_of(subject)
                own = self._nodes.get(node)
                if own is None:
                    self._unknown.add(node)
                if own is None or own.is_new:
                    kept.append((subject, payload))
            elif subscription.periods_over >= _NOISY_PERIODS:
                newest[subject] = payload
            else:
                kept.append((subject, payload))
        return [*kept, *newest.items()], b"".join(lines)

    def renew(self, now: float) -> tuple[bytes, list[Excess]]:
        """Return protocol lines that renew and end subscriptions, and the noisy nodes."""
        lines: list[bytes] = []
        while self._ending and self._ending[0][0] <= now:
            lines.append(b"UNSUB %b\r\n" % self._ending.popleft()[1])
        excesses: list[Excess] = []
        period_s = self._limits.period_s
        for subscription in list(self._low):
            is_all = subscription is self._all
            wait_s = period_s
            if is_all:
                wait_s = 0.0 if self._has_news else self._discover_s
                wait_s = max(wait_s, subscription.size / _DISCOVER_BYTES_PER_S)
            if now - subscription.at < wait_s:
                continue
            if is_all:
                self._pace(now)
            excesses += self._judged(subscription)
            lines.append(self._renewed(subscription, now))
        return b"".join(lines), excesses

    def _pace(self, now: float) -> None:
        """Set when to subscribe to unknown nodes again: immediately while new nodes appear."""
        if self._has_news:
            self._discover_until = now + _DISCOVER_LONG_S
        self._has_news = False
        self._unknown.clear()
        is_shared = _main_sender(self._all) is None
        slowest_s = self._limits.period_s / (_QUIET_RENEWALS if is_shared else 1)
        slower_s = min(slowest_s, max(_DISCOVER_S, 2 * self._discover_s))
        self._discover_s = 0.0 if is_shared and now < self._discover_until else slower_s

    def _used(self, subscription: _Subscription, subject: bytes, now: float) -> bool:
        """Record a message in a budget's second half; return False if the budget is exceeded."""
        self._low[subscription] = None
        if subscription.left >= 0:
            subscription.used_up_at = now
        word = subject.split(b".", 3)[2 if subscription is self._all else 3]
        sender = word.decode("ascii", "replace")
        if sender in subscription.senders or len(subscription.senders) < _SENDERS_MAX:
            subscription.senders[sender] = subscription.senders.get(sender, 0) + 1
        return subscription.left >= 0

    def _judged(self, subscription: _Subscription) -> list[Excess]:
        """Count how often in a row a budget was used up early; return the noisy node, if any."""
        period_s = self._limits.period_s
        if subscription.left > 0 or subscription.used_up_at - subscription.at > 2 * period_s:
            subscription.periods_over = 0
            return []
        subscription.periods_over += 1
        if subscription.periods_over < _NOISY_PERIODS:
            return []
        if subscription is not self._all:
            return [_excess(subscription, subscription.node, tuple(subscription.senders))]
        # all unknown nodes share this budget; only a node that uses most of it is noisy
        node = _main_sender(subscription)
        return [] if node is None or node in self._nodes else [_excess(subscription, node, ())]

    def _renewed(self, subscription: _Subscription, now: float) -> bytes:
        limits = self._limits
        is_all = subscription is self._all
        is_noisy = subscription.largest > limits.message_bytes or (
            subscription.periods_over >= _NOISY_PERIODS and not is_all
        )
        count = limits.unknown_messages if is_all else limits.messages
        count = min(limits.noisy_messages, count) if is_noisy else count
        self._by_sid.pop(subscription.former, None)
        subscription.former, subscription.sid = subscription.sid, b"%d" % next(self._sids)
        self._by_sid[subscription.sid] = subscription
        self._low.pop(subscription, None)
        subscription.messages_max = subscription.left = count
        subscription.at, subscription.size, subscription.largest = now, 0, 0
        subscription.senders.clear()
        ended = b""
        if subscription.former and is_all:
            ended = b"UNSUB %b\r\n" % subscription.former
        elif subscription.former:
            self._ending.append((now + _OVERLAP_S, subscription.former))
        return b"SUB %b %b\r\nUNSUB %b %d\r\n%b" % (
            subscription.subject,
            subscription.sid,
            subscription.sid,
            count,
            ended,
        )


def _excess(subscription: _Subscription, node: str, senders: tuple[str, ...]) -> Excess:
    return Excess(
        node=node,
        messages=subscription.messages_max - min(subscription.left, 0),
        bytes=subscription.size,
        seconds=subscription.used_up_at - subscription.at,
        senders=senders,
    )


def _main_sender(subscription: _Subscription) -> str | None:
    """Return the node that sent a minimum of messages and more than all other nodes, or None."""
    token, count = max(subscription.senders.items(), key=lambda sender: sender[1])
    least = min(_SENDERS_MAX, subscription.messages_max // 2)
    is_main = count >= least and 2 * count > sum(subscription.senders.values())
    return vocabulary.node_of(token) if is_main else None


def _node_of(subject: bytes) -> str:
    return vocabulary.node_of(subject.split(b".", 3)[2].decode("ascii", "replace"))
