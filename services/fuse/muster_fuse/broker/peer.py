"""Adapter: a pod's connection: receives a request, and identifies its sender from /proc.

Process ids are reused; the order of the steps makes this harmless. First get a pidfd of the process
that connected, then read /proc for its process id, then check through the pidfd that it still runs.
The process's mount table is read before its namespaces: an unprivileged process can move only into
inner namespaces, so a mount point that it saw before the move does not exist in the new ones.

A pod chooses the descriptors that it sends, and its file system or socket can delay closing them
without limit. So they are received in a thread with its own descriptor table, which passes on only
descriptors opened with O_PATH, because these close at once. In a shared table, every new child
process would have to close them as well, and the broker would wait for that.
"""

import contextlib
import errno
import fcntl
import os
import select
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from muster_fuse import protocol
from muster_fuse.kernel import syscalls
from muster_fuse.request import caller, decision

_SO_PEERPIDFD: Final = 77
_NS_GET_USERNS: Final = 0xB701
_UCRED: Final = struct.Struct("i2I")
_INT: Final = struct.Struct("i")
_CLONE_FILES: Final = 0x400
_TAKEN: Final = struct.Struct("<I?")
"""The header that `_take` sends before a packet.

It has the number of descriptors, and whether the packet or the descriptors were truncated.
"""
_PACKET_MAX: Final = protocol.PACKET_MAX
_DESCRIPTORS_MAX: Final = 4
"""The maximum number of descriptors received, which is more than a request may carry.

The kernel drops and reports further descriptors.
"""
_TEXT_BYTES_MAX: Final = 65_536
_MOUNTINFO_BYTES_MAX: Final = 1 << 26
_PROC: Final = Path("/proc")


class Own(NamedTuple):
    """The broker's own user namespace and cgroups."""

    user_namespace: int
    cgroup: str


class _Taken(NamedTuple):
    descriptors: int
    is_cut: bool


class Received(NamedTuple):
    """A request, and the process that connected.

    `target` describes the request's descriptor, if there is one. `lines` describe the mount of the
    descriptor and that mount's parent, as far as the process sees them.
    """

    request: protocol.Request
    process: caller.Process
    own: Own
    target: caller.Descriptor | None
    lines: dict[int, caller.MountLine]

    def descriptor(self) -> caller.Descriptor:
        """Return the descriptor of a request that carries one."""
        assert self.target is not None, "the protocol has checked that there is one"
        return self.target


class Peer:
    """A connection, the process at the other end, and the descriptors that the process has sent."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.pidfd = -1
        self.descriptors: list[int] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._taking: threading.Thread | None = None

    def receive(self) -> protocol.Request | None:
        """Return the request that has arrived; None if the peer disconnected. Raises Refusal."""
        with self._lock:
            return None if self._is_closed else self._request()

    def identify(self, request: protocol.Request) -> Received | None:
        """Return the received request with its sender; None if the connection was closed.

        Raises Refusal. A pod can make this slow, with a mount table of a hundred thousand lines.
        """
        with self._lock:
            if self._is_closed:
                return None
            pid, uid, gid = self._identify()
            try:
                target = _target(self.descriptors[0]) if self.descriptors else None
                lines = _lines(pid, target.mount_id) if target else {}
                process = _read_process(pid, uid=uid, gid=gid)
            except (OSError, caller.Unclear) as error:
                # while the process runs, all these files are readable and valid
                self._check_runs()
                raise decision.Refusal(
                    decision.Reason.UNCLEAR_CALLER, errno.EPERM, decision.shown(str(error))
                ) from None
            self._check_runs()
            return Received(request, process, _own(), target, lines)

    def close(self) -> None:
        """Close the connection and all descriptors. The pod can make this block without limit."""
        with self._lock:
            self._is_closed = True
            self.connection.close()
            for descriptor in (self.pidfd, *self.descriptors):
                if descriptor >= 0:
                    os.close(descriptor)
            self.pidfd, self.descriptors = -1, []
        if self._taking is not None:
            self._taking.join()

    def _request(self) -> protocol.Request | None:
        """Return the request that has arrived; None if there is none. Raises Refusal."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            self._taking = threading.Thread(
                target=_take, args=(self.connection.fileno(), theirs.fileno()), daemon=True
            )
            self._taking.start()
            message, self.descriptors, _, _ = socket.recv_fds(
                ours, _TAKEN.size + _PACKET_MAX, _DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
            )
        taken, packet = _Taken(*_TAKEN.unpack_from(message)), message[_TAKEN.size :]
        if not packet and not taken.descriptors:
            return None
        if taken.is_cut:
            raise _malformed("the packet is too long, or carries too many descriptors")
        try:
            request = protocol.parse(packet, descriptors=taken.descriptors)
        except protocol.MalformedPacket as error:
            raise _malformed(str(error)) from None
        if taken.descriptors != len(self.descriptors):
            text = "the descriptor was not opened with O_PATH"
            raise decision.Refusal(decision.Reason.BAD_DESCRIPTOR, errno.EBADF, text)
        return request

    def _identify(self) -> tuple[int, int, int]:
        """Return the process, user and group ids at the time of connecting. Raises Refusal."""
        raw = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        pid, uid, gid = _UCRED.unpack(raw)
        if pid <= 0:
            text = "the broker cannot see this pod's processes: the broker's own pod needs hostPID"
            raise decision.Refusal(decision.Reason.UNCLEAR_CALLER, errno.ESRCH, text)
        try:
            self.pidfd = _peer_pidfd(self.connection, pid)
        except OSError:
            raise _exited() from None
        return pid, uid, gid

    def _check_runs(self) -> None:
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        if poll.poll(0):
            raise _exited()


