"""Pure: How often each node may connect: so many at once, then so many a minute.

A compromised plugin could otherwise open connections until nats-server takes no more from anybody.
"""

from typing import Final

from muster_gate import config

_NODES_MAX: Final = 200_000


class Pace:
    """A bucket for each node that came of late; one that is full again is forgotten."""

    def __init__(self, rules: config.Pace) -> None:
        self._burst = float(rules.burst)
        self._per_s = rules.per_minute / 60
        self._spent: dict[str, tuple[float, float]] = {}
        """By node, oldest first: how much was spent, when."""

    def takes(self, node: str, now: float) -> bool:
        """Tell whether this node may connect once more now, and count it if so."""
        spent, since = self._spent.pop(node, (0.0, now))
        spent = max(0.0, spent - (now - since) * self._per_s)
        is_free = spent + 1 <= self._burst
        self._spent[node] = (spent + is_free, now)
        self._forget(now)
        return is_free

    def _forget(self, now: float) -> None:
        """Drop what is full again, or too much, from the oldest on: more a call than come."""
        for _ in range(2):
            node, (spent, since) = next(iter(self._spent.items()))
            if spent > (now - since) * self._per_s and len(self._spent) <= _NODES_MAX:
                return
            del self._spent[node]
            if not self._spent:
                return
