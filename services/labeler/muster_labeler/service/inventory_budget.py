"""Pure: decides from an inventory's subject whether to read it, before it is decoded.

The number of plugins per node and the rate of each node's messages are limited. A message above the
rate is skipped, not kept: the stream stores the newest message of each subject, and the node is
read again from there a little later. A node that the API shows only after its plugin has reported
is also read again.

The module also measures how late the reader is, by its own clock: the server's clock may differ.
"""

from typing import Final

from muster import pacing, vocabulary
from muster_labeler.service import fleet, limits

_BURST: Final = 256
"""The burst of messages per node; more than a plugin sends when it reconnects."""
_PER_S: Final = 16.0
_AGAIN_S: Final = 10.0
_NODE, _PLUGIN = 2, 3
"""The positions of the node and the plugin among the tokens of an inventory's subject."""


class InventoryBudget:
    """Decides which messages about nodes are read, and which nodes have to be read again."""

    def __init__(self, nodes: fleet.Fleet) -> None:
        self._fleet = nodes
        self._messages: pacing.KeyedBuckets[str] = pacing.KeyedBuckets(
            per_s=_PER_S, burst=_BURST, keys_max=limits.NODES_MAX
        )
        self._again: dict[str, float] = {}
        """When to read each node again; until then its new messages are skipped."""

    def refusal(self, subject: str, now: float) -> limits.Refusal | None:
        """Return why a message must be skipped; None if the message must be read."""
        words = subject.split(".", _PLUGIN + 1)
        node = vocabulary.node_of(words[_NODE])
        refusal = self._fleet.refusal(node, words[_PLUGIN])
        if refusal is not None:
            return refusal
        if node in self._again:
            return limits.Refusal.TOO_OFTEN
        if not self._messages.try_take(node, now):
            self._again[node] = now + _AGAIN_S
            return limits.Refusal.TOO_OFTEN
        return None

    @staticmethod
    def node_of(subject: str) -> str:
        """Return the node that a message is about."""
        return vocabulary.node_of(subject.split(".")[_NODE])

    def read_again(self, node: str, now: float) -> None:
        """Schedule a node to be read from the stream, because the API shows the node only now."""
        self._again.setdefault(node, now)

    def take_due(self, now: float) -> list[str]:
        """Return the nodes to read again now; from now on their messages are read as usual."""
        due = [node for node, at in self._again.items() if at <= now]
        for node in due:
            del self._again[node]
        return due

    def forget(self, node: str) -> None:
        """Forget a node that no longer exists."""
        self._again.pop(node, None)


class Backlog:
    """Measures how long messages of a stream have been waiting for their reader.

    When a message is read while `left` later messages are stored, that number is counted down.
    Until the last of them is read, the reader is late by at least the time since the count began.
    """

    def __init__(self) -> None:
        self._left = 0
        self._since = 0.0

    def note(self, left: int, now: float) -> None:
        """Record that a message was read while the stream stored `left` later messages."""
        # a message that has been replaced in the meantime is never read
        self._left = min(self._left - 1, left)
        if self._left <= 0:
            self._left, self._since = left, now

    def age_s(self, now: float) -> float:
        """Return for how long, at least, the oldest unread message has waited; 0 if none waits."""
        return now - self._since if self._left > 0 else 0.0