def _take(connection: int, to: int) -> None:
    """Receive a packet, and pass on the descriptors that are safe to close in any thread."""
    message, descriptors, passed = _TAKEN.pack(0, False), list[int](), list[int]()  # noqa: FBT003  # not cut
    syscalls.unshare(_CLONE_FILES)
    keep = sorted((connection, to))
    for low, high in zip((-1, *keep), (*keep, os.sysconf("SC_OPEN_MAX")), strict=True):
        os.closerange(low + 1, high)
    with socket.socket(fileno=to) as passing:
        try:
            with socket.socket(fileno=connection) as receiving:
                packet, descriptors, flags, _ = socket.recv_fds(
                    receiving, _PACKET_MAX + 1, _DESCRIPTORS_MAX, socket.MSG_DONTWAIT
                )
            is_cut = flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(packet) > _PACKET_MAX
            message = _TAKEN.pack(len(descriptors), bool(is_cut)) + packet[:_PACKET_MAX]
            passed = [descriptor for descriptor in descriptors if _is_path(descriptor)]
        except (OSError, caller.Unclear):
            # the peer has disconnected, or cannot be served
            pass
        finally:
            socket.send_fds(passing, [message], passed)
    for descriptor in descriptors:
        # the descriptor's file system may return any error
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _is_path(descriptor: int) -> bool:
    fdinfo = _text(_PROC / "thread-self" / "fdinfo" / str(descriptor))
    return caller.descriptor(fdinfo, "").is_path


def _malformed(text: str) -> decision.Refusal:
    return decision.Refusal(decision.Reason.MALFORMED, errno.EPROTO, text)


def _exited() -> decision.Refusal:
    text = "the process that connected has ended; it has to wait for the reply"
    return decision.Refusal(decision.Reason.EXITED, errno.ESRCH, text)


def _peer_pidfd(connection: socket.socket, pid: int) -> int:
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, _INT.size)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
        # before Linux 6.5; a reused process id passes the cgroup check only within the same pod
        return os.pidfd_open(pid)
    return int(_INT.unpack(raw)[0])


def _own() -> Own:
    process = _PROC / "self"
    return Own((process / "ns" / "user").stat().st_ino, _text(process / "cgroup"))


def _read_process(pid: int, *, uid: int, gid: int) -> caller.Process:
    """Read the data in /proc about the process that has this id now."""
    process = _PROC / str(pid)
    return caller.Process(
        cgroup=_text(process / "cgroup"),
        status=_text(process / "status"),
        uid_map=_text(process / "uid_map"),
        gid_map=_text(process / "gid_map"),
        connected_uid=uid,
        connected_gid=gid,
        user_namespace=(process / "ns" / "user").stat().st_ino,
        mount_owner=_owner(process / "ns" / "mnt"),
    )


def _owner(namespace: Path) -> int:
    """Return the user namespace that owns a namespace."""
    entered = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        owner = fcntl.ioctl(entered, _NS_GET_USERNS)
    finally:
        os.close(entered)
    try:
        return os.fstat(owner).st_ino
    finally:
        os.close(owner)


def _target(descriptor: int) -> caller.Descriptor:
    """Return the kernel's data about a descriptor, without a request to its file system."""
    process = _PROC / "self"
    path = (process / "fd" / str(descriptor)).readlink()
    return caller.descriptor(_text(process / "fdinfo" / str(descriptor)), str(path))


def _lines(pid: int, mount_id: int) -> dict[int, caller.MountLine]:
    line = caller.mount_line(_mountinfo(pid, mount_id), mount_id)
    if line is None:
        return {}
    below = caller.mount_line(_mountinfo(pid, line.parent_id), line.parent_id)
    return {mount.mount_id: mount for mount in (line, below) if mount}


def _mountinfo(pid: int, mount_id: int) -> Iterator[str]:
    """Yield the mountinfo lines that start with a mount's id, without decoding the other lines.

    Only the kernel's line ends split lines: names may contain other characters at which Python
    splits.
    """
    start = b"%d " % mount_id
    left = _MOUNTINFO_BYTES_MAX
    with (_PROC / str(pid) / "mountinfo").open("rb") as file:
        for line in file:
            left -= len(line)
            if left < 0:
                raise caller.Unclear("the mount table is implausibly large")
            if line.startswith(start):
                yield line.decode(errors="surrogateescape")


def _text(path: Path) -> str:
    with path.open("rb") as file:
        text = file.read(_TEXT_BYTES_MAX)
    return text.decode(errors="surrogateescape")
