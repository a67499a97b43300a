"""Pure: decides which part of health's state to read next: a page of all nodes, or changed nodes.

All nodes are read round after round, page by page. If too many nodes have changed, they are not
read one by one: a fast round is wanted instead, which reads every page once more.

| round | wanted | after a page | after the last page |
|---|---|---|---|
| slow | no | pause | pause, next slow round |
| slow | yes | pause, then a fast round when allowed | pause, then a fast round when allowed |
| fast | no | continue immediately | pause, next slow round |
| fast | yes | continue immediately | pause, then a fast round when allowed |

A fast round is never interrupted: otherwise, under constant change, the last pages would never be
read. A fast round is allowed `FAST_S` after the start of the previous one. The first round is fast.
"""

from typing import Final

NODES_AT_ONCE_MAX: Final = 20
"""How many changed nodes are read one by one."""
PAGE_S: Final = 2.0
"""The pause between two pages: health composes a page on its event loop, in about 20 ms."""
FAST_S: Final = 5.0


class Rounds:
    """The position in the present round, and whether a fast round is wanted."""

    def __init__(self, now: float) -> None:
        self.is_wanted = False
        self._after = ""
        self._is_fast = True
        self._began_at = now

    def want(self) -> None:
        """Request a fast round, which reads all nodes again."""
        self.is_wanted = True

    def receive_page(self, following: str) -> None:
        """Record that a page was read; `following` is its last node, empty if no page follows."""
        self._after = following
        self._is_fast = self._is_fast and bool(following)

    def pause_s(self, now: float) -> float:
        """Return how long to wait before the next page, unless a fast round is wanted meanwhile."""
        if self._is_fast:
            return 0.0
        if self.is_wanted:
            return min(PAGE_S, max(0.0, self._began_at + FAST_S - now))
        return PAGE_S

    def next_page(self, now: float) -> str:
        """Return the name after which the next page begins; begin a fast round if one is due."""
        if self.is_wanted and not self._is_fast and now >= self._began_at + FAST_S:
            self._after, self.is_wanted = "", False
            self._is_fast, self._began_at = True, now
        return self._after


class ChangedNodes:
    """Records which nodes have changed since the last `take`, or that too many have changed."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def add(self, name: str) -> None:
        """Record that a node has changed."""
        if len(self._names) <= NODES_AT_ONCE_MAX:
            self._names[name] = None

    def take(self) -> tuple[str, ...] | None:
        """Return the nodes in the order of their change; None if all must be read."""
        names, self._names = tuple(self._names), {}
        return names if len(names) <= NODES_AT_ONCE_MAX else None
