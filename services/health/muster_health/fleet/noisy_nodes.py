"""Pure: detects noisy nodes, which exceed their limits, and raises an alert about each.

A node stays noisy until it has been within its limits for a while. Messages beyond the limits are
not read, so that other nodes are evaluated as usual. A node is also noisy if its plugins are
suspected repeatedly, because the alert about mass failures never concerns a single node.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from muster import pacing, vocabulary
from muster.vocabulary import AlertKind
from muster_health.alerting import evidence
from muster_health.model import alerts, limits

NODES_MAX: Final = 16
"""The maximum number of noisy nodes with alerts; the fleet's other alerts need room, too."""
_QUIET_S: Final = 30.0
_SENDERS_MAX: Final = 8
_SUSPICIONS_MAX: Final = 60
_SUSPICIONS_S: Final = 60.0
"""The window in which suspicions are counted; a plugin usually causes at most 5 in it."""
_NODES_COUNTED_MAX: Final = 20_000


@dataclass(slots=True, eq=False)
class _Noise:
    last_at: float
    reports: dict[limits.Channel, limits.NodeNoisy] = field(default_factory=dict)


class NoisyNodes:
    """Tracks the nodes that exceed their limits."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Noise] = {}
        self._suspicions = pacing.KeyedBuckets[str](
            per_s=_SUSPICIONS_MAX / _SUSPICIONS_S,
            burst=_SUSPICIONS_MAX,
            keys_max=_NODES_COUNTED_MAX,
        )

    def suspected(self, node: str, now: float) -> bool:
        """Count a suspicion; return whether an alert about the node must open or change."""
        if self._suspicions.try_take(node, now):
            return False
        noisy = limits.NodeNoisy(
            node=node,
            channel=limits.Channel.SUSPICIONS,
            messages=_SUSPICIONS_MAX,
            seconds=_SUSPICIONS_S,
        )
        return self.report(noisy, now)

    def report(self, noisy: limits.NodeNoisy, now: float) -> bool:
        """Record a report; return whether an alert about the node must open or change."""
        noise = self._nodes.get(noisy.node)
        is_new = noise is None
        if noise is None:
            self.expire(now)
            if len(self._nodes) >= NODES_MAX:
                return False
            noise = self._nodes[noisy.node] = _Noise(now)
        noise.last_at = now
        is_new |= noisy.channel not in noise.reports
        noise.reports[noisy.channel] = noisy
        return is_new

    def expire(self, now: float) -> float | None:
        """Drop the nodes that are quiet again; return when to check next (None: never)."""
        for node, noise in list(self._nodes.items()):
            if now >= noise.last_at + _QUIET_S:
                del self._nodes[node]
        return min((noise.last_at + _QUIET_S for noise in self._nodes.values()), default=None)

    def alerts(self, at: datetime) -> Iterable[alerts.Alert]:
        """Yield one alert for each noisy node."""
        for node, noise in self._nodes.items():
            yield alerts.Alert(
                kind=AlertKind.NOISY_NODE,
                summary=_summary(node, set(noise.reports)),
                evidence=tuple(map(_observed, noise.reports.values())),
                starts_at=at,
                changed_at=at,
                resource=node,
            )


def _summary(node: str, channels: set[limits.Channel]) -> str:
    come_and_go = f"the plugins on {node} are suspected repeatedly"
    limited = ", ".join(sorted(channels - {limits.Channel.SUSPICIONS}))
    if not limited:
        return come_and_go
    more = f"; {come_and_go}" if limits.Channel.SUSPICIONS in channels else ""
    return f"{node} sends more than allowed: {limited}; the excess is not read{more}"


def why_ended() -> tuple[vocabulary.Evidence, ...]:
    """Return why an alert about a noisy node ended."""
    return (evidence.of("bus", f"the node has been within its limits for {_QUIET_S:.0f} s"),)


def _observed(noisy: limits.NodeNoisy) -> vocabulary.Evidence:
    size = f" ({noisy.bytes / 1e6:,.1f} MB)" if noisy.bytes else ""
    senders = ", ".join(noisy.senders[:_SENDERS_MAX])
    more = len(noisy.senders) - _SENDERS_MAX
    whom = f"; from {senders}{f' and {more} more' if more > 0 else ''}" if senders else ""
    what = _WORDS[noisy.channel]
    text = f"at least {noisy.messages:,} {what}{size} within {noisy.seconds:.1f} s{whom}"
    if noisy.channel is limits.Channel.CONNECTION:
        text += "; the gate has closed these connections"
    return evidence.of("bus", text)


_WORDS: Final = {
    limits.Channel.HEARTBEATS: "heartbeats",
    limits.Channel.EVENTS: "events",
    limits.Channel.SUSPICIONS: "suspicions",
    limits.Channel.CONNECTION: "messages over its connections",
}
