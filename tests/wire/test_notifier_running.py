"""Commands that ask the running notifier to send a test message or to explain an alert."""

import asyncio
import contextlib
import datetime as dt
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import orjson
import pytest

from muster import codec, vocabulary
from muster.cli import event_texts
from muster.local import processes, webhook
from muster.nats import bus, consumers, storage, streams
from muster_notifier import running, sample_message
from muster_notifier.receivers import results
from muster_notifier.routing import notifications
from muster_notifier.sample_message import Attempt
from tests.worlds import muster_in_cluster
from tests.worlds.muster_in_cluster import World, command, rights

CONTEXT: Final = ("--context", "muster")
T0: Final = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
ADMIN: Final = "admin with Secret muster-nats-admin"


@contextlib.asynccontextmanager
async def notifier(
    where: Path, hook: webhook.WebhookReceiver
) -> AsyncIterator[tuple[World, bus.Bus, str]]:
    """Run a cluster with NATS and a notifier, whose receivers all send to `hook`."""
    more = where / "receivers"
    more.mkdir()
    about = f"{{url: '{hook.url}', reach: loopback}}"
    for name in ("ops", "gone", "unwell"):
        (more / f"{name}.yaml").write_text(f"webhook: {about}")
    (more / "bad.yaml").write_text("{")
    (more / "key").write_text("R0")
    pager = f"{{url: '{hook.url}', reach: loopback, routing_key_from: {{file: key}}}}"
    (more / "pager.yaml").write_text(f"pagerduty: {pager}")
    async with (
        muster_in_cluster.empty(where / "cluster") as world,
        muster_in_cluster.passwords(world, where) as url,
        muster_in_cluster.connected(url) as link,
    ):
        await world.pod("muster-notifier", 0, 8080, hook.url)
        address = url.replace("//admin:", "//notifier:")
        settings = {"bus": {"url": address}, "receivers_directory": str(more)}
        file = where / "notifier.json"
        file.write_bytes(orjson.dumps(settings))
        program = processes.Program("notifier", "muster_notifier", ("--config", str(file)))
        process = processes.Process(program, where / "notifier.log")
        await process.start()
        try:
            async for event in consumers.follow(
                link.link, streams.NOTIFICATIONS, filters=["muster.>"], since=T0
            ):
                assert event.data.TYPE == "receivers.configured"
                break
            yield world, link, url
        finally:
            await process.end()


