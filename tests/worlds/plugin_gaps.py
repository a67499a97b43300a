"""Pure: simulates gaps in plugins' heartbeats, and what NATS and Kubernetes report during them.

The reports are those of real servers (nats-server 2.15, measured with clients that were killed,
stopped, cut off and reset; kubelet 1.36). Times are in seconds after the event:

| event                  | its connection                   | a probe gets       | its pod         |
|------------------------|----------------------------------|--------------------|-----------------|
| heartbeats are lost    | stays open                       | an answer          | Ready           |
| the process is stopped | Stale Connection after 10.7-14.7 | none; no responder | not Ready, 7-12 |
| packets are dropped    | Stale Connection after 10.7-14.7 | none; no responder | Ready           |
| the connection resets  | Read Error at once               | no responder       | Ready           |
| the process crashes    | Client Closed, rarely Read Error | no responder       | waiting, 1.3    |
| the node dies          | Stale Connection after 10.7-14.7 | none; no responder | Ready           |

A probe gets "no responder" once the server has closed the connection. A kubelet renews its lease
every 10 s until its node dies. Not simulated: the restart of a container that is stopped for more
than 25 s, and a plugin that closes its connection and keeps running.
"""

import enum
import math
import random
from dataclasses import dataclass
from typing import Final

from muster.vocabulary import Verdict
from muster_health.model import signals

GPU: Final = "nvidia.com/gpu"
DAY_S: Final = 86_400.0
INTERVAL_S: Final = 5.0
JITTER_S: Final = 0.5
SHORT_S: Final = 20.0
"""A shorter pause or cut should not lead to any verdict."""
_STALE_S: Final = (10.7, 14.7)
"""The time until nats-server or nats-py closes a silent connection, as set in k8s/base/nats."""
_DIAL_S: Final = (0.1, 0.6)
_DIAL_TIMEOUT_S: Final = 2.0
_READINESS_S: Final = 5.0
_READINESS_TIMEOUT_S: Final = 2.0
_LEASE_S: Final = 10.0
_NODE_GRACE_S: Final = 50.0
_SHOWN_S: Final = 0.3
"""From the kubelet's detection to the API; it checks for ended containers once a second."""
_RELIST_S: Final = 1.0
_OFFERS_S: Final = 10.0
_REPAIRED_S: Final = 120.0
"""The time from a failure to its repair."""
_RESET_CRASHES: Final = 0.1
"""The share of crashes with unread bytes, for which the server reports Read Error."""


class Kind(enum.StrEnum):
    """The true cause of a gap in a plugin's heartbeats."""

    LOST = "beats lost"
    PAUSED = "paused"
    CUT = "cut"
    RESET = "reset"
    CRASHED = "crash"
    FROZEN = "freeze"
    NODE_DEAD = "dead node"


