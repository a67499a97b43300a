"""Pure: the route tree, which selects an alert's receivers, grouping and timing.

As in Alertmanager (dispatch/route.go), an alert goes down to the deepest routes that match. After a
child that matches, its later siblings are tried only if it has `continue`; if no child matches, the
route itself applies. A route inherits receivers, grouping and timing that it does not set, but no
mute or active times. This module also defines the labels of an alert and their format.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from muster import matching

ALL_LABELS: Final = "..."
"""The entry of `group_by` for all labels: each alert forms its own group, as in Alertmanager."""

LABEL_NAMES: Final = matching.LABELS


def select_labels(labels: Mapping[str, str], group_by: Collection[str]) -> dict[str, str]:
    """Return the labels that form the name of an alert's group."""
    if ALL_LABELS in group_by:
        return dict(labels)
    return {name: labels[name] for name in sorted(group_by) if name in labels}


def refuse_unknown_labels(names: Collection[str], *, where: str = "group_by") -> None:
    """Raise ValueError for labels that no alert has."""
    unknown = sorted(set(names) - {*LABEL_NAMES, ALL_LABELS})
    if unknown:
        allowed = ", ".join((*LABEL_NAMES, ALL_LABELS))
        raise ValueError(
            f"{where}: no alert has a label {', '.join(unknown)}; known labels: {allowed}"
        )


def refuse_useless_matchers(texts: Iterable[str]) -> None:
    """Raise ValueError for an invalid matcher, and for a label or value that no alert has."""
    for text in texts:
        for matcher in matching.parse(text):
            if why := matching.doubt(matcher):
                raise ValueError(f"{matcher}: {why}")


def format_labels(labels: Mapping[str, str]) -> str:
    """Return labels as Alertmanager writes them: `{kind="stuck",node="node-a"}`."""
    shown = (f'{name}="{_escaped(labels[name])}"' for name in sorted(labels))
    return "{" + ",".join(shown) + "}"


def parse_labels(text: str) -> dict[str, str]:
    """Return the labels in a text that `format_labels` wrote."""
    return {} if text == "{}" else {matcher.name: matcher.value for matcher in matching.parse(text)}


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """When receivers are notified about a group: Alertmanager's intervals, and `resolve_wait_s`.

    With `resolve_wait_s`, the receiver is notified that long after all alerts of a group are
    resolved, if the group's next regular flush would be later.
    """

    group_wait_s: float
    group_interval_s: float
    repeat_interval_s: float
    resolve_wait_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One node of the tree, with its inherited settings."""

    key: str
    receivers: tuple[str, ...]
    group_by: tuple[str, ...]
    timing: Timing
    matchers: tuple[matching.Matcher, ...] = ()
    continues: bool = False
    mute_times: tuple[str, ...] = ()
    active_times: tuple[str, ...] = ()
    children: tuple["Route", ...] = ()
    why: str = ""
    """Why these receivers are notified, if that is not obvious."""

    def find(self, labels: Mapping[str, str]) -> list["Route"]:
        """Return the routes for an alert with these labels; empty if this route does not match."""
        if not matching.all_hold(self.matchers, labels):
            return []
        matching_routes: list[Route] = []
        for child in self.children:
            below = child.find(labels)
            matching_routes += below
            if below and not child.continues:
                break
        return matching_routes or [self]

    def walk(self) -> Iterator["Route"]:
        """Yield this route and all routes below it."""
        yield self
        for child in self.children:
            yield from child.walk()


def key_of(parent: str, matchers: tuple[matching.Matcher, ...]) -> str:
    """Return a route's key in Alertmanager's format: `{}/{severity="critical"}`."""
    return f"{parent}/{{{','.join(sorted(map(str, matchers)))}}}"