def test_the_running_notifier_sends_the_test_message_and_its_answer_is_printed(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with (
            asyncio.timeout(170),
            webhook.WebhookReceiver() as hook,
            notifier(tmp_path, hook) as (world, link, url),
        ):
            code, out, errors = await command(world, "notify", "test", "ops", *CONTEXT)
            assert (code, out) == (0, "answered: accepted: HTTP 200\n")
            assert errors == [rights(world, "notify", ADMIN)]
            (sent,) = hook.received()
            assert orjson.loads(sent.body)["data"]["test"] is True
            names = "console, gone, ops, pager, unwell"
            for name, problem in (
                ("none", f"no receiver is called none; the receivers are: {names}"),
                ("bad", "the notifier ignores bad; its log explains why"),
            ):
                code, out, errors = await command(world, "notify", "test", name, *CONTEXT)
                assert (code, out, errors[-1]) == (1, "", f"muster notify: {problem}")
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("NATS_URL", url)
                await others(hook)
            dead = await storage.waiting_subjects(
                link.link, streams.DEAD_LETTERS, "muster.dlq.notification.>"
            )
            assert dead == []

    asyncio.run(story())


async def others(hook: webhook.WebhookReceiver) -> None:
    """Test receivers that fail, that are asked too often, or that open incidents."""

    async def tested(name: str, second: int) -> list[str]:
        attempts: list[Attempt] = await running.test(name, at=T0 + dt.timedelta(seconds=second))
        return [attempt.answer for attempt in attempts]

    # different receivers, since the notifier sends one test message in 5 s to each
    for name, status, answer in (
        ("gone", 404, "answered: refused (not_found): HTTP 404"),
        ("unwell", 503, "answered: temporary (server_error): HTTP 503"),
    ):
        hook.behave(webhook.Behaviour(status=status))
        assert await tested(name, 10) == [answer]
    with pytest.raises(running.Unusable, match="unwell has just been tested: wait 5 s"):
        await tested("unwell", 14)
    count = len(hook.received())
    hook.behave(webhook.Behaviour())
    assert await tested("pager", 0) == ["answered: accepted: HTTP 200"] * 2
    actions = [orjson.loads(each.body)["event_action"] for each in hook.received()[count:]]
    assert actions == ["trigger", "resolve"]


def test_what_the_notifier_itself_refuses_to_send_has_no_answer() -> None:
    outcome = results.Outcome.RATE_LIMITED
    detail = "not sent: the receiver has just been tested; wait 5 s"
    answer = Attempt([], outcome.kind, outcome, detail, None).answer
    expected = "not sent: temporary (rate_limited): the receiver has just been tested; wait 5 s"
    assert answer == expected


def test_an_event_of_a_test_says_that_it_is_one() -> None:
    sent: list[notifications.Notification] = []

    async def deliver(notification: notifications.Notification) -> Attempt:
        sent.append(notification)
        return Attempt([], results.Kind.REFUSED, results.Outcome.NOT_FOUND, "HTTP 404", None)

    asyncio.run(sample_message.send_by(deliver, "ops", "slack", at=T0))
    failed = vocabulary.NotificationFailed(
        node=vocabulary.FLEET,
        at=T0,
        receiver="ops",
        group=sent[0].group,
        reason=sent[0].reason,
        firing=sent[0].firing_ids,
        resolved=(),
        attempts=1,
        outcome="not_found",
        error="HTTP 404",
    )
    event = codec.CloudEvent(
        id="1",
        source="/services/notifier",
        type=failed.TYPE,
        time=T0,
        instance="i",
        sequence=1,
        boot="",
        data=failed,
    )
    text = "notification.failed ops: test message HTTP 404"
    assert event_texts.change_text(event) == text


def test_the_message_that_resolves_a_test_is_no_repeat_of_the_first() -> None:
    sent: list[notifications.Notification] = []

    async def deliver(notification: notifications.Notification) -> Attempt:
        sent.append(notification)
        return Attempt([], results.Kind.ACCEPTED, results.Outcome.ACCEPTED, "HTTP 200", None)

    asyncio.run(sample_message.send_by(deliver, "pager", "pagerduty", at=T0))
    first, second = sent
    assert (first.state, second.state) == ("firing", "resolved")
    assert first.group == second.group
    assert second.id == f"{first.id}-resolved"


def test_an_alert_is_explained_with_the_settings_and_receivers_of_the_running_notifier(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with (
            asyncio.timeout(170),
            webhook.WebhookReceiver() as hook,
            notifier(tmp_path, hook) as (world, _, _),
        ):
            text = 'routes: [{matchers: [kind="stuck"], receivers: [console]}]\n'
            name = await muster_in_cluster.notifier_settings(world, text)
            explain = ("notify", "explain", *CONTEXT, "--labels")
            code, out, errors = await command(world, *explain, "kind=missing")
            assert (code, errors) == (0, [rights(world, "notify", ADMIN)])
            assert out.splitlines()[-1] == "notified   gone, ops, pager, unwell"
            code, out, _ = await command(world, *explain, "kind=stuck")
            log_alone = "notified   nobody: its only receiver is the notifier's log"
            assert (code, out.splitlines()[-1]) == (1, log_alone)
            world.deny("get", "configmaps")
            code, _, errors = await command(world, *explain, "kind=stuck")
            missing = f"missing permission: get the ConfigMap {name} in the namespace muster ("
            assert (code, errors[-1].startswith(f"muster notify: {missing}")) == (1, True)

    asyncio.run(story())