RIGHT_VERDICT: Final = {
    Kind.CRASHED: Verdict.PLUGIN_DOWN,
    Kind.FROZEN: Verdict.STUCK,
    Kind.NODE_DEAD: Verdict.NODE_DOWN,
}
"""The right verdict on a failure."""
SHORT_LIVED: Final = {
    Kind.PAUSED: Verdict.STUCK,
    Kind.CUT: Verdict.UNREACHABLE,
    Kind.RESET: Verdict.UNREACHABLE,
}
"""The right verdict on a long gap that ends without a repair."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """The rates of gaps in the heartbeats of healthy plugins.

    Each heartbeat and each probe is lost with probability `loss`. A plugin has `pauses_per_day`
    pauses of exponentially distributed length, with the mean `pause_s`. In a share of `link_share`
    its connection to the bus is cut, in the others its process is stopped. A share of `reset_share`
    of the cuts resets the connection at once; in the others packets are dropped silently.
    """

    loss: float = 0.001
    pauses_per_day: float = 0.2
    pause_s: float = 10.0
    link_share: float = 0.5
    reset_share: float = 0.5


MODELS: Final = (Model(), Model(loss=0.01), Model(pause_s=3.0))


@dataclass(slots=True, kw_only=True)
class Gap:
    """A gap in a plugin's heartbeats after the one at `begins_at`; `kind` is its cause.

    The cause lasts from `since` until `until`. The plugin can answer again at `back_at`, and sends
    heartbeats again at `ends_at`. The server closes its connection at `stale_at`. `is_closed` is
    whether the server has no connection of it now.
    """

    kind: Kind
    begins_at: float
    since: float
    until: float = math.inf
    back_at: float = math.inf
    ends_at: float = math.inf
    stale_at: float = math.inf
    is_closed: bool = False

    @property
    def lasts_s(self) -> float:
        """Return the duration of the cause."""
        return self.until - self.since


class Draw:
    """Draws random gaps of one model."""

    def __init__(self, model: Model, source: random.Random) -> None:
        self._model = model
        self._random = source

    def failure(self, kind: Kind, begins_at: float) -> Gap:
        """Draw a failure; it is repaired long after the verdict."""
        since = begins_at + self._random.random() * INTERVAL_S
        until = since + _REPAIRED_S
        gap = Gap(
            kind=kind, begins_at=begins_at, since=since, until=until, back_at=until, ends_at=until
        )
        if kind is not Kind.CRASHED:
            gap.stale_at = since + self._random.uniform(*_STALE_S)
        return gap

    def crash_reason(self) -> str:
        """Draw the server's reason for the disconnect of a crashed process."""
        has_unread = self._random.random() < _RESET_CRASHES
        return "Read Error" if has_unread else "Client Closed"

    def next_gap(self, now: float) -> Gap:
        """Draw the next gap of more than two intervals in a healthy plugin's heartbeats."""
        model = self._model
        heartbeats_per_day = DAY_S / INTERVAL_S
        lost_per_day = heartbeats_per_day * model.loss**2 * (1 - model.loss)
        each_day = lost_per_day + model.pauses_per_day
        begins_at = now + self._random.expovariate(each_day) * DAY_S
        is_lost = self._random.random() * each_day < lost_per_day
        return self._lost(begins_at) if is_lost else self._paused(begins_at)

    def _lost(self, begins_at: float) -> Gap:
        lost = 2
        while self._random.random() < self._model.loss:
            lost += 1
        jitter_s = self._random.uniform(-JITTER_S, JITTER_S)
        ends_at = begins_at + (lost + 1) * INTERVAL_S + jitter_s
        return Gap(kind=Kind.LOST, begins_at=begins_at, since=begins_at, ends_at=ends_at)

    def _paused(self, begins_at: float) -> Gap:
        """Draw a pause, and when the process, its connection and its heartbeats recover."""
        model, draw = self._model, self._random
        since = begins_at + draw.random() * INTERVAL_S
        until = since + draw.expovariate(1 / model.pause_s)
        kind = Kind.PAUSED
        if draw.random() < model.link_share:
            kind = Kind.RESET if draw.random() < model.reset_share else Kind.CUT
        gap = Gap(kind=kind, begins_at=begins_at, since=since, until=until)
        if kind is Kind.RESET:
            gap.back_at = until + draw.uniform(*_DIAL_S) + draw.random() * _DIAL_TIMEOUT_S
            gap.ends_at = gap.back_at + draw.random() * INTERVAL_S
            return gap
        stale_at = since + draw.uniform(*_STALE_S)
        gives_up_at = since + draw.uniform(*_STALE_S)
        if stale_at <= until:
            gap.stale_at = stale_at
            # its first messages go to a connection that the server has closed
            gap.back_at = until + draw.uniform(*_DIAL_S)
            gap.back_at += draw.random() * _DIAL_TIMEOUT_S if kind is Kind.CUT else 0.0
            gap.ends_at = gap.back_at + draw.random() * INTERVAL_S
        elif kind is Kind.CUT:
            # lost packets are sent again, unless its own side has closed the connection
            gap.back_at = until + draw.random() * _DIAL_TIMEOUT_S
            gap.stale_at = until if gives_up_at <= until else math.inf
            gap.ends_at = gap.back_at + draw.random() * INTERVAL_S
        else:
            gap.back_at = gap.ends_at = max(until, begins_at + INTERVAL_S)
        return gap


def cluster_facts(gap: Gap | None, phase: float, now: float) -> signals.Facts:
    """Return the Kubernetes API's facts about a node and its pod; `phase` is its kubelet's."""
    is_dead = gap is not None and gap.kind is Kind.NODE_DEAD
    last = min(now, gap.since) if gap is not None and is_dead else now
    renewed_at = last - (last - phase * _LEASE_S) % _LEASE_S
    ended = gap is not None and gap.kind is Kind.CRASHED and _shows_end(gap, phase, now)
    stands = gap is not None and is_seen_standing(gap, phase, now)
    withdrawn = gap is not None and ended and now > gap.since + phase * _OFFERS_S
    pod = signals.Pod(
        name="muster/plugin",
        uid="1",
        phase="Running",
        ready=not (ended or stands),
        waiting="CrashLoopBackOff" if ended else "",
    )
    return signals.Facts(
        exists=True,
        lease_age_s=now - renewed_at,
        ready=not is_dead or now - renewed_at < _NODE_GRACE_S,
        pods=(pod,),
        offers={GPU: signals.Offer(capacity=8, allocatable=0 if withdrawn else 8)},
    )


def is_seen_standing(gap: Gap, phase: float, now: float) -> bool:
    """Return whether two readiness probes in a row have failed, and none succeeded since."""
    if gap.kind not in {Kind.PAUSED, Kind.FROZEN}:
        return False
    first = gap.since + (phase * _READINESS_S - gap.since) % _READINESS_S
    seen_at = first + _READINESS_S + _READINESS_TIMEOUT_S
    next_good = gap.until + (phase * _READINESS_S - gap.until) % _READINESS_S
    return seen_at <= gap.until and seen_at + _SHOWN_S <= now < next_good + _SHOWN_S


def _shows_end(gap: Gap, phase: float, now: float) -> bool:
    return now >= gap.since + phase * _RELIST_S + _SHOWN_S
