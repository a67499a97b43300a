"""The notifier as a process, with a real NATS server and a real webhook receiver."""

import asyncio
import contextlib
import datetime as dt
import pathlib
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import aiohttp
import msgspec
import orjson
import pytest

from muster import matching, vocabulary
from muster.fleet import dead_letters, writing
from muster.local import nats, processes, webhook
from muster.nats import bus, consumers, storage, streams
from muster.nats.auth import permissions
from muster.vocabulary import AlertState
from muster_notifier.delivery.dead_letters import REPLAY
from muster_notifier.routing import notifications

T0 = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
LOCAL = {"reach": "loopback"}


class World:
    """A NATS server, health's bus, a webhook receiver, and a notifier that can be ended."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self.server = nats.NatsServer(directory / "nats")
        self.hook = webhook.WebhookReceiver()
        self.notifier: processes.Process | None = None
        self.bus: bus.Bus | None = None

    async def start(self, **settings: object) -> processes.Process:
        """Start a notifier that does not wait for groups and notifies the receiver `hook`."""
        file = self.directory / "notifier.json"
        receiver = {"name": "hook", "webhook": {"url": f"{self.hook.url}/x", **LOCAL}}
        times = {"group_wait_s": 0, "group_interval_s": 0.2, "repeat_interval_s": 3600}
        file.write_bytes(
            orjson.dumps(
                {"bus": {"url": self.server.url}, "receivers": [receiver], **times, **settings}
            )
        )
        program = processes.Program("notifier", "muster_notifier", ("--config", str(file)))
        self.notifier = processes.Process(program, self.directory / "notifier.log")
        await self.notifier.start()
        return self.notifier

    async def says(self, name: str, state: AlertState, *, node: str = "node-a") -> None:
        """Publish an alert as health does."""
        assert self.bus is not None
        await self.bus.publish(
            vocabulary.AlertChanged(
                node=node,
                at=T0,
                plugin="device-plugin",
                kind=vocabulary.AlertKind.STUCK,
                severity=vocabulary.Severity.CRITICAL,
                state=state,
                fingerprint=f"{name:0>16}",
                summary=f"alert {name}",
                starts_at=T0,
                ends_at=T0 if state is AlertState.RESOLVED else None,
            )
        )

    async def received(self, count: int) -> list[tuple[str, str, int]]:
        """Wait for `count` requests to the receiver; return reason, alerts and status of each."""

        def enough(kept: Sequence[webhook.Received]) -> bool:
            return len(kept) >= count

        kept = await self.hook.wait_for(enough, timeout_s=100)
        bodies = [orjson.loads(received.body)["data"] for received in kept]
        return [
            (body["reason"], " ".join(a["summary"] for a in body["alerts"]), received.status)
            for body, received in zip(bodies, kept, strict=True)
        ]

    async def outcome(self, count: int = 1) -> list[vocabulary.NotificationEvent]:
        """Return the first `count` outcomes that the notifier published."""
        assert self.bus is not None
        values: list[vocabulary.NotificationEvent] = []
        events = consumers.follow(
            self.bus.link,
            streams.NOTIFICATIONS,
            filters=["muster.notification.*.*.notification.*"],
            since=T0 - dt.timedelta(days=9999),
        )
        async for event in events:
            assert isinstance(event.data, vocabulary.NotificationEvent)
            values.append(event.data)
            if len(values) == count:
                break
        return values

    async def get(self, path: str) -> tuple[int, bytes]:
        """Send a GET request to the notifier's HTTP server."""
        assert self.notifier is not None
        async with (
            aiohttp.ClientSession() as http,
            http.get(self.notifier.addresses["http"] + path) as response,
        ):
            return response.status, await response.read()

    async def ready(self) -> None:
        """Return once the notifier reports that it is ready."""
        while (await self.get("/readyz"))[0] != 200:  # polls another process
            await asyncio.sleep(0.02)

    def log(self, event: str) -> list[dict[str, object]]:
        """Return the notifier's log lines of one event."""
        lines = (self.directory / "notifier.log").read_text().splitlines()
        values = [msgspec.json.decode(line, type=dict[str, object]) for line in lines]
        return [line for line in values if line["event"] == event]


