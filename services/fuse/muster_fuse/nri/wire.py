"""Pure: encodes and decodes the frames between an NRI runtime and a plugin, on one socket.

A multiplexer frame names one of two connections; each connection is a byte stream of ttrpc frames.
All numbers are big-endian.

| multiplexer (containerd/nri `pkg/net/multiplex`) | ttrpc (containerd/ttrpc `PROTOCOL.md`)    |
|--------------------------------------------------|-------------------------------------------|
| 4 bytes: connection                              | 4 bytes: length of the data, at most 4 MiB |
| 4 bytes: length, at most 4 MiB and 10 bytes      | 4 bytes: stream, odd if the caller opened it |
|                                                  | 1 byte: kind; 1 byte: flags               |
| the bytes                                        | the data                                  |
"""

import enum
import struct
from typing import Final, NamedTuple

DATA_MAX: Final = 4 * 1024 * 1024
"""The longest data in a frame, in bytes."""
_MUX: Final = struct.Struct(">II")
_TTRPC: Final = struct.Struct(">IIBB")
_PART_MAX: Final = _TTRPC.size + DATA_MAX


class Connection(enum.IntEnum):
    """The multiplexed connections, named after the side that serves; the other side calls."""

    PLUGIN = 1
    RUNTIME = 2


class Kind(enum.IntEnum):
    """The content of a frame: an envelope of `ttrpc.proto`, or part of a stream."""

    REQUEST = 1
    RESPONSE = 2
    DATA = 3


class Frame(NamedTuple):
    """A ttrpc frame."""

    connection: Connection
    stream: int
    kind: Kind
    data: bytes


class MalformedFrame(ValueError):
    """Bytes that violate the protocol; the bytes that follow cannot be decoded."""


def encode(frame: Frame) -> bytes:
    """Return the bytes of a frame, in a single multiplexer frame."""
    assert len(frame.data) <= DATA_MAX, "our messages are small"
    head = _TTRPC.pack(len(frame.data), frame.stream, frame.kind, 0)
    return _MUX.pack(frame.connection, len(head) + len(frame.data)) + head + frame.data


class FrameReader:
    """Assembles frames from bytes; keeps at most one unfinished frame for each connection."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._parts = {connection: bytearray() for connection in Connection}

    def feed(self, received: bytes) -> list[Frame]:
        """Return the frames that these bytes complete, in order. Raises MalformedFrame."""
        self._received += received
        frames: list[Frame] = []
        offset = 0
        while len(self._received) - offset >= _MUX.size:
            connection, length = _connection(self._received, offset)
            end = offset + _MUX.size + length
            if len(self._received) < end:
                break
            part = self._parts[connection]
            part += self._received[offset + _MUX.size : end]
            frames += _taken(connection, part)
            offset = end
        del self._received[:offset]
        return frames


def _connection(received: bytearray, offset: int) -> tuple[Connection, int]:
    number, length = _MUX.unpack_from(received, offset)
    if length > _PART_MAX:
        raise MalformedFrame(f"a frame of {length} bytes; at most {_PART_MAX} are allowed")
    try:
        return Connection(number), length
    except ValueError:
        raise MalformedFrame(f"a frame for unknown connection {number}") from None


def _taken(connection: Connection, part: bytearray) -> list[Frame]:
    """Remove the complete frames from the bytes of a connection, and return them."""
    frames: list[Frame] = []
    offset = 0
    while len(part) - offset >= _TTRPC.size:
        length, stream, kind, _ = _TTRPC.unpack_from(part, offset)
        if length > DATA_MAX:
            raise MalformedFrame(f"a message of {length} bytes; at most {DATA_MAX} are allowed")
        if kind not in tuple(Kind):
            raise MalformedFrame(f"a message of unknown kind {kind}")
        begin = offset + _TTRPC.size
        if len(part) < begin + length:
            break
        data = bytes(part[begin : begin + length])
        frames.append(Frame(connection, stream, Kind(kind), data))
        offset = begin + length
    del part[:offset]
    return frames
