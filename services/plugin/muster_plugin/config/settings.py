"""Pure: the settings of the plugin: which devices to advertise, and where kubelet and bus are.

The devices are those of schema v1 (`document`), in the same file; the rest concerns the process,
and a change of it needs a restart.
"""

import enum
import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Final, Literal

import msgspec

from muster import vocabulary
from muster.service import sections, validation
from muster_plugin.config import document
from muster_plugin.config import gpus as config_gpus
from muster_plugin.config import resources as config_resources
from muster_plugin.model import errors, names

SOCKET_DIRECTORY: Final = "device-plugins"
REGISTRY_DIRECTORY: Final = "plugins_registry"

_SLUG_MAX: Final = 40
_UNIQUE: Final = 8
PROCESS_BYTES: Final = 4
_SERIAL_MAX: Final = 99_999
_ENDPOINT: Final = re.compile(r"muster-(.+)-[0-9a-f]+-[0-9]+\.sock")
_LIVE: Final = frozenset({"api_version", "resources", "gpus", "nodes"})
"""Sections that are applied while the process runs."""
_GPUS_AT_START: Final = ("library",)
"""Keys of `gpus` that are read at the start only."""

FilePath = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
Labels = Annotated[Mapping[str, str], msgspec.Meta(max_length=500)]


class Format(enum.StrEnum):
    """The plugin for which a file is written."""

    MUSTER = "muster"
    SMARTER = "smarter"
    GENERIC = "generic"
    NVIDIA = "nvidia"


class Kubelet(msgspec.Struct, frozen=True, kw_only=True):
    """Where the kubelet keeps its sockets."""

    directory: FilePath = "/var/lib/kubelet"

    def __post_init__(self) -> None:
        """Refuse a relative path."""
        errors.raise_if_any(errors.prefixed("directory", errors.path_problems(self.directory)))


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """How often the plugin publishes a heartbeat."""

    interval_s: Annotated[float, msgspec.Meta(ge=0.1, le=3600)] = 5.0


class Cdi(msgspec.Struct, frozen=True, kw_only=True):
    """Where the container runtime looks for CDI specs."""

    directory: FilePath = "/var/run/cdi"

    def __post_init__(self) -> None:
        """Refuse a relative path."""
        errors.raise_if_any(errors.prefixed("directory", errors.path_problems(self.directory)))


class SimulatedGpus(msgspec.Struct, frozen=True, kw_only=True):
    """Simulated GPUs; `faults` is a script of XIDs, one JSON object per line."""

    count: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4
    product: vocabulary.Name = "NVIDIA H100 80GB HBM3"
    memory_mib: Annotated[int, msgspec.Meta(ge=1)] = 81_559
    faults: FilePath | None = None

    def __post_init__(self) -> None:
        """Refuse a relative path."""
        if self.faults:
            errors.raise_if_any(errors.prefixed("faults", errors.path_problems(self.faults)))


class Settings(
    errors.CheckedInParts, frozen=True, kw_only=True, rename={"api_version": "apiVersion"}
):
    """All settings of the plugin. An empty `node` is NODE_NAME, else the host's name.

    `labels` are the node's, for `nodes` that match by them. `handover_s` is how long to wait for
    another plugin on this node to end before giving up.
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
    snapshot_period_s: sections.Pause = 300.0
    handover_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0
    resources: Annotated[tuple[config_resources.Resource, ...], msgspec.Meta(max_length=1000)] = ()
    gpus: config_gpus.Gpus | None = None
    nodes: Annotated[tuple[document.NodeOverride, ...], msgspec.Meta(max_length=100)] = ()
    simulated_gpus: SimulatedGpus | None = None

    def demands(self) -> Iterator[validation.Demand]:
        """Yield the consistency checks of this section."""
        yield self._empty_problems
        yield lambda: document.name_problems(self.resources, self._gpus, self.nodes)
        yield lambda: document.overlap_problems(self.resources, self.nodes)
        yield self._socket_problems

    @property
    def device_document(self) -> document.Document:
        """The device configuration. Raises ValueError if its resources conflict."""
        return document.Document(
            api_version=self.api_version,
            resources=self.resources,
            gpus=self._gpus,
            nodes=self.nodes,
        )

    def at(self, node: str) -> document.NodeConfiguration:
        """Return the configuration of one node. Raises ValueError if its resources conflict."""
        return self.device_document.at(node, self.labels)

    def hash_for(self, node: str) -> str:
        """Return a hash of one node's device configuration alone.

        A new hash explains to health why a node has fewer devices; the log level does not. Raises
        ValueError like `at`.
        """
        canonical = msgspec.json.encode((self.at(node), self.simulated_gpus), order="sorted")
        return hashlib.sha256(canonical).hexdigest()[:12]

    def restart_needed_for(self, other: "Settings") -> tuple[str, ...]:
        """Return the changed keys that are only read at the start."""
        sections = tuple(
            field.encode_name
            for field in msgspec.structs.fields(self)
            if field.name not in _LIVE and getattr(self, field.name) != getattr(other, field.name)
        )
        ours, theirs = self.gpus or config_gpus.Gpus(), other.gpus or config_gpus.Gpus()
        waits = [key for key in _GPUS_AT_START if getattr(ours, key) != getattr(theirs, key)]
        return (*sections, *(f"gpus.{key}" for key in waits))

    @property
    def _gpus(self) -> config_gpus.Gpus | None:
        return self.gpus or (config_gpus.Gpus() if self.simulated_gpus else None)

    def _empty_problems(self) -> Iterator[str]:
        if not (self.resources or self.nodes or self.gpus or self.simulated_gpus):
            yield "nothing to advertise: give resources, gpus, simulated_gpus or several of them"

    def _socket_problems(self) -> Iterator[str]:
        lists: list[tuple[config_resources.Resource | None, ...]] = [self.resources]
        lists += [override.resources for _, override in validation.whole(self.nodes)]
        resources = {
            resource.name for entries in lists for _, resource in validation.whole(entries)
        }
        gpus = [self._gpus, *(override.gpus for _, override in validation.whole(self.nodes))]
        for name in sorted(resources.union(*(gpus_.names() for gpus_ in gpus if gpus_))):
            longest = endpoint(
                name.replace(names.WILDCARD, "x" * names.LABEL_MAX),
                process="0" * 2 * PROCESS_BYTES,
                serial=_SERIAL_MAX,
            )
            path = f"{self.kubelet.directory}/{REGISTRY_DIRECTORY}/{longest}"
            yield from errors.prefixed(
                "kubelet.directory", names.socket_problems(path, resource=name)
            )


def endpoint(resource: str, *, process: str, serial: int) -> str:
    """Return the file name of a socket: one resource, one process (in hex), one generation."""
    return f"muster-{slug(resource)}-{process}-{serial}.sock"


def slug_of(endpoint: str) -> str:
    """Return the slug of the resource of this socket; empty if it is not one of ours."""
    match = _ENDPOINT.fullmatch(endpoint)
    return match[1] if match else ""


def slug(resource: str) -> str:
    """Return a resource name for use in a file name: unique, at most 40 characters."""
    plain = resource.replace("/", "_")
    if len(plain) <= _SLUG_MAX:
        return plain
    unique = hashlib.sha256(resource.encode()).hexdigest()[:_UNIQUE]
    return f"{plain[: _SLUG_MAX - _UNIQUE - 1]}.{unique}"
