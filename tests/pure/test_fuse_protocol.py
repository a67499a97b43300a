"""The packets between the helper and the broker, and the messages between broker and mounter."""

import contextlib
import struct

import hypothesis
import hypothesis.strategies as st
import pytest

from muster_fuse import protocol
from muster_fuse.kernel import jobs

HEADER = struct.Struct("<4sBBHII")


def packet(code: int = 1, *, flags: int = 0, payload: bytes = b"", **changed: int | bytes) -> bytes:
    """Return a request as the helper writes it, with changed fields of the header."""
    fields = {"magic": b"MFUS", "version": 1, "errno": 0, "length": len(payload)} | changed
    head = HEADER.pack(
        fields["magic"], fields["version"], code, flags, fields["errno"], fields["length"]
    )
    return head + payload


@pytest.mark.parametrize(
    ("data", "descriptors", "request_"),
    [
        (
            packet(1, payload=b"ro,fsname=x"),
            1,
            protocol.Request(protocol.Operation.MOUNT, protocol.Flag(0), b"ro,fsname=x"),
        ),
        (
            packet(1, flags=2),
            1,
            protocol.Request(protocol.Operation.MOUNT, protocol.Flag.SYNC_INIT, b""),
        ),
        (
            packet(2, flags=1),
            1,
            protocol.Request(protocol.Operation.UNMOUNT, protocol.Flag.LAZY, b""),
        ),
        (packet(3), 0, protocol.Request(protocol.Operation.HELLO, protocol.Flag(0), b"")),
        (packet(5), 0, protocol.Request(protocol.Operation.CONTINUE, protocol.Flag(0), b"")),
    ],
)
def test_a_request_is_what_the_helper_wrote(
    data: bytes, descriptors: int, request_: protocol.Request
) -> None:
    assert protocol.parse(data, descriptors=descriptors) == request_


@pytest.mark.parametrize(
    ("data", "descriptors", "text"),
    [
        (b"", 0, "a packet of 0 bytes is shorter than its header"),
        (packet()[:-1], 1, "a packet of 15 bytes is shorter than its header"),
        (packet(magic=b"HTTP"), 1, "not a packet of this protocol"),
        (packet(version=2), 1, "protocol version 2; the broker has version 1"),
        (packet(length=1), 1, "the packet does not match its header"),
        (packet(errno=5), 1, "the packet does not match its header"),
        (packet(payload=b"x" * 4081), 1, "the packet does not match its header"),
        (packet(0), 0, "unknown operation 0"),
        (packet(6), 0, "unknown operation 6"),
        (packet(4), 1, "SYNC_INIT with flags 0x0 is not allowed"),
        (packet(1, flags=1), 1, "MOUNT with flags 0x1 is not allowed"),
        (packet(2, flags=3), 1, "UNMOUNT with flags 0x3 is not allowed"),
        (packet(1), 0, "MOUNT with 0 descriptors is not allowed"),
        (packet(1), 2, "MOUNT with 2 descriptors is not allowed"),
        (packet(3), 1, "HELLO with 1 descriptors is not allowed"),
        (packet(2, payload=b"x"), 1, "UNMOUNT with a payload is not allowed"),
    ],
)
def test_what_the_protocol_does_not_allow_is_refused(
    data: bytes, descriptors: int, text: str
) -> None:
    with pytest.raises(protocol.MalformedPacket) as refused:
        protocol.parse(data, descriptors=descriptors)
    assert str(refused.value) == text


@hypothesis.given(st.binary(max_size=64), st.integers(0, 3))
def test_a_packet_of_another_version_is_refused(data: bytes, descriptors: int) -> None:
    hypothesis.assume(data[:1] != b"\x01")
    with contextlib.suppress(protocol.MalformedPacket):
        protocol.parse(b"MFUS" + data, descriptors=descriptors)
        pytest.fail("a packet of another version was accepted")


def test_a_reply_is_a_single_line_that_fits_a_packet() -> None:
    answer = protocol.reply(protocol.Operation.MOUNT, errno=13, text="no\nway \x00" + "ä" * 9000)
    head, text = HEADER.unpack(answer[:16]), answer[16:]
    assert head == (b"MFUS", 1, 1, 0, 13, protocol.TEXT_MAX)
    assert (len(text), b"\n" in text) == (protocol.TEXT_MAX, False)
    assert protocol.reply(protocol.Operation.HELLO) == HEADER.pack(b"MFUS", 1, 3, 0, 0, 0)


callers = st.builds(
    jobs.Caller,
    *(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
    st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple),
    *(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.booleans(), st.booleans()),
)
texts = st.text(max_size=8)


@hypothesis.given(
    st.one_of(
        st.builds(
            jobs.MountJob,
            callers,
            st.lists(st.tuples(texts, texts), max_size=3).map(tuple),
            st.lists(texts, max_size=3).map(tuple),
            st.integers(0, 2**32),
            st.booleans(),
        ),
        st.builds(jobs.UnmountJob, callers, st.booleans()),
        st.builds(jobs.SelfTestJob, texts),
    )
)
def test_a_job_survives_its_way_to_the_mounter(job: jobs.Job) -> None:
    assert jobs.decode(jobs.encode(job)) == job


@pytest.mark.parametrize("message", [b"{}", b'["MountJob", []]', b'["UnmountJob", [[1], true]]'])
def test_a_message_that_is_no_job_is_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match="not a "):
        jobs.decode(message)


@hypothesis.given(
    st.builds(
        jobs.Outcome, st.integers(0, 4095), st.text(max_size=1200), texts, st.integers(0, 2**20)
    )
)
def test_an_outcome_survives_its_way_from_the_mounter(outcome: jobs.Outcome) -> None:
    message = jobs.encode_outcome(outcome)
    assert jobs.decode_outcome(message) == outcome._replace(text=outcome.text[:1000])
    assert len(message) < jobs.MESSAGE_MAX


@pytest.mark.parametrize("message", [b"{}", b"[]", b'[0, "", 0, 0]'])
def test_a_message_that_is_no_outcome_is_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match="not an outcome"):
        jobs.decode_outcome(message)


@hypothesis.given(
    st.sampled_from(
        [(operation, flags) for operation in protocol.DESCRIPTORS for flags in (0, 1, 2)]
    ).filter(lambda drawn: not drawn[1] & ~protocol.FLAGS[drawn[0]]),
    st.binary(max_size=3000),
)
def test_a_request_and_its_reply_survive_their_ways(
    asked: tuple[protocol.Operation, int], options: bytes
) -> None:
    operation, flags = asked[0], protocol.Flag(asked[1])
    options = options if operation is protocol.Operation.MOUNT else b""
    packet = protocol.request(operation, flags=flags, options=options)
    assert protocol.parse(packet, descriptors=1) == protocol.Request(operation, flags, options)
    answer = protocol.reply(operation, errno=13, text="Permission denied")
    assert protocol.parse_reply(answer) == protocol.Reply(operation, 13, "Permission denied")


@pytest.mark.parametrize(
    ("packet_", "text"), [(b"MFUS", "4 bytes"), (packet(9), "unknown operation 9")]
)
def test_a_packet_that_is_no_reply_is_refused(packet_: bytes, text: str) -> None:
    with pytest.raises(protocol.MalformedPacket, match=text):
        protocol.parse_reply(packet_)
