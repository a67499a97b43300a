"""Permissions on the bus: a real nats-server with the configuration that is shipped."""

import asyncio
import contextlib
import itertools
import json
import re
import sys
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import nats.errors
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nats import js

from muster import vocabulary
from muster.cli import keyfiles
from muster.local import nats as local
from muster.nats import bus, connection, consumers, storage, streams
from muster.nats.auth import accounts, permissions
from muster.service import runtime
from muster_health.bus import nats_connections
from tests.worlds import bus_subjects, nats_links, nats_with_gate, shipped_nats

ROOT = Path(__file__).resolve().parents[2]
USERS = ("health", "labeler", "notifier", "reader", "admin", "plugin_node-a", "plugin_node-b")


def test_whatever_a_plugin_publishes_only_subjects_of_its_node_are_received(tmp_path: Path) -> None:
    with asyncio.Runner() as runner:
        server = local.NatsServer(tmp_path / "nats", config=shipped_nats.configuration(tmp_path))
        runner.run(server.start())

        @settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
        @given(st.lists(bus_subjects.SUBJECTS, min_size=20, max_size=60))
        def holds(published: list[str]) -> None:
            runner.run(story(published))

        async def story(published: list[str]) -> None:
            async with (
                asyncio.timeout(100),
                shipped_nats.client(server, "admin") as hearing,
                shipped_nats.client(server, "plugin_node-a") as plugin,
            ):
                await bus_subjects.check_publishing(published, hearing=hearing, plugin=plugin)

        try:
            holds()
        finally:
            runner.run(server.stop())


def test_whatever_a_plugin_subscribes_to_only_requests_to_it_are_received(tmp_path: Path) -> None:
    with asyncio.Runner() as runner:
        server = local.NatsServer(tmp_path / "nats", config=shipped_nats.configuration(tmp_path))
        runner.run(server.start())

        @settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
        @given(
            st.lists(bus_subjects.SUBJECTS.filter(bus_subjects.is_filter), min_size=10, max_size=60)
        )
        def holds(subscribed: list[str]) -> None:
            runner.run(story(subscribed))

        async def story(subscribed: list[str]) -> None:
            async with (
                asyncio.timeout(100),
                shipped_nats.client(server, "admin") as speaker,
                shipped_nats.client(server, "plugin_node-a") as plugin,
            ):
                await bus_subjects.check_subscribing(subscribed, speaker=speaker, plugin=plugin)

        try:
            holds()
        finally:
            runner.run(server.stop())


@pytest.mark.parametrize("user", ["plugin_node-a", "reader"])
def test_plugins_and_readers_change_no_stream(tmp_path: Path, user: str) -> None:
    async def story(server: local.NatsServer) -> None:
        async with shipped_nats.client(server, user) as caller:
            for subject in bus_subjects.WRITES:
                await caller.raw.publish(subject, b"{}")
            await caller.flush()
            await bus_subjects.until(lambda: len(caller.refused) == len(bus_subjects.WRITES))

    shipped_nats.run(tmp_path, story)


