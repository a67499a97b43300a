"""Adapter for system calls: mounts or unmounts in a pod's namespace, in a child process.

| step    | action                                                                             |
|---------|------------------------------------------------------------------------------------|
| prepare | the process forbids tracing, imports nothing more, and keeps only what it needs    |
| access  | the caller must be allowed to write to the mount point; checked as the caller      |
| enter   | /dev/fuse is opened in the user namespace that will own the mount; the mount       |
|         | namespace is entered; the caller must still be running                             |
| create  | the file system is created with its parameters; it is not visible yet              |
| attach  | the mount is attached to the mount point                                           |
| reply   | the caller receives /dev/fuse; if it does not, the mount is removed                |

From `enter` on, the root directory is that of a container, whose files cannot be trusted: no path
in it is resolved, no program in it is run, and no user name is looked up. The process ends after
its job; then only the caller still has a descriptor of /dev/fuse.

If the mounter is killed, the child is also killed, except between attaching and replying, so that
no mount is left without a daemon.
"""

import contextlib
import errno
import os
import select
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from muster_fuse import protocol
from muster_fuse.kernel import jobs, mount_users, syscalls

CONTINUE_S: Final = 10.0
"""How long a caller that has received /dev/fuse may take to request the mount."""
_NO_SIGNAL: Final = 0
_STANDARD_STREAMS: Final = 3
_BUSY_RETRIES: Final = 10
_BUSY_PAUSE_S: Final = 0.01


class Failed(Exception):
    """A step failed; `outcome` is the outcome of the job."""

    def __init__(self, outcome: jobs.Outcome) -> None:
        super().__init__(outcome.text)
        self.outcome = outcome


class Host(NamedTuple):
    """The host's /proc/self/fd and /dev/fuse, which a child keeps open with O_PATH.

    `parent` is the process id of the mounter.
    """

    parent: int
    descriptors: int
    device: int


