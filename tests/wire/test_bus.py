"""The bus on a real nats-server: no event is lost or stored twice, and no failure is silent."""

import asyncio
import contextlib
import functools
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import nats.aio.client
import nats.js.api
import prometheus_client
import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from muster import codec, vocabulary
from muster.local import nats as local
from muster.nats import bus, connection, consumers, jetstream, storage, streams
from muster.service import runtime
from tests.worlds import nats_links

NOW: Final = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
ALL: Final = ("muster.event.>",)
ONE_NODE: Final = """
no_auth_user: operator
authorization { users = [
  {user: operator, password: o}
  {
    user: node-a, password: a, permissions: {
      publish: ["muster.heartbeat.node-a.>", "muster.event.node-a.>"]
      subscribe: ["_INBOX.node-a.>", "muster.rpc.node-a.>"]
    }
  }
] }
"""


def owner(server: local.NatsServer, name: str = "test") -> bus.Bus:
    return bus.Bus(server.url, producer="plugins/p", name=name, owner=True)


def fact(number: int, node: str = "node-a") -> vocabulary.Event:
    return vocabulary.DeviceRemoved(
        node=node, at=NOW, plugin="p", resource="example.com/fuse", device_id=str(number)
    )


def number(event: codec.CloudEvent) -> int:
    assert isinstance(event.data, vocabulary.DeviceRemoved)
    return int(event.data.device_id)


def heartbeat_of(seq: int, node: str = "node-a") -> vocabulary.Heartbeat:
    return vocabulary.Heartbeat(node=node, plugin="p", instance="i", seq=seq, interval_s=5)


def count(metric: str, outcome: str) -> float:
    events = prometheus_client.REGISTRY.get_sample_value(
        f"muster_bus_{metric}_total", {"outcome": outcome}
    )
    return events or 0.0


async def stored(
    server: local.NatsServer, stream: str = "MUSTER_EVENTS"
) -> list[nats.js.api.RawStreamMsg]:
    """Return every message of a stream, read without muster's code."""
    async with nats_links.raw(server.url) as client:
        jetstream = client.jetstream()
        info = await jetstream.stream_info(stream)
        return [
            await jetstream.get_msg(stream, seq=seq)
            for seq in range(info.state.first_seq, info.state.last_seq + 1)
        ]


async def stored_numbers(server: local.NatsServer) -> list[int]:
    return [number(codec.decode(m.subject or "", m.data or b"")) for m in await stored(server)]


@asynccontextmanager
async def collected(
    events: AsyncIterator[codec.CloudEvent],
) -> AsyncIterator[list[codec.CloudEvent]]:
    """Collect the events of a subscription in the background; yield the growing list."""
    received: list[codec.CloudEvent] = []

    async def collect() -> None:
        async for event in events:
            received.append(event)  # noqa: PERF401  # seen as it grows

    task = asyncio.create_task(collect())
    try:
        yield received
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _has(events: Sequence[codec.CloudEvent], count: int) -> bool:
    return len(events) >= count


async def following(link: bus.Bus, events: Sequence[codec.CloudEvent]) -> None:
    """Publish markers until a follower receives them: it receives all later events, too."""
    marker = 1_000_000
    while not events:
        await link.publish(fact(marker), event_id=f"marker-{marker}")
        marker += 1
        await asyncio.sleep(0.01)
    await nats_links.until(lambda: number(events[-1]) == marker - 1)


# publishing


