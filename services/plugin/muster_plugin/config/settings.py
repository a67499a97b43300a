"""Pure: the plugin's settings: the devices to advertise, and the settings of the process.

The devices are in schema v1 (`Document`): for every node, with overrides for some nodes. The other
keys of the file concern the process; changing those requires a restart.
"""

from __future__ import annotations

import enum
import fnmatch
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Final, Literal

import msgspec

from muster import vocabulary
from muster.service import sections, validation
from muster_plugin.config import gpus as config_gpus
from muster_plugin.config import resources as config_resources
from muster_plugin.config import watch as config_watch
from muster_plugin.model import advertised, errors, patterns

API_VERSION: Final = "muster.dev/v1"

_ENTRIES_MAX: Final = 500
Resources = Sequence[config_resources.Resource | None]
"""The configured resources; None stands for an invalid resource."""
SOCKET_DIRECTORY: Final = "device-plugins"
REGISTRY_DIRECTORY: Final = "plugins_registry"
_SLUG_MAX: Final = 40
_UNIQUE: Final = 8
PROCESS_BYTES: Final = 4
_SERIAL_MAX: Final = 99_999
_ENDPOINT: Final = re.compile(r"muster-(.+)-[0-9a-f]+-[0-9]+\.sock")
_LIVE: Final = frozenset({"api_version", "resources", "gpus", "nodes"})
"""Sections whose changes are applied while the process runs."""
_GPUS_AT_START: Final = ("library",)
"""Keys of `gpus` that are only read at startup."""
FilePath = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
Labels = Annotated[Mapping[str, str], msgspec.Meta(max_length=500)]


class NodeConfiguration(errors.CheckedInParts, frozen=True, kw_only=True, omit_defaults=True):
    """The configuration of one node."""

    resources: tuple[config_resources.Resource, ...] = ()
    gpus: config_gpus.Gpus | None = None

    def demands(self) -> Iterator[validation.Demand]:
        """Yield the consistency checks of this section."""
        yield lambda: _repeated(self.resources, self.gpus)
        yield lambda: _overlaps(self.resources)


class NodeOverride(errors.CheckedInParts, frozen=True, kw_only=True, omit_defaults=True):
    """An override for some nodes; each resource is added, or replaces that of the same name.

    `match` is a shell pattern for the node's name, or labels with a shell pattern for each value.
    `gpus` replaces the whole section; null means no GPUs.
    """

    match: (
        Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
        | Mapping[str, config_resources.Glob]
    )
    resources: Annotated[tuple[config_resources.Resource, ...], msgspec.Meta(max_length=1000)] = ()
    gpus: config_gpus.Gpus | msgspec.UnsetType | None = msgspec.UNSET

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
            yield "match: must not be empty; write resources for every node at the top level"

    def _empty_problems(self) -> Iterator[str]:
        if not self.resources and self.gpus is msgspec.UNSET:
            yield "resources: set resources, gpus or both"


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
        yield lambda: name_problems(self.resources, self._gpus, self.nodes)
        yield lambda: overlap_problems(self.resources, self.nodes)

    def for_node(self, node: str, labels: Mapping[str, str]) -> NodeConfiguration:
        """Return the configuration of one node. Raises ValueError if its resources conflict."""
        chosen, gpus = self.resources, self._gpus
        for override in self.nodes:
            if override.applies_to(node, labels):
                chosen = _replaced(chosen, override.resources)
                gpus = gpus if override.gpus is msgspec.UNSET else override.gpus
        return NodeConfiguration(resources=chosen, gpus=gpus)

    @property
    def _gpus(self) -> config_gpus.Gpus | None:
        return self.gpus

    def _empty_problems(self) -> Iterator[str]:
        if not self.resources and not self.nodes and self.gpus is None:
            yield "resources: set resources, gpus or both"


def name_problems(
    resources: Resources, gpus: config_gpus.Gpus | None, nodes: Sequence[NodeOverride | None]
) -> Iterator[str]:
    """Yield a problem for each name that two resources have, at the top level or in an override."""
    yield from _repeated(resources, gpus)
    for at, override in validation.whole(nodes):
        repeated = _repeated(override.resources, override.gpus or None)
        yield from errors.prefixed(f"nodes[{at}]", repeated)


