"""Pure: defines the observations that the node's model receives, and the actions it returns."""

import enum
from collections.abc import Mapping

import msgspec

from muster import vocabulary


class Answer(enum.StrEnum):
    """The outcome of one probe of a socket."""

    ANSWERED = "answered"
    REFUSED = "refused"
    SILENT = "silent"
    WRONG = "wrong"
    MISSING = "missing"
    """The socket answers, but the driver's endpoint that it reports does not exist."""
    INCONCLUSIVE = "inconclusive"
    """The probe proves nothing: this process was too slow, or could not connect to the socket."""


class Directory(enum.StrEnum):
    """A directory of the kubelet in which plugins create their sockets."""

    PLUGINS = "device-plugins"
    REGISTRY = "plugins_registry"


class SocketFile(msgspec.Struct, frozen=True, kw_only=True):
    """A socket file; `identity` changes when it is recreated, `created_at` only orders files."""

    directory: Directory = Directory.PLUGINS
    name: str
    identity: str
    created_at: int = 0

    @property
    def path(self) -> str:
        """The path below the kubelet's directory."""
        return f"{self.directory}/{self.name}"


class Scanned(msgspec.Struct, frozen=True, kw_only=True):
    """The sockets in the kubelet's directories, except the kubelet's own and muster's.

    `kubelet_age_s` is the age of the kubelet's socket; None if the socket does not exist.
    `kubelet_identity` identifies that socket and changes when it is recreated; the age alone could
    mislead after the clock was changed. `ours` are the slugs of the resources that muster's plugins
    serve.
    """

    sockets: tuple[SocketFile, ...]
    kubelet_age_s: float | None
    kubelet_identity: str = ""
    ours: frozenset[str] = frozenset()


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """The process that serves a socket; `identity` is unique, and empty if it is unknown.

    `pid`, `name` and `pod` (the pod's uid) are known only with `hostPID`. `is_watched` means that
    the kernel will report the end of the process.
    """

    identity: str = ""
    pid: int | None = None
    name: str = ""
    pod: str = ""
    is_watched: bool = False


class Driver(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a registration socket to GetInfo.

    `endpoint` is the socket on which the driver serves; empty if it is the same socket.
    """

    kind: vocabulary.WatchedKind
    name: str
    endpoint: str = ""


class Probed(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one probe of the socket at `path`; `detail` describes the problem.

    `driver` is how a registration socket describes its driver. If there is one, and nothing serves
    its endpoint, `answer` is REFUSED or MISSING.
    """

    path: str
    identity: str
    answer: Answer
    detail: str = ""
    process: Process | None = None
    driver: Driver | None = None


def inconclusive(file: SocketFile) -> Probed:
    """Return the result of a probe that was not made."""
    return Probed(path=file.path, identity=file.identity, answer=Answer.INCONCLUSIVE)


class ProcessEnded(msgspec.Struct, frozen=True):
    """A process that served the socket at `path` has ended."""

    path: str
    identity: str


class ProcessesSeen(msgspec.Struct, frozen=True):
    """Why processes cannot run (`stopped`, `a zombie`), by the path of the socket they serve."""

    halted: Mapping[str, str]


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """The devices that the kubelet's podresources API lists, by resource.

    `counts` (allocatable devices) and `allocated` are None if the kubelet does not answer, or
    cannot answer that call.
    """

    counts: Mapping[str, int] | None = None
    allocated: Mapping[str, int] | None = None
    pods: Mapping[str, tuple[str, ...]] = {}
    is_answering: bool = True


class Registered(msgspec.Struct, frozen=True):
    """How many devices each resource has in the kubelet's checkpoint."""

    counts: Mapping[str, int]


class HardwareSeen(msgspec.Struct, frozen=True):
    """Descriptions of the node's hardware, keyed by the resource that should offer it."""

    hardware: Mapping[str, str]


class FilesMissing(msgspec.Struct, frozen=True):
    """CDI devices without a spec, keyed by the driver that assigned them to containers."""

    devices: Mapping[str, tuple[str, ...]]


Observation = (
    Scanned
    | Probed
    | ProcessEnded
    | ProcessesSeen
    | Listed
    | Registered
    | HardwareSeen
    | FilesMissing
)


class Probe(msgspec.Struct, frozen=True):
    """The action to probe this socket."""

    file: SocketFile


class Change(msgspec.Struct, frozen=True):
    """The action to report a changed plugin, or one that is no longer watched (`gone`)."""

    watched: vocabulary.Watched
    gone: bool = False


class Learned(msgspec.Struct, frozen=True):
    """The action to save the learned data, which has changed."""


Action = Probe | Change | Learned