def test_an_event_is_stored_once_although_its_acknowledgement_was_lost(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        async with owner(server) as link:
            await link.publish(fact(0))
            retried, repeat = count("published", "retried"), count("published", "repeat")
            server.freeze()
            publishing = asyncio.create_task(link.publish(fact(1)))
            await nats_links.until(lambda: count("published", "retried") > retried)
            server.thaw()
            await publishing
            assert count("published", "repeat") == repeat + 1
        assert await stored_numbers(server) == [0, 1]

    nats_links.play(tmp_path, story)


def test_an_event_of_a_given_identity_is_stored_once_whoever_repeats_it(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        for _ in range(2):
            async with owner(server) as link:
                await link.publish(fact(1), event_id="fact-1")
        messages = await stored(server)
        assert [(m.headers or {})["Nats-Msg-Id"] for m in messages] == ["fact-1"]
        assert (messages[0].headers or {})["Content-Type"] == "application/cloudevents+json"

    nats_links.play(tmp_path, story)


def test_events_are_kept_in_order_across_an_outage(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        async with owner(server) as link:
            for n in range(20):
                link.enqueue(fact(n))
            await nats_links.until(lambda: count("published", "stored") > 3)
            await server.kill()
            for n in range(20, 40):
                link.enqueue(fact(n))
            assert not await link.flush(0.05)
            await server.start()
            assert await link.flush(10)
        assert await stored_numbers(server) == list(range(40))

    nats_links.play(tmp_path, story)


def test_in_a_long_outage_the_newest_events_are_kept(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        dropped = count("published", "dropped")
        async with owner(server) as link:
            await link.publish(fact(0, "node-b"))
            await server.kill()
            await nats_links.until(lambda: not link.link.is_connected)
            for n in range(1, bus.QUEUE_MAX + 301):
                # ten nodes, as one subject keeps fewer events
                link.enqueue(fact(n, f"node-{n % 10}"))
            await server.start()
            assert await link.flush(20)
        assert await stored_numbers(server) == [0, *range(301, bus.QUEUE_MAX + 301)]
        assert count("published", "dropped") == dropped + 300

    nats_links.play(tmp_path, story)


def test_a_server_that_comes_later_gets_what_was_enqueued_before(tmp_path: Path) -> None:
    async def story() -> None:
        server = local.NatsServer(tmp_path / "nats")
        async with asyncio.timeout(100), owner(server) as link:
            link.enqueue(fact(1))
            publishing = asyncio.create_task(link.publish(fact(2)))
            assert not await link.flush(0.05)
            async with server:
                assert await link.flush(10)
                await publishing
                assert sorted(await stored_numbers(server)) == [1, 2]

    asyncio.run(story())


def test_an_event_that_cannot_be_encoded_is_logged_and_the_next_is_published(
    tmp_path: Path,
) -> None:
    oversized = vocabulary.InventoryReported(
        node="node-a",
        at=NOW,
        plugin="p",
        devices=tuple(
            vocabulary.Device(id=str(n), resource="example.com/r", reason="x" * 2_000)
            for n in range(3_000)
        ),
    )
    unsayable = vocabulary.PluginStopping(
        node="node-a", at=NOW, plugin="p.q", reason=vocabulary.StopReason.SIGNAL
    )
    broken = vocabulary.DeviceRemoved(
        node="node-a", at=NOW, plugin="p", resource="example.com/r", device_id="usb-\udcff"
    )

    async def story(server: local.NatsServer) -> None:
        with capture_logs() as lines:
            async with owner(server) as link:
                for event in (oversized, unsayable, broken, fact(1)):
                    link.enqueue(event)
                assert await link.flush(10)
        logged = [(x["event"], x.get("type")) for x in lines if x["log_level"] == "error"]
        assert logged == [
            ("event_oversized", "inventory.reported"),
            ("event_invalid", "plugin.stopping"),
            ("event_invalid", "device.removed"),
        ]
        assert await stored_numbers(server) == [1]

    nats_links.play(tmp_path, story)


def test_leaving_at_any_moment_leaves_nothing_running(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        before = asyncio.all_tasks()
        for turns in (0, 1, 5, 20, 100):
            async with owner(server) as link:
                for n in range(10):
                    link.enqueue(fact(n))
                for _ in range(turns):
                    await asyncio.sleep(0)
            left = asyncio.all_tasks() - before
            assert left == set(), f"after {turns} turns of the loop"

    nats_links.play(tmp_path, story)


# streams and buckets


def test_several_owners_create_the_streams_at_once_with_every_limit(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        with capture_logs() as lines:
            async with contextlib.AsyncExitStack() as owners:
                buses = [
                    await owners.enter_async_context(owner(server, f"owner-{n}")) for n in range(4)
                ]
                await asyncio.gather(
                    *(heartbeat.publish(fact(n)) for n, heartbeat in enumerate(buses))
                )
        assert [line["event"] for line in lines] == ["bus_connected"] * 4
        async with nats_links.raw(server.url) as client:
            jetstream = client.jetstream()
            for stream in streams.STREAMS:
                config = (await jetstream.stream_info(stream.name)).config
                assert config.name == stream.name
                assert tuple(config.subjects or ()) == stream.subjects
                assert config.max_age == stream.age_max_s
                assert config.max_bytes == stream.bytes_max
                assert config.max_msgs_per_subject == stream.per_subject_max
                assert config.max_msg_size == stream.message_bytes_max
                assert config.duplicate_window == stream.duplicate_window_s
                assert (config.discard == nats.js.api.DiscardPolicy.NEW) is stream.is_queue
            for bucket in streams.BUCKETS:
                config = (await jetstream.stream_info(f"KV_{bucket.name}")).config
                assert config.max_bytes == bucket.bytes_max
                assert config.max_msg_size == bucket.value_bytes_max
                assert config.max_age == bucket.age_max_s
                assert config.max_msgs_per_subject == 1

    nats_links.play(tmp_path, story)


def test_a_stream_that_cannot_be_read_is_logged_when_that_begins_and_when_it_ends(
    tmp_path: Path,
) -> None:
    async def story(server: local.NatsServer) -> None:
        with capture_logs() as lines:
            async with bus.Bus(server.url, producer="p", name="t") as link:
                following = consumers.follow(link.link, streams.EVENTS, filters=["muster.event.>"])
                events = asyncio.ensure_future(anext(following))
                await nats_links.until(lambda: bool(link.link.unread))
                assert str(link.link.problem()).startswith("MUSTER_EVENTS cannot be read: ")
                async with owner(server):
                    await nats_links.until(lambda: link.link.problem() is None)
                    await link.publish(fact(1))
                assert number(await events) == 1
        logged = [(x["event"], x["log_level"]) for x in lines if "stream" in x["event"]]
        assert logged == [("stream_unreadable", "warning"), ("stream_readable", "info")]
        refusals = {"stream": "MUSTER_EVENTS"}
        total = prometheus_client.REGISTRY.get_sample_value(
            "muster_bus_stream_refusals_total", refusals
        )
        assert (total or 0) >= 5

    nats_links.play(tmp_path, story)


def test_a_stream_of_another_configuration_is_updated(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        async with nats_links.raw(server.url) as client:
            await client.jetstream().add_stream(
                name="MUSTER_EVENTS", subjects=["muster.event.>"], allow_rollup_hdrs=True
            )
        async with owner(server) as link:
            await link.publish(fact(1))
        async with nats_links.raw(server.url) as client:
            config = (await client.jetstream().stream_info("MUSTER_EVENTS")).config
            assert config.max_bytes == streams.EVENTS.bytes_max
            assert not config.allow_rollup_hdrs

    nats_links.play(tmp_path, story)


def test_a_process_that_is_no_owner_waits_for_the_streams(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        plugin = bus.Bus(server.url, producer="plugins/p", name="plugin")
        async with plugin:
            plugin.enqueue(fact(1))
            assert not await plugin.flush(0.1)
            async with owner(server):
                assert await plugin.flush(10)
        assert await stored_numbers(server) == [1]

    nats_links.play(tmp_path, story)


def test_a_server_that_lost_its_disk_gets_its_streams_again_and_every_reader_recovers(
    tmp_path: Path,
) -> None:
    async def story(server: local.NatsServer) -> None:
        async with (
            owner(server) as link,
            collected(consumers.follow(link.link, streams.EVENTS, filters=ALL)) as followed,
        ):
            await following(link, followed)
            consumed: list[int] = []
            consuming = asyncio.create_task(consume(link, consumed))
            await nats_links.until(lambda: consumed[-1:] == [number(followed[-1])])
            followed.clear()
            consumed.clear()
            await server.kill()
            shutil.rmtree(tmp_path / "nats" / "store")
            await nats_links.until(lambda: not link.link.is_connected)
            for n in range(10):
                link.enqueue(fact(n))
            await server.start()
            assert await link.flush(10)
            await nats_links.until(lambda: len(consumed) >= 10 and len(followed) >= 10)
            consuming.cancel()
            await asyncio.gather(consuming, return_exceptions=True)
            assert consumed == [number(e) for e in followed] == list(range(10))

    nats_links.play(tmp_path, story)


# reading


async def consume(link: bus.Bus, events: list[int], durable: str = "reader") -> None:
    """Consume and acknowledge events until cancelled; append their numbers to `events`."""
    async for delivery in consumers.consume(
        link.link, streams.EVENTS, durable=durable, filters=ALL
    ):
        events.append(number(delivery.event))
        await delivery.ack()


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


def dead_letters(lines: Sequence[EventDict]) -> list[EventDict]:
    return [line for line in lines if line["event"].startswith("dead_letter_")]


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


def test_values_are_remembered_replaced_and_forgotten(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        async with owner(server) as link:
            assert await storage.read_all(link.link, streams.STATE) == {}
            await storage.put(link.link, streams.STATE, "node-a.p", b"1")
            await storage.put(link.link, streams.STATE, "node-b.p", b"2")
            await storage.put(link.link, streams.STATE, "node-a.p", b"3")
            assert await storage.read_all(link.link, streams.STATE) == {
                "node-a.p": b"3",
                "node-b.p": b"2",
            }
            await storage.put(link.link, streams.STATE, "node-b.p", b"")
            assert await storage.read_all(link.link, streams.STATE) == {"node-a.p": b"3"}
            assert await storage.read_all(link.link, streams.LEDGER) == {}
            await server.kill()
            recalling = asyncio.create_task(storage.read_all(link.link, streams.STATE))
            await server.start()
            assert await recalling == {"node-a.p": b"3"}

    nats_links.play(tmp_path, story)


# heartbeats, requests and replies


def test_a_value_that_the_server_refuses_is_an_error_with_its_reason(tmp_path: Path) -> None:
    async def story() -> None:
        async with local.NatsServer(tmp_path) as server, owner(server) as link:
            large = b"x" * (streams.SILENCES.value_bytes_max + 1)
            with pytest.raises(jetstream.Refused, match="message size exceeds maximum allowed"):
                await storage.put(link.link, streams.SILENCES, "s1", large)

    asyncio.run(asyncio.wait_for(story(), 100))


def test_heartbeats_are_skipped_while_the_server_is_away_and_none_comes_late(
    tmp_path: Path,
) -> None:
    async def story(server: local.NatsServer) -> None:
        events: list[int] = []

        async def receive(heartbeat: vocabulary.Heartbeat) -> None:
            events.append(heartbeat.seq)

        async with owner(server) as plugin, owner(server) as health:
            await health.heartbeats(receive)
            await nats_links.settled(health.link)
            await plugin.link.client()
            skipped = count("published", "heartbeat_skipped")
            assert await plugin.send_heartbeat(heartbeat_of(1))
            await nats_links.until(lambda: events == [1])
            await server.kill()
            await nats_links.until(lambda: not plugin.link.is_connected)
            assert [await plugin.send_heartbeat(heartbeat_of(seq)) for seq in (2, 3)] == [
                False,
                False,
            ]
            await server.start()
            await nats_links.settled(health.link)
            await plugin.link.client()
            assert await plugin.send_heartbeat(heartbeat_of(4))
            await nats_links.until(lambda: 4 in events)
            assert events == [1, 4]
            assert count("published", "heartbeat_skipped") == skipped + 2

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


def test_a_request_is_answered_or_reports_whether_there_was_a_subscriber(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        subject = vocabulary.rpc_subject("node-a", "p", "probe")

        async def receive(_: connection.Message) -> None:
            """Send no reply."""

        async with owner(server) as plugin, owner(server) as health:
            await health.link.client()
            with pytest.raises(bus.NobodyAnswered) as alone:
                await health.request(subject, timeout_s=5)
            assert not alone.value.subscribed
            await plugin.reply(subject, lambda: b"well")
            await nats_links.settled(plugin.link)
            assert await health.request(subject, timeout_s=5) == b"well"
            await plugin.link.subscribe("muster.rpc.node-a.mute.probe", receive)
            await nats_links.settled(plugin.link)
            with pytest.raises(bus.NobodyAnswered) as mute:
                await health.request("muster.rpc.node-a.mute.probe", timeout_s=0.1)
            assert mute.value.subscribed
            await server.kill()
            await nats_links.until(lambda: not health.link.is_connected)
            with pytest.raises(bus.NobodyAnswered) as away:
                await health.request(subject, timeout_s=5)
            assert not away.value.subscribed

    nats_links.play(tmp_path, story)


def test_a_server_is_reachable_while_it_answers(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        async with owner(server) as link:
            await link.link.client()
            assert await link.is_reachable(timeout_s=5)
            server.freeze()
            assert not await link.is_reachable(timeout_s=0.1)
            server.thaw()
            assert await link.is_reachable(timeout_s=5)
            await server.kill()
            await nats_links.until(lambda: not link.link.is_connected)
            assert not await link.is_reachable(timeout_s=5)

    nats_links.play(tmp_path, story)


def test_a_plugin_can_publish_for_its_own_node_only_and_logs_a_refusal(
    tmp_path: Path,
) -> None:
    async def story(server: local.NatsServer) -> None:
        events: list[str] = []

        async def receive(heartbeat: vocabulary.Heartbeat) -> None:
            events.append(heartbeat.node)

        url = server.url.replace("//", "//node-a:a@")
        with capture_logs() as lines:
            plugin = bus.Bus(url, producer="plugins/p", name="plugin")
            async with owner(server) as health, plugin:
                await health.heartbeats(receive)
                await nats_links.settled(health.link)
                await plugin.publish(fact(1))
                for node in ("node-b", "node-a"):
                    assert await plugin.send_heartbeat(heartbeat_of(1, node))
                plugin.enqueue(fact(2, "node-b"))
                await nats_links.until(lambda: sum(x["event"] == "bus_error" for x in lines) >= 2)
                await nats_links.until(lambda: bool(events))
        assert events == ["node-a"]
        assert await stored_numbers(server) == [1]
        refusals = [x["error"].lower() for x in lines if x["event"] == "bus_error"]
        assert 'publish to "muster.heartbeat.node-b.p"' in refusals[0]
        assert 'publish to "muster.event.node-b.p.device.removed"' in refusals[1]

    nats_links.play(tmp_path, story, ONE_NODE)


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


def test_what_a_full_stream_refuses_for_the_moment_is_stored_later(tmp_path: Path) -> None:
    config = tmp_path / "nats.conf"
    config.write_text(f"{local.CONFIG}jetstream {{ max_buffered_size: 200KB }}\n")

    async def story() -> None:
        async with local.NatsServer(tmp_path / "nats", config=config) as server, owner(server) as b:
            await b.publish(fact(0))
            before = count("published", "retried")
            inventories = [
                vocabulary.InventoryReported(
                    node=f"n{each}",
                    plugin="p",
                    at=NOW,
                    devices=(),
                    resources=("x" * 200,) * 150,
                )
                for each in range(200)
            ]
            await asyncio.gather(*(b.publish(each) for each in inventories))
            assert count("published", "retried") > before
            subjects = {m.subject for m in await stored(server, "MUSTER_INVENTORY")}
            assert subjects == {f"muster.inventory.n{each}.p.0" for each in range(200)}

    asyncio.run(story())
