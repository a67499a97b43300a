"""On a real nats-server only the leader tells, and only for as long as it leads."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import prometheus_client
from structlog.testing import capture_logs

from muster import vocabulary
from muster.leadership import Leadership
from muster.local import nats
from muster.nats import buckets, bus, consumers, lock, streams
from muster_health.bus import verdict_log, watchdog

Story = Callable[[nats.NatsServer, bus.Bus], Awaitable[None]]


def play(tmp_path: Path, story: Story) -> None:
    async def played() -> None:
        async with (
            asyncio.timeout(100),
            nats.NatsServer(tmp_path / "nats") as server,
            bus.Bus(server.url, producer="tests", name="test", owner=True) as on,
        ):
            await on.link.client()
            await story(server, on)

    asyncio.run(played())


def leading(on: bus.Bus, name: str) -> lock.Lock:
    return lock.Lock(
        lock.Key(on.link, streams.LEADER, "test"),
        us=lock.Holder(name=name, host=name, space="1", pid=1),
        timing=lock.Timing(ttl_s=2, renew_s=0.5, margin_s=0.5),
        on_change=verdict_log.log_leadership,
    )


def tick(revision: int) -> vocabulary.WatchdogTicked:
    return vocabulary.WatchdogTicked(
        node=vocabulary.FLEET, at=datetime.now(UTC), leader=revision, holder="a", interval_s=10
    )


def test_who_leads_is_told_as_it_changes_and_not_who_leads_instead() -> None:
    nobody, other, us = (
        Leadership(leader=holder, term=revision)
        for holder, revision in (("", None), ("b", None), ("a", 7))
    )
    with capture_logs() as lines:
        for was, now in ((nobody, other), (other, us), (us, other)):
            verdict_log.log_leadership(was, now)
    assert lines == [
        {"event": "leadership_won", "log_level": "info", "revision": 7},
        {"event": "leadership_lost", "log_level": "warning", "revision": 7, "holder": "b"},
    ]
    assert prometheus_client.REGISTRY.get_sample_value("muster_health_leads") == 0


def test_a_leader_ticks_where_alerts_go_and_nobody_else_does(tmp_path: Path) -> None:
    async def story(_: nats.NatsServer, on: bus.Bus) -> None:
        async def publish(event: vocabulary.WatchdogTicked, still: Callable[[], bool]) -> None:
            await on.publish(event, is_leader=still)

        async with leading(on, "a") as a, leading(on, "b") as b:
            ticking = [
                asyncio.create_task(watchdog.tick(one, publish, holder=name, interval_s=0.1))
                for one, name in ((a, "a"), (b, "b"))
            ]
            heard: list[vocabulary.Event] = []
            since = datetime.now(UTC) - timedelta(minutes=1)
            events = consumers.follow(
                on.link, streams.ALERTS, filters=["muster.sys.>"], since=since
            )
            async with contextlib.aclosing(events):  # type: ignore[type-var]
                async for event in events:
                    heard.append(event.data)
                    if len(heard) == 3:
                        break
            for task in ticking:
                task.cancel()
            await asyncio.gather(*ticking, return_exceptions=True)
            (token,) = {one.term() for one in (a, b)} - {None}
        holders = {(e.leader, e.holder) for e in heard if isinstance(e, vocabulary.WatchdogTicked)}
        assert len(holders) == 1
        assert {leading for leading, _ in holders} == {token}

    play(tmp_path, story)


def test_what_is_no_longer_ours_is_not_published_when_the_server_is_back(tmp_path: Path) -> None:
    async def story(server: nats.NatsServer, on: bus.Bus) -> None:
        leads = True
        await server.kill()
        publishing = asyncio.create_task(on.publish(tick(1), is_leader=lambda: leads))
        writing = asyncio.create_task(
            buckets.remember(on.link, streams.STATE, "k", b"v", is_leader=lambda: leads)
        )
        await asyncio.sleep(0.1)
        leads = False
        await server.start()
        assert await publishing is False
        assert await writing is False
        assert await on.publish(tick(2), is_leader=lambda: True)
        kept = await consumers.newest(on.link, streams.ALERTS, "muster.sys.>")
        assert [e.data.leader for e in kept if isinstance(e.data, vocabulary.WatchdogTicked)] == [2]
        assert await buckets.recall(on.link, streams.STATE) == {}

    play(tmp_path, story)
