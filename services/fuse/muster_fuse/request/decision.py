"""Pure: decides whether a pod's request is allowed, and converts it to a job.

| check, in this order                                              | if not         |
|-------------------------------------------------------------------|----------------|
| the process belongs to the pod of this socket                     | foreign_pod    |
| its ids are clear, and the same as when it connected              | unclear_caller |
| its user namespace owns its mount namespace                       | user_namespace |
| limits: see request.limits                                        | busy, too_*    |
| the descriptor was opened with O_PATH                             | bad_descriptor |
| the descriptor's mount is in the process's mount namespace        | not_visible    |
| the path is not the container's root, nor in /proc, /sys or /dev  | protected      |
| the mount does not propagate to other namespaces                  | shared         |
| the file system is of a type that may contain mount points        | file_system    |
| in a user namespace, the device is not requested before its mount | user_namespace |
| all options are allowed                                           | option         |
"""

import enum
import errno
from collections.abc import Mapping
from typing import Final

from muster import escaping
from muster_fuse import config, protocol
from muster_fuse.kernel import jobs
from muster_fuse.request import caller, options

MOUNTABLE: Final = frozenset(
    {"bcachefs", "btrfs", "ceph", "cifs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs"}
    | {"iso9660", "jfs", "nfs", "nfs4", "ntfs3", "overlay", "ramfs", "smb3", "squashfs", "tmpfs"}
    | {"vfat", "xfs", "zfs"}
)
"""Types of file systems that may contain mount points: those with ordinary files."""
_PROTECTED: Final = frozenset({"dev", "proc", "sys"})
_SHARED_MEMORY: Final = "/dev/shm/"  # noqa: S108  # a pod's own files
_SHOWN_MAX: Final = 255


class Reason(enum.StrEnum):
    """Why a request was refused."""

    MALFORMED = "malformed"
    EXITED = "exited"
    FOREIGN_POD = "foreign_pod"
    UNCLEAR_CALLER = "unclear_caller"
    USER_NAMESPACE = "user_namespace"
    BUSY = "busy"
    STUCK = "stuck"
    """An earlier job of the pod did not end although it was killed."""
    TOO_FAST = "too_fast"
    TOO_MANY_IN_POD = "too_many_in_pod"
    TOO_MANY_ON_NODE = "too_many_on_node"
    BAD_DESCRIPTOR = "bad_descriptor"
    NOT_VISIBLE = "not_visible"
    PROTECTED = "protected"
    SHARED = "shared"
    FILE_SYSTEM = "file_system"
    OPTION = "option"
    NOT_FUSE = "not_fuse"
    NOT_YOURS = "not_yours"
    FAILED = "failed"
    """The request was allowed, but the kernel refused it or did not answer."""


class Refusal(Exception):
    """A refused request: its reason, its errno, and a line of text for the user."""

    def __init__(self, reason: Reason, errno_: int, text: str) -> None:
        super().__init__(text)
        self.reason = reason
        self.errno = errno_
        self.text = text


def check_caller(
    pod_uid: str, process: caller.Process, *, own_cgroup: str, own_user_namespace: int
) -> jobs.Caller:
    """Return the caller, if the process belongs to the pod of this socket. Raises Refusal.

    If `pod_uid` is empty, the process must be in the broker's own cgroups.
    """
    try:
        uid = caller.pod_uid(process.cgroup)
        asking = caller.identify(process, own_user_namespace=own_user_namespace)
    except caller.Unclear as error:
        raise Refusal(Reason.UNCLEAR_CALLER, errno.EPERM, str(error)) from None
    belongs = uid == pod_uid if pod_uid else process.cgroup == own_cgroup
    if not belongs:
        text = "the process does not belong to the pod of this socket"
        raise Refusal(Reason.FOREIGN_POD, errno.EPERM, text)
    if process.user_namespace != process.mount_owner:
        text = (
            "the process is in a user namespace that does not own its mount namespace;"
            " create both together (unshare --user --mount), or mount outside"
        )
        raise Refusal(Reason.USER_NAMESPACE, errno.EPERM, text)
    return asking


