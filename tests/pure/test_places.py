"""The position of a message in its stream, read from its reply subject as nats-py reads it."""

import nats.errors
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from muster.nats import compat


@pytest.mark.parametrize(
    "reply",
    [
        "$JS.ACK.MUSTER_EVENTS.abc.1.123456.45.1767225600000000000.78",
        "$JS.ACK._.hash.MUSTER_EVENTS.abc.1.123456.45.1767225600000000000.78.random",
        "$JS.ACK.domain.hash.MUSTER_EVENTS.abc.1.123456.45.1767225600000000000.78.random",
    ],
)
def test_a_place_is_the_one_that_nats_py_reads(reply: str) -> None:
    message = Msg(_client=Client(), subject="a", reply=reply)
    metadata = message.metadata
    assert compat.place(message) == (metadata.sequence.stream, metadata.num_pending) == (123456, 78)


@pytest.mark.parametrize("reply", ["", "_INBOX.a.b", "$JS.ACK.MUSTER_EVENTS.abc.1.x.45.1.78"])
def test_a_message_that_is_in_no_stream_has_no_place(reply: str) -> None:
    with pytest.raises(nats.errors.NotJSMessageError):
        compat.place(Msg(_client=Client(), subject="a", reply=reply))
