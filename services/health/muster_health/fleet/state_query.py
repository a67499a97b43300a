"""Pure: parses the query of a request for `/state`: all nodes, one node, or one page of nodes.

Pages divide a large fleet into small answers: health answers on its event loop, so an answer about
ten thousand nodes would delay everything else by half a second.
"""

import bisect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

PAGE_MAX: Final = 1_000
"""The maximum number of nodes on one page."""


class BadQuery(ValueError):
    """The query is invalid; the message gives the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateQuery:
    """The nodes to show: `node`, or the first `nodes` nodes after `after`, or by default all."""

    node: str = ""
    after: str = ""
    nodes: int | None = None


def parse(query: Mapping[str, str]) -> StateQuery:
    """Parse `node=NAME`, or `nodes=500&after=NAME`; empty means all nodes. Raises BadQuery."""
    unknown = sorted(query.keys() - {"node", "after", "nodes"})
    if unknown:
        raise BadQuery(f"{unknown[0][:50]!r} is not a parameter; use node, nodes or after")
    if "node" in query:
        if not query["node"] or len(query) > 1:
            raise BadQuery(
                "request one node (node=NAME) or one page of nodes (nodes=500&after=NAME)"
            )
        return StateQuery(node=query["node"])
    if "nodes" not in query:
        if "after" in query:
            raise BadQuery("after: also give the number of nodes, as in nodes=500")
        return StateQuery()
    count = query["nodes"]
    if not (count.isascii() and count.isdigit() and 0 < int(count[:9]) <= PAGE_MAX):
        raise BadQuery(f"nodes: {count[:20]!r} is not a number from 1 to {PAGE_MAX}")
    return StateQuery(nodes=int(count), after=query.get("after", ""))


class NodePages:
    """The nodes in order of name; they are sorted again only when `version` has changed."""

    def __init__(self) -> None:
        self._version = -1
        self._names: list[str] = []

    def page(
        self, version: int, nodes: Collection[str], *, after: str, most: int
    ) -> tuple[list[str], str]:
        """Return up to `most` nodes after `after`, and the last of these ('' if none follow)."""
        if version != self._version:
            self._version, self._names = version, sorted(nodes)
        first = bisect.bisect_right(self._names, after)
        names = self._names[first : first + most]
        return names, names[-1] if names and first + most < len(self._names) else ""
