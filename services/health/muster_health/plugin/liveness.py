"""Pure: tracks the signs of life of one plugin: heartbeats in order, silence and connections.

Heartbeats are ordered by (instance, seq), and their age is measured by the receiver's clock. A
client that was cut off may send its backlog in one burst: these heartbeats describe the past. They
are recognised because they arrive together. The first of them is recognised by its sender's uptime,
which shows that it was sent soon after the last heartbeat before the silence. If heartbeats of two
instances alternate, two processes are running, because the older one was not stopped.

NATS's reports about connections may be lost, and connections from before our start are not
reported. A report may therefore raise a suspicion and serve as evidence, but never decides alone.

All ages are measured by our clock alone, so a node's skewed clock does no harm here. But its log
times mislead people, so clock skew is detected as well, from heartbeats that arrived without delay.
"""

import enum
import math
from dataclasses import dataclass
from typing import Final

import msgspec

from muster import vocabulary
from muster_health.model import config

INTERVAL_MIN_S: Final = 0.1
"""The shortest accepted interval; a shorter one would cause endless suspicions."""

_SPACED_INTERVALS: Final = 0.5
_LATE_INTERVALS: Final = 1.5
_REPLACED_INTERVALS: Final = 2.0
_ALTERNATIONS_MIN: Final = 3
_ALTERNATION_INTERVALS: Final = 3.0
_PACE_WEIGHT: Final = 0.3
_PACE_MAX: Final = 2.5
"""The longest gap that counts towards the pace, in intervals; a longer one is a silence."""
_OPEN_MAX: Final = 8
_INSTANCES_MAX: Final = 4
_CLOSED_BY_SERVER: Final = ("stale", "authentication", "authorization", "slow consumer")
"""Words in the reasons for which a server closes a connection (server/client.go, ClosedState)."""
_CLOSED_BY_PROCESS: Final = "client closed"
"""The server's reason when it reads the end of the connection (closedStateForErr: io.EOF)."""
_SERVER_ID_CHARS: Final = 56
_SHORT_CHARS: Final = 8
_SKEWED_HEARTBEATS_MIN: Final = 3
_IN_SYNC_SHARE: Final = 0.5


class Freshness(enum.StrEnum):
    """How much a heartbeat proves about the plugin."""

    STALE = "stale"
    """Older than the last heartbeat."""
    DOUBTFUL = "doubtful"
    """Newer, but perhaps delayed in a backlog: not enough to refute a suspicion."""
    FRESH = "fresh"


class HeartbeatOrder(msgspec.Struct, eq=False, gc=False):
    """The order of one plugin's heartbeats.

    `stretch` is the mean time between them divided by the declared interval.
    """

    interval_s: float
    instance: str = ""
    seq: int = -1
    stretch: float = 1.0
    is_fresh: bool = False
    """Whether the last heartbeat was received soon after it was sent."""
    is_new_instance: bool = False
    """Whether the last heartbeat was the first of a new instance."""
    alternations: int = 0
    """How often two instances have alternated recently."""
    _arrived_at: float | None = None
    _retired: str = ""
    _retired_seq: int = -1
    _retired_at: float = 0.0
    _successor_sent: bool = False
    _uptime_s: float = 0.0

    def restore(self, instance: str, seq: int, interval_s: float) -> None:
        """Restore the state that a previous process saved."""
        self.instance, self.seq, self.interval_s = instance, seq, interval_s

    def observe(self, heartbeat: vocabulary.Heartbeat, now: float) -> Freshness:
        """Return how much the heartbeat proves; record the heartbeat unless it is stale."""
        quiet_s = None if self._arrived_at is None else now - self._arrived_at
        interval_s = max(heartbeat.interval_s, INTERVAL_MIN_S)
        if heartbeat.instance == self.instance:
            if heartbeat.seq <= self.seq:
                return Freshness.STALE
            self.is_new_instance = False
            self.is_fresh = quiet_s is None or self._is_fresh(heartbeat, quiet_s, interval_s)
        else:
            if self._is_replaced(heartbeat, quiet_s, now):
                return Freshness.STALE
            self.is_new_instance = heartbeat.instance != self._retired
            self._retire(heartbeat.instance, now)
            # reuse one string for as long as the instance runs, not a new one for each heartbeat
            self.instance = heartbeat.instance
            self.is_fresh = True
        self.seq, self.interval_s, self._uptime_s = heartbeat.seq, interval_s, heartbeat.uptime_s
        self._arrived_at, self._successor_sent = now, True
        return Freshness.FRESH if self.is_fresh else Freshness.DOUBTFUL

    def two_instances(self, now: float) -> str:
        """Return the evidence that two instances alternate; empty if they do not."""
        is_over = now - self._retired_at > _ALTERNATION_INTERVALS * self.interval_s
        if self.alternations < _ALTERNATIONS_MIN or is_over:
            return ""
        return f"two processes send heartbeats alternately: {self.instance} and {self._retired}"

    def _retire(self, successor: str, now: float) -> None:
        if successor == self._retired:
            self.alternations, self._retired_at = self.alternations + 1, now
        else:
            self.alternations = 0
        self._retired, self._retired_seq = self.instance, self.seq
        self.stretch = 1.0

    def _is_replaced(
        self, heartbeat: vocabulary.Heartbeat, quiet_s: float | None, now: float
    ) -> bool:
        # an earlier instance counts again only when its successor has stopped sending heartbeats
        if quiet_s is None or heartbeat.instance != self._retired:
            return False
        if quiet_s >= _REPLACED_INTERVALS * self.interval_s:
            return False
        if heartbeat.seq > self._retired_seq and self._successor_sent:
            if now - self._retired_at > _ALTERNATION_INTERVALS * self.interval_s:
                self.alternations = 0
            self._retired_seq, self._retired_at = heartbeat.seq, now
            self._successor_sent = False
            self.alternations += 1
        return True

    def _is_fresh(self, heartbeat: vocabulary.Heartbeat, quiet_s: float, interval_s: float) -> bool:
        """Update the pace; return whether the heartbeat was received soon after it was sent."""
        made_s = heartbeat.uptime_s - self._uptime_s
        if self._uptime_s and made_s > 0:
            each = made_s / (heartbeat.seq - self.seq) / interval_s
            self.stretch += _PACE_WEIGHT * (min(each, _PACE_MAX) - self.stretch)
        if quiet_s < _SPACED_INTERVALS * interval_s:
            return False
        if not (heartbeat.uptime_s and self._uptime_s):
            return True
        return quiet_s - made_s <= _LATE_INTERVALS * interval_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """How a plugin's last connection was closed; `at` is by our clock."""

    at: float
    reason: str
    server: str

    @property
    def by_server(self) -> bool:
        """Return whether the server closed the connection; the process may still be running."""
        return any(word in self.reason.lower() for word in _CLOSED_BY_SERVER)

    @property
    def by_process(self) -> bool:
        """Return whether the plugin's side closed the connection, as when a process ends.

        Any other reason, such as Read Error, may also mean that the network broke the connection
        while the process is still running.
        """
        return not self.reason or _CLOSED_BY_PROCESS in self.reason.lower()


