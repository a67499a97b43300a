"""Pure: Which heartbeats are signs of life, and what their order and pace tell.

Order is (instance, seq), age is by the receiver's clock. A client that was cut off may send its
backlog in one burst: those beats are news of the past. They give themselves away by arriving
together, and the first of them by having been made soon after the one before the silence, as the
sender's own uptime tells.

Two instances that beat in turns are two processes at once: a former one that nobody ended.
"""

import enum
import math
from dataclasses import dataclass
from typing import Final

from muster import vocabulary

INTERVAL_MIN_S: Final = 0.1
"""A sender that declares less would have us doubt it without end."""

_SPACED_BEATS: Final = 0.5
_LATE_BEATS: Final = 1.5
_REPLACED_BEATS: Final = 2.0
_TURNS_MIN: Final = 3
_TURN_BEATS: Final = 3.0
_PACE_WEIGHT: Final = 0.3
_PACE_MAX: Final = 2.5
"""What is longer is a silence, and the end of one shall not pass for a slow pace."""


class Freshness(enum.StrEnum):
    """How much a beat proves."""

    STALE = "stale"
    """Older than what we know."""
    DOUBTFUL = "doubtful"
    """Newer, but perhaps out of a backlog: not enough to refute a suspicion."""
    FRESH = "fresh"


class HeartbeatOrder:
    """The order of one plugin's beats. `stretch` is their mean distance in declared intervals."""

    __slots__ = (
        "_retired",
        "_retired_at",
        "_retired_seq",
        "_spoke_since",
        "_uptime_s",
        "arrived_at",
        "instance",
        "interval_s",
        "is_fresh",
        "seq",
        "stretch",
        "turns",
    )

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.instance = ""
        self.seq = -1
        self.arrived_at: float | None = None
        self.stretch = 1.0
        self.is_fresh = False
        """The newest one was read when it was made."""
        self._retired = ""
        self._retired_seq = -1
        self._retired_at = 0.0
        self.turns = 0
        """How often two instances have beaten in turns, lately."""
        self._spoke_since = False
        self._uptime_s = 0.0

    def restore(self, instance: str, seq: int, interval_s: float) -> None:
        """Go on where a former process stopped."""
        self.instance, self.seq, self.interval_s = instance, seq, interval_s

    def take(self, beat: vocabulary.Heartbeat, now: float) -> Freshness:
        """Return what the beat proves; remember it unless it is stale."""
        quiet_s = None if self.arrived_at is None else now - self.arrived_at
        interval_s = max(beat.interval_s, INTERVAL_MIN_S)
        if beat.instance == self.instance:
            if beat.seq <= self.seq:
                return Freshness.STALE
            self.is_fresh = quiet_s is None or self._is_fresh(beat, quiet_s, interval_s)
        else:
            if self._is_replaced(beat, quiet_s, now):
                return Freshness.STALE
            self._retire(beat.instance, now)
            # else the same one for as long as it lives, instead of one for each beat
            self.instance = beat.instance
            self.is_fresh = True
        self.seq, self.interval_s, self._uptime_s = beat.seq, interval_s, beat.uptime_s
        self.arrived_at, self._spoke_since = now, True
        return Freshness.FRESH if self.is_fresh else Freshness.DOUBTFUL

    def comes_back(self, instance: str) -> bool:
        """Tell whether this one beat before the one that beats now: it was there all the time."""
        return instance == self._retired

    def twins(self, now: float) -> str:
        """Say in words that two instances beat in turns; empty if they do not."""
        if self.turns < _TURNS_MIN or now - self._retired_at > _TURN_BEATS * self.interval_s:
            return ""
        return f"two processes beat in turns: {self.instance} and {self._retired}"

    def _retire(self, successor: str, now: float) -> None:
        if successor == self._retired:
            self.turns, self._retired_at = self.turns + 1, now
        else:
            self.turns = 0
        self._retired, self._retired_seq = self.instance, self.seq
        self.stretch = 1.0

    def _is_replaced(self, beat: vocabulary.Heartbeat, quiet_s: float | None, now: float) -> bool:
        # a former instance is believed again only when its successor has gone quiet
        if quiet_s is None or beat.instance != self._retired:
            return False
        if quiet_s >= _REPLACED_BEATS * self.interval_s:
            return False
        if beat.seq > self._retired_seq and self._spoke_since:
            if now - self._retired_at > _TURN_BEATS * self.interval_s:
                self.turns = 0
            self._retired_seq, self._retired_at, self._spoke_since = beat.seq, now, False
            self.turns += 1
        return True

    def _is_fresh(self, beat: vocabulary.Heartbeat, quiet_s: float, interval_s: float) -> bool:
        """Take its pace; tell whether it was read when it was made."""
        made_s = beat.uptime_s - self._uptime_s
        if self._uptime_s and made_s > 0:
            each = made_s / (beat.seq - self.seq) / interval_s
            self.stretch += _PACE_WEIGHT * (min(each, _PACE_MAX) - self.stretch)
        if quiet_s < _SPACED_BEATS * interval_s:
            return False
        if not (beat.uptime_s and self._uptime_s):
            return True
        return quiet_s - made_s <= _LATE_BEATS * interval_s


