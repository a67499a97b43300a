"""Adapter for a pod's connection: receives packets or discards them, in a child of the mounter.

A pod chooses the descriptors that it sends, and its file system can delay the closing of a
descriptor without limit: the process that closes it then cannot be killed. So descriptors are
received and closed in a separate process. It passes a descriptor on only if the packet has no other
descriptor and this one was opened with O_PATH; even then, it may be the last reference to a mount,
and its closing may be slow.
"""

import contextlib
import fcntl
import os
import socket
import struct
from typing import Final

from muster_fuse import protocol
from muster_fuse.kernel import jobs

HEADER: Final = struct.Struct("<I?")
"""The header of a packet that is passed on.

It has the number of descriptors, and whether the packet or the descriptors were truncated.
"""
_INT: Final = struct.Struct("i")
DESCRIPTORS_MAX: Final = 4
"""The maximum number of descriptors received, which is more than a request may carry.

The kernel drops and reports further descriptors.
"""


CREDENTIALS: Final = socket.CMSG_SPACE(struct.calcsize("i2I"))
"""The space for the credentials of a packet's sender, in bytes."""


def receive(connection: int, passing: int) -> jobs.Outcome:
    """Receive a packet from a pod's `connection` and pass it on over the socket `passing`.

    Nothing is passed on if the pod has disconnected.
    """
    descriptors = list[int]()
    with (
        # the peer has disconnected, or cannot be served
        contextlib.suppress(OSError),
        socket.socket(fileno=passing) as onward,
        socket.socket(fileno=connection) as pod,
    ):
        packet, descriptors, flags = receive_now(pod, protocol.PACKET_MAX + 1)
        is_cut = bool(flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC))
        # no request has more than one
        passed = descriptors if len(descriptors) == 1 and _is_path(descriptors[0]) else []
        message = HEADER.pack(len(descriptors), is_cut) + packet[: protocol.PACKET_MAX]
        socket.send_fds(onward, [message], passed)
    for descriptor in descriptors:
        # the descriptor's file system may return any error
        with contextlib.suppress(OSError):
            os.close(descriptor)
    return jobs.Outcome()


def discard(discarded: int) -> jobs.Outcome:
    """Close an O_PATH descriptor, or receive all packets of a connection and close it.

    Closing with an unread packet would reset the connection before the peer reads the reply.
    """
    if _is_path(discarded):
        os.close(discarded)
        return jobs.Outcome()
    with contextlib.suppress(OSError), socket.socket(fileno=discarded) as pod:
        # with room for the credentials only, which every packet has; the kernel closes the rest
        while pod.recvmsg(1, CREDENTIALS, socket.MSG_DONTWAIT)[1]:
            pass
    return jobs.Outcome()


def receive_now(connection: socket.socket, size: int) -> tuple[bytes, list[int], int]:
    """Return a packet with its descriptors and flags. Raises BlockingIOError if there is none.

    `socket.recv_fds` cannot be used, because it ignores its argument `flags` (Python 3.11).
    """
    room = socket.CMSG_SPACE(DESCRIPTORS_MAX * _INT.size)
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    packet, ancillary, received, _ = connection.recvmsg(size, room, flags)
    descriptors = [
        descriptor
        for level, kind, data in ancillary
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (descriptor,) in _INT.iter_unpack(data[: len(data) // _INT.size * _INT.size])
    ]
    return packet, descriptors, received


def _is_path(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_PATH)