class Connections(msgspec.Struct, eq=False, gc=False):
    """The connections of one plugin to NATS that were reported to us."""

    closed: Closed | None = None
    server: str = ""
    _open: tuple[tuple[str, int], ...] = ()

    @property
    def is_open(self) -> bool:
        """Return whether a connection is known to be open."""
        return bool(self._open)

    def opened(self, server: str, client: int) -> None:
        """Record that a server accepted a connection."""
        if (server, client) not in self._open:
            self._open = (*self._open, (server, client))[-_OPEN_MAX:]
        self.server, self.closed = server, None

    def ended(self, server: str, client: int, reason: str, now: float) -> bool:
        """Record that a connection ended; return whether no other one is known to be open."""
        self._open = tuple(each for each in self._open if each != (server, client))
        if self._open:
            return False
        self.closed = Closed(at=now, reason=reason, server=server)
        self.server = server
        return True

    def has_ended_since(self, at: float) -> bool:
        """Return whether the last connection ended after this time."""
        return self.closed is not None and self.closed.at > at

    def forget(self) -> None:
        """Discard all connections, because we were disconnected ourselves for a while."""
        self._open, self.closed = (), None


class ClockOffset(msgspec.Struct, eq=False, gc=False):
    """The offset of a node's clock from ours; 3 heartbeats in a row change `is_skewed`."""

    seconds: float = 0.0
    """How far the node's clock is behind ours; negative if it is ahead."""
    is_skewed: bool = False
    since: float = 0.0
    _heartbeats: int = 0

    def restore(self) -> None:
        """Record that a previous process reported the clock as skewed, and has not resolved it."""
        self.is_skewed, self.since = True, -math.inf

    def observe(self, wall: float, ours: float, bound_s: float, *, now: float) -> bool:
        """Compare a heartbeat's send time with our clock; return whether `is_skewed` changed."""
        if not wall:
            return False
        self.seconds = ours - wall
        bound = bound_s * (_IN_SYNC_SHARE if self.is_skewed else 1.0)
        if (abs(self.seconds) > bound) is self.is_skewed:
            self._heartbeats = 0
            return False
        self._heartbeats += 1
        if self._heartbeats < _SKEWED_HEARTBEATS_MIN:
            return False
        self.is_skewed, self._heartbeats, self.since = not self.is_skewed, 0, now
        return True

    def text(self) -> str:
        """Return the offset as evidence."""
        side = "behind" if self.seconds > 0 else "ahead of"
        return f"its clock is {abs(self.seconds):.1f} s {side} health's"