def overlap_problems(resources: Resources, nodes: Sequence[NodeOverride | None]) -> Iterator[str]:
    """Yield a problem for each entry whose nodes another resource's entry certainly matches too.

    If there are too many entries to compare, that is the only problem.
    """
    overrides = [*validation.whole(nodes)]
    lists: list[Resources] = [resources, *(override.resources for _, override in overrides)]
    everything = [resource for entries in lists for _, resource in validation.whole(entries)]
    count = sum(len(group.devices) for resource in everything for group in resource.groups)
    if count > _ENTRIES_MAX:
        yield f"resources: all groups together have {count} entries; use at most {_ENTRIES_MAX}"
        return
    yield from _overlaps(resources)
    for at, override in overrides:
        yield from errors.prefixed(f"nodes[{at}]", _overlaps(override.resources))


def _repeated(resources: Resources, gpus: config_gpus.Gpus | None) -> Iterator[str]:
    named = [resource.name for _, resource in validation.whole(resources) if not resource.per_match]
    for name in errors.duplicates([*named, *(gpus.names() if gpus else ())]):
        yield f"resources: two resources are named {name}; the kubelet would keep only one"


def _overlaps(resources: Resources) -> Iterator[str]:
    for narrow, wide in overlaps(claims(resources)):
        yield (
            f"{narrow.key}: {narrow.resource} would also advertise nodes of {wide.resource} "
            f"({wide.key}); exclude them there, or write shared: true in one of these entries"
        )


def warnings(resources: Resources, nodes: Sequence[NodeOverride | None] = ()) -> Iterator[str]:
    """Yield warnings about valid entries that probably do not match what was intended."""
    for at, resource in validation.whole(resources):
        yield from (f"resources[{at}].{warning}" for warning in resource.warnings())
    for at, override in validation.whole(nodes):
        yield from (f"nodes[{at}].{warning}" for warning in warnings(override.resources))


def claims(resources: Resources) -> tuple[Claim, ...]:
    """Return the entries whose device nodes must belong to one resource only."""
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


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A configured entry, its key, and the index and name of its resource."""

    at: int
    resource: str
    key: str
    entry: config_resources.Entry


def overlaps(claims: Sequence[Claim]) -> Iterator[tuple[Claim, Claim]]:
    """Yield each pair of entries of two resources if the second matches every node of the first.

    Two different patterns are not compared: whether they overlap can only be determined on the
    node.
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


class Format(enum.StrEnum):
    """The plugin for which a file is written."""

    MUSTER = "muster"
    SMARTER = "smarter"
    GENERIC = "generic"
    NVIDIA = "nvidia"


class _Directory(errors.Checked, frozen=True, kw_only=True):
    directory: FilePath

    def problems(self) -> Iterator[str]:
        """Yield the reasons why the path is refused."""
        return errors.prefixed("directory", errors.path_problems(self.directory))


class Kubelet(_Directory, frozen=True, kw_only=True):
    """The kubelet's directory; its sockets are in subdirectories."""

    directory: FilePath = "/var/lib/kubelet"


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """How often the plugin publishes a heartbeat."""

    interval_s: Annotated[float, msgspec.Meta(ge=0.1, le=3600)] = 5.0


class Cdi(_Directory, frozen=True, kw_only=True):
    """Where the container runtime looks for CDI specs."""

    directory: FilePath = "/var/run/cdi"


class SimulatedGpus(msgspec.Struct, frozen=True, kw_only=True):
    """Simulated GPUs; `faults` is the path of a script of XIDs, one JSON object per line."""

    count: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4
    product: vocabulary.Name = "NVIDIA H100 80GB HBM3"
    memory_mib: Annotated[int, msgspec.Meta(ge=1)] = 81_559
    faults: FilePath | None = None

    def __post_init__(self) -> None:
        """Refuse an invalid path."""
        if self.faults:
            errors.raise_if_any(errors.prefixed("faults", errors.path_problems(self.faults)))


