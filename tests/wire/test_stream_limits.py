"""One hostile node publishes all that it may: the others lose no event and no inventory."""

import asyncio
import dataclasses
import itertools
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import nats.js.errors
from nats.js import api

from muster import vocabulary
from muster.local import nats as local
from muster.nats import bus, consumers, storage, stream_info, streams
from muster.nats.auth import permissions
from tests.worlds import bus_subjects, nats_links, shipped_nats

NOW: Final = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
OTHERS: Final = [f"node-{number}" for number in range(20)]
AT_ONCE: Final = 200
REPORTED: Final = (streams.EVENTS, streams.INVENTORY)


def inventory(node: str, count: int = 3) -> vocabulary.InventoryReported:
    return vocabulary.InventoryReported(
        node=node,
        plugin="device-plugin",
        at=NOW,
        devices=tuple(
            vocabulary.Device(id=f"{n:05}", resource="example.com/device") for n in range(count)
        ),
    )


def of_others(node: str) -> tuple[vocabulary.Event, ...]:
    started = vocabulary.PluginStarted(
        node=node, plugin="device-plugin", at=NOW, version="1", instance="i"
    )
    return started, inventory(node)


def subjects(grant: permissions.Grant) -> Iterator[str]:
    """Return every subject that a stream stores and a node may publish on."""
    for subject in grant.publish:
        kind = subject.split(".")[1]
        if kind == "event":
            yield subject
        elif kind == "inventory":
            yield from (f"{subject[:-1]}{page}" for page in range(vocabulary.PAGES_MAX))


