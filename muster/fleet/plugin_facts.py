"""Pure: the part of a plugin's state that is stored, such as its verdict and its device counts."""

from collections.abc import Mapping
from datetime import datetime
from typing import Final, NamedTuple

import msgspec

from muster.fleet import health_state

_SHARED_MAX: Final = 1_000


class Counts(NamedTuple):
    """How many devices a resource has on a node, and how many are usable by pods."""

    usable: int
    total: int
    is_confirmed: bool
    """Whether every plugin that serves the resource works, so that a pod gets a device."""


class PluginFacts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The stored part of a plugin's state."""

    name: str
    verdict: str
    is_confirmed: bool
    since: datetime | None
    reason: str
    resources: Mapping[str, Counts]
    label: str


class Shared:
    """Returns the same object for equal values: most nodes have the same names and counts."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._resources: dict[tuple[tuple[str, Counts], ...], Mapping[str, Counts]] = {}

    def text(self, text: str) -> str:
        """Return the stored text that equals this text."""
        if len(self._texts) > _SHARED_MAX:
            self._texts.clear()
        return self._texts.setdefault(text, text)

    def resources(self, counts: tuple[tuple[str, Counts], ...]) -> Mapping[str, Counts]:
        """Return the counts by resource."""
        if len(self._resources) > _SHARED_MAX:
            self._resources.clear()
        if counts not in self._resources:
            self._resources[counts] = dict(counts)
        return self._resources[counts]


def of(plugin: health_state.Plugin, shared: Shared) -> PluginFacts:
    """Return the part of a plugin's state to store."""
    resources = shared.resources(
        tuple(
            (
                name,
                Counts(min(total, plugin.allocatable.get(name, total)), total, plugin.is_confirmed),
            )
            for name, total in plugin.devices.items()
        )
    )
    return PluginFacts(
        name=shared.text(plugin.name),
        verdict=shared.text(plugin.verdict or ""),
        is_confirmed=plugin.is_confirmed,
        since=plugin.since,
        reason=next(iter(plugin.reasons), ""),
        label=shared.text(plugin.label),
        resources=resources,
    )


def merged(some: Mapping[str, Counts], more: Mapping[str, Counts]) -> Mapping[str, Counts]:
    """Return two plugins' counts; a resource that both serve is confirmed only if both work."""
    both = {
        name: more[name]._replace(is_confirmed=more[name].is_confirmed and some[name].is_confirmed)
        for name in some.keys() & more.keys()
    }
    return {**some, **more, **both}
