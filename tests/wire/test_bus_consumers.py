"""Followers and consumers on a real nats-server: each event is delivered, across every outage."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from structlog.testing import capture_logs

from muster import codec, vocabulary
from muster.local import nats as local
from muster.nats import bus, consumers, streams
from muster.service import runtime
from tests.worlds import nats_links
from tests.worlds.bus_events import (
    ALL,
    NOW,
    collected,
    consume,
    count,
    dead_letters,
    fact,
    following,
    number,
    owner,
    stored,
)


def _has(events: Sequence[codec.CloudEvent], count: int) -> bool:
    return len(events) >= count


async def deliveries(
    events: AsyncIterator[runtime.Delivery[codec.CloudEvent]], wanted: int
) -> list[runtime.Delivery[codec.CloudEvent]]:
    return [await anext(events) for _ in range(wanted)]


def test_a_follower_misses_and_repeats_nothing_across_a_crash(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        async with (
            owner(server) as publisher,
            owner(server) as link,
            collected(consumers.follow(link.link, streams.EVENTS, filters=ALL)) as events,
        ):
            await following(publisher, events)
            events.clear()
            for n in range(200):
                publisher.enqueue(fact(n))
                if n == 100:
                    await nats_links.until(lambda: len(events) > 10)
                    await server.kill()
                    await server.start()
            assert await publisher.flush(10)
            await nats_links.until(lambda: len(events) >= 200)
            assert [number(e) for e in events] == list(range(200))
            assert [e.position for e in events] == sorted({e.position for e in events})

    nats_links.play(tmp_path, story)


def test_a_follower_can_begin_in_the_past(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        async with owner(server) as link:
            await link.publish(fact(1))
            # `since` is compared with the server's clock, which is the one of this machine
            middle = datetime.now(UTC)
            await link.publish(fact(2))
            for since, wanted in [(NOW, [1, 2]), (middle, [2])]:
                events = consumers.follow(link.link, streams.EVENTS, filters=ALL, since=since)
                async with contextlib.aclosing(events), collected(events) as received:  # type: ignore[type-var]
                    enough = functools.partial(_has, received, len(wanted))
                    await nats_links.until(enough)
                assert [number(e) for e in received] == wanted

    nats_links.play(tmp_path, story)


def test_a_filter_keeps_other_nodes_out(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        async with owner(server) as link:
            for n, node in enumerate(["node-a", "b.example", "node-c"]):
                await link.publish(fact(n, node))
            filters = vocabulary.subject_filters("device.*", "b.example")
            events = consumers.follow(link.link, streams.EVENTS, filters=filters, since=NOW)
            async with collected(events) as received:
                await nats_links.until(lambda: bool(received))
            assert [(e.node, number(e)) for e in received] == [("b.example", 1)]

    nats_links.play(tmp_path, story)


def test_what_was_not_acknowledged_comes_again_and_what_was_does_not(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        async with owner(server) as link:
            for n in range(3):
                await link.publish(fact(n))
            events = consumers.consume(
                link.link, streams.EVENTS, durable="r", filters=ALL, ack_wait_s=0.3
            )
            first = await deliveries(events, 3)
            await first[0].ack()
            await first[2].ack()
            again = await deliveries(events, 1)
            await again[0].ack()
            await link.publish(fact(3))
            after = await deliveries(events, 1)
            assert [number(d.event) for d in (*first, *again, *after)] == [0, 1, 2, 1, 3]
            assert again[0].event == first[1].event

    nats_links.play(tmp_path, story)


def test_a_consumer_that_died_resumes_at_its_position(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        async with owner(server) as link:
            for n in range(3):
                await link.publish(fact(n))
            events = consumers.consume(
                link.link, streams.EVENTS, durable="r", filters=ALL, ack_wait_s=0.3
            )
            first = await deliveries(events, 2)
            await first[0].ack()
        async with owner(server) as link:
            numbers: list[int] = []
            events = consumers.consume(
                link.link, streams.EVENTS, durable="r", filters=ALL, ack_wait_s=0.3
            )
            for _ in range(2):
                delivery = await anext(events)
                numbers.append(number(delivery.event))
                await delivery.ack()
            assert sorted(numbers) == [1, 2]

    nats_links.play(tmp_path, story)


def test_a_consumer_goes_on_across_a_crash_of_the_server(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        events: list[int] = []
        async with owner(server) as link:
            consuming = asyncio.create_task(consume(link, events))
            await link.publish(fact(0))
            await nats_links.until(lambda: bool(events))
            await server.kill()
            for n in range(1, 20):
                link.enqueue(fact(n))
            await server.start()
            await nats_links.until(lambda: 19 in events)
            consuming.cancel()
            await asyncio.gather(consuming, return_exceptions=True)
        # the first event comes twice if its acknowledgement was lost with the server
        assert [*dict.fromkeys(events)] == list(range(20))

    nats_links.play(tmp_path, story)


def test_a_consumer_that_was_deleted_is_created_again(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        events: list[int] = []
        async with owner(server) as link:
            consuming = asyncio.create_task(consume(link, events))
            await link.publish(fact(0))
            await nats_links.until(lambda: bool(events))
            async with nats_links.raw(server.url) as client:
                await client.jetstream().delete_consumer("MUSTER_EVENTS", "reader")
            await link.publish(fact(1))
            await nats_links.until(lambda: events[-1] == 1)
            consuming.cancel()
            await asyncio.gather(consuming, return_exceptions=True)

    nats_links.play(tmp_path, story)


def test_a_malformed_message_becomes_a_dead_letter_with_its_reason_and_the_consumer_goes_on(
    tmp_path: Path,
) -> None:
    async def story(server: local.NatsServer) -> None:
        believable = codec.encode(
            fact(7), event_id="x:7", producer="p", instance="x", sequence=7, boot=""
        )
        unbelievable = [
            (b"\xff nonsense", "not_a_cloudevent"),
            (believable.replace(b"schemas/v1/", b"schemas/v9/"), "unknown_version"),
            (believable.replace(b"device.removed", b"device.eaten"), "unknown_type"),
            (believable.replace(b'"device_id":"7"', b'"device_id":7'), "invalid_data"),
            (believable.replace(b"node-a", b"node-b"), "wrong_subject"),
            (b'{"a":' + b"[" * 5_000, "not_a_cloudevent"),
        ]
        subject = fact(7).subject
        events: list[int] = []
        before = count("received", "malformed_wrong_subject")
        async with owner(server) as link, nats_links.raw(server.url) as client:
            await link.publish(fact(1))
            for payload, _ in unbelievable:
                await client.jetstream().publish(subject, payload)
            await link.publish(fact(2))
            consuming = asyncio.create_task(consume(link, events))
            await nats_links.until(lambda: len(events) == 2)
            consuming.cancel()
            await asyncio.gather(consuming, return_exceptions=True)
        assert events == [1, 2]
        assert count("received", "malformed_wrong_subject") == before + 1
        aside = await stored(server, "MUSTER_DLQ")
        assert [(m.subject, m.data) for m in aside] == [
            (f"muster.dlq.reader.{reason}", payload) for payload, reason in unbelievable
        ]
        assert {(m.headers or {})["Muster-Subject"] for m in aside} == {subject}
        assert [(m.headers or {})["Muster-Reason"] for m in aside] == [r for _, r in unbelievable]

    nats_links.play(tmp_path, story)


def test_a_dead_letter_that_the_server_refuses_is_logged_and_the_consumer_goes_on(
    tmp_path: Path,
) -> None:
    async def story(server: local.NatsServer) -> None:
        events: list[int] = []
        async with owner(server) as link:
            await link.publish(fact(1))
        # not the owner, which would restore the stream's limit when it connects
        reader = bus.Bus(server.url, producer="plugins/p", name="reader")
        async with reader as link, nats_links.raw(server.url) as client:
            config = (await client.jetstream().stream_info("MUSTER_DLQ")).config
            config.max_msg_size = 500
            await client.jetstream().update_stream(config)
            for payload in (b"x" * 501, b"x"):
                await client.jetstream().publish(fact(7).subject, payload)
            await link.publish(fact(2))
            with capture_logs() as lines:
                consuming = asyncio.create_task(consume(link, events))
                await nats_links.until(lambda: len(events) == 2 and len(dead_letters(lines)) == 2)
                consuming.cancel()
                await asyncio.gather(consuming, return_exceptions=True)
        refused, kept = sorted(dead_letters(lines), key=lambda line: line["event"])
        assert (refused["event"], refused["log_level"]) == ("dead_letter_not_stored", "warning")
        assert refused["error"] == "message size exceeds maximum allowed"
        assert kept["event"] == "dead_letter_stored"
        assert {line["reason"] for line in (refused, kept)} == {"not_a_cloudevent"}
        assert [message.data for message in await stored(server, "MUSTER_DLQ")] == [b"x"]

    nats_links.play(tmp_path, story)


def test_the_newest_event_of_each_subject_is_returned_oldest_first(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        async with owner(server) as link, nats_links.raw(server.url) as client:
            assert await consumers.newest(link.link, streams.EVENTS, "muster.event.>") == []
            for n, node in enumerate(["node-a", "node-b", "node-a", "node-c", "node-b"]):
                await link.publish(fact(n, node))
            await client.jetstream().publish("muster.event.node-d.p.device.removed", b"nonsense")
            newest = await consumers.newest(link.link, streams.EVENTS, "muster.event.>")
            assert [(e.node, number(e)) for e in newest] == [
                ("node-a", 2),
                ("node-c", 3),
                ("node-b", 4),
            ]
            only = await consumers.newest(link.link, streams.EVENTS, "muster.event.node-b.>")
            assert [number(e) for e in only] == [4]

    nats_links.play(tmp_path, story)


def test_a_reader_takes_a_stream_that_health_has_not_created_yet_for_empty(tmp_path: Path) -> None:
    stream = streams.INVENTORY

    async def story(server: local.NatsServer) -> None:
        subject = vocabulary.subject_filters("inventory.*")[0]
        async with bus.Bus(server.url, producer="p", name="reader") as link:
            newest = [e async for e in consumers.each_newest(link.link, stream, subject)]
            assert newest == []
            following = consumers.follow(link.link, stream, filters=[subject], since=NOW)
            async with collected(following) as events, owner(server) as publisher:
                assert link.link.problem() is None
                await publisher.publish(
                    vocabulary.InventoryReported(node="node-a", plugin="p", at=NOW, devices=())
                )
                await nats_links.until(lambda: _has(events, 1))
                assert link.link.problem() is None

    nats_links.play(tmp_path, story)
