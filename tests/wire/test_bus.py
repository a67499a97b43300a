"""The bus on a real nats-server: no event is lost or stored twice, and no failure is silent."""

import asyncio
import contextlib
import shutil
from pathlib import Path
from typing import Final

import nats.aio.client
import nats.js.api
import prometheus_client
import pytest
from structlog.testing import capture_logs

from muster import vocabulary
from muster.local import nats as local
from muster.nats import bus, connection, consumers, jetstream, storage, streams
from tests.worlds import nats_links
from tests.worlds.bus_events import (
    ALL,
    NOW,
    collected,
    consume,
    count,
    fact,
    following,
    heartbeat_of,
    number,
    owner,
    stored,
    stored_numbers,
)

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
