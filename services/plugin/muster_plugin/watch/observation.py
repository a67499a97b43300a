"""Pure: what is observed of the plugins of a node, and what the model of the node asks for."""

import enum
from collections.abc import Mapping

import msgspec

from muster import vocabulary


class Answer(enum.StrEnum):
    """What came of one connection to a socket."""

    ANSWERED = "answered"
    REFUSED = "refused"
    SILENT = "silent"
    WRONG = "wrong"
    INCONCLUSIVE = "inconclusive"
    """This process was too slow itself, or may not connect."""


class Directory(enum.StrEnum):
    """A directory of the kubelet in which plugins serve sockets."""

    PLUGINS = "device-plugins"
    REGISTRY = "plugins_registry"


class SocketFile(msgspec.Struct, frozen=True, kw_only=True):
    """A socket's file; `identity` changes when it is made again, `created_at` orders them."""

    directory: Directory = Directory.PLUGINS
    name: str
    identity: str
    created_at: int = 0

    @property
    def path(self) -> str:
        """The path below the kubelet's directory."""
        return f"{self.directory}/{self.name}"


class Scanned(msgspec.Struct, frozen=True, kw_only=True):
    """The sockets in the kubelet's directories, without the kubelet's own and without muster's.

    `kubelet_age_s` is the age of the kubelet's socket; None without one. `kubelet` changes when it
    is made again: the clock by which it has an age may be set meanwhile. `ours` are the resources
    (slugs) that muster plugins serve.
    """

    sockets: tuple[SocketFile, ...]
    kubelet_age_s: float | None
    kubelet: str = ""
    ours: frozenset[str] = frozenset()


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """The process that serves a socket; `identity` is unique, and empty if it cannot be told.

    Only with the node's process numbers (`hostPID`) are `number`, `name` and `pod` (its uid) known.
    `is_watched` means that its end will be reported.
    """

    identity: str = ""
    number: int | None = None
    name: str = ""
    pod: str = ""
    is_watched: bool = False


class Driver(msgspec.Struct, frozen=True, kw_only=True):
    """What a socket in the registry says it is; `endpoint` is the socket that serves it."""

    kind: vocabulary.WatchedKind
    name: str
    endpoint: str = ""


class Probed(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one probe of the socket at `path`; `detail` says what was wrong with it.

    `driver` is what a socket in the registry says it is; the answer is then that of its endpoint.
    """

    path: str
    identity: str
    answer: Answer
    detail: str = ""
    process: Process | None = None
    driver: Driver | None = None


class ProcessEnded(msgspec.Struct, frozen=True):
    """A process that served the socket at `path` has ended."""

    path: str
    identity: str


class ProcessesSeen(msgspec.Struct, frozen=True):
    """The processes, by socket, that cannot run; in words: `stopped`, `a zombie`."""

    halted: Mapping[str, str]


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """What the kubelet lists for pods, by resource; None if it does not answer, or not to that."""

    counts: Mapping[str, int] | None = None
    allocated: Mapping[str, int] | None = None
    pods: Mapping[str, tuple[str, ...]] = {}
    is_answering: bool = True


class Registered(msgspec.Struct, frozen=True):
    """The last lists by the kubelet's checkpoint: how many devices each resource had."""

    counts: Mapping[str, int]


class HardwareSeen(msgspec.Struct, frozen=True):
    """The hardware of the node by the resource that offers it, in words."""

    hardware: Mapping[str, str]


class FilesMissing(msgspec.Struct, frozen=True):
    """The CDI devices without a spec file, by the driver or resource whose pods need them."""

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
    """Ask for a probe of this socket."""

    file: SocketFile


class Change(msgspec.Struct, frozen=True):
    """What is observed of a plugin changed; `gone` means that it is no longer watched."""

    watched: vocabulary.Watched
    gone: bool = False


class Learned(msgspec.Struct, frozen=True):
    """What was learned changed and should be kept."""


Action = Probe | Change | Learned