def check_target(
    target: caller.Descriptor, line: caller.MountLine | None, *, fuse_on_fuse: bool
) -> None:
    """Raise Refusal if a mount point is hidden, protected, shared or on an unsuitable file system.

    `line` is the descriptor's mount, as the process sees it.
    """
    line = _visible(target, line)
    if _is_protected(target.path):
        text = f"{shown(target.path)} cannot be a mount point: the container runtime relies on it"
        raise Refusal(Reason.PROTECTED, errno.EPERM, text)
    if line.is_shared:
        text = (
            f"{shown(line.mount_point)} is a shared mount: other containers or the node would see"
            " what is mounted there; use a directory on another volume"
        )
        raise Refusal(Reason.SHARED, errno.EPERM, text)
    if line.kind not in MOUNTABLE and not (fuse_on_fuse and line.is_fuse):
        text = f"a mount point on a file system of type {shown(line.kind)} is not allowed"
        raise Refusal(Reason.FILE_SYSTEM, errno.EPERM, text)


def mount_job(
    request: protocol.Request, asking: jobs.Caller, *, limits: config.Limits
) -> jobs.MountJob:
    """Return the job for a request to mount.

    Raises Refusal if it is not allowed. A process in its own user namespace may be able to mount.
    With the device in advance, it could mount without the broker, which would neither count nor
    watch that mount.
    """
    sync_init = protocol.Flag.SYNC_INIT in request.flags
    if sync_init and asking.user_namespace:
        text = "in a user namespace, the device is handed over only together with its mount"
        raise Refusal(Reason.USER_NAMESPACE, errno.EOPNOTSUPP, text)
    try:
        parameters = options.parse(request.options, allow_other=limits.allow_other)
    except options.RefusedOption as error:
        raise Refusal(Reason.OPTION, errno.EINVAL, str(error)) from None
    return jobs.MountJob(
        caller=asking,
        strings=parameters.strings,
        flags=parameters.flags,
        attributes=parameters.attributes,
        sync_init=sync_init,
    )


def unmount_job(
    request: protocol.Request,
    asking: jobs.Caller,
    *,
    root: caller.Descriptor,
    lines: Mapping[int, caller.MountLine],
) -> jobs.UnmountJob:
    """Return the job for a request to unmount. Raises Refusal if the caller may not do that.

    `lines` describes, by mount id, the mount whose root was sent and that mount's parent.
    """
    line = _visible(root, lines.get(root.mount_id))
    if not line.is_fuse:
        text = f"{shown(line.mount_point)} is not a FUSE file system, but {shown(line.kind)}"
        raise Refusal(Reason.NOT_FUSE, errno.EINVAL, text)
    below = lines.get(line.parent_id)
    if below is None:
        text = f"{shown(line.mount_point)} is not mounted on a directory that the process sees"
        raise Refusal(Reason.NOT_VISIBLE, errno.EINVAL, text)
    if below.is_shared:
        text = f"{shown(line.mount_point)} is shared with other containers, which would lose it too"
        raise Refusal(Reason.SHARED, errno.EPERM, text)
    if f"user_id={asking.user_id}" not in line.options and asking.user_id != 0:
        text = f"{shown(line.mount_point)} was mounted by another user"
        raise Refusal(Reason.NOT_YOURS, errno.EPERM, text)
    return jobs.UnmountJob(caller=asking, lazy=protocol.Flag.LAZY in request.flags)


def shown(text: str) -> str:
    """Make a name that a pod has chosen printable on one line, and cut it if it is long."""
    return escaping.plain(text)[:_SHOWN_MAX]


def _visible(target: caller.Descriptor, line: caller.MountLine | None) -> caller.MountLine:
    if not target.is_path:
        text = "the descriptor was not opened with O_PATH"
        raise Refusal(Reason.BAD_DESCRIPTOR, errno.EBADF, text)
    if line is None:
        text = "the process cannot see the mount that this path is on; was it unmounted?"
        raise Refusal(Reason.NOT_VISIBLE, errno.EINVAL, text)
    return line


def _is_protected(path: str) -> bool:
    if path.startswith(_SHARED_MEMORY):
        return False
    first = path.split("/", 2)[1:2]
    return first in ([""], []) or first[0] in _PROTECTED