class Settings(
    Document,
    frozen=True,
    kw_only=True,
    omit_defaults=False,
    rename={"api_version": "apiVersion"},
):
    """All settings of the plugin. An empty `node` means NODE_NAME, else the host's name.

    `labels` are the node's labels, for the overrides in `nodes`. `handover_s` is how long the
    plugin waits for another plugin on this node to end.
    """

    api_version: Literal["muster.dev/v1"] = "muster.dev/v1"
    node: Annotated[str, msgspec.Meta(pattern=r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)?$")] = ""
    name: vocabulary.PluginName = "device-plugin"
    labels: Labels = msgspec.field(default_factory=dict)
    bus: sections.Bus = sections.Bus()
    http: sections.Http = sections.Http()
    log: sections.Log = sections.Log()
    kubelet: Kubelet = msgspec.field(default_factory=Kubelet)
    cdi: Cdi = msgspec.field(default_factory=Cdi)
    heartbeat: Heartbeat = msgspec.field(default_factory=Heartbeat)
    watch: config_watch.Watch = msgspec.field(default_factory=config_watch.Watch)
    snapshot_period_s: sections.Pause = 300.0
    handover_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0
    simulated_gpus: SimulatedGpus | None = None

    def demands(self) -> Iterator[validation.Demand]:
        """Yield the consistency checks of this section."""
        # not super(): a settings tree with invalid fields is not an instance
        yield from Document.demands(self)
        yield self._socket_problems

    @property
    def serves(self) -> bool:
        """Whether the settings configure devices for any node."""
        return bool(self.resources or self.nodes or self.gpus or self.simulated_gpus)

    def at(self, node: str) -> NodeConfiguration:
        """Return the configuration of one node. Raises ValueError if its resources conflict."""
        return self.for_node(node, self.labels)

    def hash_for(self, node: str) -> str:
        """Return a hash of the settings that determine one node's devices.

        Health accepts a new hash as the reason for fewer devices. Raises ValueError like `at`.
        """
        canonical = msgspec.json.encode((self.at(node), self.simulated_gpus), order="sorted")
        return hashlib.sha256(canonical).hexdigest()[:12]

    def restart_needed_for(self, other: Settings, node: str) -> tuple[str, ...]:
        """Return the changed keys that this node's plugin only reads at startup."""
        sections = tuple(
            field.encode_name
            for field in msgspec.structs.fields(self)
            if field.name not in _LIVE and getattr(self, field.name) != getattr(other, field.name)
        )
        ours, theirs = (each.at(node).gpus or config_gpus.Gpus() for each in (self, other))
        waits = [key for key in _GPUS_AT_START if getattr(ours, key) != getattr(theirs, key)]
        return (*sections, *(f"gpus.{key}" for key in waits))

    @property
    def _gpus(self) -> config_gpus.Gpus | None:
        return self.gpus or (config_gpus.Gpus() if self.simulated_gpus else None)

    def _empty_problems(self) -> Iterator[str]:
        watches = isinstance(self.watch, config_watch.Watch) and self.watch.enabled
        if not (self.serves or watches):
            yield "nothing to do: set resources, gpus, simulated_gpus or watch (enabled: true)"

    def _socket_problems(self) -> Iterator[str]:
        lists: list[tuple[config_resources.Resource | None, ...]] = [self.resources]
        lists += [override.resources for _, override in validation.whole(self.nodes)]
        resources = {
            resource.name for entries in lists for _, resource in validation.whole(entries)
        }
        gpus = [self._gpus, *(override.gpus for _, override in validation.whole(self.nodes))]
        for name in sorted(resources.union(*(gpus_.names() for gpus_ in gpus if gpus_))):
            longest = endpoint(
                name.replace(advertised.WILDCARD, "x" * advertised.LABEL_MAX),
                process="0" * 2 * PROCESS_BYTES,
                serial=_SERIAL_MAX,
            )
            path = f"{self.kubelet.directory}/{REGISTRY_DIRECTORY}/{longest}"
            yield from errors.prefixed(
                "kubelet.directory", advertised.socket_problems(path, resource=name)
            )


def endpoint(resource: str, *, process: str, serial: int) -> str:
    """Return the socket's file name, unique to its resource, process (in hex) and generation."""
    return f"muster-{slug(resource)}-{process}-{serial}.sock"


def slug_of(endpoint: str) -> str:
    """Return the slug in a socket's name; empty if the socket is not muster's."""
    match = _ENDPOINT.fullmatch(endpoint)
    return match[1] if match else ""


def slug(resource: str) -> str:
    """Convert a resource name to a unique part of a file name, at most 40 characters."""
    plain = resource.replace("/", "_")
    if len(plain) <= _SLUG_MAX:
        return plain
    unique = hashlib.sha256(resource.encode()).hexdigest()[:_UNIQUE]
    return f"{plain[: _SLUG_MAX - _UNIQUE - 1]}.{unique}"
