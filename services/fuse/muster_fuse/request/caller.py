"""Pure: identifies the caller: parses /proc texts about a process and its descriptors.

Pods choose the names of processes, directories and file systems in these texts. The kernel escapes
the names so that they stay within their field; a text that the kernel cannot have written is
refused as unclear. `decision` then checks that the caller's pod owns the socket. The formats are
those of proc(5), cgroups(7) and user_namespaces(7).
"""

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from muster_fuse.kernel import jobs

_SYSTEMD_POD: Final = re.compile(
    r"(?:[\w.-]+-)?kubepods(?:-besteffort|-burstable)?-pod([0-9A-Za-z_]+)\.slice", re.ASCII
)
"""Matches the last part of a pod's cgroup path.

The uid in it has underscores, because a hyphen starts a new level in systemd.
"""
_CGROUPFS_POD: Final = re.compile(
    r"kubepods(?:/besteffort|/burstable)?/pod([0-9A-Za-z-]+)", re.ASCII
)
_CAP_DAC_OVERRIDE: Final = 1 << 1
_O_PATH: Final = 0o10000000
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")
_UNMAPPED: Final = 0xFFFF_FFFF


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    """A pod that is served; `uid` is empty for the self-test of a broker that is not in a pod."""

    uid: str
    namespace: str
    name: str


class Unclear(ValueError):
    """A text from /proc is unexpected or ambiguous; the message gives the reason."""


class Process(NamedTuple):
    """The data about the process that connected, read while it was running.

    `cgroup`, `status`, `uid_map` and `gid_map` are the texts of these files in /proc/<pid>.
    `connected_uid` and `connected_gid` are its effective ids when it connected. The namespaces are
    inode numbers; `mount_owner` is the user namespace that owns its mount namespace.
    """

    cgroup: str
    status: str
    uid_map: str
    gid_map: str
    connected_uid: int
    connected_gid: int
    user_namespace: int
    mount_owner: int


