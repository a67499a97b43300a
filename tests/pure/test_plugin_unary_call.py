"""One gRPC call as bytes: what is sent, and answers that arrive in pieces."""

import struct

import hypothesis
import pytest
from hypothesis import strategies

from muster_plugin.kubelet import unary_call

SETTINGS = struct.pack(">IBI", 4, 0, 0)
ACK = struct.pack(">IBI", 4, 1, 0)
MESSAGE = bytes(5)


def frame(kind: int, flags: int, payload: bytes = b"", stream: int = 1) -> bytes:
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload


ANSWER = SETTINGS + frame(1, 4, b"\x88") + frame(0, 0, MESSAGE) + frame(1, 5, b"\x88")


def outcome(received: bytes, *, piece: int = 65_536) -> unary_call.Outcome | None:
    reader = unary_call.UnaryAnswer()
    for at in range(0, len(received), piece):
        reader.receive(received[at : at + piece])
    return reader.end()


@pytest.mark.parametrize("piece", [1, 2, 7, 1000])
def test_an_answer_may_come_in_any_pieces(piece: int) -> None:
    assert outcome(ANSWER, piece=piece) == unary_call.Outcome(b"", "")


def test_what_the_server_waits_for_is_sent() -> None:
    reader = unary_call.UnaryAnswer()
    reader.receive(SETTINGS + frame(6, 0, b"12345678", 0) + ACK)
    assert (reader.to_send, reader.outcome) == (ACK + frame(6, 1, b"12345678", 0), None)


@pytest.mark.parametrize(
    ("received", "expected"),
    [
        (b"", None),
        (SETTINGS, None),
        (SETTINGS + frame(0, 0, MESSAGE), unary_call.Outcome()),
        (SETTINGS + frame(0, 8, b"\2" + MESSAGE + b"\0\0"), unary_call.Outcome()),
        (SETTINGS + frame(0, 0, b"\0\0\0\0\2\x08\1"), unary_call.Outcome(b"\x08\1")),
        (b"HTTP/1.1 400 Bad Request\r\n", "it does not speak HTTP/2"),
        (bytes(100), "it does not speak HTTP/2"),
        (SETTINGS + frame(1, 5, b"\x88"), "it answers with an error"),
        (SETTINGS + frame(3, 0, bytes(4)), "it resets the call"),
        (SETTINGS + frame(7, 0, bytes(8), 0), "it ends the connection"),
        (SETTINGS + b"\xff\xff\xff\0\0\0\0\0\1", "it sends a frame of 16777215 bytes"),
        (SETTINGS + frame(0, 0, b"\0\6\0\0\0"), "it sends a message of 100663296 bytes"),
        (SETTINGS + frame(2, 0, bytes(5)) * 10_000, "it sends more than 65535 bytes"),
    ],
    ids=range(13),
)
def test_only_a_message_is_an_answer(
    received: bytes, expected: unary_call.Outcome | str | None
) -> None:
    wanted = unary_call.Outcome(problem=expected) if isinstance(expected, str) else expected
    assert outcome(received) == wanted


@pytest.mark.parametrize(
    ("block", "status"),
    [
        # encoded by another implementation of HPACK: literals, plain or Huffman-coded
        (b"\x88\x40\x0bgrpc-status\x018", 8),
        (b"\x20\x5f\x10application/grpc\x40\x889acac8b21234da8f\x0212", None),
        (bytes.fromhex("8840889acac8b21234da8f0132"), 2),
        (bytes.fromhex("8800889acac8b21234da8f8208bf"), 12),
        (bytes.fromhex("88408b"), None),
        (b"\x7f\xff\xff\xff\xff\xff\xff", None),
        (b"", None),
    ],
    ids=range(7),
)
def test_the_status_of_an_error_is_read(block: bytes, status: int | None) -> None:
    assert outcome(SETTINGS + frame(1, 5, block)) == unary_call.Outcome(
        problem="it answers with an error", status=status
    )


def test_a_long_answer_is_read_up_to_its_limit() -> None:
    body = b"\0" + struct.pack(">I", 200_000) + bytes(200_000)
    frames = b"".join(frame(0, 0, body[at : at + 16_384]) for at in range(0, len(body), 16_384))
    reader = unary_call.UnaryAnswer(1_000_000)
    reader.receive(SETTINGS + frames + frame(1, 5))
    assert reader.outcome == unary_call.Outcome(bytes(200_000))
    sent = unary_call.request("/s/M", timeout_s=1, bytes_max=1_000_000)
    assert struct.pack(">HI", 4, 1_000_000) in sent


@pytest.mark.parametrize(
    ("received", "problem"),
    [(b"", "it closes the connection without an answer"), (SETTINGS, "it closes the connection")],
)
def test_a_closed_connection_ends_the_call(received: bytes, problem: str) -> None:
    reader = unary_call.UnaryAnswer()
    reader.receive(received) if received else None
    reader.receive(b"")
    assert reader.outcome == unary_call.Outcome(problem=problem)


FRAMES = strategies.builds(
    frame,
    strategies.integers(0, 12),
    strategies.integers(0, 255),
    strategies.binary(max_size=20),
    strategies.integers(0, 3),
)


@hypothesis.given(
    strategies.lists(strategies.binary(max_size=40) | FRAMES, max_size=10), strategies.booleans()
)
def test_any_answer_ends_the_call_or_leaves_it_open(
    pieces: list[bytes],
    is_http2: bool,  # noqa: FBT001  # given by hypothesis
) -> None:
    reader = unary_call.UnaryAnswer()
    for piece in [SETTINGS, *pieces] if is_http2 else pieces:
        reader.receive(piece)
    end = reader.end()
    assert end is None or not (end.message and end.problem)
