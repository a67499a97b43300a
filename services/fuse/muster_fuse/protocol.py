"""Pure: encodes and decodes the packets between the helper in a pod and the broker.

The socket is of type SOCK_SEQPACKET: each request and each reply is a single packet of at most
4,096 bytes. A packet is a header of 16 bytes, all numbers little-endian, and a payload:

| bytes | request               | reply                        |
|-------|-----------------------|------------------------------|
| 0-3   | `MFUS`                | `MFUS`                       |
| 4     | version, 1            | version, 1                   |
| 5     | operation             | the request's operation      |
| 6-7   | flags                 | 0                            |
| 8-11  | 0                     | errno, 0 for success         |
| 12-15 | length of the payload | length of the payload        |
| 16-   | the option string     | one line of text, UTF-8      |

A mount carries one descriptor of the mount point, opened with O_PATH; its successful reply carries
one open descriptor of /dev/fuse. An unmount carries one descriptor of the root of the mount, opened
with O_PATH and O_NOFOLLOW. No other packet carries a descriptor.

With the flag SYNC_INIT, a mount has two replies. The first carries the descriptor of /dev/fuse,
with operation SYNC_INIT. When the file system is ready to be mounted, the helper sends an empty
CONTINUE packet. The second reply is the result of the mount, with operation MOUNT and without a
descriptor.
"""

import enum
import struct
from typing import Final, NamedTuple

PACKET_MAX: Final = 4096
VERSION: Final = 1
_HEADER: Final = struct.Struct("<4sBBHII")
_MAGIC: Final = b"MFUS"
TEXT_MAX: Final = 1024
"""The longest text of a reply, in bytes."""


class Operation(enum.IntEnum):
    """The operation that a packet requests or answers."""

    MOUNT = 1
    UNMOUNT = 2
    HELLO = 3
    SYNC_INIT = 4
    CONTINUE = 5


class Flag(enum.IntFlag):
    """A modifier of an operation."""

    LAZY = 1
    """Detach the file system even if it is in use."""
    SYNC_INIT = 2
    """Send the descriptor first, and mount when the helper requests it."""


DESCRIPTORS: Final = {Operation.MOUNT: 1, Operation.UNMOUNT: 1}
"""The number of descriptors by operation; other operations carry none."""
FLAGS: Final = {Operation.MOUNT: Flag.SYNC_INIT, Operation.UNMOUNT: Flag.LAZY}
"""The allowed flags by operation; other operations allow none."""


class Request(NamedTuple):
    """A request from a pod; `options` is the argument of `-o`, not yet parsed."""

    operation: Operation
    flags: Flag
    options: bytes


class MalformedPacket(ValueError):
    """A packet that violates the protocol; the text is the reason."""


def parse(packet: bytes, *, descriptors: int) -> Request:
    """Return the request in a packet that carried this many descriptors. Raises MalformedPacket."""
    if len(packet) < _HEADER.size:
        raise MalformedPacket(f"a packet of {len(packet)} bytes is shorter than its header")
    magic, version, code, bits, errno, length = _HEADER.unpack_from(packet)
    if magic != _MAGIC:
        raise MalformedPacket("not a packet of this protocol")
    if version != VERSION:
        raise MalformedPacket(f"protocol version {version}; the broker has version {VERSION}")
    if len(packet) != _HEADER.size + length or len(packet) > PACKET_MAX or errno:
        raise MalformedPacket("the packet does not match its header")
    try:
        operation = Operation(code)
    except ValueError:
        raise MalformedPacket(f"unknown operation {code}") from None
    if operation is Operation.SYNC_INIT or bits & ~FLAGS.get(operation, 0):
        raise MalformedPacket(f"{operation.name} with flags {bits:#x} is not allowed")
    if descriptors != DESCRIPTORS.get(operation, 0):
        raise MalformedPacket(f"{operation.name} with {descriptors} descriptors is not allowed")
    if length and operation is not Operation.MOUNT:
        raise MalformedPacket(f"{operation.name} with a payload is not allowed")
    return Request(operation, Flag(bits), packet[_HEADER.size :])


def reply(operation: Operation, *, errno: int = 0, text: str = "") -> bytes:
    """Return the packet that answers a request; `text` is cut to fit."""
    line = " ".join(text.split()).encode(errors="replace")[:TEXT_MAX]
    return _HEADER.pack(_MAGIC, VERSION, operation, 0, errno, len(line)) + line


class Reply(NamedTuple):
    """A reply from the broker: `errno` is 0, or an error number that `text` explains."""

    operation: Operation
    errno: int
    text: str


def request(operation: Operation, *, flags: Flag = Flag(0), options: bytes = b"") -> bytes:  # noqa: B008  # a constant
    """Return the packet for a request."""
    return _HEADER.pack(_MAGIC, VERSION, operation, flags, 0, len(options)) + options


def parse_reply(packet: bytes) -> Reply:
    """Return the reply in a packet. Raises MalformedPacket."""
    if len(packet) < _HEADER.size:
        raise MalformedPacket(f"a packet of {len(packet)} bytes is shorter than its header")
    _, _, code, _, errno, _ = _HEADER.unpack_from(packet)
    try:
        operation = Operation(code)
    except ValueError:
        raise MalformedPacket(f"unknown operation {code}") from None
    return Reply(operation, errno, packet[_HEADER.size :].decode(errors="replace"))
