"""Pure: limits the events read per node; beyond the limit, only the newest per subject is read.

An event over the budget is neither decoded nor handled, so one node's events do not delay those
of other nodes. A moment later, the newest event of each of the node's subjects is read: a snapshot
supersedes the changes before it.
"""

from dataclasses import dataclass
from typing import Final

from muster import pacing, vocabulary
from muster_health.model import limits

_PER_S: Final = 200.0
_BURST: Final = 2_000.0
"""The number of events that a node may send in one burst.

After an outage, each plugin sends up to 1,000 buffered events (`bus.QUEUE_MAX`).
"""
_AGAIN_S: Final = 2.0
_NOISY_S: Final = 5.0
"""How long a node must exceed its budget to count as noisy; reading a backlog takes less time."""
_NODES_MAX: Final = 1_000
_NODE_WORD: Final = 2


@dataclass(slots=True, eq=False)
class _Skipped:
    since: float
    again_at: float
    count: int = 0


class EventBudget:
    """The budgets of all nodes for the events of one stream."""

    def __init__(self) -> None:
        self._read: pacing.KeyedBuckets[str] = pacing.KeyedBuckets(
            per_s=_PER_S, burst=_BURST, keys_max=_NODES_MAX
        )
        self._skipped: dict[str, _Skipped] = {}

    def wants(self, subject: str, now: float) -> bool:
        """Return whether to read an event; if not, the node's newest events are read later."""
        token = subject.split(".", _NODE_WORD + 1)[_NODE_WORD]
        if self._read.try_take(token, now):
            return True
        skipped = self._skipped.get(token)
        if skipped is None:
            skipped = self._skipped[token] = _Skipped(now, now + _AGAIN_S)
        skipped.count += 1
        return False

    def due(self, now: float) -> tuple[list[str], list[limits.NodeNoisy]]:
        """Return the nodes to read again, as tokens of subjects, and the noisy nodes."""
        tokens: list[str] = []
        noisy: list[limits.NodeNoisy] = []
        for token, skipped in list(self._skipped.items()):
            if now < skipped.again_at:
                continue
            tokens.append(token)
            if not skipped.count:
                # nothing was skipped since the node was last read again
                del self._skipped[token]
                continue
            skipped.again_at = now + _AGAIN_S
            if now - skipped.since >= _NOISY_S:
                noisy.append(_noisy(token, skipped.count))
            skipped.count = 0
        return tokens, noisy


def _noisy(token: str, count: int) -> limits.NodeNoisy:
    return limits.NodeNoisy(
        node=vocabulary.node_of(token),
        channel=limits.Channel.EVENTS,
        messages=count,
        seconds=_AGAIN_S,
    )
