"""The heartbeats of a fleet, read in batches from a real nats-server."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import nats.aio.client
import nats.errors
import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster import codec, vocabulary
from muster.local import nats as local
from muster.nats import heartbeat_budget, heartbeat_reader
from tests.worlds import nats_links

MANY = heartbeat_budget.Limits(unknown_messages=100_000, noisy_messages=100_000)
"""Enough for every test that is not about the budget."""


def count(outcome: str) -> float:
    value = prometheus_client.REGISTRY.get_sample_value(
        "muster_bus_received_total", {"outcome": outcome}
    )
    return value or 0.0


def heartbeat_of(seq: int, node: str = "node-a.example") -> vocabulary.Heartbeat:
    return vocabulary.Heartbeat(
        node=node, plugin="device-plugin", instance="one", seq=seq, interval_s=1.0
    )


class Receiver:
    """A handler that keeps all heartbeats, and returns from a batch only while `is_free` is set."""

    def __init__(self) -> None:
        self.received: list[tuple[str, int]] = []
        self.batches = 0
        self.is_free = asyncio.Event()
        self.is_free.set()
        self._changed = asyncio.Condition()

    async def handle(self, heartbeats: Sequence[vocabulary.Heartbeat]) -> None:
        async with self._changed:
            self.received += [(heartbeat.node, heartbeat.seq) for heartbeat in heartbeats]
            self.batches += 1
            self._changed.notify_all()
        await self.is_free.wait()

    async def until(self, enough: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(enough)


async def wait_for_subscription(client: nats.aio.client.Client, receiver: Receiver) -> None:
    """Publish heartbeats until one arrives: nothing else shows that the subscription exists."""
    while not receiver.received:
        await send(client, heartbeat_of(0))
        await nats_links.flushed(client)
        await asyncio.sleep(0.01)


async def send(client: nats.aio.client.Client, *heartbeats: vocabulary.Heartbeat) -> None:
    for heartbeat in heartbeats:
        await client.publish(heartbeat.subject, codec.encode_heartbeat(heartbeat))


async def occupy(client: nats.aio.client.Client, receiver: Receiver) -> None:
    """Let the receiver handle one heartbeat until it is set free."""
    await wait_for_subscription(client, receiver)
    receiver.is_free.clear()
    await send(client, heartbeat_of(1))
    await nats_links.flushed(client)
    await receiver.until(lambda: receiver.received[-1][1] == 1)


def test_every_valid_heartbeat_is_received_in_order_and_the_others_are_counted(
    tmp_path: Path,
) -> None:
    async def story(server: local.NatsServer) -> None:
        receiver = Receiver()
        before = {kind: count(f"malformed_{kind}") for kind in ("wrong_subject", "invalid_data")}
        async with (
            heartbeat_reader.HeartbeatStream(server.url, name="test", limits=MANY) as stream,
            nats_links.raw(server.url) as client,
        ):
            await stream.follow(receiver.handle)
            await wait_for_subscription(client, receiver)
            subject = heartbeat_of(1).subject
            await send(client, *(heartbeat_of(seq) for seq in range(1, 500)))
            await client.publish(subject, codec.encode_heartbeat(heartbeat_of(1, node="node-b")))
            await client.publish(subject, b"MSG x 1 3\r\nPING\r\n")
            await client.publish(
                subject, codec.encode_heartbeat(heartbeat_of(500)), headers={"a": "b"}
            )
            await receiver.until(lambda: receiver.received[-1][1] == 500)
        numbers = [seq for _, seq in receiver.received if seq]
        assert numbers == [*range(1, 501)]
        assert count("malformed_wrong_subject") == before["wrong_subject"] + 1
        assert count("malformed_invalid_data") == before["invalid_data"] + 1

    nats_links.play(tmp_path, story)


def test_while_a_batch_is_handled_the_next_waits(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        receiver = Receiver()
        async with (
            heartbeat_reader.HeartbeatStream(server.url, name="test", limits=MANY) as stream,
            nats_links.raw(server.url) as client,
        ):
            await stream.follow(receiver.handle)
            await occupy(client, receiver)
            await send(client, *(heartbeat_of(seq) for seq in range(2, 300)))
            await nats_links.flushed(client)
            assert receiver.received[-1][1] == 1
            receiver.is_free.set()
            await receiver.until(lambda: receiver.received[-1][1] == 299)

    nats_links.play(tmp_path, story)


def test_what_has_arrived_is_one_batch_and_never_too_large(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        receiver = Receiver()
        async with (
            heartbeat_reader.HeartbeatStream(server.url, name="test", limits=MANY) as stream,
            nats_links.raw(server.url) as client,
        ):
            await stream.follow(receiver.handle)
            await occupy(client, receiver)
            await send(client, *(heartbeat_of(seq) for seq in range(2, 4_000)))
            await nats_links.flushed(client)
            before = receiver.batches
            receiver.is_free.set()
            await receiver.until(lambda: receiver.received[-1][1] == 3_999)
        # 600 KiB, of which nats-py reads 32 KiB at once
        assert 4 <= receiver.batches - before < 12
        assert [seq for _, seq in receiver.received if seq] == [*range(1, 4_000)]

    nats_links.play(tmp_path, story)


def test_heartbeats_are_received_again_when_a_killed_server_is_back(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        receiver = Receiver()
        async with heartbeat_reader.HeartbeatStream(server.url, name="test", limits=MANY) as stream:
            await stream.follow(receiver.handle)
            async with nats_links.raw(server.url) as client:
                await wait_for_subscription(client, receiver)
            changes = stream.link.changes()
            assert await anext(changes)
            await server.kill()
            assert not await anext(changes)
            await server.start()
            assert await anext(changes)
            receiver.received.clear()
            async with nats_links.raw(server.url) as client:
                await wait_for_subscription(client, receiver)

    nats_links.play(tmp_path, story)


LINES = st.sampled_from(
    [b"PING\r\n", b"+OK\r\n", b"MSG a.b 1 3\r\nx\r\n\r\n", b"HMSG a.c 1 r 4 6\r\nhh\r\nok\r\n"]
)


@given(st.lists(LINES), st.lists(st.integers(0, 60)))
def test_however_the_bytes_are_cut_the_messages_are_the_same(
    lines: list[bytes], cuts: list[int]
) -> None:
    whole = b"".join(lines)
    bounds = [0, *sorted(cut for cut in cuts if cut < len(whole)), len(whole)]
    value: list[heartbeat_budget.Message] = []
    others: list[bytes] = []
    rest = b""
    for begin, end in itertools.pairwise(bounds):
        messages, more, rest = heartbeat_reader.split_messages(rest + whole[begin:end])
        value += messages
        others += more
    numbers = {
        b"MSG a.b 1 3\r\nx\r\n\r\n": (b"a.b", b"1", b"x\r\n"),
        b"HMSG a.c 1 r 4 6\r\nhh\r\nok\r\n": (b"a.c", b"1", b"ok"),
    }
    assert value == [numbers[line] for line in lines if line in numbers]
    assert others == [line for line in lines if line not in numbers]
    assert rest == b""


@pytest.mark.parametrize(
    "line",
    [
        b"MSG a b",
        b"MSG a 1 -12",
        b"MSG a 1 +1",
        b"MSG a 1 r x 1",
        b"MSG a 1 999999999",
        b"HMSG a 1 -3 5",
        b"HMSG a 1 5",
        b"HMSG a 1 r 4 -6",
    ],
)
def test_a_message_without_a_possible_size_is_a_protocol_error(line: bytes) -> None:
    with pytest.raises(nats.errors.ProtocolError):
        heartbeat_reader.split_messages(line + b"\r\nPING\r\n")


def test_a_line_without_end_is_a_protocol_error() -> None:
    assert heartbeat_reader.split_messages(b"x" * 1_000_000) == ([], [], b"x" * 1_000_000)
    with pytest.raises(nats.errors.ProtocolError):
        heartbeat_reader.split_messages(b"x" * 2_000_000)