class Ids(NamedTuple):
    """The effective ids of a process, its groups and its effective capabilities."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    capabilities: int


class Descriptor(NamedTuple):
    """The data in /proc/self/fdinfo about a received descriptor, and its path.

    `path` is the path within the mount namespace of the file, as the kernel shows it. `is_path`
    means that the descriptor was opened with O_PATH.
    """

    mount_id: int
    is_path: bool
    path: str


class MountLine(NamedTuple):
    """A line of mountinfo: a mount in the namespace of a process."""

    mount_id: int
    parent_id: int
    device: str
    mount_point: str
    is_shared: bool
    kind: str
    """The type of the file system, such as `fuse.sshfs`."""
    source: str
    options: tuple[str, ...]
    """The options of the file system, not those of this mount."""

    @property
    def is_fuse(self) -> bool:
        """Whether this is a FUSE file system without a block device."""
        return self.kind == "fuse" or self.kind.startswith("fuse.")


def pod_uid(cgroup: str) -> str | None:
    """Return the uid of a process's pod, from its cgroup file; None if it is in no pod.

    Raises Unclear. The outermost pod is used, because a container may be allowed to create cgroups
    below its own.
    """
    uids = set()
    for line in _lines(cgroup):
        fields = line.split(":", 2)
        if len(fields) != 3:  # noqa: PLR2004  # number, controllers, path
            raise Unclear("a line in the cgroup file has no path")
        uids.add(_outermost_pod(fields[2]))
    uids.discard(None)
    if len(uids) > 1:
        raise Unclear("the process is in cgroups of several pods")
    return next(iter(uids), None)


def _outermost_pod(path: str) -> str | None:
    parts = path.split("/")
    for end, part in enumerate(parts, start=1):
        if systemd := _SYSTEMD_POD.fullmatch(part):
            return systemd[1].replace("_", "-")
        for length in (2, 3):
            tail = "/".join(parts[max(0, end - length) : end])
            if cgroupfs := _CGROUPFS_POD.fullmatch(tail):
                return cgroupfs[1]
    return None


def ids(status: str) -> Ids:
    """Return the ids in a status file, in the user namespace of the reader. Raises Unclear."""
    try:
        return Ids(
            uid=int(_field(status, "Uid").split()[1]),
            gid=int(_field(status, "Gid").split()[1]),
            groups=tuple(map(int, _field(status, "Groups").split())),
            capabilities=int(_field(status, "CapEff"), 16),
        )
    except (ValueError, IndexError) as error:
        raise Unclear(f"cannot parse /proc/PID/status of the caller: {error}") from None


def seen_inside(id_: int, id_map: str) -> int:
    """Return an id as seen in a user namespace with this uid_map or gid_map. Raises Unclear."""
    for line in _lines(id_map):
        try:
            inside, outside, count = map(int, line.split())
        except ValueError:
            raise Unclear("a line in an id map does not have three numbers") from None
        if outside != _UNMAPPED and outside <= id_ < outside + count:
            return inside + id_ - outside
    raise Unclear(f"id {id_} is not mapped in the process's user namespace")


def identify(process: Process, *, own_user_namespace: int) -> jobs.Caller:
    """Return the description of the process that the mounter needs. Raises Unclear.

    Only a process that is root in its user namespace now, and was root when it connected, may
    override permissions. Otherwise a program with file capabilities could inherit a connection of a
    process without them.
    """
    now = ids(process.status)
    if (now.uid, now.gid) != (process.connected_uid, process.connected_gid):
        raise Unclear("the process has changed its user or group since it connected")
    user_id = seen_inside(now.uid, process.uid_map)
    return jobs.Caller(
        uid=now.uid,
        gid=now.gid,
        groups=now.groups,
        user_id=user_id,
        group_id=seen_inside(now.gid, process.gid_map),
        user_namespace=process.user_namespace != own_user_namespace,
        overrides=user_id == 0 and bool(now.capabilities & _CAP_DAC_OVERRIDE),
    )


def descriptor(fdinfo: str, path: str) -> Descriptor:
    """Parse an fdinfo file. Raises Unclear."""
    try:
        flags = int(_field(fdinfo, "flags"), 8)
        mount_id = int(_field(fdinfo, "mnt_id"))
    except ValueError as error:
        raise Unclear(f"cannot parse fdinfo of a descriptor: {error}") from None
    return Descriptor(mount_id=mount_id, is_path=bool(flags & _O_PATH), path=path)


def mount_line(mountinfo: Iterable[str], mount_id: int) -> MountLine | None:
    """Return the line for a mount, or None if there is none. Raises Unclear."""
    start = f"{mount_id} "
    line = next((line for line in mountinfo if line.startswith(start)), None)
    return None if line is None else read_line(line)


def read_line(line: str) -> MountLine:
    """Parse a line of mountinfo. Raises Unclear."""
    fields = line.rstrip("\n").split(" ")
    try:
        end = fields.index("-", 6)
        kind, source, options = fields[end + 1 : end + 4]
        return MountLine(
            mount_id=int(fields[0]),
            parent_id=int(fields[1]),
            device=fields[2],
            mount_point=_unescaped(fields[4]),
            is_shared=any(tag.startswith("shared:") for tag in fields[6:end]),
            kind=_unescaped(kind),
            source=_unescaped(source),
            options=tuple(options.split(",")),
        )
    except ValueError as error:
        raise Unclear(f"unexpected line in mountinfo: {error}") from None


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), text)


def _lines(text: str) -> list[str]:
    """Split text only at line feeds, as the kernel does; names may contain other line ends."""
    return text.removesuffix("\n").split("\n") if text else []


def _field(text: str, name: str) -> str:
    """Return the value on the only line with that name. Raises ValueError."""
    start = f"{name}:"
    values = [line[len(start) :] for line in _lines(text) if line.startswith(start)]
    if len(values) != 1:
        raise ValueError(f"{len(values)} lines named {name}")
    return values[0].strip()
