"""Adapter for a pod's connection: receives a request, and identifies its sender from /proc.

Process ids are reused; the order of the steps makes this harmless. First get a pidfd of the process
that connected, then read /proc for its process id, then check through the pidfd that it still runs.
The process's mount table is read before its namespaces: an unprivileged process can move only into
inner namespaces, so a mount point that it saw before the move does not exist in the new ones.

A request is first read without its descriptors, which stay in the connection's queue. They are
received in a child of the mounter, because their file system can delay closing them without limit.
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
from muster_fuse.kernel import job_history, jobs, mounter_client, receiving
from muster_fuse.request import caller, decision

_SO_PEERPIDFD: Final = 77
_NS_GET_USERNS: Final = 0xB701
_UCRED: Final = struct.Struct("i2I")
_INT: Final = struct.Struct("i")
_TEXT_BYTES_MAX: Final = 65_536
_MOUNTINFO_BYTES_MAX: Final = 1 << 26
_PACKETS_MAX: Final = 1000
"""More packets than fit into the queue of a connection."""
_PROC: Final = Path("/proc")


class Own(NamedTuple):
    """The broker's own user namespace and cgroups."""

    user_namespace: int
    cgroup: str


class Received(NamedTuple):
    """A request, and the process that connected.

    `target` describes the request's descriptor, if there is one. `lines` describe the mount of the
    descriptor and that mount's parent, by mount id, if the process sees them.
    """

    request: protocol.Request
    process: caller.Process
    own: Own
    target: caller.Descriptor | None
    lines: dict[int, caller.MountLine]

    def descriptor(self) -> caller.Descriptor:
        """Return the description of the descriptor that a request carries."""
        assert self.target is not None, "the protocol has checked that there is one"
        return self.target


class Peer:
    """A connection, the process at the other end, and the descriptors that the process has sent."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.pidfd = -1
        self.descriptors: list[mounter_client.PodDescriptor] = []
        self._message = b""
        self._lock = threading.Lock()
        self._is_closed = False
        self._is_read_by_child = False
        """Whether a child may still receive from the connection."""

    def peek(self) -> protocol.Request | None:
        """Return the next request, and leave it in the connection's queue. Raises Refusal.

        Returns None if there is no request, such as after the peer has disconnected.
        """
        try:
            # without space for descriptors, the kernel only tells that there are some
            packet, _, flags, _ = self.connection.recvmsg(
                protocol.PACKET_MAX + 1, 0, socket.MSG_PEEK | socket.MSG_DONTWAIT
            )
        except OSError:
            return None
        has_descriptors = bool(flags & socket.MSG_CTRUNC)
        if not packet and not has_descriptors:
            return None
        return _parsed(packet, descriptors=int(has_descriptors), is_cut=False)

    async def receive(
        self, mounter: mounter_client.Mounter, history: job_history.JobHistory
    ) -> jobs.Outcome:
        """Receive the packet with its descriptors in a child of the mounter; return the outcome."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            self._is_read_by_child = True
            try:
                outcome = await mounter.receive(
                    connection=self.connection.fileno(), passing=theirs.fileno(), history=history
                )
                self._is_read_by_child = outcome.stage in {"mounter", "stuck"}
                return outcome
            finally:
                # from now on, the child passes nothing on
                ours.shutdown(socket.SHUT_RD)
                with contextlib.suppress(BlockingIOError):
                    size = receiving.HEADER.size + protocol.PACKET_MAX
                    self._message, received, _ = receiving.receive_now(ours, size)
                    self.descriptors = [*map(mounter_client.PodDescriptor, received)]

    def request(self) -> protocol.Request | None:
        """Return the received request; None if no packet was received. Raises Refusal."""
        if not self._message:
            return None
        count, is_cut = receiving.HEADER.unpack_from(self._message)
        packet = self._message[receiving.HEADER.size :]
        request = _parsed(packet, descriptors=count, is_cut=is_cut)
        if count != len(self.descriptors):
            text = "the descriptor was not opened with O_PATH"
            raise decision.Refusal(decision.Reason.BAD_DESCRIPTOR, errno.EBADF, text)
        return request

    def identify(self, request: protocol.Request) -> Received | None:
        """Return the received request with its sender; None if the connection was closed.

        Raises Refusal. A pod can make this slow, with a mount table of a hundred thousand lines.
        """
        with self._lock:
            if self._is_closed:
                return None
            pid, uid, gid = self._identify()
            try:
                target = _target(self.descriptors[0].number) if self.descriptors else None
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

    def undiscarded(self) -> list[mounter_client.PodDescriptor]:
        """Stop receiving; return the descriptors that must be discarded before `close`."""
        left = [descriptor for descriptor in self.descriptors if not descriptor.is_taken]
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RD)
        if self._is_read_by_child or not self._drain():
            left.append(mounter_client.PodDescriptor(self.connection.fileno()))
        return left

    def _drain(self) -> bool:
        """Drop unread packets; return False if one may carry descriptors.

        Closing with an unread packet would reset the connection before the peer reads the reply.
        """
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            for _ in range(_PACKETS_MAX):
                # with room for the credentials only, which every packet has, even an empty one
                _, credentials, flags, _ = self.connection.recvmsg(
                    1, receiving.CREDENTIALS, socket.MSG_PEEK | socket.MSG_DONTWAIT
                )
                if flags & socket.MSG_CTRUNC:
                    return False
                if not credentials:
                    return True
                self.connection.recv(1, socket.MSG_DONTWAIT)
        return False

    def close(self) -> None:
        """Close all descriptors; the caller must first discard those from `undiscarded`."""
        with self._lock:
            self._is_closed = True
            self.connection.close()
            for number in (self.pidfd, *(descriptor.number for descriptor in self.descriptors)):
                if number >= 0:
                    os.close(number)
            self.pidfd, self.descriptors = -1, []

    def _identify(self) -> tuple[int, int, int]:
        """Open the peer's pidfd; return its process, user and group ids. Raises Refusal."""
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


def _parsed(packet: bytes, *, descriptors: int, is_cut: bool) -> protocol.Request:
    """Return the request in a packet. Raises Refusal."""
    if is_cut or len(packet) > protocol.PACKET_MAX:
        raise _malformed("the packet is too long, or carries too many descriptors")
    try:
        return protocol.parse(packet, descriptors=descriptors)
    except protocol.MalformedPacket as error:
        raise _malformed(str(error)) from None


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
    """Return the inode number of the user namespace that owns a namespace."""
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

    Lines are split only at line feeds: names may contain other characters at which Python would
    split them.
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
