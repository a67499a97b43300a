"""Pure: encodes and decodes one gRPC call with an empty request over a new HTTP/2 connection.

A grpcio channel needs ten times as much CPU time for one call, and several threads. It does not
distinguish a refused connection from an invalid answer, and it hides the socket through which the
kernel identifies the peer. Of the answer's headers only the status is decoded (RFC 9113, RFC 7541;
github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md).
"""

import struct
from typing import Final

import msgspec

BYTES_MAX: Final = 65_535
"""The HTTP/2 window: the most that a server may send before the window is updated."""
_FRAME_BYTES_MAX: Final = 16_384
_HEAD_BYTES: Final = 9
_PREFIX_BYTES: Final = 5
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM: Final = 0x1
_ACK: Final = 0x1
_END_HEADERS: Final = 0x4
_PADDED: Final = 0x8
_STREAM: Final = 1
_SHORT: Final = 0x7F
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_NO_PUSH: Final = struct.pack(">HI", 2, 0)
_INITIAL_WINDOW: Final = 4
_OVERHEAD_BYTES: Final = 65_536
"""The limit for frames and headers, in addition to the message."""
_STATUS: Final = frozenset({b"grpc-status", bytes.fromhex("9acac8b21234da8f")})
"""The name of the status header, as plain text and in Huffman coding."""
_STATUSES: Final = {str(code).encode(): code for code in range(17)} | {
    bytes.fromhex(digits): code
    for code, digits in enumerate(
        "07 0f 17 67 6b 6f 73 77 7b 7f 083f 087f 08bf 0b3f 0b5f 0b7f 0b9f".split()  # noqa: SIM905
    )
}
_SHIFT_MAX: Final = 21


def request(path: str, *, timeout_s: float, bytes_max: int = BYTES_MAX) -> bytes:
    """Return the bytes to send first: the connection's preface and the whole call."""
    window = b""
    settings = _NO_PUSH
    if bytes_max > BYTES_MAX:
        settings += struct.pack(">HI", _INITIAL_WINDOW, bytes_max)
        window = _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", bytes_max - BYTES_MAX))
    # indices of the static table, RFC 7541 appendix A; literals without indexing
    headers = b"\x83\x86" + b"".join(
        name + _text(value)
        for name, value in (
            (b"\x04", path),
            (b"\x01", "localhost"),
            (b"\x0f\x10", "application/grpc"),
            (b"\x0f\x2b", "muster-watch"),
            (b"\x00" + _text("te"), "trailers"),
            (b"\x00" + _text("grpc-timeout"), f"{timeout_s * 1000:.0f}m"),
        )
    )
    return b"".join(
        (
            _PREFACE,
            _frame(_SETTINGS, 0, 0, settings),
            window,
            _frame(_HEADERS, _END_HEADERS, _STREAM, headers),
            _frame(_DATA, _END_STREAM, _STREAM, bytes(_PREFIX_BYTES)),
        )
    )


class Outcome(msgspec.Struct, frozen=True):
    """The result of a call: the message of the answer, or the problem as text.

    `status` is the gRPC code of an error, if the server sent one.
    """

    message: bytes = b""
    problem: str = ""
    status: int | None = None