@contextlib.asynccontextmanager
async def world(directory: pathlib.Path) -> AsyncIterator[World]:
    made = World(directory)
    async with asyncio.timeout(100), contextlib.AsyncExitStack() as open_:
        await open_.enter_async_context(made.server)
        await open_.enter_async_context(made.hook)
        made.bus = await open_.enter_async_context(
            bus.Bus(made.server.url, producer="services/health", name="health", owner=True)
        )
        try:
            yield made
        finally:
            if made.notifier is not None:
                await made.notifier.end()


def play(story: Callable[[World], Awaitable[None]], directory: pathlib.Path) -> None:
    async def played() -> None:
        async with world(directory) as made:
            await story(made)

    asyncio.run(played())


def test_receivers_are_notified_once_of_an_alert_and_once_of_its_end(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        hook = {"name": "hook", "webhook": {"url": made.hook.url, **LOCAL}}
        await made.start(receivers=[hook, {"name": "console", "console": {}}])
        await made.says("a", AlertState.FIRING)
        assert await made.received(1) == [("first", "alert a", 200)]
        await made.says("a", AlertState.RESOLVED)
        assert await made.received(2) == [
            ("first", "alert a", 200),
            ("all_resolved", "alert a", 200),
        ]
        outcomes = await made.outcome(4)
        assert sorted((o.TYPE, o.receiver, o.reason, o.attempts) for o in outcomes) == [
            ("notification.delivered", "console", "all_resolved", 1),
            ("notification.delivered", "console", "first", 1),
            ("notification.delivered", "hook", "all_resolved", 1),
            ("notification.delivered", "hook", "first", 1),
        ]
        texts = [str(line["text"]).splitlines()[0] for line in made.log("notification_logged")]
        assert texts[0] == "node-a: alert a; new pods fail"
        assert re.fullmatch(r"Resolved after \d+ [a-z ]+\d*.*: node-a: alert a", texts[1])

    play(story, tmp_path)


def test_while_nobody_is_notified_the_log_the_metric_and_the_bus_say_so(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        await made.start(receivers=[{"name": "console", "console": {}}])
        assert made.bus is not None
        announced = consumers.follow(
            made.bus.link, streams.NOTIFICATIONS, filters=[permissions.RECEIVERS], since=T0
        )
        async for event in announced:
            assert isinstance(event.data, vocabulary.ReceiversConfigured)
            assert event.data.receivers == {"console": "console"}
            break
        assert len(made.log("no_receiver_for_people")) == 1
        metrics = (await made.get("/metrics"))[1].decode().splitlines()
        assert 'muster_notifier_receivers{kind="console"} 1.0' in metrics
        assert 'muster_notifier_receivers{kind="slack"} 0.0' in metrics

    play(story, tmp_path)


def test_a_receiver_that_fails_gets_the_same_message_until_it_takes_it(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        made.hook.behave(webhook.Behaviour(status=503, times=2))
        await made.start()
        await made.says("a", AlertState.FIRING)
        assert await made.received(3) == [
            ("first", "alert a", 503),
            ("first", "alert a", 503),
            ("first", "alert a", 200),
        ]
        assert len({r.headers["idempotency-key"] for r in made.hook.received()}) == 1
        (outcome,) = await made.outcome()
        assert (outcome.TYPE, outcome.attempts) == ("notification.delivered", 3)

    play(story, tmp_path)


def test_a_refusal_is_published_as_a_failure_and_decided_again_later(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        made.hook.behave(webhook.Behaviour(status=400, times=1))
        await made.start()
        await made.says("a", AlertState.FIRING)
        assert await made.received(2) == [("first", "alert a", 400), ("first", "alert a", 200)]
        failed, delivered = await made.outcome(2)
        assert isinstance(failed, vocabulary.NotificationFailed)
        assert (failed.error, failed.attempts, failed.firing) == ("HTTP 400", 1, ("0" * 15 + "a",))
        assert isinstance(delivered, vocabulary.NotificationDelivered)
        _, metrics = await made.get("/metrics")
        assert (
            b'muster_notifier_notifications_total{outcome="failed",reason="first",'
            b'receiver="hook"} 1.0' in metrics
        )

    play(story, tmp_path)


def test_a_dead_receiver_delays_no_other(tmp_path: pathlib.Path) -> None:
    async def story(made: World) -> None:
        made.hook.behave(webhook.Behaviour(status=200, times=0))
        async with await asyncio.start_server(_swallow, "127.0.0.1", 0) as silent:
            port = silent.sockets[0].getsockname()[1]
            dead = {
                "name": "dead",
                "webhook": {"url": f"http://127.0.0.1:{port}", "timeout_s": 60, **LOCAL},
            }
            hook = {"name": "hook", "webhook": {"url": made.hook.url, **LOCAL}}
            await made.start(receivers=[dead, hook])
            for index in range(1, 9):
                await made.says(str(index), AlertState.FIRING, node=f"node-{index}")
            assert sorted(await made.received(8)) == [
                ("first", f"alert {index}", 200) for index in range(1, 9)
            ]
            state = orjson.loads((await made.get("/state"))[1])
            sent = {group["receiver"]: 0 for group in state["groups"]}
            for group in state["groups"]:
                sent[group["receiver"]] += bool(group["told_firing"])
            assert sent["dead"] == 0
            assert made.notifier is not None
            await made.notifier.kill()

    play(story, tmp_path)


async def _swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_restart_repeats_nothing_and_loses_nothing(
    how: signal.Signals, tmp_path: pathlib.Path
) -> None:
    async def story(made: World) -> None:
        first = await made.start()
        await made.says("a", AlertState.FIRING, node="node-a")
        await made.says("b", AlertState.FIRING, node="node-b")
        assert sorted(await made.received(2)) == [
            ("first", "alert a", 200),
            ("first", "alert b", 200),
        ]
        await made.outcome(2)
        first.signal(how)
        await first.wait()
        await made.says("c", AlertState.FIRING, node="node-c")
        await made.says("b", AlertState.RESOLVED, node="node-b")
        await made.start()
        assert sorted((await made.received(4))[2:]) == [
            ("all_resolved", "alert b", 200),
            ("first", "alert c", 200),
        ]
        await made.says("a", AlertState.RESOLVED, node="node-a")
        assert (await made.received(5))[4:] == [("all_resolved", "alert a", 200)]
        await made.outcome(5)
        assert made.bus is not None
        entries = await storage.read_all(made.bus.link, streams.LEDGER)
        read = sorted(
            (e.group, e.firing) for e in map(notifications.decode_entry, entries.values())
        )
        assert [(group, bool(firing)) for group, firing in read] == [
            ('{}:{kind="stuck",node="node-a"}', False),
            ('{}:{kind="stuck",node="node-b"}', False),
            ('{}:{kind="stuck",node="node-c"}', True),
        ]

    play(story, tmp_path)


def test_a_message_in_flight_at_sigterm_is_finished_and_never_repeated(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        made.hook.behave(webhook.Behaviour(status=200, times=1, delay_s=0.3))
        notifier = await made.start()
        await made.says("a", AlertState.FIRING)
        await made.received(1)
        notifier.signal(signal.SIGTERM)
        assert await notifier.wait() == 0
        (outcome,) = await made.outcome()
        assert outcome.TYPE == "notification.delivered"
        await made.start()
        await made.says("b", AlertState.FIRING, node="node-b")
        assert await made.received(2) == [("first", "alert a", 200), ("first", "alert b", 200)]

    play(story, tmp_path)


def test_a_ledger_entry_that_cannot_be_read_is_logged_and_stops_nothing(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        assert made.bus is not None
        await storage.put(made.bus.link, streams.LEDGER, "hook.0", b"nonsense")
        await made.start()
        await made.says("a", AlertState.FIRING)
        assert await made.received(1) == [("first", "alert a", 200)]
        assert [line["key"] for line in made.log("ledger_entry_unreadable")] == ["hook.0"]

    play(story, tmp_path)


def test_without_nats_it_starts_says_that_it_is_not_ready_and_heals(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        await made.server.kill()
        await made.start()
        assert await made.get("/readyz") == (503, b"NATS is disconnected\n")
        assert (await made.get("/healthz"))[0] == 200
        await made.server.start()
        await made.ready()
        await made.says("a", AlertState.FIRING)
        assert await made.received(1) == [("first", "alert a", 200)]

    play(story, tmp_path)


def test_a_users_mistake_is_one_line_and_exit_code_2(tmp_path: pathlib.Path) -> None:
    async def ends(text: str) -> tuple[int | None, str]:
        file = tmp_path / "bad.yaml"
        file.write_text(text)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "muster_notifier", "--config", str(file)),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await process.communicate()
        return process.returncode, errors.decode()

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, printed = asyncio.run(ends(f"http: {{port: {port}}}"))
    assert code == 2
    assert printed.startswith("muster-notifier: ")
    assert printed.count("\n") == 1
    assert str(port) in printed
    assert asyncio.run(ends("receivers: [{name: a, webhook: {url: 'http://h:99999/'}}]")) == (
        2,
        "muster-notifier: receiver a: the port of the URL is not a number from 0 to 65535\n",
    )


def test_a_check_finds_what_would_not_start(tmp_path: pathlib.Path) -> None:
    def printed(receivers: str) -> tuple[int, str]:
        file = tmp_path / "checked.yaml"
        file.write_text(f"receivers: [{receivers}]")
        program = (sys.executable, "-m", "muster_notifier", "--config", str(file), "--check")
        done = subprocess.run(program, check=False, capture_output=True, text=True)
        return done.returncode, done.stderr

    assert printed("{name: a, console: {}}") == (0, "")
    assert printed("{name: a, console: {}, templates: {title: $sumary}}") == (
        2,
        "muster-notifier: receiver a: template title: there is no $sumary\n",
    )


def test_what_was_refused_is_a_dead_letter_with_an_alert_and_can_be_replayed(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        made.hook.behave(webhook.Behaviour(status=400, times=1))
        receivers = [
            {"name": "hook", "webhook": {"url": made.hook.url, **LOCAL}},
            {"name": "file", "file": {"path": str(tmp_path / "notifications.jsonl")}},
        ]
        await made.start(receivers=receivers, group_interval_s=3600)
        await made.says("a", AlertState.FIRING)
        await made.outcome(2)
        assert made.bus is not None
        (message,) = await storage.waiting_messages(
            made.bus.link, streams.DEAD_LETTERS, "muster.dlq.notification.hook.>"
        )
        subject, body, headers, _ = message
        sent = notifications.decode(body)
        assert (sent.receiver, sent.firing_ids) == ("hook", ("0" * 15 + "a",))
        assert (headers["Muster-Error"], headers["Muster-Attempts"]) == ("HTTP 400", "1")
        await storage.enqueue(
            made.bus.link, "muster.outbox.hook.replay-1", body, key="1", headers={REPLAY: "1"}
        )
        await storage.remove_waiting(made.bus.link, streams.DEAD_LETTERS, subject)
        assert [what[2] for what in await made.received(2)] == [400, 200]
        keys = {received.headers["idempotency-key"] for received in made.hook.received()}
        assert keys == {sent.id}

    play(story, tmp_path)


def test_a_message_that_is_delivered_later_removes_its_dead_letter(tmp_path: pathlib.Path) -> None:
    async def story(made: World) -> None:
        made.hook.behave(webhook.Behaviour(status=401, times=2))
        await made.start()
        await made.says("a", AlertState.FIRING)
        await made.received(3)
        failed, _, delivered = await made.outcome(3)
        assert (failed.TYPE, delivered.TYPE) == ("notification.failed", "notification.delivered")
        assert await dead(made) == []
        assert len({r.headers["idempotency-key"] for r in made.hook.received()}) == 1

    play(story, tmp_path)


def test_a_dead_letter_that_is_sent_again_after_its_end_has_another_key(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        assert made.bus is not None
        made.hook.behave(webhook.Behaviour(status=401, times=1_000))
        await made.start()
        await made.says("a", AlertState.FIRING)
        (failed, *_) = await made.outcome()
        await made.says("a", AlertState.RESOLVED)
        while b"stuck" in (await made.get("/state"))[1]:  # polls another process
            await asyncio.sleep(0.02)
        made.hook.behave(webhook.Behaviour(status=200, times=1_000))
        (letter,), _ = await writing.read_dead_letters(made.bus.link)
        await writing.send_again(made.bus.link, letter)

        def is_accepted(kept: Sequence[webhook.Received]) -> bool:
            return kept[-1].status == 200

        *before, last = await made.hook.wait_for(is_accepted, timeout_s=100)
        assert failed.TYPE == "notification.failed"
        assert orjson.loads(last.body)["data"]["reason"] == "all_resolved"
        keys = {received.headers["idempotency-key"] for received in before}
        assert [f"{key}-resolved" for key in keys] == [last.headers["idempotency-key"]]

    play(story, tmp_path)


def test_a_dead_letter_that_is_sent_again_adds_nothing_to_what_its_group_sends(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        assert made.bus is not None
        made.hook.behave(webhook.Behaviour(status=401, times=1))
        await made.start(group_interval_s=3600, resolve_wait_s=0)
        await made.says("a", AlertState.FIRING)
        await made.outcome()
        (letter,), _ = await writing.read_dead_letters(made.bus.link)
        await writing.send_again(made.bus.link, letter)
        await made.outcome(2)
        await replay(made, letter)
        await made.says("a", AlertState.RESOLVED)
        await replay(made, letter)
        assert await made.received(3) == [
            ("first", "alert a", 401),
            ("first", "alert a", 200),
            ("all_resolved", "alert a", 200),
        ]
        first, same, end = (r.headers["idempotency-key"] for r in made.hook.received())
        assert (first == same, same == end) == (True, False)
        assert await dead(made) == []

    play(story, tmp_path)


async def replay(made: World, letter: dead_letters.DeadLetter) -> None:
    """Send a dead letter again until the notifier has left it to its group or found it outdated.

    A letter that arrives while the same one is being delivered is dropped, without a log line.
    """
    assert made.bus is not None
    link, again = made.bus.link, dead_letters.again(letter)

    def decided() -> int:
        return len(made.log("replay_sent_as_group") + made.log("replay_outdated"))

    before = decided()
    while decided() == before:
        is_taken = not await storage.waiting_subjects(link, streams.OUTBOX, again.subject)
        if is_taken and decided() == before:
            key = uuid.uuid4().hex
            await storage.enqueue(link, again.subject, letter.body, key=key, headers=again.headers)
        await asyncio.sleep(0.02)  # reads the log of another process


async def dead(made: World) -> list[str]:
    """Return the subjects of the dead letters."""
    assert made.bus is not None
    return await storage.waiting_subjects(made.bus.link, streams.DEAD_LETTERS, "muster.dlq.>")


def test_a_notification_for_a_receiver_that_is_no_longer_configured_is_a_dead_letter(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        made.hook.behave(webhook.Behaviour(status=503, times=1000))
        notifier = await made.start()
        await made.says("a", AlertState.FIRING)
        await made.received(1)
        await notifier.end()
        await made.start(receivers=[{"name": "other", "console": {}}])
        await made.ready()
        assert made.bus is not None
        messages = await storage.waiting_messages(
            made.bus.link, streams.DEAD_LETTERS, "muster.dlq.notification.hook.>"
        )
        assert [headers["Muster-Error"] for _, _, headers, _ in messages] == [
            "a receiver with this name is no longer configured"
        ]
        assert (
            await storage.waiting_subjects(made.bus.link, streams.OUTBOX, "muster.outbox.hook.>")
            == []
        )

    play(story, tmp_path)


def test_messages_for_nobody_do_not_stay_in_the_outbox(tmp_path: pathlib.Path) -> None:
    async def story(made: World) -> None:
        assert made.bus is not None
        for number in range(150):
            subject = f"muster.outbox.nobody-{number % 3}.{number}"
            await storage.enqueue(made.bus.link, subject, b"%d" % number, key=str(number))
        await made.start(receivers=[{"name": "other", "console": {}}])
        await made.ready()
        waiting = await storage.waiting_subjects(made.bus.link, streams.OUTBOX, "muster.outbox.>")
        # the alert about dead letters may be on its way to the receiver
        assert [subject for subject in waiting if "nobody" in subject] == []
        buried = await storage.waiting_subjects(
            made.bus.link, streams.DEAD_LETTERS, "muster.dlq.notification.>"
        )
        assert len(buried) == 100

    play(story, tmp_path)


def test_messages_stay_in_the_outbox_while_the_directory_of_receivers_cannot_be_read(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        assert made.bus is not None
        await storage.enqueue(made.bus.link, "muster.outbox.ops.1", b"1", key="1")
        more = tmp_path / "receivers"
        more.touch()
        await made.start(
            receivers=[{"name": "other", "console": {}}], receivers_directory=str(more)
        )
        await made.ready()
        (line,) = made.log("receiver_unusable")
        assert "Not a directory" in str(line["error"])
        waiting = await storage.waiting_subjects(made.bus.link, streams.OUTBOX, "muster.outbox.>")
        assert waiting == ["muster.outbox.ops.1"]

    play(story, tmp_path)


def mount(directory: pathlib.Path, version: int, **texts: str) -> None:
    """Give a directory this content as the kubelet does (pkg/volume/util/atomic_writer.go, 1.37).

    The files are links through `..data`, a link that is replaced in one step.
    """
    content = directory / f"..{version}"
    content.mkdir(parents=True)
    for name, text in texts.items():
        (content / f"{name}.yaml").write_text(text)
    (directory / "..data_tmp").symlink_to(content.name)
    (directory / "..data_tmp").rename(directory / "..data")
    for name in texts:
        link = directory / f"{name}.yaml"
        if not link.is_symlink():
            link.symlink_to(f"..data/{name}.yaml")


def test_receivers_of_the_directory_come_and_go_without_a_restart_and_lose_nothing(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        more = tmp_path / "receivers"
        right = f"webhook: {{url: '{made.hook.url}', reach: loopback}}\n"
        mount(more, 1, ops="webhok: {}")
        notifier = await made.start(
            receivers=[{"name": "console", "console": {}}], receivers_directory=str(more)
        )
        assert made.bus is not None
        announced = consumers.follow(
            made.bus.link, streams.NOTIFICATIONS, filters=[permissions.RECEIVERS], since=T0
        )

        async def until(receivers: dict[str, str], *refused: str) -> None:
            async for event in announced:
                assert isinstance(event.data, vocabulary.ReceiversConfigured)
                if (event.data.receivers, event.data.refused) == (receivers, refused):
                    return

        console, ops = {"console": "console"}, {"ops": "webhook"}
        await until(console, "ops")
        (line,) = made.log("receiver_unusable")
        assert line["error"] == "ops: webhok: unknown key (value {}); did you mean webhook?"
        mount(more, 2, ops=right)
        await until(console | ops)
        await made.says("a", AlertState.FIRING)
        await made.received(1)
        made.hook.behave(webhook.Behaviour(status=503, times=1000))
        await made.says("a", AlertState.RESOLVED)
        await made.received(2)
        mount(more, 3, ops="{}")
        await until(console, "ops")
        waiting = "muster.outbox.ops.>"
        assert await storage.waiting_subjects(made.bus.link, streams.OUTBOX, waiting)
        made.hook.behave(webhook.Behaviour())
        mount(more, 4, ops=right)

        def is_resolved(kept: Sequence[webhook.Received]) -> bool:
            return kept[-1].status == 200 and "all_resolved" in kept[-1].body

        await made.hook.wait_for(is_resolved, timeout_s=90)
        assert notifier.is_running
        dead = await storage.waiting_subjects(made.bus.link, streams.DEAD_LETTERS, "muster.dlq.>")
        assert dead == []

    play(story, tmp_path)


def test_a_silence_in_the_bucket_mutes_what_it_matches(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        assert made.bus is not None
        now = dt.datetime.now(dt.UTC)
        quiet = matching.Silence(
            id="s1",
            matchers=("node=node-a",),
            starts_at=now,
            ends_at=now + dt.timedelta(hours=1),
            author="ann",
            comment="x",
        )
        await storage.put(made.bus.link, streams.SILENCES, "s1", matching.encode_silence(quiet))
        await made.start()
        await made.says("a", AlertState.FIRING, node="node-a")
        await made.says("b", AlertState.FIRING, node="node-b")
        assert await made.received(1) == [("first", "alert b", 200)]
        await storage.put(made.bus.link, streams.SILENCES, "s1", b"")
        assert (await made.received(2))[1:] == [("first", "alert a", 200)]

    play(story, tmp_path)


def test_silence_of_health_raises_an_alert_and_its_return_resolves_it(
    tmp_path: pathlib.Path,
) -> None:
    async def story(made: World) -> None:
        await made.start(watchdog={"patience_s": 0.3})
        (sent,) = await made.received(1)
        assert sent == (
            "first",
            "the health service is silent: plugins are not monitored",
            200,
        )
        assert made.bus is not None
        tick = vocabulary.WatchdogTicked(
            node=vocabulary.FLEET, at=T0, leader=3, holder="health-0", interval_s=60
        )
        await made.bus.publish(tick)
        assert (await made.received(2))[1][:2] == ("all_resolved", "the health service is back")

    play(story, tmp_path)
