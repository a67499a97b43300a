"""No message of another client, however malformed, ends or delays the reading of others."""

import asyncio
from pathlib import Path

import pytest

from muster import codec, vocabulary
from muster.local import nats as local
from muster.nats import connection, consumers, streams
from muster.service import runtime
from tests.worlds import nats_links
from tests.worlds.bus_events import (
    collected,
    consume,
    count,
    fact,
    heartbeat_of,
    number,
    owner,
)


@pytest.mark.parametrize("status", ["404", "408", "409"])
def test_a_message_with_a_forged_status_header_hides_no_other_message(
    tmp_path: Path, status: str
) -> None:
    async def story(server: local.NatsServer) -> None:
        async with owner(server) as link, nats_links.raw(server.url) as client:
            await link.publish(fact(1))
            await client.jetstream().publish(
                "muster.event.node-b.p.device.removed", b"", headers={"Status": status}
            )
            await link.publish(fact(2))
            follow = consumers.follow(
                link.link, streams.EVENTS, filters=["muster.event.>"], after=0
            )
            async with collected(follow) as events:
                await nats_links.until(lambda: len(events) == 2)
            newest = await consumers.newest(link.link, streams.EVENTS, "muster.event.>")
            assert [number(event) for event in newest] == [2]

    nats_links.play(tmp_path, story)


MALFORMED = {
    "short": b"\r\n",
    "only a version": b"NATS/1.0",
    "another version": b"XXXXXXXX \xff\xff\xff\r\nA: b\r\n\r\n",
    "status": b"NATS/1.0 \xff\xff\xff\r\n\r\n",
    "description": b"NATS/1.0 200 \xff\xfe\r\n\r\n",
    "name": b"NATS/1.0\r\n\xff: b\r\n\r\n",
    "no colon": b"NATS/1.0\r\nA\r\n\r\n",
    "zero": b"NATS/1.0\r\n\0: \0\r\n\r\n",
}
"""Header blocks that nats-server passes on, and that nats-py cannot all decode."""


async def send_raw(server: local.NatsServer, lines: bytes) -> None:
    """Send lines of the NATS protocol on a new connection, and wait until the server has them."""
    host, _, port = server.url.removeprefix("nats://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b'CONNECT {"verbose":false,"headers":true}\r\n' + lines + b"PING\r\n")
    async with asyncio.timeout(10):
        while await reader.readline() != b"PONG\r\n":
            pass
    writer.close()
    await writer.wait_closed()


def hpub(subject: bytes, headers: bytes, body: bytes = b"{}") -> bytes:
    return b"HPUB %b %d %d\r\n%b%b\r\n" % (
        *(subject, len(headers), len(headers) + len(body)),
        *(headers, body),
    )


@pytest.mark.parametrize("headers", MALFORMED.values(), ids=MALFORMED)
def test_no_header_of_a_peer_ends_the_reading_of_others(tmp_path: Path, headers: bytes) -> None:
    """nats-py by itself would stop reading, and neither report that nor reconnect."""

    async def story(server: local.NatsServer) -> None:
        async with owner(server) as link:
            await link.publish(fact(1))
            follow = consumers.follow(
                link.link, streams.EVENTS, filters=["muster.event.>"], after=0
            )
            async with collected(follow) as events:
                await nats_links.until(lambda: len(events) == 1)
                await send_raw(server, hpub(b"muster.event.node-b.p.device.removed", headers))
                await link.publish(fact(2))
                await nats_links.until(lambda: len(events) == 2)
            numbers: list[int] = []
            consuming = asyncio.create_task(consume(link, numbers))
            await nats_links.until(lambda: numbers == [1, 2])
            await runtime.end(consuming)
            newest = await consumers.newest(link.link, streams.EVENTS, "muster.event.>")
            assert [number(event) for event in newest] == [2]
            assert link.link.epoch == 1

    nats_links.play(tmp_path, story)


def test_no_subject_of_a_peer_ends_the_reading_of_others(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        subjects: list[str] = []

        async def receive(message: connection.Message) -> None:
            subjects.append(message.subject)

        async with owner(server) as link:
            await link.link.subscribe("muster.test.>", receive)
            client = await link.link.client()
            await client.flush()
            await send_raw(
                server,
                b"PUB muster.test.\xff 1\r\nx\r\n"
                b"PUB muster.test.a \xfe 1\r\nx\r\nPUB muster.test.b 1\r\nx\r\n",
            )
            await nats_links.until(lambda: len(subjects) == 3)
            assert subjects == ["muster.test.\ufffd", "muster.test.a", "muster.test.b"]
            assert link.link.epoch == 1

    nats_links.play(tmp_path, story)


def test_malformed_heartbeats_are_counted_and_the_next_is_received(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        events: list[tuple[str, int]] = []

        async def receive(heartbeat: vocabulary.Heartbeat) -> None:
            events.append((heartbeat.node, heartbeat.seq))

        foreign = count("received", "malformed_wrong_subject")
        invalid = count("received", "malformed_invalid_data")
        async with owner(server) as health, nats_links.raw(server.url) as client:
            await health.heartbeats(receive, node="node-a")
            await nats_links.settled(health.link)
            subject = heartbeat_of(1).subject
            await client.publish(subject, codec.encode_heartbeat(heartbeat_of(1, node="node-b")))
            await client.publish(subject, b"nonsense")
            await client.publish(subject, b'{"a":' + b"[" * 50_000)
            other = heartbeat_of(2, node="node-c")
            await client.publish(other.subject, codec.encode_heartbeat(other))
            await client.publish(subject, codec.encode_heartbeat(heartbeat_of(3)))
            await nats_links.until(lambda: bool(events))
        assert events == [("node-a", 3)]
        assert count("received", "malformed_wrong_subject") == foreign + 1
        assert count("received", "malformed_invalid_data") == invalid + 2

    nats_links.play(tmp_path, story)
