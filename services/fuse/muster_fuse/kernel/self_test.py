"""Adapter for the broker's socket: the self-test, which mounts, uses and unmounts a file system.

It runs in a child of the mounter, in its own mount namespace. Like a pod's helper, it sends the
broker a directory to mount on, which is on a tmpfs. It then serves the mounted file system itself,
which consists only of a root directory.
"""

import errno
import os
import socket
import stat
import struct
from collections.abc import Callable
from typing import Final

from muster_fuse import protocol
from muster_fuse.kernel import jobs, mount_steps, syscalls

_POINT: Final = "muster-self-test"
_MODE: Final = stat.S_IFDIR | 0o511
"""An unusual file mode, which a stat through the mount must return."""
_STEP_S: Final = 2.0
_REQUEST_MAX: Final = 1 << 18
_INIT: Final = 26
_GETATTR: Final = 3
_HEADER: Final = struct.Struct("<IIQ")
"""The header of a request: length, opcode, unique id."""


def run(job: jobs.SelfTestJob) -> jobs.Outcome:
    """Mount through the socket of `job`, stat, and unmount. Raises OSError or Failed."""
    with mount_steps.step("connect", "connect to the broker"):
        to_mount, to_unmount = _connected(job.socket), _connected(job.socket)
    with mount_steps.step("prepare", "prepare a directory"):
        files = _private_files()
        os.mkdir(_POINT, dir_fd=files)
        point = os.open(_POINT, os.O_PATH | os.O_CLOEXEC, dir_fd=files)
    device = _asked(to_mount, protocol.Operation.MOUNT, point)
    if device is None:
        raise _failed("mount", "the broker sent no descriptor of /dev/fuse")
    with mount_steps.step("use", "stat the mounted directory"):
        is_same = _served(device, lambda: os.stat(_POINT, dir_fd=files).st_mode == _MODE)
    if not is_same:
        raise _failed("use", "stat does not show the directory that was mounted")
    with mount_steps.step("unmount", "open the root of the mount"):
        root = os.open(_POINT, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=files)
    _asked(to_unmount, protocol.Operation.UNMOUNT, root)
    try:
        os.read(device, _REQUEST_MAX)
    except OSError as error:
        if error.errno == errno.ENODEV:
            return jobs.Outcome()
        raise
    raise _failed("unmount", "the mount still exists after it was removed")


def _connected(path: str) -> socket.socket:
    broker = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    broker.settimeout(_STEP_S)
    broker.connect(path)
    return broker


def _private_files() -> int:
    """Return the root of a new tmpfs, mounted in a new mount namespace of this process."""
    syscalls.unshare(syscalls.CLONE_NEWNS)
    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    syscalls.make_private(root)
    context = syscalls.fsopen(b"tmpfs")
    syscalls.fsconfig_string(context, "size", "64k")
    syscalls.fsconfig_create(context)
    files = syscalls.fsmount(context, syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV)
    syscalls.move_mount(files, root)
    return files


def _asked(broker: socket.socket, operation: protocol.Operation, descriptor: int) -> int | None:
    """Send a request, and close its descriptor; return the descriptor in the reply, if any."""
    with mount_steps.step(operation.name.lower(), "send a request to the broker"), broker:
        socket.send_fds(broker, [protocol.request(operation)], [descriptor])
        # a mount is busy while a descriptor of its root is open
        os.close(descriptor)
        packet, descriptors, _, _ = socket.recv_fds(broker, protocol.PACKET_MAX, 1)
    try:
        reply = protocol.parse_reply(packet)
    except protocol.MalformedPacket as error:
        raise _failed(operation.name.lower(), f"the broker's reply is malformed: {error}") from None
    if reply.errno:
        raise mount_steps.Failed(jobs.Outcome(reply.errno, reply.text, operation.name.lower()))
    return descriptors[0] if descriptors else None


def _served(device: int, use: Callable[[], bool]) -> bool:
    """Run `use` in another process while this one serves the file system; return its result."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            # the process that uses the mount must not keep the connection alive
            os.close(device)
            code = 0 if use() else 1
        finally:
            os._exit(code)
    answered = False
    while not answered:
        request = os.read(device, _REQUEST_MAX)
        _, opcode, unique = _HEADER.unpack_from(request)
        body = _answer(opcode)
        os.write(device, struct.pack("<IiQ", 16 + len(body), 0, unique) + body)
        answered = opcode == _GETATTR
    _, status = os.waitpid(pid, 0)
    return status == 0


def _answer(opcode: int) -> bytes:
    """Return the answer to one of the two requests that a first stat causes."""
    # linux/fuse.h: struct fuse_init_out of version 7.31, struct fuse_attr_out
    if opcode == _INIT:
        return struct.pack("<4I2H2I2H8I", 7, 31, 4096, 0, 1, 1, 4096, 1, 1, *(0,) * 9)
    if opcode == _GETATTR:
        attributes = struct.pack("<6Q10I", 1, *(0,) * 8, _MODE, 1, *(0,) * 5)
        return struct.pack("<Q2I", 60, 0, 0) + attributes
    raise _failed("use", f"the kernel sent an unexpected request, opcode {opcode}")


def _failed(stage: str, text: str) -> mount_steps.Failed:
    return mount_steps.Failed(jobs.Outcome(errno.EIO, text, stage))
