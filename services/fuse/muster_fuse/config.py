"""Pure: the settings of the FUSE broker, with their defaults and bounds."""

import hashlib
from typing import Annotated

import msgspec

from muster.service import sections

Count = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
Seconds = Annotated[float, msgspec.Meta(ge=0.1, le=3600)]

Pattern = Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
Path = Annotated[str, msgspec.Meta(max_length=1024)]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits on a pod's mounts and requests, and when a mount counts as hung."""

    mounts_per_pod: Count = 32

    mounts_per_node: Count = 1024
    """The maximum number of mounts on a node: the kernel does not limit their memory per pod."""

    connections_per_pod: Count = 8
    """The maximum number of a pod's connections; further connections wait."""

    requests_burst: Count = 64
    """How many requests a pod may make in a burst; after that, `requests_per_minute` applies."""

    requests_per_minute: Annotated[float, msgspec.Meta(gt=0, le=10_000)] = 60.0

    request_s: Seconds = 5.0
    """How long a connection may take to send its request."""

    allow_other: bool = True
    """Whether the option `allow_other` is allowed; a mount is visible only in its container anyway.
    """

    fuse_on_fuse: bool = False
    """Whether a mount point may lie on a FUSE file system."""

    watch_s: Seconds = 5.0
    """How often mounts are checked."""

    hung_s: Seconds = 60.0
    """How long a mount's daemon may be silent before the mount counts as hung."""

    lingering_s: Seconds = 120.0
    """How long a killed process of a hung mount's pod may take to end before this is reported."""


class Kubelet(msgspec.Struct, frozen=True, kw_only=True):
    """The kubelet's directory for pods and plugin sockets: its `--root-dir`."""

    directory: Path = "/var/lib/kubelet"


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """How often the broker publishes a heartbeat."""

    interval_s: Seconds = 5.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the broker. If `node` is empty, NODE_NAME or the host name is used."""

    node: Annotated[str, msgspec.Meta(pattern=r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)?$")] = ""

    namespaces: Annotated[tuple[Pattern, ...], msgspec.Meta(min_length=1, max_length=1000)] = ("*",)
    """Shell patterns for the namespaces whose pods may have the broker's volume."""

    pods_max: Count = 500
    """The maximum number of pods on a node with the broker's volume."""

    limits: Limits = Limits()
    state: Path = "/var/lib/muster-fuse"
    """The directory for pods' volumes, and for the records that survive a restart of the broker."""

    helper: Path = "/opt/muster/fusermount3"
    """The program that pods see as `fusermount3`."""

    kubelet: Kubelet = Kubelet()
    self_test_s: sections.Pause = 60.0
    """How often the broker mounts, uses and unmounts a file system as a self-test."""

    bus: sections.Bus = sections.Bus()
    http: sections.Http = sections.Http()
    log: sections.Log = sections.Log()
    heartbeat: Heartbeat = Heartbeat()
    snapshot_period_s: sections.Pause = 300.0

    def __post_init__(self) -> None:
        """Reject a path that is relative or ends with a slash."""
        for key, path in (
            ("state", self.state),
            ("helper", self.helper),
            ("kubelet.directory", self.kubelet.directory),
        ):
            if not path.startswith("/") or path.endswith("/"):
                raise ValueError(f"{key}: {path!r} is not an absolute path without a final slash")

    @property
    def hash(self) -> str:
        """A hash of the settings that limit pods, for the heartbeats."""
        what = (self.namespaces, self.pods_max, self.limits)
        canonical = msgspec.json.encode(what, order="sorted")
        return hashlib.sha256(canonical).hexdigest()[:12]