def test_a_node_that_publishes_all_it_may_removes_only_its_own_messages(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        async with (
            bus.Bus(server.url, producer="plugins/p", name="o", owner=True) as link,
            nats_links.raw(server.url) as hostile,
        ):
            for event in itertools.chain(*map(of_others, OTHERS)):
                await link.publish(event)
            publishing = hostile.jetstream()

            async def flood(subject: str, size: int, count: int) -> None:
                for _ in range(0, count, AT_ONCE):
                    await asyncio.gather(
                        *(publishing.publish(subject, b"x" * size) for _ in range(AT_ONCE))
                    )

            refused = 0
            hostile_subjects = [*subjects(permissions.plugin("evil"))]
            assert len(hostile_subjects) == 19 + vocabulary.PAGES_MAX
            for number in range(60):
                try:
                    subject = hostile_subjects[number % len(hostile_subjects)]
                    await publishing.publish(subject, b"x" * 1_000_000)
                except nats.js.errors.BadRequestError as error:
                    assert error.err_code == 10054  # noqa: PT017  # JSStreamMessageExceedsMaximum
                    refused += 1
            assert refused == 60
            for subject in hostile_subjects[:3]:
                await flood(subject, streams.payload_bytes_max(streams.EVENTS), 600)
            for subject in hostile_subjects[-3:]:
                await flood(subject, streams.payload_bytes_max(streams.INVENTORY), AT_ONCE)
            counts: dict[str, int] = {}
            for stream in REPORTED:
                info = await publishing.stream_info(stream.name, subjects_filter=">")
                counts |= info.state.subjects or {}
            evil = {s: n for s, n in counts.items() if ".evil." in s}
            assert evil == {
                **dict.fromkeys(hostile_subjects[:3], streams.EVENTS.per_subject_max),
                **dict.fromkeys(hostile_subjects[-3:], 1),
            }
            newest = [
                event.data
                for stream, kind in zip(REPORTED, ("event", "inventory"), strict=True)
                for event in await consumers.newest(link.link, stream, f"muster.{kind}.*.*.>")
            ]
            assert len(newest) == 2 * len(OTHERS)
            assert {event.node for event in newest} == {*OTHERS}

    nats_links.play(tmp_path, story)


def test_a_page_that_no_inventory_has_is_not_stored(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        async with (
            bus.Bus(server.url, producer="plugins/p", name="o", owner=True) as link,
            nats_links.raw(server.url) as hostile,
        ):
            await link.publish(inventory("node-a"))
            for page in ("64", "00", "x"):
                try:
                    await hostile.jetstream().publish(f"muster.inventory.evil.p.{page}", b"")
                except nats.js.errors.NoStreamResponseError:
                    continue
                raise AssertionError(f"page {page} was stored")

    nats_links.play(tmp_path, story)


def test_ten_thousand_devices_are_published_in_pages_and_read_whole(tmp_path: Path) -> None:
    whole = inventory("node-a", 10_000)

    async def story(server: local.NatsServer) -> None:
        async with bus.Bus(server.url, producer="plugins/p", name="o", owner=True) as link:
            following = consumers.follow(
                link.link, streams.INVENTORY, filters=streams.INVENTORY.subjects, since=NOW
            )
            await link.publish(whole)
            first = await anext(following)
            (newest,) = await consumers.newest(
                link.link, streams.INVENTORY, "muster.inventory.*.*.*"
            )
            assert first == newest
            assert isinstance(first.data, vocabulary.InventoryReported)
            assert first.data.devices == whole.devices
            async with nats_links.raw(server.url) as client:
                info = await client.jetstream().stream_info(streams.INVENTORY.name)
            assert 20 < info.state.messages < vocabulary.PAGES_MAX

    nats_links.play(tmp_path, story)


def test_an_event_longer_than_its_message_arrives_shortened(tmp_path: Path) -> None:
    pods = tuple(f"namespace/pod-{number}" + "x" * 200 for number in range(300))
    event = vocabulary.DeviceHealthChanged(
        node="node-a",
        plugin="p",
        at=NOW,
        resource="example.com/r",
        device_id="d",
        health=vocabulary.Health.UNHEALTHY,
        reason="why",
        pods=pods,
    )

    async def story(server: local.NatsServer) -> None:
        async with bus.Bus(server.url, producer="plugins/p", name="o", owner=True) as link:
            await link.publish(event)
            (stored,) = await consumers.newest(link.link, streams.EVENTS, "muster.event.>")
            assert isinstance(stored.data, vocabulary.DeviceHealthChanged)
            assert stored.data.pods == (*pods[:20], "(280 more left out)")

    nats_links.play(tmp_path, story)


def test_a_service_that_fills_its_stream_removes_nothing_of_others(tmp_path: Path) -> None:
    firsts = {
        "health": "muster.alert.node-a.critical.x",
        "labeler": "muster.label.node-a.x",
        "notifier": "muster.notification.node-a.r.x",
    }

    async def stored(admin: bus_subjects.Client) -> set[str]:
        kept: set[str] = set()
        for stream in (streams.ALERTS, streams.LABELS, streams.NOTIFICATIONS):
            info = await admin.raw.jetstream().stream_info(stream.name, subjects_filter=">")
            kept |= set(info.state.subjects or {})
        return kept & set(firsts.values())

    async def story(server: local.NatsServer) -> None:
        async with shipped_nats.client(server, "admin") as admin:
            for user, subject in firsts.items():
                async with shipped_nats.client(server, user) as caller:
                    await caller.request(subject, b"")
            for user in ("labeler", "notifier"):
                before = await stored(admin)
                async with shipped_nats.client(server, user) as caller:
                    for number in range(80):
                        await caller.request(f"{firsts[user]}{number}", os.urandom(1_000_000))
                assert before - await stored(admin) == {firsts[user]}

    shipped_nats.run(tmp_path, story)


def test_an_upgrade_gives_labels_and_notifications_streams_of_their_own(tmp_path: Path) -> None:
    """Health updates the stream of the earlier version, in which they were with the alerts."""
    earlier = ["verdict", "alert", "label", "notification", "sys"]

    async def story(server: local.NatsServer) -> None:
        async with nats_links.raw(server.url) as old:
            publishing = old.jetstream()
            subjects = [f"muster.{kind}.>" for kind in earlier]
            await publishing.add_stream(api.StreamConfig(name="MUSTER_ALERTS", subjects=subjects))
            durable = api.ConsumerConfig(durable_name="notifier", filter_subject="muster.alert.>")
            await publishing.add_consumer("MUSTER_ALERTS", durable)
            for kind in ("alert", "label", "notification"):
                await publishing.publish(f"muster.{kind}.node-a.x", b"before")
            health = bus.Bus(server.url, producer="services/health", name="h", owner=True)
            async with health:
                await health.link.client()
                for kind in ("alert", "label", "notification"):
                    await publishing.publish(f"muster.{kind}.node-a.x", b"after")
                info = await publishing.consumer_info("MUSTER_ALERTS", "notifier")
                assert info.num_pending == 2
                counts = {
                    stream.name: (await publishing.stream_info(stream.name)).state.messages
                    for stream in (streams.ALERTS, streams.LABELS, streams.NOTIFICATIONS)
                }
                assert counts == {"MUSTER_ALERTS": 4, "MUSTER_LABELS": 1, "MUSTER_NOTIFICATIONS": 1}

    nats_links.play(tmp_path, story)


def test_an_upgrade_keeps_the_inventories_that_earlier_plugins_published(tmp_path: Path) -> None:
    """Health updates the stream of the earlier version, which stored inventories as events."""
    subject = "muster.event.{}.device-plugin.inventory.reported"

    async def story(server: local.NatsServer) -> None:
        async with nats_links.raw(server.url) as plugin:
            publishing = plugin.jetstream()
            await publishing.add_stream(
                api.StreamConfig(
                    name="MUSTER_EVENTS", subjects=["muster.event.>"], max_msgs_per_subject=1_000
                )
            )
            async with bus.Bus(server.url, producer="plugins/p", name="old") as earlier:
                long = {"node-a": 3, "node-b": 2_000}
                for node, count in long.items():
                    _, payload, _ = earlier._encoded(inventory(node, count), 1, None)
                    await publishing.publish(subject.format(node), payload)
                health = bus.Bus(server.url, producer="services/health", name="h", owner=True)
                async with health:
                    # health updates the streams before it uses them
                    await health.link.client()
                    # a node that is not upgraded yet continues to publish
                    _, payload, _ = earlier._encoded(inventory("node-c"), 2, None)
                    await publishing.publish(subject.format("node-c"), payload)
                    await earlier.publish(inventory("node-a", 4))
                    counts = {}
                    for filter_ in vocabulary.subject_filters("inventory.reported"):
                        stream = streams.required(filter_)
                        async for event in consumers.each_newest(earlier.link, stream, filter_):
                            assert isinstance(event.data, vocabulary.InventoryReported)
                            counts[event.node, stream.name] = len(event.data.devices)
                    assert counts == {
                        ("node-a", "MUSTER_EVENTS"): 3,
                        ("node-b", "MUSTER_EVENTS"): 2_000,
                        ("node-c", "MUSTER_EVENTS"): 3,
                        ("node-a", "MUSTER_INVENTORY"): 4,
                    }

    nats_links.play(tmp_path, story)


def test_an_upgrade_limits_the_bucket_of_a_lock_to_its_key_and_keeps_the_claim(
    tmp_path: Path,
) -> None:
    async def story(server: local.NatsServer) -> None:
        stream = f"KV_{streams.LEADER.name}"
        async with (
            bus.Bus(server.url, producer="h", name="h", owner=True) as health,
            nats_links.raw(server.url) as admin,
        ):
            await storage.claim(
                health.link, streams.LEADER, "health", b"us", ttl_s=60, revision=0, timeout_s=9
            )
            jetstream = admin.jetstream()
            config = (await jetstream.stream_info(stream)).config
            await jetstream.update_stream(config.evolve(subjects=[f"$KV.{streams.LEADER.name}.>"]))
        async with (
            bus.Bus(server.url, producer="h", name="h", owner=True) as health,
            nats_links.raw(server.url) as admin,
        ):
            await health.link.client()
            info = await admin.jetstream().stream_info(stream, subjects_filter=">")
            assert info.config.subjects == list(streams.LEADER.subjects)
            assert info.state.subjects == {streams.LEADER.subjects[0]: 1}

    nats_links.play(tmp_path, story)


def test_the_age_of_the_oldest_message_is_known_by_the_servers_clock(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        async with bus.Bus(server.url, producer="plugins/p", name="o", owner=True) as link:
            client = await link.link.client()
            assert await stream_info.stored(client, "MUSTER_INVENTORY") == (0, 0.0)
            await link.publish(inventory("node-a"))
            size, age_s = await stream_info.stored(client, "MUSTER_INVENTORY")
            assert size > 500
            assert 0.0 < age_s < 60.0
            try:
                await stream_info.stored(client, "NO_SUCH")
            except nats.errors.Error:
                return
            raise AssertionError("there is no such stream")

    nats_links.play(tmp_path, story)


def test_a_stream_that_many_nodes_fill_together_is_seen_to_remove_too_early(tmp_path: Path) -> None:
    small = dataclasses.replace(streams.EVENTS, bytes_max=100_000)

    async def story(server: local.NatsServer) -> None:
        async with nats_links.raw(server.url) as client:
            publishing = client.jetstream()
            await publishing.add_stream(
                name=small.name, subjects=[*small.subjects], max_bytes=small.bytes_max
            )

            async def fill(count: int) -> str:
                for number in range(count):
                    await publishing.publish(f"muster.event.node-{number}.p.x.y", b"x" * 5_000)
                return streams.early_eviction(small, *await stream_info.stored(client, small.name))

            assert await fill(10) == ""
            assert (await fill(30)).startswith("MUSTER_EVENTS has 0 of 0 MiB, and its oldest ")

    nats_links.play(tmp_path, story)