class UnaryAnswer:
    """Reads the answer to `request`."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self.outcome: Outcome | None = None
        self.to_send = b""
        """Bytes that the server waits for; the caller sends and clears them."""
        self._bytes_max = bytes_max
        self._status: int | None = None
        self._received = bytearray()
        self._body = bytearray()
        self._total = 0
        self._has_settings = False

    def receive(self, data: bytes) -> None:
        """Process received data; empty data means that the server closed the connection."""
        if not data:
            self._end(
                "it closes the connection"
                if self._total
                else "it closes the connection without an answer"
            )
            return
        self._total += len(data)
        self._received += data
        while self.outcome is None and len(self._received) >= _HEAD_BYTES:
            size = int.from_bytes(self._received[:3])
            kind, flags = self._received[3], self._received[4]
            stream = int.from_bytes(self._received[5:9]) & 0x7FFFFFFF
            if not self._has_settings and (kind != _SETTINGS or stream or size % 6):
                self._end("it does not speak HTTP/2")
            elif size > _FRAME_BYTES_MAX:
                self._end(f"it sends a frame of {size} bytes")
            elif len(self._received) < _HEAD_BYTES + size:
                break
            else:
                payload = bytes(self._received[_HEAD_BYTES : _HEAD_BYTES + size])
                del self._received[: _HEAD_BYTES + size]
                self._handle(kind, flags, stream, payload)
        if self.outcome is None and self._total > self._bytes_max + _OVERHEAD_BYTES:
            self._end(f"it sends more than {self._bytes_max} bytes")

    def _handle(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            self._has_settings = True
            self.to_send += _frame(_SETTINGS, _ACK, 0, b"")
        elif kind == _PING and not flags & _ACK:
            self.to_send += _frame(_PING, _ACK, 0, payload)
        elif kind == _GOAWAY and int.from_bytes(payload[:4]) & 0x7FFFFFFF < _STREAM:
            self._end("it ends the connection")
        elif stream != _STREAM:
            return
        elif kind == _RST_STREAM:
            self._end("it resets the call")
        elif kind == _DATA:
            self._body += _unpadded(flags, payload)
            self._check_body()
        if kind == _HEADERS:
            self._status = _grpc_status(_unpadded(flags, payload))
        if kind in {_DATA, _HEADERS} and flags & _END_STREAM:
            self._end("it answers with an error")

    def _check_body(self) -> None:
        size = int.from_bytes(self._body[1:_PREFIX_BYTES])
        if len(self._body) >= _PREFIX_BYTES and size > self._bytes_max - _PREFIX_BYTES:
            self._end(f"it sends a message of {size} bytes")

    def end(self) -> Outcome | None:
        """Return the outcome; None if there is none yet.

        A complete message is an outcome even if the call has not ended.
        """
        if self.outcome is None and self._is_complete:
            self._end("")
        return self.outcome

    @property
    def _is_complete(self) -> bool:
        size = int.from_bytes(self._body[1:_PREFIX_BYTES])
        return len(self._body) >= _PREFIX_BYTES and len(self._body) == _PREFIX_BYTES + size

    def _end(self, problem: str) -> None:
        if self.outcome is None:
            is_answered = self._is_complete
            message = bytes(self._body[_PREFIX_BYTES:]) if is_answered else b""
            status = None if is_answered else self._status
            self.outcome = Outcome(message, "" if is_answered else problem, status)


def _unpadded(flags: int, payload: bytes) -> bytes:
    if not flags & _PADDED or not payload:
        return payload
    return payload[1 : len(payload) - payload[0]]


def _grpc_status(block: bytes) -> int | None:
    """Return the status in a block of headers; None if it cannot be read or there is none.

    On a new connection the status header is always a literal with its name.
    """
    reader = _HeaderBlock(block)
    try:
        while reader.has_more:
            name, value = reader.header()
            if name in _STATUS:
                return _STATUSES.get(value)
    except IndexError:
        pass
    return None


class _HeaderBlock:
    """Reads headers; only strings are decoded, so an indexed name or value is empty."""

    def __init__(self, block: bytes) -> None:
        self._block = block
        self._at = 0

    @property
    def has_more(self) -> bool:
        return self._at < len(self._block)

    def header(self) -> tuple[bytes, bytes]:
        """Return the next header. Raises IndexError if the block is truncated."""
        first = self._block[self._at]
        if first & 0x80:
            self._number(7)
            return b"", b""
        if first & 0xE0 == 0x20:  # noqa: PLR2004  # RFC 7541, 6.3
            self._number(5)
            return b"", b""
        is_indexed = self._number(6 if first & 0x40 else 4)
        name = b"" if is_indexed else self._text()
        return name, self._text()

    def _number(self, bits: int) -> int:
        most = (1 << bits) - 1
        number = self._block[self._at] & most
        self._at += 1
        shift = 0
        while number >= most and shift <= _SHIFT_MAX:
            byte = self._block[self._at]
            self._at += 1
            number += (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                break
        return number

    def _text(self) -> bytes:
        size = self._number(7)
        start = self._at
        self._at += size
        return self._block[start : self._at]


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload


def _text(text: str) -> bytes:
    encoded = text.encode("ascii")
    assert len(encoded) < _SHORT, "a longer length takes several bytes"
    return bytes((len(encoded),)) + encoded


GOODBYE: Final = _frame(_GOAWAY, 0, 0, bytes(8))
"""The GOAWAY frame, which ends the connection without an error."""