class Liveness(msgspec.Struct, eq=False, gc=False):
    """All signs of life of one plugin.

    `last_heard_at` is the time of the last sign of life, None before the first. `silent_since` is
    later if we could receive nothing for a while. `is_known` means that a previous process received
    a sign of life, or that an event of the plugin arrived.
    """

    context: config.Context
    silent_since: float
    order: HeartbeatOrder
    connections: Connections = msgspec.field(default_factory=Connections)
    clock: ClockOffset = msgspec.field(default_factory=ClockOffset)
    event_order: tuple[tuple[str, int], ...] = ()
    """The sequence number of each instance's last event, the newest instance last."""
    last_heard_at: float | None = None
    is_known: bool = False
    is_expected: bool = False
    """Whether Kubernetes or the configuration expects the plugin on its node."""
    is_due_sooner: bool = False
    """Whether the last heartbeat may have moved the deadline to an earlier time."""
    _window_s: float = 0.0
    """How much extra time the plugin has for its next heartbeat."""
    _expected_due: float = 0.0

    def restore(self, instance: str, seq: int, interval_s: float, *, now: float) -> None:
        """Restore the state that a previous process saved."""
        self.order.restore(instance, seq, interval_s)
        self.restart_wait(now)

    def observe(self, heartbeat: vocabulary.Heartbeat, now: float) -> Freshness:
        """Return how much a heartbeat proves; the caller decides whether it is a sign of life."""
        interval_s = self.order.interval_s
        freshness = self.order.observe(heartbeat, now)
        self.is_due_sooner = self.order.interval_s < interval_s or self._window_s > 0.0
        return freshness

    def is_next_event(self, event: vocabulary.Event, instance: str, sequence: int) -> bool:
        """Record an event's place in order; return False if it is a repetition or outdated.

        After we restart, the server delivers events again that we had not acknowledged, possibly
        after later ones. Inventories come from a separate stream, so they are not recorded: an
        event that an inventory has overtaken still counts.
        """
        last = dict(self.event_order)
        if isinstance(event, vocabulary.InventoryReported):
            return sequence >= last.get(instance, -1)
        if sequence <= last.pop(instance, -1):
            return False
        # an earlier instance may return: an update was rolled back, or a second instance stopped
        self.event_order = (*last.items(), (instance, sequence))[-_INSTANCES_MAX:]
        return True

    def confirm(self, now: float) -> None:
        """Record a sign of life."""
        self.last_heard_at = self.silent_since = now
        self._window_s = 0.0

    def observe_clock(self, heartbeat: vocabulary.Heartbeat, now: float) -> bool:
        """Compare the plugin's clock with ours; return whether `clock.is_skewed` changed."""
        if not self.order.is_fresh:
            return False
        ours = self.context.wall_zero + now
        return self.clock.observe(heartbeat.wall, ours, self.context.settings.skew_s, now=now)

    def expect(self, age_s: float, now: float) -> None:
        """Record that the plugin is expected, and has been for `age_s`."""
        if not self.is_expected:
            self.is_expected = True
            self._expected_due = now + self.context.settings.missing_s - age_s

    def restart_wait(self, now: float, *, window_s: float = 0.0) -> None:
        """Restart the wait, because nothing could be received until now; add `window_s` to it."""
        self.silent_since, self._window_s = now, window_s

    def shift(self, seconds: float, now: float) -> None:
        """Extend the wait by the time for which our own process was suspended."""
        self.silent_since = min(now, self.silent_since + seconds)

    def shift_expected(self, seconds: float) -> None:
        """Postpone the time by which the expected plugin must have sent a heartbeat."""
        self._expected_due += seconds

    @property
    def was_heard(self) -> bool:
        """Return whether we or a previous process have ever received a sign of life."""
        return self.last_heard_at is not None or self.is_known

    @property
    def timeout_s(self) -> float:
        """Return how long the plugin may be silent."""
        return self.context.settings.suspicion_beats * self.order.interval_s

    @property
    def due(self) -> float | None:
        """Return when silence is suspicious; None if the plugin is unknown and not expected."""
        due = self.silent_since + self.timeout_s + self._window_s
        if self.last_heard_at is not None or self.is_known:
            return due
        return max(due, self._expected_due) if self.is_expected else None

    def remaining_s(self, wait_s: float, waited_s: float) -> float:
        """Return the remaining seconds of a wait that a previous process began.

        The result leaves time to reconnect and send a heartbeat, but is at most `wait_s`.
        """
        heard_s = self.context.settings.reconnect_s + self.timeout_s
        return min(wait_s, max(heard_s, wait_s - waited_s))


def short_server(server: str) -> str:
    """Return a short name for a server: the first characters of its id, if it is an id."""
    return server[:_SHORT_CHARS] if len(server) == _SERVER_ID_CHARS else server
