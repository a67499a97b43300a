"""Pure: The route tree: which receivers hear of an alert, how it is grouped, and when it is told.

As in Alertmanager (dispatch/route.go): an alert goes down to the deepest routes that match; after a
child that matches, its later siblings are asked only if it says `continue`; where no child matches,
the route itself takes it. What a route does not say, its parent says.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from muster import matchers as matching


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Alertmanager's three times, and one of ours.

    With `resolve_wait_s` the end of all that was told is told after this, not after a whole
    `group_interval_s`.
    """

    group_wait_s: float
    group_interval_s: float
    repeat_interval_s: float
    resolve_wait_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One node of the tree, with everything it inherited."""

    key: str
    receivers: tuple[str, ...]
    group_by: tuple[str, ...]
    timing: Timing
    matchers: tuple[matching.Matcher, ...] = ()
    goes_on: bool = False
    mute_times: tuple[str, ...] = ()
    active_times: tuple[str, ...] = ()
    children: tuple["Route", ...] = ()
    why: str = ""
    """Why those whom this leads to are told, if they may ask."""

    def find(self, labels: Mapping[str, str]) -> list["Route"]:
        """Return the routes that take an alert with these labels; none if this does not match."""
        if not matching.all_hold(self.matchers, labels):
            return []
        found: list[Route] = []
        for child in self.children:
            below = child.find(labels)
            found += below
            if below and not child.goes_on:
                break
        return found or [self]

    def walk(self) -> Iterator["Route"]:
        """Give this route and all below it."""
        yield self
        for child in self.children:
            yield from child.walk()


def key_of(parent: str, matchers: tuple[matching.Matcher, ...]) -> str:
    """Return a route's name as Alertmanager writes it: `{}/{severity="critical"}`."""
    return f"{parent}/{{{','.join(sorted(map(str, matchers)))}}}"