class Silence:
    """The silence of one plugin. `heard_at` is None until its first sign of life."""

    __slots__ = ("_since", "heard_at", "window_s")

    def __init__(self, now: float) -> None:
        self.heard_at: float | None = None
        self._since = now
        self.window_s = 0.0
        """It has so much more than usual for its next sign of life."""

    @property
    def since(self) -> float:
        """Return when it began."""
        return self._since

    @property
    def ever_heard(self) -> bool:
        """Tell whether there was a sign of life at all."""
        return self.heard_at is not None

    def broken(self, now: float) -> None:
        """Take a sign of life."""
        self.heard_at = self._since = now
        self.window_s = 0.0

    def begin_anew(self, now: float, *, window_s: float = 0.0) -> None:
        """Take that nothing could be heard until now.

        It has `window_s` more than usual for its next sign of life.
        """
        self._since, self.window_s = now, window_s

    def shift(self, seconds: float, now: float) -> None:
        """Take that we stood still for so long."""
        self._since = min(now, self._since + seconds)

    def due(self, patience_s: float) -> float:
        """Return when the silence is longer than `patience_s`."""
        return self._since + patience_s + self.window_s


_OPEN_MAX: Final = 8
_STALE: Final = ("stale", "authentication", "authorization", "slow consumer")
"""In the server's reasons for an end that the plugin itself did not make
(nats-server server/client.go, ClosedState)."""


_ID_CHARS: Final = 56
_SHORT_CHARS: Final = 8


def short_server(server: str) -> str:
    """Return a server as people can tell it from others: of its id, a key, the first characters."""
    return server[:_SHORT_CHARS] if len(server) == _ID_CHARS else server


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """A plugin's last connection ended; `at` by our clock."""

    at: float
    reason: str
    server: str

    @property
    def by_server(self) -> bool:
        """Tell whether the server ended it: the process may still be there."""
        return any(word in self.reason.lower() for word in _STALE)


class Connections:
    """The connections of one plugin, as far as we heard of them."""

    __slots__ = ("_open", "closed", "server")

    def __init__(self) -> None:
        self._open: tuple[tuple[str, int], ...] = ()
        self.closed: Closed | None = None
        self.server = ""

    @property
    def is_open(self) -> bool:
        """Tell whether we know of an open one."""
        return bool(self._open)

    def opened(self, server: str, client: int) -> None:
        """Take that the bus accepted one."""
        if (server, client) not in self._open:
            self._open = (*self._open, (server, client))[-_OPEN_MAX:]
        self.server, self.closed = server, None

    def ended(self, server: str, client: int, reason: str, now: float) -> bool:
        """Take that the bus lost one; return whether that leaves none that we know of."""
        self._open = tuple(one for one in self._open if one != (server, client))
        if self._open:
            return False
        self.closed = Closed(at=now, reason=reason, server=server)
        self.server = server
        return True

    def has_ended_since(self, at: float) -> bool:
        """Tell whether its last one ended after that."""
        return self.closed is not None and self.closed.at > at

    def forget(self) -> None:
        """Take that we were deaf for a while."""
        self._open, self.closed = (), None


_BEATS_MIN: Final = 3
_WELL_SHARE: Final = 0.5


class ClockOffset:
    """The clock of one node against ours, `since` when; it takes three beats to believe either."""

    __slots__ = ("_beats", "is_skewed", "seconds", "since")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.is_skewed = False
        self.since = 0.0
        self._beats = 0

    def restore(self) -> None:
        """Take that a former process told that it is apart, and has seen no end of it."""
        self.is_skewed, self.since = True, -math.inf

    def hear(self, wall: float, ours: float, bound_s: float, *, now: float) -> bool:
        """Take when a beat says that it was made; return whether that changed what we believe."""
        if not wall:
            return False
        self.seconds = ours - wall
        bound = bound_s * (_WELL_SHARE if self.is_skewed else 1.0)
        if (abs(self.seconds) > bound) is self.is_skewed:
            self._beats = 0
            return False
        self._beats += 1
        if self._beats < _BEATS_MIN:
            return False
        self.is_skewed, self._beats, self.since = not self.is_skewed, 0, now
        return True

    def words(self) -> str:
        """Say it."""
        side = "behind" if self.seconds > 0 else "ahead of"
        return f"its clock is {abs(self.seconds):.1f} s {side} ours"