def prepare(*, parent: int, keep: tuple[int, ...]) -> Host:
    """Forbid tracing and imports, close all descriptors except `keep`, and open those of `Host`."""
    with step("prepare", "prepare"):
        _protect(parent)
        # a module that is imported from now on could come from a container
        sys.meta_path.clear()
        sys.path.clear()
        # a child that hangs must not keep the broker's log open after the broker has ended
        nothing = os.open("/dev/null", os.O_RDWR)
        for stream in range(_STANDARD_STREAMS):
            os.dup2(nothing, stream)
        low = _STANDARD_STREAMS
        for descriptor in (*sorted(keep), os.sysconf("SC_OPEN_MAX")):
            os.closerange(low, descriptor)
            low = descriptor + 1
        descriptors = os.open("/proc/self/fd", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    with step("device", "find /dev/fuse"):
        return Host(parent, descriptors, os.open("/dev/fuse", os.O_PATH | os.O_CLOEXEC))


def mount(
    job: jobs.MountJob,
    host: Host,
    *,
    peer: int,
    point: int,
    reply: int,
    report: Callable[[jobs.Outcome], None],
) -> jobs.Outcome:
    """Mount on `point` and send /dev/fuse over `reply`. Raises Failed.

    Before the mount is attached, it is reported, because this process may be killed afterwards.
    """
    asking = socket.socket(fileno=reply)
    with step("access", "inspect the mount point"):
        status = os.fstat(point)
    if not stat.S_ISDIR(status.st_mode) and not stat.S_ISREG(status.st_mode):
        text = "the mount point is neither a directory nor a file"
        raise Failed(jobs.Outcome(errno.ENOTDIR, text, "access"))
    _check_access(job.caller, host, point, status)
    with step("device", "open the kernel's list of FUSE connections"):
        connections = syscalls.open_connections()
    device = _enter(job, host, peer)
    if job.sync_init:
        _wait_until_ready(asking, device)
    made = _create(job, device, status.st_mode)
    with step("create", "inspect the mount"):
        minor = syscalls.status(made).minor
        # once others see the mount, it may be removed and its number reused
        connection = os.stat(str(minor), dir_fd=connections)
    outcome = jobs.Outcome(minor=minor, inode=connection.st_ino, created_ns=connection.st_ctime_ns)
    report(outcome._replace(stage=jobs.ATTACHING))
    syscalls.end_with_parent(_NO_SIGNAL)
    try:
        _attach(made, point)
        packet = protocol.reply(protocol.Operation.MOUNT)
        try:
            with step("reply", "reply to the caller"):
                _reply(asking, packet, () if job.sync_init else (device,))
        except Failed:
            with step("reply", "remove the mount after the caller has gone"):
                os.fchdir(host.descriptors)
                syscalls.umount(str(made), syscalls.MNT_DETACH)
            raise
    finally:
        syscalls.end_with_parent(signal.SIGKILL)
    return outcome


def unmount(job: jobs.UnmountJob, host: Host, *, peer: int, root: int) -> jobs.Outcome:
    """Remove the mount whose root is `root`. Raises Failed.

    The kernel itself refuses to remove a mount in use only if the mount is given by its path. But
    another container of the pod may rename directories on the path meanwhile, so that the path
    leads to another mount. So the mount is given by its descriptor, and its users are counted here.
    """
    with step("unmount", "unmount"):
        _check_unused(peer, root, lazy=job.lazy)
    with step("enter", "enter the container"):
        syscalls.setns(peer, syscalls.CLONE_NEWNS)
        _protect(host.parent)
    _check_running(peer)
    with step("unmount", "unmount"):
        os.fchdir(host.descriptors)
        syscalls.umount(str(root), syscalls.MNT_DETACH)
    return jobs.Outcome()


def _check_access(caller: jobs.Caller, host: Host, point: int, status: os.stat_result) -> None:
    """Refuse a mount point that the caller may not write to, or another user's sticky directory.

    Otherwise the caller could mount over /etc, and become root with a forged password file. A
    caller that `overrides` permissions is not checked.
    """
    if caller.overrides:
        return
    if status.st_mode & stat.S_ISVTX and status.st_uid != caller.uid:
        text = "the mount point is a sticky directory of another user"
        raise Failed(jobs.Outcome(errno.EPERM, text, "access"))
    has_list = _has_access_list(point)
    with step("access", "write to the mount point as the caller"), _as_caller(caller, host):
        try:
            syscalls.check_access(point, os.W_OK)
        except OSError as error:
            # a read-only file system refuses all writes, perhaps without checking permissions
            if error.errno != errno.EROFS or has_list or not _may_write(caller, status):
                raise


@contextlib.contextmanager
def _as_caller(caller: jobs.Caller, host: Host) -> Iterator[None]:
    """Run the block with only the caller's rights to files."""
    os.setgroups(caller.groups)
    os.setegid(caller.gid)
    os.seteuid(caller.uid)
    if caller.overrides:
        syscalls.restore_capabilities()
    else:
        syscalls.drop_capabilities()
    yield
    # after an error the process ends, so nothing is restored
    os.seteuid(0)
    syscalls.restore_capabilities()
    os.setegid(0)
    os.setgroups([])
    _protect(host.parent)


def _has_access_list(point: int) -> bool:
    """Return whether an access control list may refuse what the mode allows."""
    try:
        os.getxattr(f"/proc/self/fd/{point}", "system.posix_acl_access")
    except OSError as error:
        return error.errno not in {errno.ENODATA, errno.EOPNOTSUPP}
    return True


def _may_write(caller: jobs.Caller, status: os.stat_result) -> bool:
    """Return whether the mode allows the caller to write; ignore access control lists."""
    if status.st_uid == caller.uid:
        return bool(status.st_mode & stat.S_IWUSR)
    in_group = status.st_gid in {caller.gid, *caller.groups}
    needed = stat.S_IWOTH | (stat.S_IWGRP if in_group else 0)
    return status.st_mode & needed == needed


def _enter(job: jobs.MountJob, host: Host, peer: int) -> int:
    """Enter the container; return /dev/fuse, opened in the user namespace of the mount."""

    def opened() -> int:
        with step("device", "open /dev/fuse"):
            return os.open(str(host.device), os.O_RDWR | os.O_CLOEXEC, dir_fd=host.descriptors)

    own = job.caller.user_namespace
    device = -1 if own else opened()
    with step("enter", "enter the container"):
        kinds = syscalls.CLONE_NEWNS | (syscalls.CLONE_NEWUSER if own else 0)
        syscalls.setns(peer, kinds)
        _protect(host.parent)
    _check_running(peer)
    return opened() if own else device


def _check_running(peer: int) -> None:
    """Refuse if the caller has exited, because the data about it may belong to another process."""
    if _is_readable(peer, 0):
        raise Failed(jobs.Outcome(errno.ESRCH, "the caller has exited", "enter"))


def _is_readable(descriptor: int, wait_s: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(wait_s * 1000))


def _wait_until_ready(asking: socket.socket, device: int) -> None:
    """Send /dev/fuse to the caller and wait until the caller requests the mount."""
    with step("reply", "wait for the caller to be ready"):
        _reply(asking, protocol.reply(protocol.Operation.SYNC_INIT), (device,))
        if not _is_readable(asking.fileno(), CONTINUE_S):
            raise TimeoutError(errno.ETIMEDOUT, f"nothing arrived within {CONTINUE_S:g} s")
        # descriptors that come with the packet stay in the queue
        packet, _, flags, _ = asking.recvmsg(
            protocol.PACKET_MAX, 0, socket.MSG_PEEK | socket.MSG_DONTWAIT
        )
        has_descriptors = bool(flags & socket.MSG_CTRUNC)
        if not has_descriptors:
            asking.recv(1, socket.MSG_DONTWAIT)
    try:
        request = protocol.parse(packet, descriptors=int(has_descriptors))
    except protocol.MalformedPacket as error:
        text = f"the caller did not send CONTINUE: {error}"
        raise Failed(jobs.Outcome(errno.EPROTO, text, "reply")) from None
    if request.operation is not protocol.Operation.CONTINUE:
        text = f"the caller sent {request.operation.name} instead of CONTINUE"
        raise Failed(jobs.Outcome(errno.EPROTO, text, "reply"))


def _create(job: jobs.MountJob, device: int, mode: int) -> int:
    """Create the file system; return its unattached mount."""
    with step("create", "configure a FUSE file system"):
        context = syscalls.fsopen(b"fuse")
    ours = {
        "fd": str(device),
        "rootmode": f"{stat.S_IFMT(mode):o}",
        "user_id": str(job.caller.user_id),
        "group_id": str(job.caller.group_id),
    }
    with step("create", "create the file system", context):
        for key, value in (*job.strings, *ours.items()):
            syscalls.fsconfig_string(context, key, value)
        for key in job.flags:
            syscalls.fsconfig_flag(context, key)
        # with sync_init, the caller may have connected the device to a file system that it has
        syscalls.fsconfig_create_new(context)
        always = syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV
        made = syscalls.fsmount(context, job.attributes | always)
        syscalls.make_private(made)
        os.close(context)
    return made


def _attach(made: int, point: int) -> None:
    try:
        syscalls.move_mount(made, point)
    except OSError as error:
        reasons = {
            errno.EINVAL: "the mount point is not in the container, or its type has changed",
            errno.ENOENT: "the mount point has been deleted",
        }
        text = reasons.get(error.errno or 0, f"cannot attach the mount: {error.strerror}")
        raise Failed(jobs.Outcome(error.errno or errno.EIO, text, "attach")) from None


def _reply(asking: socket.socket, packet: bytes, descriptors: tuple[int, ...]) -> None:
    flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
    socket.send_fds(asking, [packet], descriptors, flags)


def _check_unused(peer: int, root: int, *, lazy: bool) -> None:
    """Raise OSError with EBUSY if the mount with this root is in use and `lazy` is not set.

    A process that begins to use the mount after this check keeps using it, as after a lazy unmount.
    If another mount covers the whole mount, the kernel would remove the covering mount instead, so
    OSError is raised even if `lazy` is set.
    """
    users = mount_users.MountUsers(peer, syscalls.status(root))
    if users.is_covered():
        raise OSError(errno.EBUSY, "another mount covers this one; unmount the other one first")
    if lazy:
        return
    if users.has_mounts():
        text = "another mount is below this one; unmount the other one first, or unmount lazily"
        raise OSError(errno.EBUSY, text)
    for _ in range(_BUSY_RETRIES):
        if not users.has_processes():
            return
        # the sender of the descriptor may be about to close it
        time.sleep(_BUSY_PAUSE_S)
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))


def _protect(parent: int) -> None:
    """Restore the protections that the kernel resets whenever a process's credentials change."""
    syscalls.forbid_tracing()
    syscalls.end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        # the mounter ended before the kernel was asked to send the signal
        raise Failed(jobs.Outcome(errno.ESRCH, "the mounter has ended", "prepare"))


@contextlib.contextmanager
def step(stage: str, doing: str, context: int | None = None) -> Iterator[None]:
    """Raise Failed instead of OSError, with the kernel's messages about `context`, if given."""
    try:
        yield
    except OSError as error:
        said = syscalls.messages(context) if context is not None else ""
        text = f"cannot {doing}: {error.strerror or error}" + (f": {said}" if said else "")
        # a socket's own TimeoutError has no errno
        code = error.errno or (errno.ETIMEDOUT if isinstance(error, TimeoutError) else errno.EIO)
        raise Failed(jobs.Outcome(code, text, stage)) from None
