"""Pure. What the plugin is told: which devices to advertise, and where kubelet and bus are.

What the kubelet would refuse or never find is refused here, before anything is served. Sources of
the limits: kubelet pkg/kubelet/cm/devicemanager, IsExtendedResourceName and apimachinery's
validation; Linux unix(7) for socket paths.
"""

import hashlib
import re
from collections.abc import Iterator
from typing import Annotated, Final

import msgspec

from muster import sections, vocabulary

SOCKET_DIRECTORY: Final = "device-plugins"
SOCKET_PATH_BYTES_MAX: Final = 107
"""Linux: sun_path holds 108 bytes, with the final zero."""

_DOMAIN_MAX: Final = 244
_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_DOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*")
_PERMISSIONS = re.compile(r"(?!.*(.).*\1)[rwm]{1,3}")
_SLUG_MAX: Final = 40
_PID_MAX: Final = 4_194_304
_SERIAL_MAX: Final = 99_999

FilePath = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class Kubelet(msgspec.Struct, frozen=True, kw_only=True):
    """Where the kubelet keeps its sockets."""

    directory: FilePath = "/var/lib/kubelet"

    def __post_init__(self) -> None:
        """Refuse a path that would depend on where we were started."""
        _refuse(_path_problems(self.directory, key="directory"))


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """How often the plugin says that it is alive."""

    interval_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 5.0


class Resource(msgspec.Struct, frozen=True, kw_only=True):
    """Device nodes advertised under one resource name, `count` ids for each node."""

    name: vocabulary.Name
    paths: Annotated[tuple[FilePath, ...], msgspec.Meta(min_length=1, max_length=1000)]
    count: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    permissions: str = "rw"

    def __post_init__(self) -> None:
        """Refuse what the kubelet would refuse, or would count twice."""
        _refuse(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from _resource_name_problems(self.name)
        for path in self.paths:
            yield from _path_problems(path, key="paths")
        yield from (f"paths: {path} stands twice" for path in _repeated(self.paths))
        if not _PERMISSIONS.fullmatch(self.permissions):
            # runc fails every container that is given anything else
            yield f"permissions: {self.permissions!r} is not r, w, m or several of them, each once"


class SimulatedGpus(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs that exist only here; `faults` is a file of scripted XIDs, one JSON object a line."""

    resource: vocabulary.Name = "nvidia.com/gpu"
    count: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4
    product: vocabulary.Name = "NVIDIA H100 80GB HBM3"
    memory_mib: Annotated[int, msgspec.Meta(ge=1)] = 81_559
    faults: FilePath | None = None

    def __post_init__(self) -> None:
        """Refuse what the kubelet would refuse."""
        _refuse(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from _resource_name_problems(self.resource, key="resource")
        if self.faults:
            yield from _path_problems(self.faults, key="faults")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the plugin is told. An empty `node` is NODE_NAME, else the host's name."""

    node: Annotated[str, msgspec.Meta(pattern=r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)?$")] = ""
    name: vocabulary.PluginName = "device-plugin"
    bus: sections.Bus = sections.Bus()
    http: sections.Http = sections.Http()
    log: sections.Log = sections.Log()
    kubelet: Kubelet = msgspec.field(default_factory=Kubelet)
    heartbeat: Heartbeat = msgspec.field(default_factory=Heartbeat)
    snapshot_period_s: sections.Period = 300.0
    resources: tuple[Resource, ...] = ()
    simulated_gpus: SimulatedGpus | None = None

    def __post_init__(self) -> None:
        """Refuse what only shows when the sections are seen together."""
        _refuse(self._problems())

    @property
    def resource_names(self) -> tuple[str, ...]:
        """Every resource the plugin advertises, in the order given."""
        names = tuple(resource.name for resource in self.resources)
        return names + ((self.simulated_gpus.resource,) if self.simulated_gpus else ())

    @property
    def hash(self) -> str:
        """Tell one configuration from another; equal settings have equal hashes."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:12]

    def _problems(self) -> Iterator[str]:
        if not self.resource_names:
            yield "nothing to advertise: give resources, simulated_gpus or both"
        for name in _repeated(self.resource_names):
            yield f"resources: two are named {name}; the kubelet would keep only the newer one"
        for name in self.resource_names:
            longest = endpoint(name, pid=_PID_MAX, serial=_SERIAL_MAX)
            path = f"{self.kubelet.directory}/{SOCKET_DIRECTORY}/{longest}"
            if len(path.encode()) > SOCKET_PATH_BYTES_MAX:
                yield (
                    f"kubelet.directory: the socket of {name} could be {len(path.encode())} bytes "
                    f"({path}); Linux allows {SOCKET_PATH_BYTES_MAX}"
                )


def endpoint(resource: str, *, pid: int, serial: int) -> str:
    """Return the file name of a socket: one resource, one process, one generation."""
    return f"muster-{slug(resource)}-{pid}-{serial}.sock"


def slug(resource: str) -> str:
    """Return the resource name as part of a file name, at most 40 characters, still unique."""
    plain = resource.replace("/", "_")
    if len(plain) <= _SLUG_MAX:
        return plain
    return f"{plain[: _SLUG_MAX - 9]}.{hashlib.sha256(resource.encode()).hexdigest()[:8]}"


def _refuse(problems: Iterator[str]) -> None:
    found = "; ".join(problems)
    if found:
        raise ValueError(found)


def _path_problems(path: str, *, key: str) -> Iterator[str]:
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        yield f"{key}: {path!r} is not an absolute path"


def _resource_name_problems(name: str, *, key: str = "name") -> Iterator[str]:
    domain, slash, short = name.partition("/")
    if not slash:
        yield f"{key}: {name!r} has no domain; write it as example.com/{name}"
        return
    if "kubernetes.io/" in name:
        yield f"{key}: {name!r} is in Kubernetes' own domain"
    if name.startswith("requests."):
        yield f"{key}: {name!r} starts with 'requests.', which quotas use"
    if len(domain) > _DOMAIN_MAX or not _DOMAIN.fullmatch(domain):
        yield f"{key}: {domain!r} is no lower-case DNS name of at most {_DOMAIN_MAX} characters"
    if not _NAME.fullmatch(short):
        yield (
            f"{key}: {short!r} is not 1 to 63 of A-Z a-z 0-9 - _ . "
            "that begin and end with a letter or digit"
        )


def _repeated(values: tuple[str, ...]) -> Iterator[str]:
    return (value for value in dict.fromkeys(values) if values.count(value) > 1)
