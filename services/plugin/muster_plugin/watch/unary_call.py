"""Pure: one gRPC call with an empty request over a new HTTP/2 connection, as bytes.

A channel of grpcio costs ten times as much CPU time for one call, does not tell a refused
connection from garbage, and hides its socket, by which the kernel names the peer. The answer's
headers are not decoded: a call that succeeds has a message, and one that fails has none (RFC 9113;
github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md).
"""

import struct
from typing import Final

import msgspec

BYTES_MAX: Final = 65_536
"""No more is read; a server may send no more before a window update, which is never sent."""
_FRAME_BYTES_MAX: Final = 16_384
_HEAD_BYTES: Final = 9
_PREFIX_BYTES: Final = 5
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY = 0, 1, 3, 4, 6, 7
_END_STREAM: Final = 0x1
_ACK: Final = 0x1
_END_HEADERS: Final = 0x4
_PADDED: Final = 0x8
_STREAM: Final = 1
_SHORT: Final = 0x7F
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_NO_PUSH: Final = struct.pack(">HI", 2, 0)


def request(path: str, *, timeout_s: float) -> bytes:
    """Return what is sent first: the connection's preface and the whole call."""
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
            _frame(_SETTINGS, 0, 0, _NO_PUSH),
            _frame(_HEADERS, _END_HEADERS, _STREAM, headers),
            _frame(_DATA, _END_STREAM, _STREAM, bytes(_PREFIX_BYTES)),
        )
    )


class Outcome(msgspec.Struct, frozen=True):
    """The end of a call: the message of the answer, or what was wrong in words."""

    message: bytes = b""
    problem: str = ""


class UnaryAnswer:
    """Reads the answer to `request`."""

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self.to_send = b""
        """What the server is waiting for; to be sent and emptied."""
        self._received = bytearray()
        self._body = bytearray()
        self._total = 0
        self._has_settings = False

    def receive(self, data: bytes) -> None:
        """Take in what was received; empty means that the server closed the connection."""
        if not data:
            self._end(
                "it closes the connection" if self._total else "it answers nothing and closes"
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
        if self.outcome is None and self._total > BYTES_MAX:
            self._end(f"it sends more than {BYTES_MAX} bytes")

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
            padding = payload[0] if flags & _PADDED and payload else 0
            self._body += payload[1 : len(payload) - padding] if flags & _PADDED else payload
            self._check_body()
        if kind in {_DATA, _HEADERS} and flags & _END_STREAM:
            self._end("it answers with an error")

    def _check_body(self) -> None:
        size = int.from_bytes(self._body[1:_PREFIX_BYTES])
        if len(self._body) >= _PREFIX_BYTES and size > BYTES_MAX - _PREFIX_BYTES:
            self._end(f"it sends a message of {size} bytes")

    def end(self) -> Outcome | None:
        """Return the outcome when the time is up: without the end of the call a message counts."""
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
            self.outcome = Outcome(message, "" if is_answered else problem)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload


def _text(text: str) -> bytes:
    encoded = text.encode("ascii")
    assert len(encoded) < _SHORT, "a longer length takes several bytes"
    return bytes((len(encoded),)) + encoded


GOODBYE: Final = _frame(_GOAWAY, 0, 0, bytes(8))
"""Ends the connection without an error."""