def test_no_acknowledgement_is_written_where_a_plugin_may_not_write(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        async with (
            shipped_nats.client(server, "admin") as hearing,
            shipped_nats.client(server, "plugin_node-a") as plugin,
        ):
            await bus_subjects.check_replies(hearing=hearing, plugin=plugin)

    shipped_nats.run(tmp_path, story)


def test_a_reader_cannot_make_itself_the_consumer_of_a_service(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        async with shipped_nats.client(server, "reader") as reader:
            config = {"durable_name": "health", "ack_policy": "explicit"}
            request = json.dumps({"stream_name": "MUSTER_EVENTS", "config": config}).encode()
            answer = await reader.request(
                f"{permissions.IMPORTED_API}.CONSUMER.CREATE.MUSTER_EVENTS", request
            )
            assert json.loads(answer.data)["error"]["code"] == 400
        async with shipped_nats.client(server, "admin") as admin:
            assert await admin.raw.jetstream().consumers_info("MUSTER_EVENTS") == []

    shipped_nats.run(tmp_path, story)


HEADERS = (
    {"Nats-Rollup": "all"},
    {"Nats-Rollup": "sub"},
    {"Nats-TTL": "1s"},
    {"Nats-Msg-Id": "theirs"},
    {"Nats-Expected-Last-Msg-Id": "q"},
    {"Nats-Schedule": "@at 2026-01-01T00:00:00Z", "Nats-Schedule-Target": "muster.event.node-b.x"},
    {"Nats-Incr": "1"},
    {"Nats-Batch-Id": "u", "Nats-Batch-Sequence": "1", "Nats-Batch-Commit": "1"},
    {"Nats-Marker-Reason": "Purge"},
    {"KV-Operation": "PURGE", "Nats-Rollup": "all"},
)
SAYS = {
    "plugin_node-a": "muster.event.node-a.device-plugin.device.added",
    "labeler": "muster.label.node-a.x",
    "notifier": "muster.notification.node-a.x",
}
KEPT = {
    "MUSTER_EVENTS": ("plugin_node-b", "muster.event.node-b.device-plugin.device.added"),
    "MUSTER_ALERTS": ("health", "muster.alert.node-b.critical.x"),
    "KV_muster_leader": ("health", "$KV.muster_leader.health"),
}


def test_no_header_removes_messages_of_others(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        for user, subject in KEPT.values():
            async with shipped_nats.client(server, user) as caller:
                await caller.request(subject, b"kept", headers={"Nats-Msg-Id": "theirs"})
        for user, subject in SAYS.items():
            async with shipped_nats.client(server, user) as caller:
                for headers in HEADERS:
                    await caller.raw.publish(subject, b"{}", headers=headers)
                await caller.flush()
        async with shipped_nats.client(server, "notifier") as caller:
            # the notifier has a lock of its own, and cannot change that of health
            for denied in ("$KV.muster_leader.notifier", "$JS.API.STREAM.PURGE.KV_muster_leader"):
                await caller.raw.publish(denied, b"", headers={"Nats-Rollup": "all"})
            await caller.flush()
            await bus_subjects.until(lambda: len(caller.refused) == 2)
        async with shipped_nats.client(server, "admin") as admin:
            for stream, (_, subject) in KEPT.items():
                info = await admin.raw.jetstream().stream_info(stream, subjects_filter=subject)
                assert info.state.subjects == {subject: 1}

    shipped_nats.run(tmp_path, story)


def test_no_plugin_makes_an_event_of_another_a_repeat(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        async with (
            shipped_nats.client(server, "plugin_node-a") as evil,
            shipped_nats.client(server, "labeler") as labeler,
            bus.Bus(
                shipped_nats.address(server, "plugin_node-b"), producer="p", name="t"
            ) as plugin,
            bus.Bus(shipped_nats.address(server, "health"), producer="h", name="t") as health,
            shipped_nats.client(server, "admin") as admin,
        ):
            await plugin.publish(event("node-b"))
            reply = await evil.request(
                "muster.event.node-a.device-plugin.device.added",
                b"",
                headers={"Nats-Expected-Last-Msg-Id": "q"},
            )
            (newest,) = re.findall(r"wrong last msg ID: (\w+)", reply.data.decode())
            for number in range(20):
                for guess in (f"{newest}:{number}", f"{plugin.instance}:{number}"):
                    await evil.raw.publish(
                        "muster.event.node-a.device-plugin.device.added",
                        b"",
                        headers={"Nats-Msg-Id": guess},
                    )
            await evil.flush()
            for _ in range(5):
                await plugin.publish(event("node-b"))
            # the ids of events that are repeated after a restart can be guessed, so health examines
            # a duplicate; the labeler has a stream of its own, where its id duplicates nothing
            await labeler.request("muster.label.x", b"", headers={"Nats-Msg-Id": "alert-2"})
            await admin.request("muster.sys.x.x", b"", headers={"Nats-Msg-Id": "alert-1"})
            for _ in range(2):
                assert await health.publish(tick(), event_id="alert-1")
                assert await health.publish(tick(), event_id="alert-2")
            stored: dict[str, int] = {}
            for stream in ("MUSTER_EVENTS", "MUSTER_ALERTS"):
                info = await admin.raw.jetstream().stream_info(stream, subjects_filter=">")
                stored |= info.state.subjects or {}
            assert stored[event("node-b").subject] == 6
            # alert-1 twice: each time, the stored duplicate was another user's message
            assert stored[tick().subject] == 3

    shipped_nats.run(tmp_path, story)


def test_only_health_changes_streams(tmp_path: Path) -> None:
    names = [caller.name for caller in streams.STREAMS] + [
        f"KV_{caller.name}" for caller in streams.BUCKETS
    ]
    wrong = [
        *(f"$JS.API.STREAM.{verb}.{n}" for n in names for verb in ("CREATE", "UPDATE", "DELETE")),
        *("$JS.API.STREAM.PURGE.MUSTER_EVENTS", "$JS.API.STREAM.PURGE.MUSTER_ALERTS"),
        *("$JS.API.CONSUMER.DELETE.MUSTER_ALERTS.notifier", "$JS.API.STREAM.CREATE.OTHER"),
    ]

    async def story(server: local.NatsServer) -> None:
        for user in ("labeler", "notifier", "reader", "plugin_node-a"):
            async with shipped_nats.client(server, user) as caller:
                for subject in wrong:
                    await caller.raw.publish(subject, b"{}")
                await caller.flush()
                await bus_subjects.until(lambda: len(caller.refused) == len(wrong))

    shipped_nats.run(tmp_path, story)


def test_abandoned_consumers_of_a_reader_are_removed(tmp_path: Path) -> None:
    forever = {"ack_policy": "explicit", "inactive_threshold": 10**18}
    passing = {"ack_policy": "none", "inactive_threshold": 60 * 10**9}
    pushing = {**passing, "deliver_subject": "muster.rpc.node-a.device-plugin.probe"}

    async def story(server: local.NatsServer) -> None:
        async with shipped_nats.client(server, "reader") as reader:
            for stream in ("MUSTER_EVENTS", "MUSTER_ALERTS"):
                for config in (passing, pushing, *[forever] * 299):
                    request = json.dumps({"stream_name": stream, "config": config}).encode()
                    await reader.request(
                        f"{permissions.IMPORTED_API}.CONSUMER.CREATE.{stream}", request
                    )
        async with (
            shipped_nats.client(server, "admin") as admin,
            bus.Bus(shipped_nats.address(server, "notifier"), producer="n", name="n") as notifier,
        ):
            jetstream = admin.raw.jetstream()
            ticks = consumers.consume(
                notifier.link, streams.ALERTS, durable="notifier", filters=streams.ALERTS.subjects
            )
            waits = asyncio.ensure_future(first(ticks))
            while await counted(jetstream, "MUSTER_ALERTS") != 302:
                await asyncio.sleep(0.02)
            async with bus.Bus(
                shipped_nats.address(server, "health"), producer="h", name="h", owner=True
            ) as h:
                while await counted(jetstream, "MUSTER_ALERTS") != 2:
                    await asyncio.sleep(0.02)
                assert await counted(jetstream, "MUSTER_EVENTS") == 1
                await h.publish(tick())
                assert isinstance((await waits).event.data, vocabulary.WatchdogTicked)
            assert (await jetstream.consumer_info("MUSTER_ALERTS", "notifier")).name == "notifier"

    shipped_nats.run(tmp_path, story)


async def counted(request: js.JetStreamContext, stream: str) -> int:
    return (await request.stream_info(stream)).state.consumer_count


@pytest.mark.parametrize("user", ["reader", "labeler"])
def test_no_answer_to_a_reader_leaves_its_account(tmp_path: Path, user: str) -> None:
    """JetStream does not check the rights to a request's reply subject."""

    async def story(server: local.NatsServer) -> None:
        async with (
            shipped_nats.client(server, user) as reader,
            shipped_nats.client(server, "admin") as admin,
        ):
            jetstream = admin.raw.jetstream()
            await jetstream.publish("muster.alert.node-a.critical.x", b"{}")
            api, targets = (
                permissions.IMPORTED_API,
                [
                    *(f"$JS.API.STREAM.{verb}.MUSTER_ALERTS" for verb in ("PURGE", "DELETE")),
                    *("$KV.muster_leader.health", "$KV.muster_state.node-a.p"),
                    "muster.alert.node-b.critical.x",
                ],
            )
            reached: list[str] = []

            async def seen(message: connection.Message) -> None:
                reached.append(message.subject)

            for target in targets:
                await admin.raw.subscribe(target, cb=seen)
            await nats_links.flushed(admin.raw)
            config = {"ack_policy": "none", "deliver_policy": "all"}
            request = json.dumps({"stream_name": "MUSTER_ALERTS", "config": config}).encode()
            made = await reader.request(f"{api}.CONSUMER.CREATE.MUSTER_ALERTS", request)
            pull = f"{api}.CONSUMER.MSG.NEXT.MUSTER_ALERTS.{json.loads(made.data)['name']}"
            for target in targets:
                await reader.raw.publish(f"{api}.STREAM.INFO.MUSTER_ALERTS", b"", reply=target)
                # an answer without a body: the consumer has nothing more
                for _ in range(2):
                    await reader.raw.publish(pull, b'{"batch":1,"no_wait":true}', reply=target)
            inbox = f"{permissions.inbox(user)}.end"
            answered = await reader.raw.subscribe(inbox)
            await reader.raw.publish(pull, b'{"batch":1,"no_wait":true}', reply=inbox)
            await answered.next_msg(timeout=10)
            assert (await jetstream.stream_info("MUSTER_ALERTS")).state.messages == 1
            assert reached == []

    shipped_nats.run(tmp_path, story)


@pytest.mark.parametrize("user", ["reader", "labeler"])
def test_no_consumer_of_a_reader_pushes_to_a_service(tmp_path: Path, user: str) -> None:
    """JetStream pushes only to literal subscriptions in its account, in which plugins have none."""
    targets = [
        *("$KV.muster_state.node-a.p", "muster.outbox.ops"),
        *("muster.rpc.node-a.device-plugin.probe", nats_connections.CONNECT),
        *(f"$JS.API.STREAM.{verb}.MUSTER_ALERTS" for verb in ("PURGE", "DELETE")),
        *("muster.heartbeat.node-a.device-plugin", "muster.event.node-a.device-plugin.x"),
    ]

    async def story(server: local.NatsServer) -> None:
        async with (
            shipped_nats.client(server, user) as reader,
            shipped_nats.client(server, "health") as health,
            shipped_nats.client(server, "plugin_node-a") as plugin,
            shipped_nats.client(server, "admin") as admin,
        ):
            for subject in (nats_connections.SUBJECTS, "muster.heartbeat.>"):
                await health.raw.subscribe(subject)
            await plugin.raw.subscribe("muster.rpc.node-a.device-plugin.probe")
            await health.flush()
            await plugin.flush()
            jetstream = admin.raw.jetstream()
            await jetstream.publish("muster.alert.node-a.critical.x", b"{}")
            names = []
            for target in targets:
                config = {
                    "ack_policy": "none",
                    "deliver_policy": "all",
                    "deliver_subject": target,
                    "idle_heartbeat": 100_000_000,
                    "flow_control": True,
                }
                request = json.dumps({"stream_name": "MUSTER_ALERTS", "config": config}).encode()
                made = await reader.request(
                    f"{permissions.IMPORTED_API}.CONSUMER.CREATE.MUSTER_ALERTS", request
                )
                names.append(json.loads(made.data)["name"])
            # when this consumer has pushed to the inbox of its creator, the others would have, too
            inbox = f"{permissions.inbox('admin')}.pushed"
            pushed = await admin.raw.subscribe(inbox)
            await jetstream.add_consumer(
                "MUSTER_ALERTS", deliver_subject=inbox, ack_policy=js.api.AckPolicy.NONE
            )
            assert (await pushed.next_msg(timeout=10)).data == b"{}"
            for name in names:
                info = await jetstream.consumer_info("MUSTER_ALERTS", name)
                assert info.delivered is not None
                assert (info.delivered.consumer_seq, info.push_bound) == (0, None), info.config
            assert (await jetstream.stream_info("MUSTER_ALERTS")).state.messages == 1

    shipped_nats.run(tmp_path, story)


DEAD_LETTERS = f"$JS.API.STREAM.INFO.{streams.DEAD_LETTERS.name}"
"""A request of the notifier's whose answer is short enough for the bucket of a lock."""


def test_an_answer_redirected_to_the_lock_does_not_hold_it(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        async with (
            shipped_nats.client(server, "notifier") as notifier,
            shipped_nats.client(server, "admin") as admin,
            bus.Bus(shipped_nats.address(server, "health"), producer="h", name="t") as health,
        ):
            lock = "$KV.muster_leader.health"

            async def claim(who: bytes, revision: int) -> streams.Claimed:
                return await storage.claim(
                    health.link,
                    streams.LEADER,
                    "health",
                    who,
                    ttl_s=9,
                    revision=revision,
                    timeout_s=2,
                )

            ours = await claim(b"us", 0)
            await notifier.raw.publish(DEAD_LETTERS, b"", reply=lock)
            jetstream = admin.raw.jetstream()
            while (await jetstream.get_last_msg("KV_muster_leader", lock)).data == b"us":
                await asyncio.sleep(0.01)
            again = await claim(b"us", ours.revision)
            assert (again.written, again.value) == (True, b"us")
            other = await claim(b"others", 0)
            assert (other.written, other.value) == (False, b"us")

    shipped_nats.run(tmp_path, story)


def test_answers_redirected_to_the_bucket_of_a_lock_do_not_fill_it(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        async with (
            shipped_nats.client(server, "notifier") as notifier,
            shipped_nats.client(server, "admin") as admin,
        ):
            for bucket in (streams.LEADER, streams.TENURE):
                for key in ("x", "health.x", "notifier.x"):
                    target = f"$KV.{bucket.name}.{key}"
                    await notifier.raw.publish(DEAD_LETTERS, b"", reply=target)
                own = f"$KV.{bucket.name}.{bucket.lock_key}"
                await notifier.raw.publish(DEAD_LETTERS, b"", reply=own)
                # the answers arrive in order
                jetstream = admin.raw.jetstream()
                stream = f"KV_{bucket.name}"
                while (await jetstream.stream_info(stream)).state.messages == 0:
                    await asyncio.sleep(0.01)
                info = await jetstream.stream_info(stream, subjects_filter=">")
                assert info.state.subjects == {own: 1}

    shipped_nats.run(tmp_path, story)


def test_no_user_receives_the_answers_to_another(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        for user in USERS:
            if user == "admin":
                continue
            async with shipped_nats.client(server, user) as caller:
                others = [other for other in USERS if other != user]
                for other in others:
                    await caller.raw.subscribe(f"{permissions.inbox(other)}.>")
                for wide in ("_INBOX.>", ">", "*.>", "$SYS.>", "*"):
                    await caller.raw.subscribe(wide)
                await caller.flush()
                await bus_subjects.until(lambda: len(caller.refused) == len(others) + 5)  # noqa: B023

    shipped_nats.run(tmp_path, story)


def test_a_wrong_password_and_no_password_are_refused(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        for url in (server.url, server.url.replace("//", "//health:wrong@")):
            with pytest.raises(nats.errors.Error, match=r"(?i)authorization"):
                async with bus_subjects.client(url):
                    pass

    shipped_nats.run(tmp_path, story)


def test_the_resources_of_a_client_are_limited(tmp_path: Path) -> None:
    async def story(server: local.NatsServer) -> None:
        await bus_subjects.check_limits(lambda: shipped_nats.client(server, "plugin_node-a"))

    shipped_nats.run(tmp_path, story)


def event(node: str) -> vocabulary.Event:
    return vocabulary.PluginStopping(
        node=node, plugin="device-plugin", at=datetime.now(UTC), reason=vocabulary.StopReason.SIGNAL
    )


def credentials(keys: Path, user: str) -> Path:
    """Write the credentials of one of USERS, and return the file."""
    role = accounts.Role(user) if user in set(accounts.Role) else accounts.Role.NODE
    name = "reader_x" if user == "reader" else user
    file = keys / f"{name}.test"
    file.write_text(keyfiles.user(keys, role, name=name, at=time.time()))
    return file


class Users:
    """All users of a server, by password or by credentials."""

    def __init__(self, server: local.NatsServer, keys: Path | None) -> None:
        self._server = server
        self._keys = keys

    @contextlib.asynccontextmanager
    async def bus(self, user: str, *, owner: bool = False) -> AsyncIterator[bus.Bus]:
        with pytest.MonkeyPatch.context() as patch:
            url = shipped_nats.address(self._server, user)
            if self._keys:
                url = self._server.url
                patch.setenv("NATS_CREDS", str(credentials(self._keys, user)))
            info = bus.Bus(url, producer="t", name=user, owner=owner)
            await info.__aenter__()
            await info.link.client()
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_exit(info)
            yield info

    def raw(self, user: str) -> contextlib.AbstractAsyncContextManager[bus_subjects.Client]:
        if self._keys is None:
            return shipped_nats.client(self._server, user)
        return nats_with_gate.holder(self._server, credentials(self._keys, user).read_text())


async def health_works(plugin: bus.Bus, health: bus.Bus) -> None:
    reply = (
        *(plugin.publish(event("node-a")), health.is_reachable(timeout_s=2)),
        health.publish(tick()),
    )
    assert all(await asyncio.gather(*reply))
    await plugin.reply("muster.rpc.node-a.device-plugin.probe", lambda: b"here")
    await nats_links.settled(plugin.link)
    request = "muster.rpc.node-a.device-plugin.probe"
    assert await health.request(request, timeout_s=2) == b"here"
    assert await consumers.newest(health.link, streams.EVENTS, "muster.event.>") != []
    # to read the verdicts that it published, if its saved state is lost
    assert await consumers.newest(health.link, streams.ALERTS, "muster.alert.>") == []
    ago = datetime.now(UTC) - timedelta(hours=1)
    await first(
        consumers.follow(health.link, streams.EVENTS, filters=streams.EVENTS.subjects, since=ago)
    )
    await storage.put(health.link, streams.STATE, "node-a.device-plugin", b"{}")
    assert await storage.read_all(health.link, streams.STATE) == {"node-a.device-plugin": b"{}"}
    claimed = await storage.claim(
        health.link, streams.LEADER, "health", b"us", ttl_s=5, revision=0, timeout_s=2
    )
    again = await storage.claim(
        health.link, streams.LEADER, "health", b"us", ttl_s=5, revision=0, timeout_s=2
    )
    assert (claimed.written, again.written) == (True, False)
    await storage.release(
        health.link, streams.LEADER, "health", revision=claimed.revision, timeout_s=2
    )


async def notifier_works(notifier: bus.Bus) -> None:
    ticks = consumers.consume(
        notifier.link, streams.ALERTS, durable="notifier", filters=streams.ALERTS.subjects
    )
    await first(ticks)
    assert await consumers.newest(notifier.link, streams.ALERTS, "muster.sys.>") != []
    await storage.put(notifier.link, streams.LEDGER, "k", b"v")
    assert await storage.read_all(notifier.link, streams.LEDGER) == {"k": b"v"}
    letters = "muster.outbox.console.>"
    await storage.enqueue(notifier.link, "muster.outbox.console.g", b"letter", key="1")
    assert len(await storage.waiting_messages(notifier.link, streams.OUTBOX, letters)) == 1
    taken = storage.jobs(notifier.link, streams.OUTBOX, durable="receiver-console", subject=letters)
    job: storage.Job = await first(taken)
    await job.done()
    assert await storage.waiting_messages(notifier.link, streams.OUTBOX, letters) == []
    assert await storage.remove_waiting(notifier.link, streams.OUTBOX, letters)
    assert await first(storage.follow(notifier.link, streams.SILENCES)) is None


async def all_work(users: Users) -> None:
    async with (
        users.bus("health", owner=True) as health,
        users.bus("plugin_node-a") as plugin,
        users.bus("labeler") as labeler,
        users.bus("notifier") as notifier,
        users.bus("reader") as reader,
    ):
        await health_works(plugin, health)
        await notifier_works(notifier)
        assert await consumers.newest(labeler.link, streams.EVENTS, "muster.event.>") != []
        assert await consumers.newest(labeler.link, streams.ALERTS, "muster.sys.>") != []
        ago = datetime.now(UTC) - timedelta(hours=1)
        await first(
            consumers.follow(
                labeler.link, streams.EVENTS, filters=streams.EVENTS.subjects, since=ago
            )
        )
        since = datetime.now(UTC) - timedelta(hours=1)
        for stream in (streams.EVENTS, streams.ALERTS):
            await first(consumers.follow(reader.link, stream, filters=stream.subjects, since=since))
        await storage.read_all(reader.link, streams.SILENCES)
        heartbeats: asyncio.Queue[connection.Message] = asyncio.Queue()
        await reader.link.subscribe("muster.heartbeat.>", heartbeats.put)
        await nats_links.settled(reader.link)
        await (await plugin.link.client()).publish("muster.heartbeat.node-a.device-plugin", b"{}")
        assert (await heartbeats.get()).data == b"{}"
    async with users.raw("health") as hearing:
        subscribed: asyncio.Queue[connection.Message] = asyncio.Queue()
        await hearing.raw.subscribe("muster.nats.>", cb=subscribed.put)
        await hearing.flush()
        async with users.raw("plugin_node-b"):
            assert (await subscribed.get()).subject == "muster.nats.connect"


def tick() -> vocabulary.Event:
    return vocabulary.WatchdogTicked(
        node=vocabulary.FLEET, at=datetime.now(UTC), holder="t", leader=1, interval_s=10.0
    )


@pytest.mark.parametrize("by", ["password", "credentials"])
def test_every_role_can_do_its_work(tmp_path: Path, by: str) -> None:
    async def story() -> None:
        async with asyncio.timeout(100):
            if by == "password":
                async with local.NatsServer(
                    tmp_path / "nats", config=shipped_nats.configuration(tmp_path)
                ) as server:
                    await all_work(Users(server, None))
            else:
                async with nats_with_gate.World(tmp_path, gates=0) as world:
                    await all_work(Users(world.server, world.keys))

    before = violations()
    asyncio.run(story())
    assert violations() == before


def test_the_health_service_works_on_a_new_bus_with_only_its_own_rights(
    tmp_path: Path,
) -> None:
    async def story(server: local.NatsServer) -> None:
        file = tmp_path / "health.json"
        file.write_text(json.dumps({"bus": {"url": shipped_nats.address(server, "health")}}))
        command = (sys.executable, "-m", "muster_health", "--config", str(file))
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
        users = Users(server, None)
        try:
            async with users.bus("plugin_node-a") as plugin, users.bus("reader") as reader:
                beating = asyncio.create_task(send_heartbeats(plugin))
                filters = vocabulary.subject_filters("verdict.changed")
                ago = datetime.now(UTC) - timedelta(hours=1)
                info = await first(
                    consumers.follow(reader.link, streams.ALERTS, filters=filters, since=ago)
                )
                beating.cancel()
                await asyncio.gather(beating, return_exceptions=True)
        finally:
            process.terminate()
            await process.wait()
        assert isinstance(info.data, vocabulary.VerdictChanged)
        assert (info.data.node, info.data.verdict) == ("node-a", vocabulary.Verdict.HEALTHY)

    shipped_nats.run(tmp_path, story)


async def send_heartbeats(plugin: bus.Bus) -> None:
    """Send heartbeats until cancelled, as a healthy plugin does."""
    resource = vocabulary.ResourceBeat(
        name="a.example/fuse", streams=1, probe_ok=True, probe_age_s=0.0
    )
    for seq in itertools.count(1):
        beat = vocabulary.Heartbeat(
            node="node-a",
            plugin="device-plugin",
            instance=plugin.instance,
            seq=seq,
            interval_s=1.0,
            resources=(resource,),
        )
        await plugin.send_heartbeat(beat)
        await asyncio.sleep(0.2)


def violations() -> float:
    return float(connection._ERRORS.labels("Error")._value.get())


async def first(given_: AsyncIterator[Any]) -> Any:
    async with contextlib.aclosing(given_) as iterator:  # type: ignore[type-var]
        async for caller in iterator:
            if isinstance(caller, runtime.Delivery):
                await caller.ack()
            return caller
    raise AssertionError("nothing came")
