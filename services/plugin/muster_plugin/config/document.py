"""Pure: the device configuration, schema v1: for every node, and overrides for some nodes."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Final, Literal

import msgspec

from muster.service import validation
from muster_plugin.config import gpus as config_gpus
from muster_plugin.config import resources as config_resources
from muster_plugin.model import errors, patterns

API_VERSION: Final = "muster.dev/v1"

_ENTRIES_MAX: Final = 500


class NodeConfiguration(errors.CheckedInParts, frozen=True, kw_only=True, omit_defaults=True):
    """The configuration of one node."""

    resources: tuple[config_resources.Resource, ...] = ()
    gpus: config_gpus.Gpus | None = None

    def demands(self) -> Iterator[validation.Demand]:
        """Yield the consistency checks of this section."""
        yield lambda: _repeated(self.resources, self.gpus)
        yield lambda: _overlaps(self.resources)


class NodeOverride(errors.CheckedInParts, frozen=True, kw_only=True, omit_defaults=True):
    """An override for some nodes; a resource replaces the one of the same name.

    `match` is a shell pattern for the node's name, or labels with a shell pattern for each value.
    `gpus` replaces the whole section.
    """

    match: (
        Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
        | Mapping[str, config_resources.Glob]
    )
    resources: Annotated[tuple[config_resources.Resource, ...], msgspec.Meta(max_length=1000)] = ()
    gpus: config_gpus.Gpus | None = None

    def demands(self) -> Iterator[validation.Demand]:
        """Yield the consistency checks of this section."""
        yield self._match_problems
        yield self._empty_problems

    def applies_to(self, node: str, labels: Mapping[str, str]) -> bool:
        """Return whether the override applies to this node."""
        if isinstance(self.match, str):
            return fnmatch.fnmatchcase(node, self.match)
        return all(
            key in labels and fnmatch.fnmatchcase(labels[key], value)
            for key, value in self.match.items()
        )

    def _match_problems(self) -> Iterator[str]:
        if not self.match:
            yield "match: it is empty; for every node write resources at the top level"

    def _empty_problems(self) -> Iterator[str]:
        if not self.resources and self.gpus is None:
            yield "resources: give resources, gpus or both"


class Document(
    errors.CheckedInParts,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    rename={"api_version": "apiVersion"},
):
    """The whole device configuration."""

    api_version: Literal["muster.dev/v1"]
    resources: Annotated[tuple[config_resources.Resource, ...], msgspec.Meta(max_length=1000)] = ()
    gpus: config_gpus.Gpus | None = None
    nodes: Annotated[tuple[NodeOverride, ...], msgspec.Meta(max_length=100)] = ()

    def demands(self) -> Iterator[validation.Demand]:
        """Yield the consistency checks of this section."""
        yield self._empty_problems
        yield lambda: name_problems(self.resources, self.gpus, self.nodes)
        yield lambda: overlap_problems(self.resources, self.nodes)

    def at(self, node: str, labels: Mapping[str, str]) -> NodeConfiguration:
        """Return the configuration of one node. Raises ValueError if its resources conflict."""
        chosen, gpus = self.resources, self.gpus
        for override in self.nodes:
            if override.applies_to(node, labels):
                chosen, gpus = _replaced(chosen, override.resources), override.gpus or gpus
        return NodeConfiguration(resources=chosen, gpus=gpus)

    def _empty_problems(self) -> Iterator[str]:
        if not self.resources and not self.nodes and self.gpus is None:
            yield "resources: give resources, gpus or both"


Resources = Sequence[config_resources.Resource | None]
"""None stands for an invalid one."""


def name_problems(
    resources: Resources, gpus: config_gpus.Gpus | None, nodes: Sequence[NodeOverride | None]
) -> Iterator[str]:
    """Yield the resources that have the same name, on every node or on some."""
    yield from _repeated(resources, gpus)
    for at, override in validation.whole(nodes):
        yield from errors.prefixed(f"nodes[{at}]", _repeated(override.resources, override.gpus))


def overlap_problems(resources: Resources, nodes: Sequence[NodeOverride | None]) -> Iterator[str]:
    """Yield the resources that surely match the same nodes."""
    overrides = [*validation.whole(nodes)]
    lists: list[Resources] = [resources, *(override.resources for _, override in overrides)]
    everything = [resource for entries in lists for _, resource in validation.whole(entries)]
    count = sum(len(group.devices) for resource in everything for group in resource.groups)
    if count > _ENTRIES_MAX:
        yield f"resources: {count} entries in all groups; at most {_ENTRIES_MAX}"
        return
    yield from _overlaps(resources)
    for at, override in overrides:
        yield from errors.prefixed(f"nodes[{at}]", _overlaps(override.resources))


def _repeated(resources: Resources, gpus: config_gpus.Gpus | None) -> Iterator[str]:
    named = [resource.name for _, resource in validation.whole(resources) if not resource.per_match]
    for name in errors.duplicates([*named, *(gpus.names() if gpus else ())]):
        yield f"resources: two are named {name}; the kubelet would keep only the newer one"


def _overlaps(resources: Resources) -> Iterator[str]:
    for narrow, wide in overlaps(claims(resources)):
        yield (
            f"{narrow.key}: {narrow.resource} would count nodes of {wide.resource} ({wide.key}); "
            "exclude them there, or write shared: true on one of the two"
        )


def warnings(resources: Resources, nodes: Sequence[NodeOverride | None] = ()) -> Iterator[str]:
    """Yield warnings about valid entries that probably do not match what was intended."""
    for at, resource in validation.whole(resources):
        yield from (f"resources[{at}].{warning}" for warning in resource.warnings())
    for at, override in validation.whole(nodes):
        yield from (f"nodes[{at}].{warning}" for warning in warnings(override.resources))


def claims(resources: Resources) -> tuple[Claim, ...]:
    """Return the entries whose device nodes belong to one resource only."""
    return tuple(
        Claim(at=at, resource=resource.name, key=f"resources[{at}].{key}", entry=entry)
        for at, resource in validation.whole(resources)
        for key, entry in resource.entries()
        if entry.type is config_resources.NodeType.DEVICE and not entry.shared
    )


def _replaced(
    base: tuple[config_resources.Resource, ...], newer: tuple[config_resources.Resource, ...]
) -> tuple[config_resources.Resource, ...]:
    replaced = {resource.name for resource in newer}
    return tuple(resource for resource in base if resource.name not in replaced) + newer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """A configured entry, its key, and the number and name of its resource."""

    at: int
    resource: str
    key: str
    entry: config_resources.Entry


def overlaps(claims: Sequence[Claim]) -> Iterator[tuple[Claim, Claim]]:
    """Yield each pair of entries of different resources where the second matches all of the first.

    Different patterns are compared with single paths and single USB devices only; whether two of
    them overlap shows on the node.
    """
    first: dict[bytes, Claim] = {}
    for claim in claims:
        first_claim = first.setdefault(_identity(claim.entry), claim)
        if first_claim.at != claim.at:
            yield claim, first_claim
    singles = [claim for claim in claims if claim.entry.is_one]
    for wide in claims:
        if not wide.entry.is_one:
            for single in singles:
                if single.at != wide.at and _covers(wide.entry, single.entry):
                    yield single, wide


def _covers(wide: config_resources.Entry, single: config_resources.Entry) -> bool:
    if wide.usb and single.usb:
        return (wide.usb.vendor, wide.usb.product) == (single.usb.vendor, single.usb.product)
    if not single.path or any(patterns.glob(glob).fullmatch(single.path) for glob in wide.exclude):
        return False
    if wide.regex:
        below = single.path.removeprefix("/dev/")
        return below != single.path and patterns.regex_matches(wide.regex, below)
    return bool(wide.path) and patterns.surely_overlap(wide.path, single.path)


def _identity(entry: config_resources.Entry) -> bytes:
    """Return a value that is equal for entries that match the same device nodes."""
    exclude = () if entry.is_literal else sorted(entry.exclude)
    selectors = (entry.path, entry.regex, entry.udev, entry.usb, exclude)
    return msgspec.json.encode(selectors, order="sorted")
